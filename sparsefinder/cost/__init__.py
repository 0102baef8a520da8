"""What attention over a pattern costs, and what hashing and sparse layers are expected to give; plain arithmetic."""

from sparsefinder.cost.closed_form import all_pairs, closed_form_pairs
from sparsefinder.cost.depth import Depth, construction_depth, dense_depth, depth_of
from sparsefinder.cost.footprint import Footprint, count_by_bounds, footprint, footprint_at, full_footprint
from sparsefinder.cost.hashing import (
    BucketSize,
    bucket_shares,
    bucket_size,
    collision_probability,
    expected_keys,
    miss_probability,
    rounds_needed,
)
from sparsefinder.cost.long_document import DesignRow, LongDocument, design_rows, design_table
from sparsefinder.cost.price import Price, attention_price, prediction_price

__all__ = [
    "BucketSize",
    "Depth",
    "DesignRow",
    "Footprint",
    "LongDocument",
    "Price",
    "all_pairs",
    "attention_price",
    "bucket_shares",
    "bucket_size",
    "closed_form_pairs",
    "collision_probability",
    "construction_depth",
    "count_by_bounds",
    "dense_depth",
    "depth_of",
    "design_rows",
    "design_table",
    "expected_keys",
    "footprint",
    "footprint_at",
    "full_footprint",
    "miss_probability",
    "prediction_price",
    "rounds_needed",
]
