"""Small models of the tasks: attention against loops written from the definitions; models that share no gradient."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sparsefinder.errors import ConfigError, ShapeError
from sparsefinder.patterns.algebra import materialize
from sparsefinder.patterns.legal import legal_full
from sparsefinder.patterns.text import parse_pattern
from training.tasks.copy_model import CopyModel, by_masks, pattern_masks
from training.tasks.copy_patterns import THIN, WIDE, entmax_map, known_figures, softmax_map
from training.tasks.copying import Copying, copy_batch, copy_loss
from training.tasks.kernels import best_error, head_kernels, heads_needed, point_kernel, projection_error
from training.tasks.memories import decaying_kernel
from training.tasks.memory_model import STEEPEST, MemoryModel, Setting, Size
from training.tasks.together import Schedule, clip_each, linear, train_together

FORMS = list(itertools.product(("none", "dot", "gate", "slope"), (True, False)))


@pytest.mark.parametrize(("product", "normalised"), FORMS)
def test_attention_weights_follow_the_definition(product, normalised):
    settings = [Setting(product, "log", normalised), Setting(product, "lin", normalised)]
    model = MemoryModel(settings, Size(layers=1, heads=2, width=6, head_width=3), seed=1)
    h = torch.randn(2, 2, 5, 6, generator=torch.Generator().manual_seed(0))
    model.requires_grad_(False).follow[0].mul_(20)  # so that the bound of the gate is seen
    weights = model.attention_weights(h, 0).expand(2, 2, 2, 5, 5)
    for g, b, head, t in itertools.product(range(2), range(2), range(2), range(5)):
        rate = math.exp(float(model.log_rate[0][g, head]))
        columns = slice(3 * head, 3 * head + 3)
        follow = float(h[g, b, t] @ model.follow[0][g, :, head])
        bounded = STEEPEST * math.tanh(follow / STEEPEST)
        query = (h[g, b, t] @ model.query[0][g])[columns]
        expected = []
        for s in range(5):
            if s >= t:
                expected.append(0.0)
                continue
            bias = -rate * (math.log(t - s) if g == 0 else t - s)
            score = {
                "none": bias,
                "dot": bias + float(query @ (h[g, b, s] @ model.key[0][g])[columns]) / math.sqrt(3),
                "gate": bias + bounded,
                "slope": bias * math.exp(bounded),
            }[product]
            expected.append(math.exp(score))
        if normalised and t > 0:
            expected = [e / sum(expected) for e in expected]
        assert weights[g, b, head, t].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_outputs_do_not_depend_on_later_tokens_and_gradients_are_finite():
    model = MemoryModel([Setting("dot", "log"), Setting("dot", "lin", heads=1)], Size(layers=2, heads=2, inputs=3))
    x = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[:, 4:] += 1.0
    with torch.no_grad():
        assert torch.equal(model(x)[:, :, :4], model(changed)[:, :, :4])
        assert not torch.equal(model(x)[:, :, 4:], model(changed)[:, :, 4:])
    model(x).square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert model.out[0].grad[1, 8:].abs().max() == 0  # the second model uses one head of 8 columns
    assert model.out[0].grad[0, 8:].abs().max() > 0


@pytest.mark.unchecked
def test_settings_that_differ_in_their_form_are_refused():
    with pytest.raises(ConfigError, match="one product"):
        MemoryModel([Setting("dot"), Setting("none")], Size())
    with pytest.raises(ConfigError, match="known product"):
        Setting("cross")
    with pytest.raises(ConfigError, match="above 0"):
        Schedule(0, 1e-3)


def test_models_trained_together_are_what_they_are_alone():
    """The same weights, data and steps: a neighbour changes nothing (clipping and Adam are per model)."""

    def trained(own):
        model = torch.nn.Module()
        model.w = torch.nn.Parameter(torch.tensor([[[1.0], [2.0]], [[50.0], [-3.0]]])[own])

        def loss_of(generator):
            x = torch.randn(8, 2, generator=generator)
            return (linear(x.expand(len(own), 8, 2), model.w) - 1).square().mean((1, 2))

        losses = train_together(model, Schedule(20, 0.1, warmup=4), loss_of)
        return model.w.detach(), losses

    (both, losses), (first, alone), (second, _) = trained([0, 1]), trained([0]), trained([1])
    torch.testing.assert_close(both, torch.cat([first, second]))
    torch.testing.assert_close(losses[:, :1], alone)
    assert losses.shape == (20, 2)


def test_clipping_bounds_each_model_apart():
    small, large = torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(2, 1))
    small.grad, large.grad = torch.tensor([[0.1, 0, 0], [3.0, 0, 0]]), torch.tensor([[0.2], [4.0]])
    clip_each(iter([small, large]))
    assert small.grad[:, 0].tolist() == pytest.approx([0.1, 0.6])
    assert large.grad[:, 0].tolist() == pytest.approx([0.2, 0.8])


def test_rates_warm_up_and_fall():
    schedule = Schedule(100, 0.5, warmup=10)
    rates = [schedule.rate_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.05, rel=0.01)
    assert max(rates) < 0.5
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert 0.01 * 0.5 < rates[-1] < 0.03 * 0.5


@pytest.mark.parametrize("apply", [softmax_map, entmax_map])
def test_a_copy_model_sees_through_its_pattern_only(apply):
    task = Copying(4, 5)
    patterns = [parse_pattern("window(3)"), parse_pattern("strided(5)")]
    masks = pattern_masks(patterns, 2, 2, task.tokens)
    model = CopyModel(2, 2, 2, 16, task.tokens, task.vocabulary)
    ids, _ = copy_batch(task, 1, torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = model(ids, by_masks(masks), apply)
        for j in range(1, 5):
            changed = ids.clone()
            changed[0, j] = 2 + (int(ids[0, j]) - 1) % 5
            moved = (model(changed, by_masks(masks), apply) != plain).any(-1)[:, 0]
            for i in range(task.tokens):
                assert bool(moved[0, i]) <= (abs(i - j) <= 2)  # two layers of a window of radius 1
                assert bool(moved[1, i]) <= ((i - j) % 5 == 0)
            assert moved[1, j + 5]


def test_masks_are_the_patterns_of_each_layer_and_head():
    texts = [*THIN.values(), *WIDE.values()]
    masks = pattern_masks([parse_pattern(text) for text in texts[:4]], 3, 2, 40)
    for g, (layer, h) in itertools.product(range(4), itertools.product(range(3), range(2))):
        kind, heads = ("strided", "fixed")[g // 2], ("sequential", "multihead")[g % 2]
        second = (layer if heads == "sequential" else h) % 2
        pair = {"strided": ("window(17)", "strided(8)"), "fixed": ("blocks(16)", "fixed(16, 2)")}[kind]
        expected = materialize(parse_pattern(pair[second]), legal_full(1, 40, 40), 0, 0)
        assert torch.equal(masks[g, layer, h], expected)
    random = pattern_masks([parse_pattern("random(4)")], 2, 2, 20)[0]
    assert not torch.equal(random[0, 0], random[1, 0])
    assert not torch.equal(random[0, 0], random[0, 1])


@pytest.mark.unchecked
def test_masks_need_all_their_axes():
    with pytest.raises(ShapeError, match="masks"):
        by_masks(torch.ones(1, 4, 4, dtype=torch.bool))


@pytest.mark.parametrize(("patterns", "low", "high"), [(THIN, 0.12, 0.14), (WIDE, 0.22, 0.26)])
def test_patterns_of_one_group_have_about_one_density(patterns, low, high):
    task = Copying()
    masks = pattern_masks([parse_pattern(text) for text in patterns.values()], 2, 4, task.tokens)
    for name, own in zip(patterns, masks, strict=True):
        assert low <= float(own.float().mean()) <= high, (name, float(own.float().mean()))


def test_no_model_beats_the_ceiling_that_its_pattern_sets():
    task = Copying(6, 4)
    masks = pattern_masks([parse_pattern("window(5)")], 1, 2, task.tokens)
    model = CopyModel(1, 1, 2, 16, task.tokens, task.vocabulary)
    figures = known_figures(task, masks[0])
    assert figures == {"gold_recall": 0.0, "gold_reach": 0.0, "ceiling": pytest.approx(0.25)}

    def loss_of(generator):
        ids, targets = copy_batch(task, 16, generator)
        return copy_loss(model(ids, by_masks(masks), softmax_map), targets)

    losses = train_together(model, Schedule(40, 1e-2), loss_of)
    assert float(losses[-20:].mean()) > math.log(4) * 0.95


def test_projection_error_is_that_of_least_squares():
    g = torch.Generator().manual_seed(0)
    heads = torch.randn(7, 12, 3, generator=g, dtype=torch.float64)
    kernel = torch.randn(7, 12, generator=g, dtype=torch.float64)
    for i in range(7):
        a, *_ = np.linalg.lstsq(heads[i].numpy(), kernel[i].numpy(), rcond=None)
        rest = kernel[i].numpy() - heads[i].numpy() @ a
        wanted = float(rest @ rest / (kernel[i].numpy() @ kernel[i].numpy()))
        assert float(projection_error(kernel, heads)[i]) == pytest.approx(wanted, abs=1e-10)


def test_a_bias_is_perfect_for_the_kernel_of_its_own_kind():
    kernels = torch.stack([decaying_kernel("exponential", 0.3, 32), decaying_kernel("polynomial", 1.2, 32)])
    log, lin = (best_error(kernels, bias, 1, starts=2, steps=60).tolist() for bias in ("log", "lin"))
    assert lin[0] < 1e-3 < 0.01 < log[0]
    assert log[1] < 1e-3 < 0.01 < lin[1]
    assert best_error(kernels, "log", 3, starts=2, steps=60)[0] < log[0] / 3


def test_head_kernels_and_the_number_that_is_needed():
    kernel = head_kernels(torch.tensor([math.log(2.0)], dtype=torch.float64), "log", 4)[:, 0]
    assert (kernel / kernel[0]).tolist() == pytest.approx([s**-2.0 for s in (1, 2, 3, 4)])
    kernel = head_kernels(torch.tensor([0.0], dtype=torch.float64), "lin", 4)[:, 0]
    assert (kernel / kernel[0]).tolist() == pytest.approx([math.exp(1 - s) for s in (1, 2, 3, 4)])
    assert point_kernel(3, 4).tolist() == [0, 0, 1, 0]
    assert heads_needed([0.9, 0.1, 0.05], [1, 2, 4], 0.1) == 2
    assert heads_needed([0.9], [1], 0.1) is None


def test_seeds_of_one_setting_start_differently():
    model = MemoryModel([replace(Setting(), heads=2)] * 2, Size())
    assert not torch.equal(model.query[0][0], model.query[0][1])
