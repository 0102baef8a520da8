"""A training that can be interrupted: what is learned so far and the optimizer's memory, in one file."""

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparsefinder.errors import DataError
from training.extract import write_tensors

EVERY = 10  # steps
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # of AdamW


class State:
    """Where a training is kept. about: what decides its course, plain JSON; the state of another one is not read."""

    def __init__(self, path: Path, about: Any):
        self.path, self.about = path, about
        self.started, self.before = time.perf_counter(), 0.0

    def seconds(self) -> float:
        """How long this training has taken, with the parts before interruptions that were kept."""
        return self.before + time.perf_counter() - self.started

    def write(self, optimizer: torch.optim.Optimizer, smoothed: Tensor, step: int) -> None:
        """Keep the state after `step` steps, now and then. DataError where it cannot be written."""
        if step % EVERY:
            return
        tensors = {"smoothed": smoothed}
        for number, weight in enumerate(_weights(optimizer)):
            kept = optimizer.state[weight]
            tensors |= {f"{number}.{name}": kept[name] for name in MOMENTS if name in kept} | {f"{number}": weight}
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        write_tensors(self.path, tensors, {"step": str(step), "about": self._digest(), "seconds": str(self.seconds())})

    def kept(self) -> bool:
        """Is there a state of this very training? DataError where the file is damaged."""
        try:
            with safe_open(self.path, "pt") as file:
                return bool(file.metadata()["about"] == self._digest())
        except FileNotFoundError:
            return False
        except (OSError, SafetensorError, TypeError, KeyError) as error:
            raise DataError(f"{self.path}: damaged, delete it and start again ({error})") from None

    def read(self, optimizer: torch.optim.Optimizer, smoothed: Tensor) -> int:
        """Put the kept state in place; returns the number of steps that are done, 0 where nothing fits."""
        if not self.kept():
            return 0
        with safe_open(self.path, "pt") as file:
            about, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        with torch.no_grad():
            smoothed.copy_(tensors["smoothed"])
            for number, weight in enumerate(_weights(optimizer)):
                weight.copy_(tensors[f"{number}"])
                kept = {name: tensors[f"{number}.{name}"] for name in MOMENTS if f"{number}.{name}" in tensors}
                if kept:
                    optimizer.state[weight] = kept
        self.started, self.before = time.perf_counter(), float(about["seconds"])
        return int(about["step"])

    def remove(self) -> None:
        """The training is over."""
        self.path.unlink(missing_ok=True)

    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(self.about, sort_keys=True).encode()).hexdigest()


def _weights(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]
