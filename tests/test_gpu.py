"""The gpu backend in Triton's interpreter, on CPU tensors: the cases of the other backends, and what only it does."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import test_attention as cases
import torch
from cases_core import make

from sparsefinder.attention.api import _choose, attend
from sparsefinder.attention.call import Call, checked
from sparsefinder.attention.gpu import attend_gpu, why_not_gpu
from sparsefinder.errors import BackendError
from sparsefinder.patterns.content import Listed
from sparsefinder.patterns.legal import legal_full
from sparsefinder.patterns.positional import GlobalTokens, Nothing, Window
from sparsefinder.plan import KeysPerTile, Plan, build_plan, plan_matrix
from sparsefinder.plan_device import place_tiles, plan_on_device

pytest.importorskip("triton", reason="Triton cannot be installed on this system: the gpu backend is not tested")


@pytest.fixture(autouse=True)
def _this_backend(monkeypatch):
    monkeypatch.setattr(cases, "NAMES", ["gpu", "reference"])


def check_definition(batch, alpha, size, tolerance):
    """Against the oracle, with another scale for every head."""
    exact, plan = cases.doubled(batch), build_plan(batch.pattern, batch.legal, size)
    scales = torch.linspace(0.2, 0.4, batch.heads)
    expected = cases.by_oracle(exact, lambda b, h: plan_matrix(plan, batch.legal, b, h).numpy(), alpha, scales)
    cases.close(cases.run(batch, plan, "gpu", alpha, scales), expected.float(), tolerance)


@pytest.mark.parametrize(
    ("alpha", "causal"), [(1.0, False), (1.0, True), (1.25, True), (1.5, False), (1.5, True), (2.0, False), (3.0, True)]
)
def test_it_equals_the_definition(alpha, causal):
    """Ragged, padded left, grouped heads, windows, buckets and global rows; tiles lower than 16 rows."""
    batch = make([20, 7], pad_left=True, causal=causal, seed=int(alpha * 8), heads=2, kv_heads=1)
    check_definition(batch, alpha, 9, 1e-5 if alpha > 2 else 1e-6)


@pytest.mark.parametrize("alpha", [1.0, 1.5])
@pytest.mark.parametrize(("size", "dim", "dim_v"), [(128, 32, 80), (33, 80, 256), (64, 256, 16)])
def test_heads_and_tiles_of_all_sizes(alpha, size, dim, dim_v):
    """Lists of several blocks, tiles in several parts, dimensions that are no powers of two."""
    batch = make([100], pad_left=False, causal=True, seed=size, heads=1, kv_heads=1, dim=dim)
    v = torch.randn(1, 1, 100, dim_v) * 0.3
    batch = replace(batch, q=batch.q * (8 / dim) ** 0.5, v=v)
    check_definition(batch, alpha, size, 3e-6)  # sums of up to 256 products


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_half_precision_stays_half(alpha, dtype, tolerance):
    batch = make([40, 9], pad_left=False, causal=False, seed=8)
    half = replace(batch, q=batch.q.to(dtype), k=batch.k.to(dtype), v=batch.v.to(dtype))
    plan = build_plan(batch.pattern, batch.legal, 16)
    found = cases.run(half, plan, "gpu", alpha)
    assert found.dtype == dtype
    single = replace(half, q=half.q.float(), k=half.k.float(), v=half.v.float())
    cases.close(found.float(), cases.run(single, plan, "reference", alpha), tolerance)


def test_neighbours_and_padding_change_nothing():
    cases.test_neighbours_and_padding_change_nothing(left=True, causal=True)


@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_strict_causality(alpha):
    cases.test_strict_causality(alpha)


@pytest.mark.parametrize("n", [1, 65])
def test_lengths_around_a_tile(n):
    cases.test_lengths_around_a_tile(n)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_behind_a_cache(causal):
    cases.test_rows_behind_a_cache(causal)


@pytest.mark.parametrize("alpha", [1.0, 1.5, 3.0])
def test_rows_without_a_key_are_zero_and_harm_nobody(alpha, monkeypatch):
    monkeypatch.setattr(cases, "attend", partial(attend, alpha=alpha))
    monkeypatch.setattr(cases, "attend_dense", partial(cases.attend_dense, alpha=alpha))
    cases.test_rows_without_a_key_are_zero_and_harm_nobody()


@pytest.mark.parametrize("alpha", [1.0, 1.5, 3.0])
def test_scores_that_overflow_are_visible(alpha, monkeypatch):
    monkeypatch.setattr(cases, "attend", partial(attend, alpha=alpha))
    cases.test_scores_that_overflow_are_visible()


def test_only_pairs_of_the_plan_are_touched():
    """A key that no tile lists may hold NaN (handed to the backend behind the check of `attend`)."""
    q, k, v = (torch.randn(1, 1, 12, 4) for _ in range(3))
    legal = legal_full(1, 12, 12)
    plan = build_plan(Listed(torch.zeros(1, 1, 12, 12, dtype=torch.bool)) | Window(1), legal, 4)
    for alpha in (1.0, 1.5):
        good = checked(q, k, v, legal, alpha, None)
        bad = [x.clone() for x in (k, v)]
        for x in bad:
            x[:, :, 8] = torch.nan
        found = attend_gpu(Call(q, *bad, legal, alpha, good.scales, good.dims), plan)
        assert torch.equal(found[:, :, :4], attend_gpu(good, plan)[:, :, :4])
        assert torch.isfinite(found[:, :, :4]).all()


def test_flat_rows_have_many_candidates():
    """All keys equal, and nearly so: the support is the whole list, and the threshold far from the best score."""
    legal = legal_full(1, 100, 100)
    plan = build_plan(~Nothing(), legal, 64, heads=1)
    for spread in (0.0, 1e-3):
        q, k, v = torch.ones(1, 1, 100, 16), torch.randn(1, 1, 100, 16) * spread, torch.randn(1, 1, 100, 16)
        found, expected = (attend(q, k, v, plan, legal=legal, backend=name) for name in ("gpu", "reference"))
        cases.close(found, expected, 1e-6)


def test_tensors_as_models_hand_them_over():
    """Heads behind tokens in memory."""
    batch = make([30], pad_left=False, causal=True, seed=3)
    plan = build_plan(batch.pattern, batch.legal, 16)
    turned = replace(
        batch, **{name: getattr(batch, name).transpose(1, 2).contiguous().transpose(1, 2) for name in ("q", "k", "v")}
    )
    assert not turned.q.is_contiguous()
    assert torch.equal(cases.run(turned, plan, "gpu"), cases.run(batch, plan, "gpu"))


def test_a_plan_with_room_behind_its_lists():
    batch = make([40], pad_left=False, causal=True, seed=4)
    scores = torch.randn(1, 2, 5, 40)
    plan = plan_on_device(scores, KeysPerTile(9), place_tiles(batch.legal, (8, 8), Window(1) | GlobalTokens(1)))
    assert plan.keys.shape[0] > int(plan.offsets[-1])
    cases.close(cases.run(batch, plan, "gpu"), cases.run(batch, plan, "reference"), 1e-6)


def test_no_tiles_at_all():
    legal = replace(legal_full(1, 4, 4), query_real=torch.zeros(1, 4, dtype=torch.bool))
    plan = build_plan(Window(1), legal, heads=1)
    x = torch.ones(1, 1, 4, 8)
    assert isinstance(plan, Plan)
    assert torch.equal(attend(x, x, x, plan, legal=legal, backend="gpu"), torch.zeros(1, 1, 4, 8))


def test_what_it_cannot_do_is_refused(monkeypatch):
    batch = make([6], pad_left=False, causal=False, seed=0)
    plan = build_plan(Window(1), batch.legal, 4, heads=2)
    exact = cases.doubled(batch)
    bias = torch.zeros(1, 2, 6, 6)
    wide = [torch.zeros(1, 2, 6, 272)] * 3
    with pytest.raises(BackendError, match="backend gpu: expected float16, bfloat16 or float32, got torch.float64"):
        cases.run(exact, plan, "gpu")
    with pytest.raises(BackendError, match="backend gpu: expected no bias"):
        attend(batch.q, batch.k, batch.v, plan, legal=batch.legal, bias=bias, backend="gpu")
    with pytest.raises(BackendError, match="backend gpu: expected head dimensions of at most 256, got 272"):
        attend(*wide, plan, legal=batch.legal, backend="gpu")
    with pytest.raises(BackendError, match="backend gpu: expected no gradient"):
        attend(batch.q.requires_grad_(), batch.k, batch.v, plan, legal=batch.legal, backend="gpu")
    monkeypatch.setattr("sparsefinder.attention.gpu_kernels.INTERPRETED", False)
    with pytest.raises(BackendError, match="backend gpu: expected tensors on a CUDA device .*, got cpu"):
        cases.run(replace(batch, q=batch.q.detach()), plan, "gpu")
    monkeypatch.setattr("sparsefinder.attention.gpu.find_spec", lambda name: None)
    with pytest.raises(BackendError, match="backend gpu: expected the package triton"):
        cases.run(replace(batch, q=batch.q.detach()), plan, "gpu")


def test_auto_chooses_it_on_cuda_where_it_can(monkeypatch):
    """Tensors without data stand for those on a GPU."""
    x = torch.zeros(1, 1, 4, 8, device="meta")
    legal = legal_full(1, 4, 4)
    good = checked(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), legal, 1.5, None)
    call = replace(good, q=x, k=x, v=x)
    assert why_not_gpu(call) is None  # the interpreter takes any device
    assert _choose("auto", call) == "gpu"
    assert _choose("auto", replace(call, q=x.double())) == "gather"
    assert _choose("auto", replace(call, bias=torch.zeros(1, 1, 4, 4))) == "gather"
    assert _choose("auto", replace(call, q=x.clone().requires_grad_())) == "gather"
    assert _choose("auto", good) == "cpu"


def test_importing_the_library_needs_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None; import torch, sparsefinder.attention.api as api;"
        "from sparsefinder.plan import build_plan; from sparsefinder.patterns.positional import Window;"
        "from sparsefinder.patterns.legal import legal_full; x = torch.ones(1, 1, 4, 8); legal = legal_full(1, 4, 4);"
        "print(api.attend(x, x, x, build_plan(Window(1), legal, heads=1), legal=legal).sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert float(done.stdout) == 32


COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sparsefinder.attention import gpu_kernels
assert not gpu_kernels.INTERPRETED
kernel, config = gpu_kernels.attend_tiles, gpu_kernels.CONFIGS[0]
fixed = dict.fromkeys(("ROWS", "DIM", "DIM_V", "DIM_PAD", "DIM_V_PAD"), 64) | config.kwargs
fixed |= {"KIND": int(sys.argv[1]), "PRECISION": "tf32"}
types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(fixed, "constexpr")
types |= dict.fromkeys(("q", "k", "v", "out"), "*bf16") | dict.fromkeys(("scales", "scratch"), "*fp32")
types |= dict.fromkeys(("tile_batch", "tile_head", "tile_start", "tile_rows", "keys", "first_row"), "*i32")
types |= {"offsets": "*i64", "alpha": "fp32", "step_floor": "fp32"}
places = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
compiled = triton.compile(ASTSource(kernel, types, places), target=GPUTarget("cuda", 90, 32),
                          options={"num_warps": config.num_warps, "num_stages": config.num_stages})
print(len(compiled.asm["cubin"]), "wgmma" in compiled.asm["ptx"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_it_compiles_for_a_gpu_that_is_not_here(kind, tmp_path):
    """To the machine code of an H100 or H200, for its tensor cores: the interpreter forgives more than a compiler."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE, str(kind)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    size, tensor_cores = done.stdout.split()
    assert int(size) > 1000
    assert tensor_cores == "True"
