"""A user's data, whatever its form, become the same batches."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from offmap.data import Place, Rows, as_batches, check_finite, load_rows
from offmap.data.batch import drop_targets, shared, split_batch
from offmap.data.batches import Stream, sample_rows, split_data
from offmap.errors import DataError, ShapeError
from offmap.random import sample
from trained import regression

PLACE = Place(torch.device("cpu"), torch.float32)
X, Y = regression(23)


class Pairs(Dataset[Any]):
    """A map-style data set of (inputs, target)."""

    def __init__(self, x: Tensor = X, y: Tensor = Y) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        return self.x[row], self.y[row]


class Dicts(Pairs):
    def __getitem__(self, row: int) -> Any:
        return {"x": self.x[row], "labels": self.y[row]}


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


FORMS: dict[str, Callable[[], Any]] = {
    "tensors": lambda: (X, Y),
    "list of two": lambda: [X, Y],
    "float64 arrays": lambda: (X.double().numpy(), Y.double().numpy()),
    "float32 arrays": lambda: (X.numpy(), Y.numpy()),
    "read-only arrays": lambda: (np.broadcast_to(X.numpy(), X.shape), Y.numpy()),
    "fortran order": lambda: (np.asfortranarray(X.numpy()), Y.numpy()),
    "reversed views": lambda: (X.flip(0).numpy()[::-1], Y.flip(0).numpy()[::-1]),
    "big-endian": lambda: (X.numpy().astype(">f8"), Y.numpy().astype(">f4")),
    "long doubles": lambda: (X.numpy().astype(np.longdouble), Y.numpy().astype(np.longdouble)),
    "target list": lambda: (X, Y.tolist()),
    "TensorDataset": lambda: TensorDataset(X, Y),
    "Dataset": Pairs,
    "IterableDataset": Endless,
    "DataLoader": lambda: DataLoader(TensorDataset(X, Y), batch_size=5),
    "DataLoader of Dataset": lambda: DataLoader(Pairs(), batch_size=7),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_gives_the_same_rows(form: str) -> None:
    rows = load_rows(as_batches(FORMS[form](), PLACE, name="train", batch_size=4))
    assert rows.inputs.dtype == rows.targets.dtype == torch.float32
    torch.testing.assert_close(rows.inputs, X, rtol=1e-6, atol=0)
    torch.testing.assert_close(rows.targets, Y, rtol=1e-6, atol=0)


def test_arrays_are_not_changed_and_not_written_through() -> None:
    x = X.double().numpy()
    rows = as_batches((x, Y), Place(torch.device("cpu"), torch.float64), name="train")
    before = x.copy()
    assert isinstance(rows, Rows)
    rows.take(torch.arange(3)).inputs.zero_()
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("form", ["dict", "loader", "dataset"])
def test_dict_batches_hold_the_target_under_its_key(form: str) -> None:
    whole = {"x": X, "labels": Y}
    data = {"dict": whole, "loader": DataLoader(Dicts(), batch_size=6), "dataset": Dicts()}[form]
    rows = load_rows(as_batches(data, PLACE, name="train"))
    assert list(rows.inputs) == ["x"]
    assert torch.equal(rows.inputs["x"], X)
    assert torch.equal(rows.targets, Y)
    assert list(whole) == ["x", "labels"]  # the user's dict is as it was


def test_target_key_can_be_named() -> None:
    rows = load_rows(as_batches({"x": X, "y": Y}, PLACE, name="train", target="y"))
    assert torch.equal(rows.targets, Y)


@pytest.mark.parametrize("loader", [False, True])
def test_tuple_inputs_stay_a_tuple(loader: bool) -> None:
    pairs = [((X[i], 2 * X[i]), Y[i]) for i in range(len(X))]
    data = DataLoader(pairs, batch_size=6) if loader else ((X, 2 * X), Y)
    rows = load_rows(as_batches(data, PLACE, name="train"))
    assert isinstance(rows.inputs, tuple)
    assert torch.equal(rows.inputs[1], 2 * X)


@pytest.mark.parametrize(
    ("targets", "dtype"),
    [
        (np.arange(23, dtype=np.int8), torch.int64),
        (np.arange(23, dtype=np.uint16), torch.int64),
        (np.arange(23, dtype=">i4"), torch.int64),
        (np.zeros(23, dtype=bool), torch.bool),
        (np.zeros(23, dtype=np.float16), torch.float32),
        ([1] * 23, torch.int64),
        ([True] * 23, torch.bool),
        ([0.5] * 23, torch.float32),
    ],
)
def test_whole_targets_become_int64_and_floats_take_the_hosts_dtype(targets: Any, dtype: torch.dtype) -> None:
    assert load_rows(as_batches((X, targets), PLACE, name="train")).targets.dtype == dtype


def test_integer_inputs_stay_integers() -> None:
    tokens = torch.arange(23).reshape(23, 1)
    assert load_rows(as_batches((tokens, Y), PLACE, name="train")).inputs.dtype == torch.int64


def test_place_is_that_of_the_first_floating_parameter() -> None:
    assert Place.of(torch.nn.Linear(2, 1).double()).dtype == torch.float64


# ------------------------------------------------------------------------------------------------------------ order


@pytest.mark.parametrize("data", [(X, Y), Pairs()], ids=["rows", "stream"])
def test_order_depends_on_seed_and_epoch_alone(data: Any) -> None:
    made = as_batches(data, PLACE, name="train", batch_size=4)

    def order(seed: int, epoch: int) -> Tensor:
        return torch.cat([y for _, y in made.iter_shuffled(seed, epoch)])

    torch.manual_seed(0)
    first = order(0, 0)
    torch.manual_seed(1)
    assert torch.equal(first, order(0, 0))
    assert not torch.equal(first, order(0, 1))
    assert not torch.equal(first, order(1, 0))
    assert torch.equal(first.sort().values, Y.sort().values)


def test_shuffled_rows_keep_inputs_and_targets_together() -> None:
    made = as_batches(((X, X[:, 0]), X[:, 0]), PLACE, name="train", batch_size=4)
    for (x, first), y in made.iter_shuffled(3, 2):
        assert torch.equal(x[:, 0], y)
        assert torch.equal(first, y)


def test_shuffling_a_data_set_keeps_the_collate_function() -> None:
    def collate(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
        return {"x": torch.stack([x for x, _ in rows]), "labels": [y for _, y in rows]}

    loader = DataLoader(Pairs(), batch_size=4, collate_fn=collate)
    train, valid = split_data(loader, PLACE, fraction=0.1, seed=0, batch_size=128, target="labels")
    seen = torch.cat([y for _, y in train.iter_shuffled(0, 0)])
    held = load_rows(valid)
    assert list(held.inputs) == ["x"]
    assert torch.equal(torch.cat([seen, held.targets]).sort().values, Y.sort().values)


# ------------------------------------------------------------------------------------------------------------ split


@pytest.mark.parametrize("form", ["tensors", "Dataset", "DataLoader", "DataLoader of Dataset"])
def test_split_is_a_partition_that_the_seed_alone_decides(form: str) -> None:
    def parts(seed: int) -> tuple[Tensor, Tensor]:
        train, valid = split_data(FORMS[form](), PLACE, fraction=0.2, seed=seed, batch_size=4, target="labels")
        assert (train.name, valid.name) == ("train", "valid")
        return load_rows(train).targets.sort().values, load_rows(valid).targets.sort().values

    train, valid = parts(0)
    assert (len(train), len(valid)) == (18, 5)
    assert torch.equal(torch.cat([train, valid]).sort().values, Y.sort().values)
    torch.manual_seed(5)
    assert torch.equal(valid, parts(0)[1])
    assert not torch.equal(valid, parts(1)[1])


def test_split_of_all_forms_sets_the_same_rows_aside() -> None:
    forms = ["tensors", "Dataset", "DataLoader"]
    held = [load_rows(split_data(FORMS[f](), PLACE, fraction=0.2, seed=0, batch_size=4, target="labels")[1]) for f in forms]
    assert torch.equal(held[0].targets.sort().values, held[1].targets.sort().values)
    assert torch.equal(held[0].targets.sort().values, held[2].targets.sort().values)


def test_training_part_of_a_split_loader_comes_in_a_new_order_every_epoch() -> None:
    # its rows are sorted by the split; trained on in that order, class-sorted data would go class by class
    train, _ = split_data(FORMS["DataLoader"](), PLACE, fraction=0.2, seed=0, batch_size=4, target="labels")
    epochs = [torch.cat([y for _, y in train.iter_shuffled(0, epoch)]) for epoch in range(2)]
    assert not torch.equal(*epochs)
    assert torch.equal(epochs[0].sort().values, epochs[1].sort().values)


@pytest.mark.parametrize("n", [3, 5, 20, 23])
def test_a_split_sets_at_least_two_rows_aside(n: int) -> None:
    train, valid = split_data((X[:n], Y[:n]), PLACE, fraction=0.1, seed=0, batch_size=4, target="labels")
    assert valid.rows == max(2, round(0.1 * n))
    assert train.rows == n - valid.rows


def test_too_few_rows_to_split() -> None:
    with pytest.raises(DataError, match="at least 3 rows to set 2 aside for validation, but `train` has 2. Pass `valid=`."):
        split_data((X[:2], Y[:2]), PLACE, fraction=0.1, seed=0, batch_size=4, target="labels")


def test_data_without_rows_of_their_own_cannot_be_split() -> None:
    with pytest.raises(DataError, match="Expected `valid=`, .*an iterable data set cannot be split"):
        split_data(DataLoader(Endless()), PLACE, fraction=0.1, seed=0, batch_size=4, target="labels")
    whole = DataLoader(TensorDataset(X.reshape(1, 23, 3), Y.reshape(1, 23)), batch_size=None)
    with pytest.raises(DataError, match="rows of a DataLoader with `batch_size=None` cannot be told apart"):
        split_data(whole, PLACE, fraction=0.1, seed=0, batch_size=4, target="labels")


# --------------------------------------------------------------------------------------------------------- bad input


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "nothing": (None, DataError, "Expected `train` to be a DataLoader, a Dataset or a pair .inputs, targets.*but got NoneType"),
    "inputs alone": (X, DataError, "pair .inputs, targets.*but got Tensor"),
    "three": ((X, X, Y), DataError, "but got tuple of length 3"),
    "no target key": ({"x": X}, DataError, r"hold the target under 'labels', but got the keys \['x'\]. Pass `target=`"),
    "empty": ((X[:0], Y[:0]), DataError, "at least one example in `train`, but it is empty"),
    "rows": ((X, Y[:5]), ShapeError, "as many inputs as targets in `train`, but got 23 and 5"),
    "text": ((np.full((23, 3), "a"), Y), DataError, "Expected numeric arrays, but got <U1. Encode text"),
    "objects": ((np.full((23, 3), None), Y), DataError, "Expected numeric arrays, but got object"),
    "text targets": ((X, ["cat"] * 23), DataError, "Expected numeric arrays, but got <U3"),
    "dates": ((X, np.zeros(23, "datetime64[s]")), DataError, r"but got datetime64\[s\]. Encode text, dates"),
    "ragged": ((X, [[1.0], [1.0, 2.0]]), DataError, "Expected targets that make one array, but numpy says"),
    "complex": ((X, Y + 1j), DataError, "Expected real targets, but got torch.complex64"),
    "one target": ((X, 3.0), DataError, "one target per example, but got a single number"),
    "no targets": ((X, None), DataError, "Expected numeric arrays, but got object"),
    "lists": ((X.tolist(), Y), DataError, "tensors or arrays with one row per example.*`train`, but got tuple"),
    "number": ((torch.tensor(1.0), Y), DataError, "with one row per example.*but got a single number"),
    "triples": (TensorDataset(X, X, Y), DataError, "but got list of length 3"),
    "empty loader": (DataLoader(TensorDataset(X[:0], Y[:0])), DataError, "at least one example in `train`, but it is empty"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_data_are_refused_in_words(case: str) -> None:
    data, error, message = BAD[case]
    with pytest.raises(error, match=message):
        load_rows(as_batches(data, PLACE, name="train"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("form", ["tensors", "arrays", "loader", "dataset", "dict"])
@pytest.mark.parametrize("part", ["inputs", "targets"])
def test_numbers_that_are_not_finite_are_refused_with_their_row(value: float, form: str, part: str) -> None:
    x, y = X.clone(), Y.clone()
    (x[:, 1] if part == "inputs" else y)[13] = value
    data, where = {
        "tensors": ((x, y), "row 13 of `valid`"),
        "arrays": ((x.numpy(), y.numpy()), "row 13 of `valid`"),
        "dict": ({"x": x, "labels": y}, "row 13 of `valid`"),
        "loader": (DataLoader(TensorDataset(x, y), batch_size=5), "row 3 of batch 2 of `valid`"),
        "dataset": (Pairs(x, y), "row 3 of batch 2 of `valid`"),
    }[form]
    with pytest.raises(DataError, match=f"Expected finite {part}, but {where} holds NaN or infinite values. Drop or impute"):
        load_rows(as_batches(data, PLACE, name="valid", batch_size=5))


def test_float64_numbers_beyond_float32_are_refused_for_a_float32_host() -> None:
    x = X.double().numpy().copy()
    x[4, 0] = 1e300
    with pytest.raises(DataError, match="row 4 of `train`"):
        as_batches((x, Y), PLACE, name="train")


def test_too_few_rows_are_refused_by_number() -> None:
    with pytest.raises(DataError, match="at least 2 rows in `valid`, but got 1. Pass more, or leave it out"):
        load_rows(as_batches((X[:1], Y[:1]), PLACE, name="valid"), at_least=2)


def test_batches_that_cannot_be_joined_are_refused() -> None:
    ragged = [(torch.zeros(2, 3), torch.zeros(2)), (torch.zeros(2, 4), torch.zeros(2))]
    with pytest.raises(
        ShapeError,
        match="Expected batches of `valid` that differ in the number of rows alone, or in length beside.*Pad all examples",
    ):
        load_rows(as_batches(DataLoader(ragged, batch_size=None), PLACE, name="valid"))


def test_rows_of_a_batch_must_match_its_targets() -> None:
    odd = [(torch.zeros(4, 3), torch.zeros(3))]
    with pytest.raises(ShapeError, match="as many inputs as targets in batch 0 of `train`, but got 4 and 3"):
        load_rows(as_batches(DataLoader(odd, batch_size=None), PLACE, name="train"))


def test_a_check_sees_every_batch_of_a_stream() -> None:
    made = as_batches(DataLoader(Pairs(), batch_size=5), PLACE, name="train")
    assert isinstance(made, Stream)
    seen: list[int] = []
    list(Stream(made.source, made.place, made.target, made.name, made.indexed, lambda y: seen.append(len(y))))
    assert seen == [5, 5, 5, 5, 3]


def test_check_finite_passes_integers_and_numbers_without_rows() -> None:
    check_finite({"a": torch.tensor([1, 2]), "b": torch.tensor(float("nan")), "c": "text"}, None, "x")


@pytest.mark.parametrize("batch", [(X, Y), [X, Y], {"x": X, "labels": Y}])
def test_divide_and_unlabelled_agree_on_labelled_batches(batch: Any) -> None:
    inputs, targets = split_batch(batch, "labels", "x")
    assert targets is Y
    again = drop_targets(batch, "labels")
    assert (again["x"] if isinstance(again, dict) else again) is X
    assert (inputs["x"] if isinstance(inputs, dict) else inputs) is X


@pytest.mark.parametrize("batch", [X, [X], {"x": X}, (X, X, X)])
def test_unlabelled_batches_pass(batch: Any) -> None:
    result = drop_targets(batch, "labels")
    assert isinstance(result, dict | tuple | Tensor)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 40),
    batch_size=st.integers(1, 50),
    seed=st.integers(0, 3),
)
def test_batches_cover_every_row_once_in_any_batch_size(n: int, batch_size: int, seed: int) -> None:
    x, y = torch.arange(n).float()[:, None], torch.arange(n)
    made = as_batches((x, y), PLACE, name="train", batch_size=batch_size)
    for parts in (list(made), list(made.iter_shuffled(seed, 0))):
        assert all(len(part) <= batch_size for _, part in parts)
        assert sorted(torch.cat([part for _, part in parts]).tolist()) == list(range(n))
        assert all(torch.equal(a[:, 0].long(), b) for a, b in parts)


# -------------------------------------------------------------------------------------------------------------- lengths


def pad_tokens(length: int, rows: int = 2, *, pad: int = 9, seed: int = 0) -> dict[str, Tensor]:
    """Tokens of `length` places, the last row one shorter and padded."""
    ids = torch.randint(1, 9, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[-1, -1] = 0
    return {
        "input_ids": ids.masked_fill(mask == 0, pad),
        "attention_mask": mask,
        "labels": (ids % 3).masked_fill(mask == 0, -100),
    }


def stream(parts: list[Any], **options: Any) -> Any:
    return as_batches(DataLoader(parts, batch_size=None), PLACE, name="valid", **options)  # pyright: ignore[reportArgumentType]


def test_batches_of_different_lengths_are_padded_at_the_end() -> None:
    parts = [pad_tokens(4), pad_tokens(6, 3), pad_tokens(5)]
    rows = load_rows(stream(parts))
    assert rows.inputs["input_ids"].shape == rows.targets.shape == (7, 6)
    start = 0
    for part in parts:
        length, here = part["labels"].shape[1], slice(start, start + len(part["labels"]))
        start = here.stop
        assert torch.equal(rows.inputs["input_ids"][here, :length], part["input_ids"])
        assert torch.equal(rows.targets[here, :length], part["labels"])
        assert (rows.inputs["attention_mask"][here, length:] == 0).all()
        assert (rows.inputs["input_ids"][here, length:] == 9).all()  # the padding of the user's own tokenizer
        assert (rows.targets[here, length:] == -100).all()


def test_padding_in_front_stays_in_front() -> None:
    parts = [{name: t.flip(1) for name, t in pad_tokens(n).items()} for n in (4, 6)]  # whose last place is a word
    rows = load_rows(stream(parts))
    assert torch.equal(rows.inputs["input_ids"][:2, 2:], parts[0]["input_ids"])
    assert torch.equal(rows.targets[:2, 2:], parts[0]["labels"])
    assert (rows.inputs["input_ids"][:2, :2] == 9).all()
    assert (rows.inputs["attention_mask"][:2, :2] == 0).all()
    assert (rows.targets[:2, :2] == -100).all()
    assert torch.equal(rows.inputs["input_ids"][2:], parts[1]["input_ids"])


def test_targets_of_different_lengths_need_a_mask_too() -> None:
    parts = [(torch.zeros(2, 3), torch.zeros(2, n, dtype=torch.int64)) for n in (4, 6)]
    with pytest.raises(ShapeError, match="cannot be joined"):
        load_rows(stream(parts))


def test_streams_keep_their_lengths() -> None:
    parts = [pad_tokens(4), pad_tokens(6, 3)]
    assert [tuple(x["input_ids"].shape) for x, _ in stream(parts)] == [(2, 4), (3, 6)]


def test_flat_targets_beside_texts_of_different_lengths_stay_flat() -> None:
    parts = [{**pad_tokens(n), "labels": torch.tensor([0.5, n])} for n in (4, 6)]
    rows = load_rows(stream(parts))
    assert rows.targets.tolist() == [0.5, 4.0, 0.5, 6.0]
    assert rows.inputs["attention_mask"].sum(1).tolist() == [4, 3, 6, 5]


def test_float_targets_of_different_lengths_are_refused() -> None:
    parts = [{**pad_tokens(n), "labels": torch.zeros(2, n)} for n in (4, 6)]
    with pytest.raises(ShapeError, match="or in length beside an `attention_mask`, but they cannot be joined"):
        load_rows(stream(parts))


@pytest.mark.parametrize("pair", [False, True])
def test_what_is_like_a_dict_is_taken_as_one(pair: bool) -> None:
    fields = pad_tokens(4)
    labels = fields.pop("labels")
    whole = (UserDict(fields), labels) if pair else UserDict({**fields, "labels": labels})
    rows = load_rows(as_batches(whole, PLACE, name="train"))
    assert type(rows.inputs) is dict
    assert sorted(rows.inputs) == ["attention_mask", "input_ids"]
    assert torch.equal(rows.targets, labels)
    assert type(drop_targets(whole, "labels")) is dict


# ---------------------------------------------------------------------------------------------------------- next tokens


def test_labels_that_repeat_the_tokens_are_those_of_the_next_place() -> None:
    fields = pad_tokens(4)
    rows = load_rows(as_batches({**fields, "labels": fields["input_ids"]}, PLACE, name="train"))
    ids = fields["input_ids"]
    assert rows.targets.tolist() == [[*ids[0, 1:].tolist(), -100], [*ids[1, 1:3].tolist(), -100, -100]]
    ignored = ids.masked_fill(torch.tensor([[True, True, False, False]] * 2), -100)  # a prompt that is not scored
    rows = load_rows(as_batches({**fields, "labels": ignored}, PLACE, name="train"))
    assert rows.targets.tolist() == [[-100, *ids[0, 2:].tolist(), -100], [-100, int(ids[1, 2]), -100, -100]]


def test_other_labels_and_pairs_are_as_they_are() -> None:
    fields = pad_tokens(4)
    labels = fields.pop("labels")
    ids = fields["input_ids"]
    assert torch.equal(load_rows(as_batches({**fields, "labels": labels}, PLACE, name="train")).targets, labels)
    assert torch.equal(load_rows(as_batches((fields, ids), PLACE, name="train")).targets, ids)
    one = load_rows(as_batches({"input_ids": ids[:, 0], "labels": ids[:, 0]}, PLACE, name="train"))
    assert torch.equal(one.targets, ids[:, 0])


# --------------------------------------------------------------------------------------------------------------- shared


def test_a_mask_that_all_rows_share_is_neither_cut_nor_shuffled_nor_joined() -> None:
    mask = torch.randn(5, 5)
    x, y = X.reshape(23, 3), Y
    rows = load_rows(as_batches(({"x": x, "mask": mask}, y), PLACE, name="train", batch_size=5))
    for data in (rows, rows.iter_shuffled(0, 0), rows.take(torch.arange(5))):
        for inputs, _ in data:
            assert torch.equal(inputs["mask"], mask)
    parts = [({"x": x[i : i + 5], "mask": mask}, y[i : i + 5]) for i in range(0, 23, 5)]  # as long as all batches but the last
    whole = load_rows(stream(parts))
    assert torch.equal(whole.inputs["x"], x)
    assert torch.equal(whole.inputs["mask"], mask)


def test_a_marked_mask_stays_marked_through_casts() -> None:
    mask = shared(torch.zeros(23, 23, dtype=torch.float64))
    rows = load_rows(as_batches(((X, mask), Y), PLACE, name="train", batch_size=5))
    assert rows.inputs[1].dtype == torch.float32
    assert all(m.shape == (23, 23) for (_, m), _ in rows)


def test_shared_tensors_that_differ_between_batches_cannot_be_joined() -> None:
    parts = [((X[:4], torch.zeros(n, n)), Y[:4]) for n in (3, 5)]
    with pytest.raises(ShapeError, match="a tensor that all rows share differs between them"):
        load_rows(stream(parts))


# --------------------------------------------------------------------------------------------------------------- samples


def number_rows(n: int) -> tuple[Tensor, Tensor]:
    return torch.arange(float(n))[:, None], torch.arange(float(n))


class Flow(IterableDataset[Any]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(self.x, self.y, strict=True))


SAMPLED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "arrays": lambda x, y: (x.numpy(), y.numpy()),
    "Dataset": Pairs,
    "DataLoader": lambda x, y: DataLoader(Pairs(x, y), batch_size=7),
    "one by one": lambda x, y: DataLoader(Pairs(x, y), batch_size=1),
    "IterableDataset": Flow,
}


@pytest.mark.parametrize("form", SAMPLED)
@pytest.mark.parametrize(("rows", "size"), [(50, 10), (50, 49), (50, 50), (5, 50), (1, 3)])
def test_the_same_rows_are_sampled_from_every_form_of_data(form: str, rows: int, size: int) -> None:
    data = number_rows(rows)
    (expected,) = sample_rows(as_batches(data, PLACE, name="train"), size, 3)
    (found,) = sample_rows(as_batches(SAMPLED[form](*data), PLACE, name="train", batch_size=8), size, 3)
    assert torch.equal(found, expected)
    assert found.shape == (min(rows, size), 1)
    assert torch.equal(found, found.unique()[:, None])  # in order, each once


def test_samples_depend_on_the_seed_and_every_row_has_the_same_chance() -> None:
    data = as_batches(number_rows(20), PLACE, name="train")
    counts = torch.stack(
        [torch.zeros(20).index_add(0, sample_rows(data, 5, s)[0][:, 0].long(), torch.ones(5)) for s in range(400)]
    )
    assert len({tuple(row.tolist()) for row in counts}) > 350
    assert (counts.mean(0) - 0.25).abs().max() < 0.1


def test_rows_of_different_shapes_are_sampled_apart() -> None:
    mask = torch.ones(3, 3)
    parts = [((torch.full((4, n, 2), float(n)), shared(mask)), torch.zeros(4)) for n in (3, 5, 3)]
    loader = DataLoader(parts, batch_size=None)  # pyright: ignore[reportArgumentType]
    found = sample_rows(as_batches(loader, PLACE, name="train"), 12, 0)
    assert sorted(tuple(x.shape) for x, _ in found) == [(4, 3, 2), (4, 3, 2), (4, 5, 2)]
    plain = DataLoader([(x, y) for (x, _), y in parts], batch_size=None)  # pyright: ignore[reportArgumentType]
    assert [tuple(x.shape) for x in sample_rows(as_batches(plain, PLACE, name="train"), 12, 0)] == [(8, 3, 2), (4, 5, 2)]


def test_a_sample_of_a_stream_keeps_no_batch_in_memory() -> None:
    loader = DataLoader(Flow(*number_rows(1000)), batch_size=100)
    (found,) = sample_rows(as_batches(loader, PLACE, name="train"), 10, 0)
    assert found.untyped_storage().nbytes() == 10 * 4


def test_rows_of_large_data_are_drawn_without_replacement() -> None:
    x = torch.arange(16_385.0)[:, None]
    data = TensorDataset(x, x[:, 0])
    for source in (data, DataLoader(data, batch_size=4096)):
        (found,) = sample_rows(as_batches(source, PLACE, name="train", batch_size=4096), 4096, 0)
        assert len(found.unique()) == 4096
    numbers = sample(16_385, 4096, "rows")
    assert len(numbers.unique()) == 4096
    assert 0 <= int(numbers.min()) <= int(numbers.max()) < 16_385
    assert torch.equal(numbers, sample(16_385, 4096, "rows"))
    counts = torch.zeros(40).index_add(0, torch.cat([sample(40, 8, s) for s in range(2000)]), torch.ones(16_000))
    assert float((counts / 400 - 1).abs().max()) < 0.25  # each as often as the others
