"""The steps of the command line as functions: open a teacher, extract its splits, fit, measure, write an artifact."""

import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from sparsefinder.artifact import Artifact, Card, delta_hash, load, save
from sparsefinder.attaching import attach_artifact
from sparsefinder.errors import ArtifactError, DataError
from sparsefinder.hf import Attached, attach
from sparsefinder.metrics import Report, SetName
from sparsefinder.predictors import Predictor
from sparsefinder.shipped import default_artifact
from sparsefinder.teacher import Teacher, load_teacher
from training.calibrate import Calibration, calibrate
from training.config import ExtractConfig, FitConfig, RunConfig, Target, as_dict
from training.corpus import chunk_tokens, default_texts, read_texts, split_texts, text_hash
from training.evaluate import evaluate, has_pattern
from training.extract import extract, make_manifest, read_ids, read_manifest
from training.fit import Fitted, fit, measuring_items, name_of, positional_of
from training.in_the_loop import loop_figures
from training.working_points import measure_points

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, Split] = ("train", "heldout")
OF_A_CUT = ("points", "loop", "measured")  # parts of a calibration that another cut makes wrong
CHARACTERS_PER_TOKEN = 8  # more than any text needs: how much default text is read for so many tokens

OnProgress = Callable[[str, int, int], None]
Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Opened:
    """A teacher with our attention in it, and the artifact its delta came from (None = the teacher as it is)."""

    teacher: Teacher
    attached: Attached
    artifact: Artifact | None


def open_teacher(config: ExtractConfig) -> Opened:
    """Load the teacher, with the delta, α and head scale of `config.artifact` where one is named.

    Raises:
        ArtifactError, DataError, IncompatibleModelError: what cannot be loaded, or does not fit.
    """
    if not config.artifact:
        teacher = load_teacher(config.teacher)
        return Opened(teacher, attach(teacher.model, alpha=config.alpha), None)
    artifact = load(config.artifact)
    teacher = load_teacher(config.teacher)
    return Opened(teacher, attach_artifact(teacher, artifact), artifact)


def starting_artifact(teacher: str, asked: str | None) -> str:
    """The artifact whose delta is used: the one asked for, `none`, or the shipped one where the teacher is `minilm`."""
    if asked is not None:
        return "" if asked == "none" else asked
    try:
        return str(default_artifact()) if teacher == "minilm" else ""
    except ArtifactError:
        return ""


