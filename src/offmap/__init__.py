"""offmap tells when a neural network is off the map of its training data."""

from __future__ import annotations

from offmap import errors
from offmap._version import __version__
from offmap.data.inputs import shared
from offmap.detector import Answer, Interval
from offmap.detectors.posthoc import Detector, detect, detect_all
from offmap.diagnosis import Diagnosis, diagnose
from offmap.distill import OnePass, one_pass
from offmap.ensemble import Mixture, mixture
from offmap.errors import OffmapError
from offmap.evaluation import Evaluation, evaluate
from offmap.fit import fit, guard
from offmap.guard import Guard
from offmap.io.guard_file import load
from offmap.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Prediction
from offmap.maxwent.solve import Config
from offmap.posterior.distribution import Parameterization, WeightDistribution
from offmap.posterior.protocol import Predictive, Scorer
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
