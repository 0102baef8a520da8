"""Artifacts: a folder with `card.json` and safetensors, written as a whole, and checked before it is believed."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as format_tensors
from torch import Tensor

from sparsefinder.atomic_folder import read_folder, write_folder
from sparsefinder.edges import check_gold_mass
from sparsefinder.errors import ArtifactError, ConfigError, SparsefinderError
from sparsefinder.predictors import PREDICTORS, Predictor, Projections
from sparsefinder.working_points import movable, read_points

SCHEMA_VERSION = 1
CARD, PREDICTOR_FILE, DELTA_FILE = "card.json", "predictors.safetensors", "delta.safetensors"
NOT_HASHED = {"libraries", "training", "calibration", "hash", "card_hash"}
OPTIONAL = {"gold_mass"}  # fields of the card that are written only where they say something
NAME = re.compile(r"[A-Za-z0-9_-]+")

T = TypeVar("T")


@dataclass(frozen=True)
class Card:
    """What an artifact says of itself. `save` fills in `hash`.

    The content hash covers what decides an answer: teacher, sizes, α, head scale, settings and all tensors; not
    `libraries`, `training` and `calibration`, except for its working points, which decide what a request for a density
    gets. So the same seed gives the same hash on another day.
    """

    teacher: str  # packaged name, folder or hub id
    teacher_fingerprint: str  # sha256 of architecture and weights
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    alpha: float
    head_scale: tuple[tuple[float, ...], ...]  # [layers][heads], a factor on head_dim**-0.5
    objective: str
    served: str  # for people, for example "listwise-r8"
    window_size: int  # tokens, odd; 0 = no window
    global_tokens: int
    tile_size: int  # query rows
    calibration: Mapping[str, Any] = field(default_factory=dict)  # JSON
    training: Mapping[str, Any] = field(default_factory=dict)  # JSON: command, seed, data, figures
    libraries: Mapping[str, str] = field(default_factory=dict)
    gold_mass: float | None = None  # of a softmax teacher: what the gold keys of a row hold together
    schema_version: int = SCHEMA_VERSION
    hash: str = ""

    @property
    def version(self) -> str:
        """First 12 hexadecimal digits of the content hash."""
        return self.hash[:12]


@dataclass(frozen=True, eq=False)
class Artifact:
    """Everything a service or a benchmark needs: the served predictors, and the named alternatives beside them.

    layers: the served predictor of each layer, None for one that keeps its sliding window. The named sets have one
    entry per predicted layer, in order.
    """

    card: Card
    layers: tuple[Predictor | None, ...]
    projections: Mapping[str, tuple[Projections, ...]] = field(default_factory=dict)  # such as "hinge-r4"
    centroids: Mapping[str, tuple[Float[Tensor, "H B r"], ...]] = field(default_factory=dict)
    thresholds: Mapping[str, tuple[Float[Tensor, " H"], ...]] = field(default_factory=dict)
    delta: Mapping[str, Tensor] = field(default_factory=dict)  # of the teacher; empty = the teacher as it is


def predicted(artifact: Artifact) -> list[int]:
    """The layers that have a predictor."""
    return [layer for layer, predictor in enumerate(artifact.layers) if predictor is not None]


def save(path: str | Path, artifact: Artifact) -> Card:
    """Write `artifact` to the folder `path`, all or nothing, and return its card with the hash.

    An artifact that is already there is replaced in one step.

    Raises:
        ArtifactError: incomplete or non-finite content, or a folder that cannot be written or is no artifact.
    """
    _check(artifact)
    files = {PREDICTOR_FILE: _format(_pack(artifact))}
    if artifact.delta:
        files[DELTA_FILE] = _format(artifact.delta)
    body = asdict(artifact.card)
    body = {key: value for key, value in body.items() if key not in OPTIONAL or value is not None}
    body |= {"files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}}
    body |= {"predictors": [_described(predictor) for predictor in artifact.layers]}
    body |= {"projections": {name: [p.settings() for p in maps] for name, maps in artifact.projections.items()}}
    body["hash"] = _content_hash(body)
    body["card_hash"] = json_digest({key: value for key, value in body.items() if key != "card_hash"})
    text = json.dumps(body, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False)
    write_folder(Path(path), {**files, CARD: text.encode() + b"\n"}, marker=CARD)
    return replace(artifact.card, hash=body["hash"])


def load(path: str | Path) -> Artifact:
    """Read the artifact at `path`; nothing in it is executed, and no link inside it is followed.

    Raises:
        ArtifactError: what is missing (a file, layer or tensor), damaged (a hash, a NaN), or of another schema version.
    """
    found = read_folder(Path(path), (CARD, PREDICTOR_FILE, DELTA_FILE))
    try:
        body = _read_card(found)
        card = _card(body)
        artifact = _unpack(card, body, _tensors(found, PREDICTOR_FILE), _tensors(found, DELTA_FILE))
        _check(artifact)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}") from None
    return artifact


def _check(artifact: Artifact) -> None:
    """Completeness and finiteness; every message names what is wrong."""
    card = artifact.card
    count = len(predicted(artifact))
    if count < 1 or len(artifact.layers) != card.layers:
        found = len(artifact.layers) if count else 0
        raise ArtifactError(f"layers: expected predictors for {card.layers} layers, got {found}")
    if [len(row) for row in card.head_scale] != [card.heads] * card.layers:
        raise ArtifactError(f"head_scale: expected {card.layers} rows of {card.heads} numbers")
    if not all(math.isfinite(value) for row in card.head_scale for value in row):
        raise ArtifactError("head_scale: expected finite numbers")
    if card.window_size < 0 or (card.window_size and card.window_size % 2 == 0) or card.global_tokens < 0:
        raise ArtifactError(f"window_size: expected 0 or an odd number, got {card.window_size}")
    for name, group in _groups(artifact):
        if not NAME.fullmatch(name.rsplit(" ", 1)[-1]) or len(group) != count:
            raise ArtifactError(f"{name}: expected a plain name and {count} layers, got {len(group)}")
    for layer, maps in _all_projections(artifact):
        came = (maps.heads, maps.q_map.shape[2])
        if came != (card.heads, card.head_dim):
            expected = (card.heads, card.head_dim)
            raise ArtifactError(f"layer {layer}: expected maps of (heads, head_dim) {expected}, got {came}")
    points = read_points(card.calibration)
    fixed = [predictor for predictor in artifact.layers if predictor is not None and not movable(predictor)]
    if points and (fixed or len(points[0].layers) != card.layers):
        raise ArtifactError(f"points: expected {card.layers} layers, and predictors with a threshold or a budget")
    for name, tensor in [*_pack(artifact).items(), *artifact.delta.items()]:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ArtifactError(f"{name}: expected finite numbers, got NaN or infinity")


def _described(predictor: Predictor | None) -> dict[str, Any] | None:
    return None if predictor is None else {"kind": predictor.kind, "settings": predictor.settings()}


def _groups(artifact: Artifact) -> list[tuple[str, Sequence[Any]]]:
    parts = {"projections": artifact.projections, "centroids": artifact.centroids, "thresholds": artifact.thresholds}
    return [(f"{part} {name}", group) for part, named in parts.items() for name, group in named.items()]


def _all_projections(artifact: Artifact) -> list[tuple[int, Projections]]:
    served = [(i, p.projections) for i, p in enumerate(artifact.layers) if p is not None and hasattr(p, "projections")]
    layers = predicted(artifact)
    return served + [pair for maps in artifact.projections.values() for pair in zip(layers, maps, strict=True)]


def _pack(artifact: Artifact) -> dict[str, Tensor]:
    """All tensors but the delta, by unique names."""
    served = [(i, predictor.to_tensors()) for i, predictor in enumerate(artifact.layers) if predictor is not None]
    out = {f"layers.{i}.{n}": t for i, tensors in served for n, t in tensors.items()}
    for name, maps in artifact.projections.items():
        out |= {f"projections.{name}.{i}.{n}": t for i, p in enumerate(maps) for n, t in p.to_tensors().items()}
    for part in ("centroids", "thresholds"):
        for name, tensors in getattr(artifact, part).items():
            out |= {f"{part}.{name}.{i}": tensor for i, tensor in enumerate(tensors)}
    return out


def _unpack(card: Card, body: Mapping[str, Any], tensors: dict[str, Tensor], delta: dict[str, Tensor]) -> Artifact:
    described = body["predictors"]
    if len(described) != card.layers:
        raise ArtifactError(f"predictors: expected {card.layers} layers, got {len(described)}")
    layers = tuple(None if entry is None else _layer(i, entry, tensors) for i, entry in enumerate(described))
    count = len(layers) - layers.count(None)
    projections = {
        name: tuple(
            _build(f"projections.{name}.{i}.", Projections.from_tensors, tensors, settings)
            for i, settings in enumerate(entries)
        )
        for name, entries in body["projections"].items()
    }
    groups: dict[str, dict[str, tuple[Tensor, ...]]] = {}
    for part in ("centroids", "thresholds"):
        names = sorted({key.split(".")[1] for key in tensors if key.startswith(f"{part}.")})
        groups[part] = {n: tuple(_present(tensors, f"{part}.{n}.{i}") for i in range(count)) for n in names}
    artifact = Artifact(card, layers, projections, groups["centroids"], groups["thresholds"], delta)
    if unknown := sorted(set(tensors) - set(_pack(artifact))):
        raise ArtifactError(f"{PREDICTOR_FILE}: nothing in the card asks for the tensor {unknown[0]}")
    return artifact


def _layer(layer: int, entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Predictor:
    kind = entry.get("kind")
    if kind not in PREDICTORS:
        raise ArtifactError(f"layer {layer}: expected a kind of {', '.join(PREDICTORS)}, got {kind!r}")
    make: Callable[[Mapping[str, Tensor], Any], Predictor] = PREDICTORS[kind].from_tensors
    return _build(f"layers.{layer}.", make, tensors, entry.get("settings", {}))


def _build(
    prefix: str, make: Callable[[Mapping[str, Tensor], Any], T], tensors: Mapping[str, Tensor], settings: Any
) -> T:
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    try:
        return make(own, settings)
    except KeyError as error:
        raise ArtifactError(f"{prefix}{error.args[0]}: missing") from None
    except (SparsefinderError, TypeError, ValueError) as error:
        raise ArtifactError(f"{prefix.rstrip('.')}: {error}") from None


def _present(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise ArtifactError(f"{name}: missing")
    return tensors[name]


def _format(tensors: Mapping[str, Tensor]) -> bytes:
    kept = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return bytes(format_tensors(kept))


def _tensors(found: Mapping[str, bytes], name: str) -> dict[str, Tensor]:
    if name not in found:
        return {}
    try:
        return parse_tensors(found[name])
    except (SafetensorError, ValueError) as error:
        raise ArtifactError(f"{name}: expected safetensors ({error})") from None


def delta_hash(artifact: Artifact | None) -> str:
    """sha256 of a teacher delta's content, empty where there is none: artifacts with one delta share their shards."""
    if artifact is None or not artifact.delta:
        return ""
    digest = hashlib.sha256()
    for name, tensor in sorted(artifact.delta.items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def json_digest(body: Mapping[str, Any]) -> str:
    """sha256 of a JSON object whose keys are sorted. ArtifactError where it is not plain JSON."""
    try:
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"card: expected plain JSON with finite numbers ({error})") from None
    return hashlib.sha256(text.encode()).hexdigest()


