"""What keeps the memory of the service level."""

import os

KEPT = 256 * 2**20  # bytes at the end of the heap that batches need again
_SHAPES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"


def forget_old_shapes() -> None:
    """Let oneDNN keep code for a few shapes only, instead of a thousand. Call it before torch computes.

    A batch has as many rows as its texts have tokens, so nearly each is a new shape; what is kept of it serves no
    other, and grew by some MiB a minute. GELU alone runs there: building it anew costs nothing that could be measured.
    """
    os.environ.setdefault(_SHAPES, "16")
