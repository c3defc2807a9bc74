"""Whatever is called with whatever: a right answer, or one of our errors."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import offmap
from checks.trust import Check
from faults.making import FIT, TRAINED, WRONG, Maker, Subject
from faults.numbers import numbers
from faults.tables import tables
from offmap.detectors import DETECTORS
from offmap.errors import OffmapError

LIGHT: dict[str, Any] = {"solver": "closed-form", "draws": 4, "risk_draws": 4, "steps": 3, "check_every": 3, "progress": False}
"""What keeps a fit short, where nothing else was drawn."""


class Python(OffmapError):
    """Python's own TypeError for an argument that a function does not have."""


def trial(seed: int, folder: Path) -> str:
    """One call; it ends in "answer", or in the name of one of our errors. Models and random state are as before."""
    make = Maker(random.Random(seed), wild=(0.0, 0.2, 0.5)[seed % 3])
    call = make.rng.choices([one for one, _ in CALLS], [weight for _, weight in CALLS])[0]
    logging.getLogger("offmap").setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):  # of models and data that torch itself finds OOD
            return call(make, folder) or "result"
    except OffmapError as error:
        return type(error).__name__ if str(error).strip() else _silent(error)
    finally:
        logging.getLogger("offmap").setLevel(logging.NOTSET)


def _silent(error: OffmapError) -> str:
    raise AssertionError(f"a {type(error).__name__} that does not say what is wrong")


@contextmanager
def keep_untouched(nets: Any) -> Iterator[None]:
    """Weights, modes and hooks of models, and the global random state, are afterwards as they were, whatever happens."""
    models = [net for net in (nets if isinstance(nets, list) else [nets]) if isinstance(net, nn.Module)]
    before, state = [_snapshot(net) for net in models], torch.random.get_rng_state()
    try:
        yield
    finally:
        assert torch.equal(state, torch.random.get_rng_state()), "the random state has moved"
        for net, (tensors, others) in zip(models, before, strict=True):
            now, rest = _snapshot(net)
            assert others == rest, "the model has changed"
            assert all(_same(now[name], tensor) for name, tensor in tensors.items()), "the model's numbers have changed"


def _snapshot(net: nn.Module) -> tuple[dict[str, Tensor], Any]:
    named = [*net.named_parameters(), *net.named_buffers()]
    tensors = {name: t if isinstance(t, nn.parameter.UninitializedTensorMixin) else t.detach().clone() for name, t in named}
    modes = [(name, m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in net.named_modules()]
    return tensors, (modes, [(name, id(t), t.requires_grad, t.grad is None) for name, t in named])


def _same(a: Tensor, b: Tensor) -> bool:
    if a.is_meta or isinstance(a, nn.parameter.UninitializedTensorMixin):
        return True
    return a.shape == b.shape and torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0))


# -------------------------------------------------------------------------------------------------------------- answers


def right(result: offmap.Result, rows: int) -> None:
    """Shapes, ranges, and no NaN."""
    for name in ("score", "ood", "p_value"):
        assert getattr(result, name).shape == (rows,), f"{name} of shape {tuple(getattr(result, name).shape)} for {rows} rows"
    assert not result.score.isnan().any(), "a score is NaN"
    assert result.ood.dtype == torch.bool
    assert ((result.p_value > 0) & (result.p_value <= 1)).all(), "p-values between 0 and 1"
    check_predicted(result, rows)


def check_predicted(said: offmap.Prediction, rows: int) -> None:
    """A regression has mean and std, a classification probabilities and labels."""
    if said.mean is not None:
        assert said.std is not None
        assert said.mean.shape == said.std.shape
        assert len(said.mean) == rows
        assert not said.mean.isnan().any(), "a mean is NaN"
        assert not said.std.isnan().any(), "a standard deviation is NaN"
        assert (said.std >= 0).all()
    else:
        assert said.probs is not None
        assert said.label is not None
        assert len(said.probs) == len(said.label) == rows
        assert ((said.probs >= 0) & (said.probs <= 1.001)).all(), "probabilities between 0 and 1"
        assert said.label.dtype == torch.int64


