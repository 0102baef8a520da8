"""deploy/: what an operator copies is valid, and names only metrics, settings and files that exist."""

import configparser
import json
import re
import shutil
import subprocess
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from app_fakes import LAYERS, embed, make_settings, serving, write_artifact
from starlette.testclient import TestClient

from app.cli import USAGE_ERROR
from app.settings import Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "sparsefinder.json"
METRIC = re.compile(r"\b(?:sparsefinder|process)_[a-z_]+\b(?!\")")


def tool(name: str, reason: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; it comes with {reason}")
    return found


def promtool(*arguments: str | Path, **options: Any) -> "subprocess.CompletedProcess[str]":
    program = tool("promtool", "Debian's package prometheus")
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, **options)


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return content


def expressions() -> list[str]:
    """Every query of the dashboard, with Grafana's variables filled in."""
    dashboard = json.loads(DASHBOARD.read_text())
    found = [target["expr"] for panel in panels() for target in panel.get("targets", [])]
    found += [note["expr"] for note in dashboard["annotations"]["list"]]
    return [one.replace("$instance", ".*").replace("$__rate_interval", "5m") for one in found]


def test_the_alert_rules_pass_promtool() -> None:
    for arguments in (("check", "rules", ALERTS), ("test", "rules", ALERTS.with_name("alerts_test.yml"))):
        done = promtool(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
    done = promtool("check", "config", ALERTS.with_name("prometheus.yml"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    cases = yaml.safe_load(ALERTS.with_name("alerts_test.yml").read_text())["tests"]
    fired = {case["alertname"] for one in cases for case in one["alert_rule_test"] if case["exp_alerts"]}
    assert fired == {rule["alert"] for rule in rules()}


def test_the_test_of_the_rules_can_fail(tmp_path: Path) -> None:
    shutil.copytree(DEPLOY / "prometheus", tmp_path, dirs_exist_ok=True)
    broken = ALERTS.read_text().replace("== 0", "== 7")
    (tmp_path / "alerts.yml").write_text(broken)
    assert promtool("test", "rules", tmp_path / "alerts_test.yml").returncode != 0


def test_the_queries_of_the_dashboard_parse(tmp_path: Path) -> None:
    recorded = [{"record": f"query:{n}", "expr": expression} for n, expression in enumerate(expressions())]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    done = promtool("check", "rules", tmp_path / "rules.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(recorded)} rules found" in done.stdout


def test_the_dashboard_is_laid_out() -> None:
    assert len({panel["id"] for panel in panels()}) == len(panels())
    for one, two in combinations([panel["gridPos"] for panel in panels()], 2):
        beside = one["x"] + one["w"] <= two["x"] or two["x"] + two["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= two["y"] or two["y"] + two["h"] <= one["y"], (one, two)
    drawn = [panel for panel in panels() if panel["type"] != "row"]
    assert all(panel["title"] and panel["targets"] for panel in drawn)


def exported(root: Path) -> set[str]:
    """The names of all samples of a service that has answered a few requests of every kind."""
    settings = make_settings(root, audit_rate=1.0, drift_requests=2)
    loop = {"overall": {"recall": 0.9}, "layers": [{"recall": 0.9}] * LAYERS}  # what live recall is compared with
    write_artifact(root / "first", version="v1", loop=loop)
    with serving(settings) as client:
        for mode in ("original", "dense", "sparse", "exact", "auto"):
            assert embed(client, "a few words", attention=mode).status_code == 200
        assert embed(client, "").status_code == 422
        assert client.post("/admin/reload", json={}).status_code == 200
        for _ in range(4):
            assert embed(client, "an audited text").status_code == 200
        until = time.monotonic() + 20
        while "sparsefinder_recall_drift " not in client.get("/metrics").text:
            assert time.monotonic() < until
        lines = client.get("/metrics").text.splitlines()
    return {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}


def test_every_metric_that_is_looked_at_is_exported(tmp_path: Path) -> None:
    named = {name for text in [*expressions(), *(rule["expr"] for rule in rules())] for name in METRIC.findall(text)}
    assert len(named) > 30
    assert named - exported(tmp_path) == set()


def test_what_an_alert_waits_for_is_there_before_it_happens(client: TestClient) -> None:
    # Prometheus sees no increase from nothing to one.
    waited = re.findall(r"increase\((sparsefinder_\w+\{\w+=\"\w+\"\})", "".join(rule["expr"] for rule in rules()))
    assert len(waited) == 3
    lines = client.get("/metrics").text.splitlines()
    for series in waited:
        assert f"{series} 0.0" in lines


def test_the_metrics_pass_promtool(tmp_path: Path) -> None:
    with serving(make_settings(tmp_path, audit_rate=1.0)) as client:
        embed(client)
        done = promtool("check", "metrics", input=client.get("/metrics").text)
    problems = [line for line in done.stderr.splitlines() if line.startswith("sparsefinder")]
    assert problems == [], problems


def unit() -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "sparsefinder.service")
    return {section: dict(parser[section]) for section in parser.sections()}


def test_the_unit_passes_systemd(tmp_path: Path) -> None:
    program = tool("systemd-analyze", "systemd")
    text = (DEPLOY / "sparsefinder.service").read_text()
    # The service is not installed where this runs, and a missing program is all that may be missing.
    (tmp_path / "sparsefinder.service").write_text(re.sub(r"(?m)^ExecStart=.*$", "ExecStart=/bin/true", text))
    done = subprocess.run([program, "verify", tmp_path / "sparsefinder.service"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_waits_for_a_stop_and_not_for_a_wrong_setting() -> None:
    service = unit()["Service"]
    assert int(service["TimeoutStopSec"]) > Settings.model_fields["shutdown_seconds"].default
    assert int(service["RestartPreventExitStatus"]) == USAGE_ERROR
    assert service["ExecStart"].endswith("/sparsefinder-serve")


def test_the_compose_file_names_what_exists_and_opens_loopback_only() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    assert set(services) == {"sparsefinder", "prometheus", "grafana"}
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert service["cap_drop"] == ["ALL"]
        for source, _, _ in (volume.partition(":") for volume in service.get("volumes", [])):
            made_by_training = source == "../runs"  # not in a fresh clone
            assert source in compose["volumes"] or (DEPLOY / source).exists() or made_by_training, source
    own = services["sparsefinder"]
    settings = {f"SPARSEFINDER_{name.upper()}" for name in Settings.model_fields}
    assert {name for name in own["environment"] if name.startswith("SPARSEFINDER_")} <= settings
    seconds = int(own["stop_grace_period"].removesuffix("s"))
    assert seconds > Settings.model_fields["shutdown_seconds"].default
    stages = re.findall(r"(?m)^FROM \S+ AS (\S+)$", (DEPLOY / own["build"]["context"] / "Dockerfile").read_text())
    assert own["build"]["target"] in stages
    arguments = re.findall(r"(?m)^ARG ([A-Z_]+)", (DEPLOY / own["build"]["context"] / "Dockerfile").read_text())
    assert set(own["build"]["args"]) <= set(arguments)


def test_prometheus_and_grafana_find_each_other_and_the_service() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    targets = [one for job in config["scrape_configs"] for group in job["static_configs"] for one in group["targets"]]
    assert [target.split(":")[0] for target in targets] == ["sparsefinder"]
    # The rules select by the name of the job.
    assert [job["job_name"] for job in config["scrape_configs"]] == ["sparsefinder"]
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    assert any(port.endswith(":9090") for port in compose["prometheus"]["ports"])
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/sparsefinder.yml").read_text())["providers"][0]
    assert any(f":{provider['options']['path']}/" in volume for volume in compose["grafana"]["volumes"])
