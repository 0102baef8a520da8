"""Working points: one artifact at several densities. What is denser keeps more, the served point changes nothing."""

import dataclasses
import json
from itertools import pairwise

import pytest
import tiny
import torch
from cases_artifact import artifact as cases_artifact
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from sparsefinder.artifact import CARD, Artifact, load, save
from sparsefinder.attaching import attach_artifact
from sparsefinder.edges import gold_edges
from sparsefinder.errors import ArtifactError, ConfigError
from sparsefinder.patterns.algebra import materialize
from sparsefinder.patterns.legal import legal_from_mask
from sparsefinder.patterns.positional import GlobalTokens, window
from sparsefinder.plan import plan_matrix
from sparsefinder.predictors import Distance, RowBudget, Score, Tiles, WindowOnly, layer_plan, random_projections
from sparsefinder.predictors.tiles import EVERY_KEY, NO_KEY
from sparsefinder.teacher import batch, load_teacher
from sparsefinder.working_points import WorkingPoint, at_point, least_density, movable, moved, point_at, read_points
from training.cli import app
from training.evaluate import evaluate
from training.extract import read_ids
from training.fit import positional_of
from training.working_points import APART, apart, choose_shifts

WORDS = ["".join(chr(97 + (n * k) % 8) for k in range(2, 5)) for n in range(40)]
HEADS, DIM = 2, 8
POSITIONAL = window(3) | GlobalTokens(1)


def point(density, shift, recall=0.5, layers=(0.5, None)):
    return WorkingPoint(shift, density, 1 - density, recall, 0.9, 0.3, layers)


GRID = (point(0.1, 2.0, 0.4, (0.1, None)), point(0.3, 0.0, 0.8, (0.3, None)), point(0.5, -3.0, 0.9, (0.5, None)))


def predictors():
    bilinear, metric = (random_projections(HEADS, 4, DIM, seed=3, form=form) for form in ("bilinear", "metric"))
    return {
        "one threshold": Tiles(bilinear, threshold=-3.5),
        "a threshold per head": Tiles(bilinear, threshold=torch.tensor([-3.0, -4.0])),
        "score": Score(bilinear, torch.tensor([0.5, -0.5])),
        "distance": Distance(metric, torch.tensor([2.0, 3.0])),
        "one budget": RowBudget(metric, 0.2),
        "a budget per head": RowBudget(metric, torch.tensor([0.1, 0.3])),
    }


def inputs(seed=0):
    g = torch.Generator().manual_seed(seed)
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[1, 30:] = False
    q, k = (torch.randn(2, HEADS, 40, DIM, generator=g) for _ in range(2))
    return q, k, legal_from_mask(mask)


def planned(predictor):
    q, k, legal = inputs()
    plan = layer_plan(predictor, q, k, legal, POSITIONAL, 8)
    return torch.stack([plan_matrix(plan, legal, b, h) for b in range(2) for h in range(HEADS)])


@pytest.mark.parametrize("kind", predictors())
def test_a_smaller_shift_keeps_all_pairs_of_a_greater_one(kind):
    predictor = predictors()[kind]
    unit = 0.05 if "budget" in kind else 0.5
    kept = [planned(moved(predictor, shift * unit)) for shift in (4, 2, 1, 0, -1, -2, -4)]
    for sparse, dense in pairwise(kept):
        assert not bool((sparse & ~dense).any())
    assert int(kept[0].sum()) < int(kept[3].sum()) < int(kept[-1].sum())
    assert torch.equal(kept[3], planned(predictor))
    assert torch.equal(planned(moved(predictor, 1000.0)), planned(WindowOnly(1)))  # the window and the global token
    assert planned(moved(predictor, -1000.0)).sum() == HEADS * (40**2 + 30**2)


def test_the_served_point_is_the_predictor_itself():
    for predictor in predictors().values():
        assert at_point(predictor, point(0.3, 0.0)) is predictor
        assert movable(predictor)
    assert at_point(None, point(0.3, 1.0)) is None


