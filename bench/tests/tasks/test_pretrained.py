"""ResNet-50 gives what an independent implementation gives with the same weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import ResNetConfig, ResNetModel

from offmap.errors import DataError
from offmap_bench.tasks.pretrained import ResNet50, resnet50


def torchvision_name(name: str) -> str:
    """The name of a parameter in transformers, as torchvision has it."""
    kind = {"convolution": "conv", "normalization": "bn"}
    if found := re.fullmatch(r"embedder\.embedder\.(\w+)\.(.+)", name):
        return f"{kind[found[1]]}1.{found[2]}"
    if found := re.fullmatch(r"encoder\.stages\.(\d)\.layers\.(\d)\.shortcut\.(\w+)\.(.+)", name):
        return f"layer{int(found[1]) + 1}.{found[2]}.downsample.{int(found[3] == 'normalization')}.{found[4]}"
    found = re.fullmatch(r"encoder\.stages\.(\d)\.layers\.(\d)\.layer\.(\d)\.(\w+)\.(.+)", name)
    return f"layer{int(found[1]) + 1}.{found[2]}.{kind[found[4]]}{int(found[3]) + 1}.{found[5]}"


@pytest.fixture(scope="module")
def other() -> ResNetModel:
    torch.manual_seed(0)
    net = ResNetModel(ResNetConfig()).eval()
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, 0.5, 1.0)
            torch.nn.init.normal_(module.bias, std=0.1)
            torch.nn.init.normal_(module.running_mean, std=0.1)
            torch.nn.init.uniform_(module.running_var, 0.5, 2.0)
    return net


def test_features_agree_with_an_independent_resnet(other: ResNetModel, tmp_path: Path) -> None:
    state = {torchvision_name(name): value for name, value in other.state_dict().items()}
    state |= {"fc.weight": torch.zeros(1000, 2048), "fc.bias": torch.zeros(1000)}
    torch.save(state, tmp_path / "resnet50.pth")
    net = resnet50(tmp_path / "resnet50.pth")
    x = torch.randn(2, 3, 96, 64)
    with torch.no_grad():
        torch.testing.assert_close(net(x), other(x).pooler_output.flatten(1), rtol=1e-4, atol=1e-4)
    assert not net.training


def test_its_parameters_are_as_many_as_in_the_paper() -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in ResNet50().parameters()) == 25_557_032 - 2049 * 1000  # without the last layer


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "resnet50.pth"
    with pytest.raises(DataError, match="ResNet-50 at .*resnet50.pth, but there is no such file. Put https://"):
        resnet50(path)
    path.write_bytes(b"not weights")
    with pytest.raises(DataError, match="ResNet-50 at .*resnet50.pth, but it cannot be read"):
        resnet50(path)
    torch.save({"conv1.weight": torch.zeros(3)}, path)
    with pytest.raises(DataError, match="265 are missing or of another shape, such as 'conv1.weight'"):
        resnet50(path)
    torch.save([1], path)
    with pytest.raises(DataError, match="265 are missing"):
        resnet50(path)


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    torch.save({"conv1.weight": Trap()}, tmp_path / "resnet50.pth")
    with pytest.raises(DataError, match="cannot be read"):
        resnet50(tmp_path / "resnet50.pth")
    assert not (tmp_path / "sprung").exists()
