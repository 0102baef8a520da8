// Files for the reader: the answer as it came, and the matrix as a picture with its caption and legend.

import { HIT, MISSED, SPARE, share } from "./graph.js";
import { FONT, mark, palette } from "./draw.js";
import { paint } from "./matrix.js";

export function save(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

const MARGIN = 28, HEAD = 64, FOOT = 48;

// title: two lines. measures: of the head, as the answer has them.
export async function picture(graph, tokens, shown, title, measures) {
  const cell = Math.max(2, Math.min(18, Math.floor(1400 / graph.n))), gutter = cell >= 9 ? 84 : 0;
  const side = gutter + cell * graph.n, width = Math.max(side, 560) + 2 * MARGIN, height = side + HEAD + FOOT + MARGIN;
  const canvas = document.createElement("canvas");
  canvas.width = 2 * width;
  canvas.height = 2 * height;
  const ctx = canvas.getContext("2d"), colours = palette();
  ctx.scale(2, 2);
  ctx.fillStyle = colours.card;
  ctx.fillRect(0, 0, width, height);
  caption(ctx, colours, title, measures);
  ctx.save();
  ctx.translate(MARGIN, HEAD);
  paint(ctx, graph, tokens, shown, cell, gutter);
  ctx.restore();
  legend(ctx, colours, graph, HEAD + side + 28);
  const blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
  if (!blob) throw new Error(`no picture: ${graph.n} tokens are more than this browser can draw; the JSON has them all`);
  return blob;
}

function caption(ctx, colours, title, measures) {
  ctx.textBaseline = "alphabetic";
  ctx.fillStyle = colours.ink;
  ctx.font = `600 17px ${FONT}`;
  ctx.fillText(title, MARGIN, 30);
  ctx.fillStyle = colours.quiet;
  ctx.font = `13px ${FONT}`;
  ctx.fillText(`sparsity ${share(measures.sparsity)}   recall ${share(measures.recall)}   mass ${share(measures.mass)}`, MARGIN, 50);
}

function legend(ctx, colours, graph, y) {
  let x = MARGIN;
  const entries = [[HIT, "gold, predicted", graph.counts.hit], [MISSED, "gold, missed", graph.counts.missed], [SPARE, "spare", graph.counts.spare]];
  ctx.font = `13px ${FONT}`;
  for (const [kind, name, count] of entries) {
    mark(ctx, colours, kind, x + 7, y - 4, 14);
    ctx.fillStyle = colours.ink;
    ctx.textBaseline = "alphabetic";
    ctx.textAlign = "left";
    ctx.fillText(`${name} ${count}`, x + 20, y);
    x += 44 + ctx.measureText(`${name} ${count}`).width;
  }
}
