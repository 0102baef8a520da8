"""What every test relies on: no network, fixed seeds, a fixed number of threads, and hypothesis without a clock."""

import os
import random
from collections.abc import Iterator

# Workers share the cores among them; a test run in one process may use two threads.
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("NUMBA_NUM_THREADS", str(THREADS))
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported, by whichever test comes first

import numpy as np  # noqa: E402  (the environment above is read at import)
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

torch.set_num_threads(THREADS)

settings.register_profile(
    "sparsefinder", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("sparsefinder")


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (for third parties that draw from the global state)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(THREADS)  # a test may change it, the next one must not notice


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under the shape checker, tests that pass wrong types on purpose would meet its error before ours."""
    if not config.getoption("jaxtyping_packages", default=None):
        return
    skip = pytest.mark.skip(reason="passes wrong types on purpose: runs in `make test`, without the shape checker")
    for item in items:
        if item.get_closest_marker("unchecked"):
            item.add_marker(skip)
