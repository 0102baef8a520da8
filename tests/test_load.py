"""The load benchmark: its arithmetic, its page, and its clients against a real socket."""

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tiny_bert
from app_fakes import make_settings, on_a_socket
from transformers import AutoTokenizer

from benchmarks.load_clients import KEPT, Outcome, furthest, run_load, texts_of, vector_of
from benchmarks.load_page import (
    failed,
    load_page,
    measured,
    percentile,
    rival_of,
    summary_table,
    summed_up,
    throughput_ratio,
    verdicts,
)

VECTOR = b'{"data": [{"embedding": [0.5, -0.25]}]}'


def outcome(index: int = 0, seconds: float = 1.0, status: int = 200, **fields: Any) -> Outcome:
    return Outcome(index, 10.0, seconds, status, tokens=10, refused=0, **fields)


def test_percentiles_are_of_the_nearest_rank() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 99) == 4.0
    assert percentile([float(n) for n in range(1, 101)], 99) == 99.0
    assert percentile([float(n) for n in range(1, 101)], 50) == 50.0
    assert percentile([7.0], 1) == 7.0
    assert math.isnan(percentile([], 50))


def test_what_a_window_held() -> None:
    outcomes = [outcome(seconds=0.1), outcome(seconds=0.3), outcome(seconds=9.0, status=504, fault="timeout")]
    row = measured(outcomes, seconds=2.0)
    assert (row["requests"], row["requests_per_second"], row["tokens_per_second"]) == (2, 1.0, 10.0)
    assert (row["p50_ms"], row["p99_ms"]) == pytest.approx((100.0, 300.0))
    assert failed(outcomes) == {"statuses": {"200": 2, "504": 1}, "refused": 0, "fault": "504 timeout"}


def round_of(tokens: float, p99: float = 100.0, **statuses: int) -> dict[str, Any]:
    counted = {"200": 9} | {name.removeprefix("s"): count for name, count in statuses.items()}
    rates = {"requests_per_second": tokens / 10, "tokens_per_second": tokens, "p50_ms": 10.0, "p99_ms": p99}
    facts = {"statuses": counted, "refused": 2, "fault": "504 late" if statuses else ""}
    return rates | facts | {"requests": 9, "server_cores": 1.5, "clients_cores": 0.1}


def canned(ours: list[float], p99: float = 90.0, furthest: float = 2e-6, **statuses: int) -> dict[str, Any]:
    rounds = {
        "original": [round_of(tokens, p99, **statuses) for tokens in ours],
        "baseline": [round_of(100.0), round_of(200.0)],
        "baseline, lock": [round_of(200.0), round_of(400.0)],
        "sparse": [round_of(150.0), round_of(300.0)],
    }
    about = {"command": "python -m benchmarks.load", "clients": 64}
    return {"about": about, "ways": summed_up(rounds), "compared": 30, "furthest": furthest}


def test_ratios_are_medians_of_rounds_against_the_better_rival() -> None:
    result = canned([300.0, 540.0])
    assert rival_of(result["ways"]) == "baseline, lock"
    assert throughput_ratio(result["ways"], "original", "baseline, lock") == pytest.approx((1.5 + 1.35) / 2)
    assert throughput_ratio(result["ways"], "sparse", "baseline, lock") == pytest.approx(0.75)
    assert result["ways"]["original"]["tokens_per_second"] == 420.0
    assert "| `sparse` | 225 | 150–300 | 0.75 |" in summary_table(result)


def test_goals_are_said_as_they_are() -> None:
    reached = verdicts(canned([300.0, 540.0]))
    assert [line.count("not reached") for line in reached] == [0] * 5
    assert "429, tried again: 16" in reached
    missed = verdicts(canned([200.0, 400.0], p99=101.0, furthest=2e-4, s504=1))
    assert [line.count("not reached") for line in missed] == [1, 1, 1, 1, 0]
    assert "504 among them: 2" in missed[3]
    assert summed_up({"a": [round_of(1.0, s504=1)]})["a"]["failures"] == 1


