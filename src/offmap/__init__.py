"""offmap tells when a neural network is off the map of its training data."""

from __future__ import annotations

from offmap import errors
from offmap._version import __version__
from offmap.core.distribution import Parameterization, WeightDistribution
from offmap.core.inputs import shared
from offmap.detection import Detector, detect, detect_all
from offmap.diagnosis import Diagnosis, diagnose
from offmap.errors import OffmapError
from offmap.evaluation import Evaluation, evaluate
from offmap.guarding.answer import Answer, Interval
from offmap.guarding.build import fit, guard
from offmap.guarding.file import load
from offmap.guarding.guard import Guard
from offmap.guarding.mixture import Mixture, mixture
from offmap.guarding.quick import OnePass, one_pass
from offmap.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Prediction
from offmap.methods.maxwent import Config
from offmap.methods.protocol import Predictive, Scorer
from offmap.report.evaluated import write_page

__all__ = [
    "Answer",
    "Bernoulli",
    "Categorical",
    "Config",
    "Detector",
    "Diagnosis",
    "Evaluation",
    "Gaussian",
    "Guard",
    "Interval",
    "Likelihood",
    "Mixture",
    "OffmapError",
    "OnePass",
    "Parameterization",
    "Prediction",
    "Predictive",
    "Scorer",
    "WeightDistribution",
    "__version__",
    "detect",
    "detect_all",
    "diagnose",
    "errors",
    "evaluate",
    "fit",
    "guard",
    "load",
    "mixture",
    "one_pass",
    "shared",
    "write_page",
]
