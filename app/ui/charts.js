// Sparsity and recall of every layer as bars, and the front of what the artifact can trade with its working point.

import { fixed, number, share } from "./graph.js";
import { html, svg } from "./draw.js";

const COLUMNS = [["sparsity", "Sparsity"], ["recall", "Recall"]];

export function drawLayers(table, calibration, live) {
  const head = html("tr", {}, html("th", { scope: "col" }, "Layer"), html("th", { scope: "col" }, "Measured"));
  for (const [, title] of COLUMNS) head.append(html("th", { scope: "col" }, title));
  const lists = [["calibration", calibration?.layers ?? []], ["live", live?.layers ?? []]].filter((one) => one[1].length);
  const body = html("tbody", {});
  const count = Math.max(0, ...lists.map((one) => one[1].length));
  for (let layer = 0; layer < count; layer++) {
    lists.forEach(([source, rows], place) => {
      const row = html("tr", { class: source });
      if (place === 0) row.append(html("th", { scope: "row", rowspan: lists.length }, String(rows[layer].layer ?? layer)));
      row.append(html("td", { class: "source" }, source));
      for (const [name] of COLUMNS) row.append(bar(rows[layer]?.[name]));
      body.append(row);
    });
  }
  table.replaceChildren(html("caption", { class: "hidden" }, "Sparsity and recall of every layer"), html("thead", {}, head), body);
  return count;
}

function bar(value) {
  const fill = html("span", { class: "fill" });
  fill.style.width = `${100 * Math.min(1, Math.max(0, value ?? 0))}%`;
  const track = html("span", { class: "track", "aria-hidden": "true" }, fill);
  return html("td", {}, html("span", { class: "bar" }, track, html("span", { class: "value" }, fixed(value))));
}

const HEIGHT = 300, LEFT = 66, BOTTOM = 44, RIGHT = 20, ABOVE = 16;

// points: of the artifact's card, [{sparsity, recall, density, …}]; served: the one that answers now; live: of audits.
export function drawFront(place, points, served, live, chosen) {
  const measured = (point) => Number.isFinite(point?.sparsity) && Number.isFinite(point?.recall);
  const known = points.filter(measured);
  [served, live] = [served, live].map((point) => (measured(point) ? point : null));
  const all = [...known, served, live].filter(Boolean);
  if (!all.length) {
    place.replaceChildren();
    return "The artifact’s card holds no calibration.";
  }
  const width = Math.max(260, Math.min(560, place.parentElement.clientWidth - 40));
  const low = (name) => Math.max(0, Math.min(0.9, Math.floor(10 * Math.min(...all.map((point) => point[name])) - 0.5) / 10));
  const [x0, y0] = [low("sparsity"), low("recall")];
  const x = (value) => LEFT + ((width - LEFT - RIGHT) * (value - x0)) / (1 - x0);
  const y = (value) => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - ABOVE) * (value - y0)) / (1 - y0);
  const best = front(known);
  const shapes = [...axes(x, y, x0, y0)];
  if (best.length > 1) shapes.push(svg("path", { class: "front", d: "M" + best.map((p) => `${x(p.sparsity)} ${y(p.recall)}`).join("L") }));
  for (const point of known) shapes.push(dot(point, x, y, point.density === chosen));
  if (served) shapes.push(...workingPoint(served, x(served.sparsity), y(served.recall), width));
  if (live) shapes.push(livePoint(live, x(live.sparsity), y(live.recall)));
  place.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  place.replaceChildren(...shapes);
  return told(known, best, served, live);
}

// Points that no other one beats in both measures, from dense to sparse.
export function front(points) {
  const beaten = (one) => points.some((other) => other.sparsity >= one.sparsity && other.recall >= one.recall
    && (other.sparsity > one.sparsity || other.recall > one.recall));
  return points.filter((point) => !beaten(point)).sort((a, b) => a.sparsity - b.sparsity);
}

function told(known, best, served, live) {
  const parts = [];
  if (served) parts.push(`Served (diamond): sparsity ${share(served.sparsity)}, recall ${share(served.recall)}, on held-out text.`);
  if (known.length > 1) parts.push(`Dots: the ${known.length} points that it can be served at, ${best.length} of them on the front.`);
  if (live) parts.push(`Live (triangle): sparsity ${share(live.sparsity)}, recall ${share(live.recall)}.`);
  return parts.join(" ");
}

function axes(x, y, x0, y0) {
  const parts = [];
  for (const [start, along] of [[x0, true], [y0, false]]) {
    const step = 1 - start > 0.45 ? 0.2 : 0.1;
    for (let value = Math.ceil(start / step - 1e-9) * step; value <= 1.0001; value += step) {
      const text = `${Math.round(100 * value)} %`;
      parts.push(along
        ? svg("path", { class: "grid", d: `M${x(value)} ${y(y0)}V${y(1)}` })
        : svg("path", { class: "grid", d: `M${x(x0)} ${y(value)}H${x(1)}` }));
      parts.push(along
        ? svg("text", { x: x(value), y: y(y0) + 17, "text-anchor": "middle" }, text)
        : svg("text", { x: x(x0) - 8, y: y(value) + 4, "text-anchor": "end" }, text));
    }
  }
  parts.push(svg("text", { class: "axis", x: (x(x0) + x(1)) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, "sparsity →"));
  const [cx, cy] = [14, (y(y0) + y(1)) / 2];
  parts.push(svg("text", { class: "axis", x: cx, y: cy, "text-anchor": "middle", transform: `rotate(-90 ${cx} ${cy})` }, "recall →"));
  return parts;
}

function dot(point, x, y, chosen) {
  const title = svg("title", {}, `density ${number(point.density)}: sparsity ${number(point.sparsity)}, recall ${number(point.recall)}`);
  return svg("circle", { class: chosen ? "point chosen" : "point", cx: x(point.sparsity), cy: y(point.recall), r: chosen ? 7 : 4 }, title);
}

function workingPoint(point, x, y, width) {
  const left = x > width * 0.55;
  return [
    svg("path", { class: "served-point", d: `M${x} ${y - 9}l9 9l-9 9l-9 -9z` }),
    svg("text", { class: "strong", x: x + (left ? -14 : 14), y: y + 20, "text-anchor": left ? "end" : "start" },
      `served: ${number(point.sparsity)} / ${number(point.recall)}`),
  ];
}

function livePoint(point, x, y) {
  return svg("path", { class: "live-point", d: `M${x} ${y - 8}l7.5 13h-15z` }, svg("title", {}, "live, from audited rows"));
}
