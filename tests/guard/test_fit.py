"""`offmap.fit` on every form of task and data."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import offmap
from offmap.data.batch import hash_rows
from offmap.errors import ConfigError, NotFittedError
from offmap.likelihoods import Bernoulli, Categorical, Gaussian
from offmap.metrics import auroc
from trained import Reshaped, binary, binary_classifier, classes, classifier, inputs, quick, regression, regressor


@dataclass(frozen=True)
class Task:
    """A model, its data, and the shape of one row of its answer (None: classification with that many classes)."""

    net: Callable[[], nn.Module]
    data: Callable[[int, int], tuple[Tensor, Tensor]]
    likelihood: type
    row: tuple[int, ...] = ()
    classes: int = 0


def _column(data: Callable[[int, int], tuple[Tensor, Tensor]]) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    return lambda n, seed: (data(n, seed)[0], data(n, seed)[1][:, None])


def _cast(data: Callable[[int, int], tuple[Tensor, Tensor]], dtype: torch.dtype) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    return lambda n, seed: (data(n, seed)[0], data(n, seed)[1].to(dtype))


def _two(n: int, seed: int) -> tuple[Tensor, Tensor]:
    return regression(n, seed, targets=2)


def _two_logits() -> nn.Module:
    net = classifier()
    net[-1] = nn.Linear(12, 2)
    return net


TASKS: dict[str, Task] = {
    "mean (B, 1)": Task(regressor, regression, Gaussian),
    "mean (B,)": Task(lambda: Reshaped(regressor()), regression, Gaussian),
    "mean and log-variance": Task(lambda: regressor(log_variance=True), regression, Gaussian),
    "targets (B, 1)": Task(regressor, _column(regression), Gaussian, (1,)),
    "output (B,), targets (B, 1)": Task(lambda: Reshaped(regressor()), _column(regression), Gaussian, (1,)),
    "two targets": Task(lambda: regressor(targets=2), _two, Gaussian, (2,)),
    "two targets and log-variances": Task(lambda: regressor(targets=2, log_variance=True), _two, Gaussian, (2,)),
    "classes": Task(classifier, classes, Categorical, classes=3),
    "two classes, bool": Task(_two_logits, binary, Categorical, classes=2),
    "binary bool (B, 1)": Task(binary_classifier, binary, Bernoulli, classes=2),
    "binary int (B, 1)": Task(binary_classifier, _cast(binary, torch.int64), Bernoulli, classes=2),
    "binary bool (B,)": Task(lambda: Reshaped(binary_classifier()), binary, Bernoulli, classes=2),
    "binary int (B,)": Task(lambda: Reshaped(binary_classifier()), _cast(binary, torch.int32), Bernoulli, classes=2),
    "binary targets (B, 1)": Task(binary_classifier, _column(binary), Bernoulli, classes=2),
}


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest) -> Task:
    return TASKS[request.param]


def test_answers_have_the_promised_shapes(task: Task) -> None:
    guard = quick(task.net(), task.data(40, 0), task.data(40, 1))
    assert isinstance(guard.likelihood, task.likelihood)
    x = inputs(9, 5)
    result = guard(x)
    for name, dtype in (("score", torch.float32), ("ood", torch.bool), ("p_value", torch.float32)):
        value = getattr(result, name)
        assert value.shape == (9,), name
        assert value.dtype == dtype, name
    assert result.score.isfinite().all()
    assert result.score_map is None
    if task.classes:
        assert result.mean is result.std is None
        assert result.probs.shape == (9, task.classes)
        assert result.label.shape == (9,)
        assert result.label.dtype == torch.int64
        chosen = guard.prediction_set(x, 0.9)
        assert (chosen.shape, chosen.dtype) == ((9, task.classes), torch.bool)
    else:
        assert result.probs is result.label is None
        assert result.mean.shape == result.std.shape == (9, *task.row)
        assert (result.std > 0).all()
        interval = guard.interval(x, 0.9)
        assert interval.lower.shape == interval.upper.shape == (9, *task.row)
        assert (interval.lower < interval.upper).all()
    assert guard.samples(x, 3).shape == (3, 9, *task.net()(x).shape[1:])


def test_an_answer_is_what_score_and_predict_say(task: Task) -> None:
    guard = quick(task.net(), task.data(40, 0), task.data(40, 1))
    x = inputs(9, 5)
    result, prediction = guard(x), guard.predict(x)
    assert torch.equal(result.score, guard.score(x))
    assert torch.equal(result.ood, result.score > guard.threshold)
    for name, value in vars(prediction).items():
        assert value is None or torch.equal(value, getattr(result, name)), name


def test_an_ensemble_of_two_is_one_guard(task: Task) -> None:
    nets = [task.net(), task.net()]
    with torch.no_grad():
        nets[1].get_parameter(next(n for n, _ in nets[1].named_parameters())).add_(0.01)
    guard = quick(nets, task.data(40, 0), task.data(40, 1))
    x = inputs(9, 5)
    assert guard.predictive.members == 2
    assert guard.score(x).isfinite().all()
    outputs = guard.samples(x, 3, clip=0.0)
    expected = torch.stack([net(x).detach() for net in nets]).repeat_interleave(3, 0)
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-6)


def test_ood_inputs_score_higher_than_in_distribution_ones() -> None:
    net = regressor()
    guard = quick(net, regression(100, 0), regression(100, 1), draws=30)
    far = 6 * inputs(60, 5)
    assert auroc(guard.score(inputs(60, 4)), guard.score(far)) > 0.9
    assert guard(far).ood.float().mean() > 0.7
    x, y = regression(100, 2)
    plain = (net(x)[:, 0] - y).square().mean().sqrt()
    assert (guard.predict(x).mean - y).square().mean().sqrt() < 1.05 * plain


# --------------------------------------------------------------------------------------------------------------- data


class Pairs(Dataset[Any]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        return self.x[row], self.y[row]


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "float64 arrays": lambda x, y: (x.double().numpy(), y.double().numpy()),
    "float32 arrays": lambda x, y: (x.numpy(), y.numpy()),
    "array and list": lambda x, y: (x.numpy(), y.tolist()),
    "TensorDataset": TensorDataset,
    "Dataset": Pairs,
    "DataLoader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=16),
    "DataLoader of Dataset": lambda x, y: DataLoader(Pairs(x, y), batch_size=16),
}


@pytest.mark.parametrize("solver", ["closed-form", "sgd"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_gives_the_same_guard(form: str, solver: str) -> None:
    options: dict[str, Any] = {"batch_size": 16, "solver": solver, "steps": 5, "check_every": 5, "basis": "identity"}
    make, net, x = FORMS[form], regressor(), inputs(9, 5)
    guard = quick(net, make(*regression(40, 0)), make(*regression(30, 1)), **options)
    if solver == "sgd" and "DataLoader" in form:  # a user's loader is walked in its own order
        ours = quick(net, FORMS["DataLoader"](*regression(40, 0)), regression(30, 1), **options)
    else:
        ours = quick(net, regression(40, 0), regression(30, 1), **options)
    assert torch.equal(guard.score(x), ours.score(x))
    assert guard.threshold == ours.threshold


@pytest.mark.parametrize("split", [False, True], ids=["valid", "no valid"])
def test_a_shuffling_loader_gives_a_fit_that_repeats_and_leaves_the_global_generator_alone(split: bool) -> None:
    net = regressor()

    def once() -> Tensor:
        loader = DataLoader(TensorDataset(*regression(60, 0)), batch_size=16, shuffle=True)
        guard = quick(net, loader, None if split else regression(30, 1), solver="refine", steps=7, check_every=7)
        return guard.score(inputs(9, 5))

    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    first = once()
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(12345)
    assert torch.equal(first, once())


class TwoArguments(nn.Module):
    """Gets (x, scale) by position, or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.net = regressor()

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.net(x) * scale


