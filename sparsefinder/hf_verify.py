"""One forward pass decides whether a model's attention can be replaced: who calls, how often, and does softmax stay.

Models that never look their attention up by name (MPNet, DeBERTa, Longformer, BigBird, RoFormer …) would give wrong
output in silence. Their calls are counted under a name of its own that no other model ever meets.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from sparsefinder.errors import IncompatibleModelError, first_line

PROBE = "sparsefinder-probe"
LENGTHS = (16, 5)
WINDOW_TOKENS = 512  # a sliding window up to this size is exceeded by the probe, so that its edge is verified too
TOLERANCE = 1e-3


class _Recorded(threading.local):
    """The attention modules that the probe of this thread has seen, in the order of their calls."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []


_RECORDED = _Recorded()


def verify(model: Any, layers: int, name: str, own: Callable[[list[nn.Module]], None]) -> None:
    """Require that a transformers model calls its attention once per layer, and that our softmax is its softmax.

    Args:
        model: the base model (without a head), in whatever attention implementation; afterwards it has `name`, or, if
            it was refused, the one it came with.
        layers: attention calls of one forward pass.
        own: told of the modules in the order of their calls, before `name` runs; from then on that must be softmax.

    Raises:
        IncompatibleModelError: it does not, with the reason.
    """
    before, was_training = model.config._attn_implementation, model.training
    model.eval()
    try:
        with torch.no_grad():
            probes = [_probe_input(model, side) for side in (("right", "left") if _is_causal(model) else ("right",))]
            expected = [_hidden(model, *probe) for probe in probes]
            calls = _record_calls(model, *probes[0])
            if len(calls) != layers:
                raise IncompatibleModelError(
                    f"{type(model).__name__}: expected {layers} attention calls through the attention interface of "
                    f"transformers, got {len(calls)}"
                )
            own(calls)
            model.set_attn_implementation(name)
            worst = max(
                float(((_hidden(model, *probe) - hidden).abs() * probe[1].unsqueeze(-1)).max())
                for probe, hidden in zip(probes, expected, strict=True)
            )
        if not worst <= TOLERANCE:
            raise IncompatibleModelError(
                f"{type(model).__name__}: replacing softmax by itself moved the output by {worst:.2g}"
            )
    except BaseException:
        model.set_attn_implementation(before)
        raise
    finally:
        model.train(was_training)


def real_keys(
    batch_size: int,
    kv_length: int,
    *_: Any,
    attention_mask: Tensor | None = None,
    mask_function: Callable[..., Any] = bidirectional_mask_function,
    **__: Any,
) -> Tensor | None:
    """The mask function that goes with our attention: the 2-D mask of real keys, or None where all are.

    What is causal or windowed is known to the layer itself; any other relation cannot be kept.

    Raises:
        IncompatibleModelError: packed sequences, chunked attention, or a mask of the user's own.
    """
    if not _is_plain(mask_function):
        raise IncompatibleModelError(
            "attention mask: expected a causal, bidirectional or sliding-window one, got packed sequences or another"
        )
    return None if attention_mask is None else attention_mask.bool()


def _is_plain(function: Callable[..., Any]) -> bool:
    """Is it one of transformers' plain relations, or an intersection of such?"""
    if function in (causal_mask_function, bidirectional_mask_function):
        return True
    name = getattr(function, "__qualname__", "")
    if name.startswith("and_masks."):
        cells = function.__closure__ or ()
        return all(_is_plain(part) for cell in cells for part in cell.cell_contents)
    return name.startswith(("sliding_window_overlay.", "sliding_window_bidirectional_overlay."))


def _is_causal(model: Any) -> bool:
    return any(getattr(module, "is_causal", False) is True for module in model.modules())


def _hidden(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    hidden: Tensor = model(input_ids=tokens, attention_mask=mask).last_hidden_state
    return hidden


def _probe_input(model: Any, side: str) -> tuple[Tensor, Tensor]:
    """Two texts of random tokens; the first may be longer than the layers' window."""
    device, vocabulary = next(model.parameters()).device, int(model.config.vocab_size)
    window = getattr(model.config, "sliding_window", None) or 0
    long = window + LENGTHS[1] + 4 if LENGTHS[0] <= window + LENGTHS[1] <= WINDOW_TOKENS else LENGTHS[0]
    width = min(long, int(getattr(model.config, "max_position_embeddings", long)) - LENGTHS[1])
    tokens = torch.randint(vocabulary, (len(LENGTHS), width), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(width)[None, :] < torch.tensor((width, LENGTHS[1]))[:, None]
    mask = mask.flip(-1) if side == "left" else mask
    return tokens.to(device), mask.long().to(device)


def _record_calls(model: Any, tokens: Tensor, mask: Tensor) -> list[nn.Module]:
    """The attention modules in the order in which a forward pass calls them."""
    _RECORDED.modules = []
    try:
        model.set_attn_implementation(PROBE)
        model(input_ids=tokens, attention_mask=mask)
    except (ValueError, KeyError, RuntimeError, AttributeError) as error:
        reason = first_line(error)
        raise IncompatibleModelError(f"{type(model).__name__}: its attention cannot be replaced ({reason})") from None
    calls, _RECORDED.modules = _RECORDED.modules, []
    return calls


def _recording(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Attention that only notes who called."""
    _RECORDED.modules.append(module)
    return torch.zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3], dtype=q.dtype, device=q.device), None


AttentionInterface.register(PROBE, _recording)
AttentionMaskInterface.register(PROBE, real_keys)
