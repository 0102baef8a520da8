"""The real model behind the service: a softmax teacher, its entmax twin, and an artifact's predictors."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from app.audit import AuditedLayer, Sample
from app.calibration import calibration_of
from app.schemas import MODES, Mode
from app.servable import Counts, Description, Forward, Ids
from app.settings import CrossoverSource
from sparsefinder.artifact import Artifact, load
from sparsefinder.attaching import attach_artifact
from sparsefinder.certificate import Repair
from sparsefinder.errors import IncompatibleModelError
from sparsefinder.hf import Attached, LayerCall
from sparsefinder.patterns.legal import Legal, legal_from_mask
from sparsefinder.plan import Plan, computed_pairs
from sparsefinder.teacher import Teacher, batch, embed, load_teacher, require_encoder, tokenize


def choose_device(asked: str) -> str:
    """`cuda` or `cpu`; `auto` takes the GPU where torch sees one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked


def label(folder: Path) -> str:
    """What people call an artifact: its folder, or the run's folder where it is the `artifact` that a run wrote."""
    resolved = folder.resolve()
    return resolved.parent.name if resolved.name == "artifact" else resolved.name


@dataclass(frozen=True)
class Content:
    """An artifact as read from its folder."""

    folder: Path
    artifact: Artifact


class ModelLoader:
    """Loads artifacts for one teacher, which is loaded once and shared: it answers in the mode `original`."""

    def __init__(self, teacher: str, device: str, crossover: CrossoverSource):
        self._name = teacher
        self._device = choose_device(device)
        self._crossover = crossover
        self._teacher: Teacher | None = None

    def read(self, folder: Path) -> Content:
        """The artifact of a folder, hashes checked. Touches no model, so it may run while one answers."""
        return Content(folder, load(folder))

    def build(self, content: Content) -> "ServedModel":
        """A model for an artifact. Runs the model to verify it, so it belongs on the worker.

        Raises:
            IncompatibleModelError: the artifact was trained for another teacher, or does not fit this one.
            ArtifactError: its delta does not fit.
            ConfigError: shipped crossovers are asked for on a device that has none.
            DataError: the teacher cannot be loaded.
        """
        if self._teacher is None:
            disable_progress_bar()  # type: ignore[no-untyped-call]  # the log is JSON lines
            self._teacher = load_teacher(self._name, device=self._device)
            require_encoder(self._teacher)
        return ServedModel(self._teacher, content, self._device, self._crossover)


class ServedModel:
    """One artifact, ready to answer in every attention mode."""

    def __init__(self, original: Teacher, content: Content, device: str, crossover: CrossoverSource):
        artifact, card = content.artifact, content.artifact.card
        self._original = original
        self._twin = replace(original, model=copy.deepcopy(original.model))
        self._attached: Attached = attach_artifact(self._twin, artifact)
        if crossover == "measure" and any(predictor is not None for predictor in artifact.layers):
            self._attached.load_crossover()
        else:
            self._attached.ship_crossover()
        self._special = frozenset(original.tokenizer.all_special_ids) - {original.tokenizer.unk_token_id}
        self.calibration = calibration_of(card.calibration)
        self.description = Description(
            artifact=label(content.folder),
            version=card.version,
            folder=str(content.folder.resolve()),
            teacher=original.name,
            teacher_fingerprint=original.fingerprint,
            predictor=card.served,
            alpha=card.alpha,
            layers=card.layers,
            heads=card.heads,
            dimensions=int(self._twin.model.config.hidden_size),
            max_tokens=original.max_tokens,
            vocabulary=int(self._twin.model.config.vocab_size),
            device=device,
            threads=torch.get_num_threads(),  # of the worker, on which this runs
            modes=tuple(mode for mode in MODES if mode != "exact" or (card.alpha > 1 and device == "cpu")),
        )

    def tokenize(self, texts: Sequence[str]) -> list[Ids]:
        """Token ids of each text, special tokens included, never cut."""
        return tokenize(self._original, texts)

    def blank(self, ids: Ids) -> bool:
        """Whether there is nothing but special tokens."""
        return all(token in self._special for token in ids)

    def cut(self, ids: Ids) -> Ids:
        """The first `max_tokens` tokens; a special token at the end (BERT's [SEP]) stays there."""
        limit = self.description.max_tokens
        return [*ids[: limit - 1], ids[-1]] if ids[-1] in self._special else ids[:limit]

    @torch.inference_mode()
    def forward(self, ids: Sequence[Ids], mode: Mode, sample: Sample | None) -> Forward:
        """The embeddings of one batch, in the mode that was asked for and in no other."""
        teacher = self._original if mode == "original" else self._twin
        tokens, mask = batch(teacher, ids)
        legal_pairs = legal_count(legal_from_mask(mask))
        seen = _Observer(self.description.heads, sample, may_be_dense=mode in ("dense", "auto"))
        if mode == "original":
            vectors = embed(teacher, tokens, mask)
            computed, ran = self._dense_pairs(mask), ("original",) * self.description.layers
        else:
            with self._attached.using(mode, observe=seen):
                vectors = embed(teacher, tokens, mask)
            computed, ran = np.stack(seen.computed), tuple(seen.ran)
        return Forward(
            vectors.float().cpu().numpy(), computed, legal_pairs, ran, tuple(seen.audit), tuple(seen.repairs)
        )

    def _dense_pairs(self, mask: Tensor) -> Counts:
        """`[L, H]`: the pairs of each layer that exist, which in a sliding-window layer are few."""
        rows = [legal_count(Legal(mask, mask, radius=caller.radius)) for caller in self._attached.callers]
        return np.array(rows, dtype=np.int64)[:, None].repeat(self.description.heads, axis=1)


