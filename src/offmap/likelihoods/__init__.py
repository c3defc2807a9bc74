"""What an output says about a target: Gaussian, Categorical, Bernoulli, and the rule that infers which.

Stacked outputs have the draw axis first: (P, B, ...). NLLs are in nats and include constants; where a row has several positions
(pixels, tokens) they are averaged over them, and class targets of −100 are left out, as everywhere in torch.
"""

from offmap.likelihoods.classification import Bernoulli, Categorical
from offmap.likelihoods.gaussian import Gaussian, ScaledGaussian
from offmap.likelihoods.likelihood import LIKELIHOODS, Likelihood, Prediction, align_targets, check_counted, infer, resolve

LIKELIHOODS.update(gaussian=Gaussian, categorical=Categorical, bernoulli=Bernoulli)
LIKELIHOODS["scaled-gaussian"] = ScaledGaussian  # of estimators, for their files

__all__ = [
    "LIKELIHOODS", "Bernoulli", "Categorical", "Gaussian", "Likelihood", "Prediction", "ScaledGaussian", "align_targets",
    "check_counted", "infer", "resolve",
]  # fmt: skip
