"""POST /v1/attention: what is asked and refused with a fake model; what is true with a small real one and an oracle."""

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama
import torch
from app_fakes import HEADS as FAKE_HEADS
from app_fakes import LAYERS as FAKE_LAYERS
from app_fakes import FakeLoader, error_of, make_settings, serving, token
from fake_graphs import gold_weights, pairs_of, plan_pairs
from starlette.testclient import TestClient
from tiny_bert import HEADS, LAYERS, WORDS, make_artifact, make_teacher

from app.graph_values import GraphOptions, legal_pairs
from app.graphs import GraphObserver
from app.model import ModelLoader
from app.routes.graphs import AttentionRequest
from app.servable import Lane
from app.settings import load_settings
from sparsefinder.artifact import Artifact, load, save
from sparsefinder.entmax import entmax
from sparsefinder.hf import LayerCall
from sparsefinder.patterns.legal import Legal
from sparsefinder.patterns.positional import Window
from sparsefinder.plan import build_plan
from sparsefinder.predictors import Clusters, Tiles, random_projections
from sparsefinder.working_points import WorkingPoint

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "graphs.md"
TEXT = " ".join(WORDS[n * n % 60] for n in range(70))  # 72 tokens, five tiles


def graphs(client: TestClient, text: Any = "one two three", **fields: Any) -> Any:
    response = client.post("/v1/attention", json={"input": text} | fields)
    assert response.status_code == 200, response.text
    return response.json()


# ---- what is asked, with the fake model --------------------------------------------------------------------------


def test_every_layer_and_head_unless_some_are_named(client: TestClient) -> None:
    everything = graphs(client)
    assert [layer["layer"] for layer in everything["layers"]] == list(range(FAKE_LAYERS))
    assert [head["head"] for head in everything["layers"][1]["heads"]] == list(range(FAKE_HEADS))
    some = graphs(client, layers=[1], heads=[2, 0])
    assert [(layer["layer"], [head["head"] for head in layer["heads"]]) for layer in some["layers"]] == [(1, [2, 0])]
    assert pairs_of(some["layers"][0]["heads"][0]["plan"]) == plan_pairs(5, 1, 2)


def test_gold_and_what_else_costs_something_come_on_request_only(client: TestClient) -> None:
    head = graphs(client)["layers"][0]["heads"][0]
    assert set(head) == {"head", "measures", "plan"}
    assert set(head["measures"]["plan"]) == {"sparsity", "computed_density"}
    answer = graphs(client, gold=True, pattern=True, clusters=True)
    head = answer["layers"][0]["heads"][0]
    assert set(head) == {"head", "measures", "plan", "pattern", "gold", "missed", "clusters"}
    assert pairs_of(head["gold"]) == set(gold_weights(5))
    assert head["gold"]["weights"] == [weight for _, weight in sorted(gold_weights(5).items())]
    assert pairs_of(head["missed"]) == set(gold_weights(5)) - plan_pairs(5, 0, 0)
    assert head["measures"]["plan"]["precision"] is None
    assert "entmax" in answer["gold"]
    assert head["clusters"] == {
        "of": "fake",
        "served": True,
        "buckets": 3,
        "queries": [[0], [1], [2], [0], [1]],
        "keys": [[0]] * 5,
    }


def test_tokens_say_what_they_are_and_where_they_stand(client: TestClient) -> None:
    told = graphs(client, "one  three")["tokens"]
    assert told["ids"] == [1, token("one"), token("three"), 2]
    assert told["offsets"] == [None, [0, 3], [5, 10], None]
    assert len(told["pieces"]) == 4
    ids = graphs(client, [1, 50, 2])["tokens"]
    assert (ids["ids"], ids["offsets"]) == ([1, 50, 2], [None] * 3)


