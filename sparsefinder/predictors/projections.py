"""Per-head linear maps of queries and keys into a space of `rank` dimensions (Treviso et al., 2022, section 4.2)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparsefinder.errors import PatternError, ShapeError
from sparsefinder.patterns.content import pair_scores
from sparsefinder.patterns.legal import Legal

Form = Literal["metric", "bilinear"]
Settings = Mapping[str, str | int | float | bool | None]


@dataclass(frozen=True, eq=False)
class Projections:
    """Maps of one layer: `q' = q_map q + q_bias`, `k' = k_map k + k_bias`, one pair of maps per *query* head.

    form: `metric` (near means related: distances, clusters) or `bilinear` (the score is `q'·k' + q_linear·q +
        k_linear·k + offset`; distances in that space mean nothing, since `q' → q'A, k' → k'A⁻ᵀ` leaves it unchanged).
    unit: scale `q'` and `k'` to length one.
    The linear terms and the offset are zero where they are not given, and always for `metric`.

    Raises:
        ShapeError: the tensors do not fit each other.
        PatternError: an unknown form.
    """

    q_map: Float[Tensor, "H r D"]
    k_map: Float[Tensor, "H r D"]
    q_bias: Float[Tensor, "H r"]
    k_bias: Float[Tensor, "H r"]
    form: Form = "metric"
    unit: bool = False
    q_linear: Float[Tensor, "H D"] | None = None
    k_linear: Float[Tensor, "H D"] | None = None
    offset: Float[Tensor, " H"] | None = None

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise PatternError(f"projections: expected the form metric or bilinear, got {self.form!r}")
        if self.q_map.ndim != 3:
            raise ShapeError(f"q_map: expected [heads, rank, head_dim], got {tuple(self.q_map.shape)}")
        heads, rank, dim = self.q_map.shape
        expected = {"k_map": (heads, rank, dim), "q_bias": (heads, rank), "k_bias": (heads, rank)}
        expected |= {"q_linear": (heads, dim), "k_linear": (heads, dim), "offset": (heads,)}
        for name, shape in expected.items():
            tensor = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ShapeError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.q_map.shape[0]

    @property
    def rank(self) -> int:
        """Dimensions of the projected space."""
        return self.q_map.shape[1]

    def to_tensors(self) -> dict[str, Tensor]:
        """The parameters by name, for `artifact.py`."""
        return {name: getattr(self, name) for name in TENSORS if getattr(self, name) is not None}

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """What is not a tensor."""
        return {"form": self.form, "unit": self.unit}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], settings: Settings) -> "Projections":
        """The inverse of `to_tensors` and `settings`; KeyError names what is missing."""
        q_map, k_map, q_bias, k_bias = (tensors[name] for name in TENSORS[:4])
        form: Any = settings["form"]  # checked where it is made
        linear = {name: tensors.get(name) for name in TENSORS[4:]}
        return cls(q_map, k_map, q_bias, k_bias, form, bool(settings["unit"]), **linear)


TENSORS = ("q_map", "k_map", "q_bias", "k_bias", "q_linear", "k_linear", "offset")


def require_metric(projections: Projections, what: str) -> None:
    """Raise PatternError where distances are asked of a bilinear form (design: mixing them is an error)."""
    if projections.form != "metric":
        raise PatternError(f"{what}: expected projections of the form metric, got {projections.form}")


def expand_heads(k: Float[Tensor, "B Hkv M D"], heads: int) -> Float[Tensor, "B H M D"]:
    """Keys per query head: head `h` reads kv head `h // group_size` (grouped-query attention).

    Raises:
        ShapeError: the number of query heads is no multiple of the number of kv heads.
    """
    if k.shape[1] == heads:
        return k
    if heads % k.shape[1]:
        raise ShapeError(f"k: expected a divisor of {heads} query heads, got {k.shape[1]} kv heads")
    return k.repeat_interleave(heads // k.shape[1], dim=1)


def project(
    projections: Projections, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"]
) -> tuple[Float[Tensor, "B H N r"], Float[Tensor, "B H M r"]]:
    """`q'` and `k'` of a batch, differentiable.

    The last bits depend on the shapes (another GEMM kernel runs for another length), so predictors go through
    `project_item`, which makes a batch and an item alone give equal graphs.

    Raises:
        ShapeError: q, k and the maps do not fit.
    """
    check_fit(projections, q, k)
    return project_queries(projections, q), project_keys(projections, expand_heads(k, projections.heads))


def project_queries(projections: Projections, q: Float[Tensor, "*B H N D"]) -> Float[Tensor, "*B H N r"]:
    """`q'` alone (also of summaries of queries)."""
    return _apply(projections, projections.q_map, projections.q_bias, q)


def project_keys(projections: Projections, k: Float[Tensor, "*B H M D"]) -> Float[Tensor, "*B H M r"]:
    """`k'` alone, of keys that are already one per query head."""
    return _apply(projections, projections.k_map, projections.k_bias, k)


def check_fit(projections: Projections, q: Tensor, k: Tensor) -> None:
    """Raise ShapeError unless the maps fit these queries and keys."""
    heads, _, dim = projections.q_map.shape
    if q.ndim != 4 or k.ndim != 4 or q.shape[1] != heads or q.shape[3] != dim or k.shape[3] != dim or len(q) != len(k):
        came = f"{tuple(q.shape)} and {tuple(k.shape)}"
        raise ShapeError(f"project: expected q [B, {heads}, N, {dim}] and k [B, Hkv, M, {dim}], got {came}")


def _apply(projections: Projections, weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    y = x.to(weight.dtype) @ weight.transpose(-1, -2) + bias[:, None, :]
    return y / y.norm(dim=-1, keepdim=True).clamp(min=1e-12) if projections.unit else y


@dataclass(frozen=True, eq=False)
class Item:
    """The real tokens of one item of a batch, projected: `rows` and `columns` are their places in the padded batch."""

    q: Float[Tensor, "H n r"]
    k: Float[Tensor, "H m r"]
    rows: Int[Tensor, " n"]
    columns: Int[Tensor, " m"]


def project_item(
    projections: Projections, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal, b: int
) -> Item:
    """`q'` and `k'` of the real tokens of item `b`, with the linear terms of a bilinear form as two more dimensions.

    Padding is cut away *before* anything is multiplied, into tensors of the item's own size: the same GEMM then runs
    whatever the item was batched with, so its graph cannot depend on its neighbours by a single bit.

    Raises:
        ShapeError: q, k and the maps do not fit.
    """
    check_fit(projections, q, k)
    rows, columns = legal.query_real[b].nonzero().flatten(), legal.key_real[b].nonzero().flatten()
    dtype = projections.q_map.dtype
    queries = q[b][:, rows].detach().to(dtype).contiguous().unsqueeze(0)
    keys = k[b][:, columns].detach().to(dtype).contiguous().unsqueeze(0)
    low_q, low_k = project(projections, queries, keys)
    if projections.form == "bilinear":
        low_q, low_k = _with_linear_terms(projections, queries, expand_heads(keys, projections.heads), low_q, low_k)
    return Item(low_q[0], low_k[0], rows, columns)


def _with_linear_terms(
    projections: Projections, q: Tensor, k: Tensor, low_q: Tensor, low_k: Tensor
) -> tuple[Tensor, Tensor]:
    """Append `(uᵀq + b, 1)` to q' and `(1, wᵀk)` to k', so that the whole score is one dot product."""
    if projections.q_linear is None and projections.k_linear is None and projections.offset is None:
        return low_q, low_k
    one_q, one_k = torch.ones_like(low_q[..., :1]), torch.ones_like(low_k[..., :1])
    row = torch.zeros_like(one_q) if projections.q_linear is None else q @ projections.q_linear[:, :, None]
    column = torch.zeros_like(one_k) if projections.k_linear is None else k @ projections.k_linear[:, :, None]
    if projections.offset is not None:
        row = row + projections.offset[:, None, None]
    return torch.cat([low_q, row, one_q], -1), torch.cat([low_k, one_k, column], -1)


def item_scores(form: Form, item: Item, head: int) -> Float[Tensor, "n m"]:
    """Scores of one head, higher = more likely an edge: the bilinear score, or minus the squared Euclidean distance."""
    q, k = item.q[head], item.k[head]
    if form == "bilinear":
        return q @ k.T
    # ‖q'‖² + ‖k'‖² − 2 q'·k' cancels badly for near pairs, the very ones that count, so differences are summed.
    return -pair_scores(q[:, None, :], k[None, :, :], "euclidean")


def random_projections(heads: int, rank: int, head_dim: int, seed: int, form: Form = "metric") -> Projections:
    """The control *random projection*: the same Gaussian map for queries and keys, entries N(0, 1 / head_dim)."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(heads, rank, head_dim, generator=generator) / math.sqrt(head_dim)
    zero = torch.zeros(heads, rank)
    return Projections(weight, weight.clone(), zero, zero.clone(), form)


def true_score_projections(heads: int, head_dim: int, scale: float | Float[Tensor, " H"] = 1.0) -> Projections:
    """The control *oracle*: identity maps, whose bilinear scores are the true scores `scale[h] q·k`."""
    eye = torch.eye(head_dim).expand(heads, head_dim, head_dim)
    factor = torch.as_tensor(scale, dtype=torch.float32).expand(heads)[:, None, None]
    zero = torch.zeros(heads, head_dim)
    return Projections((eye * factor).contiguous(), eye.contiguous(), zero, zero.clone(), "bilinear")
