"""The benchmarks of speed: that rivals compute the same, what is measured of a plan, and the whole on a tiny run."""

import json
import math
from pathlib import Path

import cases_artifact
import pytest
import tiny_llama
import torch

from benchmarks import attention, attention_scaling, end_to_end, rivals
from benchmarks.attention_page import attention_section
from benchmarks.attention_random import Case, density, random_plan, tiles_of
from benchmarks.attention_real import kept_mass
from benchmarks.end_to_end_page import end_to_end_section
from benchmarks.paired import exponent, paired, ratio, shares
from benchmarks.rivals import bigbird, fused_softmax, package_entmax
from benchmarks.speed_page import main as write_page
from sparsefinder.artifact import Artifact, save
from sparsefinder.attention.api import attend, attend_dense
from sparsefinder.hf import LayerInput, attach
from sparsefinder.patterns.legal import legal_full
from sparsefinder.patterns.positional import GlobalTokens, window
from sparsefinder.plan import build_plan, plan_matrix
from sparsefinder.predictors import Tiles, layer_plan, random_projections
from sparsefinder.teacher import load_teacher
from training.extract import extract, make_manifest

HEADS, KV_HEADS, DIM = 4, 2, 8


def a_call(tokens: int, alpha: float, causal: bool = True) -> LayerInput:
    g = torch.Generator().manual_seed(3)
    q, k, v = (2 * torch.randn(1, heads, tokens, DIM, generator=g) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return LayerInput(
        0, q, k, v, legal_full(1, tokens, tokens, causal), torch.tensor([0.3, 0.4, 0.5, 0.6]), None, alpha
    )


def dense(call: LayerInput, alpha: float) -> torch.Tensor:
    return attend_dense(call.q, call.k, call.v, call.legal, alpha=alpha, scale=call.scale)


def test_rivals_compute_what_they_are_compared_with() -> None:
    for causal in (True, False):
        call = a_call(80, 1.0, causal)
        torch.testing.assert_close(fused_softmax(call)(), dense(call, 1.0), atol=1e-5, rtol=0)
    call = a_call(700, 1.5)  # more rows than the package gets at once
    torch.testing.assert_close(package_entmax(call), dense(call, 1.5), atol=1e-5, rtol=0)


def test_bigbird_reads_what_its_density_says() -> None:
    call = a_call(1024, 1.0, causal=False)
    found = bigbird(call, 0.5)
    assert found is not None
    assert found.attend().shape == (1, 1024, HEADS, DIM)
    assert found.density == pytest.approx(0.5, abs=0.05)
    assert bigbird(a_call(320, 1.0), 0.5) is None
    # The first block of queries reads every key, by the definition of softmax.
    expected = dense(call, 1.0)[:, :, :64].transpose(1, 2)
    torch.testing.assert_close(found.attend()[:, :64], expected, atol=1e-5, rtol=0)


def test_a_random_plan_lists_so_many_keys_for_every_tile() -> None:
    case = Case(100, 0.1, 32)
    plan = random_plan(case, 2, 0)
    for head in range(2):
        matrix = plan_matrix(plan, legal_full(1, 100, 100), 0, head)
        assert matrix.sum(1).tolist() == [10] * 100
        assert (matrix[:32] == matrix[0]).all()
    assert density(plan, legal_full(1, 100, 100)) == pytest.approx(0.1)


@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_kept_mass_is_the_attention_on_the_pairs_of_the_plan(alpha: float) -> None:
    call = a_call(60, alpha)
    plan = build_plan(window(9) | GlobalTokens(2), call.legal, 8, heads=HEADS)
    kept = 0.0
    for h in range(HEADS):
        matrix = plan_matrix(plan, call.legal, 0, h)
        values = torch.eye(60)[None, None].expand(1, KV_HEADS, -1, -1).contiguous()
        weights = attend_dense(call.q, call.k, values, call.legal, alpha=alpha, scale=call.scale)[0, h]
        kept += float((weights * matrix).sum() / 60)
    assert kept_mass(call, plan) == pytest.approx(kept / HEADS, abs=1e-5)
    assert kept_mass(call, build_plan(window(121), call.legal, 8, heads=HEADS)) == pytest.approx(1.0, abs=1e-5)


def test_a_random_predictor_reads_about_so_many_keys_in_the_last_tiles() -> None:
    call = a_call(512, 1.5)
    tiles = tiles_of(call.q, call.k, 64, 16, causal=True)
    plan = layer_plan(tiles, call.q, call.k, call.legal, window(1), 16)
    read = torch.stack([plan_matrix(plan, call.legal, 0, h)[-64::16].sum(1) for h in range(HEADS)])
    assert float(read.float().mean()) == pytest.approx(64, rel=0.3)


def test_rounds_take_turns_and_ratios_are_of_rounds() -> None:
    order: list[str] = []
    ways = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times, given = paired(ways, 2)
    assert order == ["a", "b"] * 3
    assert set(given) == {"a", "b"}
    assert all(len(found) == 2 for found in times.values())
    assert ratio([1.0, 20.0, 6.0], [1.0, 2.0, 3.0]) == 2.0  # of medians it would be 3
    assert exponent([1, 2, 4], [3, 12, 48]) == pytest.approx(2)
    assert math.isnan(exponent([1], [3]))


def test_shares_are_of_the_whole() -> None:
    call = a_call(256, 1.5)
    tiles = tiles_of(call.q, call.k, 32, 16, causal=True)

    def run() -> torch.Tensor:
        plan = layer_plan(tiles, call.q, call.k, call.legal, window(3), 16)
        return attend(call.q, call.k, call.v, plan, legal=call.legal, scale=call.scale)

    found = shares(run, 1)  # of several rounds, medians of parts need not sum up
    assert all(0 < share < 1 for share in found.values())
    assert sum(found.values()) == pytest.approx(1)


def _no_compiler() -> object:
    raise RuntimeError("no compiler")


def tiny_run(teacher: Path, out: Path, alpha: float) -> Path:
    """A run as `sparsefinder-train` leaves it: held-out shards, and an artifact with random maps."""
    loaded = load_teacher(str(teacher))
    attached = attach(loaded.lm, alpha=alpha)
    chunks = [tiny_llama.token_ids(64, seed) for seed in range(2)]
    gold = 0.95 if alpha == 1 else None
    manifest = make_manifest(loaded, attached, chunks, split="heldout", shard_size=1, gold_mass=gold)
    extract(loaded, attached, chunks, out / "shards" / "heldout", manifest)
    maps = [random_projections(HEADS, 2, DIM, seed, "bilinear") for seed in range(tiny_llama.LAYERS)]
    card = cases_artifact.card(
        teacher=str(teacher), teacher_fingerprint=loaded.fingerprint, layers=tiny_llama.LAYERS, heads=HEADS,
        kv_heads=KV_HEADS, head_dim=DIM, alpha=alpha, head_scale=((1.0,) * HEADS,) * tiny_llama.LAYERS, tile_size=8,
        gold_mass=gold, calibration={},
    )  # fmt: skip
    save(out / "artifact", Artifact(card, tuple(Tiles(part, threshold=-4.0) for part in maps)))
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options: two runs of one tiny causal teacher, softmax and entmax, and a text of its words."""
    folder = tmp_path_factory.mktemp("speed")
    teacher = tiny_llama.save_teacher(folder / "teacher")
    text = folder / "words.txt"
    text.write_text(" ".join(f"w{n - 4}" for n in tiny_llama.token_ids(1200)), encoding="utf-8")
    data = [str(tiny_run(teacher, folder / name, alpha)) for name, alpha in (("soft", 1.0), ("twin", 1.5))]
    return ["--data", *data, "--text", str(text), "--rounds", "1", "--threads", "1", "--crossover", "shipped"]


@pytest.mark.unchecked  # torch.compile cannot look through the checker's wrappers
def test_all_parts_of_one_layer_run_and_their_page_holds_every_row(
    runs: list[str], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(rivals, "compiled_flex", _no_compiler)  # it takes a minute, and not every machine has one
    peak = {"before": 500.0, "peak": 501.0}  # six processes that load torch take minutes on a busy machine
    monkeypatch.setattr(attention_scaling, "_child", lambda *_: peak)
    out = tmp_path / "figures" / "attention.json"
    sizes = ["--tokens", "64", "128", "--long", "64", "128", "--layers", "0", "1", "--tiles", "16", "--masses", "0.95"]
    result = attention.main([*runs, *sizes, "--package", "64", "--json", str(out)])
    assert json.loads(out.read_text()) == result
    assert len(result["random"]) == 4
    real = result["real"]
    assert [(row["attention"], row["tokens"], row["layer"]) for row in real] == [
        (name, tokens, layer) for name in ("softmax", "1.5-entmax") for tokens in (64, 128) for layer in (0, 1)
    ]
    for row in real:
        assert 0.5 < row["kept"] <= 1 + 1e-5
        assert 0 < row["density"] <= 1
        assert ("package" in row["ms"]) == (row["tokens"] == 64)
        assert row["ran"] in ("sparse", "dense")
    at_own_length = [row["kept"] for row in real if row["tokens"] == 64]
    assert sum(at_own_length) / 4 > 0.85  # cut for .95 on other text of that length
    assert [(row["tokens"], row["mib"]["sparse"]) for row in result["scaling"]] == [(64, peak), (128, peak)]
    text = attention_section(result)
    for part in ("Random key lists", "Real queries and keys", "padded batch", "Scaling", "**not met**"):
        assert part in text
    assert text.count("| softmax | 0.95 |") == 4  # two lengths, times and shares

    (tmp_path / "results.md").write_text("before\n<!-- speed:begin -->old<!-- speed:end -->\nafter\n")
    write_page(tmp_path)
    page = (tmp_path / "results.md").read_text()
    assert text in page
    assert "old" not in page
    assert page.startswith("before\n")
    assert page.endswith("after\n")


def test_a_child_says_its_peak_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    attention_scaling.main(["--way", "dense", "--tokens", "64", "--threads", "1"])
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["before"] <= found["peak"]


def test_whole_models_say_the_same_dense_and_exact(runs: list[str], tmp_path: Path) -> None:
    result = end_to_end.main([*runs, "--tokens", "64", "--short", "32", "--batches", "2", "--mass", "0.95"])
    rows = {(row["attention"], row["mode"]): row for row in result["scoring"]}
    assert set(rows) == {
        ("softmax", "original"), ("softmax", "dense"), ("softmax", "sparse"), ("softmax", "auto"),
        *(("1.5-entmax", mode) for mode in ("dense", "sparse", "exact", "auto")),
    }  # fmt: skip
    same = (("softmax", "original"), ("softmax", "dense")), (("1.5-entmax", "dense"), ("1.5-entmax", "exact"))
    for a, b in same:
        assert rows[a]["quality"] == pytest.approx(rows[b]["quality"], rel=1e-4)
    assert rows["softmax", "sparse"]["ran"] == {"sparse": tiny_llama.LAYERS}
    assert rows["softmax", "sparse"]["density"] < 1
    assert sum(rows["softmax", "sparse"]["shares"].values()) == pytest.approx(1)
    embedded = {row["mode"]: row for row in result["embedding"]}
    assert embedded["original"]["quality"] == pytest.approx(1, abs=1e-5)
    assert embedded["exact"]["quality"] == pytest.approx(embedded["dense"]["quality"], abs=1e-4)
    text = end_to_end_section(result)
    assert "| 64 | 1 | 1.5-entmax | `exact` |" in text
    assert "| 32 | 2 | 1.5-entmax | `sparse` |" in text
    assert "perplexity at most" in text


def test_perplexity_in_pieces_is_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, text = tiny_llama.teacher(), tiny_llama.token_ids(50)
    monkeypatch.setattr(end_to_end, "PIECE", 16)
    with torch.no_grad():
        loss = teacher.lm(input_ids=torch.tensor([text]), labels=torch.tensor([text])).loss
        assert end_to_end.perplexity(teacher, text) == pytest.approx(math.exp(float(loss)), rel=1e-5)
