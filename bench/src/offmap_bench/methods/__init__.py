"""Methods that the paper compares with, each a `Competitor` with `Config`, `fit` and `fit_grid`."""

from offmap_bench.methods.ensembles import anchored, dare, deep_ensemble, negative_correlation, overall_diversity, repulsive
from offmap_bench.methods.laplace import laplace
from offmap_bench.methods.mc_dropout import mc_dropout
from offmap_bench.methods.swag import swag
from offmap_bench.methods.variational import bnn, mean_field

__all__ = [
    "anchored", "bnn", "dare", "deep_ensemble", "laplace", "mc_dropout", "mean_field", "negative_correlation",
    "overall_diversity", "repulsive", "swag",
]  # fmt: skip
