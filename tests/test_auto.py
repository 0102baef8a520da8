"""Mode `auto`: what it says it took is what it computed, more density never makes it sparse; and the table of times."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import causal_cases
import pytest
import tiny
import tiny_llama
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from sparsefinder.attaching import expected_density
from sparsefinder.attention import measure_crossover as measuring
from sparsefinder.attention.crossover import (
    Crossover,
    ExpectedDensity,
    Setting,
    Size,
    Times,
    density_of,
    estimate,
    for_heads,
    size_of,
    worth_attending,
    worth_predicting,
)
from sparsefinder.attention.measure_crossover import cache_file, load_crossover, read_crossover, shipped_crossover
from sparsefinder.errors import ConfigError
from sparsefinder.hf import Attached, LayerCall, LayerInput, attach
from sparsefinder.patterns.legal import Legal, legal_from_mask, legal_full
from sparsefinder.patterns.positional import window
from sparsefinder.plan import Plan, build_plan, computed_pairs
from sparsefinder.predictors import WindowOnly
from sparsefinder.shipped import default_artifact
from sparsefinder.teacher import batch, embed

SETTING = Setting("made up", 1, "none", 4, 2, 8, 1.5, False, "window", 16.0)
DENSITIES = (0.1, 0.5)


def times(tokens: int, dense: float, predict: float = 1.0, attend: tuple[float, ...] = (1.0, 5.0)) -> Times:
    return Times(tokens, dense, predict, DENSITIES[: len(attend)], attend)


def table(*rows: tuple[int, tuple[Times, ...]], **changes: Any) -> Crossover:
    return Crossover(replace(SETTING, **changes), rows)


# By hand: dense costs 4 at any size, prediction 1, a plan ten times its density: the two meet at densities .3 and .4.
MEETS = table((1, (times(8, 4.0), times(2**20, 4.0))), (2**20, (times(8, 4.0), times(2**20, 4.0))))
NEVER = table((1, (times(64, 1.0, 2.0),)))
ALWAYS = table((1, (times(64, 100.0, 2.0, (1.0,)),)))


@given(st.integers(1, 40), st.integers(1, 5000), st.floats(0, 1), st.floats(0, 1))
def test_more_density_never_makes_a_plan_worth_more(items: int, tokens: int, one: float, other: float) -> None:
    low, high = sorted((one, other))
    setting = shipped_crossover(SETTING).setting
    for known in (MEETS, NEVER, ALWAYS, shipped_crossover(SETTING), shipped_crossover(replace(setting, alpha=1.0))):
        size = Size(items, tokens, items * tokens**2, tokens)
        assert estimate(known, size, low).attend <= estimate(known, size, high).attend
        for worth in (worth_predicting, worth_attending):
            assert worth(known, size, low) or not worth(known, size, high)
        if worth_predicting(known, size, high):
            assert worth_attending(known, size, high)


def test_the_choice_by_hand() -> None:
    size = Size(1, 100, 100**2, 100)
    assert [worth_predicting(MEETS, size, d) for d in (0.0, 0.29, 0.31, 1.0)] == [True, True, False, False]
    assert [worth_attending(MEETS, size, d) for d in (0.0, 0.39, 0.41, 1.0)] == [True, True, False, False]


def test_times_between_and_beyond_the_measured_sizes() -> None:
    known = table((1, (times(10, 1.0), times(1000, 100.0))), (4, (times(10, 8.0), times(1000, 800.0))))
    for items, tokens, dense in ((1, 5, 1.0), (1, 100, 10.0), (1, 2000, 400.0), (2, 100, 10 * 8**0.5), (8, 100, 160.0)):
        assert estimate(known, Size(items, tokens, 1, tokens), 0.1).dense == pytest.approx(dense)
    attends = [estimate(known, Size(1, 10, 1, 10), d).attend for d in (0.0, 0.1, 0.3, 0.5, 1.0)]
    assert attends == pytest.approx([1.0, 1.0, 3.0, 5.0, 10.0])


@pytest.mark.parametrize("causal", [False, True])
def test_a_ragged_batch_is_as_large_as_its_pairs(causal: bool) -> None:
    mask = torch.zeros(3, 70, dtype=torch.bool)
    for b, n in enumerate((70, 11, 0)):
        mask[b, 70 - n :] = True
    legal, known = legal_from_mask(mask, causal), replace(MEETS, setting=replace(SETTING, causal=causal))
    size = size_of(known, legal)
    assert size.pairs == sum(int(legal.matrix(b).sum()) for b in range(3))
    assert size.items == 2
    other = size_of(replace(MEETS, setting=replace(SETTING, causal=not causal)), legal)
    assert other.length == size.length == size.tokens
    assert other.tokens == pytest.approx(size.tokens * (2 ** (-0.5 if causal else 0.5)))
    whole = size_of(known, legal_full(2, 50, 50, causal))
    assert whole.tokens == pytest.approx(50, rel=0.02)
    assert for_heads(whole, known, 12).items == pytest.approx(6)  # three times the heads of the table
    behind = legal_full(1, 3, 40, causal, query_offset=37)
    assert size_of(known, behind).pairs == int(behind.matrix(0).sum())


def test_density_is_that_of_the_plan() -> None:
    legal = legal_full(2, 40, 40, causal=True)
    plan, size = build_plan(window(7), legal, 16, heads=3), size_of(MEETS, legal)
    assert density_of(plan, size) == int(computed_pairs(plan).sum()) / (3 * size.pairs)


def test_expected_density_keeps_the_number_of_keys() -> None:
    assert ExpectedDensity(0.25, 256).at(512) == 0.125
    assert ExpectedDensity(0.25, 256).at(100) == 0.64
    assert ExpectedDensity(0.25, 256).at(10) == 1.0


def llama(known: Crossover, share: float | None = None) -> Attached:
    attached = causal_cases.attached_llama("tiles", 8)
    attached.crossover = known
    attached.expected = (None if share is None else ExpectedDensity(share, 40),) * tiny_llama.LAYERS
    return attached


def texts(*lengths: int) -> tuple[Tensor, Tensor]:
    return tiny_llama.padded([tiny_llama.token_ids(n, seed=n) for n in lengths], "left")


@pytest.mark.parametrize(("known", "ran"), [(NEVER, "dense"), (ALWAYS, "sparse")])
def test_auto_is_bit_equal_to_the_mode_it_says_it_took(known: Crossover, ran: str) -> None:
    attached = llama(known)
    for ids, mask in (texts(40), texts(33, 21, 5)):
        output, calls = causal_cases.seen_calls(attached, "auto", ids, mask)
        assert [call.ran for call in calls] == [ran] * tiny_llama.LAYERS
        assert all((call.plan is None) == (ran == "dense") for call in calls)
        assert torch.equal(output, causal_cases.seen_calls(attached, ran, ids, mask)[0])


@given(st.lists(st.integers(2, 60), min_size=1, max_size=3), st.floats(0, 8), st.floats(0, 4), st.floats(0, 1))
@settings(max_examples=12)
def test_every_layer_computes_what_it_says(lengths: list[int], dense: float, predict: float, share: float) -> None:
    points = (times(8, 0.01 + dense, 0.01 + predict), times(100, 0.01 + 2 * dense, 0.01 + predict))
    attached = llama(table((1, points), causal=True), share)
    _, calls = causal_cases.seen_calls(attached, "auto", *texts(*lengths))
    forced: dict[int, Plan | None] = {call.layer: call.plan for call in calls}
    again: list[LayerCall] = []
    ids, mask = texts(*lengths)
    with torch.no_grad(), attached.using("sparse", observe=again.append, plan_for=lambda call: forced[call.layer]):
        attached.model(input_ids=ids, attention_mask=mask.long(), position_ids=tiny_llama.positions(mask))
    for said, came in zip(calls, again, strict=True):
        assert torch.equal(said.output, came.output)
        assert said.ran == came.ran == ("dense" if said.plan is None else "sparse")


def test_nothing_is_predicted_where_it_cannot_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    def must_not(*_: Any, **__: Any) -> Plan:
        raise AssertionError("predicted")

    monkeypatch.setattr("sparsefinder.hf_modes.layer_plan", must_not)
    for attached in (llama(NEVER), llama(MEETS, 0.35)):
        _, calls = causal_cases.seen_calls(attached, "auto", *texts(40))
        assert {call.ran for call in calls} == {"dense"}
    with pytest.raises(AssertionError, match="predicted"):
        causal_cases.seen_calls(llama(MEETS, 0.25), "auto", *texts(40))


def made_plan(share: float) -> Callable[[LayerInput], Plan]:
    """The plan of a window that has about this density."""
    return lambda call: build_plan(window(2 * int(call.q.shape[2] * share) + 1), call.legal, 1, heads=call.q.shape[1])


@pytest.mark.parametrize("alpha", [1.0, 1.5])
@pytest.mark.parametrize("causal", [True, False])
def test_17_above_the_measured_density_the_dense_path_is_chosen_and_said(alpha: float, causal: bool) -> None:
    """Case 17, with a length that is no power of two."""
    if causal:
        attached, tokens = causal_cases.attached_llama("tiles", 32, alpha=alpha), 507
    else:
        model = tiny.bert(positions=1100)
        attached, tokens = attach(model, alpha=alpha, predictors=[WindowOnly()] * 2, positional=window(9)), 1100
    attached.crossover = replace(MEETS, setting=replace(SETTING, causal=causal))
    ids = torch.randint(5, 60, (1, tokens))
    outputs = {}
    for share, ran in ((0.1, "sparse"), (0.9, "dense")):
        seen: list[LayerCall] = []
        with torch.no_grad(), attached.using("auto", observe=seen.append, plan_for=made_plan(share)):
            outputs[ran] = attached.model(input_ids=ids).last_hidden_state
        assert [(call.ran, call.plan is None) for call in seen] == [(ran, ran == "dense")] * 2
    with torch.no_grad(), attached.using("dense"):
        assert torch.equal(attached.model(input_ids=ids).last_hidden_state, outputs["dense"])


def test_a_pass_over_a_cache_is_dense() -> None:
    attached, (ids, mask) = llama(ALWAYS), texts(30)
    cache, seen = DynamicCache(config=attached.model.config), []
    with torch.no_grad(), attached.using("auto", observe=seen.append):
        for part in (slice(0, 28), slice(28, 29), slice(29, 30)):
            attached.model(
                input_ids=ids[:, part],
                attention_mask=mask[:, : part.stop].long(),
                past_key_values=cache,
                use_cache=True,
            )
    assert [call.ran for call in seen] == ["sparse"] * 2 + ["dense"] * 4
    assert seen[-1].legal.query_offset == 29


@torch.no_grad()
def test_auto_needs_predictors_and_a_table_of_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="auto needs fitted predictors"), attach(tiny.bert()).using("auto"):
        pass
    with pytest.raises(ConfigError, match="expected a model with fitted predictors"):
        attach(tiny.bert()).load_crossover()
    with pytest.raises(ConfigError, match="measured one on cuda"):
        shipped_crossover(SETTING, "cuda")
    teacher = tiny.teacher(tmp_path)
    attached, tokens = attach(teacher.model, predictors=[WindowOnly()] * 2), batch(teacher, tiny.token_ids([20]))
    with attached.using("auto"):  # the shipped table
        embed(teacher, *tokens)
    assert attached.crossover == shipped_crossover(attached.setting())


def test_the_nearest_shipped_table() -> None:
    softmax, small = (replace(SETTING, alpha=1.0, head_dim=64, causal=True), replace(SETTING, head_dim=16))
    assert shipped_crossover(softmax).setting.alpha == 1.0
    assert shipped_crossover(softmax).setting.causal
    assert shipped_crossover(replace(softmax, alpha=2.0)).setting.alpha == 1.5
    assert (shipped_crossover(small).setting.alpha, shipped_crossover(small).setting.head_dim) == (1.5, 32)


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Few and short sizes in a cache folder of the test's own, and how often a layer is predicted for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring, "SIZES", {1: (16, 32), 2: (16,)})
    return []


def predict(calls: list[int]) -> Callable[[Tensor, Tensor, Legal], Plan]:
    def made(q: Tensor, k: Tensor, legal: Legal) -> Plan:
        calls.append(q.shape[2])
        return build_plan(window(3), legal, 16, heads=q.shape[1])

    return made


def test_a_table_is_measured_once_and_kept(counted: list[int]) -> None:
    first = load_crossover(SETTING, predict(counted))
    assert set(counted) == {16, 32}
    assert [(items, [t.tokens for t in rows]) for items, rows in first.rows] == [(1, [16, 32]), (2, [16])]
    before = len(counted)
    assert load_crossover(SETTING, predict(counted)) == first
    assert len(counted) == before
    load_crossover(replace(SETTING, alpha=2.0), predict(counted))  # another setting is another file
    assert len(counted) == 2 * before
    folder = cache_file(SETTING).parent
    assert sorted(folder.iterdir()) == sorted({cache_file(SETTING), cache_file(replace(SETTING, alpha=2.0))})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"dense"', '"dens"'),
        lambda text: text.replace('"threads": 1', '"threads": 3'),
        lambda text: json.dumps(json.loads(text) | {"rows": []}),
        lambda text: json.dumps(json.loads(text) | {"rows": [[1, []]]}),
        lambda text: text.replace('"dense": ', '"dense": -'),
    ],
)
def test_a_damaged_file_is_measured_anew(counted: list[int], damage: Callable[[str], str]) -> None:
    load_crossover(SETTING, predict(counted))
    path, before = cache_file(SETTING), len(counted)
    text = path.read_text()
    path.write_text(damage(text))
    assert path.read_text() != text
    assert read_crossover(path, SETTING) is None
    again = load_crossover(SETTING, predict(counted))
    assert len(counted) == 2 * before
    assert read_crossover(path, SETTING) == again


def test_a_folder_that_cannot_be_written_is_said(
    counted: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    found = load_crossover(SETTING, predict(counted))
    assert found.setting == SETTING
    assert "cannot be kept" in caplog.text


def test_measuring_uses_the_models_own_predictors(counted: list[int]) -> None:
    attached = llama(NEVER)
    found = attached.load_crossover()
    assert attached.crossover is found
    sizes = (found.setting.heads, found.setting.kv_heads, found.setting.head_dim)
    assert sizes == (tiny_llama.HEADS, tiny_llama.KV_HEADS, tiny_llama.DIM)
    assert (found.setting.causal, found.setting.predictor, found.setting.tile_rows) == (True, "tiles of rank 4", 8.0)


def test_expected_densities_come_from_the_card() -> None:
    from sparsefinder.artifact import load

    card = load(default_artifact()).card
    known = expected_density(card)
    assert len(known) == card.layers
    assert all(one is not None and 0 < one.share < 1 and one.tokens == card.calibration["tokens"] for one in known)
    assert expected_density(replace(card, calibration={})) == (None,) * card.layers


def test_shipped_tables_are_sound() -> None:
    for body in json.loads(measuring.SHIPPED.read_text()):
        assert asdict(measuring._parsed(body))["setting"] == body["setting"]
