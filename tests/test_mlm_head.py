"""Fill-mask heads on a tiny BERT: what they learn, what they share with their teacher, what is read back."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from typer.testing import CliRunner

from sparsefinder.errors import ArtifactError, ConfigError, IncompatibleModelError
from sparsefinder.hf import attach
from sparsefinder.mlm_head import (
    MlmCard,
    MlmHead,
    load_mlm_head,
    new_mlm_head,
    read_mlm_card,
    save_mlm_head,
    with_mlm_head,
)
from sparsefinder.teacher import Teacher, batch, load_teacher
from training import finetune_run
from training.cli import app
from training.config import MlmHeadConfig
from training.finetune import batches
from training.masking import BATCHES_PER_FILE, Draws, draw, kept_draws, mask_texts
from training.mlm_head import answers, figures, fit_head, held_draws, unigram
from training.sweep_quality import perplexity

MASK, SPECIAL = 4, {0, 1, 2, 3, 4}
QUICK = MlmHeadConfig(tokens=24, batch_size=4, batches=4, epochs=20, positions=32, learning_rate=3e-3)


@pytest.fixture
def teacher(tmp_path: Path) -> Teacher:
    return tiny.teacher(tmp_path)


def alternating(count: int, length: int = 20) -> list[list[int]]:
    """Texts that repeat one of ten words: whoever reads a neighbour knows what is masked."""
    return [[2, *[5 + n % 10] * (length - 2), 3] for n in range(count)]


def saved(folder: Path, teacher: Teacher, **changes: str) -> MlmHead:
    head = new_mlm_head(teacher, seed=3)
    save_mlm_head(folder, head, replace(MlmCard("tiny", teacher.fingerprint, ""), **changes))
    return head


def test_a_head_learns_more_than_how_frequent_words_are(teacher: Teacher) -> None:
    attached = attach(teacher.model, alpha=1.5)
    with attached.using("dense"):
        drawn = draw(teacher, alternating(60), 0.15, torch.Generator().manual_seed(0))
        held = held_draws(teacher, alternating(20), 7)
    told: list[tuple[int, int]] = []
    head = fit_head(QUICK, new_mlm_head(teacher), drawn, lambda step, steps: told.append((step, steps)))
    count = QUICK.epochs * math.ceil(len(drawn.words) / QUICK.positions)
    assert told == [(step, count) for step in range(1, count + 1)]
    found, shares = figures(head, held), unigram(drawn, 64)
    assert found["positions"] == len(held.words)
    assert found["perplexity"] < 0.7 * math.exp(-float(shares[held.words].mean()))
    assert found["accuracy"] > 2 * float((held.words == shares.argmax()).float().mean())


def test_answers_are_cross_entropies_and_hits_one_by_one(teacher: Teacher) -> None:
    head = new_mlm_head(teacher, seed=2)
    drawn = draw(teacher, tiny.token_ids([24] * 3), 0.4, torch.Generator().manual_seed(0))
    losses, right = answers(head, drawn)
    for at, word in enumerate(drawn.words.tolist()):
        scores = head(drawn.hidden[at].float()).tolist()
        assert float(losses[at]) == pytest.approx(math.log(sum(map(math.exp, scores))) - scores[word], rel=1e-4)
        assert bool(right[at]) == (scores[word] == max(scores))


def test_unigram_counts_words_and_leaves_none_impossible() -> None:
    shares = unigram(Draws(torch.zeros(3, 2), torch.tensor([1, 1, 3])), 4).exp()
    assert shares.tolist() == pytest.approx([1 / 7, 3 / 7, 1 / 7, 2 / 7])


def test_training_leaves_the_teacher_and_its_embeddings_as_they_are(teacher: Teacher) -> None:
    before = {name: tensor.clone() for name, tensor in teacher.model.state_dict().items()}
    drawn = draw(teacher, alternating(8), 0.15, torch.Generator().manual_seed(0))
    fit_head(replace(QUICK, epochs=1), new_mlm_head(teacher), drawn)
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.model.state_dict().items())
    assert all(weight.grad is None for weight in teacher.model.parameters())


def logits_of(headed: Teacher, items: list[list[int]]) -> torch.Tensor:
    tokens, mask = batch(headed, items)
    with torch.no_grad():
        return headed.mlm(input_ids=tokens, attention_mask=mask.long()).logits


def test_the_decoder_is_the_teachers_word_embedding(teacher: Teacher) -> None:
    head = new_mlm_head(teacher)
    assert {name for name, _ in head.named_parameters()} == {
        "dense.weight", "dense.bias", "norm.weight", "norm.bias", "bias",
    }  # fmt: skip
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    before = head(hidden)
    with torch.no_grad():
        teacher.model.get_input_embeddings().weight[7] += 1.0
    after = head(hidden)
    others = [word for word in range(before.shape[1]) if word != 7]
    assert not torch.equal(after[:, 7], before[:, 7])
    assert torch.equal(after[:, others], before[:, others])


def test_logits_follow_the_definition(teacher: Teacher) -> None:
    head = new_mlm_head(teacher, seed=5).requires_grad_(False)
    with torch.no_grad():
        for number, weight in enumerate((head.bias, head.dense.bias, head.norm.weight, head.norm.bias)):
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
    x = torch.randn(32, generator=torch.Generator().manual_seed(9)).double()
    turned = [
        sum(float(head.dense.weight[i, j]) * float(x[j]) for j in range(32)) + float(head.dense.bias[i])
        for i in range(32)
    ]
    bent = [0.5 * value * (1 + math.erf(value / math.sqrt(2))) for value in turned]
    mean = sum(bent) / 32
    deviation = math.sqrt(sum((value - mean) ** 2 for value in bent) / 32 + 1e-12)
    normed = [
        (value - mean) / deviation * float(head.norm.weight[i]) + float(head.norm.bias[i])
        for i, value in enumerate(bent)
    ]
    words = teacher.model.get_input_embeddings().weight.detach()
    came = head(x.float())
    for word in (0, 11, 63):
        expected = sum(float(words[word, i]) * normed[i] for i in range(32)) + float(head.bias[word])
        assert float(came[word]) == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_padding_changes_no_logit(teacher: Teacher) -> None:
    head = new_mlm_head(teacher)
    short, long = tiny.token_ids([9, 30])
    alone, padded = (logits_of(with_mlm_head(teacher, head), items) for items in ([short], [short, long]))
    torch.testing.assert_close(padded[0, :9], alone[0], rtol=1e-4, atol=1e-5)


def test_a_head_makes_a_teacher_that_is_asked_as_one_with_its_own(teacher: Teacher) -> None:
    head = new_mlm_head(teacher)
    headed = with_mlm_head(teacher, head)
    assert headed.fingerprint == teacher.fingerprint
    assert teacher.mlm is None
    items = tiny.token_ids([24] * 4)  # one batch, whose masks are those of the same seed
    drawn = draw(teacher, items, 0.15, torch.Generator().manual_seed(0))
    assert perplexity(headed, items) == pytest.approx(figures(head, drawn)["perplexity"], rel=1e-2)


def test_masks_are_a_share_of_the_ordinary_tokens_and_never_none(teacher: Teacher) -> None:
    generator = torch.Generator().manual_seed(0)
    items = tiny.token_ids([90] * 200)
    masked = mask_texts(teacher, items, 0.15, generator)
    truth = torch.tensor(items)
    assert torch.equal(masked.tokens[masked.hidden], torch.full_like(masked.words, MASK))
    assert torch.equal(masked.tokens[~masked.hidden], truth[~masked.hidden])
    assert torch.equal(masked.words, truth[masked.hidden])
    assert not SPECIAL & set(masked.words.tolist())
    assert abs(len(masked.words) / (200 * 88) - 0.15) < 0.02
    mixed = mask_texts(teacher, [*tiny.token_ids([3, 12]), [2, 3]], 0.001, generator)  # one ordinary token, ten, none
    assert mixed.hidden.sum(1).tolist() == [1, 1, 0]
    assert mixed.real.sum(1).tolist() == [3, 12, 2]


def test_a_tokenizer_without_a_mask_is_refused(teacher: Teacher) -> None:
    teacher.tokenizer.mask_token = None
    with pytest.raises(ConfigError, match="mask token"):
        mask_texts(teacher, tiny.token_ids([9]), 0.15, torch.Generator())


def test_drawing_goes_on_where_it_stopped(teacher: Teacher, tmp_path: Path) -> None:
    items, count = tiny.token_ids([12] * 8), BATCHES_PER_FILE + 3

    def run(folder: str) -> Draws:
        return kept_draws(teacher, batches([items], 2, 0), count, tmp_path / folder, 0.15, 0)

    whole = run("whole")
    assert len(whole.words) >= 2 * count
    stopped = run("stopped")
    files = sorted((tmp_path / "stopped").iterdir())
    assert len(files) == 2
    files[1].unlink()
    before = files[0].stat().st_mtime_ns
    again = run("stopped")
    assert files[0].stat().st_mtime_ns == before
    for other in (stopped, again):
        assert torch.equal(other.words, whole.words)
        assert torch.equal(other.hidden, whole.hidden)


def test_a_saved_head_is_read_back(teacher: Teacher, tmp_path: Path) -> None:
    head = saved(tmp_path / "head", teacher)
    read = load_mlm_head(tmp_path / "head", teacher, None)
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, head.state_dict()[name].half().float())
    assert read_mlm_card(tmp_path / "head").teacher_fingerprint == teacher.fingerprint
    assert not any(weight.requires_grad for weight in read.parameters())


@pytest.mark.parametrize("name", ["head.safetensors", "card.json"])
def test_a_damaged_or_missing_file_is_refused(teacher: Teacher, tmp_path: Path, name: str) -> None:
    saved(tmp_path / "head", teacher)
    path = tmp_path / "head" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ArtifactError, match=name):
        load_mlm_head(tmp_path / "head", teacher, None)
    path.unlink()
    with pytest.raises(ArtifactError, match=f"{name}: missing"):
        load_mlm_head(tmp_path / "head", teacher, None)


def test_an_edited_card_is_refused(teacher: Teacher, tmp_path: Path) -> None:
    saved(tmp_path / "head", teacher)
    path = tmp_path / "head" / "card.json"
    body = json.loads(path.read_text())
    path.write_text(json.dumps(body | {"delta": "b"}))
    with pytest.raises(ArtifactError, match="card_hash"):
        load_mlm_head(tmp_path / "head", teacher, None)
    path.write_text(json.dumps(body | {"schema_version": 2}))
    with pytest.raises(ArtifactError, match="schema_version 1"):
        load_mlm_head(tmp_path / "head", teacher, None)


def test_heads_of_other_teachers_and_broken_numbers_are_refused(teacher: Teacher, tmp_path: Path) -> None:
    head = saved(tmp_path / "head", teacher)
    with pytest.raises(IncompatibleModelError, match="head for teacher"):
        load_mlm_head(tmp_path / "head", tiny.teacher(tmp_path, seed=1), None)
    wide = tiny.teacher(tmp_path, width=16)
    with pytest.raises(ArtifactError, match="tensors of this teacher's head"):
        load_mlm_head(tmp_path / "head", replace(wide, fingerprint=teacher.fingerprint), None)
    saved(tmp_path / "delta", teacher, delta="d" * 64)
    with pytest.raises(IncompatibleModelError, match="head for delta none, got one for dddddddddddd"):
        load_mlm_head(tmp_path / "delta", teacher, None)
    with torch.no_grad():
        head.bias[3] = 1e6  # infinite as float16
    with pytest.raises(ArtifactError, match="bias: expected finite"):
        save_mlm_head(tmp_path / "other", head, MlmCard("tiny", teacher.fingerprint, ""))
    assert not (tmp_path / "other").exists()


def test_settings_outside_their_range_are_named() -> None:
    with pytest.raises(ConfigError, match="epochs"):
        replace(QUICK, epochs=0)


def test_the_command_trains_measures_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = ["what nobody trains on " * 12]
    monkeypatch.setattr(finetune_run, "default_texts", lambda split: held if split == "heldout" else ["a b c d " * 60])
    folder, out = tiny.save_teacher(tmp_path / "teacher"), tmp_path / "out"
    arguments = ["mlm-head", "--teacher", str(folder), "--artifact", "none", "--out", str(out), "--tokens", "24"]
    arguments += ["--batch-size", "2", "--batches", "3", "--epochs", "2", "--positions", "8", "--eval-chunks", "2"]
    for _ in range(2):  # the second run reads the draws of the first
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        card = read_mlm_card(out / "head")
        assert card.head_sha256[:12] in result.output
        assert "read text (0 of 1)" in result.stderr
    assert len(list(out.glob("draws-*"))) == 1
    assert set(card.training["held_out"]["default held-out"]) == {
        "perplexity", "accuracy", "positions", "unigram_perplexity", "unigram_accuracy",
    }  # fmt: skip
    opened = load_teacher(str(folder))
    assert isinstance(load_mlm_head(out / "head", opened, None), MlmHead)