def test_a_cut_text_keeps_its_last_special_token_and_the_places(client: TestClient) -> None:
    text = " ".join(f"w{n}" for n in range(30))
    error_of(client.post("/v1/attention", json={"input": text}), 422, "input_too_long")
    answer = graphs(client, text, truncate=True)
    assert answer["sparsefinder"]["truncated"] == [True]
    told = answer["tokens"]
    assert told["ids"][-1] == 2
    assert told["offsets"][0] is None
    assert told["offsets"][-1] is None
    assert told["offsets"][1:-1] == [[text.index(f"w{n}"), text.index(f"w{n}") + len(f"w{n}")] for n in range(14)]


@pytest.mark.parametrize(
    ("fields", "code", "param", "said"),
    [
        ({"layers": [0, 2]}, "invalid_layer", "layers.1", "from 0 to 1, got 2"),
        ({"layers": [-1]}, "invalid_layer", "layers.0", "from 0 to 1, got -1"),
        ({"layers": [10**30]}, "invalid_layer", "layers.0", "a larger number"),
        ({"layers": [1, 1]}, "invalid_layer", "layers.1", "once"),
        ({"heads": [3]}, "invalid_head", "heads.0", "from 0 to 2, got 3"),
        ({"heads": []}, "invalid_request", "heads", "at least 1"),
        ({"layers": [True]}, "invalid_request", "layers.0", "integer"),
        ({"attention": "original"}, "attention_not_supported", "attention", "got original"),
        ({"input": ["a", "b"]}, "invalid_input", "input", "one text"),
        ({"input": [[1, 2]]}, "invalid_input", "input", "one text"),
        ({"input": []}, "empty_input", "input", "empty"),
        ({"input": "  "}, "empty_input", "input", "at least one token"),
        ({"input": [1, 1000]}, "invalid_token", "input", "got 1000"),
        ({"edges": True}, "invalid_request", "edges", "unknown field"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    client: TestClient, fields: dict[str, Any], code: str, param: str, said: str
) -> None:
    error = error_of(client.post("/v1/attention", json={"input": "one"} | fields), 422, code)
    assert error["param"] == param
    assert said in error["message"]


def test_an_answer_has_a_size_that_can_be_given(tmp_path: Path) -> None:
    most = FAKE_LAYERS * FAKE_HEADS * 5**2
    with serving(make_settings(tmp_path, max_graph_pairs=most)) as client:
        graphs(client, "one two three")
        error = error_of(client.post("/v1/attention", json={"input": "one two three four"}), 422, "graph_too_large")
        assert str(most) in error["message"]
        assert str(FAKE_LAYERS * FAKE_HEADS * 6**2) in error["message"]
        graphs(client, "one two three four", layers=[1])


def test_nan_is_no_graph(client: TestClient) -> None:
    error_of(client.post("/v1/attention", json={"input": "one nan two"}), 500, "non_finite_output")
    graphs(client)


def test_a_graph_needs_a_key_where_keys_are_set(tmp_path: Path) -> None:
    with serving(make_settings(tmp_path, api_keys="secret")) as client:
        error_of(client.post("/v1/attention", json={"input": "one"}), 401, "missing_api_key")
        answer = client.post("/v1/attention", json={"input": "one"}, headers={"authorization": "Bearer secret"})
        assert answer.status_code == 200
        assert answer.headers["x-sparsefinder-tokens"] == "3"


def test_the_answer_is_one_json_object_as_if_written_at_once(client: TestClient) -> None:
    response = client.post("/v1/attention", json={"input": "one", "gold": True})
    assert response.text == json.dumps(response.json())


def test_legal_pairs_are_counted_as_the_layers_count_them() -> None:
    for n, causal in itertools.product((1, 2, 9), (False, True)):
        real = torch.ones(1, n, dtype=torch.bool)
        assert legal_pairs(n, causal) == Legal(real, real, causal).count(0)


def test_the_documentation_names_every_field_and_every_part_of_the_answer(client: TestClient) -> None:
    named = set(re.findall(r"`([a-z_]+)`", DOCUMENTATION.read_text()))
    assert set(AttentionRequest.model_fields) <= named
    head = graphs(client, gold=True, pattern=True, clusters=True)["layers"][0]["heads"][0]
    assert set(head) - {"head"} <= named
    assert set(head["clusters"]) - {"buckets", "queries", "keys"} <= named


# ---- what is true, with a small BERT -----------------------------------------------------------------------------


def write(folder: Path, source: Path, make: Any) -> None:
    """The artifact at `source` with other predictors, and clusterings beside them."""
    artifact = load(source)
    maps = tuple(random_projections(HEADS, 4, 16, seed=layer) for layer in range(LAYERS))
    points = tuple(torch.randn(HEADS, 16, 4, generator=torch.Generator().manual_seed(layer)) for layer in range(LAYERS))
    layers = artifact.layers if make is None else tuple(map(make, maps, points))
    save(folder, Artifact(artifact.card, layers, {"random-r4": maps}, {"random-r4-b16": points}))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("graphs")
    teacher = make_teacher(root / "teacher")
    make_artifact(root / "tiles", teacher, keys=20)
    write(root / "beside", root / "tiles", None)
    write(root / "clusters", root / "tiles", lambda maps, c: Clusters(maps, c, torch.full((HEADS,), 2)))
    points = [WorkingPoint(1.0, 0.2, 0.8, 0.7, 0.8, 0.3, (0.2,) * LAYERS), WorkingPoint(0, *[0.5] * 5, (0.5,) * LAYERS)]
    card = replace(load(root / "tiles").card, calibration={"points": [point.as_dict() for point in points]})
    maps = [random_projections(HEADS, 4, 16, seed=layer, form="bilinear") for layer in range(LAYERS)]
    save(root / "points", Artifact(card, tuple(Tiles(one, threshold=-4.5) for one in maps)))
    make_artifact(root / "softmax", teacher, keys=20, alpha=1.0, gold_mass=0.8)
    return root


@pytest.fixture(scope="module")
def real(root: Path) -> Iterator[TestClient]:
    settings = load_settings(teacher=str(root / "teacher"), artifact=root / "beside", audit_rate=0.0, device="cpu")
    with serving(settings, ModelLoader(settings.teacher, settings.device, "default")) as client:
        yield client


@pytest.fixture(params=["beside", "clusters", "softmax"])
def served(request: pytest.FixtureRequest, real: TestClient) -> TestClient:
    assert real.post("/admin/reload", json={"artifact": request.param}).status_code == 200
    return real


def seen(client: TestClient, ids: list[int]) -> list[LayerCall]:
    """The layers of the pass that the service makes for these ids, seen by ourselves."""
    model: Any = client.app.state.engine.model  # type: ignore[attr-defined]
    calls: list[LayerCall] = []
    with torch.inference_mode(), model._attached.using("sparse", observe=calls.append):
        model._twin.model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long))
    return calls


