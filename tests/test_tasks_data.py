"""Tasks with known answers: generators and gold positions against loops written from the definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefinder.errors import ConfigError
from training.tasks.copying import (
    MASK,
    SEPARATOR,
    Copying,
    copy_accuracy,
    copy_batch,
    copy_loss,
    direct_recall,
    gold_positions,
    reached_share,
)
from training.tasks.memories import (
    Alphabet,
    adaptive_read,
    boolean_alphabet,
    convolved,
    decaying_kernel,
    error_share,
    fixed_memories,
    jump_alphabet,
    nested_memories,
    nested_positions,
    parallel_memories,
)
from training.tasks.reversal import EOS, PAD, START, Reversal, reversal_batch


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@settings(max_examples=20, deadline=None)
@given(length=st.integers(1, 9), symbols=st.integers(2, 7), seed=st.integers(0, 99))
def test_a_copy_text_is_separator_symbols_separator_masks(length, symbols, seed):
    task = Copying(length, symbols)
    ids, targets = copy_batch(task, 3, seeded(seed))
    gold = gold_positions(task).tolist()
    assert ids.shape == (3, 2 * (length + 1))
    for b in range(3):
        row = ids[b].tolist()
        assert row[0] == row[length + 1] == SEPARATOR
        assert row[length + 2 :] == [MASK] * length
        for i in range(task.tokens):
            if gold[i] < 0:
                assert targets[b, i] == -1
                assert i <= length + 1
            else:
                assert i - gold[i] == length + 1
                assert targets[b, i] == row[gold[i]]


def test_gold_recall_and_reach_against_a_walk_over_the_pairs():
    task = Copying(4, 3)
    for seed in range(12):
        masks = torch.rand(3, 2, task.tokens, task.tokens, generator=seeded(seed)) < 0.15
        pairs = [(i, i - 5) for i in range(6, 10)]
        direct = [any(masks[layer, h, i, j] for layer in range(3) for h in range(2)) for i, j in pairs]

        def reaches(layer, i, j):
            if layer < 0:
                return i == j
            before = [m for m in range(10) if m == i or any(masks[layer, h, i, m] for h in range(2))]
            return any(reaches(layer - 1, m, j) for m in before)

        assert direct_recall(task, masks) == pytest.approx(sum(map(bool, direct)) / 4)
        assert reached_share(task, masks) == pytest.approx(sum(reaches(2, i, j) for i, j in pairs) / 4)


def test_copy_loss_and_accuracy_look_at_the_targets_only():
    task = Copying(3, 4)
    _, targets = copy_batch(task, 2, seeded())
    logits = torch.full((2, 2, task.tokens, task.vocabulary), -50.0)
    for b in range(2):
        for i in range(task.tokens):
            right = int(targets[b, i]) if targets[b, i] >= 0 else MASK
            logits[0, b, i, right] = 50.0  # the first model is right everywhere
            logits[1, b, i, right if i % 2 else SEPARATOR] = 50.0  # the second at odd positions
    assert copy_accuracy(logits, targets).tolist() == pytest.approx([1.0, 2 / 3])  # targets at 5, 6, 7
    assert copy_loss(logits, targets).tolist() == pytest.approx([0.0, 100 / 3], abs=1e-4)


@settings(max_examples=20, deadline=None)
@given(depth=st.integers(1, 3), longest=st.integers(1, 4), seed=st.integers(0, 99))
def test_nested_memories_follow_the_definition(depth, longest, seed):
    alphabet, n = jump_alphabet(longest), 12
    tokens = torch.randint(alphabet.size, (2, n), generator=seeded(seed))
    y, positions = nested_memories(tokens, alphabet, depth), nested_positions(tokens, alphabet, depth)
    for b in range(2):
        row = tokens[b].tolist()
        for t in range(n):
            if t < longest:
                assert math.isnan(y[b, t])
                assert positions[:, b, t].tolist() == [-1] * depth
                continue
            product, seen = alphabet.values[row[t]], t
            for k in range(depth):
                seen = t - alphabet.jumps[row[seen]]  # the lag is counted from t (equation 8), not from `seen`
                assert positions[k, b, t] == seen
                product *= alphabet.values[row[seen]]
            assert y[b, t] == product


def test_the_boolean_example_of_the_paper():
    x = torch.tensor([[1, -1, -1, 1, 1, -1]])
    g = {1: 1, -1: 2}
    y = nested_memories((x + 1) // 2, boolean_alphabet(), 2)
    for t in range(2, 6):
        first = int(x[0, t - g[int(x[0, t])]])
        assert y[0, t] == int(x[0, t]) * first * int(x[0, t - g[first]])


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99))
def test_other_memories_follow_their_definitions(seed):
    alphabet, n = jump_alphabet(3), 12
    tokens = torch.randint(alphabet.size, (2, n), generator=seeded(seed))
    value = torch.tensor(alphabet.values).float()[tokens]
    one, many = adaptive_read(tokens, alphabet), parallel_memories(tokens, alphabet, (0, 2))
    fixed = fixed_memories(value, (1, 4))
    for b in range(2):
        for t in range(n):
            jump = alphabet.jumps[int(tokens[b, t])]
            if t >= 3:
                assert one[b, t] == value[b, t - jump]
            if t >= 5:
                assert many[b, t] == (value[b, t - jump] + value[b, t - jump - 2]) / 2
            if t >= 4:
                assert fixed[b, t] == value[b, t - 1] * value[b, t - 4]
    assert one[:, :3].isnan().all()
    assert many[:, :5].isnan().all()
    assert fixed[:, :4].isnan().all()


@pytest.mark.parametrize(("decay", "rate"), [("exponential", 0.3), ("polynomial", 1.5)])
def test_convolution_with_a_decaying_kernel(decay, rate):
    x, n = torch.randn(2, 9, generator=seeded()), 9
    raw = [math.exp(-rate * s) if decay == "exponential" else s**-rate for s in range(1, 7)]
    norm = math.sqrt(sum(r * r for r in raw))
    y = convolved(x, decaying_kernel(decay, rate, 6))
    for b in range(2):
        for t in range(n):
            wanted = sum(float(x[b, t - s]) * raw[s - 1] / norm for s in range(1, 7) if s <= t)
            assert float(y[b, t]) == pytest.approx(wanted, abs=1e-5)


def test_error_share_is_one_for_the_mean_and_ignores_what_is_unknown():
    target = torch.tensor([[math.nan, 1.0, -1.0, 3.0]])
    y = torch.stack([torch.full((1, 4), 1.0), torch.nan_to_num(target, nan=77.0)])
    assert error_share(y, target).tolist() == pytest.approx([1.0, 0.0])


@settings(max_examples=20, deadline=None)
@given(order=st.sampled_from(["copy", "reverse"]), seed=st.integers(0, 99))
def test_reversal_targets_stand_at_their_gold_positions(order, seed):
    pairs = reversal_batch(Reversal(order, 2, 6, 5), 4, seeded(seed))
    for b in range(4):
        n = int(pairs.source_real[b].sum()) - 2
        source, target = pairs.source[b].tolist(), pairs.target[b].tolist()
        string = source[1 : n + 1]
        assert 2 <= n <= 6
        assert min(string) > START
        assert source == [START, *string, EOS] + [PAD] * (6 - n)
        assert target[n:] == [EOS] + [PAD] * (6 - n)
        assert int(pairs.target_real[b].sum()) == n + 1
        assert target[:n] == (string if order == "copy" else string[::-1])
        assert pairs.seen[b].tolist()[: n + 1] == [START, *target[:n]]
        assert [target[i] == source[j] for i, j in enumerate(pairs.gold[b].tolist()) if j >= 0] == [True] * n
        places = list(range(1, n + 1))
        assert pairs.gold[b].tolist() == (places if order == "copy" else places[::-1]) + [-1] * (7 - n)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Copying(0),
        lambda: Alphabet((1, 2), (1, 1)),
        lambda: Alphabet((1, -1), (1, 0)),
        lambda: fixed_memories(torch.ones(1, 4), ()),
        lambda: Reversal("mirror"),
    ],
)
@pytest.mark.unchecked
def test_what_makes_no_sense_is_refused(make):
    with pytest.raises(ConfigError):
        make()
