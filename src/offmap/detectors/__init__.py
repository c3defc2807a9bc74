"""Post-hoc detectors of a trained classifier, one file each, function first.

A new one is a file that calls `register` on a pure function of a batch's `logits`, `features` or `inputs`; all files of this
folder are imported here, so that no list needs an entry.
"""

import importlib
import pkgutil

from offmap.detectors.classifier import Activations, Classifier, Head
from offmap.detectors.posthoc import DETECTORS, FitData, register

__all__ = ["DETECTORS", "Activations", "Classifier", "FitData", "Head", "register"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
