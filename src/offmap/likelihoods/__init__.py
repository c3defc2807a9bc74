"""What an output says about a target: Gaussian, Categorical, Bernoulli, and the rule that infers which.

Stacked outputs have the draw axis first: (P, B, ...). NLLs are in nats and include constants; where a row has several positions
(pixels, tokens) they are averaged over them, and class targets of −100 are left out, as everywhere in torch.
"""

from offmap.likelihoods.classes import Bernoulli, Categorical
from offmap.likelihoods.gaussian import Gaussian
from offmap.likelihoods.protocol import Likelihood, Prediction, aligned, averaged
from offmap.likelihoods.rule import check_counted, check_targets, infer, resolve

__all__ = [
    "Bernoulli", "Categorical", "Gaussian", "Likelihood", "Prediction", "aligned", "averaged", "check_counted",
    "check_targets", "infer", "resolve",
]  # fmt: skip
