"""The files of a sweep: one for each finished family, the configuration they belong to, and the one JSON of all."""

import json
from pathlib import Path
from typing import Any

from sparsefinder.errors import ConfigError, DataError
from sparsefinder.whole_files import write_text

SWEEP = "sweep.json"


def write_json(path: Path, value: Any) -> None:
    """Write whole or not at all. DataError where the folder cannot be written."""
    write_text(path, _text(value))


def _text(value: Any) -> str:
    """JSON with one line for every family's point, so that two sweeps can be compared by eye."""
    if isinstance(value, dict):
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {_lines(part)}" for key, part in value.items()]
        return "{\n" + ",\n".join(parts) + "\n}\n"
    return _lines(value)


def _lines(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(_flat(part) for part in value) + "\n]"
    return _flat(value)


def _flat(value: Any) -> str:
    if isinstance(value, dict) and "points" in value:
        rest = {key: part for key, part in value.items() if key != "points"}
        head = json.dumps(rest, ensure_ascii=False, allow_nan=False)
        return f'{head[:-1]}, "points": {_lines(value["points"])}}}'
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def read_json(path: Path) -> Any:
    """DataError where it is missing or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: expected a file to read, got {error.strerror or error}") from None
    except ValueError:
        raise DataError(f"{path}: expected JSON") from None


def read_sweep(folder: Path) -> dict[str, Any]:
    """What `sweep` wrote. DataError where it has not finished."""
    path = folder / SWEEP
    if not path.is_file():
        raise DataError(f"{folder}: expected {SWEEP} (run `sparsefinder-train sweep` first)")
    result = read_json(path)
    if not isinstance(result, dict) or "families" not in result:
        raise DataError(f"{path}: expected the figures of a sweep")
    return result


def claim(folder: Path, config: dict[str, Any]) -> None:
    """Note the configuration in a new folder, or make sure that the folder's is the same.

    Raises:
        ConfigError: the folder holds the sweep of another configuration.
    """
    path = folder / "config.json"
    wanted = json.loads(json.dumps(config))
    if not path.exists():
        write_json(path, wanted)
        return
    known = read_json(path)
    known = known if isinstance(known, dict) else {}
    different = sorted(name for name in {*known, *wanted} if known.get(name) != wanted.get(name))
    if different:
        raise ConfigError(
            f"{folder}: holds the sweep of another configuration ({', '.join(different)} differ); delete the folder or "
            "choose another --out"
        )
