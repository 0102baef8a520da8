"""A random two-layer BERT with a WordPiece tokenizer and an artifact for it, made where a test needs them."""

import dataclasses
from pathlib import Path
from typing import Any

import tiny
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from sparsefinder.artifact import Artifact, Card, save
from sparsefinder.predictors import Tiles, random_projections
from sparsefinder.teacher import load_teacher

LAYERS, HEADS, DIM = 2, 2, 32
WORDS = [f"w{n}" for n in range(60)]


def make_teacher(folder: Path) -> Path:
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    tokenizer = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **special).save_pretrained(folder)
    model = tiny.bert(layers=LAYERS, heads=HEADS, width=DIM, vocabulary=len(names), positions=512)
    model.save_pretrained(folder)
    return folder


def make_artifact(folder: Path, teacher: Path, keys: int, **changes: Any) -> Path:
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
    save(folder, Artifact(dataclasses.replace(card, **changes), layers))
    return folder
