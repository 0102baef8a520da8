// Colours of the page and the three marks, which differ in shape as well: square, cross, ring.

import { HIT, MISSED, SPARE } from "./graph.js";

export function palette() {
  const style = getComputedStyle(document.documentElement);
  const names = ["ink", "quiet", "line", "card", "hit", "missed", "spare", "focus"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

export const FONT = 'system-ui, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif';

// (x, y): the middle of the cell. size: of the cell. strength: 0 to 1, the square's size.
export function mark(ctx, colours, kind, x, y, size, strength = 1) {
  if (size < 5) {
    ctx.fillStyle = kind === HIT ? colours.hit : kind === MISSED ? colours.missed : colours.spare;
    ctx.globalAlpha = kind === SPARE ? 0.4 : 1;
    ctx.fillRect(x - size / 2, y - size / 2, size, size);
    ctx.globalAlpha = 1;
    return;
  }
  if (kind === HIT) {
    const side = size * (0.34 + 0.56 * Math.sqrt(strength));
    ctx.fillStyle = colours.hit;
    ctx.fillRect(x - side / 2, y - side / 2, side, side);
  } else if (kind === MISSED) {
    const arm = size * 0.28;
    ctx.strokeStyle = colours.missed;
    ctx.lineWidth = Math.max(1.25, size / 8);
    ctx.beginPath();
    ctx.moveTo(x - arm, y - arm);
    ctx.lineTo(x + arm, y + arm);
    ctx.moveTo(x + arm, y - arm);
    ctx.lineTo(x - arm, y + arm);
    ctx.stroke();
  } else if (kind === SPARE) {
    ctx.strokeStyle = colours.spare;
    ctx.lineWidth = Math.max(1, size / 14);
    ctx.beginPath();
    ctx.arc(x, y, size * 0.17, 0, 2 * Math.PI);
    ctx.stroke();
  }
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export function html(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export function svgMark(kind, x, y, size = 5) {
  if (kind === HIT) return svg("rect", { class: "hit", x: x - size, y: y - size, width: 2 * size, height: 2 * size });
  if (kind === SPARE) return svg("circle", { class: "spare", cx: x, cy: y, r: size * 0.72 });
  const cross = `M${x - size} ${y - size}L${x + size} ${y + size}M${x + size} ${y - size}L${x - size} ${y + size}`;
  return svg("path", { class: "missed", d: cross });
}
