"""Which k-means is used: faiss on the GPU, faiss on the CPU, or scikit-learn where faiss is missing or broken.

The wheels `faiss-cpu` and `faiss-gpu` both install a package named `faiss` and overwrite each other's files, so the
one that was installed last half-works; that is an error of the installation and is said at start-up.
"""

import functools
import importlib
import logging
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from sparsefinder.errors import ConfigError

FAISS_WHEELS = ("faiss-cpu", "faiss-gpu", "faiss-gpu-cu11", "faiss-gpu-cu12")
_log = logging.getLogger(__name__)


def check_faiss_wheels() -> None:
    """Start-up check, cheap: nothing is imported.

    Raises:
        ConfigError: more than one faiss wheel is installed.
    """
    found = [name for name in FAISS_WHEELS if _installed(name)]
    if len(found) > 1:
        raise ConfigError(
            f"faiss: expected at most one of {', '.join(FAISS_WHEELS)}, found {' and '.join(found)}, which overwrite "
            f"each other; run: pip uninstall -y {' '.join(found)} && pip install {found[-1]}"
        )


def kmeans_backend() -> Literal["faiss-gpu", "faiss-cpu", "sklearn"]:
    """Where k-means runs in this process. Falls to scikit-learn where faiss cannot be imported, and logs that once.

    Raises:
        ConfigError: more than one faiss wheel is installed.
    """
    check_faiss_wheels()
    try:
        faiss = importlib.import_module("faiss")
    except Exception as error:  # noqa: BLE001  (a broken binary fails with ImportError, OSError, AttributeError, …)
        _say_once(f"faiss cannot be imported ({type(error).__name__}: {error}); k-means runs in scikit-learn instead")
        return "sklearn"
    has_gpu = hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0
    return "faiss-gpu" if has_gpu else "faiss-cpu"


def _installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


@functools.cache
def _say_once(message: str) -> None:
    _log.warning(message)
