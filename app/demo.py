"""The main job once, on real text: start the service, embed two texts in three attention modes, show what came out.

Neither text is in the training text of the shipped artifact: it holds docstrings of installed libraries and help topics
of CPython, but none of the standard library's docstrings, and `for` is one of the topics that were kept out.
"""

import contextlib
import gettext
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from app.schemas import Mode

SHOWN: tuple[Mode, ...] = ("original", "dense", "sparse")  # every artifact has these
START_SECONDS = 240.0  # the first start on a machine compiles the kernels
STOP_SECONDS = 20.0
KEPT_SETTINGS = {f"SPARSEFINDER_{name}" for name in ("ARTIFACT", "TEACHER", "DEVICE", "THREADS", "CROSSOVER")}
TEXTS = {"the help topic `for`": topics["for"], "the docstring of `gettext`": gettext.__doc__ or ""}


class DemoError(Exception):
    """What went wrong, for a person."""


@dataclass(frozen=True)
class Answered:
    """One answer of the service: its body, and how long the client waited for it."""

    body: dict[str, Any]
    ms: float

    @property
    def vector(self) -> list[float]:
        """The embedding."""
        return [float(number) for number in self.body["data"][0]["embedding"]]


def call(address: str, path: str, body: dict[str, Any] | None = None) -> Answered:
    """One request; an error answer raises with the service's own words."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"content-type": "application/json"})  # noqa: S310
    started = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=120) as response:  # noqa: S310  (our own address)
            return Answered(json.load(response), (time.perf_counter() - started) * 1000)
    except urllib.error.HTTPError as error:
        raise DemoError(f"{path} answered {error.code}: {error.read().decode(errors='replace')[:500]}") from None


def _leave(number: int, frame: Any) -> NoReturn:
    sys.exit(128 + number)


SERVE = (sys.executable, "-m", "app.cli", "--port", "0", "--audit-rate", "1", "--audit-rows", "64")


@contextlib.contextmanager
def service(command: Sequence[str] = SERVE) -> Iterator[str]:
    """The address of a running service; whatever happens inside, no process is left behind."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARSEFINDER_")}
    environment |= {name: os.environ[name] for name in KEPT_SETTINGS & os.environ.keys()}
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    with tempfile.TemporaryDirectory(prefix="sparsefinder-demo-") as folder:
        log = Path(folder) / "service.log"
        with log.open("wb") as sink:
            # A session of its own: Ctrl-C reaches this program only, which then stops the service in order.
            process = subprocess.Popen(command, stdout=sink, stderr=sink, env=environment, start_new_session=True)
        try:
            yield _wait(process, log)
        finally:
            _stop(process)
            for number, handler in before.items():
                signal.signal(number, handler)


