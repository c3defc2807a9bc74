"""offmap tells when a neural network is off the map of its training data."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from offmap import errors
from offmap._version import __version__
from offmap.data.batch import shared
from offmap.detector import Detector, Interval, Result
from offmap.errors import OffmapError
from offmap.fit import fit, guard  # these are modules too, which are imported before the names are bound to the functions
from offmap.guard import Guard
from offmap.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Prediction
from offmap.maxwent.config import Config
from offmap.posterior.distribution import WeightDistribution
from offmap.posterior.parameterization import Parameterization
from offmap.posterior.predictive import Predictive, Scorer
from offmap.scores.score import Score

if TYPE_CHECKING:
    from offmap.adaptive import AdaptiveThreshold
    from offmap.assessment import Assessment
    from offmap.detectors.posthoc import PostHocDetector, detect, detect_all
    from offmap.diagnosis import Diagnosis, diagnose
    from offmap.ensemble import GuardEnsemble, combine
    from offmap.evaluation import Evaluation, evaluate
    from offmap.export.distill import DistilledGuard, distill
    from offmap.io.guard_file import load
    from offmap.report.evaluation import write_page

__all__ = [
    "AdaptiveThreshold", "Assessment", "Bernoulli", "Categorical", "Config", "Detector", "Diagnosis", "DistilledGuard",
    "Evaluation", "Gaussian", "Guard", "GuardEnsemble", "Interval", "Likelihood", "OffmapError", "Parameterization",
    "PostHocDetector", "Prediction", "Predictive", "Result", "Score", "Scorer", "WeightDistribution", "__version__", "combine",
    "detect", "detect_all", "diagnose", "distill", "errors", "evaluate", "fit", "guard", "load", "shared", "write_page",
]  # fmt: skip

_LAZY = {
    "AdaptiveThreshold": "adaptive", "Assessment": "assessment",
    "PostHocDetector": "detectors.posthoc", "detect": "detectors.posthoc", "detect_all": "detectors.posthoc",
    "Diagnosis": "diagnosis", "diagnose": "diagnosis", "GuardEnsemble": "ensemble", "combine": "ensemble",
    "Evaluation": "evaluation", "evaluate": "evaluation", "DistilledGuard": "export.distill", "distill": "export.distill",
    "load": "io.guard_file", "write_page": "report.evaluation",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module 'offmap' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"offmap.{_LAZY[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
