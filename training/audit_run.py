"""Send text through a running service and read what its audits say; no text is kept."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsefinder.errors import ConfigError
from training.audit_client import Service

AUDITED = ("sparse", "auto")  # modes in which a plan can miss something
ROUTES = {"embed": "/v1/embeddings", "score": "/v1/score"}
CHARACTERS_PER_TOKEN = 4
TOKENS = 256  # where the service does not say which length its calibration had
WAIT_SECONDS = 60.0

SPACE = re.compile(r"\s+")
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Audited:
    """What was sent, how many audited requests the service knew before, and /v1/sparsity afterwards."""

    attention: str
    requests: int
    tokens: int
    before: int
    sparsity: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return dict(vars(self))


def audit(service: Service, files: Sequence[Path], requests: int, attention: str, on_progress: OnProgress) -> Audited:
    """Send about `requests` pieces of text, one after the other, and wait until their audits are in.

    Raises:
        ConfigError: the service cannot be asked, audits nothing, or audited none of the requests.
        DataError: a file cannot be read.
    """
    if attention not in AUDITED:
        raise ConfigError(f"attention: expected one of {', '.join(AUDITED)}, got {attention!r}: only a plan is audited")
    start = service.call("/v1/sparsity")
    live = start.get("live")
    if not isinstance(live, dict) or "cost" not in live:
        raise ConfigError(f"url: expected a Sparsefinder service at {service.url}, got something else")
    if not live["audit_rate"]:
        message = (
            "audit rate: the service audits nothing (0); start it with SPARSEFINDER_AUDIT_RATE=1 or --audit-rate 1"
        )
        raise ConfigError(message)
    route = _route(service)
    pieces = pieces_of(files, requests, _characters(start))
    tokens = 0
    for done, text in enumerate(pieces):
        on_progress("ask", done, len(pieces))
        answer = service.call(route, {"input": text, "attention": attention, "truncate": True})
        tokens += answer["usage"]["total_tokens"]
    end = _all_in(service, on_progress)
    if end["live"]["cost"]["finished"] == live["cost"]["finished"]:
        rate = live["audit_rate"]
        hint = f"send more with --requests, or raise the service's SPARSEFINDER_AUDIT_RATE (now {rate:g})"
        raise ConfigError(f"requests: none of {len(pieces)} was audited; {hint}")
    return Audited(attention, len(pieces), tokens, live["requests"], end)


def pieces_of(files: Sequence[Path], count: int, characters: int) -> list[str]:
    """At most `count` pieces of about `characters` characters, spread evenly over the files or the held-out text."""
    from training.corpus import default_texts, read_texts

    texts = read_texts(files) if files else default_texts("heldout", count * characters * 5 // 4)
    pieces = _cut("\n\n".join(texts).strip(), characters)
    chosen = min(count, len(pieces))
    return [pieces[place * len(pieces) // chosen] for place in range(chosen)]


def _cut(text: str, characters: int) -> list[str]:
    """Pieces that end at the first white space from `characters` on; a shorter rest counts only where it is all."""
    pieces: list[str] = []
    start = 0
    while start < len(text):
        space = SPACE.search(text, start + characters)
        if space is None and pieces:
            break
        end = space.start() if space else len(text)
        pieces.append(text[start:end])
        start = space.end() if space else len(text)
    return pieces


def _characters(sparsity: dict[str, Any]) -> int:
    """About as long as the texts that the calibration was measured on: recall depends on the length."""
    about = (sparsity.get("calibration") or {}).get("about") or {}
    return int(about.get("tokens") or TOKENS) * CHARACTERS_PER_TOKEN


def _route(service: Service) -> str:
    tasks = service.call("/info")["artifact"].get("tasks", ["embed"])
    route = next((ROUTES[task] for task in tasks if task in ROUTES), None)
    if route is None:
        raise ConfigError(f"url: expected a model that can {' or '.join(ROUTES)}, got one that can {', '.join(tasks)}")
    return route


def _all_in(service: Service, on_progress: OnProgress) -> dict[str, Any]:
    """/v1/sparsity once everything is audited that was accepted by the time the last answer came."""
    until, asked = time.monotonic() + WAIT_SECONDS, None
    while True:
        body = service.call("/v1/sparsity")
        cost = body["live"]["cost"]
        asked = cost["accepted"] if asked is None else asked
        if cost["finished"] + cost["failed"] >= asked or time.monotonic() > until:
            return body
        on_progress("audit", cost["finished"], asked)
        time.sleep(0.1)
