"""offmap tells when a neural network is off the map of its training data."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from offmap._version import __version__
from offmap.fit import fit, guard  # at once: these are modules too, and importing those would bind the names to them

if TYPE_CHECKING:
    from offmap import errors
    from offmap.data.batch import shared
    from offmap.detector import Detector, Interval, Result
    from offmap.detectors.posthoc import PostHocDetector, detect, detect_all
    from offmap.diagnosis import Diagnosis, diagnose
    from offmap.ensemble import GuardEnsemble, combine
    from offmap.errors import OffmapError
    from offmap.evaluation import Evaluation, evaluate
    from offmap.export.distill import DistilledGuard, distill
    from offmap.guard import Guard
    from offmap.io.guard_file import load
    from offmap.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Prediction
    from offmap.maxwent.config import Config
    from offmap.posterior.distribution import Parameterization, WeightDistribution
    from offmap.posterior.predictive import Predictive, Scorer
    from offmap.report.evaluation import write_page
    from offmap.scores.score import Score

__all__ = [
    "Bernoulli", "Categorical", "Config", "Detector", "Diagnosis", "DistilledGuard", "Evaluation", "Gaussian", "Guard",
    "GuardEnsemble", "Interval", "Likelihood", "OffmapError", "Parameterization", "PostHocDetector", "Prediction", "Predictive",
    "Result", "Score", "Scorer", "WeightDistribution", "__version__", "combine", "detect", "detect_all", "diagnose", "distill",
    "errors", "evaluate", "fit", "guard", "load", "shared", "write_page",
]  # fmt: skip

_MODULES = {
    "data.batch": ("shared",),
    "detector": ("Detector", "Interval", "Result"),
    "detectors.posthoc": ("PostHocDetector", "detect", "detect_all"),
    "diagnosis": ("Diagnosis", "diagnose"),
    "ensemble": ("GuardEnsemble", "combine"),
    "errors": ("OffmapError",),
    "evaluation": ("Evaluation", "evaluate"),
    "export.distill": ("DistilledGuard", "distill"),
    "guard": ("Guard",),
    "io.guard_file": ("load",),
    "likelihoods": ("Bernoulli", "Categorical", "Gaussian", "Likelihood", "Prediction"),
    "maxwent.config": ("Config",),
    "posterior.distribution": ("Parameterization", "WeightDistribution"),
    "posterior.predictive": ("Predictive", "Scorer"),
    "report.evaluation": ("write_page",),
    "scores.score": ("Score",),
}
_WHERE = {name: f"offmap.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _WHERE:
        raise AttributeError(f"module 'offmap' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_WHERE[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
