"""schemathesis reads /openapi.json and sends what it allows and what it forbids; it must find nothing."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from app_fakes import FakeLoader, make_settings, wait_ready, write_artifact
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import Status, events, from_schema
from schemathesis.python.asgi import get_client, shutdown_lifespans

from app.main import create_app, make_engine
from app.telemetry import Telemetry

# Refusals of what the schema allows: they depend on what is loaded or configured, which a schema cannot know.
DEPENDS = {
    "artifact_outside_root": "which folders there are",
    "attention_not_supported": "`exact` needs an entmax model on a CPU",
    "batch_too_large": "max_items and the queue",
    "density_not_supported": "whether the artifact has working points, and the mode a plan",
    "density_out_of_range": "the artifact's working points, min_density and max_density",
    "dimensions_not_supported": "the model's width",
    "empty_input": "what the tokenizer leaves of a text",
    "graph_too_large": "max_graph_pairs and the model's size",
    "input_too_long": "the model's positions",
    "invalid_head": "how many there are",
    "invalid_layer": "how many there are",
    "invalid_path": "the file system",
    "invalid_target": "the model's vocabulary",
    "invalid_token": "the model's vocabulary",
    "no_mask_token": "which token is the mask",
    "recall_not_reachable": "the artifact's working points",
    "task_not_supported": "what the model can do",
    "too_short": "what the tokenizer makes of a text",
}
CONFIG = {
    "seed": 6,
    "headers": {"authorization": "Bearer admin"},
    "continue-on-failure": True,
    "generation": {"mode": "all", "max-examples": 50, "deterministic": True, "database": "none", "no-shrink": True},
    "phases": {"stateful": {"enabled": False}},
}


def scenarios(root: Path, causal: bool) -> list[Any]:
    """Everything that the engine tried on a service with keys, called in this process."""
    chosen = make_settings(root, api_keys="key", admin_keys="admin")
    write_artifact(root / "first", version="v1", causal=causal)
    app = create_app(chosen, make_engine(chosen, Telemetry(), FakeLoader()))
    try:
        with get_client(app) as client:
            wait_ready(client)
        schema = schemathesis.openapi.from_asgi("/openapi.json", app, config=SchemathesisConfig.from_dict(CONFIG))
        happened = list(from_schema(schema.include(path="/v1/score") if causal else schema).execute())
    finally:
        shutdown_lifespans()
    errors = [event.value for event in happened if isinstance(event, events.NonFatalError)]
    errors += [event.exception for event in happened if isinstance(event, events.FatalError)]
    assert errors == []
    return [event for event in happened if isinstance(event, events.ScenarioFinished)]


def code_of(response: Any) -> str | None:
    return response.json()["error"]["code"] if response is not None and response.status_code >= 400 else None


def excused(code: str | None, body: Any) -> bool:
    """Whether a refusal of what the schema allows is right all the same. JSON schema counts 3.0 as an integer."""
    return code in DEPENDS or (code in ("invalid_input", "invalid_request") and holds_whole_float(body))


def holds_whole_float(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(holds_whole_float, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and value.is_integer()


@pytest.mark.parametrize("causal", [False, True])
def test_nothing_is_found(tmp_path: Path, causal: bool) -> None:
    found, sent = [], Counter[str]()
    for scenario in scenarios(tmp_path, causal):
        recorder = scenario.recorder
        sent[scenario.label] += len(recorder.interactions)
        for case, checks in recorder.checks.items():
            for check in (one for one in checks if one.status == Status.FAILURE):
                code = code_of(recorder.find_response(case_id=case))
                body = recorder.cases[case].value.body
                if check.name != "positive_data_acceptance" or not excused(code, body):
                    failure = check.failure_info.failure
                    found.append(f"{scenario.label} {check.name} {code}: {failure.message} {str(body)[:300]}")
    assert not found, "\n".join(found)
    assert min(sent.values()) > 5, sent
