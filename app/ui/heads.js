// Every head of the layer as a small picture, to choose from.

import { HIT, MISSED, SPARE, classify, number, share } from "./graph.js";
import { html, palette } from "./draw.js";

export function drawHeads(place, heads, n, set, chosen, choose) {
  place.parentElement.hidden = heads.length < 2;
  const colours = { [HIT]: rgb("hit"), [MISSED]: rgb("missed"), [SPARE]: rgb("spare") };
  place.replaceChildren(...heads.map((head) => {
    const canvas = html("canvas", { width: n, height: n, "aria-hidden": "true" });
    thumbnail(canvas, classify(head, set, n), colours);
    const recall = (head.measures[set] ?? head.measures.plan).recall;
    const button = html("button", { type: "button", class: "head", "aria-pressed": head.head === chosen,
      "aria-label": `Head ${head.head}, recall ${share(recall)}` },
    canvas, html("span", {}, `${head.head}`, html("small", {}, ` ${number(recall)}`)));
    button.addEventListener("click", () => choose(head.head));
    return button;
  }));
}

export function markHead(place, heads, chosen) {
  heads.forEach((head, at) => place.children[at]?.setAttribute("aria-pressed", head.head === chosen));
}

function rgb(name) {
  const value = palette()[name];
  return [1, 3, 5].map((at) => parseInt(value.slice(at, at + 2), 16));
}

function thumbnail(canvas, graph, colours) {
  const ctx = canvas.getContext("2d"), image = ctx.createImageData(graph.n, graph.n);
  graph.kinds.forEach((kind, at) => {
    if (!kind) return;
    image.data.set([...colours[kind], kind === SPARE ? 90 : 255], 4 * at);
  });
  ctx.putImageData(image, 0, 0);
}
