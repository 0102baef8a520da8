"""The hook into transformers: verified models, padding, sparse consistency, refusals with a reason."""

import gc
import threading
import weakref
from pathlib import Path

import pytest
import tiny
import torch
from transformers import (
    AlbertConfig,
    AlbertModel,
    AttentionMaskInterface,
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    ElectraConfig,
    ElectraModel,
    MPNetConfig,
    MPNetModel,
    RobertaConfig,
    RobertaModel,
)

from sparsefinder.edges import gold_edges
from sparsefinder.errors import ConfigError, IncompatibleModelError
from sparsefinder.hf import LayerCall, LayerInput, attach, detach
from sparsefinder.patterns.content import InEdges
from sparsefinder.patterns.heads import Sequential
from sparsefinder.patterns.positional import Nothing, window
from sparsefinder.plan import Plan, build_plan
from sparsefinder.predictors import WindowOnly
from sparsefinder.teacher import batch, embed


def gold_plan(call: LayerInput) -> Plan:
    return build_plan(InEdges(gold_edges(call.q, call.k, call.legal, call.alpha, call.scale)), call.legal, 16)


@torch.no_grad()
def test_alpha_one_gives_the_models_own_softmax(tmp_path: Path) -> None:
    teacher = tiny.teacher(tmp_path)
    tokens, mask = batch(teacher, tiny.token_ids([5, 40]))
    expected = embed(teacher, tokens, mask)
    with attach(teacher.model, alpha=1.0).using("dense"):
        torch.testing.assert_close(embed(teacher, tokens, mask), expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_alternating_layers_use_their_own_pattern(tmp_path: Path) -> None:
    teacher = tiny.teacher(tmp_path)
    tokens, mask = batch(teacher, tiny.token_ids([20]))
    positional = Sequential((window(1), ~Nothing()))
    seen: list[LayerCall] = []
    attached = attach(teacher.model, predictors=[WindowOnly()] * 2, positional=positional, tile_size=1)
    with attached.using("sparse", observe=seen.append):
        embed(teacher, tokens, mask)
    assert [call.plan.keys.shape[0] for call in seen] == [4 * 20, 4 * 20 * 20]


@torch.no_grad()
def test_head_scale_multiplies_the_scores_of_its_own_head(tmp_path: Path) -> None:
    teacher = tiny.teacher(tmp_path)
    scale = torch.tensor([[1.0, 0.5, 2.0, 1.0], [0.25, 1.0, 1.0, 3.0]])
    seen: list[LayerCall] = []
    tokens, mask = batch(teacher, tiny.token_ids([20]))
    with attach(teacher.model, head_scale=scale).using("dense", observe=seen.append):
        embed(teacher, tokens, mask)
    assert [call.layer for call in seen] == [0, 1]
    for call in seen:
        torch.testing.assert_close(call.scale, scale[call.layer] * 8**-0.5)


@torch.no_grad()
def test_a_plan_that_holds_the_gold_graph_changes_nothing(tmp_path: Path) -> None:
    teacher = tiny.teacher(tmp_path)
    attached = attach(teacher.model)
    tokens, mask = batch(teacher, tiny.token_ids([7, 63, 64]))
    with attached.using("dense"):
        dense = embed(teacher, tokens, mask)
    plans: list[LayerCall] = []
    with attached.using("sparse", plan_for=gold_plan, observe=plans.append):
        sparse = embed(teacher, tokens, mask)
    assert all(call.plan is not None for call in plans)
    torch.testing.assert_close(sparse, dense, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_a_batch_equals_each_item_alone(tmp_path: Path, mode: str) -> None:
    teacher = tiny.teacher(tmp_path)
    attached = attach(teacher.model, predictors=[WindowOnly()] * 2, positional=window(9))
    items = tiny.token_ids([5, 90, 33])
    with attached.using(mode):  # type: ignore[arg-type]
        together = embed(teacher, *batch(teacher, items))
        alone = torch.cat([embed(teacher, *batch(teacher, [item])) for item in items])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


@torch.no_grad()
def test_sparse_really_is_sparse(tmp_path: Path) -> None:
    teacher = tiny.teacher(tmp_path)
    attached = attach(teacher.model, predictors=[WindowOnly()] * 2, positional=window(3))
    tokens, mask = batch(teacher, tiny.token_ids([80]))
    with attached.using("dense"):
        dense = embed(teacher, tokens, mask)
    assert (embed(teacher, tokens, mask) - dense).abs().max() > 1e-3  # outside `using`: sparse


def _tiny(kind: type, config: type, **more: int) -> torch.nn.Module:
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64,
        "max_position_embeddings": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    return kind(config(**{**sizes, **more})).eval()


@pytest.mark.parametrize(
    ("kind", "config", "more"),
    [
        (BertModel, BertConfig, {}),
        (RobertaModel, RobertaConfig, {"pad_token_id": 1}),
        (ElectraModel, ElectraConfig, {"embedding_size": 16}),
        (AlbertModel, AlbertConfig, {"embedding_size": 16}),
        (DistilBertModel, DistilBertConfig, {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64}),
    ],
)
def test_encoders_that_route_are_verified_and_called_once_a_layer(
    kind: type, config: type, more: dict[str, int]
) -> None:
    model = _tiny(kind, config, **more)
    seen: list[LayerCall] = []
    with attach(model).using("dense", observe=seen.append), torch.no_grad():
        model(input_ids=torch.randint(5, 60, (2, 12)), attention_mask=torch.ones(2, 12, dtype=torch.long))
    assert [call.layer for call in seen] == [0, 1, 2]


def test_a_model_that_does_not_route_is_refused_and_left_as_it_was() -> None:
    model = _tiny(MPNetModel, MPNetConfig)
    before = model.config._attn_implementation
    with pytest.raises(IncompatibleModelError, match="MPNetModel"):
        attach(model)
    assert model.config._attn_implementation == before
    assert torch.isfinite(model(input_ids=torch.randint(5, 60, (1, 8))).last_hidden_state).all()


def test_a_model_whose_output_moves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Padding silently ignored: what happens to an attention function without a mask function of its own.
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "sparsefinder", lambda *_, **__: None)
    with pytest.raises(IncompatibleModelError, match="moved the output"):
        attach(tiny.bert())


@pytest.mark.unchecked
def test_wrong_numbers_are_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleModelError, match=r"\(2, 4\), got \(2, 3\)"):
        attach(tiny.bert(), head_scale=torch.ones(2, 3))
    with pytest.raises(IncompatibleModelError, match="2 layers, got 1"):
        attach(tiny.bert(), predictors=[WindowOnly()])
    attached = attach(tiny.bert())
    with pytest.raises(ConfigError, match="without any"), attached.using("sparse"):
        pass
    with pytest.raises(ConfigError, match="dense, sparse"), attached.using("fast"):  # type: ignore[arg-type]
        pass


