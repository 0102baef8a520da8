"""Shared batches: which items make the next one, what a full queue says, and whose request a fault is."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from app_fakes import EXPLODE, NAN, SLOW, FakeLoader, embed, error_of, make_settings, on_a_socket, serving, token
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from app.batching import PACKED, PADDED, SPACING, Item, Queue, Ticket, choose
from app.errors import ApiError
from app.servable import Lane

LANE = Lane("embed", "sparse")


class _Model:
    """Stands for a loaded artifact: its identity, and whether it packs."""

    def __init__(self, packs: bool = False) -> None:
        self.description = SimpleNamespace(packs=packs)


class _Future:
    """Stands for the future of a request, outside of any event loop."""

    def __init__(self) -> None:
        self.over = False

    def done(self) -> bool:
        return self.over


MODEL: Any = _Model()
PACKING: Any = _Model(packs=True)


def ticket(*lengths: int, lane: Lane = LANE, model: Any = MODEL) -> Ticket:
    future: Any = _Future()
    return Ticket(model, lane, [[7] * length for length in lengths], ready=future)


def waiting(*lengths: int, **values: Any) -> list[Item]:
    return [Item(ticket(length, **values), 0) for length in lengths]


def lengths_of(batch: Sequence[Item]) -> list[int]:
    return [len(item.ids) for item in batch]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 200), st.booleans())
def test_laws_of_a_batch(lengths: list[int], limit: int, packs: bool) -> None:
    items = waiting(*lengths, model=PACKING if packs else MODEL)
    batch = choose(items, limit)
    assert batch[0] is items[0]
    assert len({id(item) for item in batch}) == len(batch)
    tokens, cells = sum(lengths_of(batch)), max(lengths_of(batch)) * len(batch)
    assert (tokens if packs else cells) <= limit or len(batch) == 1
    assert tokens >= (1 - (PACKED if packs else PADDED)) * cells


def test_where_padding_costs_nothing_the_order_of_arrival_decides() -> None:
    assert lengths_of(choose(waiting(20, 9, 30, 20, 20, model=PACKING), 60)) == [20, 9, 30]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 200))
def test_a_queue_empties_and_every_item_is_taken_once(lengths: list[int], limit: int) -> None:
    queue = Queue(1000, 100_000)
    queue._waiting = waiting(*lengths)
    taken = []
    while queue:
        taken += lengths_of(queue.take(limit))
    assert sorted(taken) == sorted(lengths)


def test_nearest_lengths_are_preferred() -> None:
    assert sorted(lengths_of(choose(waiting(20, 5, 60, 21, 19, 20), 84))) == [19, 20, 20, 21]
    assert lengths_of(choose(waiting(20, 22, 22, 20, 20), 66)) == [20, 20, 20]


def test_an_item_above_the_limit_runs_alone() -> None:
    assert lengths_of(choose(waiting(90, 5, 90), 20)) == [90]


def test_an_old_long_item_is_not_starved_by_new_short_ones() -> None:
    queue = Queue(1000, 100_000)
    queue._waiting = waiting(50, *[3] * 20)
    for _ in range(3):
        batch = queue.take(60)
        queue._waiting += waiting(*[3] * 20)  # the short ones never end
        if 50 in lengths_of(batch):
            return
    raise AssertionError("the oldest item still waits after three batches")


def test_a_great_request_lets_others_between_and_is_not_starved_by_them() -> None:
    queue, start = Queue(10_000, 1_000_000), 100.0
    great = replace(ticket(*[10] * 500), arrived=start)
    queue.add(great)
    later = [replace(ticket(10), arrived=start + wait) for wait in (0.1, 1.0, 60.0)]
    for one in later:
        queue.add(one)
    order = [item.ticket for _ in range(503) for item in queue.take(10)]
    places = [order.index(one) for one in later]
    assert places == [round(0.1 / SPACING) + 1, round(1.0 / SPACING) + 2, 502]


def test_lanes_and_artifacts_are_never_mixed() -> None:
    other: Any = _Model()
    items = [
        *waiting(5),
        *waiting(5, lane=Lane("embed", "dense")),
        *waiting(5, lane=Lane("score", "sparse")),
        *waiting(5, lane=Lane("embed", "sparse", 0.1)),
        *waiting(5, model=other),
        *waiting(5),
    ]
    assert choose(items, 100) == [items[0], items[5]]


def test_exact_shares_its_batches_with_nobody() -> None:
    mine, other = ticket(5, 5, lane=Lane("embed", "exact")), ticket(5, lane=Lane("embed", "exact"))
    batch = choose([Item(mine, 0), Item(other, 0), Item(mine, 1)], 100)
    assert [item.ticket for item in batch] == [mine, mine]


def test_who_gave_up_is_dropped_when_a_batch_forms() -> None:
    queue = Queue(10, 1000)
    gone, here = ticket(5), ticket(6)
    queue.add(gone)
    queue.add(here)
    gone.ready.over = True  # type: ignore[attr-defined]
    assert lengths_of(queue.take(100)) == [6]
    assert queue.take(100) == []


@pytest.mark.parametrize(("limits", "word"), [((3, 1000), "items"), ((100, 12), "tokens")])
def test_a_full_queue_says_when_to_come_again(limits: tuple[int, int], word: str) -> None:
    def enter(queue: Queue, one: Ticket) -> None:
        queue.begin_reading(len(one.ids))
        queue.reading -= len(one.ids)
        queue.add(one)

    queue = Queue(*limits)
    gone = ticket(5, 5)
    enter(queue, gone)
    with pytest.raises(ApiError, match=word) as full:
        enter(queue, ticket(5, 5))
    assert (full.value.status, full.value.code) == (429, "queue_full")
    assert 1 <= int(full.value.headers["retry-after"]) <= 60
    with pytest.raises(ApiError) as never:
        enter(queue, ticket(*[5] * 4))
    assert (never.value.status, never.value.code) == (422, "batch_too_large")
    gone.ready.over = True  # type: ignore[attr-defined]  # its places are free again
    enter(queue, ticket(5, 5))


def test_retry_after_follows_what_waits_and_how_fast_it_goes() -> None:
    queue = Queue(1000, 10_000)
    for _ in range(200):
        queue.measured(100, 1.0)
    queue.add(ticket(2000, 1000))
    with pytest.raises(ApiError) as full:
        queue.add(ticket(9000))
    assert full.value.headers["retry-after"] == "30"


@pytest.fixture
def held(tmp_path: Path, loader: FakeLoader) -> Iterator[tuple[TestClient, Callable[..., Any]]]:
    """A service whose worker is busy until `loader.gate` opens, and a way to send a request that waits behind it."""
    loader.gate.clear()
    with serving(make_settings(tmp_path, max_queue_items=8), loader) as client, ThreadPoolExecutor(16) as pool:
        first = pool.submit(embed, client, "slow")
        while not any(len(lengths) == 1 and lengths[0] == 3 for _, lengths, _ in loader.calls):
            time.sleep(0.005)

        def send(text: Any, **fields: Any) -> Any:
            before = client.app.state.engine.queue.items  # type: ignore[attr-defined]
            sent = pool.submit(embed, client, text, **fields)
            while client.app.state.engine.queue.items == before and not sent.done():  # type: ignore[attr-defined]
                time.sleep(0.005)
            return sent

        yield client, send
        loader.gate.set()
        assert first.result(20).status_code == 200


Held = tuple[TestClient, Callable[..., Any]]


def test_requests_that_wait_share_a_batch(held: Held, loader: FakeLoader) -> None:
    _, send = held
    loader.calls.clear()
    sent = [send("one two"), send(["three four", "five six"]), send("dense one", attention="dense")]
    loader.gate.set()
    answers = [future.result(20) for future in sent]
    assert all(answer.status_code == 200 for answer in answers)
    assert [(mode, lengths) for mode, lengths, _ in loader.calls] == [("sparse", [4, 4, 4]), ("dense", [4])]
    assert float(answers[0].headers["x-sparsefinder-queue-ms"]) > 0
    assert len(answers[1].json()["data"]) == 2
    assert answers[0].json()["sparsefinder"]["tokens"] == [4]


@pytest.mark.parametrize(("word", "code"), [("explode", "internal_error"), ("nan", "non_finite_output")])
def test_one_bad_item_fails_only_its_own_request(held: Held, loader: FakeLoader, word: str, code: str) -> None:
    _, send = held
    sent = [send("good one"), send(["fine two", f"{word} three"]), send("good four")]
    loader.gate.set()
    first, bad, last = (future.result(20) for future in sent)
    error_of(bad, 500, code)
    assert first.status_code == last.status_code == 200


def test_a_full_queue_answers_429_for_single_and_batch_alike(held: Held) -> None:
    client, send = held
    sent = [send(["a b"] * 8)]
    for text in ("c", ["c", "d"]):
        answer = embed(client, text)
        error_of(answer, 429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
    assert "sparsefinder_queue_items 8.0" in client.get("/metrics").text
    error_of(embed(client, ["c"] * 9), 422, "batch_too_large")
    assert not sent[0].done()


def test_a_request_that_takes_too_long_gets_504_and_is_dropped(tmp_path: Path, loader: FakeLoader) -> None:
    loader.gate.clear()
    with serving(make_settings(tmp_path, request_seconds=0.2), loader) as client:
        with ThreadPoolExecutor(2) as pool:
            slow = pool.submit(embed, client, "slow")
            while not any(3 in lengths for _, lengths, _ in loader.calls):
                time.sleep(0.005)
            behind = pool.submit(embed, client, "a b c d e")
            error_of(slow.result(20), 504, "timeout")
            error_of(behind.result(20), 504, "timeout")
        loader.gate.set()
        assert embed(client, "x y").status_code == 200
        assert not any(7 in lengths for _, lengths, _ in loader.calls)  # nobody waited for it any more


def test_a_client_that_leaves_is_dropped(tmp_path: Path) -> None:
    loader = FakeLoader()
    loader.gate.clear()

    async def leave(address: str) -> None:
        async with httpx.AsyncClient(base_url=address) as client:
            held = asyncio.create_task(client.post("/v1/embeddings", json={"input": "slow"}))
            while not any(3 in lengths for _, lengths, _ in loader.calls):
                await asyncio.sleep(0.005)
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/embeddings", json={"input": "a b c d e"}, timeout=0.2)
            while 'status="499"' not in (await client.get("/metrics")).text:
                await asyncio.sleep(0.01)
            loader.gate.set()
            assert (await held).status_code == 200
            assert (await client.post("/v1/embeddings", json={"input": "x y"})).status_code == 200

    with on_a_socket(make_settings(tmp_path), loader) as address:
        asyncio.run(asyncio.wait_for(leave(address), 20))
    assert not any(7 in lengths for _, lengths, _ in loader.calls)


def test_many_clients_at_once_get_each_their_own_answer(client: TestClient) -> None:
    words = [word for word in map(str, range(700)) if token(word) not in (EXPLODE, NAN, SLOW)]
    texts = [" ".join(words[9 * i : 9 * i + 1 + i % 9]) for i in range(64)]
    alone = [embed(client, text).json()["data"][0]["embedding"] for text in texts]
    before = threading.active_count()
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(lambda text: embed(client, text).json()["data"][0]["embedding"], texts))
    assert together == alone
    assert threading.active_count() <= before + 64
