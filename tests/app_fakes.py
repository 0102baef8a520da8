"""A model whose answers are easy to foresee, and the helpers every test of the service uses."""

import contextlib
import json
import re
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from fake_graphs import fake_graph
from starlette.testclient import TestClient

from app.audit import AuditedLayer, Sample
from app.graph_values import GraphOptions
from app.main import create_app, make_engine
from app.outputs import Filled, FillMask, Score, Scored
from app.schemas import MODES
from app.servable import Description, Forward, Lane
from app.settings import Settings, load_settings
from app.telemetry import Telemetry
from app.vocabulary import Encoded
from sparsefinder.certificate import Repair
from sparsefinder.errors import ArtifactError, IncompatibleModelError
from sparsefinder.working_points import WorkingPoint

CLS, SEP, MASK = 1, 2, 3
VOCABULARY, DIMENSIONS, MAX_TOKENS, LAYERS, HEADS = 1000, 4, 16, 2, 3
COMPUTED = 0.25  # density of a sparse answer
MODE_OFFSET = {"original": 100.0, "dense": 200.0, "sparse": 300.0, "exact": 400.0, "auto": 500.0}
REPAIR = Repair(rows=20, proven=12, repaired=5, survivors=40, most_survivors=9, added=7)  # of a layer of one batch


POINTS = tuple(
    WorkingPoint(shift, density, 1 - density, recall, recall, recall / 2, (density,) * LAYERS)
    for density, recall, shift in ((0.1, 0.6, 2.0), (COMPUTED, 0.9, 0.0), (0.5, 0.98, -1.0), (0.9, 0.99, -3.0))
)


def token(word: str) -> int:
    if word == "[MASK]":
        return MASK
    return 10 + zlib.crc32(word.encode()) % (VOCABULARY - 10)


EXPLODE, NAN, SLOW = token("explode"), token("nan"), token("slow")


def write_artifact(folder: Path, **content: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fake.json").write_text(json.dumps({"version": folder.name, "bias": 0.0, "fault": None} | content))
    return folder


class FakeLoader:
    """Reads `fake.json`; its `fault` says where loading breaks."""

    device = "cpu"

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int], str]] = []
        self.gate = threading.Event()  # a forward pass with the word "slow" waits for it
        self.gate.set()
        self.slow_seconds = 20.0
        self.read_gate = threading.Event()
        self.read_gate.set()
        self.broken = threading.Event()  # every forward pass raises while it is set

    def read(self, folder: Path) -> Any:
        self.read_gate.wait(20)
        path = folder / "fake.json"
        if not path.is_file():
            raise ArtifactError(f"artifact: expected fake.json in {folder.name}, found none")
        content = json.loads(path.read_text())
        if content["fault"] == "read":
            raise ArtifactError("artifact: expected layer 3, found none")
        return folder, content

    def build(self, content: Any) -> "FakeModel":
        folder, values = content
        if values["fault"] == "teacher":
            raise IncompatibleModelError("artifact: expected one for another teacher")
        if values["fault"] == "bug":
            raise ZeroDivisionError("unforeseen")
        return FakeModel(self, folder, values)


class SlowLoader(FakeLoader):
    """In the place of the real loader: a text with the word "slow" takes two seconds."""

    def __init__(self, teacher: str, device: str, crossover: str, head: Path | None) -> None:
        super().__init__()
        self.gate.clear()
        self.slow_seconds = 2.0


class FakeWords:
    """Every word is one piece, but for those with a hyphen; "unknown" is none."""

    mask, mask_piece = MASK, "[MASK]"

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [f"piece{number}" for number in ids]

    def split(self, word: str) -> list[int]:
        return [token(part) for part in word.split("-") if part not in ("", "unknown")]

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        encoded = []
        for text in texts:
            found = list(re.finditer(r"\S+", text))
            ids = [CLS, *(token(one[0]) for one in found), SEP]
            encoded.append(Encoded(ids, self.pieces(ids), [None, *(one.span() for one in found), None]))
        return encoded


def filled(ids: list[int], options: FillMask) -> Filled:
    """The best words are 10, 11, 12 … in a first mask, 20, 21 … in a second; a target t has log-probability −t/100."""
    places = np.flatnonzero(np.array(ids) == MASK)
    if options.targets:
        words = np.tile(options.targets, (len(places), 1))
        return Filled(places, words, -words.astype(np.float32) / 100)
    words = 10 * (1 + np.arange(len(places)))[:, None] + np.arange(options.top_k)
    return Filled(places, words, np.tile(-1.0 - np.arange(options.top_k, dtype=np.float32), (len(places), 1)))


def scored(ids: list[int], options: Score) -> Scored:
    """A token t has log-probability −t/100; the best ones are 10, 11, 12 … everywhere."""
    words = np.tile(10 + np.arange(options.top_k), (len(ids) - 1, 1))
    return Scored(-np.array(ids[1:], dtype=np.float32) / 100, words, -words.astype(np.float32))


