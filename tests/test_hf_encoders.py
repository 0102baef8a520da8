"""Encoders from small random configurations: verified, padded batches exact, layers keyed right; the others refused."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from sparsefinder.errors import IncompatibleModelError
from sparsefinder.hf import Attached, LayerCall, attach
from sparsefinder.patterns.positional import GlobalTokens, window
from sparsefinder.predictors import Predictor, Tiles, WindowOnly, random_projections

LAYERS, HEADS, WIDTH = 2, 4, 32
SIZES = {
    "vocab_size": 64, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": 48, "max_position_embeddings": 96, "initializer_range": 0.3, "pad_token_id": 1,
    "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
DISTIL = {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 48}
ROUTE: dict[str, dict[str, Any]] = {
    "Bert": {},
    "Roberta": {},
    "XLMRoberta": {},
    "Camembert": {},
    "DistilBert": DISTIL,
    "Electra": {"embedding_size": 16},
    "Albert": {"embedding_size": 16},
    "ModernBert": {"layer_types": ["full_attention", "sliding_attention"], "local_attention": 6},
    "NomicBert": {},
    "Gte": {},
    "EuroBert": {"num_key_value_heads": 2},
    "Esm": {"position_embedding_type": "rotary", "mask_token_id": 3},
    "Ernie": {},
}
REFUSED: dict[str, dict[str, Any]] = {
    "MPNet": {},
    "Deberta": {},
    "DebertaV2": {},
    "Longformer": {"attention_window": 8},
    "BigBird": {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1},
    "RoFormer": {},
}


def make(name: str, more: dict[str, Any], kind: str = "Model") -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **more})
    return getattr(transformers, f"{name}{kind}")(config).eval()


def texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, 64, (1, n), generator=generator) for n in (23, 9, 2)]


def padded(items: list[Tensor]) -> tuple[Tensor, Tensor]:
    ids = torch.full((len(items), max(item.shape[1] for item in items)), SIZES["pad_token_id"])
    for row, item in enumerate(items):
        ids[row, : item.shape[1]] = item
    return ids, torch.arange(ids.shape[1])[None, :] < torch.tensor([item.shape[1] for item in items])[:, None]


def hidden(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    found: Tensor = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    return found


def predictors(model: Any) -> list[Predictor | None]:
    """Random tiles; none where a layer is windowed."""
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * LAYERS
    made = [random_projections(HEADS, 4, WIDTH // HEADS, seed, "bilinear") for seed in range(LAYERS)]
    tiles = [Tiles(projections, keys_per_tile=2) for projections in made]
    return [tile if kind == "full_attention" else None for tile, kind in zip(tiles, kinds, strict=True)]


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(ROUTE))
def test_an_encoder_that_routes(name: str) -> None:
    model = make(name, ROUTE[name])
    ids, mask = padded(texts())
    original = hidden(model, ids, mask)
    softmax = attach(model, alpha=1.0)
    with softmax.using("dense"):
        torch.testing.assert_close(hidden(model, ids, mask)[mask], original[mask], atol=2e-5, rtol=1e-5)
    chosen = predictors(model)
    attached = attach(model, predictors=chosen, positional=window(3) | GlobalTokens(1), tile_size=4)
    outputs = {}
    for mode in ("dense", "sparse"):
        together, calls = seen(attached, mode, ids, mask)
        outputs[mode] = together
        assert [call.layer for call in calls] == list(range(LAYERS))
        planned = [call.plan is not None for call in calls]
        assert planned == [mode == "sparse" and predictor is not None for predictor in chosen]
        for row, item in enumerate(texts()):
            alone, _ = seen(attached, mode, item, torch.ones_like(item, dtype=torch.bool))
            torch.testing.assert_close(together[row, : item.shape[1]], alone[0], atol=2e-5, rtol=1e-5)
    assert (outputs["sparse"] - outputs["dense"])[mask].abs().max() > 1e-3


def seen(attached: Attached, mode: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, list[LayerCall]]:
    calls: list[LayerCall] = []
    with attached.using(mode, observe=calls.append):
        return hidden(attached.model, ids, mask), calls


@torch.no_grad()
def test_a_shared_module_is_told_apart_by_its_turn() -> None:
    model = make("Albert", {"embedding_size": 16, "num_hidden_layers": 3})
    scale = torch.tensor([1.0, 0.5, 0.25])[:, None].expand(3, HEADS)
    ids, mask = padded(texts())
    attached = attach(model, head_scale=scale)
    for _ in range(2):
        _, calls = seen(attached, "dense", ids, mask)
        assert [float(call.scale[0]) for call in calls] == pytest.approx([s * 8**-0.5 for s in (1.0, 0.5, 0.25)])


@torch.no_grad()
@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_windowed_layers_of_an_encoder_see_their_window_only(alpha: float) -> None:
    model = make("ModernBert", ROUTE["ModernBert"])
    attached = attach(model, alpha=alpha, predictors=[WindowOnly(), WindowOnly()], positional=window(3), tile_size=1)
    ids, mask = padded(texts())
    _, calls = seen(attached, "sparse", ids, mask)
    assert [call.legal.radius for call in calls] == [None, 3]  # local_attention = 6: three tokens to either side
    assert [call.plan is None for call in calls] == [False, True]
    call = calls[1]
    far = (torch.arange(23)[:, None] - torch.arange(23)[None, :]).abs() > 3
    assert torch.equal(call.legal.matrix(0), ~far)
    changed = ids.clone()
    changed[0, 12] = (ids[0, 12] + 1) % 60 + 4
    with attached.using("sparse"):
        moved = (hidden(model, changed, mask) - hidden(model, ids, mask))[0].abs().amax(-1) > 0
    assert moved[8:17].any()
    assert not moved[:8].any()  # the layers' radii of 1 and 3 add up
    assert not moved[17:].any()


@torch.no_grad()
def test_a_head_for_masked_words_runs_on_top() -> None:
    model = make("Bert", {}, "ForMaskedLM")
    ids, mask = padded(texts())
    expected = model(input_ids=ids, attention_mask=mask.long()).logits
    with attach(model, alpha=1.0).using("dense"):
        came = model(input_ids=ids, attention_mask=mask.long()).logits
    torch.testing.assert_close(came[mask], expected[mask], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_encoder_that_does_not_route_is_refused_with_the_reason(name: str) -> None:
    model = make(name, REFUSED[name])
    with pytest.raises(IncompatibleModelError, match=rf"{name}Model: .*(calls|replaced)") as caught:
        attach(model)
    assert "\n" not in str(caught.value)
    assert torch.isfinite(model(input_ids=texts()[1]).last_hidden_state).all()  # left as it was
