"""Puts the tables of `benchmarks.attention` and `benchmarks.end_to_end` between their marks in docs/results.md.

    python -m benchmarks.speed_page

No figure is written by hand: this reads docs/figures/attention.json and end_to_end.json, those of the two that exist.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.attention_page import attention_section
from benchmarks.end_to_end_page import end_to_end_section

DOCS = Path(__file__).resolve().parent.parent / "docs"
BEGIN, END = "<!-- speed:begin -->", "<!-- speed:end -->"
MARKS = re.compile(rf"{BEGIN}.*?{END}", re.DOTALL)
SECTIONS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "attention": attention_section,
    "end_to_end": end_to_end_section,
}


def speed(figures: Path) -> str:
    """The marks, and between them the section of every file that is there."""
    found = []
    for name, section in SECTIONS.items():
        path = figures / f"{name}.json"
        if path.is_file():
            found.append(section(json.loads(path.read_text(encoding="utf-8"))))
    return "\n".join([BEGIN, "", *found, END])


def main(docs: Path = DOCS) -> None:
    page = docs / "results.md"
    made = speed(docs / "figures")
    text, count = MARKS.subn(lambda match: made, page.read_text(encoding="utf-8"))
    if not count:
        sys.exit(f"{page.name}: expected the marks speed:begin and speed:end")
    page.write_text(text, encoding="utf-8")
    print(f"Written: the speed tables of {page}")


if __name__ == "__main__":
    main()
