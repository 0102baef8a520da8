"""The real model behind the service: a softmax teacher, its entmax twin, and an artifact's predictors."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from app.audit import Sample
from app.calibration import calibration_of
from app.graph_values import Graph, GraphOptions
from app.graphs import graphs
from app.heads import fill_mask, fill_mask_modes, read_heads, score, tasks_of
from app.observer import Observer, legal_counts
from app.points import within
from app.schemas import MODES
from app.servable import Counts, Description, Forward, Ids, Lane, Task, Vector, computes_no_padding
from app.settings import CrossoverSource
from app.shares import in_shares
from app.vocabulary import Vocabulary
from sparsefinder import packing
from sparsefinder.artifact import Artifact, load
from sparsefinder.attaching import attach_artifact
from sparsefinder.delta import copy_for_delta
from sparsefinder.errors import ConfigError
from sparsefinder.hf import Attached, detach
from sparsefinder.patterns.legal import Legal
from sparsefinder.teacher import (
    Teacher,
    batch,
    embed,
    load_teacher,
    pool,
    require_causal,
    require_encoder,
    tokenize,
)


def choose_device(asked: str) -> str:
    """`cuda` or `cpu`; `auto` takes the GPU where torch sees one.

    Raises:
        ConfigError: `cuda` is asked for, and torch sees none.
    """
    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise ConfigError("device: expected cpu or auto, since torch sees no GPU here, got cuda")
    return ("cuda" if there else "cpu") if asked == "auto" else asked


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

    def __init__(self, teacher: str, device: str, crossover: CrossoverSource, head: Path | None = None):
        self._name = teacher
        self._head = head
        self.device = choose_device(device)
        self._crossover = crossover
        self._teacher: Teacher | None = None

    def read(self, folder: Path) -> Content:
        """The artifact of a folder, hashes checked. Touches no model, so it may run while one answers."""
        return Content(folder, load(folder))

    def build(self, content: Content) -> "ServedModel":
        """A model for an artifact. Runs the model to verify it, so it belongs on the worker.

        Raises:
            IncompatibleModelError: the artifact was trained for another teacher, or does not fit this one; or the head
                that was asked for does not fit the artifact.
            ArtifactError: its delta does not fit, or a head is damaged.
            ConfigError: shipped crossovers are asked for on a device that has none.
            DataError: the teacher cannot be loaded.
        """
        if self._teacher is None:
            disable_progress_bar()  # type: ignore[no-untyped-call]  # the log is JSON lines
            self._teacher = load_teacher(self._name, device=self.device)
            (require_causal if self._teacher.causal else require_encoder)(self._teacher)
            self._teacher.model.set_attn_implementation(packing.NAME)
        return ServedModel(self._teacher, content, self.device, self._crossover, self._head)


def twin_of(original: Teacher, delta: Mapping[str, Tensor]) -> Teacher:
    """A copy of a teacher to which a delta can be added, under its head where it has one; all else is shared."""
    name = next((name for name in ("lm", "mlm") if getattr(original, name) is not None), None)
    if name is None:
        return replace(original, model=copy_for_delta(original.model, original.model, delta))
    whole: Any = copy_for_delta(getattr(original, name), original.model, delta)
    return replace(original, model=whole.base_model, **{name: whole})


class ServedModel:
    """One artifact, ready to answer in every attention mode."""

    def __init__(
        self,
        original: Teacher,
        content: Content,
        device: str,
        crossover: CrossoverSource,
        head: Path | None = None,
    ):
        artifact, card = content.artifact, content.artifact.card
        self._original = original
        self._twin = twin_of(original, artifact.delta)
        self._attached: Attached = attach_artifact(self._twin, artifact)
        weakref.finalize(self, detach, self._attached)  # else a replaced model waits for the garbage collector
        if crossover == "measure" and any(predictor is not None for predictor in artifact.layers):
            self._attached.load_crossover()
        else:
            self._attached.ship_crossover()
        self.graphs = partial(graphs, self._attached, artifact)
        self.words = Vocabulary(original.tokenizer, int(self._twin.model.config.vocab_size))
        self.heads = read_heads(original, self._twin, artifact, head)
        said = {original.tokenizer.unk_token_id, self.words.mask}
        self._special = frozenset(original.tokenizer.all_special_ids) - said
        modes = tuple(mode for mode in MODES if mode != "exact" or (card.alpha > 1 and device == "cpu"))
        self.calibration = calibration_of(card.calibration)
        self._gold_mass = card.gold_mass
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
            vocabulary=len(self.words),
            device=device,
            threads=torch.get_num_threads(),  # of the worker, on which this runs
            modes=modes,
            tasks=(*tasks_of(original, self.heads), "graph"),
            causal=original.causal,
            fill_mask_modes=fill_mask_modes(original, self.heads, modes),
            packs=self._packs(),
            points=self._attached.points,
        )

    def _packs(self) -> bool:
        """Whether texts can be embedded without padding, by the original model and by the twin."""
        if self._original.causal or any(caller.radius is not None for caller in self._attached.callers):
            return False
        with self._attached.using("dense"):
            return packing.can_pack(self._original.model) and packing.can_pack(self._twin.model)

    def tokenize(self, texts: Sequence[str]) -> list[Ids]:
        """Token ids of each text, special tokens included, never cut."""
        return tokenize(self._original, texts)

    def blank(self, ids: Ids) -> bool:
        """Whether there is nothing but special tokens."""
        return all(token in self._special for token in ids)

    def cut(self, ids: Ids) -> Ids:
        """The first `max_tokens` tokens; a special token at the end (BERT's [SEP]) stays there, if not causal."""
        limit = self.description.max_tokens
        ends = ids[-1] in self._special and not self.description.causal
        return [*ids[: limit - 1], ids[-1]] if ends else ids[:limit]

    @torch.inference_mode()
    def forward(self, ids: Sequence[Ids], lane: Lane, samples: Sequence[Sample]) -> Forward:
        """One batch, in the mode that was asked for and in no other."""
        teacher = self._original if lane.mode == "original" else self._twin
        tokens, mask = batch(teacher, ids)
        legal = legal_counts(Legal(mask, mask, causal=self.description.causal))
        seen = Observer(self.description.heads, samples, lane.mode in ("dense", "auto"), self._gold_mass)
        work = packed_embeddings if computes_no_padding(self.description, lane.task) else TASKS[lane.task]
        compute = partial(work, self, teacher, ids, tokens, mask, lane)
        if lane.mode == "original":
            outputs = compute()
            computed, ran = self._dense_pairs(mask), ("original",) * self.description.layers
        else:
            density = within(self._attached.points, lane.density)
            with self._attached.using(lane.mode, observe=seen, density=density):
                outputs = compute()
            computed, ran = np.stack(seen.computed, axis=1), tuple(seen.ran)
        return Forward(outputs, computed, legal, ran, seen.audits, tuple(seen.repairs), seen.copying_seconds)

    def _dense_pairs(self, mask: Tensor) -> Counts:
        """`[B, L, H]`: the pairs of each layer that exist, which in a sliding-window layer are few."""
        causal = self.description.causal
        rows = [legal_counts(Legal(mask, mask, causal, radius=caller.radius)) for caller in self._attached.callers]
        return np.stack(rows, axis=1)[:, :, None].repeat(self.description.heads, axis=2)


def embeddings(
    model: ServedModel, teacher: Teacher, ids: Sequence[Ids], tokens: Tensor, mask: Tensor, lane: Lane
) -> list[Vector]:
    """The task `embed`: one vector per item."""
    return list(embed(teacher, tokens, mask).float().cpu().numpy())


def packed_embeddings(
    model: ServedModel, teacher: Teacher, ids: Sequence[Ids], tokens: Tensor, mask: Tensor, lane: Lane
) -> list[Vector]:
    """The same without computing padding, where the model can do that."""
    if lane.mode == "original" and model.description.device == "cpu":
        return in_shares(lambda part: _packed(teacher, *batch(teacher, part)), ids, torch.get_num_threads())
    return _packed(teacher, tokens, mask)


def _packed(teacher: Teacher, tokens: Tensor, mask: Tensor) -> list[Vector]:
    return list(pool(teacher, packing.packed_hidden(teacher.model, tokens, mask), mask).float().cpu().numpy())


def graph(
    model: ServedModel, teacher: Teacher, ids: Sequence[Ids], tokens: Tensor, mask: Tensor, lane: Lane
) -> list[Graph]:
    """The task `graph`: what each layer and head read, and what it needed."""
    options = lane.options if isinstance(lane.options, GraphOptions) else GraphOptions()
    return model.graphs(teacher, tokens, mask, options)


# What computes each task: from a padded batch, inside the mode that was asked for, to one output per item.
Compute = Callable[[ServedModel, Teacher, Sequence[Ids], Tensor, Tensor, Lane], Sequence[Any]]
TASKS: dict[Task, Compute] = {"embed": embeddings, "fill_mask": fill_mask, "score": score, "graph": graph}
