"""What a teacher's attention looks at: q, k and gold edges of every layer and head, in shards that can be resumed.

A folder of one split holds `manifest.json` and `shard-00000.safetensors` …; each shard `q.<layer>` `[I, H, N, D]`,
`k.<layer>` `[I, Hkv, N, D]` (float32), `mask` `[I, N]` (True = real token) and the gold edges in the layout of
`sparsefinder.edges` (`gold_offsets.<layer>`, `gold_flat.<layer>`, int32). A shard appears whole or not at all.

The gold edges of softmax and of causal teachers are not stored: at thousands of tokens they would be larger than q and
k, from which they are made again, exactly, when somebody asks. Held-out shards hold values as well (`training.values`),
and the token `ids` `[I, N]`, so that figures can be measured with the attention in the loop.
Of a layer that attends to a sliding window nothing is stored, since nothing is predicted there; the manifest names its
`windows`.
"""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparsefinder.edges import Edges, gold_edges
from sparsefinder.errors import ConfigError, DataError, IncompatibleModelError
from sparsefinder.hf import Attached, LayerCall
from sparsefinder.patterns.legal import legal_from_mask
from sparsefinder.teacher import Teacher, batch
from sparsefinder.whole_files import whole_file, write_text
from training.layers import predicted_layers
from training.values import VALUE_TENSORS, LayerValues, join_values, output_weight, value_tensors

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
LAYER_TENSORS = ("q", "k", "scale")
GOLD_TENSORS = ("gold_offsets", "gold_flat")

OnShard = Callable[[int, int], None]  # (shards that are done, shards in all)


@dataclass(frozen=True, eq=False)
class LayerData:
    """One layer of a split: what its attention sees, and what it looks at.

    stored: the gold graph where it was stored. gold_mass: of a softmax teacher, see `edges.gold_pairs`.
    """

    q: Float[Tensor, "I H N D"]
    k: Float[Tensor, "I Hkv N D"]
    mask: Bool[Tensor, "I N"]
    stored: Edges | None
    causal: bool
    alpha: float
    scale: Float[Tensor, " H"]
    gold_mass: float | None = None

    @functools.cached_property
    def edges(self) -> Edges:
        """The gold graph: the stored one, or made from q and k when it is first asked for."""
        if self.stored is not None:
            return self.stored
        legal = legal_from_mask(self.mask, self.causal)
        return gold_edges(self.q, self.k, legal, self.alpha, self.scale, self.gold_mass)


def make_manifest(
    teacher: Teacher,
    attached: Attached,
    chunks: Sequence[Sequence[int]],
    *,
    split: str,
    shard_size: int,
    gold_mass: float | None = None,
    **about: Any,
) -> dict[str, Any]:
    """What decides the content of the shards; a folder with another manifest is never mixed with this one.

    gold_mass: of a softmax teacher; a teacher with α > 1 has none.

    Raises:
        IncompatibleModelError: no layer to predict, or an encoder–decoder.
    """
    config = teacher.model.config
    if getattr(config, "is_encoder_decoder", False):
        raise IncompatibleModelError(f"extract: expected an encoder or a decoder, got {type(teacher.model).__name__}")
    heads = int(config.num_attention_heads)
    windows = [caller.radius for caller in attached.callers]
    if None not in windows:
        raise IncompatibleModelError(
            "extract: expected a layer that attends to the whole text, got sliding windows only"
        )
    return {
        "schema_version": SCHEMA_VERSION,
        "teacher": teacher.name,
        "teacher_fingerprint": teacher.fingerprint,
        "alpha": attached.alpha,
        "gold_mass": gold_mass if attached.alpha == 1 else None,
        "head_scale": [[round(float(x), 6) for x in row] for row in attached.head_scale],
        "layers": int(config.num_hidden_layers),
        "heads": heads,
        "kv_heads": int(getattr(config, "num_key_value_heads", heads)),
        "head_dim": int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        "split": split,
        "instances": len(chunks),
        "tokens": max(map(len, chunks)),
        "shard_size": shard_size,
        **({"values": True} if split == "heldout" else {}),
        **({"windows": windows} if any(radius is not None for radius in windows) else {}),
        **about,
    }