def test_heads_that_calibration_left_alone_stay_so():
    bilinear, metric = (random_projections(HEADS, 4, DIM, seed=3, form=form) for form in ("bilinear", "metric"))
    for shift in (-9.0, 9.0):
        tiles = moved(Tiles(bilinear, threshold=torch.tensor([NO_KEY, EVERY_KEY])), shift)
        assert tiles.threshold.tolist() == [NO_KEY, EVERY_KEY]
        budget = moved(RowBudget(metric, torch.tensor([0.0, 1.0])), shift)
        assert budget.density.tolist() == [0.0, 1.0]
        assert float(moved(Distance(metric, torch.tensor([-1.0, 2.0])), shift).threshold[0]) == -1.0


def test_a_count_of_keys_has_no_cut_to_move():
    counted = Tiles(random_projections(HEADS, 4, DIM, seed=0, form="bilinear"), keys_per_tile=3)
    for fixed in (counted, WindowOnly(3)):
        assert not movable(fixed)
        with pytest.raises(ConfigError, match="threshold or a budget"):
            moved(fixed, 1.0)
        assert moved(fixed, 0.0) is fixed


@given(st.floats(0.1, 0.5), st.floats(0.1, 0.5))
def test_between_two_points_everything_is_between_theirs(first, second):
    low, high = (point_at(GRID, density) for density in sorted((first, second)))
    assert low.shift >= high.shift
    assert low.recall <= high.recall
    assert 0.1 - 1e-9 <= low.layers[0] <= high.layers[0] <= 0.5 + 1e-9
    assert low.layers[1] is None
    assert (low.density, high.density) == tuple(sorted((first, second)))


def test_a_measured_point_is_itself_and_outside_there_is_none():
    assert [point_at(GRID, at.density) for at in GRID] == list(GRID)
    assert point_at(GRID, 0.2).shift == pytest.approx(1.0)
    for outside in (0.0999, 0.5001, float("nan")):
        with pytest.raises(ConfigError, match="working points, 0.1 to 0.5"):
            point_at(GRID, outside)
    with pytest.raises(ConfigError, match="evaluate --write"):
        point_at((), 0.3)


def test_the_least_density_that_reaches_a_recall():
    assert least_density(GRID, 0.2) == 0.1
    assert least_density(GRID, 0.6) == pytest.approx(0.2)
    assert least_density(GRID, 0.8) == 0.3
    assert point_at(GRID, least_density(GRID, 0.85)).recall == pytest.approx(0.85)
    assert least_density(GRID, 0.91) is None


def with_points(points, layers=None):
    made = cases_artifact()
    tiles = Tiles(random_projections(2, 3, 4, seed=0, form="bilinear"), threshold=-4.0)
    card = dataclasses.replace(made.card, calibration={"points": points, "tokens": 64})
    return Artifact(card, layers or (tiles,) * 6)


def entries():
    return [{**at.as_dict(), "layers": [at.density] * 6} for at in GRID]


def test_points_are_saved_and_decide_the_version(tmp_path):
    saved = save(tmp_path / "a", with_points(entries()))
    found = load(tmp_path / "a")
    assert found.card == saved
    assert [at.shift for at in read_points(found.card.calibration)] == [2.0, 0.0, -3.0]
    other = [*entries()[:2], {**entries()[2], "shift": -4.0}]
    assert save(tmp_path / "b", with_points(other)).hash != saved.hash


