"""What routes ask of a model's heads, and what these say; without torch, so that routes load at once."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LEAST_MEAN = -700.0  # below it the perplexity is more than a float64 holds
MOST_FIGURES = 200_000  # words with their figures in one answer: some 15 MB of JSON
MOST_TOKENS = 500_000  # in one answer of /tokenize: some 30 MB


@dataclass(frozen=True)
class FillMask:
    """What is asked of each mask: its best words, or (where there are any) the figures of these."""

    top_k: int = 5
    targets: tuple[int, ...] = ()


@dataclass(frozen=True)
class Score:
    """What is asked of each token beside its own figure: the best ones in its place."""

    top_k: int = 0


@dataclass(frozen=True, eq=False)
class Filled:
    """The masks of one item: where they stand `[M]`, words `[M, K]` and their log-probabilities `[M, K]`."""

    positions: npt.NDArray[np.int64]
    words: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]

    @property
    def finite(self) -> bool:
        """Whether every figure is a number."""
        return bool(np.isfinite(self.logprobs).all())


@dataclass(frozen=True, eq=False)
class Scored:
    """One item: the log-probability of each token after the first `[N − 1]`, and the best words there `[N − 1, K]`."""

    logprobs: npt.NDArray[np.float32]
    words: npt.NDArray[np.int64]
    word_logprobs: npt.NDArray[np.float32]

    @property
    def sum(self) -> float:
        """Log-probability of the text after its first token."""
        return float(self.logprobs.sum(dtype=np.float64))

    @property
    def mean(self) -> float:
        """Mean log-probability of the scored tokens."""
        return self.sum / len(self.logprobs)

    @property
    def finite(self) -> bool:
        """Whether every figure is a number, the perplexity included."""
        numbers = np.isfinite(self.logprobs).all() and np.isfinite(self.word_logprobs).all()
        return bool(numbers and self.mean > LEAST_MEAN)
