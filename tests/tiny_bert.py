"""A random two-layer BERT with a WordPiece tokenizer and an artifact for it, made where a test needs them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiny
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertForMaskedLM, PreTrainedTokenizerFast

from sparsefinder.artifact import Artifact, Card, save
from sparsefinder.predictors import Tiles, random_projections
from sparsefinder.teacher import load_teacher

LAYERS, HEADS, DIM = 2, 2, 32
WORDS = [f"w{n}" for n in range(60)]


def make_teacher(folder: Path, *, mask: bool = False, own_head: bool = False) -> Path:
    """mask: with a mask token. own_head: saved as a masked language model, decoder tied to its word embeddings."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, *(["[MASK]"] if mask else [])]
    tokenizer = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    special |= {"mask_token": "[MASK]"} if mask else {}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **special).save_pretrained(folder)
    model = tiny.bert(layers=LAYERS, heads=HEADS, width=DIM, vocabulary=len(names), positions=512)
    if own_head:
        whole = BertForMaskedLM(model.config).eval()
        whole.bert.load_state_dict({name: part for name, part in model.state_dict().items() if "pooler" not in name})
        with torch.no_grad():  # a layer norm without a bias and words without one would hide an order that is wrong
            whole.cls.predictions.bias.normal_(0, 0.5)
            whole.cls.predictions.transform.LayerNorm.bias.normal_(0, 0.5)
        model = whole
    model.save_pretrained(folder)
    return folder


def make_delta(teacher: Path) -> dict[str, torch.Tensor]:
    """A change of one matrix of the first layer."""
    name = "encoder.layer.0.output.dense.weight"
    shape = load_teacher(str(teacher)).model.get_parameter(name).shape
    return {f"{name}.full": torch.randn(shape, generator=torch.Generator().manual_seed(7)).half() / 4}


def make_artifact(
    folder: Path, teacher: Path, keys: int, delta: Mapping[str, torch.Tensor] | None = None, **changes: Any
) -> Path:
    loaded = load_teacher(str(teacher))
    card = Card(
        teacher=str(teacher),
        teacher_fingerprint=loaded.fingerprint,
        layers=LAYERS,
        heads=HEADS,
        kv_heads=HEADS,
        head_dim=DIM // HEADS,
        alpha=1.5,
        head_scale=((1.0,) * HEADS,) * LAYERS,
        objective="none",
        served=f"random-{keys}",
        window_size=3,
        global_tokens=1,
        tile_size=16,
    )
    maps = [random_projections(HEADS, 4, DIM // HEADS, seed=layer, form="bilinear") for layer in range(LAYERS)]
    layers = tuple(Tiles(projections, keys_per_tile=keys) for projections in maps)
    save(folder, Artifact(dataclasses.replace(card, **changes), layers, delta=delta or {}))
    return folder
