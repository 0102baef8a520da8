"""/openapi.json: routes declare what they take and give, and this puts the document together.

Error answers are components, one per status, because all have one shape. The statuses 404 and 405 of paths and methods
that do not exist belong to no operation; 405 is a component all the same.

    python -m app.openapi docs/openapi.json
"""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

import sparsefinder
from app.answers import ErrorAnswer
from app.schemas import Strict

TITLE = "Sparsefinder"
ABOUT = (
    "Embeddings, and what else the served model can do, with attention over predicted pairs. Every answer carries"
    " `x-request-id`, which may be the client's own. From status 400 on every answer has the shape of `ErrorAnswer`;"
    " a path that does not exist gives 404, a method that a path does not have 405 with `allow`. Every path with GET"
    " answers HEAD. Keys are needed only where the service is configured with them."
)
REF = "#/components/schemas/{model}"


@dataclass(frozen=True)
class Header:
    """A header of an answer. kind: as JSON schema names types. required: whether it is always there."""

    description: str
    kind: str = "string"
    required: bool = True


# What an operation can answer beside 200, by what it does; each status is produced by a test.
ANY = (413,)
KEYED = (401,)
ADMIN = (401, 403)
LOADED = (503,)
BODY = (400, 415, 422)
RUNS = (404, 429, 500, 503, 504)

MEANING = {
    400: "The body is no JSON object.",
    401: "The key is missing or not known.",
    403: "No admin key is configured, and others than this machine could call.",
    404: "The model or folder that is named does not exist.",
    405: "The path has other methods.",
    409: "It conflicts with what is loaded or being loaded.",
    413: "The body is longer than max_body_bytes.",
    415: "The body is not application/json in UTF-8.",
    422: "A field is wrong, or the model cannot do this.",
    429: "The queue is full; come again after `retry-after` seconds.",
    500: "The model failed or gave NaN for this request.",
    503: "No model is ready, or the process stops.",
    504: "No answer within request_seconds; the request was dropped.",
}
WAIT = Header("Seconds to wait before the next try.", "integer")
OF_STATUS = {
    401: {"www-authenticate": Header("How to authenticate.")},
    405: {"allow": Header("Methods that the path has.")},
    409: {"retry-after": replace(WAIT, required=False)},  # only while another reload runs
    429: {"retry-after": WAIT},
    503: {"retry-after": WAIT},
    504: {"retry-after": WAIT},
}
REQUEST_ID = {"x-request-id": Header("The client's own id where it is harmless, else a new one.")}
ATTENTION = {
    "x-sparsefinder-attention": Header("Mode that computed the answer."),
    "x-sparsefinder-ran": Header("What computed its layers: original, dense, sparse, exact, with commas between."),
    "x-sparsefinder-artifact": Header("Version of the artifact."),
    "x-sparsefinder-computed-density": Header("Computed / legal pairs.", "number"),
    "x-sparsefinder-requested-density": Header("Of the working point that was asked for.", "number", required=False),
    "x-sparsefinder-tokens": Header("Tokens that were read.", "integer"),
    "x-sparsefinder-queue-ms": Header("From known tokens to the first batch.", "number"),
    "x-sparsefinder-inference-ms": Header("Of the batches that held these inputs.", "number"),
}
ARTIFACT = {"x-sparsefinder-artifact": ATTENTION["x-sparsefinder-artifact"]}
SCHEMES = {
    "apiKey": {"type": "http", "scheme": "bearer", "description": "One of `api_keys` or `admin_keys`."},
    "adminKey": {"type": "http", "scheme": "bearer", "description": "One of `admin_keys`."},
}


def documented(
    answer: type[BaseModel] | None,
    errors: Iterable[int] = (),
    body: type[Strict] | None = None,
    headers: Mapping[str, Header] | None = None,
    example: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Arguments of a route's decorator.

    Args:
        answer: what 200 holds; None where it is no JSON.
        errors: every other status that it gives; 413 is added, for every request may have too long a body.
        body: what it reads.
        headers: of 200, by name.
        example: a body that is understood.
    """
    statuses = {*errors, *ANY}
    extra: dict[str, Any] = {} if body is None else _body(body, example)
    if 401 in statuses:
        # `{}` is "without": a service without keys asks for none.
        extra["security"] = [{"adminKey" if 403 in statuses else "apiKey": []}, {}]
    good: dict[str, Any] = {"headers": _headers(headers or {})}
    if answer is not None:
        good["model"] = answer
    bad = {status: {"description": MEANING[status]} for status in sorted(statuses)}
    return {"responses": {200: good, **bad}, "openapi_extra": extra}


def _body(kind: type[Strict], example: Mapping[str, Any] | None) -> dict[str, Any]:
    media: dict[str, Any] = {"schema": kind.model_json_schema(ref_template=REF)}
    if example is not None:
        media["example"] = dict(example)
    return {"requestBody": {"required": True, "content": {"application/json": media}}}


def describe(app: FastAPI) -> dict[str, Any]:
    """The document of an app's routes; nothing of its settings or of this machine is in it."""
    content = get_openapi(title=TITLE, version=sparsefinder.__version__, description=ABOUT, routes=app.routes)
    components = content.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    error = ErrorAnswer.model_json_schema(ref_template=REF)
    schemas.update(error.pop("$defs", {}) | {"ErrorAnswer": error})
    used = {405}
    for operation in (one for path in content["paths"].values() for one in path.values()):
        for media in operation.get("requestBody", {}).get("content", {}).values():
            schemas.update(media["schema"].pop("$defs", {}))
        for status in map(int, operation["responses"]):
            if status >= 400:
                operation["responses"][str(status)] = {"$ref": f"#/components/responses/{_name(status)}"}
                used.add(status)
            else:
                operation["responses"][str(status)].setdefault("headers", {}).update(_headers(REQUEST_ID))
    components["responses"] = {_name(status): _error(status) for status in sorted(used)}
    components["securitySchemes"] = SCHEMES
    components["schemas"] = dict(sorted(schemas.items()))
    return content


def _name(status: int) -> str:
    return HTTPStatus(status).phrase.replace(" ", "")


def _error(status: int) -> dict[str, Any]:
    headers = _headers(REQUEST_ID | OF_STATUS.get(status, {}))
    schema = {"$ref": REF.format(model="ErrorAnswer")}
    return {"description": MEANING[status], "headers": headers, "content": {"application/json": {"schema": schema}}}


def _headers(headers: Mapping[str, Header]) -> dict[str, Any]:
    return {
        name: {"description": one.description, "required": one.required, "schema": {"type": one.kind}}
        for name, one in headers.items()
    }


def text_of(app: FastAPI) -> str:
    """The document as it is served and committed."""
    return json.dumps(describe(app), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write the document of all routes into the file that is named."""
    from app import routes  # here, for the routes import this module

    app = FastAPI()
    routes.install(app)
    Path(sys.argv[1]).write_text(text_of(app))


if __name__ == "__main__":
    main()
