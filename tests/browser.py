"""A real headless Chromium, driven over its DevTools protocol: what the tests of the page need."""

import base64
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

FLAGS = "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --no-proxy-server --hide-scrollbars"
FLAGS += " --disable-background-networking --disable-component-update --disable-sync --disable-extensions"
FLAGS += " --disable-default-apps --mute-audio --remote-debugging-port=0"
SECONDS = 30.0
KEYS = {"ArrowUp": 38, "ArrowDown": 40, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Enter": 13, "Tab": 9}
KEYS |= {"PageUp": 33, "PageDown": 34}


def find_chromium() -> str | None:
    """Debian's Chromium, or another of its names; None where there is none."""
    return next((path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if path), None)


@contextlib.contextmanager
def chromium(downloads: Path) -> Iterator["Page"]:
    """One browser with one page; what it downloads comes into `downloads`."""
    program = find_chromium()
    assert program is not None, "expected Chromium, found none (apt-get install chromium)"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        log = Path(home) / "stderr"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [program, *FLAGS.split(), f"--user-data-dir={home}/data", "about:blank"],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
                env=os.environ | {"HOME": home},
            )
        try:
            with connect(_address(log, process), max_size=None, ping_interval=None) as socket:
                yield Page(socket, downloads)
        finally:
            with contextlib.suppress(ProcessLookupError):  # the group that we started, and nothing else
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def _address(log: Path, process: "subprocess.Popen[bytes]") -> str:
    until = time.monotonic() + SECONDS
    while time.monotonic() < until and process.poll() is None:
        found = re.search(r"DevTools listening on (ws://\S+)", log.read_text(errors="replace"))
        if found:
            return found[1]
        time.sleep(0.05)
    raise AssertionError(f"Chromium did not start: {log.read_text(errors='replace')[-2000:]}")


class Page:
    """One page. requests: addresses that it asked for. complaints: console errors, exceptions, refused content."""

    def __init__(self, socket: ClientConnection, downloads: Path):
        self._socket = socket
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self._loaded = 0
        self._asked: dict[str, str] = {}
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
            self.send(f"{domain}.enable")
        self.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(downloads))

    def send(self, method: str, **params: Any) -> Any:
        """Call one method of the protocol and take in what happens until its answer."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None and not method.startswith("Browser."):
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(SECONDS))
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._event(answer.get("method", ""), answer.get("params", {}))

    def _event(self, method: str, params: Any) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
            self._asked[params["request"]["url"]] = params["requestId"]
        elif method == "Page.loadEventFired":
            self._loaded += 1
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:600])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"])[:600])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def open(self, address: str) -> None:
        """Go there and wait until it has loaded."""
        loaded = self._loaded
        self.send("Page.navigate", url=address)
        until = time.monotonic() + SECONDS
        while self._loaded == loaded:
            assert time.monotonic() < until, f"{address} did not load"
            self.evaluate("1")
            time.sleep(0.02)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, json.dumps(answer["exceptionDetails"])[:800]
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Evaluate until the value is true."""
        until = time.monotonic() + SECONDS
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < until, f"never came true: {expression}; complaints: {self.complaints}"
            time.sleep(0.03)
        return value

    def on(self, selector: str, body: str) -> Any:
        """What the JavaScript `body` returns about the element `e`."""
        return self.evaluate(f"(() => {{ const e = document.querySelector({json.dumps(selector)}); {body} }})()")

    def answer(self, address: str) -> str:
        """The body of the last answer from this address, as it came over the wire."""
        return str(self.send("Network.getResponseBody", requestId=self._asked[address])["body"])

    def text(self, selector: str) -> str:
        """What an element says."""
        return str(self.on(selector, "return e.textContent;"))

    def click(self, selector: str) -> None:
        """Click into the middle of an element, as a mouse does."""
        spot = self.on(
            selector,
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2];",
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=spot[0], y=spot[1], button="left", clickCount=1)

    def fill(self, selector: str, text: str) -> None:
        """Put the cursor into a field, and paste `text` in the place of what it holds."""
        self.on(selector, "e.focus(); e.select();")
        self.send("Input.insertText", text=text)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a select."""
        self.on(selector, f"e.value = {json.dumps(value)}; e.dispatchEvent(new Event('change', {{bubbles: true}}));")

    def key(self, name: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=KEYS[name])

    def size(self, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
        """Size of the window, and whether the reader prefers dark colours."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)

    def screenshot(self, path: Path, *, whole: bool = True) -> bytes:
        """A PNG of the page, or of what the window shows of it."""
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        content = base64.b64decode(data)
        path.write_bytes(content)
        return content


def ready(page: Page) -> None:
    """Wait until a graph is drawn and nothing is being asked."""
    page.wait("!document.querySelector('#graph').hidden && !document.querySelector('#ask').ariaBusy")
    page.wait("!document.querySelector('#ask').hasAttribute('aria-busy')")