def oracle_gold(call: LayerCall, h: int, mass: float | None) -> dict[tuple[int, int], float]:
    """Row by row: the transform of all scores; its support, or the fewest greatest weights that reach the mass."""
    q, k = call.q[0, h].double(), call.k[0, h].double()
    gold: dict[tuple[int, int], float] = {}
    for i in range(q.shape[0]):
        scores = torch.stack([call.scale[h].double() * (q[i] * k[j]).sum() for j in range(k.shape[0])])
        weights = entmax(scores[None], call.alpha)[0].tolist()
        total = 0.0
        for weight, j in sorted((-weight, j) for j, weight in enumerate(weights)):
            if weight < 0 and (mass is None or total < mass):
                gold[i, j] = -weight
                total -= weight
    return gold


def test_every_set_and_measure_equals_a_double_loop(served: TestClient) -> None:
    answer = graphs(served, TEXT, gold=True, pattern=True)
    n, ids = len(answer["tokens"]["ids"]), answer["tokens"]["ids"]
    mass = 0.8 if answer["alpha"] == 1 else None
    assert ("0.8" in answer["gold"]) == (mass is not None)
    for layer, call in zip(answer["layers"], seen(served, ids), strict=True):
        assert (layer["ran"], layer["window"], layer["legal_pairs"]) == ("sparse", None, n * n)
        assert call.plan is not None
        for h, head in enumerate(layer["heads"]):
            plan = {pair for pair in itertools.product(range(n), range(n)) if reads(call.plan, h, *pair)}
            gold = oracle_gold(call, h, mass)
            came = dict(zip(sorted(pairs_of(head["gold"])), head["gold"]["weights"], strict=True))
            assert pairs_of(head["plan"]) == plan
            assert set(came) == set(gold)
            assert pairs_of(head["missed"]) == set(gold) - plan
            np.testing.assert_allclose(
                [came[pair] for pair in sorted(gold)], [gold[p] for p in sorted(gold)], atol=1e-5
            )
            for name, kept in (("plan", plan), ("pattern", pairs_of(head["pattern"]))):
                measures = head["measures"][name]
                whole = {i for i in range(n) if all((i, j) in kept for j in range(n) if (i, j) in gold)}
                assert measures["sparsity"] == pytest.approx(1 - len(kept) / n**2)
                assert measures["recall"] == pytest.approx(len(kept & set(gold)) / len(gold))
                assert measures["precision"] == pytest.approx(len(kept & set(gold)) / len(kept))
                assert measures["exact_rows"] == pytest.approx(len(whole) / n)
                if mass is None:
                    assert measures["mass"] == pytest.approx(sum(gold.get(pair, 0) for pair in kept) / n, abs=1e-5)
            assert 0 < len(pairs_of(head["missed"])) < len(gold)  # so that both sets were really compared