def test_an_artifact_without_points_loads_and_keeps_its_hash(tmp_path):
    old = with_points([])
    plain = dataclasses.replace(old, card=dataclasses.replace(old.card, calibration={}))
    assert (
        save(tmp_path / "a", old).hash
        == save(tmp_path / "b", plain).hash
        != save(tmp_path / "c", with_points(entries())).hash
    )
    assert read_points(load(tmp_path / "b").card.calibration) == ()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda rows: rows[::-1], "rising densities"),
        (lambda rows: [{**row, "shift": 0.0} for row in rows], "falling shifts"),
        (lambda rows: [{k: v for k, v in row.items() if k != "mass"} for row in rows], "objects with"),
        (lambda rows: [{**row, "recall": "x"} for row in rows], "finite numbers"),
        (lambda rows: [{**row, "layers": 0.1} for row in rows], "density of each layer"),
        (lambda rows: [{**row, "layers": [0.1]} for row in rows], "6 layers"),
        (lambda rows: {"density": rows}, "expected a list"),
    ],
)
def test_points_that_cannot_be_are_refused(tmp_path, wrong, message):
    with pytest.raises(ArtifactError, match=message):
        save(tmp_path / "a", with_points(wrong(entries())))


def test_points_of_predictors_that_cannot_be_moved_are_refused(tmp_path):
    with pytest.raises(ArtifactError, match="threshold or a budget"):
        save(tmp_path / "a", with_points(entries(), cases_artifact().layers))


def test_shifts_are_found_for_every_density_between_the_ends():
    """Of a head whose density is a smooth function of the cut, with a window of a tenth."""

    def density(shift):
        return min(1.0, max(0.1, 0.3 - 0.1 * shift))

    shifts = choose_shifts(density)
    assert 0.0 in shifts
    assert shifts == sorted(shifts, reverse=True)
    shares = [density(shift) for shift in shifts]
    assert (shares[0], shares[-1]) == (0.1, 1.0)
    assert (shifts[0], shifts[-1]) == (pytest.approx(2.0, abs=0.02), pytest.approx(-7.0, abs=0.05))
    for target in (0.12, 0.15, 0.2, 0.4, 0.65, 0.95):
        assert min(abs(share - target) for share in shares) <= 0.01 * target
    assert choose_shifts(lambda shift: 0.4) == [0.0]


def test_points_too_near_to_each_other_are_one_and_the_served_one_stays():
    near = (point(0.299, 0.1), point(0.3, 0.0), point(0.302, -0.1), point(0.5, -3.0), point(0.5 + APART / 2, -4.0))
    assert [at.density for at in apart(near)] == [0.3, 0.5]


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("points")
    teacher = tiny.save_teacher(folder / "tiny")
    g = torch.Generator().manual_seed(0)
    lines = [" ".join(WORDS[i] for i in torch.randint(40, (8,), generator=g).tolist()) for _ in range(160)]
    (folder / "text.txt").write_text("\n".join(lines))
    size = ["--tokens", 48, "--instances", 4, "--heldout", 6, "--steps", 4, "--tile-size", 8, "--window", 3]
    options = ["--teacher", teacher, "--text", folder / "text.txt", "--out", folder / "run", *size, "--recall", 0.8]
    result = invoke("run", *options)
    assert result.exit_code == 0, result.output
    return folder / "run"


@pytest.fixture(scope="module")
def attached(run):
    artifact = load(run / "artifact")
    teacher = load_teacher(artifact.card.teacher)
    return teacher, attach_artifact(teacher, artifact)


def calibration(run):
    return load(run / "artifact").card.calibration


def test_a_run_writes_points_that_rise_in_every_measure(run):
    points = read_points(calibration(run))
    assert len(points) > 5
    assert points[-1].density == 1.0
    assert points[-1].recall == points[-1].exact_rows == 1.0
    for low, high in pairwise(points):
        assert low.density < high.density
        assert low.recall <= high.recall
        assert low.mass <= high.mass + 1e-9
        assert low.exact_rows <= high.exact_rows
        assert all(a <= b for a, b in zip(low.layers, high.layers, strict=True))
    served = [at for at in points if at.shift == 0]
    assert len(served) == 1
    overall = calibration(run)["plan"]["overall"]
    for name in ("sparsity", "recall", "mass", "exact_rows"):
        assert getattr(served[0], name) == pytest.approx(overall[name], abs=1e-6)
    assert served[0].density == pytest.approx(overall["computed_density"], abs=1e-6)


