"""Every setting of the service: an environment variable SPARSEFINDER_<NAME> and a flag of `sparsefinder-serve`."""

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.cors import ANY, ORIGIN
from sparsefinder.errors import ConfigError

Keys = Annotated[tuple[SecretStr, ...], NoDecode]
Origins = Annotated[tuple[str, ...], NoDecode]
CrossoverSource = Literal["measure", "default"]
Level = Literal["debug", "info", "warning", "error"]

ONE_PROCESS = (
    "one process is one model, one worker thread and one set of metrics and live recall: a second worker would"
    " answer with figures of its own and hold a second model. Start more processes on other ports, behind a balancer"
)


class Settings(BaseSettings):
    """What an operator can choose. Flags win over the environment, the environment over these defaults."""

    model_config = SettingsConfigDict(env_prefix="SPARSEFINDER_", extra="ignore", frozen=True, env_ignore_empty=True)

    host: str = Field("127.0.0.1", description="address to bind")
    port: int = Field(8000, ge=0, le=65535, description="port to bind; 0 lets the system choose and logs it")
    teacher: str = Field("minilm", description="the model: packaged name, local folder or hub id")
    artifact: Path | None = Field(None, description="artifact folder; the shipped one by default")
    artifacts_root: Path | None = Field(None, description="where reload may look; the artifact's parent by default")
    head: Path | None = Field(None, description="fill-mask head folder; the shipped one where it fits")
    served_name: str | None = Field(None, description="model name in requests; the artifact's folder by default")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes the GPU where there is one")
    threads: int = Field(0, ge=0, le=1024, description="threads of one forward pass; 0 leaves the choice to torch")
    crossover: CrossoverSource = Field(
        "measure",
        description="what auto decides by: measure takes times of this machine, a few seconds at the first start and"
        " kept in the user's cache folder; default takes those that are shipped",
    )
    workers: int = Field(1, description="always 1: start more processes instead")
    max_batch_tokens: int = Field(
        0, ge=0, description="tokens of one forward pass, more are split; 0 takes 2048 on a CPU and 8192 on a GPU"
    )
    max_items: int = Field(2048, ge=1, description="texts in one request")
    max_queue_items: int = Field(4096, ge=1, description="texts that may wait; a request beyond is told to come later")
    max_queue_tokens: int = Field(524_288, ge=1, description="tokens that may wait; as above")
    request_seconds: float = Field(
        120.0, gt=0, allow_inf_nan=False, description="longest time to an answer; then the request is dropped"
    )
    min_density: float = Field(0.02, ge=0, le=1, allow_inf_nan=False, description="least density a request may ask for")
    max_density: float = Field(1.0, gt=0, le=1, allow_inf_nan=False, description="greatest density it may ask for")
    max_graph_pairs: int = Field(
        20_000_000, ge=1, description="layers × heads × legal pairs that one /v1/attention may ask for"
    )
    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1024, description="size of a request body, chunked or not")
    api_keys: Keys = Field((), description="comma-separated; /v1 and /info then need one as a bearer token")
    admin_keys: Keys = Field((), description="comma-separated; /admin needs one (see the README for the rule without)")
    cors_origins: Origins = Field((), description="comma-separated origins of pages that may call; * only without keys")
    otlp_endpoint: str | None = Field(
        None, pattern=r"^https?://[^@?\s]+$", description="traces go there by OTLP over HTTP; needs the extra tracing"
    )
    audit_rate: float = Field(
        0.1, ge=0, le=1, allow_inf_nan=False, description="share of sparse and auto requests audited"
    )
    audit_rows: int = Field(8, ge=1, le=64, description="rows per layer and head whose true graph an audit computes")
    audit_ms: float = Field(
        50.0, gt=0, le=10_000, allow_inf_nan=False, description="longest pause for audits between two batches, and one"
        " layer that was begun; audits that find no room or time are dropped"
    )  # fmt: skip
    audit_window: int = Field(1000, ge=1, le=100_000, description="audited requests that live figures look back on")
    drift_requests: int = Field(
        50, ge=2, le=100_000, description="audited requests that it takes to compare live with calibrated recall"
    )
    drift_margin: float = Field(
        0.03, ge=0, le=1, allow_inf_nan=False, description="how far the live recall may lie below the calibrated one"
    )
    shutdown_seconds: int = Field(30, ge=0, description="how long a stop waits for running requests")
    log_level: Level = Field("info", description="least severe log line that is written")

    @field_validator("api_keys", "admin_keys", "cors_origins", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(key.strip() for key in value.split(",") if key.strip())
        return value

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        wrong = next((one for one in value if one != ANY and not ORIGIN.fullmatch(one)), None)
        if wrong is not None:
            raise ValueError(f"expected origins as https://example.org or *, got {wrong!r}")
        return value

    @model_validator(mode="after")
    def _no_key_for_every_page(self) -> "Settings":
        if ANY in self.cors_origins and (self.api_keys or self.admin_keys):
            raise ValueError("cors_origins: expected exact origins where keys are configured, got *")
        return self

    @field_validator("workers")
    @classmethod
    def _one(cls, value: int) -> int:
        if value != 1:
            raise ValueError(f"expected 1, got {value}: {ONE_PROCESS}")
        return value

    @field_validator("artifacts_root")
    @classmethod
    def _folder(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_dir():
            raise ValueError(f"expected a folder that exists, got {str(value)!r}")
        return value

    @model_validator(mode="after")
    def _limits_in_order(self) -> "Settings":
        if self.min_density > self.max_density:
            raise ValueError(
                f"max_density: expected at least min_density {self.min_density:g}, got {self.max_density:g}"
            )
        return self

    @property
    def loopback(self) -> bool:
        """Whether only programs of this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def admin_open(self) -> bool:
        """Whether /admin works without a key: only on a service that is private to this machine in every respect."""
        return self.loopback and not (self.admin_keys or self.api_keys or self.cors_origins)

    def artifact_path(self) -> Path:
        """The artifact to start with.

        Raises:
            ArtifactError: no artifact was named and none is shipped.
        """
        if self.artifact is not None:
            return self.artifact
        from sparsefinder.shipped import default_artifact

        return default_artifact()

    def root(self) -> Path:
        """The folder below which /admin/reload may look."""
        return (self.artifacts_root or self.artifact_path().resolve().parent).resolve()

    def name(self) -> str:
        """The model's name in requests and answers; it stays the same over reloads."""
        return self.served_name or self.artifact_path().resolve().name

    def public(self) -> dict[str, Any]:
        """All settings as plain values; of keys only their number."""
        values = self.model_dump(mode="json", exclude={"api_keys", "admin_keys"})
        return values | {"api_keys": len(self.api_keys), "admin_keys": len(self.admin_keys)}


def load_settings(**flags: Any) -> Settings:
    """Settings from flags (None = not given), the environment and the defaults.

    Raises:
        ConfigError: a value outside what is allowed, with the name of its setting.
    """
    try:
        return Settings(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{name}: {message}" if name else message) from None
