"""k-means with a seed, by faiss or by scikit-learn; the two agree on what is an error and on degenerate data."""

import logging
import warnings

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from sparsefinder.errors import ConfigError, DataError
from sparsefinder.faiss_choice import kmeans_backend

Points = npt.NDArray[np.float32]

ITERATIONS = 20
POINTS_PER_CLUSTER = 128  # more points move no centroid worth the time

_log = logging.getLogger(__name__)


def kmeans(
    points: Float[Tensor, "P r"], clusters: int, seed: int = 0, backend: str | None = None
) -> Float[Tensor, "B r"]:
    """Centroids of `clusters` clusters by Lloyd's iterations on a seeded sample of the points.

    backend: `faiss-gpu`, `faiss-cpu` or `sklearn`; None = what `faiss_choice.kmeans_backend` finds. Where fewer
    distinct points than clusters exist, the distinct points are the centroids and the last one is repeated: of equally
    near centroids the first counts, so a repeated one is never used.

    Raises:
        DataError: fewer points than clusters, or a point that is not finite.
    """
    if points.shape[0] < clusters:
        raise DataError(f"k-means: expected at least {clusters} points for {clusters} clusters, got {points.shape[0]}")
    if not bool(torch.isfinite(points).all()):
        raise DataError("k-means: expected finite points, got NaN or infinity")
    sample = points
    if points.shape[0] > POINTS_PER_CLUSTER * clusters:
        order = torch.randperm(points.shape[0], generator=torch.Generator().manual_seed(seed))
        sample = points[order[: POINTS_PER_CLUSTER * clusters].sort().values]
    x = np.ascontiguousarray(sample.detach().cpu().numpy(), dtype=np.float32)
    distinct = _distinct(x, clusters)
    if distinct is not None:
        return torch.from_numpy(distinct)
    which = backend or kmeans_backend()
    if which == "sklearn":
        return torch.from_numpy(_sklearn(x, clusters, seed))
    if which not in ("faiss-cpu", "faiss-gpu"):
        raise ConfigError(f"k-means: expected the backend faiss-cpu, faiss-gpu or sklearn, got {which!r}")
    return torch.from_numpy(_faiss(x, clusters, seed, gpu=which == "faiss-gpu"))


def _distinct(x: Points, clusters: int) -> Points | None:
    """The distinct points, padded with the last one, where there are not more of them than clusters."""
    if np.unique(x[: 4 * clusters], axis=0).shape[0] > clusters:
        return None
    found: Points = np.unique(x, axis=0)
    if found.shape[0] > clusters:
        return None
    if found.shape[0] < clusters:
        message = f"k-means: only {found.shape[0]} distinct points for {clusters} clusters, the others stay unused"
        warnings.warn(message, stacklevel=3)
    return np.concatenate([found, np.repeat(found[-1:], clusters - found.shape[0], 0)])


def _faiss(x: Points, clusters: int, seed: int, gpu: bool) -> Points:
    import faiss

    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)  # for the reason given in `training.threads`
    model = faiss.Kmeans(
        x.shape[1], clusters, niter=ITERATIONS, seed=seed, gpu=gpu, verbose=False,
        min_points_per_centroid=1, max_points_per_centroid=x.shape[0],
    )  # fmt: skip
    try:
        model.train(x)
    finally:
        faiss.omp_set_num_threads(threads)
    return np.array(model.centroids, dtype=np.float32)


def _sklearn(x: Points, clusters: int, seed: int) -> Points:
    from sklearn.cluster import KMeans

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = KMeans(clusters, n_init=1, max_iter=ITERATIONS, random_state=seed, algorithm="lloyd").fit(x)
    return np.asarray(model.cluster_centers_, dtype=np.float32)
