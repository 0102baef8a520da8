// The graph as a matrix on a canvas, with a second canvas above it for the selected cell.

import { NAMES, NONE, kindAt, nextGold, weightAt } from "./graph.js";
import { FONT, mark, palette } from "./draw.js";

const MOST_PIXELS = 5000; // of a canvas side, device pixels included
const LABELS_FROM = 9; // cells of this many pixels get their tokens' names beside them

export class Matrix {
  // chosen(i, j): the selection moved. hovered(i, j, event): the pointer is over a cell; nulls when it left.
  constructor(parts, chosen, hovered) {
    Object.assign(this, parts);
    this.chosen = chosen;
    this.zoom = 1;
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.canvas.addEventListener("click", (event) => this.#pointed(event, chosen));
    this.canvas.addEventListener("pointermove", (event) => this.#pointed(event, hovered));
    this.canvas.addEventListener("pointerleave", () => hovered(null, null));
  }

  draw(graph, tokens, shown) {
    Object.assign(this, { graph, tokens, shown });
    this.#size();
    const ctx = prepare(this.canvas, this.side + this.gutter, this.scale);
    paint(ctx, graph, tokens, shown, this.cell, this.gutter);
  }

  select(i, j, reveal) {
    this.at = [i, j];
    const ctx = prepare(this.cursor, this.side + this.gutter, this.scale);
    const { ink, focus } = palette();
    const { cell, gutter, side } = this;
    ctx.fillStyle = ink;
    ctx.globalAlpha = 0.07;
    ctx.fillRect(0, gutter + i * cell, gutter + side, cell);
    ctx.fillRect(gutter + j * cell, 0, cell, gutter + side);
    ctx.globalAlpha = 1;
    ctx.strokeStyle = focus;
    ctx.lineWidth = 2;
    ctx.strokeRect(gutter + j * cell - 1, gutter + i * cell - 1, cell + 2, cell + 2);
    if (reveal) reveal_in(this.scroller, gutter + j * cell, gutter + i * cell, cell);
  }

  enlarge(factor) {
    const before = this.cell;
    this.zoom = Math.min(16, Math.max(1, this.zoom * factor));
    this.draw(this.graph, this.tokens, this.shown);
    this.select(...this.at, before !== this.cell);
  }

  #size() {
    const n = this.graph.n, room = Math.max(200, this.scroller.clientWidth - 2);
    const gutter = Math.min(76, Math.floor(room / 4));
    let cell = Math.min(22, Math.floor((room - gutter) / n));
    if (cell < LABELS_FROM) cell = Math.max(n <= 128 ? 5 : 1, Math.min(22, room / n)); // shapes are told apart from 5 on
    cell *= this.zoom;
    this.cell = cell > 4 ? Math.floor(cell) : cell;
    this.gutter = this.cell >= LABELS_FROM ? gutter : 0;
    this.side = this.cell * n;
    this.scale = Math.min(devicePixelRatio || 1, MOST_PIXELS / (this.side + this.gutter));
  }

  #pointed(event, tell) {
    if (!this.graph) return;
    const box = this.canvas.getBoundingClientRect();
    const j = Math.floor((event.clientX - box.left - this.gutter) / this.cell);
    const i = Math.floor((event.clientY - box.top - this.gutter) / this.cell);
    const inside = i >= 0 && j >= 0 && i < this.graph.n && j < this.graph.n;
    if (inside) tell(i, j, event);
    else if (event.type === "pointermove") tell(null, null);
  }

  #key(event) {
    if (!this.graph || event.ctrlKey || event.altKey || event.metaKey) return;
    const last = this.graph.n - 1;
    let [i, j] = this.at;
    switch (event.key) {
      case "ArrowUp": i -= 1; break;
      case "ArrowDown": i += 1; break;
      case "ArrowLeft": j -= 1; break;
      case "ArrowRight": j += 1; break;
      case "Home": j = 0; break;
      case "End": j = last; break;
      case "PageUp": j = nextGold(this.graph, i, j, -1); break;
      case "PageDown": j = nextGold(this.graph, i, j, 1); break;
      default: return;
    }
    event.preventDefault();
    this.chosen(Math.min(last, Math.max(0, i)), Math.min(last, Math.max(0, j)));
  }
}

function prepare(canvas, side, scale) {
  canvas.width = canvas.height = Math.max(1, Math.round(side * scale));
  canvas.style.width = canvas.style.height = `${side}px`;
  const ctx = canvas.getContext("2d");
  ctx.scale(scale, scale);
  return ctx;
}

function reveal_in(scroller, x, y, size) {
  const margin = 3 * size;
  if (x - margin < scroller.scrollLeft) scroller.scrollLeft = x - margin;
  if (x + margin > scroller.scrollLeft + scroller.clientWidth) scroller.scrollLeft = x + margin - scroller.clientWidth;
  if (y - margin < scroller.scrollTop) scroller.scrollTop = y - margin;
  if (y + margin > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = y + margin - scroller.clientHeight;
}

// Also what the PNG export draws.
export function paint(ctx, graph, tokens, shown, cell, gutter) {
  const colours = palette(), side = cell * graph.n;
  ctx.fillStyle = colours.card;
  ctx.fillRect(0, 0, side + gutter, side + gutter);
  if (cell >= 9) lines(ctx, colours, graph.n, cell, gutter);
  ctx.strokeStyle = colours.line;
  ctx.lineWidth = 1;
  ctx.strokeRect(gutter + 0.5, gutter + 0.5, side - 1, side - 1);
  let top = 0;
  for (const weight of graph.weights) if (weight > top) top = weight;
  for (let i = 0; i < graph.n; i++) {
    for (let j = 0; j < graph.n; j++) {
      const kind = kindAt(graph, i, j);
      if (kind === NONE || !shown[NAMES[kind]]) continue;
      const strength = top ? weightAt(graph, i, j) / top : 1;
      mark(ctx, colours, kind, gutter + (j + 0.5) * cell, gutter + (i + 0.5) * cell, cell, strength);
    }
  }
  if (gutter) names(ctx, colours, tokens, cell, gutter);
}

function lines(ctx, colours, n, cell, gutter) {
  ctx.strokeStyle = colours.line;
  ctx.lineWidth = 1;
  ctx.globalAlpha = 0.45;
  ctx.beginPath();
  for (let at = 1; at < n; at++) {
    const place = gutter + at * cell + 0.5;
    ctx.moveTo(place, gutter);
    ctx.lineTo(place, gutter + n * cell);
    ctx.moveTo(gutter, place);
    ctx.lineTo(gutter + n * cell, place);
  }
  ctx.stroke();
  ctx.globalAlpha = 1;
}

function names(ctx, colours, tokens, cell, gutter) {
  ctx.fillStyle = colours.quiet;
  ctx.font = `${Math.min(12, cell - 1)}px ${FONT}`;
  ctx.textBaseline = "middle";
  for (let at = 0; at < tokens.pieces.length; at++) {
    const text = clipped(ctx, tokens.pieces[at], gutter - 8), place = gutter + (at + 0.5) * cell;
    ctx.textAlign = "right";
    ctx.fillText(text, gutter - 5, place);
    ctx.save();
    ctx.translate(place, gutter - 5);
    ctx.rotate(-Math.PI / 2);
    ctx.textAlign = "left";
    ctx.fillText(text, 0, 0);
    ctx.restore();
  }
}

function clipped(ctx, text, room) {
  if (ctx.measureText(text).width <= room) return text;
  let short = Array.from(text);
  while (short.length > 1 && ctx.measureText(`${short.join("")}…`).width > room) short.pop();
  return `${short.join("")}…`;
}
