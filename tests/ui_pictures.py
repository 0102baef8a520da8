"""The pictures and the example of docs/graphs.md, from a service with the shipped artifact in a real Chromium.

    PYTHONPATH=. python tests/ui_pictures.py docs/figures/ui.png

Beside the picture of the documentation it leaves one in dark colours and one of a narrow screen in a new folder.
"""

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from browser import chromium, ready

PAGE = Path(__file__).parents[1] / "docs" / "graphs.md"
EXAMPLE = {"input": "The bank of the river.", "layers": [3], "heads": [5], "gold": True}


@contextlib.contextmanager
def shipped_service() -> Iterator[str]:
    """The address of a service with the shipped artifact, in a process of its own."""
    command = [sys.executable, "-m", "app.cli", "--port", "0", "--audit-rate", "1", "--crossover", "default"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = ""
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "listening":
                address = f"http://127.0.0.1:{event['port']}"
            if event["event"] == "ready":
                break
        yield address
    finally:
        process.terminate()
        process.wait(30)


def pairs(content: dict[str, Any]) -> list[str]:
    """One line for each name; of long lists only the beginning."""
    text = [f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in content.items()]
    return [re.sub(r"((?:[\d.]+, ){14})[\d., ]+\]", r"\1…]", line) for line in text]


def example(address: str) -> str:
    """A request and its answer, as the documentation shows them."""
    body = json.dumps(EXAMPLE)
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{address}/v1/attention", body.encode(), headers)) as answer:
        content: Any = json.load(answer)
    content["sparsefinder"]["layers"] = "…"
    layer = content.pop("layers")[0]
    head = layer.pop("heads")[0]
    lines = [
        "{",
        *(f"  {line}," for line in pairs(content)),
        '  "layers": [{',
        *(f"    {line}," for line in pairs(layer)),
    ]
    lines += ['    "heads": [{', *(f"      {line}," for line in pairs(head)), "    }]", "  }]", "}"]
    short = "\n".join(lines).replace(",\n    }]", "\n    }]")
    command = f"curl -s http://127.0.0.1:8000/v1/attention -H 'Content-Type: application/json' \\\n    -d '{body}'"
    return f"```bash\n{command}\n```\n\n```json\n{short}\n```"


def main(path: Path) -> None:
    """Take the pictures and write the example."""
    scratch = Path(tempfile.mkdtemp(prefix="ui-"))
    with shipped_service() as address, chromium(scratch) as page:
        text = re.sub(r"(?s)(<!-- example:begin -->\n).*(<!-- example:end -->)", r"\1@\n\2", PAGE.read_text())
        PAGE.write_text(text.replace("@", example(address), 1))
        page.size(1280, 1640)
        page.open(f"{address}/ui")
        ready(page)
        page.choose("#head", "10")
        page.on("#tokens button:nth-child(23)", "e.click();")
        time.sleep(5)  # three looks at the figures
        page.screenshot(path, whole=False)
        for name, width, dark in (("wide", 1280, False), ("dark", 1280, True), ("narrow", 360, False)):
            page.size(width, 900, dark=dark)
            time.sleep(0.6)
            page.screenshot(scratch / f"{name}.png")
    sys.stdout.write(f"{path}, and {scratch}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
