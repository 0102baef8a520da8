"""Fronts of a sweep: what nothing beats, recall at a sparsity, and which points are kept."""

import math
import random

import pytest

from training.sweep_fronts import at_sparsity, front, thinned


def random_points(count, seed):
    rng = random.Random(seed)
    points = []
    for _ in range(count):
        halves = {half: {"sparsity": rng.random(), "recall": rng.random(), "mass": rng.random()} for half in "ab"}
        point = {
            "window": rng.choice([0, 5]),
            "global": 0,
            "layers": {},
            "chosen": halves["a"],
            "measured": halves["b"],
        }
        points.append(point | {name: rng.random() for name in ("sparsity", "recall", "mass")})
    return points


def test_a_front_holds_what_nothing_beats():
    points = random_points(60, 0)
    line = front(points)
    for p in points:
        beaten = any(o is not p and o["sparsity"] >= p["sparsity"] and o["recall"] >= p["recall"] for o in points)
        assert (p in line) != beaten
    assert [p["sparsity"] for p in line] == sorted((p["sparsity"] for p in line), reverse=True)


def test_recall_at_a_sparsity_is_that_of_the_best_mixture_of_two_settings():
    for seed in range(5):
        points = random_points(30, seed)
        for point in points:
            point["measured"] = point["chosen"]
        places = [(1.0, 0.0), *((p["chosen"]["sparsity"], p["chosen"]["recall"]) for p in points)]
        for wanted in (0.3, 0.6, 0.9, 0.97):
            enough = max(y for x, y in places if x >= wanted)
            mixed = max(
                right[1] + (left[1] - right[1]) * (wanted - right[0]) / (left[0] - right[0])
                for left in places
                for right in places
                if left[0] > right[0] and left[0] >= wanted >= right[0]
            )
            assert at_sparsity(points, wanted)[0] == pytest.approx(max(enough, mixed), abs=1e-12)


def test_recall_at_a_sparsity_is_chosen_on_one_half_and_read_off_the_other():
    def point(chosen, measured):
        halves = {
            "chosen": {"sparsity": chosen[0], "recall": chosen[1]},
            "measured": {"sparsity": measured[0], "recall": measured[1]},
        }
        return {"window": 0, "global": 0, "layers": {}, "sparsity": 0.5, "recall": 0.5, **halves}

    points = [point((0.9, 0.5), (0.8, 0.4)), point((0.5, 0.9), (0.4, 0.8)), point((0.4, 0.8), (0.6, 1.0))]
    assert at_sparsity(points, 0.6)[0] == pytest.approx(0.6)  # halfway between (.8, .4) and (.4, .8)
    assert at_sparsity(points, 0.9)[0] == pytest.approx(0.4)
    assert at_sparsity(points, 0.95)[0] == pytest.approx(0.4 * 0.05 / 0.2)
    assert at_sparsity(points, 0.1)[0] == pytest.approx(0.8)
    assert at_sparsity(points, 0.7)[1] is points[0]
    assert math.isnan(at_sparsity([], 0.5)[0])


def test_thinning_keeps_what_tables_and_fronts_need():
    points = random_points(2000, 3)
    few = thinned(points)
    assert len(few) < 1400  # those by themselves stay
    kept = [p for p in few if "chosen" in p]
    assert 0 < sum("layers" in p for p in few) <= len(kept) < 200
    assert front(kept)[0]["sparsity"] == front(points)[0]["sparsity"]
    assert front(kept)[-1]["recall"] == front(points)[-1]["recall"]
    for sparsity in (0.3, 0.6, 0.9):
        assert at_sparsity(kept, sparsity)[0] == pytest.approx(at_sparsity(points, sparsity)[0], abs=1e-12)