def reads(plan: Any, h: int, i: int, j: int) -> bool:
    for t in range(plan.tile_start.shape[0]):
        first, rows = int(plan.tile_start[t]), int(plan.tile_rows[t])
        if int(plan.tile_head[t]) == h and first <= i < first + rows:
            keys = plan.keys[int(plan.offsets[t]) : int(plan.offsets[t + 1])].tolist()
            return j in keys
    raise AssertionError(f"row {i} is in no tile")


def test_the_pattern_is_what_was_predicted_before_window_and_tiles(served: TestClient) -> None:
    answer = graphs(served, TEXT, pattern=True)
    predictors = load(Path(answer_folder(served))).layers
    for layer, call in zip(answer["layers"], seen(served, answer["tokens"]["ids"]), strict=True):
        predictor = predictors[layer["layer"]]
        for h, head in enumerate(layer["heads"]):
            pattern, plan = pairs_of(head["pattern"]), pairs_of(head["plan"])
            assert pattern < plan
            if isinstance(predictor, Clusters):
                assert pattern == meeting(predictor, call, h)
            else:  # the 20 best keys of a tile of 16 rows, and every query of the tile
                lists = {frozenset(j for i, j in pattern if i == row) for row in range(16)}
                assert len(lists) == 1
                assert lists.pop() >= set(range(16))
                assert {len({j for i, j in pattern if i == row and j > 15}) for row in range(16)} <= set(range(4, 21))


def test_at_another_density_the_pattern_is_the_one_predicted_there(root: Path) -> None:
    loader = ModelLoader(str(root / "teacher"), "cpu", "default")
    model = loader.build(loader.read(root / "points"))
    ids, options = [model.tokenize([TEXT])[0]], GraphOptions(pattern=True)
    found = []
    for density in (None, 0.5, 0.2):
        graph = model.forward(ids, Lane("graph", "sparse", density, options), ()).outputs[0]
        found.append([[pairs_of(vars(head.pattern)) for head in layer.heads] for layer in graph.layers])
        for layer in graph.layers:
            assert all(pairs_of(vars(head.pattern)) <= pairs_of(vars(head.plan)) for head in layer.heads)
    served, same, fewer = found
    assert served == same
    assert all(few < many for few, many in zip(fewer[0], served[0], strict=True))  # later layers read other inputs


def answer_folder(client: TestClient) -> str:
    return str(client.get("/info").json()["artifact"]["folder"])


