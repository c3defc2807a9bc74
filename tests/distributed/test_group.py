"""What of the data is whose: every row is someone's, and no row is two ranks', but in batches that are too short to divide."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from offmap.data import Batches, Place, Rows, Shard, as_batches
from offmap.distributed.group import Group, shard_slice

PLACE = Place(torch.device("cpu"), torch.float32)


@dataclass(frozen=True)
class Seat(Group):
    """A rank of some size that is asked for nothing but that."""

    rank: int = 0
    size: int = 1


class Endless(IterableDataset[Any]):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self):
        return ((torch.tensor([float(i)]), torch.tensor(float(i))) for i in range(self.rows))


def data(form: str, rows: int, size: int) -> Batches:
    x = torch.arange(float(rows))[:, None]
    forms: dict[str, Any] = {
        "rows": (x, x[:, 0]),
        "dataset": TensorDataset(x, x, x),
        "loader": DataLoader(TensorDataset(x, x[:, 0]), batch_size=size),
        "iterable": DataLoader(Endless(rows), batch_size=size),
    }
    return as_batches(forms[form], PLACE, name="train", batch_size=size)


def targets(source: Batches) -> list[list[float]]:
    return [y.tolist() for _, y in source]


@pytest.mark.parametrize("form", ["rows", "loader", "iterable"])
@given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 5))
def test_shards_cover_all_batches_and_all_rows(form: str, rows: int, size: int, ranks: int) -> None:
    source = data(form, rows, size)
    whole = targets(source)

    def shares(of: Literal["batches", "rows"]) -> list[list[list[float]]]:
        return [targets(replace(source, shard=Shard(Seat(rank, ranks), of))) for rank in range(ranks)]

    dealt = shares("batches")
    assert [dealt[i % ranks][i // ranks] for i in range(len(whole))] == whole
    assert sum(map(len, dealt)) == len(whole)
    divided = shares("rows")
    for number, batch in enumerate(whole):
        parts = [own[number] for own in divided]
        assert parts == [batch] * ranks if len(batch) < ranks else [y for own in parts for y in own] == batch


@given(st.integers(0, 40), st.integers(1, 9))
def test_parts_of_rows_are_even_and_cover_all(rows: int, ranks: int) -> None:
    parts = [range(rows)[shard_slice(Seat(rank, ranks), rows)] for rank in range(ranks)]
    assert [i for own in parts for i in own] == list(range(rows))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_shuffling_loader_shuffles_alike_on_every_rank() -> None:
    x = torch.arange(12.0)[:, None]
    loader = DataLoader(TensorDataset(x, x[:, 0]), batch_size=4, shuffle=True)
    seen: list[list[list[float]]] = []
    for group in (Group(), Seat(0, 2), Seat(1, 2)):
        torch.manual_seed(3)
        source = as_batches(loader, PLACE, name="train")
        seen.append(targets(source if group.size == 1 else replace(source, shard=Shard(group, "rows"))))
    assert [a + b for a, b in zip(seen[1], seen[2], strict=True)] == seen[0]


def test_data_in_memory_are_shared_when_shuffled_too() -> None:
    source = Rows(torch.arange(7.0)[:, None], torch.arange(7.0), 4, "train")
    whole = [y.tolist() for _, y in source.iter_shuffled(1, 2)]
    parts = [[y.tolist() for _, y in replace(source, shard=Shard(Seat(r, 2), "rows")).iter_shuffled(1, 2)] for r in (0, 1)]
    assert [a + b for a, b in zip(*parts, strict=True)] == whole
