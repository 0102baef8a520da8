"""Rows of the sweep that look at neither queries nor keys."""

import random
from collections.abc import Sequence

from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.compositions import bigbird, sparse_transformer, star_transformer
from sparsefinder.patterns.positional import BlockDiagonal, Dilated, GlobalPositions, Nothing
from sparsefinder.patterns.random_keys import RandomBlocks, RandomKeys
from training.config import SweepConfig
from training.sweep_sheets import Family, Parameters, Role, fixed_setting

BLOCKS = (4, 8, 16, 32, 64)
BLOCK = 16  # of the block-wise random patterns
STEPS = (2, 4)
HEADS = ("union", "sequential", "multihead")

Settings = Sequence[tuple[Parameters, Pattern]]


def window_only(config: SweepConfig) -> list[Family]:
    """The hard baseline: windows, and windows with the first tokens global."""
    sheet = fixed_setting({}, Nothing())
    return [Family("window", "control", [sheet], globals_=(0, 1, *config.counts))]


def random_patterns(config: SweepConfig) -> list[Family]:
    """Random keys of every query (Yun et al., 2020), random blocks, random global tokens, BigBird."""
    counts, seed, size = config.counts, config.seed, config.tokens
    order = random.Random(seed).sample(range(1, size - 1), min(max(counts), size - 2))
    return [
        _family("random keys", [({"keys": c}, RandomKeys(c, seed)) for c in counts]),
        _family(
            "random blocks",
            [({"blocks": c, "block": BLOCK}, RandomBlocks(BLOCK, c, seed)) for c in counts if c * BLOCK < size],
        ),
        # Longformer as the paper draws it: window, and so many random tokens that see and are seen by all.
        _family("longformer", [({"positions": c}, GlobalPositions(tuple(sorted(order[:c])))) for c in counts]),
        _family("bigbird", [({"keys": c, "block": 1}, bigbird(1, c, seed=seed)) for c in counts], alone=1),
        _family(
            "bigbird blocks",
            [({"blocks": c, "block": b}, bigbird(b, c, seed=seed)) for b in (8, 16) for c in (1, 2, 3)],
        ),
    ]


def fixed_patterns(config: SweepConfig) -> list[Family]:
    """Strided and fixed (Child et al., 2019) in every head configuration, star, dilated window, block diagonal."""
    radii = sorted({(size - 1) // 2 for size in config.windows if size > 1})[::2]
    return [
        _family("strided", [_sparse("strided", stride, heads) for stride in config.buckets for heads in HEADS]),
        _family("fixed", [_sparse("fixed", stride, heads) for stride in config.buckets for heads in HEADS]),
        _family("star", [({"radius": r}, star_transformer(r)) for r in radii], alone=1),
        _family(
            "dilated",
            [({"radius": r, "step": s}, Dilated(r, s)) for s in STEPS for r in radii if r * s < config.tokens],
        ),
        _family("block diagonal", [({"block": b}, BlockDiagonal(b)) for b in BLOCKS if b < config.tokens]),
    ]


def _sparse(kind: str, stride: int, heads: str) -> tuple[Parameters, Pattern]:
    return {"stride": stride, "heads": heads}, sparse_transformer(kind, stride, heads=heads)  # type: ignore[arg-type]


def _family(name: str, settings: Settings, alone: int = 0) -> Family:
    role: Role = "baseline"
    return Family(name, role, [fixed_setting(*setting) for setting in settings], alone=alone)