def nearest(clusters: Clusters, x: Any, h: int, top: int) -> list[set[int]]:
    distances = ((x[:, None, :] - clusters.centroids[h][None]) ** 2).sum(-1)
    return [set(row.argsort(stable=True)[:top].tolist()) for row in distances]


def projected(clusters: Clusters, call: LayerCall, h: int) -> tuple[Any, Any]:
    maps = clusters.projections
    return call.q[0, h] @ maps.q_map[h].T + maps.q_bias[h], call.k[0, h] @ maps.k_map[h].T + maps.k_bias[h]


def meeting(clusters: Clusters, call: LayerCall, h: int) -> set[tuple[int, int]]:
    queries, keys = (nearest(clusters, x, h, 2) for x in projected(clusters, call, h))
    return {(i, j) for i, a in enumerate(queries) for j, b in enumerate(keys) if a & b}


def test_clusters_are_those_that_serve_or_some_that_lie_beside(served: TestClient) -> None:
    answer = graphs(served, TEXT, clusters=True, layers=[1], heads=[1])
    artifact = load(Path(answer_folder(served)))
    shown = answer["layers"][0]["heads"][0].get("clusters")
    if not artifact.centroids:
        assert shown is None
        return
    call = seen(served, answer["tokens"]["ids"])[1]
    own, ones = artifact.layers[1], torch.ones(HEADS, dtype=torch.long)
    serves = isinstance(own, Clusters)
    maps, centroids = artifact.projections["random-r4"][1], artifact.centroids["random-r4-b16"][1]
    clusters = own if isinstance(own, Clusters) else Clusters(maps, centroids, ones)
    assert (shown["served"], shown["of"], shown["buckets"]) == (serves, "clusters" if serves else "random-r4-b16", 16)
    for role, x in zip(("queries", "keys"), projected(clusters, call, 1), strict=True):
        assert [set(buckets) for buckets in shown[role]] == nearest(clusters, x, 1, 2 if serves else 1)


def test_a_graph_does_not_depend_on_what_it_was_batched_with(real: TestClient) -> None:
    model: Any = real.app.state.engine.model  # type: ignore[attr-defined]
    lane = Lane("graph", "sparse", None, GraphOptions(gold=True))
    ids = model.tokenize([TEXT, "w1 w2 w3"])
    together, alone = model.forward(ids, lane, ()).outputs, [model.forward([one], lane, ()).outputs[0] for one in ids]
    for a, b in zip(together, alone, strict=True):
        for one, other in zip(a.layers, b.layers, strict=True):
            for x, y in zip(one.heads, other.heads, strict=True):
                assert x.plan.keys.tolist() == y.plan.keys.tolist()
                assert x.gold.offsets.tolist() == y.gold.offsets.tolist()
                np.testing.assert_allclose(x.gold.weights, y.gold.weights, atol=1e-5)


@pytest.mark.parametrize("mode", ["dense", "exact", "auto"])
def test_other_modes_say_what_they_computed(real: TestClient, mode: str) -> None:
    assert real.post("/admin/reload", json={"artifact": "beside"}).status_code == 200
    answer = graphs(real, TEXT, attention=mode, gold=True)
    n = len(answer["tokens"]["ids"])
    for layer in answer["layers"]:
        assert layer["ran"] in (("dense", "sparse") if mode == "auto" else (mode,))
        for head in layer["heads"]:
            if layer["ran"] == "dense":
                assert len(head["plan"]["keys"]) == n * n
                assert head["missed"]["keys"] == []
                assert head["measures"]["plan"]["recall"] == 1.0


