"""All trainings of image classifiers by name."""

from __future__ import annotations

from offmap_bench.classifiers import csi, cutpaste, draem, losses, mos, opengan, pixmix
from offmap_bench.classifiers.training import BodyAndHead, TrainingMethod

TRAININGS: dict[str, TrainingMethod] = {
    "plain": TrainingMethod(),
    "dropout": TrainingMethod(
        losses.DropoutConfig, losses.dropout_loss, losses.dropout_score, lambda net, config: BodyAndHead(net)
    ),
    "mixup": TrainingMethod(losses.MixupConfig, losses.mixup_loss),
    "cutmix": TrainingMethod(loss=losses.cutmix_loss),
    "logitnorm": TrainingMethod(losses.LogitNormConfig, losses.logitnorm_loss),
    "confidence": TrainingMethod(
        losses.ConfidenceConfig, losses.confidence_loss,
        lambda net, x, config: -net.both(x)[1],  # the logit of 1 − c
        lambda net, config: losses.Branched(net, config.price),
    ),
    "godin": TrainingMethod(
        score=lambda net, x, _: -net.score_at(x, float(net.step)), build=lambda net, config: losses.Quotient(net),
        settle=losses.choose_step,
    ),
    "arpl": TrainingMethod(
        losses.ARPLConfig,
        lambda net, x, y, config, moment: losses.bounded_loss(net.body(x), net.points, net.radius, y, config.bound),
        lambda net, x, config: -net(x).amax(1),  # what is far from no reciprocal point belongs to no class
        lambda net, config: losses.Reciprocal(net),
    ),
    "vos": TrainingMethod(
        losses.VOSConfig, losses.vos_loss, lambda net, x, config: net.energy(net.body(x)),
        lambda net, config: losses.Energetic(net, config.queue),
    ),
    "svdd": TrainingMethod(
        losses.SVDDConfig, lambda net, x, y, config, moment: net(x).mean(), lambda net, x, config: net(x),
        lambda net, config: losses.Drawn(net, config.width), begin=losses.place_centre, classes=False,
    ),
    **{module.__name__.rpartition(".")[2]: module.METHOD for module in (csi, cutpaste, draem, mos, opengan, pixmix)},
}  # fmt: skip