@pytest.mark.parametrize("form", ["tuple", "dict", "loader of tuples", "loader of dicts"])
def test_models_of_two_arguments_take_tuples_and_dicts(form: str) -> None:
    def data(n: int, seed: int) -> Any:
        x, y = regression(n, seed)
        one = torch.ones(n, 1)
        rows: list[Any]
        if form == "tuple":
            return (x, one), y
        if form == "dict":
            return {"x": x, "scale": one, "y": y}
        if form == "loader of tuples":
            rows = [((x[i], one[i]), y[i]) for i in range(n)]
        else:
            rows = [{"x": x[i], "scale": one[i], "y": y[i]} for i in range(n)]
        return DataLoader(rows, batch_size=128)

    guard = quick(TwoArguments(), data(40, 0), data(30, 1), target="y")
    x, one = inputs(9, 5), torch.ones(9, 1)
    asked = (x, one) if "tuple" in form else {"x": x, "scale": one}
    plain = quick(TwoArguments(), ((regression(40, 0)[0], torch.ones(40, 1)), regression(40, 0)[1]),
                  ((regression(30, 1)[0], torch.ones(30, 1)), regression(30, 1)[1]))  # fmt: skip
    torch.testing.assert_close(guard.score(asked), plain.score((x, one)))
    assert guard.predict(asked).mean.shape == (9,)
    if "loader" in form:
        assert guard.score(data(9, 5)).shape == (9,)


