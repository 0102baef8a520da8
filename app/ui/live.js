// A few numbers of /metrics, every two seconds, with what changed since the look before.

import { request } from "./api.js";
import { number } from "./graph.js";
import { html, svg } from "./draw.js";

const EVERY = 2000, KEPT = 60;

// Sums of every family over its labels: "sparsefinder_tokens_total" -> 123. Of one mode alone: sums["name|sparse"].
export function sums(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^(sparsefinder_\w+)(\{[^}]*\})? (\S+)/.exec(line);
    if (!match) continue;
    const [, name, labels, value] = match;
    const mode = /attention="(\w+)"/.exec(labels ?? "")?.[1];
    found[name] = (found[name] ?? 0) + Number(value);
    if (mode) found[`${name}|${mode}`] = (found[`${name}|${mode}`] ?? 0) + Number(value);
  }
  return found;
}

function per(now, then, above, below) {
  const part = (now[above] ?? 0) - (then[above] ?? 0), whole = (now[below] ?? 0) - (then[below] ?? 0);
  return whole > 0 ? part / whole : null;
}

function rate(now, then, name, seconds) {
  return seconds > 0 && now[name] !== undefined ? Math.max(0, (now[name] - (then[name] ?? 0)) / seconds) : null;
}

const P = "sparsefinder_";
const FIGURES = [
  ["Requests", "per second", (now, then, s) => rate(now, then, `${P}requests_total`, s), (v) => v.toFixed(1)],
  ["Tokens", "per second", (now, then, s) => rate(now, then, `${P}tokens_total`, s), (v) => Math.round(v).toLocaleString("en")],
  ["Answering", "requests now", (now) => Math.max(0, now[`${P}requests_running`] - 1), (v) => String(v)],
  ["Inference", "ms per request", (now, then) => per(now, then, `${P}inference_seconds_sum`, `${P}inference_seconds_count`)
    ?? per(now, {}, `${P}inference_seconds_sum`, `${P}inference_seconds_count`), (v) => (1000 * v).toFixed(1)],
  ["Density", "computed, mode sparse", (now) => per(now, {}, `${P}computed_density_sum|sparse`, `${P}computed_density_count|sparse`), number],
  ["Recall", "audited rows", (now) => per(now, {}, `${P}audited_kept_gold_pairs_total`, `${P}audited_gold_pairs_total`), number],
];

export class Live {
  constructor(place, button) {
    this.place = place;
    this.button = button;
    this.history = FIGURES.map(() => []);
    this.before = null;
    button.addEventListener("click", () => this.pause(!this.paused));
    this.pause(false);
  }

  pause(paused) {
    this.paused = paused;
    this.button.setAttribute("aria-pressed", paused);
    this.button.textContent = paused ? "Resume" : "Pause";
    clearTimeout(this.timer);
    if (!paused) this.#look();
  }

  async #look() {
    try {
      if (!document.hidden) this.#show(sums(await request("metrics")), performance.now());
    } catch {
      this.place.replaceChildren(html("p", { class: "quiet" }, "No figures: the service does not answer."));
    }
    clearTimeout(this.timer);
    if (!this.paused) this.timer = setTimeout(() => this.#look(), EVERY);
  }

  #show(now, at) {
    const then = this.before?.sums ?? now, seconds = this.before ? (at - this.before.at) / 1000 : 0;
    this.before = { sums: now, at };
    this.place.replaceChildren(...FIGURES.map(([title, unit, read, write], place) => {
      const value = read(now, then, seconds) ?? null, kept = this.history[place];
      kept.push(value);
      if (kept.length > KEPT) kept.shift();
      const shown = html("dd", {}, value === null ? "–" : write(value));
      return html("div", {}, html("dt", {}, title), shown, html("span", { class: "unit" }, unit), spark(kept));
    }));
  }
}

function spark(values) {
  const known = values.map((value) => value ?? 0), top = Math.max(...known, 1e-9);
  const path = known.map((value, at) => `${at ? "L" : "M"}${(100 * at) / (KEPT - 1)} ${22 - (20 * value) / top}`).join("");
  return svg("svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("path", { d: path }));
}
