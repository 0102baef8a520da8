"""Mode `exact` of an attached model: its output is that of `dense` whatever was predicted; it says what that took."""

from pathlib import Path
from typing import Any

import causal_cases
import pytest
import tiny
import tiny_llama
import torch

from sparsefinder.errors import ConfigError
from sparsefinder.hf import LayerCall, LayerInput, attach
from sparsefinder.patterns.positional import Nothing, window
from sparsefinder.plan import Plan, build_plan
from sparsefinder.predictors import WindowOnly
from sparsefinder.teacher import batch, embed


def diagonal(call: LayerInput) -> Plan:
    return build_plan(Nothing(), call.legal, 16, heads=call.q.shape[1])


@pytest.mark.parametrize("plan_for", [None, diagonal])
@pytest.mark.parametrize("alpha", [1.5, 2.0])
@torch.no_grad()
def test_an_encoder_is_dense_entmax(tmp_path: Path, plan_for: Any, alpha: float) -> None:
    teacher, seen = tiny.teacher(tmp_path), []
    attached = attach(teacher.model, alpha=alpha, predictors=[WindowOnly(), WindowOnly()], positional=window(3))
    tokens, mask = batch(teacher, tiny.token_ids([5, 80, 33]))
    with attached.using("dense"):
        dense = embed(teacher, tokens, mask)
    with attached.using("exact", plan_for=plan_for, observe=seen.append):
        torch.testing.assert_close(embed(teacher, tokens, mask), dense, atol=1e-5, rtol=0)
    for call in seen:
        assert call.ran == "exact"
        assert call.repair.rows == call.q.shape[1] * (5 + 80 + 33)
        assert 0 < call.repair.repaired <= call.repair.rows - call.repair.proven


@torch.no_grad()
def test_a_causal_model_is_dense_entmax() -> None:
    attached = causal_cases.attached_llama("tiles", 8)
    ids, mask = tiny_llama.padded([tiny_llama.token_ids(n, seed=n) for n in (60, 9)], "left")
    dense, _ = causal_cases.seen_calls(attached, "dense", ids, mask)
    exact, calls = causal_cases.seen_calls(attached, "exact", ids, mask)
    torch.testing.assert_close(exact[mask], dense[mask], atol=1e-5, rtol=0)
    assert all(call.repair is not None and call.repair.added > 0 for call in calls)


@torch.no_grad()
def test_a_layer_without_a_plan_is_dense_and_needs_no_repair(tmp_path: Path) -> None:
    teacher, seen = tiny.teacher(tmp_path), list[LayerCall]()
    with attach(teacher.model, predictors=[None, WindowOnly()]).using("exact", observe=seen.append):
        embed(teacher, *batch(teacher, tiny.token_ids([20])))
    assert [call.ran for call in seen] == ["dense", "exact"]
    assert [call.repair is None for call in seen] == [True, False]


def test_softmax_is_refused_with_the_reason() -> None:
    attached = attach(tiny.bert(), alpha=1.0, predictors=[WindowOnly()] * 2)
    with pytest.raises(ConfigError, match=r"entmax .*got softmax, where every dropped key"), attached.using("exact"):
        pass