def texts_of(config: ExtractConfig) -> dict[Split, list[str]]:
    """Training and held-out text: the user's files, or the embedded default.

    Raises:
        DataError: a file that cannot be read, or text that leaves nothing to train on or nothing held out.
    """
    if config.text:
        whole = read_texts(config.text)
        train, heldout = split_texts(whole)
        if not train or not heldout:
            missing = "held out" if train else "to train on that is not in the held-out tenth as well"
            raise DataError(
                f"text: expected enough for an instance of {config.tokens} tokens to train on and one held out, "
                f"got {sum(map(len, whole))} characters, with nothing {missing}"
            )
        return {"train": train, "heldout": heldout}
    need = max(config.instances, config.heldout_instances) * config.tokens * CHARACTERS_PER_TOKEN
    return {"train": default_texts("train", min(max(need // 20, 20_000), 200_000)), "heldout": default_texts("heldout")}


def read_and_extract(config: ExtractConfig, folder: Path, on_progress: OnProgress, say: Say) -> dict[Split, int]:
    """`extract_splits`, after the folder, the text and the teacher, in the order in which they are quick to check.

    Raises:
        DataError, ConfigError, ArtifactError, IncompatibleModelError: as `texts_of`, `open_teacher`, `extract_splits`.
    """
    check_folder(folder)
    on_progress("read text", 0, 1)
    texts = texts_of(config)
    on_progress("open teacher", 0, 1)
    return extract_splits(config, texts, open_teacher(config), folder, on_progress, say)


def check_folder(out: Path) -> None:
    """DataError where a file stands in the place of a folder to be written: said before the work, not after it."""
    try:
        files = [path for path in (out, *out.parents) if path.exists() and not path.is_dir()]
    except OSError as error:
        raise DataError(f"{out}: expected a folder that can be written, got {error.strerror or error}") from None
    if files:
        raise DataError(f"{out}: expected a folder that can be written, {files[0]} is a file")


def extract_splits(
    config: ExtractConfig,
    texts: dict[Split, list[str]],
    opened: Opened,
    folder: Path,
    on_progress: OnProgress,
    say: Say = lambda line: None,
) -> dict[Split, int]:
    """Shards of both splits in `folder/train` and `folder/heldout`; returns the instances of each.

    say: is told of a split that gets fewer instances than were asked for, before any is extracted.

    Raises:
        DataError: text without a token, or a folder that cannot be written.
        ConfigError: the folder holds shards of another configuration.
    """
    parts, found = {}, {}
    for split, wanted in zip(SPLITS, (config.instances, config.heldout_instances), strict=True):
        parts[split] = spread(chunk_tokens(opened.teacher, texts[split], config.tokens), wanted, config.seed)
        if too_few := _too_few(config, split, parts[split], wanted):
            say(too_few)
    for split, chunks in parts.items():
        about = {
            "text_sha256": text_hash(texts[split]),
            "seed": config.seed,
            "text": list(config.text),
            "delta": delta_hash(opened.artifact),
        }
        manifest = make_manifest(
            opened.teacher, opened.attached, chunks, split=split, shard_size=config.shard_size,
            gold_mass=config.gold_mass, **about,
        )  # fmt: skip
        step = _step(on_progress, f"extract {split}")
        extract(opened.teacher, opened.attached, chunks, folder / split, manifest, step)
        found[split] = len(chunks)
    return found


def _too_few(config: ExtractConfig, split: Split, chunks: list[list[int]], wanted: int) -> str:
    """A line on what the text is too short for; none where there is as much as was asked for."""
    longest = max(map(len, chunks))
    if len(chunks) == wanted and longest == config.tokens:
        return ""
    tokens = f"{config.tokens} tokens" if longest == config.tokens else f"{longest} tokens, not {config.tokens}"
    share = " (a tenth of it is held out)" if config.text and split == "heldout" else ""
    return f"{split}: {len(chunks)} of {wanted} instances of {tokens}, the text has no more{share}"


def fit_artifact(
    config: FitConfig,
    extract_config: ExtractConfig,
    shards: Path,
    out: Path,
    on_progress: OnProgress,
    target: Target | None = None,
    keep: Path | None = None,
) -> tuple[Card, dict[SetName, Report]]:
    """Fit on extracted shards, measure on held-out instances, write the artifact; the delta is taken along.

    target: measuring is left to the calibration, which replaces the cut. keep: where finished layers are kept.

    Raises:
        DataError: shards that are missing, incomplete or too few. ArtifactError: the artifact cannot be written.
    """
    started = time.perf_counter()
    fitted = fit(shards / "train", shards / "heldout", config, on_progress, keep)
    reports = {} if target else measure(shards / "heldout", fitted.layers, config, on_progress)
    base = load(extract_config.artifact) if extract_config.artifact else None
    card = _card(config, extract_config, read_manifest(shards / "train"), base, fitted, reports)
    card = replace(card, training={**card.training, "seconds": round(time.perf_counter() - started, 1)})
    parts = (fitted.layers, fitted.projections, fitted.centroids, fitted.thresholds)
    return save(out, Artifact(card, *parts, delta=base.delta if base else {})), reports


def measure(
    heldout: Path, layers: Sequence[Predictor | None], settings: FitConfig | Card, on_progress: OnProgress
) -> dict[SetName, Report]:
    """Both named sets of predictors, the pattern where there is one."""
    names: list[SetName] = ["plan", "pattern"] if has_pattern(layers) else ["plan"]
    step, positional = _step(on_progress, "evaluate"), positional_of(settings)
    return {
        name: evaluate(heldout, layers, positional, settings.tile_size, name, on_layer=step) for name in names
    }  # fmt: skip


def evaluate_artifact(path: Path, shards: Path, on_progress: OnProgress) -> dict[SetName, Report]:
    """Both named sets of an artifact's served predictors on the held-out shards.

    Raises:
        ArtifactError, DataError: what is missing, or of another teacher.
    """
    artifact = load(path)
    check_shards(artifact, shards)
    return measure(shards / "heldout", artifact.layers, artifact.card, on_progress)


def write_figures(
    path: Path,
    shards: Path,
    on_progress: OnProgress,
    reports: dict[SetName, Report] | None = None,
    out: Path | None = None,
) -> tuple[Card, dict[SetName, Report]]:
    """Measure an artifact on the held-out shards and write it again (to `out`) with what its card says of that.

    Written are the reports (measured here where they are not given), the working points, the figures in the loop (where
    the shards hold token ids) and what all of them were measured on. Everything else stays; the version changes with
    the points, because they decide what a request for a density gets.

    Raises:
        ArtifactError, DataError, IncompatibleModelError: what is missing, or of another teacher.
    """
    artifact = load(path)
    manifest = check_shards(artifact, shards)
    card, heldout = artifact.card, shards / "heldout"
    found = measure(heldout, artifact.layers, card, on_progress) if reports is None else reports
    points = measure_points(heldout, artifact.layers, positional_of(card), card.tile_size, on_progress)
    items, ids = measuring_items(manifest["instances"]), read_ids(heldout, manifest)
    figures: dict[str, Any] = {str(name): report.as_dict() for name, report in found.items()}
    figures |= {"points": [point.as_dict() for point in points]} if points else {}
    if ids is not None:
        teacher = load_teacher(card.teacher)
        attached = attach_artifact(teacher, artifact)
        step = _step(on_progress, "measure in the loop")
        figures["loop"] = loop_figures(teacher, attached, [ids[item] for item in items], card.gold_mass, step)
    about = {name: manifest[name] for name in ("text", "text_sha256", "tokens")}
    figures |= {"tokens": manifest["tokens"], "measured": about | {"instances": len(items), "libraries": _libraries()}}
    kept = {name: value for name, value in card.calibration.items() if name not in OF_A_CUT}
    return save(out or path, replace(artifact, card=replace(card, calibration=kept | figures))), found


def check_shards(artifact: Artifact, shards: Path) -> dict[str, Any]:
    """The manifest of held-out shards, which must come from the artifact's teacher. DataError where they do not."""
    manifest = read_manifest(shards / "heldout")
    if manifest["teacher_fingerprint"] != artifact.card.teacher_fingerprint:
        raise DataError(f"{shards}: expected shards of the artifact's teacher, got those of another model")
    if manifest["delta"] != delta_hash(artifact):
        raise DataError(f"{shards}: expected shards extracted with this artifact's teacher delta, got those of another")
    return manifest


def run(config: RunConfig, out: Path, on_progress: OnProgress, say: Say) -> tuple[Card, dict[SetName, Report]]:
    """Extract to `out/shards`, fit, calibrate where there is a target, evaluate, find the working points, and write to
    `out/artifact`, once and at the end: what lies there is never half of this. say: as in `extract_splits`."""
    shards, draft = out / "shards", out / ".draft"
    check_folder(out / "artifact")
    read_and_extract(config.extract, shards, on_progress, say)
    shutil.rmtree(draft, ignore_errors=True)  # of a run that was killed
    parts = (config.fit, config.extract, shards, draft, on_progress)
    reports = fit_artifact(*parts, target=config.target, keep=out / "fit")[1]
    if config.target is not None:
        reports = calibrate_artifact(draft, shards, config.target, on_progress)[1]
    written = write_figures(draft, shards, on_progress, reports, out / "artifact")
    shutil.rmtree(draft, ignore_errors=True)
    return written


def calibrate_artifact(
    path: Path, shards: Path, target: Target, on_progress: OnProgress, out: Path | None = None
) -> tuple[Card, dict[SetName, Report], Calibration]:
    """Allot budgets to the heads of an artifact's served predictors, measure them, and write it again (to `out`).

    The working points of the cut before are dropped.

    Raises:
        ArtifactError, DataError: what is missing, or of another teacher. ConfigError: predictors that nothing cuts.
    """
    artifact = load(path)
    check_shards(artifact, shards)
    card, heldout = artifact.card, shards / "heldout"
    found = calibrate(heldout, artifact.layers, positional_of(card), card.tile_size, target, on_progress)
    reports = measure(heldout, found.layers, card, on_progress)
    figures: dict[str, Any] = {str(name): report.as_dict() for name, report in reports.items()}
    kept = {name: value for name, value in card.calibration.items() if name not in OF_A_CUT}
    card = replace(card, calibration={**kept, **figures, "allotted": found.as_dict()})
    return save(out or path, replace(artifact, card=card, layers=found.layers)), reports, found


def _step(on_progress: OnProgress, what: str) -> Callable[[int, int], None]:
    return lambda done, total: on_progress(what, done, total)


def spread(chunks: list[list[int]], wanted: int, seed: int) -> list[list[int]]:
    """At most `wanted` chunks, drawn without replacement, in the order of the text."""
    order = torch.randperm(len(chunks), generator=torch.Generator().manual_seed(seed))[:wanted]
    return [chunks[i] for i in order.sort().values.tolist()]


def _card(
    config: FitConfig,
    extract_config: ExtractConfig,
    manifest: dict[str, Any],
    base: Artifact | None,
    fitted: Fitted,
    reports: dict[SetName, Report],
) -> Card:
    calibration: dict[str, Any] = {str(name): report.as_dict() for name, report in reports.items()}
    training = dict(base.card.training) if base else {}
    training["fit"] = {
        "command": shlex.join(["sparsefinder-train", *sys.argv[1:]]),
        "extract": as_dict(extract_config),
        "config": as_dict(config),
        "text_sha256": manifest["text_sha256"],
        "instances": manifest["instances"],
        "figures": {name: value for name, value in fitted.figures.items() if name != "recall_at_sparsity"},
    }
    return Card(
        teacher=manifest["teacher"],
        teacher_fingerprint=manifest["teacher_fingerprint"],
        layers=manifest["layers"],
        heads=manifest["heads"],
        kv_heads=manifest["kv_heads"],
        head_dim=manifest["head_dim"],
        alpha=manifest["alpha"],
        gold_mass=manifest.get("gold_mass"),
        head_scale=tuple(tuple(row) for row in manifest["head_scale"]),
        objective=config.objective,
        served=f"{name_of(config.objective, config.rank)} {config.served_kind}",
        window_size=config.window_size,
        global_tokens=config.global_tokens,
        tile_size=config.tile_size,
        calibration={**calibration, "curve": fitted.figures["recall_at_sparsity"], "tokens": manifest["tokens"]},
        training=training,
        libraries=_libraries(),
    )


def _libraries() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "entmax", "numba", "faiss-cpu", "faiss-gpu", "scikit-learn"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