def test_model_output_can_be_picked() -> None:
    class Wordy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = regressor()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"prediction": self.net(x), "extra": x}

    picked = quick(Wordy(), regression(40, 0), regression(30, 1), output_fn=lambda out: out["prediction"])
    plain = quick(regressor(), regression(40, 0), regression(30, 1))
    assert picked.likelihood.targets == plain.likelihood.targets
    assert picked.score(inputs(9, 5)).shape == (9,)


def test_float64_models_compute_in_float64() -> None:
    guard = quick(regressor().double(), regression(40, 0), regression(30, 1))
    assert guard.score(inputs(9, 5)).dtype == torch.float64
    assert guard.predict(inputs(9, 5).numpy()).mean.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_can_be_fitted(dtype: torch.dtype) -> None:
    guard = quick(regressor().to(dtype), regression(40, 0), regression(30, 1))
    result = guard(inputs(9, 5))
    assert result.score.isfinite().all()
    assert result.mean.dtype == result.score.dtype == torch.float32


# --------------------------------------------------------------------------------------------- validation, calibration


@pytest.mark.parametrize(("n", "held"), [(60, 6), (200, 20), (8, 2)])
def test_without_validation_data_a_tenth_is_set_aside_and_said_so(n: int, held: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "offmap"):
        guard = quick(regressor(), regression(n, 0))
    (said,) = [line for line in caplog.messages if line.startswith("No validation data: ")]
    assert f" {held} rows of `train`, which the model has seen, set the threshold, so intervals and prediction sets" in said
    assert said.endswith("need `guard.calibrate(new_rows)` first.")
    assert guard.calibration.scores.shape == (held,)
    assert not guard.calibration.exact


def test_a_guard_that_was_set_on_training_rows_says_so_until_it_is_calibrated(tmp_path: Path) -> None:
    x = inputs(9, 5)
    for model, make, refused in ((regressor(), regression, "interval"), (classifier(), classes, "prediction_set")):
        guard = quick(model, make(200, 0))
        assert guard.calibration.seen
        assert "(uncalibrated: the model was trained on them)" in repr(guard)
        assert "uncalibrated: the model was trained on them, so there are no intervals" in str(guard.summary())
        guard.save(tmp_path / "guard")
        for made in (guard, offmap.load(tmp_path / "guard", model), guard.to("cpu")):
            with pytest.raises(NotFittedError, match=r"Call `guard = guard\.calibrate\(rows the model has not seen\)` first"):
                getattr(made, refused)(x)
        evaluation = offmap.evaluate(guard, make(30, 1), {"far": 9 * x})
        assert not any("conformal" in key for row in evaluation.rows for key in row)
        fresh = guard.calibrate(make(50, 2))
        assert not fresh.calibration.seen
        assert "uncalibrated" not in repr(fresh) + str(fresh.summary())
        getattr(fresh, refused)(x)


