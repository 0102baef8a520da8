// The tokens as buttons: one is the query, the others show what it reads.

import { HIT, MISSED, NAMES, SPARE, kindAt, sentence } from "./graph.js";
import { html } from "./draw.js";

const SIGNS = { [HIT]: "■", [MISSED]: "✕", [SPARE]: "○" };

export class Tokens {
  constructor(place, chosen) {
    this.place = place;
    this.chosen = chosen;
    place.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) chosen(Number(button.dataset.at));
    });
    place.addEventListener("keydown", (event) => this.#key(event));
  }

  draw(tokens) {
    this.buttons = tokens.pieces.map((piece, at) => {
      const sign = html("span", { class: "sign", "aria-hidden": "true" });
      const button = html("button", { type: "button", class: "token", "data-at": at }, html("span", {}, piece), sign);
      return button;
    });
    this.place.replaceChildren(...this.buttons);
  }

  select(graph, tokens, i, j, shown) {
    this.buttons.forEach((button, at) => {
      const kind = kindAt(graph, i, at), name = NAMES[kind];
      button.setAttribute("aria-pressed", at === i);
      button.setAttribute("aria-label", at === i ? `${tokens.pieces[at]}, the query` : sentence(graph, tokens, i, at));
      button.tabIndex = at === i ? 0 : -1;
      button.className = `token ${shown[name] ? name : ""} ${at === j ? "key" : ""}`;
      button.lastChild.textContent = shown[name] ? SIGNS[kind] ?? "" : "";
    });
    this.at = i;
  }

  #key(event) {
    const last = this.buttons.length - 1;
    const to = { ArrowRight: this.at + 1, ArrowLeft: this.at - 1, Home: 0, End: last }[event.key];
    if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const at = Math.min(last, Math.max(0, to));
    this.chosen(at);
    this.buttons[at].focus();
  }
}
