"""docs/operations.md says what there is, and every setting is a flag, an environment variable and a field of /info."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from app_fakes import make_settings, serving
from typer.testing import CliRunner

from app import cli
from app.settings import Settings, load_settings
from app.settings_table import main, table, written

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "operations.md"
KEYS = ("api_keys", "admin_keys")
# Values other than the default, where 7 or 0.75 would be none.
OTHER = {
    "host": "127.0.0.2",
    "teacher": "smollm2",
    "served_name": "name",
    "device": "cpu",
    "crossover": "default",
    "workers": "1",
    "max_body_bytes": "2000",
    "api_keys": "a, b",
    "admin_keys": "c",
    "cors_origins": "https://a.example, http://b.example:81",
    "otlp_endpoint": "http://127.0.0.1:9/v1/traces",
    "log_level": "debug",
    "artifacts_root": "/",  # must exist
}


# Events and fields of log lines whose names begin like those of settings.
NO_SETTINGS = {"audit_failed", "drift_check_failed", "request_id", "admin_open"}


def sample(name: str) -> str:
    kinds: dict[Any, str] = {int: "7", float: "0.75", Path | None: "some/folder"}
    return OTHER.get(name) or kinds[Settings.model_fields[name].annotation]


def from_flags(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Settings:
    """The settings that the command line would serve with."""
    seen: list[Settings] = []
    monkeypatch.setattr(cli, "run", lambda settings: seen.append(settings) or 0)
    command = typer.Typer()
    command.command()(cli.serve)
    done = CliRunner().invoke(command, list(arguments))
    assert done.exit_code == 0, done.output
    return seen[0]


@pytest.mark.parametrize("name", Settings.model_fields)
def test_a_setting_is_a_flag_and_an_environment_variable(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    flag, variable, text = "--" + name.replace("_", "-"), f"SPARSEFINDER_{name.upper()}", sample(name)
    default = getattr(load_settings(), name)
    by_flag = getattr(from_flags(monkeypatch, flag, text), name)
    monkeypatch.setenv(variable, text)
    assert getattr(load_settings(), name) == by_flag
    assert (by_flag != default) == (name != "workers")
    monkeypatch.setenv(variable, "")
    assert getattr(load_settings(), name) == default


def test_a_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEFINDER_MAX_ITEMS", "5")
    assert from_flags(monkeypatch, "--max-items", "6").max_items == 6
    assert from_flags(monkeypatch).max_items == 5


def test_info_shows_every_setting_as_it_is(tmp_path: Path) -> None:
    kept = {"artifact", "artifacts_root", "teacher", "otlp_endpoint", "device", "crossover", "request_seconds"}
    values = {name: sample(name) for name in Settings.model_fields if name not in kept}
    settings = make_settings(tmp_path, **values)
    with serving(settings) as client:
        shown = client.get("/info", headers={"authorization": "Bearer a"}).json()["settings"]
    assert list(shown) == [name for name in shown if name in Settings.model_fields]
    assert set(shown) == set(Settings.model_fields)
    for name, value in settings.model_dump(mode="json").items():
        assert shown[name] == (len(value) if name in KEYS else value), name


def test_the_table_is_that_of_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE.read_text()
    assert table() in page, "renew it: python -m app.settings_table docs/operations.md"
    assert written(page) == page
    copy = tmp_path / "page.md"
    copy.write_text(re.sub(r"\| `--port`.*\n", "", page))
    monkeypatch.setattr("sys.argv", ["app.settings_table", str(copy)])
    main()
    assert copy.read_text() == page


def test_every_alert_is_explained() -> None:
    groups = yaml.safe_load((REPOSITORY / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    assert set(re.findall(r"`(Sparsefinder[A-Z]\w+)`", PAGE.read_text())) == alerts


def test_every_event_and_every_field_of_a_request_is_explained() -> None:
    source = "".join(path.read_text() for path in (REPOSITORY / "app").rglob("*.py"))
    events = set(re.findall(r"""\blog\(\s*"(\w+)\"""", source))
    assert {"request", "ready", "listening"} <= events
    page = PAGE.read_text()
    logs = page[page.index("## Logs") : page.index("## Sizing")]
    named = set(re.findall(r"`(\w+)`", logs))
    assert events - named == set()
    from app.telemetry import Facts

    assert set(Facts.__dataclass_fields__) - named == set()


def test_every_path_and_setting_that_is_named_exists() -> None:
    page = PAGE.read_text()
    prose = page[: page.index("<!-- settings:begin -->")] + page[page.index("<!-- settings:end -->") :]
    for path in re.findall(r"`(deploy/[\w./-]+)`", prose):
        assert (REPOSITORY / path).exists(), path
    for link in re.findall(r"\]\(([\w./]+)\)", prose):
        assert (PAGE.parent / link).exists(), link
    for name in re.findall(r"`((?:max|audit|drift|request|shutdown|admin|api|cors|otlp)_\w+)[`=]", prose):
        assert name in Settings.model_fields or name in NO_SETTINGS, name
