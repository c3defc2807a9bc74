"""A module that files tensors under the model's dotted names, so that its state dict reads like the model's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn


class NamedTensors(nn.Module):
    """Tensors by dotted name, as parameters (`trainable`) or buffers, not copied; a read-only mapping.

    >>> import torch
    >>> mirror = NamedTensors({"fc.weight": torch.zeros(2, 3), "scale": torch.ones(1)}, trainable=True)
    >>> sorted(mirror.state_dict()), mirror["fc.weight"].shape
    (['fc.weight', 'scale'], torch.Size([2, 3]))
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, trainable: bool = False) -> None:
        super().__init__()
        self.names = tuple(tensors)
        for name, tensor in tensors.items():
            *path, leaf = name.split(".")
            room: nn.Module = self
            for step in path:
                # filed by hand: a model may have a layer called `values`, which `add_module` would refuse here
                room = vars(room)["_modules"].setdefault(step, nn.Module())
            if trainable:
                vars(room)["_parameters"][leaf] = nn.Parameter(tensor.detach())
            else:
                vars(room)["_buffers"][leaf] = tensor

    def __getitem__(self, name: str) -> Tensor:
        *path, leaf = name.split(".")
        room: nn.Module = self
        for step in path:
            room = vars(room)["_modules"][step]
        parameters = vars(room)["_parameters"]
        return parameters[leaf] if leaf in parameters else vars(room)["_buffers"][leaf]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Pairs of name and tensor, in the model's order."""
        return ((name, self[name]) for name in self.names)

    def values(self) -> Iterator[Tensor]:
        """The tensors, in the model's order."""
        return (self[name] for name in self.names)
