"""Sparsefinder predicts which tokens an α-entmax attention will look at, and computes only those.

The names below are the whole vocabulary of a user; everything else is imported from its own module. They are loaded
when first used, so that importing this package costs nothing (no torch, no numba, no transformers).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsefinder.artifact import Artifact
    from sparsefinder.artifact import load as load_artifact
    from sparsefinder.attaching import attach_artifact
    from sparsefinder.attention.api import attend, attend_dense
    from sparsefinder.errors import SparsefinderError
    from sparsefinder.hf import attach
    from sparsefinder.patterns.legal import Legal, legal_from_mask
    from sparsefinder.patterns.positional import GlobalTokens, Window, window
    from sparsefinder.plan import Plan, build_plan
    from sparsefinder.shipped import default_artifact
    from sparsefinder.teacher import load_teacher

__version__ = "0.1.0"

__all__ = [
    "Artifact",
    "GlobalTokens",
    "Legal",
    "Plan",
    "SparsefinderError",
    "Window",
    "__version__",
    "attach",
    "attach_artifact",
    "attend",
    "attend_dense",
    "build_plan",
    "default_artifact",
    "legal_from_mask",
    "load_artifact",
    "load_teacher",
    "window",
]

_HOMES = {
    "Artifact": ("sparsefinder.artifact", "Artifact"),
    "GlobalTokens": ("sparsefinder.patterns.positional", "GlobalTokens"),
    "Legal": ("sparsefinder.patterns.legal", "Legal"),
    "Plan": ("sparsefinder.plan", "Plan"),
    "SparsefinderError": ("sparsefinder.errors", "SparsefinderError"),
    "Window": ("sparsefinder.patterns.positional", "Window"),
    "attach": ("sparsefinder.hf", "attach"),
    "attach_artifact": ("sparsefinder.attaching", "attach_artifact"),
    "attend": ("sparsefinder.attention.api", "attend"),
    "attend_dense": ("sparsefinder.attention.api", "attend_dense"),
    "build_plan": ("sparsefinder.plan", "build_plan"),
    "default_artifact": ("sparsefinder.shipped", "default_artifact"),
    "legal_from_mask": ("sparsefinder.patterns.legal", "legal_from_mask"),
    "load_artifact": ("sparsefinder.artifact", "load"),
    "load_teacher": ("sparsefinder.teacher", "load_teacher"),
    "window": ("sparsefinder.patterns.positional", "window"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
