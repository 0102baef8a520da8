"""A language model that comes as one GGUF file: a tiny one, written here, is read as the model it was made from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama
import torch
from transformers import LlamaForCausalLM

from sparsefinder import gguf_copy
from sparsefinder.errors import DataError
from sparsefinder.teacher import load_teacher, require_causal, tokenize

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
MATRICES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def halves_side_by_side(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF turns neighbouring dims of q and k together, transformers the two halves of a head."""
    rows = weight.reshape(heads, 2, -1, weight.shape[1])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, lm: LlamaForCausalLM) -> None:
    """Matrices of the layers in 8 bits, as in published files; the head is the embedding."""
    config, state = lm.config, {name: tensor.numpy() for name, tensor in lm.state_dict().items()}
    writer: Any = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    words = ["<pad>", "<s>", "</s>", *(chr(97 + n % 26) * (1 + n // 26) for n in range(config.vocab_size - 3))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3, *[1] * (len(words) - 3)])
    writer.add_token_merges([f"{letter} {letter}" for letter in "abcdefghijklmnopqrstuvwxyz"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    for layer in range(config.num_hidden_layers):
        for ours, theirs in NORMS.items():
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", state[f"model.layers.{layer}.{ours}.weight"])
        for ours, theirs in MATRICES.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(theirs)
            weight = weight if heads is None else halves_side_by_side(weight, heads)
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def test_a_gguf_file_is_read_as_the_model_it_was_made_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lm = tiny_llama.causal_lm()
    lm.lm_head.weight = lm.model.embed_tokens.weight
    write_gguf(tmp_path / "tiny.gguf", lm)
    teacher = load_teacher(str(gguf_copy.plain_folder(tmp_path / "tiny.gguf")))
    require_causal(teacher)
    assert type(teacher.lm) is LlamaForCausalLM
    assert not hasattr(teacher.lm.config, "quantization_config")
    read = teacher.lm.state_dict()
    for name, tensor in lm.state_dict().items():
        step = tensor.abs().max() / 127 if "proj" in name else 0.0  # of 8 bits, at most
        assert (read[name] - tensor).abs().max() <= 0.51 * step, name
    ids = torch.tensor([tiny_llama.token_ids(12)])
    expected, came = lm(input_ids=ids).logits, teacher.lm(input_ids=ids).logits
    assert (came - expected).abs().max() < 0.1 * expected.abs().max()
    assert tokenize(teacher, ["aa"])[0][-1] == 3 + 26


def test_what_is_no_gguf_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(b"no model in here, but long enough for a header")
    with pytest.raises(DataError, match="expected a GGUF language model") as caught:
        gguf_copy.plain_folder(tmp_path / "broken.gguf")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()
    with pytest.raises(DataError, match="expected a readable file"):
        gguf_copy.plain_folder(tmp_path / "nothing.gguf")
