"""All ways to train a classifier by name. The paper's CSI, MOS, OpenGAN, CutPaste, DRAEM and PixMix are not among them."""

from __future__ import annotations

from offmap_bench.classifiers import arpl, confidence, cutmix, dropout, godin, logitnorm, mixup, svdd, vos
from offmap_bench.classifiers.training import TrainingMethod

WAYS: dict[str, TrainingMethod] = {
    "plain": TrainingMethod(),
    "dropout": dropout.WAY,
    "mixup": mixup.WAY,
    "cutmix": cutmix.WAY,
    "logitnorm": logitnorm.WAY,
    "confidence": confidence.WAY,
    "godin": godin.WAY,
    "arpl": arpl.WAY,
    "vos": vos.WAY,
    "svdd": svdd.WAY,
}
