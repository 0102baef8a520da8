"""What the token-level predictors share: projections of a padded batch, item by item."""

from jaxtyping import Float
from torch import Tensor

from sparsefinder.errors import ShapeError
from sparsefinder.patterns.legal import Legal
from sparsefinder.predictors.projections import Projections, project_item


def padded(
    projections: Projections, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal
) -> tuple[Float[Tensor, "B H N s"], Float[Tensor, "B H M s"]]:
    """`q'` and `k'` of every item (see `project_item`) back in their padded places; zeros where there is padding."""
    items = [project_item(projections, q, k, legal, b) for b in range(q.shape[0])]
    size = items[0].q.shape[-1] if items else projections.rank
    low_q = projections.q_map.new_zeros(q.shape[0], projections.heads, q.shape[2], size)
    low_k = projections.k_map.new_zeros(k.shape[0], projections.heads, k.shape[2], size)
    for b, item in enumerate(items):
        low_q[b, :, item.rows] = item.q
        low_k[b, :, item.columns] = item.k
    return low_q, low_k


def require_heads(name: str, tensor: Tensor, projections: Projections) -> None:
    """Raise ShapeError unless `tensor` holds one value per query head."""
    if tuple(tensor.shape) != (projections.heads,):
        raise ShapeError(f"{name}: expected one for each of {projections.heads} heads, got shape {tuple(tensor.shape)}")
