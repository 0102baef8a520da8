"""The entmax twin of a causal model: scales per head, words and layers as losses, and the artifact that comes of it."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_llama
import torch
from typer.testing import CliRunner

import training.finetune_run as run
import training.finetune_state as finetune_state
from benchmarks import entmax_twin, perplexity
from sparsefinder.artifact import load
from sparsefinder.attaching import attach_artifact
from sparsefinder.entmax import entmax
from sparsefinder.errors import ConfigError, DataError
from sparsefinder.hf import attach
from sparsefinder.teacher import Teacher, load_teacher
from training.cli import app
from training.config import FinetuneConfig, finetune_config
from training.distances import Student, causal_distance, divergence, layers_distance
from training.extract import read_layer
from training.finetune import Density, finetune, measure_causal
from training.finetune_state import State
from training.head_scale import GRID, fit_head_scale
from training.low_rank import add_low_rank, fold_low_rank

LAYERS, HEADS, DIM, TOKENS = tiny_llama.LAYERS, tiny_llama.HEADS, tiny_llama.DIM, 40
TEXTS = [tiny_llama.token_ids(TOKENS, seed) for seed in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save_teacher(tmp_path_factory.mktemp("llama"))


def config(folder: Path, **changes: object) -> FinetuneConfig:
    quick = FinetuneConfig(
        teacher=str(folder), steps=12, batch_size=2, learning_rate=1e-2, scale_rate=0.05, warmup=1, rank=8,
        start_scale=0.25, density=None, positions=20,
    )  # fmt: skip
    return replace(quick, **changes)  # type: ignore[arg-type]


def scaled(folder: Path, scale: torch.Tensor) -> tuple[Teacher, Student]:
    """The original, and a student that is the original with entmax at these scales."""
    student = load_teacher(str(folder))
    return load_teacher(str(folder)), Student(student, attach(student.model, alpha=1.5, head_scale=scale), {})


def uneven(folder: Path) -> Teacher:
    """The model, with heads from diffuse to steep."""
    teacher = load_teacher(str(folder))
    with torch.no_grad():
        for layer in teacher.model.layers:
            layer.self_attn.q_proj.weight *= torch.tensor([0.01, 0.05, 0.2, 1.0]).repeat_interleave(DIM)[:, None]
    return teacher


def head_errors(teacher: Teacher, text: Sequence[int], factor: float) -> torch.Tensor:
    """By the definition, head after head: what entmax at a scale changes in the residual stream."""
    lm = teacher.lm
    inputs: list[dict[str, torch.Tensor]] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda m, a, kwargs: inputs.append(kwargs), with_kwargs=True)
        for layer in lm.model.layers
    ]
    with torch.no_grad():
        lm(input_ids=torch.tensor([text]))
    for hook in hooks:
        hook.remove()
    errors = torch.zeros(LAYERS, HEADS)
    for at, kwargs in enumerate(inputs):
        module = lm.model.layers[at].self_attn
        x, (cos, sin) = kwargs["hidden_states"][0], kwargs["position_embeddings"]
        for h in range(HEADS):
            part, kv = slice(h * DIM, h * DIM + DIM), slice(h // 2 * DIM, h // 2 * DIM + DIM)
            q, k, v = x @ module.q_proj.weight[part].T, x @ module.k_proj.weight[kv].T, x @ module.v_proj.weight[kv].T
            q, k = (z * cos[0] + torch.cat([-z[:, DIM // 2 :], z[:, : DIM // 2]], 1) * sin[0] for z in (q, k))
            for i in range(len(text)):
                scores = (q[i] @ k[: i + 1].T) / math.sqrt(DIM)
                wrong = (entmax(factor * scores, 1.5) - scores.softmax(-1)) @ v[: i + 1]
                errors[at, h] += (module.o_proj.weight[:, part] @ wrong).square().sum().detach()
    return errors


def test_each_head_gets_the_scale_that_changes_its_output_least(folder: Path) -> None:
    text = TEXTS[0][:16]
    found = fit_head_scale(uneven(folder), [text], 1.5)
    errors = torch.stack([head_errors(uneven(folder), text, factor) for factor in GRID], -1)
    assert torch.equal(found, torch.tensor(GRID)[errors.argmin(-1)])
    assert errors.amin(-1).sum() < 0.9 * errors.sum((0, 1)).min()  # better than the best one for all


@pytest.mark.parametrize(
    "changes", [{}, {"local_steps": 12}, {"form": "attention", "learning_rate": 2e-3, "hidden_weight": 0.0}]
)
def test_the_loss_falls(folder: Path, changes: dict[str, object]) -> None:
    losses: list[float] = []
    chosen = config(folder, steps=12, **changes)
    finetune(chosen, [TEXTS], on_step=lambda step, loss, density: losses.append(loss))
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


def test_a_closed_loop_finds_scales_that_no_single_one_matches(folder: Path) -> None:
    student, delta = finetune(config(folder, form="scales", steps=30, start_scale=None, hidden_weight=0.0), [TEXTS])
    assert delta == {}
    assert student.attached.head_scale.unique().numel() == LAYERS * HEADS
    original = load_teacher(str(folder))
    found = measure_causal(original, student.teacher, student.attached, TEXTS)
    for factor in (0.15, 0.25, 0.35, 0.5, 0.7, 1.0):
        _, single = scaled(folder, torch.full((LAYERS, HEADS), factor))
        assert found.divergence < measure_causal(original, single.teacher, single.attached, TEXTS).divergence


def test_distances_are_zero_for_the_original_itself_and_not_for_its_twin(folder: Path) -> None:
    original, own = load_teacher(str(folder)), load_teacher(str(folder))
    ones, generator = torch.ones(LAYERS, HEADS), torch.Generator().manual_seed(0)
    for alpha, low, high in ((1.0, -1e-6, 1e-6), (1.5, 1e-3, 100.0)):
        student = Student(own, attach(own.model, alpha=1.0, head_scale=ones), {})
        student.attached.alpha = alpha
        with torch.no_grad():
            whole = causal_distance(student, original, TEXTS[:2], config(folder), generator)
            layers = layers_distance(student, original, TEXTS[:2])
        assert low <= float(whole) <= high
        assert low <= float(layers) <= high


def test_layers_are_compared_on_the_originals_inputs(folder: Path) -> None:
    """Of two layers, the second does not notice what the first one does."""
    losses = []
    for first in (0.2, 1.5):
        original, student = scaled(folder, torch.tensor([[first] * HEADS, [0.4] * HEADS]))
        with torch.no_grad():
            parts = [layers_distance(student, original, TEXTS[:1]) * LAYERS]
            student.attached.head_scale = torch.tensor([[first] * HEADS, [0.8] * HEADS])
            parts.append(layers_distance(student, original, TEXTS[:1]) * LAYERS)
        losses.append(parts[1] - parts[0])
    torch.testing.assert_close(losses[0], losses[1], atol=1e-5, rtol=1e-4)


def test_divergence_is_the_definition() -> None:
    ours, theirs = torch.randn(1, 3, 5), torch.randn(1, 3, 5)
    for n in range(3):
        p, q = theirs[0, n].double().exp(), ours[0, n].double().exp()
        p, q = p / p.sum(), q / q.sum()
        expected = sum(float(a * (a / b).log()) for a, b in zip(p, q, strict=True))
        assert float(divergence(ours, theirs)[0, n]) == pytest.approx(expected, abs=1e-5)


def test_perplexity_is_the_models_own(folder: Path) -> None:
    original, student = scaled(folder, torch.full((LAYERS, HEADS), 0.5))
    found = measure_causal(original, student.teacher, student.attached, TEXTS[:3])
    for teacher, came in ((original, found.original_perplexity), (student.teacher, found.perplexity)):
        ids = [torch.tensor([text]) for text in TEXTS[:3]]
        with torch.no_grad():
            losses = [float(teacher.lm(input_ids=one, labels=one).loss) for one in ids]
        assert came == pytest.approx(math.exp(sum(losses) / 3), rel=1e-4)
    assert found.texts == 3
    with pytest.raises(DataError, match="at least 2 tokens"):
        measure_causal(original, student.teacher, student.attached, [[5]])


@pytest.mark.parametrize("apart", [1, 7])
def test_density_is_that_of_legal_pairs(folder: Path, apart: int) -> None:
    _, student = scaled(folder, torch.full((LAYERS, HEADS), 0.5))
    calls, density = [], Density(apart=apart)
    with student.attached.using("dense", observe=lambda call: (calls.append(call), density(call))[0]), torch.no_grad():
        student.teacher.model(input_ids=torch.tensor([TEXTS[0]]))
    for layer, call in enumerate(calls):
        for h in range(HEADS):
            kept = pairs = 0
            for i in range(apart // 2, TOKENS, apart):
                scores = float(call.scale[h]) * (call.q[0, h, i] @ call.k[0, h // 2, : i + 1].T)
                kept, pairs = kept + int((entmax(scores, 1.5) > 0).sum()), pairs + i + 1
            assert float(density.shares()[layer, h]) == pytest.approx(kept / pairs, abs=1e-6)


def test_a_low_rank_path_computes_what_its_weight_plus_the_product_does() -> None:
    linear, plain, x = torch.nn.Linear(6, 5), torch.nn.Linear(6, 5), torch.randn(3, 6)
    plain.load_state_dict(linear.state_dict())
    add_low_rank([linear], 2, seed=0)
    assert torch.equal(linear(x), plain(x))  # nothing is added at first
    assert [name for name, w in linear.named_parameters() if w.requires_grad] == ["low_rank.a", "low_rank.b"]
    with torch.no_grad():
        linear.low_rank.b.normal_()
    came, added = linear(x), linear.low_rank.b @ linear.low_rank.a
    torch.testing.assert_close(came, x @ (plain.weight + added).T + plain.bias)
    fold_low_rank(linear)
    assert [name for name, _ in linear.named_parameters()] == ["weight", "bias"]
    torch.testing.assert_close(linear(x), came)


def test_an_interrupted_training_goes_on_to_the_same_end(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune_state, "EVERY", 2)
    chosen, state = config(folder, steps=8), State(tmp_path / "kept.state", {"run": 1})
    expected_student, expected = finetune(chosen, [TEXTS])
    early: list[int] = []
    finetune(chosen, [TEXTS], on_step=lambda step, loss, density: early.append(step), until=3)
    assert early == [0, 1, 2]
    steps: list[int] = []

    def stop(step: int, loss: float, density: float) -> None:
        steps.append(step)
        if step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finetune(chosen, [TEXTS], on_step=stop, state=state)
    student, delta = finetune(chosen, [TEXTS], on_step=lambda step, loss, density: steps.append(step), state=state)
    assert steps == [0, 1, 2, 3, 4, 4, 5, 6, 7]
    assert delta.keys() == expected.keys()
    assert all(torch.equal(delta[name], expected[name]) for name in delta)
    assert torch.equal(student.attached.head_scale, expected_student.attached.head_scale)
    assert state.before > 0
    assert State(state.path, {"run": 2}).read(torch.optim.AdamW([torch.zeros(1)]), torch.zeros(2, 4)) == 0
    state.path.write_bytes(b"no tensors")
    with pytest.raises(DataError, match="damaged"):
        finetune(chosen, [TEXTS], state=state)


def test_from_finetuning_to_a_calibrated_predictor(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"w{n}" for n in range(50)]
    g = torch.Generator().manual_seed(0)
    lines = [" ".join(words[i] for i in torch.randint(50, (8,), generator=g).tolist()) for _ in range(200)]
    text = tmp_path / "text.txt"
    text.write_text("\n".join(lines))
    monkeypatch.setattr(run, "default_texts", lambda split: [" ".join(lines[:20])] if split == "heldout" else [])

    def invoke(*arguments: object) -> str:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
        return result.output

    size = ["--tokens", 40, "--steps", 6, "--batch-size", 2, "--rank", 4, "--density", 0, "--local-steps", 2]
    twin, out = tmp_path / "twin", tmp_path / "run"
    said = invoke("finetune", "--teacher", folder, "--text", text, "--out", twin, *size, "--eval-chunks", 3)
    assert "perplexity" in said
    assert "read text (0 of 1)" in said  # it takes a minute where the texts are the default ones
    with pytest.raises(DataError, match=r"folder that can be written, .*text\.txt is a file"):
        run.finetune_artifact(FinetuneConfig(teacher="not looked for"), text)
    assert not (tmp_path / "twin.state").exists()
    artifact = load(twin)
    assert artifact.card.alpha == 1.5
    assert artifact.card.training["finetune"]["held_out"]["default held-out"]["texts"] == 3
    student = load_teacher(str(folder))
    attached = attach_artifact(student, artifact)
    figures = measure_causal(load_teacher(str(folder)), student, attached, TEXTS[:3])
    assert figures.perplexity != figures.original_perplexity

    sizes = ["--tokens", 40, "--instances", 4, "--heldout", 4, "--steps", 4, "--tile-size", 8, "--window", 3]
    invoke("run", "--teacher", folder, "--artifact", twin, "--text", text, "--out", out, *sizes)
    invoke("calibrate", "--artifact", out / "artifact", "--data", out / "shards", "--density", 0.6)
    served = load(out / "artifact")
    assert served.card.alpha == 1.5
    assert served.card.gold_mass is None
    assert served.delta.keys() == artifact.delta.keys()
    assert served.card.head_scale == artifact.card.head_scale
    data = read_layer(out / "shards" / "heldout", 1)
    scores = data.scale[:, None, None] * data.q[0] @ data.k[0].repeat_interleave(2, 0).transpose(-1, -2)
    legal = torch.ones(40, 40, dtype=torch.bool).tril()
    assert data.causal
    assert int((entmax(scores, 1.5, legal) > 0).sum()) == int(data.edges.offsets[HEADS])


def test_the_table_of_steps_names_them_and_starts_at_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    words = [" ".join(f"w{i}" for i in torch.randint(50, (400,), generator=g).tolist()) for _ in range(4)]
    for module in (entmax_twin, perplexity):
        monkeypatch.setattr(module, "default_texts", lambda *_: words)
    rows = entmax_twin.main(["--teacher", str(folder), "--quick", "--loop-steps", "2"])["rows"]
    assert [row["row"] for row in rows] == [
        "softmax", "entmax, one scale 0.25", "scale per head, local", "scale per head, closed loop",
    ]  # fmt: skip
    assert (rows[0]["to_softmax"], rows[0]["density"]) == (1, 1)
    assert all(0 < row["density"] < 1 and math.isfinite(row["perplexity"]) for row in rows[1:])


def test_what_is_not_given_comes_from_the_teachers_own_configuration() -> None:
    assert finetune_config("smollm2").density is None
    assert finetune_config("minilm") == FinetuneConfig()
    with pytest.raises(ConfigError, match="density"):
        replace(FinetuneConfig(), density=0.0)