def _content_hash(body: Mapping[str, Any]) -> str:
    """Of what decides an answer. An artifact without working points has the hash that it always had."""
    decides = {key: value for key, value in body.items() if key not in NOT_HASHED}
    calibration = body["calibration"]
    points = calibration.get("points") if isinstance(calibration, Mapping) else None
    return json_digest(decides | ({"points": points} if points else {}))


def _read_card(found: Mapping[str, bytes]) -> dict[str, Any]:
    """The card's JSON, after the schema version, its own hash and the hash of every file have been checked."""
    if CARD not in found:
        raise ArtifactError(f"{CARD}: missing")
    try:
        body = json.loads(found[CARD].decode())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ArtifactError(f"{CARD}: expected JSON ({error})") from None
    if not isinstance(body, dict) or body.get("schema_version") != SCHEMA_VERSION:
        came = body.get("schema_version") if isinstance(body, dict) else type(body).__name__
        raise ArtifactError(f"{CARD}: expected schema_version {SCHEMA_VERSION}, got {came!r}")
    if body.get("card_hash") != json_digest({key: value for key, value in body.items() if key != "card_hash"}):
        raise ArtifactError(f"{CARD}: its content does not match its card_hash")
    wanted = {f.name for f in fields(Card)} | {"files", "predictors", "projections", "card_hash"}
    if odd := sorted((wanted ^ set(body)) - (OPTIONAL - set(body))):
        raise ArtifactError(f"{CARD}: {'missing' if odd[0] in wanted else 'unknown'} field {odd[0]}")
    expected = body["files"]
    if PREDICTOR_FILE not in expected or set(expected) - {PREDICTOR_FILE, DELTA_FILE}:
        raise ArtifactError(f"files: expected {PREDICTOR_FILE} and perhaps {DELTA_FILE}, got {sorted(expected)}")
    for name in (PREDICTOR_FILE, DELTA_FILE):
        if (name in found) != (name in expected):
            raise ArtifactError(f"{name}: {'missing' if name in expected else 'not named in the card'}")
        if name in found and hashlib.sha256(found[name]).hexdigest() != expected[name]:
            raise ArtifactError(f"{name}: its sha256 does not match the card (damaged or truncated)")
    if body["hash"] != _content_hash(body):
        raise ArtifactError(f"{CARD}: its content does not match its hash")
    return body


def _card(body: Mapping[str, Any]) -> Card:
    values = {f.name: body[f.name] for f in fields(Card) if f.name not in OPTIONAL or f.name in body}
    try:
        values["head_scale"] = tuple(tuple(float(value) for value in row) for row in values["head_scale"])
        values["alpha"] = float(values["alpha"])
        if "gold_mass" in values:
            values["gold_mass"] = float(values["gold_mass"])
            check_gold_mass(values["gold_mass"])
        counts = ("layers", "heads", "kv_heads", "head_dim", "window_size", "global_tokens", "tile_size")
        if any(type(values[name]) is not int for name in counts):
            raise TypeError(f"expected whole numbers for {', '.join(counts)}")
    except (TypeError, ValueError, ConfigError) as error:
        raise ArtifactError(f"{CARD}: {error}") from None
    return Card(**values)
