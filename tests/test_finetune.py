"""Finetuning on tiny models: the loss falls, the density keeps to its target, only what was chosen changes."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from torch import Tensor

import training.finetune_run as run
from sparsefinder.delta import apply_delta
from sparsefinder.errors import ConfigError, DataError
from sparsefinder.teacher import load_teacher
from training.config import FORMS, FinetuneConfig
from training.corpus import shared_spans
from training.finetune import batches, correlation, finetune, make_student, measure

IDS = tiny.token_ids([24] * 32)


def config(folder: Path, **changes: object) -> FinetuneConfig:
    quick = FinetuneConfig(
        teacher=str(tiny.save_teacher(folder)), steps=30, learning_rate=3e-3, warmup=2, rank=4, density=0.2
    )
    return replace(quick, **changes)  # type: ignore[arg-type]


def test_the_student_learns_to_be_its_original(tmp_path: Path) -> None:
    losses: list[float] = []
    chosen = config(tmp_path / "model", rank=32)
    student, delta = finetune(chosen, [IDS], on_step=lambda step, loss, density: losses.append(loss))
    assert losses[-1] < 0.6 * losses[0]
    original = load_teacher(chosen.teacher)
    trained = measure(original, student.teacher, student.attached, IDS)
    apply_delta(
        student.teacher.model, {name: -part if not name.endswith(".a") else part for name, part in delta.items()}
    )
    untrained = measure(original, student.teacher, student.attached, IDS)
    assert trained.cosine > untrained.cosine
    assert trained.texts == len(IDS)


def test_the_scale_follows_the_density_target(tmp_path: Path) -> None:
    densities: dict[float, float] = {}
    for target in (0.1, 0.5):
        seen: list[float] = []
        finetune(
            config(tmp_path / "model", density=target, steps=60), [IDS], on_step=lambda *step: seen.append(step[2])
        )
        densities[target] = sum(seen[-10:]) / 10
    assert densities[0.1] < densities[0.5]
    assert abs(densities[0.5] - 0.5) < 0.15


@pytest.mark.parametrize("form", FORMS)
def test_a_form_changes_what_it_names_and_nothing_else(tmp_path: Path, form: str) -> None:
    student, delta = finetune(config(tmp_path / "model", form=form, steps=2), [IDS])
    changed = {name.rsplit(".", 1)[0] for name in delta}
    weights = dict(student.teacher.model.named_parameters())
    assert changed <= set(weights)  # the names of a plain model, LoRA folded in
    expected = {
        "all": {name for name in weights if ".layer." in name},
        "attention": {name for name in weights if ".layer." in name and "attention" in name},
        "lora": {name for name in weights if ".layer." in name and name.endswith("weight") and "LayerNorm" not in name},
        "scales": set[str](),
    }[form]
    assert changed <= expected
    assert len(changed) >= 0.8 * len(expected)  # the bias of a key changes nothing, so it may stay
    untouched = dict(load_teacher(str(tmp_path / "model")).model.named_parameters())
    for name in set(weights) - changed:
        assert torch.equal(weights[name], untouched[name])


def test_the_same_seed_gives_the_same_delta(tmp_path: Path) -> None:
    deltas = [finetune(config(tmp_path / "model", steps=4), [IDS])[1] for _ in range(2)]
    assert deltas[0].keys() == deltas[1].keys()
    assert all(torch.equal(deltas[0][name], deltas[1][name]) for name in deltas[0])
    other = finetune(config(tmp_path / "model", steps=4, seed=1), [IDS])[1]
    assert any(not torch.equal(deltas[0][name], other[name]) for name in other)


def test_a_model_with_a_masked_language_head_learns_through_it(tmp_path: Path) -> None:
    from transformers import BertForMaskedLM

    torch.manual_seed(0)
    BertForMaskedLM(tiny.bert_config()).save_pretrained(tmp_path)
    tiny.tokenizer(tmp_path).save_pretrained(tmp_path)
    assert load_teacher(str(tmp_path)).mlm is not None
    losses: list[list[float]] = []
    for weight in (0.0, 1.0):
        losses.append([])
        chosen = FinetuneConfig(teacher=str(tmp_path), steps=3, rank=4, density=0.2, mlm_weight=weight)
        finetune(chosen, [IDS], on_step=lambda step, loss, density: losses[-1].append(loss))
    assert losses[1][0] > losses[0][0] + 1  # cross-entropy over 64 words starts near log 64


def test_batches_take_from_every_source_in_turn_and_visit_every_item() -> None:
    sources = [[[n] for n in range(8)], [[n] for n in range(100, 104)]]
    stream = batches(sources, 4, seed=0)
    taken = [next(stream) for _ in range(4)]
    assert all(len(items) == 4 and sum(item[0] >= 100 for item in items) == 2 for items in taken)
    numbers = [item[0] for items in taken for item in items]
    first, second = [n for n in numbers if n < 100], [n for n in numbers if n >= 100]
    assert sorted(first) == list(range(8))
    assert sorted(second[:4]) == sorted(second[4:]) == list(range(100, 104))
    with pytest.raises(DataError, match="at least one chunk"):
        next(batches([sources[0], []], 5, seed=0))


def test_density_is_the_mean_over_all_texts_however_they_are_batched(tmp_path: Path) -> None:
    chosen = config(tmp_path / "model")
    original, student = load_teacher(chosen.teacher), make_student(chosen)
    items = tiny.token_ids([24, 5, 17, 9, 24, 3])
    alone = [measure(original, student.teacher, student.attached, [one] * 3).density for one in items]
    for size in (1, 4):
        together = measure(original, student.teacher, student.attached, items, size).density
        assert together == pytest.approx(sum(alone) / len(alone), abs=1e-6)


def test_correlation_is_pearsons_over_pairs() -> None:
    a, b = torch.randn(6, 5), torch.randn(6, 5)

    def similarity(x: Tensor, i: int, j: int) -> float:
        return float(x[i] @ x[j] / (x[i].norm() * x[j].norm()))

    pairs = [(i, j) for i in range(6) for j in range(i)]
    x, y = ([similarity(m, i, j) for i, j in pairs] for m in (a, b))
    mx, my = sum(x) / len(x), sum(y) / len(y)
    top = sum((p - mx) * (q - my) for p, q in zip(x, y, strict=True))
    below = sum((p - mx) ** 2 for p in x) ** 0.5 * sum((q - my) ** 2 for q in y) ** 0.5
    assert correlation(a, b) == pytest.approx(top / below, abs=1e-5)
    assert correlation(a, a) == pytest.approx(1.0, abs=1e-6)


def test_nothing_of_an_evaluation_text_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentences = [f"Sentence {n} says that the number {n * n} follows {n * 7} in a list of its own." for n in range(400)]
    train, evaluation = tmp_path / "train.txt", tmp_path / "eval.txt"
    train.write_text("\n".join(sentences[:300]))
    evaluation.write_text("\n".join(sentences[280:]))
    held = ["A held-out docstring which nobody may ever train on, not even in another file of the user's."]
    monkeypatch.setattr(run, "default_texts", lambda split: held if split == "heldout" else [sentences[290], "x " * 40])
    parts, held_out = run.prepare_texts([train], [evaluation])
    assert set(held_out) == {"default held-out", "eval.txt"}
    assert shared_spans([p for part in parts for p in part], [t for texts in held_out.values() for t in texts]) == []
    assert parts[0] == ["x " * 40]
    assert any(sentences[0] in piece for piece in parts[1])  # what is not shared is kept


@pytest.mark.unchecked
def test_unknown_forms_and_too_little_text_are_typed_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="all, attention, lora"):
        finetune(config(tmp_path / "model", form="some"), [IDS])
    chosen = config(tmp_path / "model")
    student = run.finetune(replace(chosen, steps=1), [IDS])[0]
    with pytest.raises(DataError, match="at least 3 chunks, got 2"):
        measure(load_teacher(chosen.teacher), student.teacher, student.attached, IDS[:2])