def test_figures_of_a_point_are_those_of_its_plans(run):
    """Against `evaluate`, which knows of no points."""
    artifact = load(run / "artifact")
    card, heldout = artifact.card, run / "shards" / "heldout"
    for at in read_points(card.calibration)[::3]:
        layers = [at_point(predictor, at) for predictor in artifact.layers]
        report = evaluate(heldout, layers, positional_of(card), card.tile_size)
        assert at.recall == pytest.approx(report.overall["recall"], abs=1e-6)
        assert at.density == pytest.approx(report.overall["computed_density"], abs=1e-6)
        assert at.layers == pytest.approx(report.layers["computed_density"].tolist(), abs=1e-6)


def forward(attached, mode, density=None, seed=0):
    teacher, model = attached
    tokens, mask = batch(teacher, tiny.token_ids([40, 25], seed=seed))
    seen = []
    with torch.inference_mode(), model.using(mode, observe=seen.append, density=density):
        hidden = teacher.model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
    return hidden[mask], seen


def test_the_served_density_gives_the_same_plans_bit_by_bit(run, attached):
    served = next(at for at in read_points(calibration(run)) if at.shift == 0)
    (plain, before), (asked, after) = forward(attached, "sparse"), forward(attached, "sparse", served.density)
    assert torch.equal(plain, asked)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.plan.keys, other.plan.keys)
        assert torch.equal(one.plan.offsets, other.plan.offsets)


def test_a_denser_point_reads_every_pair_of_a_sparser_one(run, attached):
    points = read_points(calibration(run))
    densities = torch.linspace(points[0].density, 1.0, 6).clamp(max=1.0).tolist()
    sizes, kept = [], torch.zeros(1, dtype=torch.bool)
    for density in densities:
        _, seen = forward(attached, "sparse", density)
        sizes.append([int(call.plan.offsets[-1]) for call in seen])
        call = seen[0]  # the first layer reads the same queries and keys at every density
        denser = torch.stack([plan_matrix(call.plan, call.legal, b, h) for b in range(2) for h in range(4)])
        assert not bool((kept & ~denser).any())
        kept = denser
    assert all(a[0] <= b[0] for a, b in pairwise(sizes))
    assert sizes[0][0] < sizes[-1][0]


def test_every_key_is_dense_and_exact_is_dense_at_any_density(run, attached):
    points = read_points(calibration(run))
    dense, _ = forward(attached, "dense")
    sparse, _ = forward(attached, "sparse", points[0].density)
    exact, seen = forward(attached, "exact", points[0].density)
    assert float((sparse - dense).abs().max()) > 1e-3
    torch.testing.assert_close(exact, dense, atol=1e-5, rtol=0)
    assert all(call.repair.added > 0 for call in seen)
    torch.testing.assert_close(forward(attached, "sparse", 1.0)[0], dense, atol=1e-5, rtol=0)


def test_auto_expects_the_density_of_the_point(run, attached):
    _, model = attached
    points = read_points(calibration(run))
    cut = model.cut_at(points[1].density)
    assert [known.share for known in cut.expected] == list(points[1].layers)
    assert {known.tokens for known in cut.expected} == {48}
    assert model.cut_at(points[1].density) is cut  # made once
    assert cut.predictors[0].projections is model.predictors[0].projections


def test_a_density_needs_a_plan_and_points(run, attached):
    _, model = attached
    with pytest.raises(ConfigError, match="sparse, exact or auto"), model.using("dense", density=0.5):
        pass
    with pytest.raises(ConfigError, match="sparse, exact or auto"), model.using("sparse", plan_for=print, density=0.5):
        pass
    with pytest.raises(ConfigError, match="working points"), model.using("sparse", density=0.001):
        pass


