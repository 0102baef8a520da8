"""A packed batch is the padded batch without its padding, whatever attends."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_bert import make_artifact, make_teacher
from torch import nn
from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

from sparsefinder import packing
from sparsefinder.artifact import load
from sparsefinder.attaching import attach_artifact
from sparsefinder.packing import Row, can_pack, current_row, packed_hidden
from sparsefinder.teacher import load_teacher

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def texts(*lengths: int, words: int = 90) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
    tokens = torch.randint(5, words, mask.shape) * mask
    return tokens, mask


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_a_row_holds_every_token_once_and_in_order(lengths: list[int]) -> None:
    tokens, mask = texts(*lengths)
    row = Row.of(mask)
    expected = [int(tokens[b, n]) for b, length in enumerate(lengths) for n in range(length)]
    assert row.take(tokens).tolist() == [expected]
    assert torch.equal(row.spread(row.take(tokens)), tokens)
    assert row.lengths == lengths


@pytest.mark.parametrize(("kind", "config"), [(BertModel, BertConfig), (RobertaModel, RobertaConfig)])
def test_original_models_give_the_same_hidden_states(kind: Any, config: Any) -> None:
    model = kind(config(vocab_size=99, max_position_embeddings=64, **SIZES)).eval()
    model.set_attn_implementation("sdpa")
    tokens, mask = texts(1, 40, 7, 40, 13)
    with torch.inference_mode():
        expected = model(input_ids=tokens + (1 - mask.long()), attention_mask=mask.long()).last_hidden_state
        model.set_attn_implementation(packing.NAME)
        came = packed_hidden(model, tokens, mask)
        padded = model(input_ids=tokens + (1 - mask.long()), attention_mask=mask.long()).last_hidden_state
    torch.testing.assert_close(came, expected * mask[..., None], atol=1e-5, rtol=0)
    torch.testing.assert_close(padded * mask[..., None], expected * mask[..., None], atol=1e-6, rtol=0)
    assert can_pack(model)
    assert current_row() is None


@pytest.mark.parametrize("mode", ["dense", "sparse", "exact"])
def test_our_attention_gives_the_same_plans_and_hidden_states(tmp_path: Path, mode: Any) -> None:
    teacher = make_teacher(tmp_path / "teacher")
    make_artifact(tmp_path / "few", teacher, keys=20)
    ours = load_teacher(str(tmp_path / "teacher"))
    attached = attach_artifact(ours, load(tmp_path / "few"))
    tokens, mask = texts(5, 200, 33, words=60)
    padded: list[Any] = []
    row: list[Any] = []
    with torch.inference_mode():
        with attached.using(mode, observe=padded.append):
            expected = ours.model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        with attached.using(mode, observe=row.append):
            came = packed_hidden(ours.model, tokens, mask)
    torch.testing.assert_close(came, expected * mask[..., None], atol=1e-5, rtol=0)
    first, again = padded[0].plan, row[0].plan  # q and k of the first layer differ by no rounding to speak of
    assert (first is None) == (mode == "dense")
    if first is not None:
        assert torch.equal(first.keys, again.keys)
        assert torch.equal(first.offsets, again.offsets)


def test_a_model_that_takes_no_positions_is_not_packed() -> None:
    class Stubborn(nn.Module):
        config = BertConfig(vocab_size=99, **SIZES)

        def __init__(self) -> None:
            super().__init__()
            self.inner = BertModel(self.config).eval()

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
            return self.inner(input_ids=input_ids, attention_mask=attention_mask)

    class Forgetful(Stubborn):
        def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None) -> Any:
            return self.inner(input_ids=input_ids, attention_mask=attention_mask)

    for kind in (Stubborn, Forgetful):
        model = kind().eval()
        model.inner.set_attn_implementation(packing.NAME)
        assert not can_pack(model)


def test_the_row_ends_with_the_pass_that_failed() -> None:
    _, mask = texts(3, 2)
    with pytest.raises(ZeroDivisionError), packing.packed(Row.of(mask)):
        raise ZeroDivisionError
    assert current_row() is None
