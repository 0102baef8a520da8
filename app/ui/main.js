// The page: asks the service, keeps what is selected, and has the parts drawn.

import { ServiceError, rememberKey, request } from "./api.js";
import { drawArcs, placeOf } from "./arcs.js";
import { drawFront, drawLayers } from "./charts.js";
import { drawClusters } from "./clusters.js";
import { html } from "./draw.js";
import { picture, save } from "./export.js";
import { busiest, classify, number, sentence, share, strongest } from "./graph.js";
import { drawHeads, markHead } from "./heads.js";
import { Live } from "./live.js";
import { Matrix } from "./matrix.js";
import { Tokens } from "./tokens.js";

const $ = (id) => document.getElementById(id);
const WHOLE_LAYER = 1200; // characters; of longer texts one head is asked for at a time
const MEASURES = [["sparsity", "Sparsity"], ["recall", "Recall"], ["precision", "Precision"], ["mass", "Attention mass"],
  ["exact_rows", "Exact rows"], ["computed_density", "Computed density"]];
const KINDS = ["hit", "missed", "spare"];

const state = { raw: "", answer: null, head: null, graph: null, query: -1, key: 0, quality: null, running: null };
const matrix = new Matrix({ canvas: $("matrix"), cursor: $("cursor"), scroller: $("matrix-scroll") }, choose, hover);
const tokens = new Tokens($("tokens"), (at) => choose(at, strongest(state.graph, at)));
const tip = document.body.appendChild(html("div", { class: "tip", "aria-hidden": "true", hidden: "" }));

function shown() {
  return Object.fromEntries(KINDS.map((kind) => [kind, $(`show-${kind}`).checked]));
}

// ---- what the service says --------------------------------------------------------------------------------------

function tell(error) {
  if (error instanceof ServiceError && error.status === 401) {
    $("key-form").hidden = false;
    $("key").focus();
  }
  $("error").textContent = error ? error.message : "";
  $("error").hidden = !error;
}

// clears: whether success takes the last error away; what runs beside the reader's own question leaves it there.
async function guarded(work, clears = true) {
  try {
    await work();
    if (clears) tell(null);
    return true;
  } catch (error) {
    if (error.name !== "AbortError") tell(error);
    return false;
  }
}

async function begin() {
  const info = await loadInfo();
  if (!info) return;
  fill($("layer"), info.artifact.layers);
  $("layer").value = Math.floor(info.artifact.layers / 2);
  fill($("head"), info.artifact.heads);
  const served = [["Model", info.model], ["Artifact", info.artifact.version], ["Predictor", info.artifact.predictor],
    ["α", String(info.artifact.alpha)], ["Layers × heads", `${info.artifact.layers} × ${info.artifact.heads}`], ["Device", info.device]];
  $("served").replaceChildren(...served.map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, value))));
  for (const option of $("attention").options) option.hidden = !info.attention_modes.includes(option.value);
  await Promise.all([guarded(ask), guarded(loadQuality, false)]);
}

async function loadInfo() {
  try {
    const info = JSON.parse(await request("info"));
    tell(null);
    return info;
  } catch (error) {
    tell(error);
    if (error.status === 503 || error.status === 0) setTimeout(begin, 2000); // still loading
    return null;
  }
}

function fill(select, count) {
  select.replaceChildren(...Array.from({ length: count }, (_, at) => new Option(String(at), String(at))));
}

async function loadQuality() {
  state.quality = JSON.parse(await request("v1/sparsity"));
  drawQuality();
}

function drawQuality() {
  const { calibration, live, points = [] } = state.quality, chosen = $("density").value;
  $("density-part").hidden = !points.length;
  const listed = points.map((point) => `${number(point.density)} (recall ${number(point.recall)})`);
  if (listed.join() !== state.listed) { // else it would be taken away from under who is choosing
    state.listed = listed.join();
    $("density").replaceChildren(new Option("as served", ""), ...points.map((point, at) => new Option(listed[at], point.density)));
    $("density").value = points.some((point) => String(point.density) === chosen) ? chosen : "";
  }
  $("density").disabled = $("attention").value === "dense";
  $("layers-part").hidden = !drawLayers($("layers"), calibration, live);
  $("front-about").textContent = drawFront($("front"), points, calibration?.overall, live?.overall, Number(chosen));
}

async function ask() {
  const input = $("text").value, layer = Number($("layer").value || 0);
  const body = { input, layers: [layer], gold: true, pattern: true, clusters: true,
    attention: $("attention").value, truncate: $("truncate").checked };
  if ($("density").value && !$("density").disabled) body.density = Number($("density").value);
  if (input.length > WHOLE_LAYER) body.heads = [Number($("head").value || 0)];
  state.running?.abort();
  const running = state.running = new AbortController();
  $("ask").setAttribute("aria-busy", "true");
  try {
    const raw = await request("v1/attention", body, running.signal);
    state.raw = raw;
    state.answer = JSON.parse(raw);
    show();
  } finally {
    if (state.running === running) $("ask").removeAttribute("aria-busy");
  }
}