def legal_count(legal: Legal) -> int:
    """Legal pairs of a batch."""
    return sum(legal.count(b) for b in range(legal.key_real.shape[0]))


class _Observer:
    """Counts what each layer computed, and keeps the audited rows of one item (none of a sliding-window layer)."""

    def __init__(self, heads: int, sample: Sample | None, may_be_dense: bool):
        self.heads = heads
        self.sample = sample
        self.may_be_dense = may_be_dense
        self.computed: list[Any] = []
        self.ran: list[str] = []
        self.repairs: list[Repair | None] = []
        self.audit: list[AuditedLayer] = []

    def __call__(self, call: LayerCall) -> None:
        """See one layer of a forward pass."""
        self.ran.append(call.ran)
        self.repairs.append(call.repair)
        if call.plan is not None:
            # Scores that a proof needed are known for all heads together; answers show the mean over heads.
            proof = 0 if call.repair is None else round(call.repair.survivors / self.heads)
            self.computed.append(computed_pairs(call.plan).sum(0).cpu().numpy() + proof)
        elif self.may_be_dense or call.legal.radius is not None:
            self.computed.append(np.full(self.heads, legal_count(call.legal), dtype=np.int64))
        else:  # `sparse` or `exact` was asked for: a layer without a plan would be dense in silence
            raise IncompatibleModelError(f"layer {call.layer}: expected a plan, got none")
        if self.sample is not None:
            self.audit.append(audited_layer(call, self.sample))


def audited_layer(call: LayerCall, sample: Sample) -> AuditedLayer:
    """The audited rows of one item, copied out of the batch so that the batch can be freed; none without a plan."""
    b, heads = sample.item, call.q.shape[1]
    real = call.legal.key_real[b].nonzero().flatten()
    rows = call.legal.query_real[b].nonzero().flatten()[list(sample.rows if call.plan else ())]
    keys = call.k[b][:, real].repeat_interleave(heads // call.k.shape[1], dim=0)
    legal = call.legal.allows(b, rows[:, None], real[None, :])
    kept = kept_keys(call.plan, b, rows)[:, :, real] if call.plan else legal.expand(heads, -1, -1)
    return AuditedLayer(call.q[b][:, rows].clone(), keys.clone(), call.scale.clone(), call.alpha, legal, kept)


def kept_keys(plan: Plan, b: int, rows: Tensor) -> Tensor:
    """`Bool[H, R, M]`: which keys the plan lets these rows of item `b` read; no N×M matrix is made."""
    _, heads, _, width = plan.shape
    offsets, keys, first = (part.cpu().numpy() for part in (plan.offsets, plan.keys, plan.first_row))
    tiles = {name: getattr(plan, f"tile_{name}").cpu().numpy() for name in ("batch", "head", "start", "rows")}
    kept = np.zeros((heads, len(rows), width), dtype=bool)
    mine = np.flatnonzero(tiles["batch"] == b)
    for place, row in enumerate(rows.tolist()):
        inside = (tiles["start"][mine] <= row) & (row < tiles["start"][mine] + tiles["rows"][mine])
        for tile in mine[inside]:
            entries = slice(offsets[tile], offsets[tile + 1])
            may = first[entries] <= row - tiles["start"][tile]
            kept[tiles["head"][tile], place, keys[entries][may]] = True
    return torch.from_numpy(kept).to(rows.device)
