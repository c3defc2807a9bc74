from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from offmap.errors import ConfigError, DataError
from offmap_bench.tasks.uci import MODES, SETS, halves, read, split, uci

ROWS = {
    "yacht": 308,
    "energy": 768,
    "concrete": 1030,
    "wine": 1599,
    "power": 9568,
    "naval": 11934,
    "protein": 45730,
    "kin8nm": 8192,
}
COLUMNS = {"yacht": 6, "energy": 8, "concrete": 8, "wine": 11, "power": 4, "naval": 16, "protein": 9, "kin8nm": 8}


def write(folder: Path, text: str, name: str = "yacht") -> None:
    with gzip.open(folder / f"{name}.csv.gz", "wt") as file:
        file.write(text)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SETS)
def test_every_row_is_used_once_and_in_the_shares_of_the_protocol(name: str, mode: str, data_folder: Path) -> None:
    task = uci(name, mode, folder=data_folder / "uci")
    sizes = [len(part[1]) for part in (task.train, task.valid, task.test)]
    assert task.name == f"uci/{name}/{mode}"
    assert list(task.ood) == [mode]
    assert task.inputs == COLUMNS[name]
    assert sum(sizes) + len(task.ood[mode]) == ROWS[name]
    assert abs(sum(sizes) - ROWS[name] / 2) <= 1
    assert abs(sizes[2] - 0.1 * sum(sizes)) < 1
    assert abs(sizes[1] - 0.05 * (sizes[0] + sizes[1])) < 1


def test_the_middle_half_along_the_first_principal_component_is_internal(data_folder: Path) -> None:
    x = read("concrete", data_folder / "uci")[:, :-1]
    internal, external = halves(x)
    z = (x - x.mean(0)) / x.std(0)
    along = z @ np.linalg.svd(z, full_matrices=False)[2][0]  # another route to the same axis, of either sign
    assert sorted([*internal, *external]) == list(range(len(x)))
    low, high = along[internal].min(), along[internal].max()
    assert np.all((along[external] <= low + 1e-8) | (along[external] >= high - 1e-8))
    assert abs((along[external] <= low + 1e-8).mean() - 0.5) < 0.01


def test_modes_exchange_in_distribution_and_ood_rows(data_folder: Path) -> None:
    outside, inside = (uci("yacht", mode, folder=data_folder / "uci") for mode in MODES)
    id_rows = torch.cat([p[1] for p in (outside.train, outside.valid, outside.test)])
    assert len(id_rows) == len(inside.ood["interpolation"])


def test_training_data_are_standardised_and_constant_columns_are_only_centred(data_folder: Path) -> None:
    task = uci("naval", "extrapolation", folder=data_folder / "uci")
    x, y = task.train
    spread = x.std(0, correction=0)
    torch.testing.assert_close(x.mean(0), torch.zeros(16), atol=1e-4, rtol=0)
    assert sorted(spread.round(decimals=3).tolist()) == [0.0, 0.0] + [1.0] * 14
    torch.testing.assert_close(torch.stack([y.mean(), y.std(correction=0)]), torch.tensor([0.0, 1.0]), atol=1e-4, rtol=0)
    assert all(bool(t.isfinite().all()) for t in (*task.valid, *task.test, *task.ood.values()))


def test_a_seed_decides_the_split_and_not_the_halves(data_folder: Path) -> None:
    first, again, other = (uci("yacht", "extrapolation", seed, data_folder / "uci") for seed in (1, 1, 2))
    assert torch.equal(first.train[0], again.train[0])
    assert torch.equal(first.test[1], again.test[1])
    assert not torch.equal(first.train[0], other.train[0])
    assert first.ood["extrapolation"].shape == other.ood["extrapolation"].shape


def test_rows_that_tie_up_to_rounding_keep_the_order_of_the_file() -> None:
    x = np.array([0.0, 1.0, 1.0 + 1e-14, 1.0, 1.0 - 1e-14, 1.0, 2.0, 3.0])[:, None]
    internal, external = halves(x)
    assert internal.tolist() == [2, 3, 4, 5]
    assert external.tolist() == [0, 1, 6, 7]


def test_the_three_parts_do_not_overlap() -> None:
    parts = split(np.arange(100), 3)
    assert sorted(np.concatenate(parts)) == list(range(100))


def test_a_missing_folder_says_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OFFMAP_DATA", raising=False)
    with pytest.raises(DataError, match="Expected OFFMAP_DATA to name the folder of downloaded data sets, but it is not set."):
        uci("yacht", "extrapolation")
    monkeypatch.setenv("OFFMAP_DATA", str(tmp_path))
    with pytest.raises(DataError, match="but there is no such file. Put it there .* or set OFFMAP_DATA"):
        uci("yacht", "extrapolation")


@pytest.mark.parametrize(
    ("text", "message"),
    [("a,b\n1,x\n", "cannot be read"), ("a,b\n1,nan\n2,3\n", "not finite"), ("a\n1\n2\n", "missing or not finite")],
)
def test_a_damaged_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    write(tmp_path, text)
    with pytest.raises(DataError, match=f"yacht.csv.gz.*{message}"):
        uci("yacht", "extrapolation", folder=tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, "a,b\n" + "1,2\n" * 1000)
    path = tmp_path / "yacht.csv.gz"
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(DataError, match="yacht.csv.gz, but it cannot be read"):
        uci("yacht", "extrapolation", folder=tmp_path)


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'yacht'.*but got 'yatch'"):
        uci("yatch", "extrapolation")
    with pytest.raises(ConfigError, match="did you mean 'extrapolation'.*but got 'extra'"):
        uci("yacht", "extra")


def test_the_unit_gives_the_targets_of_the_file_back(data_folder: Path) -> None:
    task, raw = uci("yacht", MODES[0], folder=data_folder / "uci"), read("yacht", data_folder / "uci")[:, -1]
    internal, _ = halves(read("yacht", data_folder / "uci")[:, :-1])
    y = task.unit * torch.cat([part[1] for part in (task.train, task.valid, task.test)]).double().sort().values
    theirs = torch.tensor(raw[internal]).sort().values
    torch.testing.assert_close(y - y[0], theirs - theirs[0], rtol=0, atol=1e-4)
