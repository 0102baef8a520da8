"""The calls of `gpu_check` that are compared with the dense definition, on the device that is checked."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sparsefinder.attention.api import attend
from sparsefinder.patterns.legal import legal_from_mask, legal_to
from sparsefinder.patterns.positional import GlobalTokens, Window
from sparsefinder.plan import KeysPerTile, ShareOfKeys, plan_from_tile_scores, plan_to, tile_count
from sparsefinder.plan_device import place_tiles, plan_on_device

ABOVE_TWO = 10  # times these for α > 2, where a weight near the threshold grows like a root of its score
# The weights are rounded to half precision before they meet the values, which are below 4 here.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
CASES = (  # dtype, α, head dimension, rows of a tile, causal
    (torch.float32, 1.5, 64, 32, True),
    (torch.float32, 1.0, 64, 32, False),
    (torch.float16, 1.5, 64, 64, False),
    (torch.float16, 1.0, 64, 64, True),
    (torch.bfloat16, 1.5, 64, 64, True),
    (torch.bfloat16, 1.0, 64, 64, False),
    (torch.bfloat16, 1.5, 32, 16, False),
    (torch.bfloat16, 1.5, 128, 128, True),
    (torch.bfloat16, 1.5, 80, 48, False),
    (torch.float16, 1.5, 256, 64, True),
    (torch.float32, 2.0, 32, 16, False),
    (torch.bfloat16, 1.25, 64, 64, True),
    (torch.float32, 3.0, 64, 32, False),
)


def check_everything(device: str, spent: Callable[[], bool]) -> list[dict[str, Any]]:
    """One row for every case, and one for the lists that the device makes; printed as they come."""
    rows = []
    lengths = [300, 171] if device == "cuda" else [17, 6]
    for case in CASES:
        if spent():
            break
        rows.append(_check(*case, lengths, device))
    rows.append(_check_plan(lengths, device))
    print()
    for row in rows:
        print(f"{'right' if row['right'] else 'WRONG':6} {row['call']:60} {row['said']}")
    return rows


def _check(
    dtype: torch.dtype, alpha: float, dim: int, tile: int, causal: bool, lengths: list[int], device: str
) -> dict[str, Any]:
    """A ragged batch with grouped heads and NaN in its padding, against `reference` in float32 on the same numbers."""
    draw = torch.Generator().manual_seed(dim)
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    legal = legal_from_mask(mask, causal)
    tensors = (torch.randn(len(lengths), heads, max(lengths), dim, generator=draw) for heads in (4, 2, 2))
    q, k, v = (x.to(dtype).masked_fill(~mask[:, None, :, None], torch.nan).to(device) for x in tensors)
    scores = torch.randn(len(lengths), 4, tile_count(legal, tile), max(lengths), generator=draw)
    extra = Window(2) | GlobalTokens(1)
    plan = plan_to(plan_from_tile_scores(scores, ShareOfKeys(0.2), extra, legal, tile), device)
    there = legal_to(legal, device)
    said = f"{str(dtype).removeprefix('torch.')}, α = {alpha}, dim {dim}, tiles of {tile}{', causal' * causal}"
    try:
        found = attend(q, k, v, plan, legal=there, alpha=alpha, scale=2 * dim**-0.5, backend="gpu").float()
    except Exception as failure:  # noqa: BLE001  (a kernel that does not compile here: the other cases go on)
        return {"call": said, "right": False, "said": f"{type(failure).__name__}: {failure}"[:200]}
    expected = attend(
        q.float(), k.float(), v.float(), plan, legal=there, alpha=alpha, scale=2 * dim**-0.5, backend="reference"
    )
    error, allowed = float((found - expected).abs().max()), TOLERANCES[dtype] * (ABOVE_TWO if alpha > 2 else 1)
    return {"call": said, "right": error <= allowed, "said": f"greatest error {error:.1e}", "error": error}


def _check_plan(lengths: list[int], device: str) -> dict[str, Any]:
    """The lists of the device against those of the CPU."""
    draw = torch.Generator().manual_seed(0)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    legal, extra = legal_from_mask(mask, causal=True), Window(3) | GlobalTokens(1)
    scores = torch.randint(50, (len(lengths), 4, tile_count(legal, 16), max(lengths)), generator=draw).float()
    expected = plan_from_tile_scores(scores, KeysPerTile(9), extra, legal, 16)
    tiles = place_tiles(legal_to(legal, device), (16,) * 4, extra)
    plan = plan_to(plan_on_device(scores.to(device), KeysPerTile(9), tiles), "cpu")
    end = int(plan.offsets[-1])
    plan = replace(plan, keys=plan.keys[:end], first_row=plan.first_row[:end])
    names = ("tile_batch", "tile_head", "tile_start", "tile_rows", "offsets", "keys", "first_row")
    wrong = [name for name in names if not torch.equal(getattr(plan, name), getattr(expected, name))]
    return {"call": "plan on the device", "right": not wrong, "said": f"differ: {wrong}" if wrong else "every key"}