def rows_of(x: Any) -> int:
    """How many rows good inputs have."""
    first = x
    while isinstance(first, tuple | list | dict):
        first = next(iter(first.values() if isinstance(first, dict) else first))
    return len(first)


# ---------------------------------------------------------------------------------------------------------------- calls


def fit(make: Maker, folder: Path) -> None:
    subject = make.subject()
    nets, train = make.nets(subject.nets), make.data(subject)
    valid = None if make.rng.random() < 0.2 else make.data(subject)
    options = LIGHT | subject.options | make.options(FIT)
    if make.rng.random() < 0.1:
        options["calibration"] = make.data(subject)
    if make.rng.random() < 0.05:
        options["checkpoint"] = make.pick([folder / "state", folder, str(folder / "no" / "state"), 3, ""])
    with keep_untouched(nets):
        guard = offmap.fit(nets, train, valid, **options)
    assert guard.threshold == guard.threshold
    x = subject.data(3)[0]
    right(guard(x), 3)


@cache
def fit_named(name: str) -> tuple[Subject, offmap.Guard]:
    """A guard of a trained model, the same for all calls of a process."""
    subject = TRAINED[name]()
    return subject, offmap.fit(subject.nets, subject.data(60), subject.data(40), **LIGHT)


def _guard(make: Maker) -> tuple[Subject, offmap.Guard]:
    return fit_named(make.pick(TRAINED))


def ask(make: Maker, folder: Path) -> None:
    subject, guard = _guard(make)
    x = make.inputs(subject)
    how = {"reduce": ("mean", "max", None)}
    method: str = make.pick(["__call__", "score", "predict", "interval", "prediction_set", "samples"])
    options: dict[str, Any] = {
        "score": lambda: make.options(how, 1),
        "predict": lambda: make.options({"clip": (None, 0.0, 0.1, "chosen")}, 1),
        "interval": lambda: make.options({"level": (0.5, 0.95, 0.999)}, 1),
        "prediction_set": lambda: make.options({"level": (0.5, 0.95, 0.999)}, 1),
        "samples": lambda: make.options({"draws": (1, 3), "clip": (None, 0.1)}, 2),
    }.get(method, dict)()
    with keep_untouched(subject.nets):
        made = call_known(getattr(guard, method), x, options)
    if isinstance(made, offmap.Result):
        right(made, rows_of(x))
    elif isinstance(made, offmap.Prediction):
        check_predicted(made, rows_of(x))
    elif isinstance(made, offmap.Interval):
        assert (made.lower <= made.upper).all()
        assert len(made.lower) == rows_of(x)
    else:
        assert not made.isnan().any()
        assert made.shape[1 if method == "samples" else 0] == rows_of(x)


def call_known(function: Callable[..., Any], x: Any, options: dict[str, Any]) -> Any:
    """Call a method without `**options`: of a name that it does not have, Python itself says so."""
    try:
        return function(x, **options)
    except TypeError as error:
        inside = error.__traceback__ and error.__traceback__.tb_next
        if "unexpected keyword argument" in str(error) and (inside is None or inside.tb_frame.f_code is function.__code__):
            raise Python(str(error)) from error
        raise


def calibrate(make: Maker, folder: Path) -> None:
    subject, guard = _guard(make)
    with keep_untouched(subject.nets):
        made = call_known(guard.calibrate, make.data(subject), make.options({"false_alarms": (0.01, 0.05, 0.5)}, 1))
    assert 0 < made.calibration.false_alarms < 1
    right(made(subject.data(2)[0]), 2)


def keep(make: Maker, folder: Path) -> None:
    """Save, and load for some nets."""
    subject, guard = _guard(make)
    odd = [str(folder / "guard"), folder, folder / "no" / "guard", ""]
    path = make.pick(odd) if make.now() else folder / "guard"
    guard.save(path)
    other = make.nets(make.subject().nets) if make.now() else subject.nets
    with keep_untouched(other):
        again = offmap.load(path, other, strict=make.pick([True, False]))
    x = subject.data(3)[0]
    assert torch.equal(again.score(x), guard.score(x))


