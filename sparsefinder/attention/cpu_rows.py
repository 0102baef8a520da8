"""One row at a time on the CPU, from scores to weights to its output: what a proof needs of single rows."""

from sparsefinder.numba_kernels import inline_kernel
from sparsefinder.rows import climb
from sparsefinder.vector_code import LANES, reaching

BRACKET_STEPS = 60


@inline_kernel
def entmax15_weights(scores, top, step_floor, index, weight):  # type: ignore[no-untyped-def]
    """Weights and their places; scores two or more below the best can have none, so the climb sees only the others.

    scores: the beginning of a row whose memory goes on to a multiple of eight.
    """
    half, reach = scores.dtype.type(0.5), scores.dtype.type(-2)
    n = 0
    for at in range(0, scores.shape[0], LANES):
        if reaching(scores, at, top, reach):  # in a long row hardly any eight neighbours hold one
            for c in range(at, min(at + LANES, scores.shape[0])):
                x = (scores[c] - top) * half
                index[n] = c
                weight[n] = x
                n += x > -1
    tau = climb(weight[:n], step_floor)
    for c in range(n):
        d = max(weight[c] - tau, scores.dtype.type(0))
        weight[c] = d * d
    return n


@inline_kernel
def general_row(x, order):  # type: ignore[no-untyped-def]
    """Scores less the best, times `order` = α − 1, become weights in their place; zeros where all are below −1.

    Any α > 1: bisect on the largest probability in [1/n, 1], in float64 (the gaps to the best score are exact).
    """
    low, high = 1.0 / x.shape[0], 1.0
    for _ in range(BRACKET_STEPS):
        middle = (low + high) / 2
        base = middle**order
        total = 0.0
        for c in range(x.shape[0]):
            total += max(x[c] + base, 0.0) ** (1 / order)
        if total > 1:
            high = middle
        else:
            low = middle
    base, total = low**order, 0.0
    for c in range(x.shape[0]):
        total += max(x[c] + base, 0.0) ** (1 / order)
    share = 1 / total if total > 0 else 0.0
    for c in range(x.shape[0]):
        x[c] = max(x[c] + base, 0.0) ** (1 / order) * share


@inline_kernel
def general_weights(scores, top, order, index, weight):  # type: ignore[no-untyped-def]
    """Weights and their places, of scores less than 1 / `order` below the best."""
    n = 0
    for c in range(scores.shape[0]):
        x = (scores[c] - top) * order
        index[n] = c
        weight[n] = x
        n += x > -1
    general_row(weight[:n], order)
    return n


@inline_kernel
def entmax_weights(row, top, alpha, step_floor, index, weight):  # type: ignore[no-untyped-def]
    """Weights of one row and the places they belong to, without the zeros; how many there are."""
    if alpha == 1.5:
        n = entmax15_weights(row, top, step_floor, index, weight)
    else:
        n = general_weights(row, top, alpha - 1, index, weight)
    kept = 0
    for c in range(n):
        index[kept] = index[c]
        weight[kept] = weight[c]
        kept += weight[c] > row.dtype.type(0)
    return kept


@inline_kernel
def mix_values(v, keys, index, weight, out):  # type: ignore[no-untyped-def]
    """`out = Σ weight · v` over the non-zero weights, four values at a time."""
    n = index.shape[0]
    whole = n - n % 4
    for c in range(0, whole, 4):
        w0, w1, w2, w3 = weight[c], weight[c + 1], weight[c + 2], weight[c + 3]
        v0, v1 = v[keys[index[c]]], v[keys[index[c + 1]]]
        v2, v3 = v[keys[index[c + 2]]], v[keys[index[c + 3]]]
        for d in range(out.shape[0]):
            out[d] += w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]
    for c in range(whole, n):
        w0, v0 = weight[c], v[keys[index[c]]]
        for d in range(out.shape[0]):
            out[d] += w0 * v0[d]
