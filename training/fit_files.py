"""Maps of finished layers on disk, so that an interrupted fit goes on where it stopped."""

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sparsefinder.errors import DataError
from sparsefinder.predictors import Projections
from training.config import FitConfig, as_dict
from training.extract import MANIFEST, write_tensors
from training.train_maps import Trained


class KeptMaps:
    """A folder with one file per set of maps and layer, named by what decides its content: shards and configuration."""

    def __init__(self, folder: Path, *shards: Path):
        self.folder = folder
        self.sources = [(shard / MANIFEST).read_text(encoding="utf-8") for shard in shards]
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{folder}: expected a folder that can be written, got {error.strerror or error}") from None

    def read(self, layer: int, config: FitConfig) -> Trained | None:
        """The maps of a layer, None where they are not (all) there."""
        try:
            with safe_open(self._path(layer, config), "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
                settings: dict[str, Any] = json.loads(file.metadata()["settings"])
        except (OSError, SafetensorError):
            return None
        losses, weight = tensors.pop("losses"), tensors.pop("distance_weight", None)
        return Trained(Projections.from_tensors(tensors, settings), weight, losses)

    def write(self, layer: int, config: FitConfig, trained: Trained) -> None:
        """Keep the maps of a layer, whole or not at all. DataError where the file cannot be written."""
        tensors = {**trained.projections.to_tensors(), "losses": trained.losses}
        if trained.distance_weight is not None:
            tensors["distance_weight"] = trained.distance_weight
        settings = json.dumps(trained.projections.settings())
        write_tensors(self._path(layer, config), tensors, {"settings": settings})

    def _path(self, layer: int, config: FitConfig) -> Path:
        text = json.dumps([self.sources, as_dict(config)], sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}-{layer:03d}.safetensors"
