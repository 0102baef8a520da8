"""The embedded text and the user's: order, what is held out, shared spans, bad files, chunks."""

import random

import pytest
import tiny

from sparsefinder.errors import ConfigError, DataError
from training.corpus import (
    chunk_tokens,
    default_texts,
    drop_shared,
    is_heldout,
    normalize_spaces,
    read_texts,
    shared_spans,
    special_tokens,
    split_texts,
    text_hash,
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return tiny.teacher(tmp_path_factory.mktemp("teacher"))


def naive_shared(train, evaluation, length):
    spans = [{t[i : i + length] for t in map(normalize_spaces, texts) for i in range(len(t) - length + 1)}
             for texts in (train, evaluation)]  # fmt: skip
    return sorted(spans[0] & spans[1])


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 13])
def test_shared_spans_are_those_of_the_definition(length):
    rng = random.Random(length)
    texts = ["".join(rng.choice("ab \n") for _ in range(rng.randint(0, 60))) for _ in range(8)]
    texts[0] += "  déjà vu 𝒳 \ud800 "
    texts[5] += "déjà   vu 𝒳 \ud800"
    assert shared_spans(texts[:4], texts[4:], length) == naive_shared(texts[:4], texts[4:], length)
    kept = drop_shared(texts[:4], texts[4:], length)
    assert kept == [text for text in texts[:4] if not naive_shared([text], texts[4:], length)]


def test_spans_need_a_length():
    with pytest.raises(ConfigError, match="length"):
        shared_spans(["a"], ["b"], 0)


@pytest.mark.slow
def test_default_text_shares_no_span_with_what_is_held_out():
    train, heldout = default_texts("train", 20_000), default_texts("heldout")
    assert sum(map(len, train)) > 100_000
    assert sum(map(len, heldout)) > 50_000
    assert shared_spans(train, heldout) == []
    assert train == default_texts("train", 20_000)
    assert len(set(map(normalize_spaces, train))) == len(train)
    assert default_texts("heldout", 10_000) == heldout[: len(default_texts("heldout", 10_000))]


def test_one_name_in_ten_is_held_out():
    share = sum(is_heldout(f"library{n}") for n in range(2000)) / 2000
    assert 0.07 < share < 0.13


def test_files_are_read_whole_and_bad_ones_are_named(tmp_path):
    good, latin, empty = tmp_path / "good.txt", tmp_path / "latin.txt", tmp_path / "empty.txt"
    good.write_text("one\ntwo\n", encoding="utf-8")
    latin.write_bytes("caf\xe9".encode("latin-1"))
    empty.write_text(" \n")
    assert read_texts([good]) == ["one\ntwo\n"]
    for path, reason in (
        (latin, "UTF-8"),
        (empty, "empty"),
        (tmp_path / "none.txt", "No such file"),
        (tmp_path, "directory"),
    ):
        with pytest.raises(DataError, match=reason) as caught:
            read_texts([good, path])
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_the_end_of_a_users_text_is_held_out_and_not_trained_on():
    lines = [f"line {n} of a long book that says {n * n} different things about number {n + 7}" for n in range(400)]
    text = "\n".join([*lines, lines[3]])
    train, heldout = split_texts([text])
    assert shared_spans(train, heldout) == []
    assert 0.05 < sum(map(len, heldout)) / len(text) < 0.15
    assert lines[0] not in "\n".join(train)  # its block also holds the line that comes back at the end
    assert lines[100] in "\n".join(train)
    with pytest.raises(ConfigError, match="heldout_share"):
        split_texts([text], 1.0)


def test_chunks_are_consecutive_and_have_special_tokens(teacher):
    texts = ["abc def", "ghi " * 20, "xyz"]
    chunks = chunk_tokens(teacher, texts, 10)
    whole = [i for text in texts for i in teacher.tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert {len(chunk) for chunk in chunks} == {10}
    assert {(chunk[0], chunk[-1]) for chunk in chunks} == {(2, 3)}
    assert [i for chunk in chunks for i in chunk[1:-1]] == whole[: len(chunks) * 8]
    assert len(whole) - len(chunks) * 8 < 8
    assert special_tokens(teacher) == ([2], [3])


def test_a_short_text_is_one_short_chunk(teacher):
    assert chunk_tokens(teacher, ["ab"], 10) == [
        [2, *teacher.tokenizer("ab", add_special_tokens=False)["input_ids"], 3]
    ]


@pytest.mark.parametrize("tokens", [2, 97])
def test_chunk_lengths_that_the_teacher_cannot_take(teacher, tokens):
    with pytest.raises(ConfigError, match=r"expected 3 to 96.*got"):
        chunk_tokens(teacher, ["abc"], tokens)


def test_text_without_a_token(teacher):
    with pytest.raises(DataError, match="at least one token"):
        chunk_tokens(teacher, ["  ", ""], 10)


def test_the_hash_of_a_text_knows_order_and_borders():
    assert text_hash(["a", "b"]) == text_hash(iter(["a", "b"]))
    assert len({text_hash(texts) for texts in (["a", "b"], ["b", "a"], ["ab"], ["a", "b", ""])}) == 4