@pytest.mark.parametrize("form", ["float32 arrays", "Dataset", "DataLoader"])
def test_validation_rows_that_repeat_training_rows_are_told_and_count_as_seen(
    form: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, (x, y), (x2, y2) = FORMS[form], regression(200, 0), regression(100, 1)
    guard = quick(regressor(), make(x, y), (x[50:80], y[50:80]))
    (said,) = caplog.messages
    assert said.startswith(
        "`valid` repeats rows of `train` (100 %), which the model has seen, so intervals and prediction sets need"
    )
    assert said.endswith("need `guard.calibrate(new_rows)` first.")
    assert guard.calibration.seen
    caplog.clear()
    apart = quick(regressor(), make(x, y), make(x, y), calibration=(x2, y2))
    assert [line.split(",")[0] for line in caplog.messages] == ["`valid` repeats rows of `train` (100 %)"]
    assert "τ and the clip fit them too well: pass rows it has not seen" in caplog.text
    assert not apart.calibration.seen
    assert quick(regressor(), make(x, y), (x2[:50], y2[:50]), calibration=(x[:50], y[:50])).calibration.seen
    caplog.clear()
    few = torch.cat([x[:40], x2[:60]]), torch.cat([y[:40], y2[:60]])
    assert not quick(regressor(), make(x, y), few).calibration.seen
    coins = [(x.sign(), y) for x, y in (regression(200, 0), regression(100, 1))]  # 8 different rows
    assert not quick(regressor(), make(*coins[0]), coins[1]).calibration.seen
    assert not caplog.messages


def test_calibrating_on_training_rows_is_told_where_the_score_holds_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (x, y), fresh = regression(5000, 0), regression(6000, 1)  # 4,096 of the training rows are held
    model = regressor()
    guard = quick(model, (x, y), regression(100, 2))
    guard.save(tmp_path / "guard")
    loaded, both = offmap.load(tmp_path / "guard", model), offmap.combine([guard, guard], regression(100, 3))
    for made in (guard, loaded, both, quick(model, (x, y), regression(100, 2), score="distance")):
        caplog.clear()
        assert made.calibrate((x, y)).calibration.seen
        assert caplog.messages[0].startswith("`valid` repeats rows of `train` (100 %), which the model has seen, so intervals")
        assert made.calibrate((x[:50], y[:50])).calibration.seen
        assert not made.calibrate(fresh).calibration.seen
    assert not quick(model, (x, y), regression(100, 2), score="epistemic").calibrate((x, y)).calibration.seen  # it holds none
    coins = [(x.sign(), y) for x, y in ((x, y), fresh)]  # 8 different rows
    assert not quick(model, coins[0], coins[1]).calibrate(coins[1]).calibration.seen


def test_a_killed_fit_knows_which_rows_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = regression(6000, 0)
    monkeypatch.setattr(sys.modules["offmap.fit"], "build_guard", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        quick(regressor(), Pairs(x, y), (x[:50], y[:50]), checkpoint=tmp_path / "state")
    monkeypatch.undo()
    assert quick(regressor(), Pairs(x, y), (x[:50], y[:50]), checkpoint=tmp_path / "state").calibration.seen


def test_repeated_rows_are_told_wherever_train_and_valid_meet(caplog: pytest.LogCaptureFixture) -> None:
    data, fresh = classes(200, 0), classes(100, 1)
    guard = quick(classifier(), data, fresh)
    predictive, loader = guard.predictive, DataLoader(TensorDataset(*data), batch_size=32)
    assert not caplog.messages
    for made in (
        offmap.detect(classifier(), data, data),
        offmap.detect(classifier(), loader, data),
        offmap.distill(guard, data, data, rows=100),
        offmap.distill(guard, loader, data, rows=100),
        offmap.guard(predictive, data, train=data),
    ):
        assert made.calibration.seen
        assert not made.calibrate(fresh).calibration.seen
    assert len(caplog.messages) == 5
    assert all(line.startswith("`valid` repeats rows of `train` (100 %), which the model has seen") for line in caplog.messages)


def test_padding_does_not_hide_repeated_texts() -> None:
    ids = torch.arange(1, 13).reshape(3, 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]])
    rows = hash_rows({"input_ids": ids * mask, "attention_mask": mask})
    short = hash_rows({"input_ids": ids[1:, :3] * mask[1:, :3], "attention_mask": mask[1:, :3]})
    front = hash_rows({"input_ids": torch.tensor([[0, 0, 0, 9, 10]]), "attention_mask": torch.tensor([[0, 0, 0, 1, 1]])})
    assert rows[1:] == short
    assert rows[2:] == front
    assert len(set(rows)) == 3


