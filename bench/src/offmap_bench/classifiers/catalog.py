"""All trainings of classifiers by name. The paper's CSI, MOS, OpenGAN, CutPaste, DRAEM and PixMix are not among them."""

from __future__ import annotations

from offmap_bench.classifiers import arpl, confidence, cutmix, dropout, godin, logitnorm, mixup, svdd, vos
from offmap_bench.classifiers.training import TrainingMethod

TRAININGS: dict[str, TrainingMethod] = {"plain": TrainingMethod()} | {
    module.__name__.rpartition(".")[2]: module.TRAINING
    for module in (dropout, mixup, cutmix, logitnorm, confidence, godin, arpl, vos, svdd)
}
