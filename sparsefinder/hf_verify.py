"""One forward pass decides whether a model's attention can be replaced: who calls, how often, and does softmax stay.

Models that never look their attention up by name (MPNet, DeBERTa, Longformer, BigBird, RoFormer …) would give wrong
output in silence. Their calls are counted under a name of its own that no other model ever meets.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from sparsefinder.errors import IncompatibleModelError, first_line
from sparsefinder.hf_legal import real_keys, window_radius

PROBE = "sparsefinder-probe"
LENGTHS = (16, 5)
TARGET_LENGTH = 7  # of the decoder's text: unlike those of the encoder, so that cross-attention shows
WINDOW_TOKENS = 512  # a sliding window up to this size is exceeded by the probe, so that its edge is verified too
TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class Caller:
    """An attention module that was called. cross: its keys came from another text than its queries. radius: of its
    sliding window, None where it has none."""

    module: nn.Module
    cross: bool
    radius: int | None


class _Recorded(threading.local):
    """What called in the probe of this thread, in the order of the calls."""

    def __init__(self) -> None:
        self.callers: list[Caller] = []


_RECORDED = _Recorded()


def attention_layers(config: Any) -> int:
    """Attention calls of one forward pass: one per layer, and two per decoder layer where there is an encoder too."""
    layers = int(config.num_hidden_layers)
    if not getattr(config, "is_encoder_decoder", False):
        return layers
    decoder = getattr(config, "decoder_layers", None) or getattr(config, "num_decoder_layers", None) or layers
    return layers + 2 * int(decoder)


def verify(model: Any, layers: int, name: str, own: Callable[[list[Caller]], None]) -> None:
    """Require that a transformers model calls its attention once per layer, and that our softmax is its softmax.

    Args:
        model: without a head where it can be taken off, in whatever attention implementation; afterwards it has `name`,
            or, if it was refused, the one it came with.
        layers: attention calls of one forward pass.
        own: told of the callers in their order, before `name` runs; from then on that must be softmax.

    Raises:
        IncompatibleModelError: it does not, with the reason.
    """
    before, was_training = model.config._attn_implementation, model.training
    model.eval()
    try:
        with torch.no_grad():
            probes = [_probe_input(model, side) for side in (("right", "left") if _is_causal(model) else ("right",))]
            if before == name:  # attached before, perhaps with another transform than softmax
                model.set_attn_implementation("eager")
            expected = [_hidden(model, probe) for probe in probes]
            calls = _record_calls(model, probes[0])
            if len(calls) != layers:
                raise IncompatibleModelError(
                    f"{type(model).__name__}: expected {layers} attention calls through the attention interface of "
                    f"transformers, got {len(calls)}"
                )
            own(calls)
            model.set_attn_implementation(name)
            worst = max(
                float(((_hidden(model, probe) - hidden).abs() * _real(probe)).max())
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


def _is_causal(model: Any) -> bool:
    return any(getattr(module, "is_causal", False) is True for module in model.modules())


Probe = dict[str, Tensor]


def _hidden(model: Any, probe: Probe) -> Tensor:
    """What the model gives: hidden states, or logits where its head cannot be taken off (T5)."""
    output = model(**probe)
    hidden: Tensor = output.last_hidden_state if "last_hidden_state" in output else output.logits
    return hidden


def _real(probe: Probe) -> Tensor:
    """Where the output counts: the decoder's tokens are all real."""
    return torch.ones(()) if "decoder_input_ids" in probe else probe["attention_mask"].unsqueeze(-1)


def _probe_input(model: Any, side: str) -> Probe:
    """Two texts of random tokens; the first may be longer than the layers' window."""
    device, vocabulary = next(model.parameters()).device, int(model.config.vocab_size)
    window = getattr(model.config, "sliding_window", None) or 0
    long = window + LENGTHS[1] + 4 if LENGTHS[0] <= window + LENGTHS[1] <= WINDOW_TOKENS else LENGTHS[0]
    width = min(long, int(getattr(model.config, "max_position_embeddings", long)) - LENGTHS[1])
    tokens = torch.randint(vocabulary, (len(LENGTHS), width), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(width)[None, :] < torch.tensor((width, LENGTHS[1]))[:, None]
    mask = mask.flip(-1) if side == "left" else mask
    probe = {"input_ids": tokens.to(device), "attention_mask": mask.long().to(device)}
    if getattr(model.config, "is_encoder_decoder", False):
        probe["decoder_input_ids"] = tokens[:, :TARGET_LENGTH].flip(-1).to(device)
    return probe


def _record_calls(model: Any, probe: Probe) -> list[Caller]:
    """What calls in a forward pass, in its order."""
    _RECORDED.callers = []
    try:
        model.set_attn_implementation(PROBE)
        model(**probe)
    except (ValueError, KeyError, RuntimeError, AttributeError) as error:
        reason = first_line(error)
        raise IncompatibleModelError(f"{type(model).__name__}: its attention cannot be replaced ({reason})") from None
    calls, _RECORDED.callers = _RECORDED.callers, []
    return calls


def _recording(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **said: Any) -> tuple[Tensor, None]:
    """Attention that only notes who called."""
    _RECORDED.callers.append(Caller(module, q.shape[2] != k.shape[2], window_radius(module, said)))
    return torch.zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3], dtype=q.dtype, device=q.device), None


AttentionInterface.register(PROBE, _recording)
AttentionMaskInterface.register(PROBE, real_keys)