def test_with_validation_data_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    quick(regressor(), regression(40, 0), regression(30, 1))
    assert not caplog.messages


def test_separate_calibration_data_set_the_threshold_and_nothing_else() -> None:
    train, valid, apart = regression(40, 0), regression(30, 1), regression(50, 2)
    without, with_ = quick(regressor(), train, valid), quick(regressor(), train, valid, calibration=apart)
    x = inputs(9, 5)
    assert torch.equal(without.score(x), with_.score(x))
    assert without.clip == with_.clip
    assert torch.equal(with_.calibration.scores, without.score(apart[0]))
    assert with_.calibration.exact
    assert not without.calibration.exact
    # the same as calibrating later
    later = without.calibrate(apart)
    assert later.threshold == with_.threshold
    assert torch.equal(later.calibration.residuals, with_.calibration.residuals)


@pytest.mark.parametrize("form", ["DataLoader", "Dataset", "float64 arrays"])
def test_calibration_data_come_in_every_form(form: str) -> None:
    train, valid, apart = regression(40, 0), regression(30, 1), regression(50, 2)
    tensors = quick(regressor(), train, valid, calibration=apart)
    other = quick(regressor(), train, valid, calibration=FORMS[form](*apart))
    assert other.threshold == tensors.threshold


# ------------------------------------------------------------------------------------------------------ reproducibility


@pytest.mark.parametrize("solver", ["closed-form", "refine", "sgd"])
@pytest.mark.parametrize("members", [1, 2])
def test_one_seed_gives_equal_guards_to_the_bit_and_another_does_not(solver: str, members: int) -> None:
    def once(seed: int) -> tuple[Tensor, Tensor]:
        nets = [regressor(s) for s in range(members)]
        options = {"solver": solver, "steps": 6, "check_every": 3}
        guard = quick(nets, regression(40, 0), regression(30, 1), seed=seed, **options)
        x = inputs(9, 5)
        return guard.score(x), guard.predict(x, clip=0.5).mean

    first = once(0)
    torch.manual_seed(99)
    again, other = once(0), once(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[1], other[1])


def test_guards_do_not_change_with_the_model_afterwards() -> None:
    net = regressor()
    guard = quick(net, regression(40, 0), regression(30, 1))
    before = guard.score(inputs(9, 5))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    assert torch.equal(before, guard.score(inputs(9, 5)))


# ------------------------------------------------------------------------------------------------- progress and history


def test_progress_shows_risk_threshold_and_entropy(capsys: pytest.CaptureFixture[str]) -> None:
    quick(regressor(), regression(40, 0), regression(30, 1), solver="refine", steps=4, check_every=2, progress=True)
    shown = capsys.readouterr().err
    assert "MaxWEnt" in shown
    for word in ("risk", "τ", "entropy", "4/4"):
        assert word in shown
    quick(regressor(), regression(40, 0), regression(30, 1), solver="refine", steps=4, check_every=2, progress=False)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


