"""Losses against double loops from the papers' text, the law of the negatives, and that training learns."""

import itertools
import math
from collections import Counter

import pytest
import torch

from sparsefinder.errors import ConfigError
from training.objectives import hinge, listwise, logistic, sample_negatives, squared_distances, tile_targets


def case(seed=0, batch=2, heads=3, rows=5, keys=9, rank=2, causal=False):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, rows, rank, generator=generator)
    k = torch.randn(batch, heads, keys, rank, generator=generator)
    legal = torch.rand(batch, rows, keys, generator=generator) < 0.9
    if causal:
        legal &= torch.ones(rows, keys, dtype=torch.bool).tril()
    gold = (torch.rand(batch, heads, rows, keys, generator=generator) < 0.3) & legal[:, None]
    return q, k, gold, legal


def negatives_of(gold, legal, seed):
    """The same draw as inside `hinge`, as a list for each row."""
    flat, counts = sample_negatives(gold, legal, torch.Generator().manual_seed(seed))
    drawn = flat.split(counts.flatten().tolist())
    return dict(zip(itertools.product(*map(range, gold.shape[:3])), drawn, strict=True))


def naive_distance(q, k):
    return sum((float(a) - float(b)) ** 2 for a, b in zip(q, k, strict=True))


@pytest.mark.parametrize("form", ["pair", "sum"])
@pytest.mark.parametrize("causal", [False, True])
def test_hinge_is_equation_7_by_double_loops(form, causal):
    q, k, gold, legal = case(1, causal=causal)
    negatives = negatives_of(gold, legal, 7)
    losses = [[] for _ in range(gold.shape[1])]
    keys = gold.shape[-1]
    for (b, h, i), drawn in negatives.items():
        positive = [j for j in range(keys) if gold[b, h, i, j]]
        if not positive or not len(drawn):
            continue
        near = [naive_distance(q[b, h, i], k[b, h, j]) for j in positive]
        far = [naive_distance(q[b, h, i], k[b, h, int(e) % keys]) for e in drawn]
        if form == "pair":
            losses[h] += [max(0.0, 1 + d - far[p % len(far)]) for p, d in enumerate(near)]
        else:
            losses[h].append(max(0.0, 1 + sum(near) / len(near) - sum(far) / len(far)))
    expected = torch.tensor([sum(values) / max(len(values), 1) for values in losses])
    generator = torch.Generator().manual_seed(7)
    torch.testing.assert_close(hinge(squared_distances(q, k), gold, legal, generator, 1.0, form), expected)


@pytest.mark.unchecked
def test_hinge_refuses_another_form():
    q, k, gold, legal = case()
    with pytest.raises(ConfigError, match="pair or sum"):
        hinge(squared_distances(q, k), gold, legal, torch.Generator(), 1.0, "triplet")


@pytest.mark.parametrize("causal", [False, True])
def test_negatives_are_legal_not_gold_and_as_many_as_there_can_be(causal):
    for seed in range(20):
        _, _, gold, legal = case(seed, causal=causal)
        keys = gold.shape[-1]
        for (b, h, i), drawn in negatives_of(gold, legal, seed).items():
            chosen = [int(e) % keys for e in drawn]
            free = [j for j in range(keys) if legal[b, i, j] and not gold[b, h, i, j]]
            assert len(set(chosen)) == len(chosen) == min(int(gold[b, h, i].sum()), len(free))
            assert set(chosen) <= set(free)
            assert not causal or all(j <= i for j in chosen)


def test_negatives_are_uniform():
    gold = torch.zeros(1, 1, 2, 8, dtype=torch.bool)
    gold[..., :2] = True
    legal = torch.ones(1, 2, 8, dtype=torch.bool)
    legal[0, 1, 7] = False
    draws, counts = 4000, Counter()
    generator = torch.Generator().manual_seed(0)
    for _ in range(draws):
        flat, number = sample_negatives(gold, legal, generator)
        assert number.flatten().tolist() == [2, 2]
        counts.update(flat.tolist())
    for row, free in ((0, range(2, 8)), (1, range(2, 7))):
        share = 2 / len(free)
        for j in free:  # five standard deviations of a binomial count
            assert abs(counts[row * 8 + j] - draws * share) < 5 * math.sqrt(draws * share * (1 - share))
    assert set(counts) == {*range(2, 8), *range(10, 15)}


