"""What answers look like, for /openapi.json only: routes build plain values, and tests hold them against these."""

from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, Field, create_model

from app.drift import Drift
from app.schemas import Mode
from app.servable import Description
from app.settings import Settings

ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "conflict_error",
    "server_error",
]


class ErrorPart(BaseModel):
    """What went wrong, in words and for programs."""

    message: str = Field(description="What was expected, and what came.")
    type: ErrorType
    code: str = Field(description="For programs; it stays the same where the message is reworded.")
    param: str | None = Field(description="The field that is wrong, with the index of the item in a list.")
    request_id: str = Field(description="As in the header x-request-id.")


class ErrorAnswer(BaseModel):
    """The one shape of every answer from status 400 on."""

    error: ErrorPart


class Alive(BaseModel):
    """The process answers."""

    status: Literal["ok"]


class Ready(Alive):
    """What serves."""

    artifact: str
    version: str


class ModelPart(BaseModel):
    """What a model of ours can do."""

    artifact: str = Field(description="Version of the artifact.")
    attention: list[Mode]


class ModelEntry(BaseModel):
    """One model, as OpenAI lists it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    sparsefinder: ModelPart


class ModelsAnswer(BaseModel):
    """The one model that this process serves."""

    object: Literal["list"]
    data: list[ModelEntry]


class Figures(BaseModel):
    """Figures of audited rows; null where there was nothing to divide by."""

    rows: int
    gold_pairs: int
    sparsity: float | None
    recall: float | None
    recall_interval: list[float] | None = Field(description="95 %, bootstrap over requests.")
    mass: float | None = Field(description="Probability on kept pairs.")
    exact_rows: float | None


class HeadFigures(Figures):
    """The same of one head."""

    head: int


class LayerFigures(Figures):
    """The same of one layer, and its heads."""

    layer: int
    heads: list[HeadFigures]


class LivePoint(BaseModel):
    """What was audited at a working point other than the served one."""

    density: float
    requests: int
    recall: float | None
    recall_interval: list[float] | None


class AuditCost(BaseModel):
    """What audits have cost since the start."""

    seconds: float
    share_of_inference: float | None
    longest_delay_ms: float = Field(description="Of one batch.")
    bound_ms: float
    bound: str
    accepted: int
    finished: int
    failed: int
    dropped: int
    waiting: int
    waiting_bytes: int


class LivePart(BaseModel):
    """What was audited of the requests that this version answered."""

    requests: int
    overall: Figures | None
    layers: list[LayerFigures]
    points: list[LivePoint]
    cost: AuditCost
    drift: Drift | None
    drift_reason: str | None = Field(description="Why nothing was compared.")
    estimator: str
    audit_rate: float
    rows_per_request: int
    window_requests: int


class PointFigures(BaseModel):
    """A working point of the artifact, by its calibration."""

    density: float
    sparsity: float
    recall: float
    mass: float
    exact_rows: float
    served: bool = Field(description="Whether it is served where no density is asked for.")


class SparsityAnswer(BaseModel):
    """Calibration on held-out text, and live figures of real requests."""

    object: Literal["sparsity"]
    artifact: str
    artifact_version: str
    set: str
    points: list[PointFigures] = Field(description="Working points that requests may ask for, densities rising.")
    calibration: dict[str, Any] | None = Field(description="As the artifact's card has it; null without.")
    live: LivePart


def _shown(name: str) -> Any:
    field = Settings.model_fields[name]
    kind = int if name in ("api_keys", "admin_keys") else field.annotation
    return (kind, Field(description=field.description))


SettingsPart = create_model(
    "SettingsPart",
    __doc__="Every setting; of keys only their number.",
    **{name: _shown(name) for name in Settings.model_fields},
)


# Working points have their place in /v1/sparsity.
_DESCRIBED: dict[str, Any] = {name: (kind, ...) for name, kind in get_type_hints(Description).items()}
_DESCRIBED.pop("points")
DescriptionPart = create_model("DescriptionPart", __doc__="Names, sizes and versions of the artifact.", **_DESCRIBED)


class InfoAnswer(BaseModel):
    """Settings without keys, versions, the artifact, the device and its threads."""

    model: str
    attention_modes: list[Mode]
    artifact: DescriptionPart  # type: ignore[valid-type]
    device: str
    threads: int
    versions: dict[str, str | None]
    settings: SettingsPart  # type: ignore[valid-type]
    uptime_seconds: float


class ArtifactPart(BaseModel):
    """An artifact, in short."""

    artifact: str
    version: str
    predictor: str


class ReloadAnswer(BaseModel):
    """What served before, and what serves now."""

    old: ArtifactPart
    new: ArtifactPart
    seconds: float
