"""All detectors of classifiers by name: how each is fitted, and what of the net it needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from offmap import checks
from offmap.detectors import (
    ash,
    dice,
    energy,
    entropy,
    fdbd,
    gen,
    gradnorm,
    gram,
    kl_matching,
    knn,
    mds,
    mls,
    msp,
    odin,
    openmax,
    react,
    scale,
    temperature,
    vim,
)
from offmap.detectors.known import FitData, Rule
from offmap.detectors.penultimate import Classifier
from offmap.errors import ConfigError, ModelError, nearest


@dataclass(frozen=True)
class Kind:
    """A way to fit, and what it needs: "logits", "features" as well, or also the "head" that makes logits of features."""

    fit: Callable[..., Rule]
    needs: str = "logits"

    @property
    def options(self) -> list[str]:
        """Names of its options."""
        return [name for name, p in inspect.signature(self.fit).parameters.items() if p.kind is p.KEYWORD_ONLY]


DETECTORS: dict[str, Kind] = {
    "msp": Kind(msp.fit),
    "mls": Kind(mls.fit),
    "entropy": Kind(entropy.fit),
    "energy": Kind(energy.fit),
    "temperature": Kind(temperature.fit),
    "gen": Kind(gen.fit),
    "kl_matching": Kind(kl_matching.fit),
    "openmax": Kind(openmax.fit),
    "odin": Kind(odin.fit),
    "gradnorm": Kind(gradnorm.fit, "features"),
    "react": Kind(react.fit, "head"),
    "dice": Kind(dice.fit, "head"),
    "ash": Kind(ash.fit, "head"),
    "scale": Kind(scale.fit, "head"),
    "mds": Kind(mds.fit, "features"),
    "knn": Kind(knn.fit, "features"),
    "vim": Kind(vim.fit, "head"),
    "fdbd": Kind(fdbd.fit, "head"),
    "gram": Kind(gram.fit),
}


def kind(method: str, options: dict[str, Any]) -> Kind:
    """The kind of that name; unknown names and options are refused, and the nearest named."""
    checks.word("method", method, DETECTORS)
    known = DETECTORS[method].options
    for option in options:
        if option not in known:
            raise ConfigError(f"Expected options of {method!r} to be {nearest(option, known)}, but got {option!r}.")
    return DETECTORS[method]


def check(method: str, classifier: Classifier) -> None:
    """Raise a HostError that names candidates unless the net has what the method needs."""
    needs, source = DETECTORS[method].needs, classifier.source
    if needs != "logits" and source is None:
        raise ModelError(
            f"Expected a net that ends in one matrix for {method!r}, but no matrix of {type(classifier.net).__name__} gives its "
            f"logits. {classifier.missing}"
        )
    if needs == "head" and source is not None and source.head is None:
        others = [name for name, each in DETECTORS.items() if each.needs != "head"]
        raise ModelError(
            f"Expected features from which one matrix makes the logits for {method!r}, but those of `{source.layer}` are none. "
            f"Leave `features` out, name the layer before the last matrix, or take one of {others}."
        )


def fit(method: str, known: FitData, **options: Any) -> Rule:
    """The rule of that name, fitted.

    >>> sorted(DETECTORS)[:4], DETECTORS["knn"].options
    (['ash', 'dice', 'energy', 'entropy'], ['k'])
    """
    made = kind(method, options)
    check(method, known.classifier)
    return made.fit(known, **options)
