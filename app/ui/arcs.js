// The graph as arcs between the lines of a list of tokens: of one query, or of all.

import { HIT, MISSED, NAMES, NONE, SPARE, kindAt, named, weightAt } from "./graph.js";
import { svg, svgMark } from "./draw.js";

const LINE = 20, TOP = 14, NAME = 112, AXIS = 132;
const MOST = 6000; // arcs of all queries; beyond, the spare ones are left out, then the weakest

export function drawArcs(place, graph, tokens, shown, query, all) {
  const width = Math.max(240, place.parentElement.clientWidth - 4);
  const height = 2 * TOP + LINE * (graph.n - 1);
  const arcs = all ? allArcs(graph, shown) : arcsOf(graph, shown, query);
  const shapes = arcs.map((arc) => shapeOf(arc, width, Math.max(1, graph.n - 1), all && arc.i !== query));
  const labels = tokens.pieces.map((piece, at) => label(graph, shown, piece, query, at));
  place.setAttribute("viewBox", `0 0 ${width} ${height}`);
  place.setAttribute("width", width);
  place.setAttribute("height", height);
  place.replaceChildren(svg("g", { class: "shapes" }, ...shapes), svg("g", { class: "labels" }, ...labels.flat()));
  return all ? `${arcs.length} edges of all queries` : `what query ${named(tokens, query)} reads`;
}

export function placeOf(at) {
  return TOP + LINE * at;
}

function arcsOf(graph, shown, i) {
  const arcs = [];
  for (let j = 0; j < graph.n; j++) {
    const kind = kindAt(graph, i, j);
    if (kind !== NONE && shown[NAMES[kind]]) arcs.push({ i, j, kind, weight: weightAt(graph, i, j) });
  }
  return arcs.sort((a, b) => a.kind - b.kind); // gold ones lie above
}

function allArcs(graph, shown) {
  let arcs = [];
  for (let i = 0; i < graph.n; i++) arcs = arcs.concat(arcsOf(graph, shown, i));
  if (arcs.length > MOST) arcs = arcs.filter((arc) => arc.kind !== SPARE);
  return arcs.sort((a, b) => b.weight - a.weight).slice(0, MOST).reverse();
}

// The farther apart, the wider; one to itself is a small loop.
function shapeOf({ i, j, kind, weight }, width, span, faint) {
  const [from, to] = [placeOf(i), placeOf(j)];
  const reach = 14 + (width - AXIS - 44) * Math.sqrt(Math.abs(i - j) / span);
  const [high, low] = i === j ? [from - 5, from + 5] : [from, to];
  const thick = kind === HIT ? 0.8 + 3.2 * Math.sqrt(weight) : kind === MISSED ? 1.6 : 1;
  return svg("path", {
    class: `arc ${NAMES[kind]}${faint ? " faint" : ""}`,
    d: `M${AXIS + 8} ${high}C${AXIS + 8 + reach * 1.3} ${high} ${AXIS + 8 + reach * 1.3} ${low} ${AXIS + 8} ${low}`,
    "stroke-width": thick.toFixed(2),
  });
}

function label(graph, shown, piece, query, at) {
  const y = placeOf(at), kind = kindAt(graph, query, at);
  const short = Array.from(piece).length > 14 ? `${Array.from(piece).slice(0, 13).join("")}…` : piece;
  const text = svg("text", { class: at === query ? "query" : "", x: NAME, y: y + 4, "text-anchor": "end" }, short);
  const parts = [text];
  if (at === query) parts.push(svg("path", { class: "pointer", d: `M${NAME + 3} ${y - 4}l6 4l-6 4z` }));
  if (kind !== NONE && shown[NAMES[kind]]) parts.push(svgMark(kind, AXIS, y, kind === HIT ? 3 + 2.5 * weightAt(graph, query, at) : 4));
  return parts;
}
