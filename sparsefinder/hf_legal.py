"""Which pairs of a transformers attention call exist: padding, causality, a sliding window, the place in a cache."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from sparsefinder.errors import IncompatibleModelError
from sparsefinder.patterns.legal import Legal


def legal_of_call(
    module: nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, said: Mapping[str, Any], across: int | None = None
) -> Legal:
    """The legal pairs of one attention call.

    Args:
        q: queries `[B, H, N, D]`; k: keys `[B, Hkv, M, D]`, those of a cache first.
        mask: True at real keys, `[B, at least M]`, or None where all are (see `real_keys`).
        said: what else transformers passed; its `is_causal` and `sliding_window` count before the module's own.
        across: for cross-attention, whose keys are those of another text, the first query's place in its own; which
            queries are padding is then not known, so all count as real.

    Raises:
        IncompatibleModelError: numbers of tokens or a mask that do not belong together.
    """
    name, (queries, keys) = type(module).__name__, (q.shape[2], k.shape[2])
    if mask is not None and mask.ndim != 2:
        raise IncompatibleModelError(f"{name}: expected a 2-D attention mask, got {mask.ndim} dimensions")
    if mask is not None and mask.shape[1] < keys:
        raise IncompatibleModelError(
            f"{name}: expected a cache that holds the tokens so far, got {keys} keys for a mask of {mask.shape[1]}"
        )
    real = torch.ones(q.shape[0], keys, dtype=torch.bool, device=q.device) if mask is None else mask.bool()
    real = real[:, real.shape[1] - keys :]  # the cache of a sliding-window layer forgets the first keys
    if across is not None:
        asking = torch.ones(q.shape[0], queries, dtype=torch.bool, device=q.device)
        return Legal(asking, real, query_offset=across, cross=True)
    causal = said.get("is_causal")
    causal = bool(getattr(module, "is_causal", False) if causal is None else causal)
    if queries != keys and not (causal and queries < keys):
        raise IncompatibleModelError(f"{name}: expected as many keys as queries, got {keys} and {queries}")
    offset = keys - queries
    return Legal(real[:, offset:], real, causal, offset, window_radius(module, said))


def window_radius(module: nn.Module, said: Mapping[str, Any]) -> int | None:
    """How far a token of this attention call may look, None where that has no limit; `said` as in `legal_of_call`."""
    window = said.get("sliding_window") or getattr(module, "sliding_window", None)
    return int(window) - 1 if window else None


def real_keys(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = bidirectional_mask_function,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """The mask function that goes with our attention: the 2-D mask of real keys, or None where all are.

    What is causal or windowed is known to the layer itself; any other relation cannot be kept.

    Raises:
        IncompatibleModelError: packed sequences, chunked attention, a mask of the user's own, or a cache with room for
            tokens to come.
    """
    if not _is_plain(mask_function):
        raise IncompatibleModelError(
            "attention mask: expected a causal, bidirectional or sliding-window one, got packed sequences or another"
        )
    tokens = int(q_offset) + q_length
    if _is_causal(mask_function) and kv_length + kv_offset != tokens:
        raise IncompatibleModelError(
            f"cache: expected one that holds the {tokens} tokens so far (DynamicCache), got room for {kv_length}"
        )
    return None if attention_mask is None else attention_mask.bool()


def _is_causal(function: Callable[..., Any]) -> bool:
    """Is it transformers' causal relation, or an intersection with it?"""
    if getattr(function, "__qualname__", "").startswith("and_masks."):
        return any(_is_causal(part) for part in _parts(function))
    return function is causal_mask_function


def _parts(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The relations that an intersection consists of."""
    return [part for cell in function.__closure__ or () for part in cell.cell_contents]


def _is_plain(function: Callable[..., Any]) -> bool:
    """Is it one of transformers' plain relations, or an intersection of such?"""
    if function in (causal_mask_function, bidirectional_mask_function):
        return True
    name = getattr(function, "__qualname__", "")
    if name.startswith("and_masks."):
        return all(map(_is_plain, _parts(function)))
    return name.startswith(("sliding_window_overlay.", "sliding_window_bidirectional_overlay."))
