"""What clients of a soak do, good and bad, and whether each was answered as it had to be."""

import contextlib
import http.client
import json
import math
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.local_server import HOST

DEADLINE = 60.0  # seconds without a byte: then a request counts as hung
MODES = ("original", "dense", "sparse", "exact", "auto")
BIG_BODY, CHUNK = 50 * 2**20, 64 * 1024
ALLOWED = {200, 429}  # of a good request

# Bodies that are wrong, and the statuses that say so.
BAD: Mapping[str, tuple[bytes, int]] = {
    "malformed": (b'{"input": "a', 400),
    "nan": (b'{"input": NaN}', 400),
    "not utf-8": (b'{"input": "\xff\xfe"}', 400),
    "deep": (b'{"input": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400),
    "surrogate": (rb'{"input": "\ud800"}', 422),
    "wrong type": (b'{"input": {"a": 1}}', 422),
    "wrong item": (b'{"input": ["a", 3]}', 422),
    "unknown field": (b'{"input": "a", "attenton": "dense"}', 422),
    "no token": (b'{"input": ""}', 422),
    "foreign id": (b'{"input": [123456789]}', 422),
    "over-long": (json.dumps({"input": "trust " * 1000}).encode(), 422),
}


@dataclass(frozen=True)
class Reply:
    """What came of one request: the kind of it, when it began, was wholly sent (inf: never) and ended, in seconds.

    status: 0 where there was none. served: folder and version of the artifact, of a good answer. fault: what is wrong.
    """

    kind: str
    started: float
    sent: float
    ended: float
    status: int
    served: str = ""
    fault: str = ""


@dataclass(frozen=True)
class Drawn:
    """One thing that a client does."""

    kind: str
    body: bytes
    items: int = 1
    status: int = 200


def draw(random_: random.Random, words: Sequence[str]) -> Drawn:
    """Four of five are good requests of 1 to 510 words; the others are bad bodies or clients that leave."""
    dice = random_.random()
    if dice < 0.12:
        kind = random_.choice(list(BAD))
        body, status = BAD[kind]
        return Drawn(kind, body, 0, status)
    lengths = [_length(random_)] if dice < 0.8 else [min(_length(random_), 60) for _ in range(random_.randint(2, 8))]
    texts = [" ".join(random_.choice(words) for _ in range(length)) for length in lengths]
    fields: dict[str, Any] = {"input": texts, "attention": random_.choice(MODES)}
    if dice < 0.25:
        fields |= {"input": texts[0] * 2, "truncate": True}
    kind = random_.choice(("leaves early", "leaves late")) if dice > 0.92 else "good"
    return Drawn(kind, json.dumps(fields).encode(), len(texts) if dice >= 0.25 else 1)


def _length(random_: random.Random) -> int:
    return round(math.exp(random_.uniform(0, math.log(510))))


def act(port: int, drawn: Drawn) -> Reply:
    """Do it, over a connection of its own."""
    if drawn.kind in ("leaves early", "leaves late"):
        return _leave(port, drawn)
    with connected(port) as connection:
        return exchange(connection, drawn)


@contextlib.contextmanager
def connected(port: int) -> Iterator[http.client.HTTPConnection]:
    """A connection that gives up after the deadline."""
    connection = http.client.HTTPConnection(HOST, port, timeout=DEADLINE)
    try:
        yield connection
    finally:
        connection.close()


def exchange(connection: http.client.HTTPConnection, drawn: Drawn) -> Reply:
    """One request and its answer, checked."""
    started, sent = time.perf_counter(), math.inf
    try:
        connection.request("POST", "/v1/embeddings", drawn.body, {"content-type": "application/json"})
        sent = time.perf_counter()
        response = connection.getresponse()
        content = response.read()
    except (OSError, http.client.HTTPException) as error:
        hung = "hung" if isinstance(error, TimeoutError) else type(error).__name__
        return Reply(drawn.kind, started, sent, time.perf_counter(), 0, "", hung)
    ended = time.perf_counter()
    served, fault = checked(drawn, response.status, content)
    return Reply(drawn.kind, started, sent, ended, response.status, served, fault)


def checked(drawn: Drawn, status: int, content: bytes) -> tuple[str, str]:
    """Which artifact answered, and what is wrong with the answer (nothing: "")."""
    try:
        answer = json.loads(content)
        if status != 200:
            allowed = ALLOWED if drawn.status == 200 else {drawn.status}
            complete = set(answer["error"]) == {"message", "type", "code", "param", "request_id"}
            return "", "" if status in allowed and complete else f"{status}: {content[:200].decode(errors='replace')}"
        vectors = [item["embedding"] for item in answer["data"]]
        whole = len(vectors) == drawn.items and all(math.isfinite(x) for vector in vectors for x in vector)
        served = f"{answer['sparsefinder']['artifact']} {answer['sparsefinder']['artifact_version']}"
    except (ValueError, KeyError, TypeError) as error:
        return "", f"{status}: {type(error).__name__} in {content[:200].decode(errors='replace')}"
    if drawn.status != 200:
        return served, f"expected {drawn.status}, got 200"
    return served, "" if whole and all(vectors) else f"expected {drawn.items} finite vectors"


def _leave(port: int, drawn: Drawn) -> Reply:
    """Send half of the body, or all of it and then not wait for the answer."""
    early, started = drawn.kind == "leaves early", time.perf_counter()
    part = drawn.body[: len(drawn.body) // 2] if early else drawn.body
    head = f"POST /v1/embeddings HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(drawn.body)}\r\n\r\n"
    fault = ""
    try:
        with socket.create_connection((HOST, port), DEADLINE) as connection:
            connection.sendall(head.encode() + part)
            time.sleep(0.01)
    except OSError as error:
        fault = type(error).__name__
    return Reply(drawn.kind, started, math.inf, time.perf_counter(), 0, "", fault)


def big_body(port: int) -> Reply:
    """Fifty megabytes in chunks: 413, which may come with an end of the connection while we are still sending."""
    drawn, started = Drawn("50 MB", b"", 0, 413), time.perf_counter()
    status, served, fault = 413, "", ""
    with connected(port) as connection:
        try:
            headers = {"content-type": "application/json", "transfer-encoding": "chunked"}
            chunks = (b" " * CHUNK for _ in range(BIG_BODY // CHUNK))
            connection.request("POST", "/v1/embeddings", chunks, headers, encode_chunked=True)
            response = connection.getresponse()
            status = response.status
            served, fault = checked(drawn, status, response.read())
        except (BrokenPipeError, ConnectionResetError):
            pass
        except (OSError, http.client.HTTPException) as error:
            status, fault = 0, type(error).__name__
    return Reply(drawn.kind, started, math.inf, time.perf_counter(), status, served, fault)


def keep_acting(port: int, seed: int, words: Sequence[str], until: Callable[[], bool], replies: list[Reply]) -> None:
    """One client, one thing after the other, until told to end; what came of each goes to `replies`."""
    random_ = random.Random(seed)
    while not until():
        replies.append(act(port, draw(random_, words)))
        if replies[-1].status == 429:
            time.sleep(0.5)
        elif replies[-1].status == 0:
            time.sleep(0.02)  # a server that stops refuses at once
