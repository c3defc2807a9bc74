"""MOS (Huang and Li, 2021): classes in groups, each group with one more class for all that belongs to the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap_bench.classifiers.training import Moment, TrainConfig, TrainingMethod, body_and_head


@dataclass(frozen=True)
class Config(TrainConfig):
    """How many groups there are."""

    groups: int = 3


class Grouped(nn.Module):
    """A softmax in every group; `group` is the one of each class, (C,)."""

    group: Tensor

    def __init__(self, net: nn.Sequential, groups: int) -> None:
        super().__init__()
        self.body, head = body_and_head(net)
        self.classes, device = head.out_features, head.weight.device
        self.head = nn.Linear(head.in_features, self.classes + groups, device=device)
        self.register_buffer("group", torch.arange(self.classes, device=device) * groups // self.classes)

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """log p_c in the group of c, (B, C); log p_others of every group, (B, G)."""
        logits = self.head(self.body(x))
        classes, others = logits[:, : self.classes], logits[:, self.classes :]
        inside = F.one_hot(self.group, others.shape[1]).bool()  # (C, G)
        masked = classes[:, :, None].masked_fill(~inside, -torch.inf)
        total = torch.cat([masked, others[:, None]], 1).logsumexp(1)
        return classes - total[:, self.group], others - total

    def forward(self, x: Tensor) -> Tensor:
        """The largest is the class that is likeliest in its group: (B, ...) -> (B, C)."""
        return self.both(x)[0]


def mos_loss(net: Grouped, x: Tensor, y: Tensor, config: Config, moment: Moment) -> Tensor:
    """The cross-entropies of all groups: −log p_y − Σ_g log p_others of the groups g that do not hold y."""
    classes, others = net.both(x)
    away = 1 - F.one_hot(net.group[y], others.shape[1])
    return -(classes.gather(1, y[:, None])[:, 0] + (others * away).sum(1)).mean()


def form_groups(net: Grouped, x: Tensor, y: Tensor, config: Config, seed: int) -> None:
    """Cut the classes into runs of equal size along the first principal axis of their mean images, so that a group is alike."""
    means = torch.stack([x[y == c].double().mean(0).flatten() for c in range(net.classes)])
    means = means - means.mean(0)
    axis = torch.linalg.svd(means, full_matrices=False).Vh[0]
    order = (means @ axis * axis[axis.abs().argmax()].sign()).argsort()  # the sign of an axis is arbitrary
    net.group[order.to(net.group.device)] = net.group.sort().values


METHOD = TrainingMethod(
    Config, mos_loss, lambda net, x, config: net.both(x)[1].amin(1),  # the logarithm of the smallest p_others
    lambda net, config: Grouped(net, config.groups), begin=form_groups,
)  # fmt: skip
