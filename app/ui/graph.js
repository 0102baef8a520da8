// One head's graph as a matrix of classes, and what can be said of it in words. Nothing here touches the page.

export const NONE = 0, SPARE = 1, MISSED = 2, HIT = 3;
export const NAMES = ["none", "spare", "missed", "hit"];

// head: of the answer; set: "plan" or "pattern". A pair is `i * n + j`: query i, key j.
export function classify(head, set, n) {
  const kinds = new Uint8Array(n * n);
  const weights = new Float32Array(n * n);
  each(head[set] ?? head.plan, (pair) => { kinds[pair] = SPARE; }, n);
  each(head.gold, (pair, at) => {
    kinds[pair] = kinds[pair] === SPARE ? HIT : MISSED;
    weights[pair] = head.gold.weights[at];
  }, n);
  const counts = { none: 0, spare: 0, missed: 0, hit: 0 };
  for (const kind of kinds) counts[NAMES[kind]] += 1;
  return { n, kinds, weights, counts };
}

function each(rows, visit, n) {
  for (let i = 0; i < n; i++) {
    for (let at = rows.offsets[i]; at < rows.offsets[i + 1]; at++) visit(i * n + rows.keys[at], at);
  }
}

export function kindAt(graph, i, j) {
  return graph.kinds[i * graph.n + j];
}

export function weightAt(graph, i, j) {
  return graph.weights[i * graph.n + j];
}

// Three decimals without the leading zero, as in tables; what would round to nothing says so.
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value > 0 && value < 0.0005) return "<.001";
  return value.toFixed(3).replace(/^0\./, ".").replace(/(\.\d\d)0$/, "$1");
}

// The same of one length, for columns.
export function fixed(value) {
  return value === null || value === undefined || Number.isNaN(value) ? "–" : value.toFixed(3).replace(/^0\./, ".");
}

export function share(value) {
  return value === null || value === undefined || Number.isNaN(value) ? "–" : `${(100 * value).toFixed(1)} %`;
}

export function named(tokens, i) {
  return `‘${tokens.pieces[i]}’`;
}

export function sentence(graph, tokens, i, j) {
  const [query, key] = [named(tokens, i), named(tokens, j)];
  switch (kindAt(graph, i, j)) {
    case HIT: return `query ${query} reads key ${key}: gold, predicted, weight ${number(weightAt(graph, i, j))}`;
    case MISSED: return `query ${query} misses key ${key}: gold, not predicted, weight ${number(weightAt(graph, i, j))}`;
    case SPARE: return `query ${query} reads key ${key}: spare, predicted but not gold`;
    default: return `query ${query} does not read key ${key}: neither gold nor predicted`;
  }
}

// The next key of row i after j (or before it, step −1) that is gold; j where there is none.
export function nextGold(graph, i, j, step) {
  for (let at = j + step; at >= 0 && at < graph.n; at += step) {
    if (kindAt(graph, i, at) >= MISSED) return at;
  }
  return j;
}

// Where to look first: the word that misses most as a query, of equal ones the one that needs most.
export function busiest(graph, tokens) {
  let best = 0, most = -1;
  for (let i = 0; i < graph.n; i++) {
    if (!/^\p{L}/u.test(tokens.pieces[i] ?? "")) continue;
    let count = 0;
    for (let j = 0; j < graph.n; j++) count += { [HIT]: 1, [MISSED]: graph.n }[kindAt(graph, i, j)] ?? 0;
    if (count > most) [best, most] = [i, count];
  }
  return best;
}

// The key with the greatest weight of row i; the query itself where no key has any.
export function strongest(graph, i) {
  let best = i;
  for (let j = 0; j < graph.n; j++) if (weightAt(graph, i, j) > weightAt(graph, i, best)) best = j;
  return best;
}
