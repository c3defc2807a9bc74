"""`offmap assess`: what a guard can and cannot see, as its fit measured it."""

from __future__ import annotations

from offmap.cli import options as opt
from offmap.cli.options import load_guard, print_result


def assess(
    guard: opt.GuardPath,
    model: opt.Model = None,
    weights: opt.Weights = None,
    trust_model: opt.TrustModel = False,
    as_json: opt.Json = False,
) -> None:
    """Show which shifts a guard can and cannot see.

    Gives AUROC and the share of rows flagged, without OOD data: the fit held out parts of the training rows in turn, and
    corrupted validation rows. The model was trained on the parts that were held out, so real shifts may be easier or harder.

    \b
    Example:
      offmap assess guard.safetensors --model my_module:make_model
    """  # noqa: D301
    loaded, _ = load_guard(guard, model, weights or (), trust_model)
    assessment = loaded.assess()
    shares = ", ".join(f"{name} {weight:.2f}" for name, weight in assessment.weights.items())
    text = f"What {guard} can see, from in-distribution data alone\n{assessment}\nWeights of the score: {shares}"
    print_result(as_json, {"guard": guard, **assessment.to_dict()}, text)
