"""offmap tells when a neural network is off the map of its training data."""

from __future__ import annotations

from offmap import errors
from offmap._version import __version__
from offmap.data.inputs import shared
from offmap.detector import Interval, Result
from offmap.detectors.posthoc import PostHocDetector, detect, detect_all
from offmap.diagnosis import Diagnosis, diagnose
from offmap.ensemble import GuardEnsemble, combine
from offmap.errors import OffmapError
from offmap.evaluation import Evaluation, evaluate
from offmap.export.distill import DistilledGuard, distill
from offmap.fit import fit, guard
from offmap.guard import Guard
from offmap.io.guard_file import load
from offmap.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Prediction
from offmap.maxwent.config import Config
from offmap.posterior.distribution import Parameterization, WeightDistribution
from offmap.posterior.predictive import Predictive, Scorer
from offmap.report.evaluation import write_page

__all__ = [
    "Bernoulli",
    "Categorical",
    "Config",
    "Diagnosis",
    "DistilledGuard",
    "Evaluation",
    "Gaussian",
    "Guard",
    "GuardEnsemble",
    "Interval",
    "Likelihood",
    "OffmapError",
    "Parameterization",
    "PostHocDetector",
    "Prediction",
    "Predictive",
    "Result",
    "Scorer",
    "WeightDistribution",
    "__version__",
    "combine",
    "detect",
    "detect_all",
    "diagnose",
    "distill",
    "errors",
    "evaluate",
    "fit",
    "guard",
    "load",
    "shared",
    "write_page",
]
