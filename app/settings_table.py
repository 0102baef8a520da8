"""The table of all settings in docs/operations.md, made from the settings themselves.

python -m app.settings_table docs/operations.md
"""

import re
import sys
from pathlib import Path

from app.settings import Settings

BEGIN, END = "<!-- settings:begin -->\n", "<!-- settings:end -->"


def table() -> str:
    """One row per setting: flag, environment variable, default, meaning."""
    rows = ["| flag | environment variable | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        default = "" if field.default in (None, ()) else f"`{field.default}`"
        flag = "--" + name.replace("_", "-")
        rows.append(f"| `{flag}` | `SPARSEFINDER_{name.upper()}` | {default} | {field.description} |")
    return "\n".join(rows) + "\n"


def written(page: str) -> str:
    """The page with the table of today between its marks."""
    return re.sub(f"{BEGIN}.*?{END}", lambda _: BEGIN + table() + END, page, flags=re.DOTALL)


def main() -> None:
    """Renew the table in the page that is named."""
    path = Path(sys.argv[1])
    path.write_text(written(path.read_text()))


if __name__ == "__main__":
    main()
