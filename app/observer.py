"""What the worker sees of a forward pass: what each layer computed, and the rows of it that are audited."""

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from app.audit import AuditedLayer, Sample
from app.servable import Counts
from sparsefinder.certificate import Repair
from sparsefinder.errors import IncompatibleModelError
from sparsefinder.hf import LayerCall
from sparsefinder.patterns.legal import Legal
from sparsefinder.plan import Plan, computed_pairs
from sparsefinder.threads import single_thread


def legal_counts(legal: Legal) -> Counts:
    """Legal pairs of each item of a batch."""
    return np.array([legal.count(b) for b in range(legal.key_real.shape[0])], dtype=np.int64)


class Observer:
    """Counts what each layer computed, and keeps the audited rows of some items (none of a sliding-window layer)."""

    def __init__(self, heads: int, samples: Sequence[Sample], may_be_dense: bool, gold_mass: float | None):
        self.heads = heads
        self.samples = samples
        self.may_be_dense = may_be_dense
        self.gold_mass = gold_mass
        self.computed: list[Counts] = []  # [B, H] of each layer
        self.ran: list[str] = []
        self.repairs: list[Repair | None] = []
        self.copying_seconds = 0.0
        self._audited: list[list[AuditedLayer]] = [[] for _ in samples]

    @property
    def audits(self) -> tuple[tuple[AuditedLayer, ...], ...]:
        """The audited layers of each sample."""
        return tuple(map(tuple, self._audited))

    def __call__(self, call: LayerCall) -> None:
        """See one layer of a forward pass."""
        self.ran.append(call.ran)
        self.repairs.append(call.repair)
        if call.plan is not None:
            pairs = computed_pairs(call.plan).cpu().numpy()
            if call.repair is not None:  # the scores of a proof are known for the whole batch: shared out evenly
                pairs = pairs + round(call.repair.survivors / pairs.size)
            self.computed.append(pairs)
        elif self.may_be_dense or call.legal.radius is not None:
            self.computed.append(legal_counts(call.legal)[:, None].repeat(self.heads, axis=1))
        else:  # `sparse` or `exact` was asked for: a layer without a plan would be dense in silence
            raise IncompatibleModelError(f"layer {call.layer}: expected a plan, got none")
        if self.samples:
            self._audit(call)

    def _audit(self, call: LayerCall) -> None:
        started = time.perf_counter()
        with single_thread():
            for sample, audited in zip(self.samples, self._audited, strict=True):
                audited.append(audited_layer(call, sample, self.gold_mass))
        self.copying_seconds += time.perf_counter() - started


def audited_layer(call: LayerCall, sample: Sample, gold_mass: float | None = None) -> AuditedLayer:
    """The audited rows of one item, copied out of the batch so that the batch can be freed; none without a plan."""
    b = sample.item
    if call.plan is None:
        return no_rows(call)
    real = call.legal.key_real[b].nonzero().flatten()
    rows = call.legal.query_real[b].nonzero().flatten()[list(sample.rows)]
    legal = call.legal.allows(b, rows[:, None], real[None, :]).clone()
    kept = kept_keys(call.plan, b, rows)[:, :, real]
    # Indexing by rows and keys copies; what is only a view would keep the whole batch in memory.
    q, k = call.q[b][:, rows], call.k[b][:, real]
    return AuditedLayer(q, k, call.scale.clone(), call.alpha, legal, kept, gold_mass)


def no_rows(call: LayerCall) -> AuditedLayer:
    """What is audited of a layer that computed all legal pairs: nothing."""
    heads, shared, width = call.q.shape[1], call.k.shape[1], call.q.shape[3]
    none = torch.zeros(0, 0, dtype=torch.bool)
    q, k = call.q.new_zeros(heads, 0, width), call.k.new_zeros(shared, 0, width)
    return AuditedLayer(q, k, call.scale.clone(), call.alpha, none, none.expand(heads, 0, 0))


def kept_keys(plan: Plan, b: int, rows: Tensor) -> Tensor:
    """`Bool[H, R, M]`: which keys the plan lets these rows of item `b` read; no N×M matrix is made."""
    _, heads, _, width = plan.shape
    offsets, keys, first = (part.cpu().numpy() for part in (plan.offsets, plan.keys, plan.first_row))
    item, head, start, size = (
        getattr(plan, f"tile_{name}").cpu().numpy() for name in ("batch", "head", "start", "rows")
    )
    mine, asked = np.flatnonzero(item == b), rows.cpu().numpy()
    behind = asked[:, None] - start[mine]
    place, tile = np.nonzero((behind >= 0) & (behind < size[mine]))  # each row has one tile in every head
    tile, behind = mine[tile], behind[place, tile]
    # The lists of those tiles one behind the other: which pair of row and tile an entry is of, and where it lies.
    counts = offsets[tile + 1] - offsets[tile]
    owner = np.repeat(np.arange(len(tile)), counts)
    entry = np.arange(len(owner)) + np.repeat(offsets[tile] - np.cumsum(counts) + counts, counts)
    may = first[entry] <= behind[owner]
    owner, entry = owner[may], entry[may]
    kept = np.zeros((heads, len(asked), width), dtype=bool)
    kept[head[tile[owner]], place[owner], keys[entry]] = True
    return torch.from_numpy(kept).to(rows.device)
