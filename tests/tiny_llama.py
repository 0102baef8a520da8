"""Small random causal models with grouped-query attention, and a tokenizer for them; built where a test needs them."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sparsefinder.artifact import Artifact, Card, save
from sparsefinder.predictors import Tiles, random_projections
from sparsefinder.teacher import Teacher, fingerprint, load_teacher

LAYERS, HEADS, KV_HEADS, DIM, VOCABULARY, POSITIONS = 2, 4, 2, 8, 61, 512


def config(layers: int = LAYERS, heads: int = HEADS, kv_heads: int = KV_HEADS, head_dim: int = DIM) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=heads * head_dim, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, intermediate_size=2 * heads * head_dim,
        max_position_embeddings=POSITIONS, initializer_range=0.4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def causal_lm(seed: int = 0, **sizes: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(config(**sizes)).eval()


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["[PAD]", "[BOS]", "[EOS]", "[UNK]", *(f"w{n}" for n in range(VOCABULARY - 4))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=POSITIONS, **special)


def teacher(seed: int = 0, **sizes: int) -> Teacher:
    lm = causal_lm(seed, **sizes)
    model = lm.base_model
    return Teacher(model, tokenizer(), "tiny-llama", fingerprint(model), "mean", False, POSITIONS, lm=lm)


def save_teacher(folder: Path, seed: int = 0, **sizes: int) -> Path:
    """A local folder that `load_teacher` reads."""
    causal_lm(seed, **sizes).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def make_artifact(folder: Path, teacher: Path, keys: int, alpha: float = 1.5) -> Path:
    """Predictors from random projections for a teacher that was saved."""
    card = Card(
        teacher=str(teacher),
        teacher_fingerprint=load_teacher(str(teacher)).fingerprint,
        layers=LAYERS,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        alpha=alpha,
        head_scale=((1.0,) * HEADS,) * LAYERS,
        objective="none",
        served=f"random-{keys}",
        window_size=3,
        global_tokens=1,
        tile_size=16,
    )
    maps = [random_projections(HEADS, 4, DIM, seed=layer, form="bilinear") for layer in range(LAYERS)]
    save(folder, Artifact(card, tuple(Tiles(one, keys_per_tile=keys) for one in maps)))
    return folder


def token_ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCABULARY, (length,), generator=generator).tolist()


def padded(items: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, padded on one side."""
    width = max(map(len, items))
    ids, mask = torch.zeros(len(items), width, dtype=torch.long), torch.zeros(len(items), width, dtype=torch.bool)
    for row, item in enumerate(items):
        part = slice(width - len(item), width) if side == "left" else slice(0, len(item))
        ids[row, part], mask[row, part] = torch.tensor(item), True
    return ids, mask


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Positions counted from each item's first real token, as `generate` counts them."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)
