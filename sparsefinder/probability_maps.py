"""Maps from scores to probabilities, and the numeric check of what Yun et al. (2020, Assumption 2) ask of them.

All work on the last axis, take `mask` (True = may get weight) as `entmax` does, compute in float32 at least, give zeros
for a row without any entry that may get weight, and NaN for a row that holds NaN or +inf.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparsefinder.entmax import entmax
from sparsefinder.errors import PatternError, ShapeError

SLACK = 1e-9  # float64 sums of a few thousand probabilities are good to this
POWERS = range(-24, 30)  # of two: the scales, in units of 1 / margin, that are tried first
HALVINGS = 30


def softmax(z: Float[Tensor, "*rows n"], mask: Bool[Tensor, "..."] | None = None) -> Float[Tensor, "*rows n"]:
    """`exp(z_j) / Σ exp(z)`: every entry gets weight."""
    return entmax(z, 1.0, mask)


def sparsemax(z: Float[Tensor, "*rows n"], mask: Bool[Tensor, "..."] | None = None) -> Float[Tensor, "*rows n"]:
    """The nearest point of the simplex, `[z − τ]_+` (Martins and Astudillo, 2016); α-entmax with α = 2."""
    return entmax(z, 2.0, mask)


def sparselin_gen(
    z: Float[Tensor, "*rows n"], strength: float, mask: Bool[Tensor, "..."] | None = None
) -> Float[Tensor, "*rows n"]:
    """`sparsemax(z / (1 − λ))` (Laha et al., 2018, section 3.2). `strength` is λ: the nearer to 1, the sparser.

    PatternError unless 0 ≤ λ < 1.
    """
    if not 0 <= strength < 1:
        raise PatternError(f"strength: expected a number from 0 to below 1, got {strength}")
    return entmax(z / (1 - strength), 2.0, mask)


def topk_softmax(
    z: Float[Tensor, "*rows n"], top: int, mask: Bool[Tensor, "..."] | None = None
) -> Float[Tensor, "*rows n"]:
    """Softmax over the `top` largest scores of a row, zero elsewhere (Zhao et al., 2019, section 3).

    Of equal scores the first count, so that exactly `top` entries get weight (fewer where fewer may).
    PatternError unless `top` is at least 1.
    """
    if top < 1:
        raise PatternError(f"top: expected at least 1, got {top}")
    scores = _scores(z, mask)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    best = scores.argsort(dim=-1, descending=True, stable=True)[..., :top]
    return _spoil(entmax(scores, 1.0, kept.scatter(-1, best, True)), scores).to(z.dtype)


def hardmax(z: Float[Tensor, "*rows n"], mask: Bool[Tensor, "..."] | None = None) -> Float[Tensor, "*rows n"]:
    """One-hot at the largest score, the first of equal ones: the limit of all other maps at large scores."""
    scores = _scores(z, mask)
    # The first of equal scores, by a stable sort: argmax promises no order among them.
    best = scores.argsort(dim=-1, descending=True, stable=True)[..., :1]
    one = torch.zeros_like(scores).scatter(-1, best, 1.0)
    return _spoil(torch.where(scores.amax(-1, keepdim=True) == -math.inf, 0.0, one), scores).to(z.dtype)


@dataclass(frozen=True)
class ProbabilityMap:
    """A map, and a scale that is known to be large enough for it.

    apply: scores `[*rows, n]` to probabilities of the same shape.
    enough: (ζ, η, n) to a scale `t` for which Assumption 2 is proved (Yun et al., 2020, appendix B).
    """

    apply: Callable[[Tensor], Tensor]
    enough: Callable[[float, float, int], float]


def probability_maps(alpha: float = 1.5, top: int = 8, strength: float = 0.5) -> dict[str, ProbabilityMap]:
    """Every map by name, with these settings."""
    return {
        "softmax": ProbabilityMap(softmax, softmax_scale),
        f"top-{top} softmax": ProbabilityMap(
            lambda z: topk_softmax(z, top), lambda zeta, eta, n: softmax_scale(zeta, eta, min(top, n))
        ),
        f"sparselin-gen, λ = {strength:g}": ProbabilityMap(
            lambda z: sparselin_gen(z, strength), lambda zeta, eta, n: (1 - strength) * (1 - eta) / zeta
        ),
        f"{alpha:g}-entmax": ProbabilityMap(
            lambda z: entmax(z, alpha),
            lambda zeta, eta, n: softmax_scale(zeta, eta, n) if alpha == 1 else 1 / (zeta * (alpha - 1)),
        ),
        "sparsemax": ProbabilityMap(sparsemax, lambda zeta, eta, n: 1 / zeta),
        "hardmax": ProbabilityMap(hardmax, lambda zeta, eta, n: 0.0),
    }


def softmax_scale(margin: float, rest: float, tokens: int) -> float:
    """The least `t` with `1 / (1 + (n − 1) exp(−t ζ)) ≥ 1 − η` (Yun et al., 2020, B.1); at least 0.

    margin is ζ, rest is η, tokens is n.
    """
    odds = (tokens - 1) * (1 - rest) / rest
    return max(0.0, math.log(odds) / margin) if odds > 0 else 0.0


@dataclass(frozen=True)
class MarginCheck:
    """What Assumption 2 came to on all tried score vectors.

    scale: the least `t` that was enough for all of them; None where none was (the map fails the assumption).
    on_best: the least probability of the best entry, and off_best the largest sum of the others, at that scale.
    """

    margin: float
    rest: float
    tokens: int
    scale: float | None
    on_best: float
    off_best: float


def check_margin(
    apply: Callable[[Tensor], Tensor], margin: float, rest: float, tokens: int, trials: int = 16, seed: int = 0
) -> MarginCheck:
    """Finds a scale `t` for which a map puts at least `1 − rest` on the best score and at most `rest` on the others.

    Yun et al. (2020), Assumption 2: for all ζ (`margin`) and η (`rest`) some `t` must do so for every score
    vector whose best entry leads by ζ. Tried are the hardest vectors (all others exactly ζ below) and random ones, at
    any level and place. `t` runs over powers of two, then bisects: for a map whose best probability grows with `t`, as
    all maps here, that is the least one; for others it is one that works.

    Raises PatternError unless the margin is positive, 0 < rest ≤ 1, and there are at least two tokens.
    """
    if not (margin > 0 and 0 < rest <= 1 and tokens >= 2):
        got = f"margin {margin}, rest {rest}, tokens {tokens}"
        raise PatternError(f"check_margin: expected a positive margin, 0 < rest ≤ 1 and tokens ≥ 2, got {got}")
    z, best = _trials(margin, tokens, trials, seed)

    def masses(scale: float) -> tuple[float, float]:
        p = apply(z * scale)
        on = p.gather(-1, best)
        return float(on.min()), float((p.sum(-1, keepdim=True) - on).max())

    def enough(scale: float) -> bool:
        on, off = masses(scale)
        return on >= 1 - rest - SLACK and off <= rest + SLACK

    powers = [2.0**power / margin for power in POWERS]
    found = next((scale for scale in powers if enough(scale)), None)
    if found is None:
        return MarginCheck(margin, rest, tokens, None, *masses(powers[-1]))
    low, high = found / 2, found
    for _ in range(HALVINGS if found > powers[0] else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return MarginCheck(margin, rest, tokens, high, *masses(high))


def _trials(margin: float, tokens: int, trials: int, seed: int) -> tuple[Tensor, Tensor]:
    """Score vectors `[4 trials, n]` in float64, and where their best entry is `[4 trials, 1]`."""
    draw = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=draw, dtype=torch.float64)

    below = random(trials, tokens) * margin * 4
    near = (random(trials, tokens) < 0.5) * margin * 2
    one = torch.full_like(below, 50 * margin)
    one[torch.arange(trials), torch.randint(tokens, (trials,), generator=draw)] = 0
    gaps = torch.cat([torch.zeros_like(below), below, near, one])
    best = torch.randint(tokens, (gaps.shape[0], 1), generator=draw)
    level = (random(gaps.shape[0], 1) * 2 - 1) * margin * 4
    return level - (gaps + margin).scatter(-1, best, 0.0), best


def _scores(z: Tensor, mask: Tensor | None) -> Tensor:
    if z.ndim == 0 or z.shape[-1] == 0:
        raise ShapeError(f"scores: expected at least one along the last axis, got shape {tuple(z.shape)}")
    scores = z if z.dtype == torch.float64 else z.float()
    if mask is None:
        return scores
    if mask.dtype != torch.bool:
        raise ShapeError(f"mask: expected dtype bool (True = may get weight), got {mask.dtype}")
    try:
        return scores.masked_fill(~mask, -math.inf)
    except RuntimeError:
        raise ShapeError(f"mask: shape {tuple(mask.shape)} does not broadcast to {tuple(z.shape)}") from None


def _spoil(p: Tensor, scores: Tensor) -> Tensor:
    """NaN in the rows that hold NaN or +inf: a finite answer would be a wrong one in silence."""
    bad = (scores.isnan() | (scores == math.inf)).any(-1, keepdim=True)
    return p.masked_fill(bad, math.nan)
