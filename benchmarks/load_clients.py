"""Closed-loop clients: each sends a request, waits for its answer, and sends the next one of a common sequence."""

import http.client
import itertools
import json
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.local_server import HOST

DEADLINE = 60.0  # seconds for one answer
KEPT = 20  # one in so many answers is kept, to be compared with the same request's answer elsewhere
Ask = Callable[[http.client.HTTPConnection, bytes], tuple[int, Mapping[str, str], bytes]]


@dataclass(frozen=True)
class Text:
    """A text, and its tokens with the two special ones."""

    text: str
    tokens: int


@dataclass(frozen=True)
class Outcome:
    """How one request of the sequence ended; seconds from its first byte to the end of its answer, retries included.

    status: 0 where there was no whole answer, or one without finite numbers. vector: of one in `KEPT`.
    """

    index: int
    ended: float
    seconds: float
    status: int
    tokens: int
    refused: int
    vector: tuple[float, ...] | None = None
    fault: str = ""


def texts_of(tokenizer: Any, text: str, count: int, seed: int, longest: int = 512) -> list[Text]:
    """`count` pieces of a text, their lengths log-uniform up to `longest` tokens, the two special ones included."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets, draw = encoded["offset_mapping"], random.Random(seed)
    found: list[Text] = []
    while len(found) < count:
        wanted = round(math.exp(draw.uniform(0, math.log(longest - 2))))
        start = draw.randrange(len(offsets) - wanted)
        piece = text[offsets[start][0] : offsets[start + wanted - 1][1]]
        tokens = len(tokenizer(piece, verbose=False)["input_ids"])  # a word that was cut may count otherwise
        if 2 < tokens <= longest:
            found.append(Text(piece, tokens))
    return found


def run_load(
    port: int, bodies: Sequence[bytes], tokens: Sequence[int], *, clients: int, seconds: float
) -> list[Outcome]:
    """Let `clients` take the bodies in turn, again from the first after the last, for `seconds`; what runs then is
    awaited. Every request that was begun has one outcome."""
    turns, done = itertools.count(), list[Outcome]()
    stop = time.perf_counter() + seconds

    def client() -> None:
        connection = http.client.HTTPConnection(HOST, port, timeout=DEADLINE)
        while time.perf_counter() < stop:
            turn = next(turns)
            index = turn % len(bodies)
            done.append(ask(connection, bodies[index], index, tokens[index]))
        connection.close()

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return done


def ask(connection: http.client.HTTPConnection, body: bytes, index: int, tokens: int) -> Outcome:
    """One request until it is answered with something else than 429; that is tried again when the server says so."""
    started, refused = time.perf_counter(), 0
    while True:
        try:
            status, headers, content = post(connection, body)
        except (OSError, http.client.HTTPException) as error:
            connection.close()  # the next request opens it anew
            ended = time.perf_counter()
            return Outcome(index, ended, ended - started, 0, tokens, refused, None, type(error).__name__)
        ended = time.perf_counter()
        if status != 429 or ended - started > DEADLINE:
            break
        refused += 1
        connection.close()  # it could be closed by the server while we wait
        time.sleep(float(headers.get("retry-after", "1")))
    if status != 200:
        return Outcome(
            index, ended, ended - started, status, tokens, refused, None, content[:200].decode(errors="replace")
        )
    vector = vector_of(content)
    if vector is None:
        return Outcome(index, ended, ended - started, 0, tokens, refused, None, "no finite vector")
    kept = vector if index % KEPT == 0 else None
    return Outcome(index, ended, ended - started, 200, tokens, refused, kept)


def post(
    connection: http.client.HTTPConnection, body: bytes, path: str = "/v1/embeddings"
) -> tuple[int, Mapping[str, str], bytes]:
    """Status, headers (lower case) and content of one JSON request."""
    connection.request("POST", path, body, {"content-type": "application/json"})
    response = connection.getresponse()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return response.status, headers, response.read()


def vector_of(content: bytes) -> tuple[float, ...] | None:
    """The first vector of an answer; None where there is none, or it holds something else than finite numbers."""
    try:
        numbers = json.loads(content)["data"][0]["embedding"]
        vector = tuple(map(float, numbers))
    except (ValueError, KeyError, IndexError, TypeError):
        return None
    return vector if vector and all(map(math.isfinite, vector)) else None


def furthest(some: Sequence[Outcome], others: Sequence[Outcome]) -> tuple[int, float]:
    """How many requests have a kept vector in both, and the greatest difference of two of their coordinates."""
    known = {outcome.index: outcome.vector for outcome in others if outcome.vector is not None}
    pairs = {one.index: (one.vector, known[one.index]) for one in some if one.vector and one.index in known}
    differences: Iterator[float] = (
        abs(a - b) for one, other in pairs.values() for a, b in zip(one, other, strict=True)
    )
    return len(pairs), max(differences, default=math.nan)