def extract(
    teacher: Teacher,
    attached: Attached,
    chunks: Sequence[Sequence[int]],
    folder: Path,
    manifest: dict[str, Any],
    on_shard: OnShard = lambda done, total: None,
) -> int:
    """Write the missing shards of `chunks` (token ids) to `folder`; returns how many were written now.

    Raises:
        DataError: no chunk, or the folder cannot be written.
        ConfigError: the folder holds shards of another configuration.
    """
    if not chunks:
        raise DataError("extract: expected at least one chunk of text, got none")
    _claim(folder, manifest)
    parts = list(_parts(chunks, manifest["shard_size"]))
    written = 0
    for number, part in enumerate(parts):
        path = folder / shard_name(number)
        if not path.exists():
            tensors = extract_batch(teacher, attached, part, manifest["tokens"], manifest.get("values", False))
            write_tensors(path, tensors)
            written += 1
        on_shard(number + 1, len(parts))
    return written


@torch.no_grad()
def extract_batch(
    teacher: Teacher, attached: Attached, chunks: Sequence[Sequence[int]], tokens: int, values: bool = False
) -> dict[str, Tensor]:
    """The tensors of one shard: the model runs `dense`, and every layer is seen on its way.

    values: keep values and token ids too.
    """
    ids, mask = batch(teacher, chunks)
    missing = tokens - ids.shape[1]
    ids, mask = torch.nn.functional.pad(ids, (0, missing)), torch.nn.functional.pad(mask, (0, missing))
    found: dict[str, Tensor] = {"mask": mask.cpu()} | ({"ids": ids.to(torch.int32).cpu()} if values else {})

    def observe(call: LayerCall) -> None:
        if call.legal.radius is not None:
            return
        if call.bias is not None:
            raise IncompatibleModelError(f"layer {call.layer}: expected attention without position biases, got some")
        if call.legal.causal:
            found["causal"] = torch.ones(1, dtype=torch.bool)
        q, k = call.q.detach().float().cpu(), call.k.detach().float().cpu()
        found[f"q.{call.layer}"], found[f"k.{call.layer}"] = q.contiguous(), k.contiguous()
        found[f"scale.{call.layer}"] = call.scale.detach().float().cpu().contiguous()
        if values:
            width = call.output.shape[1] * call.output.shape[3]
            found.update(value_tensors(call, output_weight(teacher.model, attached.callers[call.layer].module, width)))
        if call.alpha == 1 or call.legal.causal:
            return
        edges = gold_edges(q, k, call.legal, call.alpha, call.scale)
        found[f"gold_offsets.{call.layer}"] = edges.offsets.cpu()
        found[f"gold_flat.{call.layer}"] = edges.flat.to(torch.int32).cpu()  # i * M + j stays far below 2**31

    with attached.using("dense", observe=observe):
        teacher.model(input_ids=ids, attention_mask=mask.long())
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a complete split.

    Raises:
        DataError: there is none, it is no manifest of this version, or shards are missing.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except OSError:
        raise DataError(f"{folder}: expected {MANIFEST} (run `sparsefinder-train extract` first)") from None
    except ValueError:
        raise DataError(f"{folder / MANIFEST}: expected JSON") from None
    if not isinstance(manifest, dict) or manifest.get("schema_version") != SCHEMA_VERSION:
        raise DataError(f"{folder / MANIFEST}: expected schema_version {SCHEMA_VERSION}")
    total = -(-manifest["instances"] // manifest["shard_size"])
    missing = [number for number in range(total) if not (folder / shard_name(number)).is_file()]
    if missing:
        raise DataError(f"{folder}: expected {total} shards, {len(missing)} are missing (run the same extract again)")
    return manifest


def read_layer(folder: Path, layer: int, manifest: dict[str, Any] | None = None) -> LayerData:
    """One layer of all the shards of a split.

    Raises:
        DataError: the split is incomplete, a shard is damaged (delete it and extract again), or the layer is not there.
    """
    manifest = manifest or read_manifest(folder)
    if layer not in predicted_layers(manifest):
        raise DataError(f"layer {layer}: expected one of {predicted_layers(manifest)}, which attend to the whole text")
    names, gold = ([f"{name}.{layer}" for name in group] for group in (LAYER_TENSORS, GOLD_TENSORS))
    parts = _read_parts(folder, manifest, ["mask", *names], gold)
    return join_layer(parts, layer, float(manifest["alpha"]), manifest.get("gold_mass"))


def read_values(folder: Path, layer: int, manifest: dict[str, Any] | None = None) -> LayerValues | None:
    """The values of one layer of a split, None where it holds none. Errors as in `read_layer`."""
    manifest = manifest or read_manifest(folder)
    if not manifest.get("values"):
        return None
    return join_values(_read_parts(folder, manifest, [f"{name}.{layer}" for name in VALUE_TENSORS]), layer)


def read_ids(folder: Path, manifest: dict[str, Any] | None = None) -> list[list[int]] | None:
    """The token ids of every instance of a split, padding left out; None where it holds none (as training splits, and
    what earlier versions extracted). Errors as in `read_layer`."""
    parts = _read_parts(folder, manifest or read_manifest(folder), ["mask"], ["ids"])
    if any("ids" not in part for part in parts):
        return None
    return [ids[mask].tolist() for part in parts for ids, mask in zip(part["ids"], part["mask"], strict=True)]


def _read_parts(
    folder: Path, manifest: dict[str, Any], names: Sequence[str], optional: Sequence[str] = ()
) -> list[dict[str, Tensor]]:
    """These tensors (and `causal` and the optional ones, where they are) of every shard."""
    parts: list[dict[str, Tensor]] = []
    for number in range(-(-manifest["instances"] // manifest["shard_size"])):
        path = folder / shard_name(number)
        try:
            with safe_open(path, "pt") as shard:
                wanted = [*names, *({"causal", *optional} & set(shard.keys()))]
                parts.append({name: shard.get_tensor(name) for name in wanted})
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path}: damaged, delete it and extract again ({error})") from None
    return parts


def join_layer(
    parts: Sequence[dict[str, Tensor]], layer: int, alpha: float, gold_mass: float | None = None
) -> LayerData:
    """One layer of several shards (as `extract_batch` makes them) as one."""
    q, k, mask = (torch.cat([part[name] for part in parts]) for name in (f"q.{layer}", f"k.{layer}", "mask"))
    kept = f"gold_offsets.{layer}" in parts[0]
    stored = None if not kept else _join_edges(parts, layer, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    return LayerData(q, k, mask, stored, "causal" in parts[0], alpha, parts[0][f"scale.{layer}"], gold_mass)


def _join_edges(parts: Sequence[dict[str, Tensor]], layer: int, shape: tuple[int, int, int, int]) -> Edges:
    offsets = [torch.zeros(1, dtype=torch.int64)]
    for part in parts:
        offsets.append(part[f"gold_offsets.{layer}"][1:] + offsets[-1][-1])
    return Edges(torch.cat(offsets), torch.cat([part[f"gold_flat.{layer}"] for part in parts]).long(), shape)


def shard_name(number: int) -> str:
    """The file name of a shard."""
    return f"shard-{number:05d}.safetensors"


def _parts(chunks: Sequence[Sequence[int]], size: int) -> Iterator[Sequence[Sequence[int]]]:
    for start in range(0, len(chunks), size):
        yield chunks[start : start + size]


def _claim(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest into a new folder, or make sure that the folder's is the same."""
    path = folder / MANIFEST
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            known = json.loads(path.read_text(encoding="utf-8"))
            wanted = json.loads(json.dumps(manifest))
            different = sorted(name for name in {*known, *wanted} if known.get(name) != wanted.get(name))
            if different:
                raise ConfigError(
                    f"{folder}: holds shards of another configuration ({', '.join(different)} differ); "
                    "delete the folder or choose another --out"
                )
            return
        write_text(path, json.dumps(manifest, indent=1, sort_keys=True))
    except OSError as error:
        raise DataError(f"{folder}: expected a folder that can be written, got {error.strerror or error}") from None
    except (ValueError, AttributeError):
        raise ConfigError(f"{path}: expected a manifest; delete the folder or choose another --out") from None


def write_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, str] | None = None) -> None:
    """A safetensors file that appears whole or not at all. DataError where it cannot be written."""
    with whole_file(path) as temporary:
        save_file(tensors, temporary, about)
