"""GET /metrics: counted once, per app, with few labels."""

import re
from pathlib import Path

import pytest
from app_fakes import COMPUTED, LAYERS, REPAIR, embed, make_settings, serving
from starlette.testclient import TestClient


def value(client: TestClient, name: str) -> float:
    """One sample by its full name; 0 where it has not appeared yet."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(found.group(1)) if found else 0.0


def test_requests_tokens_and_errors_are_counted(client: TestClient) -> None:
    embed(client, ["one", "two words"])
    embed(client, "one", attention="dense")
    embed(client, "")
    embed(client, "explode")
    request = 'sparsefinder_requests_total{method="POST",route="/v1/embeddings",status="%s"}'
    assert [value(client, request % status) for status in (200, 422, 500)] == [2.0, 1.0, 1.0]
    assert value(client, 'sparsefinder_tokens_total{attention="sparse"}') == 7.0
    assert value(client, 'sparsefinder_items_total{attention="sparse",task="embed"}') == 2.0
    assert value(client, 'sparsefinder_items_total{attention="dense",task="embed"}') == 1.0
    assert value(client, 'sparsefinder_errors_total{code="empty_input"}') == 1.0
    assert value(client, 'sparsefinder_errors_total{code="internal_error"}') == 1.0
    assert value(client, 'sparsefinder_computed_density_count{attention="sparse"}') == 1.0
    assert value(client, 'sparsefinder_computed_density_sum{attention="sparse"}') == pytest.approx(COMPUTED, abs=0.05)
    assert value(client, 'sparsefinder_inference_seconds_count{attention="dense"}') == 1.0
    assert value(client, "sparsefinder_requests_running") == 1.0  # this very scrape
    assert value(client, 'sparsefinder_artifact_info{name="first",version="v1"}') == 1.0


def test_what_ran_and_what_was_repaired_is_counted(client: TestClient) -> None:
    embed(client, "one two three", attention="auto")
    embed(client, "one", attention="auto")
    embed(client, "one")
    embed(client, "one", attention="exact")
    name = 'sparsefinder_layer_passes_total{attention="%s",ran="%s"}'
    assert [value(client, name % ("auto", path)) for path in ("sparse", "dense", "exact")] == [1.0, 3.0, 0.0]
    assert value(client, name % ("sparse", "sparse")) == LAYERS
    rows = [
        value(client, f'sparsefinder_exact_rows_total{{outcome="{which}"}}') for which in ("all", "proven", "repaired")
    ]
    assert rows == [LAYERS * REPAIR.rows, LAYERS * REPAIR.proven, LAYERS * REPAIR.repaired]
    pairs = [value(client, f'sparsefinder_exact_pairs_total{{kind="{kind}"}}') for kind in ("survivors", "added")]
    assert pairs == [LAYERS * REPAIR.survivors, LAYERS * REPAIR.added]


def test_strangers_cannot_make_new_series(client: TestClient) -> None:
    for n in range(5):
        client.get(f"/path-{n}")
        client.request(f"VERB{n}", "/livez")
    text = client.get("/metrics").text
    assert "path-" not in text
    assert "VERB" not in text
    assert value(client, 'sparsefinder_requests_total{method="GET",route="unmatched",status="404"}') == 5.0


def test_two_apps_in_one_process_count_apart(tmp_path: Path) -> None:
    with serving(make_settings(tmp_path)) as one, serving(make_settings(tmp_path)) as two:
        embed(one)
        name = 'sparsefinder_items_total{attention="sparse",task="embed"}'
        assert (value(one, name), value(two, name)) == (1.0, 0.0)


def test_scraping_twice_changes_no_model_figure(client: TestClient) -> None:
    embed(client)
    name = 'sparsefinder_tokens_total{attention="sparse"}'
    assert value(client, name) == value(client, name) == 4.0
