"""Small random models for tests: no weights are downloaded, every test builds its own."""

from pathlib import Path

import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

from sparsefinder.teacher import Teacher, fingerprint

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def bert_config(
    layers: int = 2, heads: int = 4, width: int = 32, vocabulary: int = 64, positions: int = 96
) -> BertConfig:
    return BertConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=2 * width, max_position_embeddings=positions, initializer_range=0.4,
    )  # fmt: skip


def bert(seed: int = 0, **sizes: int) -> BertModel:
    torch.manual_seed(seed)
    return BertModel(bert_config(**sizes)).eval()


def tokenizer(folder: Path) -> BertTokenizerFast:
    words = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    (folder / "vocab.txt").write_text("\n".join(words))
    return BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=96)


def teacher(folder: Path, seed: int = 0, **sizes: int) -> Teacher:
    model = bert(seed, **sizes)
    return Teacher(model, tokenizer(folder), "tiny", fingerprint(model), "mean", True, 96)


def save_teacher(folder: Path, seed: int = 0, **sizes: int) -> Path:
    """A local folder that `load_teacher` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    bert(seed, **sizes).save_pretrained(folder)
    tokenizer(folder).save_pretrained(folder)
    return folder


def token_ids(lengths: list[int], vocabulary: int = 57, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [[2, *torch.randint(5, vocabulary, (n - 2,), generator=generator).tolist(), 3] for n in lengths]