def _wait(process: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + START_SECONDS
    address = None
    while time.monotonic() < until and process.poll() is None:
        events = [
            json.loads(line) for line in log.read_text().splitlines() if line.startswith("{") and line.endswith("}")
        ]
        listening = next((event for event in events if event["event"] == "listening"), None)
        address = f"http://127.0.0.1:{listening['port']}" if listening else None
        if address and any(event["event"] == "ready" for event in events):
            return address
        time.sleep(0.1)
    reason = f"it ended with code {process.returncode}" if process.poll() is not None else "it was not ready in time"
    raise DemoError(f"the service did not start: {reason}. Its last words:\n{log.read_text()[-1500:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the service; a second signal while waiting ends it at once."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Cosine of the angle between two vectors."""
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def ask(address: str) -> dict[str, dict[str, Answered]]:
    """Every text in every mode that is shown."""
    return {
        name: {
            mode: call(address, "/v1/embeddings", {"input": text, "attention": mode, "truncate": True})
            for mode in SHOWN
        }
        for name, text in TEXTS.items()
    }


def answers_table(name: str, answers: dict[str, Answered]) -> Table:
    """One text in the three modes."""
    tokens = answers["sparse"].body["sparsefinder"]["tokens"][0]
    table = Table(title=f"{name}: {tokens} tokens", title_justify="left")
    for heading in (
        "attention",
        "embedding",
        "latency",
        "model",
        "computed density",
        "cos to dense",
        "cos to original",
    ):
        table.add_column(heading, justify="left" if heading in ("attention", "embedding") else "right")
    for mode in reversed(SHOWN):
        answer, ours = answers[mode], answers[mode].body["sparsefinder"]
        cosines = [f"{cosine(answer.vector, answers[other].vector):.4f}" for other in ("dense", "original")]
        first = " ".join(f"{number:+.4f}" for number in answer.vector[:4]) + " …"
        times = [f"{answer.ms:.0f} ms", f"{ours['inference_ms']:.0f} ms"]
        table.add_row(mode, first, *times, f"{ours['computed_density']:.1%}", *cosines)
    return table


def layers_table(answers: dict[str, dict[str, Answered]], sparsity: dict[str, Any]) -> Table:
    """Per layer: what was computed, and how much of the true graph was kept, on held-out text and on these two."""
    calibration, live = sparsity["calibration"], sparsity["live"]
    table = Table(title="per layer, of the plan (mean over heads)", title_justify="left")
    headings = ["layer", *(f"computed: {name.split()[-1]}" for name in answers)]
    headings += ["sparsity, calibration", "sparsity, live", "recall, calibration", "recall, live"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for index, row in enumerate(live["layers"]):
        known = calibration["layers"][index] if calibration else {}
        computed = [
            modes["sparse"].body["sparsefinder"]["layers"][index]["computed_density"] for modes in answers.values()
        ]
        figures = [known.get("sparsity"), row["sparsity"], known.get("recall"), row["recall"]]
        table.add_row(str(index), *(f"{value:.1%}" if value is not None else "–" for value in [*computed, *figures]))
    return table


def audited(address: str, requests: int) -> dict[str, Any]:
    """/v1/sparsity once the audits, which run after the answers, are through."""
    until = time.monotonic() + 30
    while True:
        body = call(address, "/v1/sparsity").body
        if body["live"]["requests"] >= requests:
            return body
        if time.monotonic() > until:
            raise DemoError(f"expected {requests} audited requests, got {body['live']['requests']}")
        time.sleep(0.1)


def show(console: Console) -> None:
    """Run the demo."""
    console.print("Starting the service (the first start on a machine compiles the kernels) …")
    with service() as address:
        info = call(address, "/info").body
        about = info["artifact"]
        console.print(
            f"[bold]{about['artifact']}[/bold] {about['version']}: {about['teacher']} as a {about['alpha']}-entmax"
            f" model, predictor {about['predictor']}, on {info['device']} ({info['threads']} threads), at {address}\n"
        )
        ask(address)  # what is compiled or loaded at the first use of a mode is not the time of an answer
        answers = ask(address)
        for name, modes in answers.items():
            console.print(answers_table(name, modes), "")
        sparsity = audited(address, 2 * len(TEXTS))
        console.print(layers_table(answers, sparsity))
        overall = sparsity["live"]["overall"]
        console.print(
            f"live: {overall['rows']} audited rows of {sparsity['live']['requests']} requests,"
            f" recall {overall['recall']:.1%}, attention mass {overall['mass']:.1%},"
            f" exact rows {overall['exact_rows']:.1%}\n"
        )
    console.print(
        "[bold]original[/bold] is the untouched softmax model, [bold]dense[/bold] its entmax twin over all pairs,"
        " [bold]sparse[/bold] the predicted pairs only.\n"
        "  keep the service:  [bold]make serve[/bold]   (http://127.0.0.1:8000, figures at /metrics and /v1/sparsity)\n"
        "  retrain:           [bold]make train[/bold]   (TEXT=file for your own text; then POST /admin/reload)"
    )


def main() -> int:
    """Entry point; the exit code."""
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    try:
        show(console)
    except DemoError as error:
        Console(stderr=True).print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True, markup=True)
        return 1
    except KeyboardInterrupt:
        console.print("stopped; the service has ended")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
