"""The kernels of the sweep, by loops."""

import numpy as np
import pytest
import torch

from sparsefinder.patterns.content import pair_scores
from training import sweep_kernels as kernels
from training.sweep_measure import geometry


def test_counting_by_loops():
    rng = np.random.default_rng(0)
    heads, n, settings, windows, globals_, tile = 2, 13, 4, (0, 1, 5), (0, 1, 3), 4
    levels = rng.integers(0, settings + 1, (heads, n, n)).astype(np.uint8)
    gold, p = rng.random((heads, n, n)) < 0.2, rng.random((heads, n, n)).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(gold.reshape(heads, -1).sum(1))])
    flat = np.concatenate([np.flatnonzero(g) for g in gold]).astype(np.int32)
    mass = np.concatenate([p[h][gold[h]] for h in range(heads)])
    place = geometry(n, windows, globals_, 0)
    out = [np.zeros((heads, settings, len(windows), len(globals_))) for _ in range(5)]
    kernels.count_pairs(levels, place.cell, False, out[0])
    kernels.count_gold(levels, place.near, place.globe, offsets, flat, mass, *out[1:4])
    kernels.count_planned(levels, place.near, np.asarray(globals_, np.int64), 0, tile, out[4])
    far = np.abs(np.arange(n)[:, None] - np.arange(n))
    first = np.minimum(np.arange(n)[:, None], np.arange(n))
    for h, s, w, g in np.ndindex(out[0].shape):
        keep = (levels[h] <= s) | ((windows[w] > 0) & (far <= windows[w] // 2)) | (first < globals_[g])
        expected = [
            keep.sum(), (keep & gold[h]).sum(), p[h][keep & gold[h]].sum(), (~(gold[h] & ~keep)).all(1).sum(),
            planned(keep, globals_[g], tile),
        ]  # fmt: skip
        assert [float(x[h, s, w, g]) for x in out] == pytest.approx(expected, rel=1e-5)


def planned(keep, single, tile):
    keep, total, row = keep | np.eye(len(keep), dtype=bool), 0, 0
    while row < len(keep):
        end = row + 1 if row < single else min((row // tile + 1) * tile, len(keep))
        total += keep[row:end].any(0).sum() * (end - row)
        row = end
    return total


def test_levels_by_loops():
    rng = np.random.default_rng(1)
    scores = rng.random((2, 7, 7)).astype(np.float32)
    edges = np.sort(rng.random((2, 7, 3)).astype(np.float32), -1)[..., ::-1].copy()
    out = np.empty((2, 7, 7), np.uint8)
    kernels.level_scores(scores, edges[:, 0].copy(), out)
    assert (out == (scores[..., None] < edges[:, :1, None, :]).sum(-1)).all()
    kernels.level_rows(scores, edges, out)
    assert (out == (scores[..., None] < edges[:, :, None, :]).sum(-1)).all()
    ranks = [np.argsort(rng.random((2, 5, 7)), 1).astype(np.uint8) for _ in range(2)]
    kernels.level_meetings(*ranks, out)
    assert (out == np.maximum(ranks[0][..., None], ranks[1][:, :, None]).min(1)).all()
    nearness = rng.integers(0, 4, (2, 7, 5)).astype(np.float32)  # with ties
    order = np.argsort(np.argsort(nearness, -1, kind="stable"), -1, kind="stable")
    found = np.empty((2, 5, 7), np.uint8)
    kernels.rank_groups(nearness, found)
    assert (found == order.transpose(0, 2, 1)).all()
    points = [rng.random((2, 7, 3)).astype(np.float32) for _ in range(2)]
    distances = np.empty((2, 7, 7), np.float32)
    kernels.squared_distances(points[0], np.ascontiguousarray(points[1].transpose(0, 2, 1)), distances)
    tensors = [torch.from_numpy(x) for x in points]
    expected = pair_scores(tensors[0][:, :, None], tensors[1][:, None], "euclidean")
    assert torch.equal(-torch.from_numpy(distances), expected)  # bit for bit
    words = [rng.integers(-4, 4, (2, 7, 2)) for _ in range(2)]
    kernels.level_bits(*words, out)
    assert (out == 1 - ((words[0][:, :, None] & words[1][:, None]) != 0).any(-1)).all()