@torch.no_grad()
def test_modes_of_two_threads_and_two_models_do_not_mix(tmp_path: Path) -> None:
    one, other = tiny.teacher(tmp_path), tiny.teacher(tmp_path, seed=1)
    attached = [attach(t.model, predictors=[WindowOnly()] * 2, positional=window(3)) for t in (one, other)]
    tokens, mask = batch(one, tiny.token_ids([60]))
    expected = {}
    for mode in ("dense", "sparse"):
        with attached[0].using(mode), attached[1].using("dense"):
            expected[mode] = embed(one, tokens, mask)
    wrong: list[str] = []

    def run(mode: str) -> None:
        with torch.no_grad(), attached[0].using(mode):  # type: ignore[arg-type]
            for _ in range(5):
                if not torch.equal(embed(one, tokens, mask), expected[mode]):
                    wrong.append(mode)

    threads = [threading.Thread(target=run, args=(mode,)) for mode in ("dense", "sparse")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@torch.no_grad()
def test_a_model_may_be_attached_again_whatever_it_was_before(tmp_path: Path) -> None:
    teacher = tiny.teacher(tmp_path)
    tokens, mask = batch(teacher, tiny.token_ids([20, 9]))
    expected = embed(teacher, tokens, mask)
    attach(teacher.model, alpha=2.0, predictors=[WindowOnly()] * 2, positional=window(1))
    assert (embed(teacher, tokens, mask) - expected).abs().max() > 1e-3
    attach(teacher.model, alpha=1.0)
    torch.testing.assert_close(embed(teacher, tokens, mask), expected, atol=1e-5, rtol=0)


def test_a_copied_module_without_attachment_says_what_to_call(tmp_path: Path) -> None:
    import copy

    model = tiny.bert()
    attach(model)
    with pytest.raises(IncompatibleModelError, match="attach first"), torch.no_grad():
        copy.deepcopy(model)(input_ids=torch.randint(5, 60, (1, 8)))


def test_a_model_that_is_dropped_is_freed() -> None:
    model = tiny.bert()
    attach(model)
    dropped = weakref.ref(model)
    del model
    gc.collect()
    assert dropped() is None


def test_a_detached_model_is_freed_at_once_and_refuses_until_then() -> None:
    model, ids = tiny.bert(), torch.randint(5, 60, (1, 8))
    first = attach(model)
    second = attach(model, alpha=2.0)
    detach(first)  # which is not what is in it any more
    with torch.no_grad():
        model(input_ids=ids)
    detach(second)
    with pytest.raises(IncompatibleModelError, match="attach first"), torch.no_grad():
        model(input_ids=ids)
    dropped = weakref.ref(model)
    gc.disable()
    try:
        del model, first, second
        assert dropped() is None
    finally:
        gc.enable()
