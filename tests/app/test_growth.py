"""What must not grow with traffic: memory, threads, and compiled kernels."""

import asyncio
import gc
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest
from app_fakes import FakeLoader, embed, make_settings, on_a_socket, serving
from numba.core.registry import CPUDispatcher
from tiny_bert import WORDS, make_artifact, make_teacher
from transformers import BertModel

from app import cli
from app.model import ModelLoader
from app.schemas import MODES
from app.settings import Settings, load_settings
from benchmarks.load_clients import post
from benchmarks.soak_clients import connected

BLOCKS, BLOCK, AT_ONCE = 10, 200, 64  # requests
MIXED = ("original", "dense", "original", "sparse", "original")  # not `exact`, which shares no batches: too slow here
# In the second half, where 6 was seen: 20 KiB that each request leaves behind would be found.
MOST_MIB = 20.0
CALLS = 64
POOL = min(32, (os.cpu_count() or 1) + 4)  # threads that asyncio keeps for work beside the event loop


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Of the real engine on a random two-layer BERT."""
    root = tmp_path_factory.mktemp("growth")
    teacher = make_teacher(root / "teacher")
    # Small batches: memory follows the largest one, and which one that is, is chance.
    few = make_artifact(root / "few", teacher, 20)
    return load_settings(teacher=str(teacher), artifact=few, device="cpu", threads=1, max_batch_tokens=2048)


def loader_of(settings: Settings) -> ModelLoader:
    return ModelLoader(settings.teacher, settings.device, "default")


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def text_of(tokens: int) -> str:
    return " ".join(WORDS[n % len(WORDS)] for n in range(tokens - 2))


def statuses(port: int, bodies: list[bytes]) -> list[int]:
    """One client, one request after the other."""
    with connected(port) as connection:
        return [post(connection, body)[0] for body in bodies]


@pytest.mark.slow
def test_memory_levels_off(settings: Settings) -> None:
    """2000 requests of 3 to 512 tokens; both halves hold blocks of the same modes, so that they can be compared."""
    draw, seen = random.Random(0), []
    with on_a_socket(settings, loader_of(settings)) as address, ThreadPoolExecutor(AT_ONCE) as pool:
        for block in range(BLOCKS):
            texts = [text_of(round(3 * (512 / 3) ** draw.random())) for _ in range(BLOCK)]
            mode = MIXED[block % len(MIXED)]
            bodies = [json.dumps({"input": text, "attention": mode}).encode() for text in texts]
            shares = [bodies[first::AT_ONCE] for first in range(AT_ONCE)]
            ask = partial(statuses, int(address.rpartition(":")[2]))
            assert [status for answered in pool.map(ask, shares) for status in answered] == [200] * BLOCK
            gc.collect()
            seen.append(resident_mib())
    assert seen[-1] - seen[BLOCKS // 2 - 1] < MOST_MIB, seen


def test_threads_stay_bounded(tmp_path: Path) -> None:
    """64 calls that wait at the same time, then 64 more: the server has no thread for each of them."""
    loader = FakeLoader()
    with on_a_socket(make_settings(tmp_path), loader) as address:

        async def calls(client: httpx.AsyncClient) -> int:
            loader.gate.clear()
            running = [asyncio.create_task(client.post("/v1/embeddings", json={"input": "slow"})) for _ in range(CALLS)]
            while f"sparsefinder_requests_running {CALLS + 1}.0" not in (await client.get("/metrics")).text:
                await asyncio.sleep(0.01)
            most = threads()
            loader.gate.set()
            assert {answer.status_code for answer in await asyncio.gather(*running)} == {200}
            return max(most, threads())

        async def twice() -> list[int]:
            limits = httpx.Limits(max_connections=CALLS + 1)
            async with httpx.AsyncClient(base_url=address, timeout=60, limits=limits) as client:
                return [await calls(client) for _ in range(2)]

        before = threads()
        most = asyncio.run(twice())
    assert max(most) - before <= POOL + 2, (before, most)


def test_glibc_agrees_to_one_heap() -> None:
    """In a process of its own, for it cannot be taken back."""
    code = """
import ctypes, threading
from app.memory import KEPT
from sparsefinder.heap import share_one_heap
agreed, held = share_one_heap(KEPT), []
threads = [threading.Thread(target=lambda: held.append(bytearray(10_000))) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
ctypes.CDLL(None).malloc_stats()
print(agreed)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "True"
    assert done.stderr.count("Arena ") == 1, done.stderr


def test_the_service_sets_both_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    """A real process would have to run for minutes to show it (`make soak`)."""
    done: list[str] = []
    for name in ("forget_old_shapes", "share_one_heap", "configure_logging", "_on_stop"):
        monkeypatch.setattr(cli, name, lambda *_, name=name: done.append(name))
    monkeypatch.setitem(sys.modules, "app.main", None)  # where torch would be imported
    with pytest.raises(ImportError):
        cli.run(settings)
    assert {"forget_old_shapes", "share_one_heap"} <= set(done)


def test_shapes_that_were_seen_leave_nothing_behind() -> None:
    """What oneDNN keeps of a GELU is some KiB; a batch of another length is another shape. In a process of its own."""
    code = """
import ctypes, sys
from app.memory import forget_old_shapes
if sys.argv[1] == "forget": forget_old_shapes()
import torch
libc = ctypes.CDLL(None)
class Info(ctypes.Structure):
    _fields_ = [(f"field_{place}", ctypes.c_size_t) for place in range(10)]
libc.mallinfo2.restype = Info  # the field 7, uordblks, is what is in use
def grown(shapes):
    before = libc.mallinfo2().field_7
    for rows in shapes:
        torch.nn.functional.gelu(torch.zeros(1, rows, 1536))
    return libc.mallinfo2().field_7 - before
grown(range(8, 72))
print(grown(range(72, 372)))
"""
    kept, forgotten = (
        int(subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=True).stdout)
        for how in ("keep", "forget")
    )
    if kept < 300 * 1024:
        pytest.skip(f"oneDNN keeps nothing here: {kept} bytes")
    assert forgotten < kept / 10


def compiled() -> int:
    """How many versions of kernels exist in this process, over all functions that numba compiles."""
    return sum(len(one.signatures) for one in gc.get_objects() if type(one) is CPUDispatcher)


def test_no_length_compiles_a_kernel(settings: Settings) -> None:
    with serving(settings, loader_of(settings)) as client:
        for mode in MODES:
            embed(client, text_of(4), attention=mode)
        before = compiled()
        assert before > 5
        for tokens in range(5, 40):
            assert embed(client, text_of(tokens), attention=MODES[tokens % len(MODES)]).status_code == 200
        assert embed(client, [text_of(n) for n in (7, 19, 130)], attention="sparse").status_code == 200
        assert compiled() == before


def models() -> int:
    return sum(type(one) is BertModel for one in gc.get_objects())


def test_a_replaced_model_is_freed(settings: Settings) -> None:
    """Every reload makes a model; the one before it goes with its last answer, not when the collector comes by."""
    with serving(settings, loader_of(settings)) as client:
        gc.collect()
        before = models()
        gc.disable()
        try:
            for _ in range(3):
                assert client.post("/admin/reload", json={}).status_code == 200
                assert embed(client, text_of(9)).status_code == 200
            assert models() == before
        finally:
            gc.enable()


def test_a_new_kernel_would_be_counted() -> None:
    from sparsefinder.numba_kernels import exact_kernel

    twice = exact_kernel(lambda x: 2 * x)
    before = compiled()
    assert (twice(2), twice(2.5)) == (4, 5.0)
    assert compiled() == before + 2
