// Which tokens share a bucket: queries beside keys, since a bucket of queries alone predicts nothing.

import { html } from "./draw.js";

// clusters: {of, served, buckets, queries: [[bucket …] per token], keys: likewise}
export function drawClusters(place, clusters, tokens, query) {
  const own = new Set(clusters.queries[query] ?? []);
  const groups = new Map();
  for (const role of ["queries", "keys"]) {
    clusters[role].forEach((buckets, at) => {
      for (const bucket of buckets) {
        if (!groups.has(bucket)) groups.set(bucket, { queries: [], keys: [] });
        groups.get(bucket)[role].push(at);
      }
    });
  }
  const sorted = [...groups.entries()].sort((a, b) => own.has(b[0]) - own.has(a[0]) || a[0] - b[0]);
  place.replaceChildren(...sorted.map(([bucket, group]) => card(bucket, group, tokens, own.has(bucket), query)));
  const mixed = sorted.filter(([, group]) => group.queries.length && group.keys.length).length;
  const whose = clusters.served ? "the served predictor" : `the artifact’s set ${clusters.of}, which is not what serves`;
  return `Buckets of ${whose}: ${sorted.length} of ${clusters.buckets} hold tokens of this text, ${mixed} of them both queries and keys.`;
}

function card(bucket, group, tokens, own, query) {
  const title = html("h4", {}, `Cluster ${bucket}`);
  if (own) title.append(html("span", { class: "tag" }, "the query’s"));
  return html("article", { class: own ? "cluster own" : "cluster" }, title, list("Queries", group.queries, tokens, query), list("Keys", group.keys, tokens, null));
}

function list(title, places, tokens, query) {
  const words = places.map((at) => html("span", { class: at === query ? "word query" : "word" }, tokens.pieces[at]));
  return html("p", {}, html("b", {}, `${title} `), ...(words.length ? words : ["none"]));
}