def detect(make: Maker, folder: Path) -> None:
    classified = ["classifier", "classifier", "regressor", "two targets"]
    subject = TRAINED[make.pick(classified)]() if make.rng.random() < 0.7 else make.subject()
    nets = make.nets(subject.nets)
    valid = None if make.rng.random() < 0.2 else make.data(subject)
    method = make.pick(DETECTORS)
    good = {"false_alarms": (0.05, 0.5), "rows": (10, 1000), "batch_size": (4, 100), "seed": (0, 3), "features": (None,)}
    options = make.options(good | dict.fromkeys(DETECTORS[method].options, (1, 0.5, 3)), 2)
    method = make.pick(WRONG) if make.rng.random() < make.wild / 3 else method
    with keep_untouched(nets):
        found = offmap.detect(nets, make.data(subject), valid, method=method, **options)
        result = found(subject.data(3)[0])
    right(result, 3)


def evaluate(make: Maker, folder: Path) -> None:
    subject, guard = _guard(make)
    scorers = make.pick([guard, {"a": guard, "b": guard}, {}, "guard", None, {"a": "b"}]) if make.now() else guard
    ood: Any = {"far": make.inputs(subject, 12), "near": make.data(subject)}
    ood = make.pick([{}, None, "far", [ood], {"test": ood["far"]}, {3: ood["far"]}]) if make.now() else ood
    options = make.options({"positive": ("id", "ood"), "target": ("labels",)}, 1)
    with keep_untouched(subject.nets):
        made = call_known(lambda data, **given: offmap.evaluate(scorers, data, ood, **given), make.data(subject), options)
    for row in made.rows:
        for name in ("auroc", "fpr95", "aupr_in", "aupr_out", "coverage", "accuracy"):
            assert 0 <= row.get(name, 0.5) <= 1, f"{name} is {row[name]}"
    if make.rng.random() < 0.2:
        assert offmap.write_page(made, folder / "page.html").exists()


def diagnose(make: Maker, folder: Path) -> None:
    subject, guard = _guard(make)
    chosen = make.pick(WRONG) if make.rng.random() < make.wild / 3 else guard
    with keep_untouched(subject.nets):
        made = call_known(lambda data, **given: offmap.diagnose(chosen, data, **given), make.data(subject),
                     make.options({"draws": (0, 2), "eps": (1e-4, 0.1)}, 1))  # fmt: skip
    assert str(made)


def distill(make: Maker, folder: Path) -> None:
    subject, guard = _guard(make)
    chosen = make.pick(WRONG) if make.rng.random() < make.wild / 3 else guard
    options = {"rows": 100} | make.options({"false_alarms": (0.05, 0.5), "seed": (0, 5)}, 1)
    valid = make.data(subject)
    with keep_untouched(subject.nets):
        made = call_known(lambda data, **given: offmap.distill(chosen, data, valid, **given), make.data(subject), options)
    right(made(subject.data(3)[0]), 3)


def over(make: Maker, folder: Path) -> None:
    """`offmap.guard` over a predictive."""
    subject, guard = _guard(make)
    predictive = make.pick(WRONG) if make.rng.random() < make.wild / 3 else guard.predictive
    names = ("likelihood", "score", "draws", "seed", "target")
    good = {name: FIT[name] for name in names} | {"clip": (None, "choose", 0.1), "false_alarms": (0.05, 0.5)}
    options: dict[str, Any] = {"draws": 4} | make.options(good, 2)
    if make.rng.random() < 0.3:
        options["train"] = make.data(subject)
    with keep_untouched(subject.nets):
        made = call_known(lambda data, **given: offmap.guard(predictive, data, **given), make.data(subject), options)
    right(made(subject.data(3)[0]), 3)


CALLS: list[tuple[Callable[[Maker, Path], str | None], float]] = [
    (fit, 30), (ask, 20), (calibrate, 5), (keep, 6), (detect, 10), (evaluate, 5), (diagnose, 4), (distill, 1), (over, 5),
    (numbers, 8), (tables, 6),
]  # fmt: skip
"""What is called, and how often."""

CHECK = Check(
    "A call with any model, data and options, good or bad, ends in a right answer (shape, range, no NaN, model and random state "
    "untouched) or in one of our errors.",
    trial, trials=12_000, limit=30.0, quick=100,
)  # fmt: skip
