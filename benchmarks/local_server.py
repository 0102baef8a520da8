"""Servers on this machine that a benchmark starts, asks, watches and stops."""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"
START_SECONDS = 300.0  # the first start on a machine compiles the kernels
STOP_SECONDS = 60.0
PAGE, TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Server:
    """A running server: its process, port and log."""

    process: "subprocess.Popen[bytes]"
    port: int
    log: Path

    def last_words(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-1500:]


@contextlib.contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[Server]:
    """Start `command` with `--port N` (see `wait_ready`), and leave no process behind.

    Settings of our own service in the environment are not handed on: a benchmark measures what its command says.
    """
    port = _free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARSEFINDER_")}
    with log.open("wb") as sink:
        # A session of its own: Ctrl-C reaches the benchmark only, which then stops its servers in order.
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=sink, stderr=sink, env=environment, start_new_session=True
        )
    server = Server(process, port, log)
    try:
        yield server
    finally:
        stop(server)


def stop(server: Server) -> int:
    """Ask for the end, insist where that takes a minute; the exit code."""
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
    try:
        return server.process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.process.kill()
        return server.process.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind((HOST, 0))
        return int(one.getsockname()[1])


def wait_ready(server: Server) -> None:
    """Until /readyz says 200; SystemExit with the server's last words where it does not come to that."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if server.process.poll() is not None:
            raise SystemExit(f"server: ended with code {server.process.returncode}:\n{server.last_words()}")
        if _ready(server.port):
            return
        time.sleep(0.1)
    raise SystemExit(f"server: not ready in {START_SECONDS:.0f} s:\n{server.last_words()}")


def _ready(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=10)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process until now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident_mib(pid: int) -> float:
    """Memory of a process that is in use, MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / 2**20


def thread_count(pid: int) -> int:
    """Threads of a process, those of its libraries included."""
    return len(list(Path(f"/proc/{pid}/task").iterdir()))
