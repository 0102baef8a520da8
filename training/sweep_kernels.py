"""Every threshold × every window × every number of global tokens from one look at each pair.

A nested family of patterns is a matrix of *levels*: setting `s` keeps the pairs of level `≤ s`. The pair's distance
gives the first window of the grid that holds it, `near`, and its place the first number of global tokens, `globe`.
One joint histogram over (level, near, globe) of the legal pairs, the gold pairs and the teacher's mass then holds the
counts of all unions at once: the union of setting (s, w, g) drops what lies above all three.

The kernels run on one thread: families are measured by one process for each core (`sweep_workers`).
"""

import numpy as np

from sparsefinder.numba_kernels import exact_kernel, inline_kernel


@inline_kernel
def sum_of_larger(cells, out):  # type: ignore[no-untyped-def]
    """`out[s, w, g]` = sum of `cells[a, b, c]` over a > s, b > w, c > g; `cells` is used up."""
    levels, windows, globes = out.shape
    for a in range(levels - 1, -1, -1):
        for b in range(windows + 1):
            for c in range(globes + 1):
                cells[a, b, c] += cells[a + 1, b, c]
    for a in range(levels + 1):
        for b in range(windows - 1, -1, -1):
            for c in range(globes + 1):
                cells[a, b, c] += cells[a, b + 1, c]
        for b in range(windows + 1):
            for c in range(globes - 1, -1, -1):
                cells[a, b, c] += cells[a, b, c + 1]
    for s in range(levels):
        for w in range(windows):
            for g in range(globes):
                out[s, w, g] = cells[s + 1, w + 1, g + 1]


