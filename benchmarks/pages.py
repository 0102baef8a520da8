"""Pages of the documentation that a script writes."""

from pathlib import Path


def deliver(page: str, out: Path | None) -> str:
    """Write the page to `out`, or print it where that is None; returns it."""
    if out is None:
        print(page)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
        print(f"wrote {out}")
    return page