def test_history_tells_every_check_per_member() -> None:
    guard = quick([regressor(0), regressor(1)], regression(40, 0), regression(30, 1), solver="refine", steps=5, check_every=2)
    history = guard.history
    assert history.stop_reason == "finished"
    assert history.step == [0, 2, 4, 5]
    assert len(history.risk) == len(history.entropy) == 4
    assert all(len(entry) == 2 for entry in [*history.risk, *history.entropy, history.max_risk, history.kept])
    for member, kept in enumerate(history.kept):
        passed = [s for s, risk in zip(history.step, history.risk, strict=True) if risk[member] <= history.max_risk[member]]
        assert kept == passed[-1]


@pytest.mark.parametrize("solver", ["closed-form", "refine", "sgd"])
@pytest.mark.parametrize("kind", ["regression", "classes"])
def test_max_risk_is_the_base_models_nll_plus_two_standard_errors(solver: str, kind: str) -> None:
    nets = [regressor(s, log_variance=True) if kind == "regression" else classifier(s) for s in range(2)]
    data = regression if kind == "regression" else classes
    guard = quick(nets, data(40, 0), data(40, 1), solver=solver, steps=4, check_every=2)
    x, y = data(40, 1)
    for member, net in enumerate(nets):
        out = net(x).detach()
        if kind == "regression":
            each = -torch.distributions.Normal(out[:, 0], (0.5 * out[:, 1]).exp()).log_prob(y)
        else:
            each = nn.functional.cross_entropy(out, y, reduction="none")
        if kind == "regression":
            worst = -torch.distributions.Normal(y.mean(), y.std(correction=0)).log_prob(y).min()
        else:
            worst = -(y.bincount() / len(y)).log().min()
        each = each.clamp_max(worst)  # what chance would pay for the worst row
        tau = each.mean() + 2 * each.std(correction=0) / math.sqrt(40)
        assert guard.history.max_risk[member] == pytest.approx(tau.item(), rel=1e-4)
    # the risk of what was kept is within it, and so is that of the guard's own wide draws, nearly
    kept = [guard.history.risk[guard.history.step.index(k)][m] for m, k in enumerate(guard.history.kept)]
    assert all(risk <= tau for risk, tau in zip(kept, guard.history.max_risk, strict=True))


def test_a_threshold_of_the_users_own_is_kept() -> None:
    loose = quick(regressor(), regression(40, 0), regression(40, 1), max_risk=50.0)
    tight = quick(regressor(), regression(40, 0), regression(40, 1))
    assert loose.history.max_risk == [50.0]
    assert loose.score(inputs(9, 5)).mean() > tight.score(inputs(9, 5)).mean()


@pytest.mark.parametrize("solver", ["refine", "sgd"])
@pytest.mark.parametrize("lr", [1e3, 1e6, 1e30])
def test_training_that_diverges_keeps_a_good_state(solver: str, lr: float, caplog: pytest.LogCaptureFixture) -> None:
    guard = quick(regressor(), regression(40, 0), regression(40, 1), solver=solver, steps=20, check_every=5, lr=lr)
    x = inputs(9, 5)
    result = guard(x)
    for name in ("score", "mean", "std", "p_value"):
        assert getattr(result, name).isfinite().all(), name
    assert math.isfinite(guard.threshold)
    history = guard.history
    kept = history.step.index(history.kept[0])
    assert history.risk[kept][0] <= history.max_risk[0]
    if history.stop_reason == "diverged":
        said = [m for m in caplog.messages if m.startswith("Training diverged (the loss is not finite)")]
        assert len(said) == 1
        assert "Lower `lr` or `entropy_weight`" in said[0]


def test_a_loss_that_is_not_finite_ends_the_fit_as_diverged(caplog: pytest.LogCaptureFixture) -> None:
    class Explosive(nn.Module):
        """Finite at its trained weights, infinite far from them."""

        def __init__(self) -> None:
            super().__init__()
            self.net = regressor()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) + (self.net[0].bias.square().sum() - 100).relu().mul(1e3).exp() - 1

    guard = quick(Explosive(), regression(40, 0), regression(40, 1), solver="refine", steps=50, check_every=50, lr=30.0)
    assert guard.history.stop_reason == "diverged"
    assert any("every member keeps its last state with a risk below τ, from steps [0]" in m for m in caplog.messages)
    assert guard.predict(inputs(9, 5)).mean.isfinite().all()


