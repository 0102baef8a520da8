"""What hashing and clustering are expected to give: bucket sizes, keys per query, and how often a pair is missed."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparsefinder.errors import PatternError

NODES = 32  # of Gauss-Legendre quadrature: within 1e-6 of 160 nodes, up to 64 buckets and a cosine of .999
REACH = 8.0  # standard deviations; what lies beyond weighs 1e-15


@dataclass(frozen=True)
class BucketSize:
    """mean: tokens of a bucket, averaged over the buckets. seen: tokens of the bucket that a token finds itself in.

    A full bucket is met by more tokens, so `seen` is the larger one; it is what attention within buckets costs.
    """

    mean: float
    seen: float


def bucket_size(tokens: int, shares: int | Float[Tensor, " W"]) -> BucketSize:
    """The expected size of a bucket when each of `tokens` falls into bucket w with probability `shares[w]`.

    `seen = 1 + (n − 1) Σ p_w²`. One number instead of shares: so many equally likely buckets (LSH on vectors without a
    preferred direction, balanced k-means).

    Raises PatternError unless there is a token, and shares that are not negative and sum to 1.
    """
    p = torch.full((shares,), 1 / max(shares, 1)) if isinstance(shares, int) else shares
    p = p.double()
    if tokens < 1 or not p.shape[0] or float(p.min()) < 0 or abs(float(p.sum()) - 1) > 1e-5:
        raise PatternError(f"bucket_size: expected tokens and shares that sum to 1, got {tokens} and {p.tolist()[:8]}")
    return BucketSize(tokens / p.shape[0], 1 + (tokens - 1) * float(p.square().sum()))


def bucket_shares(bits: Bool[Tensor, "n W"]) -> Float[Tensor, " W"]:
    """Shares of the memberships in each bucket (True = the token is in it), for `bucket_size`."""
    counts = bits.sum(0).double()
    if not bool(counts.any()):
        raise PatternError("bucket_shares: expected at least one token in a bucket, got none")
    return counts / counts.sum()


def miss_probability(collision: float, rounds: int) -> float:
    """`(1 − c)^m`: a pair that a round brings together with probability c is missed by all m (Kitaev et al., 2020)."""
    if not (0 <= collision <= 1 and rounds >= 1):
        raise PatternError(f"miss_probability: expected 0 ≤ c ≤ 1 and rounds ≥ 1, got {collision} and {rounds}")
    return float((1 - collision) ** rounds)


def rounds_needed(collision: float, miss: float) -> int:
    """The least number of rounds that misses a pair with probability `miss` at most. PatternError where none does."""
    if not (0 < collision <= 1 and 0 < miss <= 1):
        raise PatternError(f"rounds_needed: expected 0 < c ≤ 1 and 0 < miss ≤ 1, got {collision} and {miss}")
    if collision == 1 or miss == 1:
        return 1
    rounds = max(1, math.ceil(math.log(miss) / math.log1p(-collision)))
    # The quotient of logarithms may land a last bit above a whole number.
    return rounds - 1 if rounds > 1 and miss_probability(collision, rounds - 1) <= miss else rounds


def expected_keys(keys: int, collision: float, rounds: int) -> float:
    """Different keys that a query meets in any of `rounds`, each with probability c a round: `M (1 − (1 − c)^m)`."""
    return keys * (1 - miss_probability(collision, rounds))


def collision_probability(cosine: float, buckets: int) -> float:
    """How likely `argmax[Rx; −Rx]` is the same for two vectors with this cosine, R Gaussian (Kitaev et al., 2020).

    `R` has `buckets / 2` rows. Two buckets: `1 − angle / π`. More: `buckets · P(the first row wins for both vectors)`,
    integrated over the two winning values; the other rows must stay below them in absolute value.

    Raises PatternError unless −1 ≤ cosine ≤ 1 and the number of buckets is even and positive.
    """
    if not -1 <= cosine <= 1 or buckets < 2 or buckets % 2:
        raise PatternError(f"collision_probability: expected a cosine and even buckets, got {cosine} and {buckets}")
    if buckets == 2:
        return 1 - math.acos(cosine) / math.pi
    if abs(cosine) == 1:
        return float(cosine > 0)
    nodes, weights = (torch.from_numpy(x) for x in np.polynomial.legendre.leggauss(NODES))
    spread = math.sqrt(1 - cosine * cosine)
    u = (nodes + 1) * REACH / 2
    low = (-cosine * u / spread).clamp(-REACH, REACH)  # below it the second value would be negative
    half = (REACH - low) / 2
    w = low[:, None] + half[:, None] * (nodes + 1)
    v = cosine * u[:, None] + spread * w
    inside = _rectangle(u[:, None], v.clamp(min=0), cosine, spread, nodes, weights)
    inner = (_density(w) * inside ** (buckets // 2 - 1) * weights).sum(-1) * half
    return buckets * float((_density(u) * inner * weights).sum() * REACH / 2)


def _rectangle(u: Tensor, v: Tensor, cosine: float, spread: float, nodes: Tensor, weights: Tensor) -> Tensor:
    """P(|X| < u, |Y| < v) of two standard normal numbers with this correlation."""
    x = u[..., None] * nodes
    below = torch.special.ndtr((v[..., None] - cosine * x) / spread)
    above = torch.special.ndtr((-v[..., None] - cosine * x) / spread)
    inside: Tensor = (_density(x) * (below - above) * weights).sum(-1) * u
    return inside


def _density(x: Tensor) -> Tensor:
    return torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