def test_figures_in_the_loop_are_sums_over_what_the_sparse_run_saw(run, attached):
    teacher, model = attached
    loop = calibration(run)["loop"]
    ids = read_ids(run / "shards" / "heldout")[1::2]
    gold, kept = torch.zeros(2, 4), torch.zeros(2, 4)

    def observe(call):
        edges = gold_edges(call.q, call.k, call.legal, call.alpha, call.scale)
        for h in range(4):
            truth = torch.zeros(call.q.shape[2] ** 2, dtype=torch.bool)
            truth[edges.flat[edges.offsets[h] : edges.offsets[h + 1]]] = True
            gold[call.layer, h] += truth.sum()
            kept[call.layer, h] += (truth.view(-1, call.q.shape[2]) & plan_matrix(call.plan, call.legal, 0, h)).sum()

    for item in ids:
        tokens, mask = batch(teacher, [item])
        with torch.inference_mode(), model.using("sparse", observe=observe):
            teacher.model(input_ids=tokens, attention_mask=mask.long())
    assert loop["instances"] == len(ids) == 3
    assert loop["overall"]["recall"] == pytest.approx(float(kept.sum() / gold.sum()))
    low, high = loop["overall"]["recall_interval"]
    assert low <= loop["overall"]["recall"] <= high
    for layer, shown in enumerate(loop["layers"]):
        assert shown["recall"] == pytest.approx(float(kept[layer].sum() / gold[layer].sum()))
        assert [head["recall"] for head in shown["heads"]] == pytest.approx((kept[layer] / gold[layer]).tolist())
        assert set(shown) == {"layer", "heads", "recall", "mass", "sparsity", "exact_rows"}


def test_evaluate_writes_the_same_again_and_leaves_the_rest(run, tmp_path):
    before = load(run / "artifact")
    card = dataclasses.replace(before.card, calibration={"curve": before.card.calibration["curve"]})
    bare = save(tmp_path / "a", dataclasses.replace(before, card=card))
    place = ["--artifact", tmp_path / "a", "--data", run / "shards"]
    result = invoke("evaluate", *place, "--write")
    assert result.exit_code == 0, result.output
    after = load(tmp_path / "a").card
    assert after == before.card
    assert bare.hash != after.hash
    assert after.version in result.stdout
    result = invoke("evaluate", *place, "--write", "--pattern", "window(3)")
    assert result.exit_code == 2
    assert "expected --write or --pattern" in result.stderr
    assert invoke("calibrate", *place, "--density", 0.5).exit_code == 0
    assert not {"points", "loop", "measured"} & set(load(tmp_path / "a").card.calibration)


def test_shards_of_before_give_points_but_no_figures_in_the_loop(run, tmp_path):
    for source in (run / "shards" / "heldout").iterdir():
        target = tmp_path / "shards" / "heldout" / source.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".json":
            target.write_bytes(source.read_bytes())
        else:
            save_file({name: tensor for name, tensor in load_file(source).items() if name != "ids"}, target)
    save(tmp_path / "a", load(run / "artifact"))
    assert invoke("evaluate", "--artifact", tmp_path / "a", "--data", tmp_path / "shards", "--write").exit_code == 0
    known = json.loads((tmp_path / "a" / CARD).read_text())["calibration"]
    assert known["points"] == [at.as_dict() for at in read_points(calibration(run))]
    assert "loop" not in known


def test_a_plain_pattern_is_what_a_moved_token_predictor_says():
    """`moved` in terms of the definition: a distance of at most t becomes one of at most sqrt(t² − shift)."""
    q, k, legal = inputs()
    distance = predictors()["distance"]
    shorter = dataclasses.replace(distance, threshold=(distance.threshold.square() - 2.0).sqrt())
    for h in range(HEADS):
        a, b = (materialize(one.pattern(q, k, legal), legal, 0, h) for one in (moved(distance, 2.0), shorter))
        assert torch.equal(a, b)