class FakeModel:
    def __init__(self, loader: FakeLoader, folder: Path, values: dict[str, Any]):
        self.loader = loader
        self.values = values
        self.words = FakeWords()
        causal = values.get("causal", False)
        plain = {"set": "plan", "overall": {"recall": 0.9}, "loop": values.get("loop")}
        self.calibration = values.get("calibration", plain)
        sizes = {"layers": LAYERS, "heads": HEADS, "dimensions": DIMENSIONS, "max_tokens": MAX_TOKENS}
        self.description = Description(
            folder.name,
            values["version"],
            str(folder),
            "fake",
            "0" * 64,
            "none",
            values.get("alpha", 1.5),
            modes=MODES if values.get("alpha", 1.5) > 1 else tuple(mode for mode in MODES if mode != "exact"),
            vocabulary=VOCABULARY,
            device="cpu",
            threads=1,
            tasks=("score", "graph") if causal else values.get("tasks", ("embed", "fill_mask", "graph")),
            causal=causal,
            fill_mask_modes=values.get("fill_mask_modes", () if causal else MODES),
            points=POINTS if values.get("points", True) else (),
            **sizes,
        )

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        ends = [] if self.description.causal else [SEP]
        return [[CLS, *map(token, text.split()), *ends] for text in texts]

    def blank(self, ids: list[int]) -> bool:
        return set(ids) <= {CLS, SEP}

    def cut(self, ids: list[int]) -> list[int]:
        return ids[:MAX_TOKENS] if self.description.causal else [*ids[: MAX_TOKENS - 1], ids[-1]]

    def forward(self, ids: Sequence[list[int]], lane: Lane, samples: Sequence[Sample]) -> Forward:
        mode = lane.mode
        self.loader.calls.append((mode, [len(item) for item in ids], threading.current_thread().name))
        tokens = {one for item in ids for one in item}
        if SLOW in tokens:
            self.loader.gate.wait(self.loader.slow_seconds)
        if EXPLODE in tokens or self.loader.broken.is_set():
            raise RuntimeError("exploded on the text 'explode SECRET'")
        outputs = [self.output(item, lane) for item in ids]
        pairs = np.array([len(item) ** 2 for item in ids], dtype=np.int64)
        density = (lane.density or COMPUTED) if mode == "sparse" else 1.0
        computed = (pairs * density).astype(np.int64)[:, None, None].repeat(LAYERS, 1).repeat(HEADS, 2)
        audits = tuple((audited(len(ids[one.item]), len(one.rows)),) * LAYERS for one in samples)
        # Under `auto` long texts have a plan in the first layer only.
        ran = (
            ("sparse", "dense")
            if mode == "auto" and len(ids[0]) > 4
            else ("dense" if mode == "auto" else mode,) * LAYERS
        )
        return Forward(outputs, computed, pairs, ran, audits, (REPAIR,) * LAYERS if mode == "exact" else ())

    def output(self, ids: list[int], lane: Lane) -> Any:
        if lane.task == "graph":
            finite = NAN not in ids and self.values["fault"] != "nan"
            return fake_graph(len(ids), lane.options or GraphOptions(), LAYERS, HEADS, finite)
        if lane.task == "fill_mask":
            output = filled(ids, lane.options)
            numbers = output.logprobs
        elif lane.task == "score":
            output = scored(ids, lane.options or Score())
            numbers = output.logprobs
        else:
            output = numbers = self.vector(ids, lane.mode)
        if NAN in ids or self.values["fault"] == "nan":
            numbers.flat[0] = np.nan
        return output

    def vector(self, ids: list[int], mode: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        values = [sum(ids) / 7, len(ids), MODE_OFFSET[mode], self.values["bias"]]
        return np.asarray(values, dtype=np.float32)


def audited(keys: int, rows: int) -> AuditedLayer:
    """Rows whose two gold keys are the first two, of which the plan keeps the first only."""
    scores = torch.full((keys,), -50.0)
    scores[:2] = 0.0
    kept = torch.zeros(HEADS, rows, keys, dtype=torch.bool)
    kept[:, :, 0] = True
    legal = torch.ones(rows, keys, dtype=torch.bool)
    q, k = torch.ones(HEADS, rows, 1), scores.expand(HEADS, keys).unsqueeze(-1).contiguous()
    return AuditedLayer(q, k, torch.ones(HEADS), 1.5, legal, kept)


def make_settings(root: Path, **values: Any) -> Settings:
    artifact = write_artifact(root / "first", version="v1")
    return load_settings(**({"artifact": artifact, "audit_rate": 0.0} | values))


@contextlib.contextmanager
def serving(settings: Settings, loader: Any = None) -> Iterator[TestClient]:
    """A client of a service that has finished loading; `client.app` is the app."""
    figures = Telemetry()
    app = create_app(settings, make_engine(settings, figures, loader or FakeLoader()))
    with TestClient(app, raise_server_exceptions=False) as client:
        wait_ready(client)
        yield client


@contextlib.contextmanager
def on_a_socket(settings: Settings, loader: Any = None) -> Iterator[str]:
    """The address of a real server on a free port of this machine."""
    app = create_app(settings, make_engine(settings, Telemetry(), loader or FakeLoader()))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started or app.state.engine._model is None:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
    assert not thread.is_alive()


def wait_ready(client: Any, seconds: float = 240.0) -> None:
    until = time.monotonic() + seconds  # the first start on a machine compiles every kernel
    while client.get("/readyz").status_code != 200:
        assert time.monotonic() < until, client.get("/readyz").text
        time.sleep(0.02)


def embed(client: Any, text: Any = "hello there", **fields: Any) -> Any:
    return client.post("/v1/embeddings", json={"input": text} | fields)


def error_of(response: Any, status: int, code: str) -> dict[str, Any]:
    """The error of a response, after checking that it has the one shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "code", "param", "request_id"}
    assert error["code"] == code, error
    assert error["request_id"] == response.headers["x-request-id"]
    assert response.headers["content-type"] == "application/json"
    assert error["message"]
    assert error["type"]
    return error