def test_causal_and_windowed_layers_have_the_graph_of_their_legal_pairs(root: Path) -> None:
    """A padded batch of a causal layer with a plan, and of a sliding-window layer without one."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 2, 9, 8, generator=generator) for _ in range(3))
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, 6:] = False
    scale = torch.full((2,), 8**-0.5)
    artifact = load(root / "tiles")
    tiles = Tiles(random_projections(2, 4, 8, seed=0, form="bilinear"), keys_per_tile=3)
    for radius, causal in ((None, True), (2, False)):
        legal = Legal(real, real, causal, radius=radius)
        plan = None if radius else build_plan(Window(1), legal, 4, heads=2)
        call = LayerCall(0, q, k, v, legal, scale, None, 1.5, "dense" if radius else "sparse", plan, v)
        observer = GraphObserver(GraphOptions(gold=True, pattern=True), artifact, [tiles], 4)
        observer(call)
        for b, graph in enumerate(observer.graphs()):
            n, layer = int(real[b].sum()), graph.layers[0]
            allowed = {(i, j) for i in range(n) for j in range(n) if (j <= i if causal else abs(i - j) <= 2)}
            assert (layer.legal_pairs, layer.window, graph.finite) == (len(allowed), radius, True)
            for h, head in enumerate(layer.heads):
                kept = pairs_of(vars(head.plan))
                gold: set[tuple[int, int]] = set()
                for i in range(n):
                    keys = [j for j in range(n) if (i, j) in allowed]
                    scores = torch.stack([8**-0.5 * (q[b, h, i] * k[b, h, j]).sum() for j in keys])
                    gold |= {(i, j) for j, p in zip(keys, entmax(scores[None], 1.5)[0].tolist(), strict=True) if p > 0}
                assert head.gold is not None
                assert pairs_of(vars(head.gold)) == gold
                assert kept <= allowed
                assert (kept == allowed) == (radius is not None or n <= 4)
                assert (head.pattern is None) == (radius is not None)


def test_a_causal_model_with_shared_keys_has_graphs_that_look_back(tmp_path: Path) -> None:
    teacher = tiny_llama.save_teacher(tmp_path / "teacher")
    loader = ModelLoader(str(teacher), "cpu", "default")
    model = loader.build(loader.read(tiny_llama.make_artifact(tmp_path / "few", teacher, keys=4)))
    ids = [4 + n * n % 50 for n in range(24)]
    calls: list[LayerCall] = []
    with torch.inference_mode(), model._attached.using("sparse", observe=calls.append):
        model._twin.model(input_ids=torch.tensor([ids]), use_cache=False)
    lane = Lane("graph", "sparse", None, GraphOptions(gold=True, pattern=True))
    graph = model.forward([ids, ids[:5]], lane, ()).outputs[0]
    assert "graph" in model.description.tasks
    for layer, call in zip(graph.layers, calls, strict=True):
        assert layer.legal_pairs == legal_pairs(24, True)
        keys = call.k.repeat_interleave(2, dim=1)  # each serves two heads
        for h, head in enumerate(layer.heads):
            gold = set()
            for i in range(24):
                scores = call.scale[h] * (keys[0, h, : i + 1] @ call.q[0, h, i])
                gold |= {(i, j) for j, p in enumerate(entmax(scores[None], 1.5)[0].tolist()) if p > 0}
            assert head.gold is not None
            assert head.missed is not None
            plan = pairs_of(vars(head.plan))
            assert pairs_of(vars(head.gold)) == gold
            assert pairs_of(vars(head.missed)) == gold - plan
            assert all(j <= i for i, j in plan)
            assert pairs_of(vars(head.pattern)) <= plan


def test_not_a_number_in_a_layer_is_seen(root: Path) -> None:
    real = torch.ones(1, 3, dtype=torch.bool)
    x = torch.ones(1, 2, 3, 8)
    call = LayerCall(0, x, x, x, Legal(real, real), torch.ones(2), None, 1.5, "dense", None, x * torch.nan)
    observer = GraphObserver(GraphOptions(), load(root / "tiles"), [None], 16)
    observer(call)
    assert not observer.graphs()[0].finite


def test_the_fake_of_this_file_breaks_when_it_should(loader: FakeLoader, client: TestClient) -> None:
    loader.broken.set()
    error_of(client.post("/v1/attention", json={"input": "one"}), 500, "internal_error")
