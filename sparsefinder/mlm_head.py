"""Fill-mask heads for encoders that come without one: BERT's head, tied to the word embeddings of its teacher.

The head of BERT (Devlin et al., 2019, appendix A.1, as its released code has it): dense d × d, GELU, layer norm, then
the word embeddings as decoder and a bias for each word. The embeddings stay the teacher's, so a head is small.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as format_tensors
from torch import Tensor

from sparsefinder.artifact import Artifact, delta_hash, json_digest
from sparsefinder.atomic_folder import read_folder, write_folder
from sparsefinder.errors import ArtifactError, IncompatibleModelError
from sparsefinder.teacher import Teacher

SCHEMA_VERSION = 1
CARD, HEAD_FILE = "card.json", "head.safetensors"


@dataclass(frozen=True)
class MlmCard:
    """What a head says of itself: the teacher it reads, with the delta that was in it while the head learned."""

    teacher: str  # packaged name, folder or hub id
    teacher_fingerprint: str  # sha256 of architecture and weights, without the delta
    delta: str  # `delta_hash` of the artifact's, empty = the teacher as it is
    training: Mapping[str, Any] = field(default_factory=dict)  # JSON: command, settings, text, figures
    schema_version: int = SCHEMA_VERSION
    head_sha256: str = ""  # of the file of tensors; `save_mlm_head` fills it in


class MlmHead(torch.nn.Module):
    """Hidden states [..., d] to logits [..., V] over the words of `embeddings`, which it shares and never changes."""

    def __init__(self, embeddings: torch.nn.Embedding):
        super().__init__()
        words, width = embeddings.weight.shape
        self._embeddings = (embeddings,)  # in a tuple: not a part of this module, so neither saved nor trained
        self.dense = torch.nn.Linear(width, width)
        self.norm = torch.nn.LayerNorm(width, eps=1e-12)
        self.bias = torch.nn.Parameter(torch.zeros(words))
        self.to(embeddings.weight)

    def forward(self, hidden: Float[Tensor, "*items d"]) -> Float[Tensor, "*items V"]:
        turned = self.norm(torch.nn.functional.gelu(self.dense(hidden)))
        return torch.nn.functional.linear(turned, self._embeddings[0].weight.detach(), self.bias)


@dataclass(frozen=True, eq=False)
class _Output:
    """What is read of a masked language model's output."""

    logits: Float[Tensor, "B N V"]


class _WithHead(torch.nn.Module):
    """An encoder under a head, called as a masked language model of transformers is."""

    def __init__(self, model: torch.nn.Module, head: MlmHead):
        super().__init__()
        self.model, self.head = model, head

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> _Output:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return _Output(self.head(hidden))


def new_mlm_head(teacher: Teacher, seed: int = 0) -> MlmHead:
    """An untrained head for this teacher: BERT's initial weights (normal, deviation 0.02), biases zero."""
    head = MlmHead(teacher.model.get_input_embeddings())
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(head.dense.weight.shape, generator=generator) * 0.02
    with torch.no_grad():
        head.dense.weight.copy_(weight)
        head.dense.bias.zero_()
    return head


def with_mlm_head(teacher: Teacher, head: MlmHead) -> Teacher:
    """The same teacher whose `mlm` is its model under `head`: asked as one that came with a head of its own."""
    return replace(teacher, mlm=_WithHead(teacher.model, head))


def save_mlm_head(path: str | Path, head: MlmHead, card: MlmCard) -> MlmCard:
    """Write a head as float16 to the folder `path`, all or nothing; returns its card with the hash.

    Raises:
        ArtifactError: numbers that are not finite as float16, or a folder that cannot be written or is no artifact.
    """
    tensors = {name: tensor.detach().cpu().half().contiguous() for name, tensor in head.state_dict().items()}
    _check_finite(tensors)
    content = bytes(format_tensors(tensors))
    card = replace(card, head_sha256=hashlib.sha256(content).hexdigest())
    body = asdict(card)
    body["card_hash"] = json_digest(body)
    text = json.dumps(body, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False)
    write_folder(Path(path), {HEAD_FILE: content, CARD: text.encode() + b"\n"}, marker=CARD)
    return card


def read_mlm_card(path: str | Path) -> MlmCard:
    """The card of the head at `path`. ArtifactError where it is missing, damaged or of another schema version."""
    return _checked(path, read_folder(Path(path), (CARD, HEAD_FILE)))[0]


def load_mlm_head(path: str | Path, teacher: Teacher, artifact: Artifact | None) -> MlmHead:
    """Read the head at `path` for `teacher`, whose word embeddings it is tied to; nothing in it is executed.

    artifact: whose delta was added to the teacher's weights; None = the teacher as it is.

    Raises:
        ArtifactError: a file is missing or damaged, of another schema version, or its tensors do not fit.
        IncompatibleModelError: the head was trained on another teacher, or with another delta.
    """
    card, content = _checked(path, read_folder(Path(path), (CARD, HEAD_FILE)))
    for what, wanted, came in (
        ("teacher", teacher.fingerprint, card.teacher_fingerprint),
        ("delta", delta_hash(artifact), card.delta),
    ):
        if wanted != came:
            named = f"expected a head for {what} {wanted[:12] or 'none'}, got one for {came[:12] or 'none'}"
            raise IncompatibleModelError(f"{path}: {named}")
    head = MlmHead(teacher.model.get_input_embeddings())
    try:
        tensors = parse_tensors(content)
        _check_finite(tensors)
        head.load_state_dict(tensors)
    except SafetensorError as error:
        raise ArtifactError(f"{path}: {HEAD_FILE}: expected safetensors ({error})") from None
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ArtifactError(f"{path}: {HEAD_FILE}: expected the tensors of this teacher's head ({reason})") from None
    return head.eval().requires_grad_(False)


def _check_finite(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ArtifactError(f"{name}: expected finite numbers, got NaN or infinity")


def _checked(path: str | Path, found: Mapping[str, bytes]) -> tuple[MlmCard, bytes]:
    """Card and tensors of a head, after all hashes have been compared."""
    if missing := sorted({CARD, HEAD_FILE} - set(found)):
        raise ArtifactError(f"{path}: {missing[0]}: missing")
    try:
        body = json.loads(found[CARD].decode())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ArtifactError(f"{path}: {CARD}: expected JSON ({error})") from None
    if not isinstance(body, dict) or body.get("schema_version") != SCHEMA_VERSION:
        raise ArtifactError(f"{path}: {CARD}: expected an object of schema_version {SCHEMA_VERSION}")
    names = {f.name for f in fields(MlmCard)}
    if set(body) != names | {"card_hash"}:
        raise ArtifactError(f"{path}: {CARD}: expected the fields of a head's card, got {', '.join(sorted(body))}")
    if body.pop("card_hash") != json_digest(body):
        raise ArtifactError(f"{path}: {CARD}: its content does not match its card_hash")
    card = MlmCard(**body)
    if hashlib.sha256(found[HEAD_FILE]).hexdigest() != card.head_sha256:
        raise ArtifactError(f"{path}: {HEAD_FILE}: its sha256 does not match the card (damaged or truncated)")
    return card, found[HEAD_FILE]
