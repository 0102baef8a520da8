"""Locality-sensitive hashing: Reformer's angular buckets, and SMYRF's balanced asymmetric ones.

A pair of collision probability c is missed by all of m independent rounds with probability `(1 − c)^m`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from sparsefinder.errors import PatternError, ShapeError
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.legal import Legal
from sparsefinder.predictors.projections import Settings
from sparsefinder.predictors.tokens import (
    Members,
    check_call,
    equal_bins,
    item_tokens,
    meet,
    one_hot,
    refuse_causal,
    warn_if_identical,
)


@dataclass(frozen=True, eq=False)
class Lsh:
    """Hash `h(x) = argmax[Rx; −Rx]` into an even number of buckets; an edge if any round agrees (Kitaev et al., 2020,
    section 2).

    rotations: R of every round and head, half as many rows as buckets: `lsh_rotations` draws them. Buckets are relative
        to a token alone, so causal layers are welcome.
    shared: Reformer ties queries and keys, so a key has the bucket of *its token's query*; otherwise keys are hashed
        themselves, by the same R.
    The paper's sorting into chunks and its ban on attending to oneself concern its kernel and are not repeated here.
    Grid: rounds and buckets (by `rotations`), `shared`.

    Raises:
        ShapeError: rotations that are not `[rounds, heads, buckets / 2, head_dim]`.
    """

    kind: ClassVar[str] = "lsh"
    whole_sequence: ClassVar[bool] = False
    rotations: Float[Tensor, "R H half D"]
    shared: bool = False

    def __post_init__(self) -> None:
        if self.rotations.ndim != 4 or 0 in self.rotations.shape:
            expected = "[rounds, heads, buckets / 2, head_dim]"
            raise ShapeError(f"rotations: expected {expected}, none of them 0, got {tuple(self.rotations.shape)}")

    def pattern(self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal) -> Pattern:
        """The pairs whose hashes agree in some round.

        Raises:
            PatternError: shared hashing where queries and keys are not the same tokens (a cache).
        """
        _, heads, _, dim = self.rotations.shape
        check_call(self.kind, q, k, legal, heads, dim)
        if self.shared and (legal.query_offset or not torch.equal(legal.query_real, legal.key_real)):
            raise PatternError("lsh: expected queries and keys of the same tokens where hashes are shared")

        def assign(b: int, rows: Tensor, columns: Tensor) -> Members:
            tokens = item_tokens(q, k, legal, b, self.rotations.dtype)
            keys = tokens.q if self.shared else tokens.k
            warn_if_identical(self.kind, tokens.q, keys)
            return self._members(tokens.q), self._members(keys)

        return meet(q, k, legal, assign)

    def _members(self, x: Float[Tensor, "H n D"]) -> Bool[Tensor, "H n W"]:
        rounds = [one_hot(angular_hash(x, rotation), 2 * rotation.shape[1]) for rotation in self.rotations]
        return torch.cat(rounds, -1)

    def to_tensors(self) -> dict[str, Tensor]:
        """Parameters by name."""
        return {"rotations": self.rotations}

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """What is not a tensor."""
        return {"shared": self.shared}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], settings: Settings) -> "Lsh":
        """The inverse of `to_tensors` and `settings`; KeyError names what is missing."""
        return cls(tensors["rotations"], bool(settings["shared"]))


@dataclass(frozen=True, eq=False)
class Smyrf:
    """Balanced asymmetric hashing (Daras et al., 2020, section 3): an edge if any round puts both into one bucket.

    `F(q) = [q; 0; √(M_q² + M_k² − ‖q‖²)]` and `G(k) = [k; √(M_q² + M_k² − ‖k‖²); 0]`, M the greatest norms in the item,
    make nearness a matter of the inner product: `‖F(q) − G(k)‖² = 2(M_q² + M_k²) − 2 q·k`. A round projects both on
    one random direction, sorts queries and keys apart, and cuts each into `buckets` runs of equal count.
    directions: `[rounds, heads, head_dim + 2]`, see `smyrf_directions`. The projection is sorted as it is, not floored
        first, since sorting alone decides. Ranks over the whole sequence. Grid: rounds (by `directions`) and `buckets`.

    Raises:
        ShapeError: directions of another shape.
        PatternError: fewer than one bucket.
    """

    kind: ClassVar[str] = "smyrf"
    whole_sequence: ClassVar[bool] = True
    directions: Float[Tensor, "R H E"]
    buckets: int

    def __post_init__(self) -> None:
        if self.directions.ndim != 3 or 0 in self.directions.shape or self.directions.shape[2] < 3:
            expected = "[rounds, heads, head_dim + 2]"
            raise ShapeError(f"directions: expected {expected}, none of them 0, got {tuple(self.directions.shape)}")
        if self.buckets < 1:
            raise PatternError(f"buckets: expected at least 1, got {self.buckets}")

    def pattern(self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal) -> Pattern:
        """The pairs in one bucket in some round. PatternError where `legal` is causal."""
        refuse_causal(self.kind, legal)
        _, heads, size = self.directions.shape
        check_call(self.kind, q, k, legal, heads, size - 2)

        def assign(b: int, rows: Tensor, columns: Tensor) -> Members:
            tokens = item_tokens(q, k, legal, b, self.directions.dtype)
            warn_if_identical(self.kind, tokens.q, tokens.k)
            return self._members(*smyrf_transforms(tokens.q, tokens.k))

        return meet(q, k, legal, assign)

    def _members(self, q: Float[Tensor, "H n E"], k: Float[Tensor, "H m E"]) -> Members:
        query, key = (x @ self.directions.permute(1, 2, 0) for x in (q, k))  # [H, tokens, rounds]
        bins = (equal_bins(x.transpose(1, 2), self.buckets).transpose(1, 2) for x in (query, key))
        query_set, key_set = (one_hot(x, self.buckets).flatten(2) for x in bins)
        return query_set, key_set

    def to_tensors(self) -> dict[str, Tensor]:
        """Parameters by name."""
        return {"directions": self.directions}

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """What is not a tensor."""
        return {"buckets": self.buckets}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], settings: Settings) -> "Smyrf":
        """The inverse of `to_tensors` and `settings`; KeyError names what is missing."""
        return cls(tensors["directions"], int(settings["buckets"]))  # type: ignore[arg-type]


def angular_hash(x: Float[Tensor, "H n D"], rotation: Float[Tensor, "H half D"]) -> Int64[Tensor, "H n"]:
    """`argmax[Rx; −Rx]`: a bucket of `2 * half`; of equal ones the first."""
    turned = x @ rotation.transpose(1, 2)
    return torch.cat([turned, -turned], -1).argmax(-1)


def smyrf_transforms(
    q: Float[Tensor, "H n D"], k: Float[Tensor, "H m D"]
) -> tuple[Float[Tensor, "H n E"], Float[Tensor, "H m E"]]:
    """`F(q)` and `G(k)` of one item (see `Smyrf`); E = D + 2."""
    query, key = q.square().sum(-1), k.square().sum(-1)
    total = (query.amax(-1) + key.amax(-1))[:, None]
    rest_q, rest_k = ((total - x).clamp(min=0).sqrt()[..., None] for x in (query, key))
    zero_q, zero_k = torch.zeros_like(rest_q), torch.zeros_like(rest_k)
    return torch.cat([q, zero_q, rest_q], -1), torch.cat([k, rest_k, zero_k], -1)


def lsh_rotations(heads: int, head_dim: int, buckets: int, rounds: int, seed: int) -> Float[Tensor, "R H half D"]:
    """Gaussian rotations of `Lsh`. More rounds of one seed keep the first ones, so its graph can only grow.

    Raises:
        PatternError: an odd number of buckets, or none, or no round.
    """
    if buckets < 2 or buckets % 2 or rounds < 1:
        raise PatternError(f"lsh: expected an even number of buckets and a round, got {buckets} and {rounds}")
    return _gaussian((heads, buckets // 2, head_dim), rounds, seed)


def smyrf_directions(heads: int, head_dim: int, rounds: int, seed: int) -> Float[Tensor, "R H E"]:
    """Gaussian directions of `Smyrf`. More rounds of one seed keep the first ones, so its graph can only grow.

    Raises:
        PatternError: no round.
    """
    if rounds < 1:
        raise PatternError(f"smyrf: expected at least one round, got {rounds}")
    return _gaussian((heads, head_dim + 2), rounds, seed)


def _gaussian(shape: tuple[int, ...], rounds: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randn(shape, generator=generator) for _ in range(rounds)])