# ------------------------------------------------------------------------------------------------------------- options


def test_where_decides_what_is_random() -> None:
    guard = quick(regressor(), regression(40, 0), regression(30, 1), params="2.*")
    assert set(guard.predictive.q.mean) == {"2.weight", "2.bias"}
    hidden = quick(regressor(), regression(40, 0), regression(30, 1), params=lambda name, tensor: tensor.ndim == 2)
    assert set(hidden.predictive.q.mean) == {"0.weight", "2.weight"}


@pytest.mark.parametrize("noise", ["uniform", "normal", "rademacher"])
@pytest.mark.parametrize("basis", ["svd", "identity"])
def test_every_noise_and_basis_makes_a_guard(noise: str, basis: str) -> None:
    guard = quick(regressor(), regression(40, 0), regression(30, 1), noise=noise, basis=basis)
    assert bool(len(guard.predictive.q.rotation)) == (basis == "svd")
    assert guard.score(inputs(9, 5)).isfinite().all()


def test_scores_by_name_and_by_function() -> None:
    train, valid, x = regression(40, 0), regression(30, 1), inputs(9, 5)
    paper = quick(regressor(), train, valid, score="paper")
    epistemic = quick(regressor(), train, valid, score="epistemic")
    own = quick(regressor(), train, valid, score=lambda outputs: outputs[..., 0].amax(0) - outputs[..., 0].amin(0))
    outputs = paper.samples(x, paper.draws)[..., 0]
    noise = paper.likelihood.noise
    torch.testing.assert_close(epistemic.score(x), outputs.var(0, correction=0), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(paper.score(x), outputs.var(0, correction=0) + noise, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(own.score(x), outputs.amax(0) - outputs.amin(0))


def test_a_config_object_and_keywords_agree() -> None:
    train, valid, x = regression(40, 0), regression(30, 1), inputs(9, 5)
    config = offmap.Config(solver="closed-form", basis="identity", risk_draws=8, eps=1e-2)
    one = offmap.fit(regressor(), train, valid, config=config, draws=8)
    two = quick(regressor(), train, valid, basis="identity", eps=1e-2)
    three = offmap.fit(regressor(), train, valid, config=config, draws=8, basis="svd")
    assert torch.equal(one.score(x), two.score(x))
    assert len(three.predictive.q.rotation) == 2


@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli"])
def test_whole_targets_follow_the_named_likelihood(likelihood: str) -> None:
    x, y = binary(40, 0)
    guard = quick(binary_classifier(), (x, y.long()), (x, y.long()), likelihood=likelihood)
    assert (guard.predict(x).mean is None) == (likelihood == "bernoulli")


def test_counts_can_be_regressed_from_an_integer_array() -> None:
    x, y = regression(80, 0)
    counts = (10 * y).round().numpy().astype(np.int32)
    guard = quick(regressor(), (x[:40], counts[:40]), (x[40:], counts[40:]), likelihood="gaussian")
    assert guard.predict(x).mean.shape == (80,)
    assert guard.interval(x, 0.8).lower.isfinite().all()


def test_fit_sets_the_threshold_by_false_alarms() -> None:
    strict, lax = (quick(regressor(), regression(60), regression(40, seed=1), false_alarms=rate) for rate in (0.1, 0.5))
    assert strict.threshold > lax.threshold
    assert strict.threshold == strict.calibrate(regression(40, seed=1), 0.1).threshold
    with pytest.raises(ConfigError, match="`false_alarms` strictly between 0 and 1, such as 0.05, but got 5"):
        quick(regressor(), regression(60), regression(40, seed=1), false_alarms=5)


def test_fit_refuses_a_threshold_and_names_max_risk_and_false_alarms() -> None:
    with pytest.raises(ConfigError, match=r"`fit` takes no `threshold`: pass `max_risk=` .* \(τ\), or `false_alarms=`"):
        quick(regressor(), regression(60), regression(40, seed=1), threshold=5.0)