@inline_kernel
def count_pairs(levels, place, causal, kept):  # type: ignore[no-untyped-def]
    """Pairs that every setting keeps, of every head of one instance: `kept [H, S, W, G]` float64, written.

    levels `[H, n, n]` uint8; place `[n, n]` uint16 is `near * (G + 1) + globe`. Levels, `near` and `globe` of S, W, G
    mean never.
    """
    heads, n = levels.shape[0], levels.shape[1]
    count_s, count_w, count_g = kept.shape[1], kept.shape[2], kept.shape[3]
    wide = np.uint64((count_w + 1) * (count_g + 1))
    for h in range(heads):
        # Two histograms in turn: most pairs fall into one cell, and each increment waits for the one before. Indices
        # are unsigned, or numba would look for negative ones.
        even = np.zeros((count_s + 1) * (count_w + 1) * (count_g + 1), np.int32)
        odd = np.zeros_like(even)
        for i in range(n):
            last = i + 1 if causal else n
            row, where = levels[h, i], place[i]
            for j in range(last // 2):
                even[np.uint64(row[2 * j]) * wide + np.uint64(where[2 * j])] += 1
                odd[np.uint64(row[2 * j + 1]) * wide + np.uint64(where[2 * j + 1])] += 1
            if last % 2:
                even[np.uint64(row[last - 1]) * wide + np.uint64(where[last - 1])] += 1
        cells = (even + odd).astype(np.float64).reshape(count_s + 1, count_w + 1, count_g + 1)
        sum_of_larger(cells, kept[h])
        total = n * (n + 1) // 2 if causal else n * n
        kept[h] = total - kept[h]


@inline_kernel
def count_gold(  # type: ignore[no-untyped-def]  # noqa: C901 (a kernel)
    levels, near, globe, offsets, flat, mass, gold, massed, exact
):
    """Of the gold pairs: how many are kept, the probability on them, and the rows of which all are kept; `gold`,
    `massed` and `exact` `[H, S, W, G]` float64, written. levels, near, globe: as in `count_pairs`, uint8.

    offsets, flat, mass: the gold pairs `i * n + j` of each head, sorted, with the teacher's probability.
    """
    heads, n = levels.shape[0], levels.shape[1]
    count_s, count_w, count_g = gold.shape[1], gold.shape[2], gold.shape[3]
    for h in range(heads):
        gold_cells = np.zeros((count_s + 1, count_w + 1, count_g + 1))
        mass_cells = np.zeros((count_s + 1, count_w + 1, count_g + 1))
        worst_of = np.zeros((count_s + 2, count_w, count_g), np.int64)
        total_gold, total_mass = 0.0, 0.0
        at, end = offsets[h], offsets[h + 1]
        worst = np.empty((count_w + 1, count_g + 1), np.int64)
        for i in range(n):
            worst[:] = -1
            while at < end and flat[at] < (i + 1) * n:
                key = np.uint64(flat[at] - i * n)
                level, window, count = np.uint64(levels[h, i, key]), np.uint64(near[i, key]), np.uint64(globe[i, key])
                gold_cells[level, window, count] += 1
                mass_cells[level, window, count] += mass[at]
                total_gold += 1
                total_mass += mass[at]
                worst[window, count] = max(worst[window, count], np.int64(level))
                at += 1
            for b in range(count_w - 1, -1, -1):
                for c in range(count_g + 1):
                    worst[b, c] = max(worst[b, c], worst[b + 1, c])
            for b in range(1, count_w + 1):
                for c in range(count_g - 1, -1, -1):
                    worst[b, c] = max(worst[b, c], worst[b, c + 1])
            for w in range(count_w):
                for g in range(count_g):
                    worst_of[worst[w + 1, g + 1] + 1, w, g] += 1
        sum_of_larger(gold_cells, gold[h])
        gold[h] = total_gold - gold[h]
        sum_of_larger(mass_cells, massed[h])
        massed[h] = np.maximum(total_mass - massed[h], 0.0)
        for w in range(count_w):
            for g in range(count_g):
                rows = worst_of[0, w, g]
                for s in range(count_s):
                    rows += worst_of[s + 1, w, g]
                    exact[h, s, w, g] = rows


@inline_kernel
def count_planned(levels, near, counts, alone, tile, planned):  # type: ignore[no-untyped-def]
    """Pairs that a plan with tiles of `tile` rows computes, `planned [H, S, W, G]` float64, written.

    counts: the numbers of global tokens; those rows, and the first `alone` rows in any case, are tiles of one row, as
    in `plan.build_plan`. Every row reads itself. Bidirectional layers only.
    """
    heads, n = levels.shape[0], levels.shape[1]
    count_s, count_w, count_g = planned.shape[1], planned.shape[2], planned.shape[3]
    for h in range(heads):
        least, nearest = np.empty(n, np.uint8), np.empty(n, np.uint8)
        for g in range(count_g):
            cells = np.zeros((count_s + 1, count_w + 1, 2))
            single = max(alone, counts[g])
            row = 0
            while row < n:
                end = row + 1 if row < single else min((row // tile + 1) * tile, n)
                for j in range(n):
                    least[j], nearest[j] = levels[h, row, j], near[row, j]
                for i in range(row + 1, end):
                    for j in range(n):
                        least[j] = min(least[j], levels[h, i, j])
                        nearest[j] = min(nearest[j], near[i, j])
                for j in range(row, end):
                    nearest[j] = 0
                for j in range(n):
                    always = j < counts[g] or row < counts[g]
                    if not always:
                        cells[least[j], nearest[j], 1] += end - row
                row = end
            out = np.zeros((count_s, count_w, 1))
            sum_of_larger(cells, out)
            for s in range(count_s):
                for w in range(count_w):
                    planned[h, s, w, g] = n * n - out[s, w, 0]


@exact_kernel
def squared_distances(queries, keys, out):  # type: ignore[no-untyped-def]
    """`out[h, i, j]` = minus the squared distance of `queries[h, i]` and `keys[h, :, j]`, summed over the rank in order
    (as `sparsefinder.patterns.content.pair_scores` does); float32."""
    heads, n, rank = queries.shape
    m = keys.shape[2]
    for h in range(heads):
        for i in range(n):
            total = np.zeros(m, np.float32)
            for a in range(rank):
                query, key = queries[h, i, a], keys[h, a]
                for j in range(m):
                    difference = query - key[j]
                    total[j] += difference * difference
            out[h, i, :] = -total


@inline_kernel
def rank_groups(distances, ranks):  # type: ignore[no-untyped-def]
    """`ranks[h, c, i]` = how many groups are nearer to token i than group c, of equally near ones those before it.

    distances `[H, n, B]`, ranks `[H, B, n]` uint8, written.
    """
    heads, n, groups = distances.shape
    for h in range(heads):
        for i in range(n):
            row = distances[h, i]
            for c in range(groups):
                own, before = row[c], 0
                for other in range(groups):
                    before += (row[other] < own) | ((row[other] == own) & (other < c))
                ranks[h, c, i] = before


@inline_kernel
def level_scores(scores, edges, levels):  # type: ignore[no-untyped-def]
    """`levels[h, i, j]` = number of `edges[h]` above the score: setting s keeps scores `≥ edges[h, s]` (descending)."""
    heads, n, m = scores.shape
    for h in range(heads):
        for i in range(n):
            row = np.zeros(m, np.uint8)
            for e in range(edges.shape[1]):
                edge = edges[h, e]
                for j in range(m):
                    row[j] += scores[h, i, j] < edge
            levels[h, i, :] = row


@inline_kernel
def level_rows(scores, edges, levels):  # type: ignore[no-untyped-def]
    """`level_scores` with edges of their own for every row, `[H, n, S]`."""
    heads, n, m = scores.shape
    for h in range(heads):
        for i in range(n):
            row = np.zeros(m, np.uint8)
            for e in range(edges.shape[2]):
                edge = edges[h, i, e]
                for j in range(m):
                    row[j] += scores[h, i, j] < edge
            levels[h, i, :] = row


@inline_kernel
def level_meetings(query_ranks, key_ranks, levels):  # type: ignore[no-untyped-def]
    """`levels[h, i, j]` = the least, over the groups c, of the larger of the two tokens' ranks for c (0 = nearest).

    query_ranks, key_ranks `[H, B, n]` uint8. Setting s keeps pairs that share one of their s + 1 nearest groups.
    """
    heads, groups, n = query_ranks.shape
    for h in range(heads):
        for i in range(n):
            row = np.full(n, 255, np.uint8)
            for c in range(groups):
                rank = query_ranks[h, c, i]
                for j in range(n):
                    row[j] = min(row[j], max(rank, key_ranks[h, c, j]))
            levels[h, i, :] = row


@inline_kernel
def level_bits(query_words, key_words, levels):  # type: ignore[no-untyped-def]
    """0 where the two sets (int64 words, `[H, n, words]`) meet, else 1."""
    heads, n, words = query_words.shape
    for h in range(heads):
        for i in range(n):
            for j in range(n):
                met = np.int64(0)
                for w in range(words):
                    met |= query_words[h, i, w] & key_words[h, j, w]
                levels[h, i, j] = 0 if met != 0 else 1