def test_a_row_with_more_gold_than_other_keys_uses_its_negatives_again():
    gold = torch.ones(1, 1, 1, 4, dtype=torch.bool)
    gold[..., 3] = False
    legal = torch.ones(1, 1, 4, dtype=torch.bool)
    distances = torch.tensor([[[[0.0, 1.0, 2.0, 2.5]]]])
    loss = hinge(distances, gold, legal, torch.Generator().manual_seed(0))
    assert loss.item() == pytest.approx((0 + 0 + 0.5) / 3)
    everything = torch.ones_like(gold)
    assert hinge(distances, everything, legal, torch.Generator().manual_seed(0)).item() == 0.0


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_logistic_by_double_loops(power):
    q, k, gold, legal = case(3)
    scores = 2 - squared_distances(q, k)
    result = logistic(scores, gold, legal, power)
    for h in range(gold.shape[1]):
        pairs = [
            (float(scores[b, h, i, j]), bool(gold[b, h, i, j]))
            for b, i, j in itertools.product(*map(range, legal.shape))
            if legal[b, i, j]
        ]
        positives = sum(y for _, y in pairs)
        weight = ((len(pairs) - positives) / positives) ** power
        total = sum(weight * math.log1p(math.exp(-s)) if y else math.log1p(math.exp(s)) for s, y in pairs)
        expected = total / (weight * positives + len(pairs) - positives)
        assert result[h].item() == pytest.approx(expected, rel=1e-5)


def test_listwise_is_a_divergence_from_the_teachers_share():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 4, 7, generator=generator)
    target = torch.rand(2, 3, 4, 7, generator=generator)
    target[0, 1, 2] = 0  # a tile without mass does not count
    hidden = torch.zeros(4, 7, dtype=torch.bool)
    hidden[0, 5:] = True
    share = torch.log_softmax(scores.masked_fill(hidden, -torch.inf), -1)
    result = listwise(share, target)
    for h in range(3):
        values = []
        for b, t in itertools.product(range(2), range(4)):
            seen = [j for j in range(7) if not hidden[t, j]]
            total = sum(float(target[b, h, t, j]) for j in seen)
            if total:
                parts = [(float(target[b, h, t, j]) / total, float(share[b, h, t, j])) for j in seen]
                values.append(sum(p * (math.log(p) - s) for p, s in parts if p))
        assert result[h].item() == pytest.approx(sum(values) / len(values), rel=1e-5)
    perfect = torch.where(hidden, -torch.inf, (target * ~hidden + 1e-12).log())
    assert listwise(torch.log_softmax(perfect, -1), target).abs().max() < 1e-4


def test_tile_targets_sum_the_root_of_the_mass_over_each_tiles_rows():
    mass = torch.rand(2, 5, 6, generator=torch.Generator().manual_seed(0))
    target = tile_targets(mass, 2)
    assert target.shape == (2, 3, 6)
    torch.testing.assert_close(target[:, 1], mass[:, 2].sqrt() + mass[:, 3].sqrt())
    torch.testing.assert_close(target[:, 2], mass[:, 4].sqrt())


@pytest.mark.parametrize("objective", ["hinge-pair", "hinge-sum", "logistic", "listwise"])
def test_gradient_steps_lower_the_loss(objective):
    _, _, gold, legal = case(5, rows=16, keys=24)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 3, 16, 8, generator=generator), torch.randn(2, 3, 24, 8, generator=generator)
    maps = [torch.randn(3, 2, 8, generator=generator, requires_grad=True) for _ in range(2)]
    optimizer = torch.optim.Adam(maps, lr=0.05)

    def loss():
        q, k = x @ maps[0].transpose(1, 2), y @ maps[1].transpose(1, 2)
        if objective == "listwise":
            return listwise(torch.log_softmax(q @ k.transpose(-1, -2), -1), gold.float()).sum()
        if objective == "logistic":
            return logistic(1 - squared_distances(q, k), gold, legal).sum()
        form = objective.removeprefix("hinge-")
        return hinge(squared_distances(q, k), gold, legal, torch.Generator().manual_seed(1), 1.0, form).sum()

    first = loss().item()
    for _ in range(40):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss().item() < 0.8 * first
