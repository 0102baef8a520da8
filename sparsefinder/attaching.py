"""From a teacher and an artifact to a model that attends sparsely, in one step."""

import torch

from sparsefinder.artifact import Artifact, Card
from sparsefinder.attention.crossover import ExpectedDensity
from sparsefinder.delta import apply_delta
from sparsefinder.errors import ArtifactError, IncompatibleModelError
from sparsefinder.hf import Attached, attach
from sparsefinder.patterns.positional import GlobalTokens, window
from sparsefinder.predictors import predictor_to
from sparsefinder.teacher import Teacher
from sparsefinder.working_points import read_points


def attach_artifact(teacher: Teacher, artifact: Artifact) -> Attached:
    """Add the artifact's delta to the teacher's model and replace its attention, in place.

    Afterwards the model runs `sparse`; `Attached.using` chooses another mode. Load the teacher a second time to keep
    the `original` beside it.

    Raises:
        IncompatibleModelError: the artifact was trained for another teacher, or the model cannot be verified.
        ArtifactError: the delta does not fit the model, or a layer without a sliding window has no predictor.
    """
    card = artifact.card
    if card.teacher_fingerprint != teacher.fingerprint:
        expected, came = teacher.fingerprint[:12], card.teacher_fingerprint[:12]
        named = f"expected one for teacher {expected} ({teacher.name}), got one for {came} ({card.teacher})"
        raise IncompatibleModelError(f"artifact: {named}")
    apply_delta(teacher.model, artifact.delta)
    device = next(teacher.model.parameters()).device
    attached = attach(
        teacher.model,
        alpha=card.alpha,
        head_scale=torch.tensor(card.head_scale),
        predictors=[None if predictor is None else predictor_to(predictor, device) for predictor in artifact.layers],
        positional=window(card.window_size) | GlobalTokens(card.global_tokens),
        tile_size=card.tile_size,
    )
    attached.expected = expected_density(card)
    attached.points, attached.point_tokens = read_points(card.calibration), card.calibration.get("tokens", 0)
    for layer, (predictor, caller) in enumerate(zip(artifact.layers, attached.callers, strict=True)):
        if predictor is None and caller.radius is None:
            raise ArtifactError(f"layer {layer}: expected a predictor, since it attends to the whole text, got none")
    return attached


def expected_density(card: Card) -> tuple[ExpectedDensity | None, ...]:
    """The computed density of each layer's plans in the artifact's calibration; None where its card says none."""
    layers, tokens = card.calibration.get("plan", {}).get("layers", {}), card.calibration.get("tokens")
    shares = layers.get("computed_density", ())
    if len(shares) != card.layers or not tokens:
        return (None,) * card.layers
    return tuple(None if share is None else ExpectedDensity(share, tokens) for share in shares)