// ---- drawing ----------------------------------------------------------------------------------------------------

function show() {
  const { answer } = state, layer = answer.layers[0], count = answer.tokens.pieces.length;
  $("graph").hidden = false;
  $("about-answer").textContent = about(answer, layer, count);
  const withPattern = layer.heads.every((head) => head.pattern);
  $("set").querySelector('[value="pattern"]').disabled = !withPattern;
  if (!withPattern) $("set").value = "plan";
  tokens.draw(answer.tokens);
  if (state.query >= count) state.query = -1;
  drawHeads($("heads"), layer.heads, count, $("set").value, Number($("head").value), (head) => {
    $("head").value = head;
    showHead();
  });
  showHead();
}

function about(answer, layer, count) {
  const window = layer.window === null ? "" : `, its own window of ±${layer.window} tokens`;
  const cut = answer.sparsefinder.truncated.some(Boolean) ? ", cut" : "";
  return `${count} tokens${cut}, layer ${layer.layer} ran ${layer.ran}${window}, artifact ${answer.sparsefinder.artifact_version}`;
}

function showHead() {
  const layer = state.answer.layers[0], wanted = Number($("head").value || 0);
  const head = layer.heads.find((one) => one.head === wanted);
  if (!head) return void guarded(ask); // a long text, of which only one head is here
  state.head = head;
  state.graph = classify(head, $("set").value, state.answer.tokens.pieces.length);
  markHead($("heads"), layer.heads, wanted);
  const measures = head.measures[$("set").value];
  $("measures").replaceChildren(...MEASURES.map(([name, title]) => html("div", {}, html("dt", {}, title), html("dd", {}, share(measures[name])))));
  for (const kind of KINDS) $(`count-${kind}`).textContent = state.graph.counts[kind];
  $("count-legal").textContent = layer.legal_pairs;
  if (state.query < 0) state.query = busiest(state.graph, state.answer.tokens);
  redraw();
}

function redraw() {
  if (!state.graph) return;
  matrix.draw(state.graph, state.answer.tokens, shown());
  choose(state.query, strongest(state.graph, state.query), false);
}

function choose(i, j, moved = true) {
  [state.query, state.key] = [i, j];
  const { graph, answer } = state;
  matrix.select(i, j, moved);
  tokens.select(graph, answer.tokens, i, j, shown());
  $("arcs-of").textContent = drawArcs($("arcs"), graph, answer.tokens, shown(), i, $("all-arcs").checked);
  center($("arcs-scroll"), placeOf(i));
  $("clusters-part").hidden = !state.head.clusters;
  if (state.head.clusters) $("clusters-about").textContent = drawClusters($("clusters"), state.head.clusters, answer.tokens, i);
  $("readout").textContent = sentence(graph, answer.tokens, i, j);
}

function center(scroller, y) {
  scroller.scrollTop = y - scroller.clientHeight / 2;
}

function hover(i, j, event) {
  tip.hidden = i === null;
  if (tip.hidden) return;
  tip.textContent = sentence(state.graph, state.answer.tokens, i, j);
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${event.clientY + 18}px`;
}

// ---- controls ---------------------------------------------------------------------------------------------------

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  state.query = -1;
  guarded(ask);
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  rememberKey($("key").value);
  $("key").value = "";
  $("key-form").hidden = true;
  begin();
});
$("density").addEventListener("change", () => {
  drawQuality();
  guarded(ask);
});
$("attention").addEventListener("change", () => state.quality && drawQuality());
$("layer").addEventListener("change", () => guarded(ask));
$("head").addEventListener("change", () => state.answer && showHead());
$("set").addEventListener("change", () => state.answer && show());
for (const kind of KINDS) $(`show-${kind}`).addEventListener("change", redraw);
$("all-arcs").addEventListener("change", redraw);
$("zoom-in").addEventListener("click", () => matrix.enlarge(2));
$("zoom-out").addEventListener("click", () => matrix.enlarge(0.5));
$("export-json").addEventListener("click", () => {
  save(`${fileName()}.json`, new Blob([state.raw], { type: "application/json" }));
});
$("export-png").addEventListener("click", () => guarded(async () => {
  const title = `${state.answer.model}: layer ${state.answer.layers[0].layer}, head ${state.head.head}`, measures = state.head.measures[$("set").value];
  save(`${fileName()}.png`, await picture(state.graph, state.answer.tokens, shown(), title, measures));
}, false));

function fileName() {
  return `attention-layer${state.answer.layers[0].layer}-head${state.head.head}`;
}

let waiting = 0;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    redraw();
    if (state.quality) drawQuality();
  }, 120);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => state.answer && show());

const live = new Live($("live"), $("pause"));
setInterval(() => {
  if (state.quality && !live.paused && !document.hidden) loadQuality().catch(() => {}); // the next look may succeed
}, 10000);
begin();
