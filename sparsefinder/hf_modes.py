"""What one attention layer computes in each mode, on what `hf` hands over."""

from dataclasses import replace

import torch
from torch import Tensor

from sparsefinder.attention.api import attend, attend_dense
from sparsefinder.attention.crossover import (
    Crossover,
    density_of,
    for_heads,
    size_of,
    worth_attending,
    worth_predicting,
)
from sparsefinder.certificate import Repair, attend_exact
from sparsefinder.errors import ConfigError, IncompatibleModelError
from sparsefinder.generation import Generation
from sparsefinder.hf_attached import Attached, LayerCall, LayerInput, Ran, Run
from sparsefinder.patterns.legal import first_real
from sparsefinder.plan import Plan
from sparsefinder.predictors import layer_plan


def compute(attached: Attached, call: LayerInput) -> Tensor:
    """The output of one layer in the mode that is on; whoever observes is told what ran.

    Raises:
        ConfigError: a pass over a key-value cache in mode `sparse` or `exact`, not inside of `Attached.generation`.
        IncompatibleModelError: cross-attention over texts that are padded on the left.
    """
    run, plan = attached.run(), None
    if run.generation is not None and call.legal.causal and _predicts(attached, call):
        return _token_by_token(run, run.generation, call)
    if run.crossover is not None:
        plan = _plan_that_pays(attached, run, run.crossover, call)
    elif run.mode != "dense":
        plan = _plan(attached, run, call)
    if plan is None:
        return _dense(run, call)
    return _exact(run, call, plan) if run.mode == "exact" else _sparse(run, call, plan)


def _predicts(attached: Attached, call: LayerInput) -> bool:
    """A layer with a sliding window keeps it; one without a predictor computes all its pairs."""
    return call.legal.radius is None and attached.predictors[call.layer] is not None  # at every working point alike


def _plan_that_pays(attached: Attached, run: Run, crossover: Crossover, call: LayerInput) -> Plan | None:
    """None where the dense path is the faster one, which is asked before anything is predicted, and then again."""
    if call.legal.cross or call.legal.query_offset or (run.plan_for is None and not _predicts(attached, call)):
        return None
    size = for_heads(size_of(crossover, call.legal), crossover, call.q.shape[1])
    expected = attached.expected if run.cut is None else run.cut.expected
    known = expected[call.layer] if expected else None
    if not worth_predicting(crossover, size, 0.0 if known is None else known.at(size.length)):
        return None
    plan = _plan(attached, run, call)
    return plan if plan is not None and worth_attending(crossover, size, density_of(plan, size)) else None


def _plan(attached: Attached, run: Run, call: LayerInput) -> Plan | None:
    if call.legal.radius is not None:
        return None
    return _predicted(attached, run, call) if run.plan_for is None else run.plan_for(call)


def _predicted(attached: Attached, run: Run, call: LayerInput) -> Plan | None:
    predictor = (attached.predictors if run.cut is None else run.cut.predictors)[call.layer]
    if predictor is None:
        return None
    if call.legal.query_offset and not call.legal.cross:
        raise ConfigError("a pass over a key-value cache: expected `with attached.generation()` around it, got none")
    if call.legal.cross and bool(first_real(call.legal).any()):
        raise IncompatibleModelError("cross-attention: expected texts padded on the right, got some on the left")
    # A row of cross-attention stands alone: a tile's list would tell a token of the decoder about later ones.
    size = 1 if call.legal.cross else attached.tile_size
    return layer_plan(predictor, call.q, call.k, call.legal, attached.positional, size, call.layer)


def _token_by_token(run: Run, generation: Generation, call: LayerInput) -> Tensor:
    outputs = []
    for rows, legal, plan in generation.plans(call.layer, call.q, call.k, call.legal):
        q, keys = call.q[:, :, rows], legal.key_real.shape[1]
        bias = None if call.bias is None else call.bias[:, :, rows, :keys]
        part = replace(call, q=q, k=call.k[:, :, :keys], v=call.v[:, :, :keys], legal=legal, bias=bias)
        outputs.append(_sparse(run, part, plan))
    return torch.cat(outputs, 2)


def _sparse(run: Run, call: LayerInput, plan: Plan) -> Tensor:
    qkv = call.q, call.k, call.v
    output = attend(*qkv, plan, legal=call.legal, alpha=call.alpha, scale=call.scale, bias=call.bias)
    return _seen(run, call, output, "sparse", plan)


def _exact(run: Run, call: LayerInput, plan: Plan) -> Tensor:
    qkv = call.q, call.k, call.v
    output, repair = attend_exact(*qkv, plan, legal=call.legal, alpha=call.alpha, scale=call.scale, bias=call.bias)
    return _seen(run, call, output, "exact", plan, repair)


def _dense(run: Run, call: LayerInput) -> Tensor:
    output = attend_dense(call.q, call.k, call.v, call.legal, alpha=call.alpha, scale=call.scale, bias=call.bias)
    return _seen(run, call, output, "dense")


def _seen(
    run: Run, call: LayerInput, output: Tensor, ran: Ran, plan: Plan | None = None, repair: Repair | None = None
) -> Tensor:
    if run.observe is not None:
        fields = {name: getattr(call, name) for name in LayerInput.__dataclass_fields__}
        run.observe(LayerCall(**fields, ran=ran, plan=plan, output=output, repair=repair))
    return output