def test_the_page_shows_table_goals_and_command() -> None:
    page = load_page(canned([300.0, 540.0]))
    assert "64 clients" in page
    assert "- command: `python -m benchmarks.load`" in page
    assert "| `original` | 420 | 300–540 | 1.43 |" in page
    assert "1.43 (goal: at least 1.3; reached)" in page


def test_vectors_are_compared_by_request() -> None:
    some = [outcome(0, vector=(1.0, 2.0)), outcome(KEPT, vector=(0.0, 0.0)), outcome(1)]
    others = [outcome(0, vector=(1.0, 2.5)), outcome(2 * KEPT, vector=(9.0, 9.0)), outcome(1)]
    assert furthest(some, others) == (1, 0.5)
    count, difference = furthest(some, [])
    assert count == 0
    assert math.isnan(difference)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"data": []}', b'{"data": [{"embedding": []}]}', b'{"data": [{"embedding": [null]}]}',
                b'{"data": [{"embedding": [NaN]}]}', b'{"data": [{"embedding": ["a"]}]}']
)  # fmt: skip
def test_an_answer_without_finite_numbers_is_none(content: bytes) -> None:
    assert vector_of(content) is None
    assert vector_of(VECTOR) == (0.5, -0.25)


def test_texts_have_the_lengths_they_say(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert.make_teacher(tmp_path))
    text = " ".join(tiny_bert.WORDS[n * n % 60] for n in range(3000))
    texts = texts_of(tokenizer, text, 300, seed=1)
    assert [len(tokenizer(one.text)["input_ids"]) for one in texts] == [one.tokens for one in texts]
    assert min(one.tokens for one in texts) == 3
    assert 400 < max(one.tokens for one in texts) <= 512
    assert 10 < sorted(one.tokens for one in texts)[150] < 40  # log-uniform: half are shorter than about 23 + 2
    assert texts == texts_of(tokenizer, text, 300, seed=1) != texts_of(tokenizer, text, 300, seed=2)


def test_clients_against_a_service(tmp_path: Path) -> None:
    with on_a_socket(make_settings(tmp_path)) as address:
        port = int(address.rpartition(":")[2])
        bodies = [json.dumps({"input": f"w{n}", "attention": "original"}).encode() for n in range(50)]
        outcomes = run_load(port, bodies, list(range(50)), clients=8, seconds=1.0)
        too_long = run_load(port, [b'{"input": "%s"}' % (b"a " * 99)], [99], clients=2, seconds=0.2)
    assert len(outcomes) > 50
    assert {one.status for one in outcomes} == {200}
    assert sorted({one.index for one in outcomes}) == list(range(50))
    assert all((one.vector is not None) == (one.index % KEPT == 0) and one.tokens == one.index for one in outcomes)
    assert furthest(outcomes, outcomes)[1] == 0.0
    assert {one.status for one in too_long} == {422}
    assert "input_too_long" in too_long[0].fault


class Moody(BaseHTTPRequestHandler):
    """429 at first, then an answer; to the body `bad` a half one, to `nan` one that is no number."""

    protocol_version = "HTTP/1.1"
    refusals = 2

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if body == b"bad":
            self.send_response(200)
            self.send_header("content-length", "1000")
            self.end_headers()
            self.close_connection = True
            return
        refuse, Moody.refusals = Moody.refusals > 0, Moody.refusals - 1
        content = b'{"data": [{"embedding": [NaN]}]}' if body == b"nan" else VECTOR
        self.send_response(429 if refuse else 200)
        self.send_header("retry-after", "0.01")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def moody() -> Iterator[int]:
    Moody.refusals = 2
    server = ThreadingHTTPServer(("127.0.0.1", 0), Moody)
    threading.Thread(target=server.serve_forever).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def test_429_is_tried_again_and_all_else_is_a_failure(moody: int) -> None:
    good = run_load(moody, [b"good"], [1], clients=1, seconds=0.3)
    assert {one.status for one in good} == {200}
    assert good[0].refused == 2
    assert good[0].vector == (0.5, -0.25)
    assert good[0].seconds >= 0.02
    for body, fault in ((b"bad", "IncompleteRead"), (b"nan", "no finite vector")):
        outcomes = run_load(moody, [body], [1], clients=1, seconds=0.1)
        assert {(one.status, one.fault) for one in outcomes} == {(0, fault)}
