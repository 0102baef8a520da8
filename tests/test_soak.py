"""The soak in its short form against the shipped model, and that every one of its checks can fail."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from app_fakes import make_settings, on_a_socket

from benchmarks import soak
from benchmarks.soak_checks import Interval, Sample, Soaked, checks, memory_slope, served_then, summary
from benchmarks.soak_clients import BAD, Drawn, Reply, act, big_body, checked, draw

GOOD = Reply("good", 10.0, 10.1, 11.0, 200, "first v1")


def seen(time: float, mib: float, threads: int = 12) -> Sample:
    return Sample(float(time), mib, threads, mib)


def soaked(**changes: Any) -> Soaked:
    """A run of 700 seconds without a fault, its memory at 500 MiB, with a sawtooth."""
    whole = Soaked(
        begin=0.0,
        warm=120.0,
        stopped=700.0,
        replies=(GOOD, Reply("nan", 20.0, 20.1, 20.2, 400), Reply("good", 701.0, math.inf, 701.0, 0, "", REFUSED)),
        last=(Reply("last", 699.5, 699.6, 702.0, 200, "first v1"),),
        reloads=(Reply("reload broken", 30.0, 30.0, 31.0, 409),),
        intervals=(Interval("first v1", 0.0, None),),
        samples=tuple(seen(t, 500.0 + 3 * (t % 20 < 5)) for t in range(700)),
        exit_code=0,
        stop_seconds=2.0,
        exceptions=0,
        long=True,
    )
    return replace(whole, **changes)


REFUSED = "ConnectionRefusedError"
LATE = Reply("good", 699.9, 699.95, 700.1, 0, "", "RemoteDisconnected")
BROKEN: dict[str, dict[str, Any]] = {
    "good requests were answered": {"replies": ()},
    "every request has its answer": {"replies": (GOOD, replace(GOOD, status=0, fault=REFUSED))},
    "around SIGTERM: answered or refused": {"replies": (GOOD, replace(LATE, fault="IncompleteRead"))},
    "what ran at SIGTERM was answered": {"last": (replace(GOOD, status=0, fault="RemoteDisconnected"),)},
    "answers are of artifacts that served then": {"replies": (replace(GOOD, served="second v2"),)},
    "nothing hung": {"replies": (replace(GOOD, ended=80.0),)},
    "good reloads taken, broken refused": {"reloads": (replace(GOOD, fault="expected 409, got 200"),)},
    "memory slope, at most 1 MiB a minute": {
        "samples": tuple(seen(t, 500.0 + t * 1.1 / 60 + 3 * (t % 20 < 5)) for t in range(700))
    },
    "threads, at most 64": {"samples": (seen(1.0, 500.0, 65), *soaked().samples)},
    "no exception in the log": {"exceptions": 1},
    "exit code 0": {"exit_code": -15},
}


def test_a_run_without_a_fault_passes_every_check() -> None:
    assert {check.what for check in checks(soaked())} == set(BROKEN)
    assert [check for check in checks(soaked()) if not check.holds] == []
    assert all(check.holds for check in checks(soaked(replies=(GOOD, LATE))))


@pytest.mark.parametrize("what", list(BROKEN))
def test_every_check_can_fail(what: str) -> None:
    assert [check.what for check in checks(soaked(**BROKEN[what])) if not check.holds] == [what]


def test_an_artifact_serves_from_the_start_of_its_reload_to_the_end_of_the_next() -> None:
    intervals = [Interval("a", 0.0, 10.0), Interval("b", 9.0, 20.0)]
    for name, started, ended, then in [
        ("a", 1.0, 2.0, True),
        ("a", 9.9, 30.0, True),
        ("a", 10.1, 30.0, False),
        ("b", 1.0, 8.9, False),
        ("b", 1.0, 9.1, True),
        ("c", 1.0, 2.0, False),
    ]:
        assert served_then(Reply("good", started, started, ended, 200, name), intervals) is then


def test_memory_is_a_slope_after_the_warm_up() -> None:
    early = tuple(seen(t, 100.0 * t) for t in range(120))
    later = tuple(seen(t, 500.0 + 0.5 * t / 60) for t in range(120, 700))
    assert memory_slope(soaked(samples=(*early, *later))) == pytest.approx(0.5)
    assert math.isnan(memory_slope(soaked(samples=early)))
    higher = tuple(seen(one.time, one.mib + (one.time % 20) * one.time / 60) for one in later)
    assert memory_slope(soaked(samples=higher)) == pytest.approx(0.5)  # peaks that grow leave nothing behind
    between = tuple(replace(one, least=low.least) for one, low in zip(higher, later, strict=True))
    assert memory_slope(soaked(samples=between)) == pytest.approx(0.5)
    assert memory_slope(soaked(samples=between), peaks=True) > 5
    assert not next(check for check in checks(soaked(samples=early)) if "slope" in check.what).holds
    assert summary(soaked())["requests"]["after SIGTERM"] == {"0": 1}


def answer(*vectors: list[float]) -> bytes:
    about = {"artifact": "first", "artifact_version": "v1"}
    return json.dumps({"data": [{"embedding": vector} for vector in vectors], "sparsefinder": about}).encode()


def test_answers_are_checked() -> None:
    drawn = Drawn("good", b"", 2)
    assert checked(drawn, 200, answer([0.5], [1.0])) == ("first v1", "")
    for content in (answer([0.5]), answer([0.5], [math.nan]), answer([0.5], [])):
        assert checked(drawn, 200, content)[1] == "expected 2 finite vectors"
    for content in (b"{", b"[]", b'{"data": [], "sparsefinder": {}}'):
        assert checked(drawn, 200, content)[1]
    error = b'{"error": {"message": "m", "type": "t", "code": "c", "param": null, "request_id": "r"}}'
    assert checked(drawn, 429, error) == ("", "")
    assert checked(drawn, 422, error)[1]
    assert checked(drawn, 429, b'{"error": {"message": "m"}}')[1]
    assert checked(Drawn("nan", b"", 0, 400), 400, error) == ("", "")
    assert checked(Drawn("nan", b"", 0, 400), 422, error)[1]
    assert checked(Drawn("nan", b"", 0, 400), 200, answer())[1] == "expected 400, got 200"


def test_clients_draw_everything() -> None:
    random_ = random.Random(0)
    drawn = [draw(random_, soak.WORDS) for _ in range(3000)]
    assert {one.kind for one in drawn} == {"good", "leaves early", "leaves late", *BAD}
    lengths = [len(json.loads(one.body)["input"][0].split()) for one in drawn if one.kind == "good" and one.items == 1]
    assert min(lengths) == 1
    assert max(lengths) > 400
    assert {one.items for one in drawn} == {0, 1, 2, 3, 4, 5, 6, 7, 8}


def test_clients_against_a_service(tmp_path: Path) -> None:
    with on_a_socket(make_settings(tmp_path)) as address:
        port = int(address.rpartition(":")[2])
        for kind, (body, status) in BAD.items():
            assert act(port, Drawn(kind, body, 0, status)).fault == ""
        good = act(port, Drawn("good", b'{"input": ["a", "b c"]}', 2))
        assert (good.status, good.served, good.fault) == (200, "first v1", "")
        for kind in ("leaves early", "leaves late"):
            left = act(port, Drawn(kind, b'{"input": "a"}'))
            assert (left.status, left.fault, left.sent) == (0, "", math.inf)
        assert act(port, Drawn("good", b'{"input": "a"}')).fault == ""
        assert (big_body(port).status, big_body(port).fault) == (413, "")
    assert act(port, Drawn("good", b'{"input": "a"}')).fault == REFUSED


@pytest.mark.slow
def test_the_short_form_against_the_shipped_model(tmp_path: Path) -> None:
    code = soak.main(["--seconds", "30", "--json", str(tmp_path / "soak.json")])
    result = json.loads((tmp_path / "soak.json").read_text())
    assert [check for check in result["checks"] if not check["holds"]] == []
    assert code == 0
    assert {"reload first", "reload second", "reload broken", "50 MB", "last"} <= set(result["requests"])
