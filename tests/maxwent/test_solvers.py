"""sgd, closed form and refine, end to end on small trained models."""

from __future__ import annotations

import logging
import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trained
from offmap.data import Rows
from offmap.errors import ConfigError
from offmap.likelihoods import Categorical, Gaussian, Likelihood, Prediction
from offmap.maxwent import solve as maxwent
from offmap.maxwent.config import Config, Runtime
from offmap.maxwent.risk import Validation, as_risk
from offmap.posterior.parameterization import Parameterization
from offmap.posterior.predictive import Stochastic

QUICK = {"steps": 60, "check_every": 20, "risk_draws": 10}
SOLVERS = ("closed-form", "refine", "sgd")
DATA = {"gaussian": trained.regression, "categorical": trained.classes}
LAWS: dict[str, Likelihood] = {"gaussian": Gaussian(), "categorical": Categorical()}


def models(law: str = "gaussian", members: int = 1) -> list[nn.Module]:
    make = trained.classifier if law == "categorical" else lambda m: trained.regressor(m, log_variance=True)
    return [make(m) for m in range(members)]


def rows(law: str, n: int, seed: int, dtype: torch.dtype) -> Rows:
    x, y = DATA[law](n, seed)
    return Rows(x.to(dtype), y.to(dtype) if y.is_floating_point() else y, 16, "rows")


def solve(
    nets: list[nn.Module], law: str = "gaussian", *, seed: int = 0, runtime: Runtime | None = None,
    likelihood: Likelihood | None = None, **options: Any,
) -> tuple[Stochastic, Validation, Tensor]:  # fmt: skip
    """A fit, how its validation risk was measured, and its τ."""
    dtype = next(nets[0].parameters()).dtype
    config = Config(**{**QUICK, **options})
    train, valid = rows(law, 48, 0, dtype), rows(law, 30, 1, dtype)
    law_used, run = likelihood or LAWS[law], runtime or Runtime(progress=False)
    made = maxwent.fit(nets, train, valid, likelihood=law_used, config=config, seed=seed, runtime=run)
    risk = Validation(made.model, law_used, valid, as_risk(config.risk), config.risk_draws, seed)
    if config.clip_loss and config.max_risk is None:
        risk = risk.clip_losses(made.q)
    return made, risk, torch.tensor(made.history.max_risk)


def log_scales(made: Stochastic, member: int = 0) -> Tensor:
    return torch.cat([s[member].log().flatten() for s in made.q.scale().values()])


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("basis", ["svd", "identity"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_the_kept_state_is_at_or_below_the_threshold_and_uses_some_of_it(solver: str, basis: str, members: int, law: str):
    made, validation, max_risk = solve(models(law, members), law, solver=solver, basis=basis)
    risk = validation.evaluate(made.q).risk
    assert bool((risk <= max_risk).all())
    assert all(bool(((s > 0) & s.isfinite()).all()) for s in made.q.scale().values())
    assert not any(p.requires_grad for p in made.q.parameters())
    if solver != "sgd":  # which has not come far after so few steps
        # widened until the risk was nearly spent: half as much again is too much
        wider = validation.evaluator(made.q)(torch.full((made.q.members,), 1.5)).risk
        assert bool((wider > max_risk).all())


@pytest.mark.parametrize("solver", SOLVERS)
def test_without_widening_the_last_checked_state_below_the_threshold_is_kept(solver: str):
    options = {
        "clip_loss": False,
        "rescale": False,
        "lr": 0.3,
        "entropy_weight": 1000.0,
        "initial_raw_scale": -4.0,
        "steps": 100,
        "check_every": 10,
    }
    made, validation, max_risk = solve(models(members=2), solver=solver, **options)
    assert bool((validation.evaluate(made.q).risk <= max_risk).all())
    history = made.history
    for member in range(2):
        passed = [s for s, r in zip(history.step, history.risk, strict=True) if r[member] <= history.max_risk[member]]
        assert history.kept[member] == passed[-1]
        at = history.step.index(history.kept[member])
        assert float(made.q.mean_log_square()[member]) == pytest.approx(history.entropy[at][member], rel=1e-4)
    if solver != "closed-form":
        assert history.step == list(range(0, 101, 10))
        assert history.kept[0] != history.kept[1]  # one of them went too far, so that there was something to undo


@pytest.mark.parametrize("solver", ["closed-form", "refine"])
def test_one_row_that_is_sure_and_wrong_does_not_raise_the_threshold_for_all(solver: str):
    train, valid = rows("gaussian", 48, 0, torch.float32), rows("gaussian", 30, 1, torch.float32)
    assert isinstance(valid.inputs, Tensor)
    far = torch.cat([valid.inputs[:-1], 30 * valid.inputs[-1:]])  # the model extrapolates there, and is sure of it
    (net,), wrong = models(), replace(valid, inputs=far)

    def entropy(data: Rows, clip_loss: bool) -> float:
        config = Config(**{**QUICK, "solver": solver, "clip_loss": clip_loss})
        made = maxwent.fit(net, train, data, likelihood=Gaussian(), config=config, runtime=Runtime(progress=False))
        return float(made.q.mean_log_square())

    assert entropy(wrong, clip_loss=False) - entropy(valid, clip_loss=False) > 5 * abs(
        entropy(wrong, True) - entropy(valid, True)
    )


def test_the_last_steps_are_checked_when_checks_do_not_divide_them():
    made, _, _ = solve(models(), solver="sgd", steps=25, check_every=10)
    assert made.history.step == [0, 10, 20, 25]


@pytest.mark.parametrize("solver", SOLVERS)
def test_fits_repeat_to_the_bit_and_depend_on_the_seed(solver: str):
    torch.manual_seed(1)
    first = solve(models(), solver=solver)[0]
    torch.manual_seed(2)
    again, other = solve(models(), solver=solver)[0], solve(models(), solver=solver, seed=1)[0]
    assert torch.equal(log_scales(first), log_scales(again))
    assert not torch.equal(log_scales(first), log_scales(other))


@pytest.mark.parametrize(
    "subsampled", [{}, {"lr": 0.3, "entropy_weight": 1000.0, "check_every": 5, "patience": 1}], ids=["usual", "subsampled"]
)
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_member_is_fitted_in_company_as_it_is_alone(solver: str, subsampled: dict[str, Any]):
    nets = [net.double() for net in models(members=3)]
    together, alone = solve(nets, solver=solver, **subsampled)[0], solve(nets[:1], solver=solver, **subsampled)[0]
    torch.testing.assert_close(log_scales(together), log_scales(alone), rtol=1e-6, atol=1e-6)
    assert together.history.max_risk[0] == pytest.approx(alone.history.max_risk[0])
    assert together.history.kept[:1] == alone.history.kept


def fragile(net: nn.Module) -> nn.Module:
    """The same function, but noise of one size does a hundred times the harm: the first layer is larger, the second smaller."""
    twin = trained.regressor(log_variance=True).to(next(net.parameters()).dtype)
    twin.load_state_dict(net.state_dict())
    with torch.no_grad():
        for p in twin[0].parameters():
            p.mul_(100)
        twin[2].weight.div_(100)
    return twin


def test_a_fragile_member_does_not_shrink_the_start_of_the_others():
    (net,) = (n.double() for n in models())
    options = {"solver": "sgd", "basis": "identity", "initial_raw_scale": -3.0, "steps": 1, "check_every": 10, "rescale": False}
    together, alone = solve([net, fragile(net)], **options)[0], solve([net], **options)[0]
    assert together.history.risk[0][1] <= together.history.max_risk[1]  # the fragile one was shrunk
    assert together.history.entropy[0][1] < together.history.entropy[0][0] - 0.1
    assert together.history.entropy[0][0] == pytest.approx(2 * math.log(math.log1p(math.exp(-3.0))), rel=1e-6)
    torch.testing.assert_close(log_scales(together), log_scales(alone), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 3])
def test_how_a_model_is_run_does_not_change_what_is_fitted(chunk: int):
    class Plain(nn.Module):
        """Not a Sequential, so that chunks go through vmap and loops."""

        def __init__(self) -> None:
            super().__init__()
            self.net = models()[0].double()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    usual = solve([Plain()])[0]
    other = solve([Plain()], runtime=Runtime(chunk_size=chunk, batch_size=7, progress=False))[0]
    torch.testing.assert_close(log_scales(other), log_scales(usual), rtol=1e-5, atol=1e-6)


def test_sgd_starts_at_the_papers_scale():
    for basis, raw in (("identity", -5.0), ("svd", -10.0)):
        made, _, _ = solve(models(), solver="sgd", basis=basis, steps=1)
        start = 2 * math.log(math.log1p(math.exp(raw)))
        assert made.history.entropy[0][0] == pytest.approx(start, rel=1e-4)


def test_only_the_chosen_parameters_are_random():
    net = models()[0]
    made, _, _ = solve([net], params="2.*")
    assert list(made.q.mean) == ["2.weight", "2.bias"]
    x = trained.inputs(5)
    assert made.outputs(x, 3, clip=None, seed=0).shape == (3, 5, 2)
    torch.testing.assert_close(made.outputs(x, 1, clip=0.0, seed=0)[0], net.eval()(x).detach())


def test_float64_models_stay_float64():
    made, _, _ = solve([n.double() for n in models(members=2)])
    assert {t.dtype for t in made.q.state_dict().values()} == {torch.float64}
    assert made.outputs(trained.inputs(4).double(), 2, clip=None, seed=0).dtype == torch.float64


def test_a_fit_works_where_gradients_are_switched_off():
    with torch.no_grad():
        quiet = solve(models())[0]
    assert torch.equal(log_scales(quiet), log_scales(solve(models())[0]))


# ----------------------------------------------------------------------------------------------------- risk and threshold


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_threshold_of_the_users_own_is_kept(solver: str):
    plain = solve(models(), solver="closed-form", clip_loss=False)[0].history.max_risk[0]
    tight, risk_tight, _ = solve(models(), solver=solver, max_risk=plain)
    loose, risk_loose, max_risk = solve(models(), solver=solver, max_risk=plain + 0.5)
    assert max_risk.tolist() == pytest.approx([plain + 0.5])
    assert float(risk_loose.evaluate(loose.q).risk) <= plain + 0.5
    assert float(risk_tight.evaluate(tight.q).risk) <= plain
    if solver != "sgd":
        assert float(risk_loose.evaluate(loose.q).risk) > plain
        assert float(loose.q.mean_log_square()) > float(tight.q.mean_log_square())


@pytest.mark.parametrize("solver", SOLVERS)
def test_zero_one_risk_with_a_threshold_of_one_percent(solver: str):
    class Easy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)
            with torch.no_grad():
                self.fc.weight.copy_(torch.eye(3) * 4)  # the label is the largest input
                self.fc.bias.zero_()

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    options = {"risk": "zero-one", "max_risk": 0.01, "entropy_weight": 100.0, "initial_raw_scale": -3.0}
    made, _, max_risk = solve([Easy()], "categorical", solver=solver, **options)
    assert max_risk.tolist() == pytest.approx([0.01])
    x, y = trained.classes(30, 1)
    draws = made.model.outputs(lambda span: made.q.draw(span, stream="valid"), QUICK["risk_draws"], x)
    assert float((draws.softmax(2).mean(0).argmax(1) != y).float().mean()) <= 0.01
    assert float(made.q.mean_log_square()) > -4  # and it is wide


def test_a_looser_tolerance_gives_a_wider_distribution():
    paper, reference = (solve(models(), solver="closed-form", tolerance=s)[0] for s in ("paper", "reference"))
    assert paper.history.max_risk[0] > reference.history.max_risk[0]
    assert float(paper.q.mean_log_square()) > float(reference.q.mean_log_square())


# --------------------------------------------------------------------------------------------------------------- tradeoff


def test_of_several_entropy_weights_the_highest_entropy_below_max_risk_is_chosen():
    choices = (0.01, 100.0, 1.0)
    options = {"solver": "sgd", "basis": "identity", "rescale": False, "lr": 0.05}
    alone = {t: solve(models(), entropy_weight=t, **options)[0] for t in choices}
    entropies = {t: float(made.q.mean_log_square()) for t, made in alone.items()}
    assert len(set(entropies.values())) == 3
    best = max(entropies, key=entropies.__getitem__)
    made, validation, max_risk = solve(models(), entropy_weight=choices, **options)
    assert made.history.chosen["entropy_weight"] == best
    assert torch.equal(log_scales(made), log_scales(alone[best]))
    assert bool((validation.evaluate(made.q).risk <= max_risk).all())


def test_more_entropy_weight_is_more_entropy_until_max_risk_stops_it():
    entropies = [
        float(solve(models(), solver="sgd", entropy_weight=t, rescale=False, max_risk=1e6)[0].q.mean_log_square())
        for t in (1e-3, 1.0, 100.0)
    ]
    assert entropies == sorted(entropies)
    assert entropies[0] < entropies[2]


# ------------------------------------------------------------------------------------------------------------- divergence


def finite(made: Stochastic) -> bool:
    outputs = made.outputs(trained.inputs(20), 10, clip=None, seed=0)
    return bool(outputs.isfinite().all()) and all(bool(t.isfinite().all()) for t in made.q.state_dict().values())


@pytest.mark.parametrize("solver", ["refine", "sgd"])
def test_divergence_ends_at_the_last_good_state_and_says_so(solver: str, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "offmap"):
        made, validation, max_risk = solve(models(members=2), solver=solver, lr=1e25)
    assert made.history.stop_reason == "diverged"
    assert finite(made)
    assert bool((validation.evaluate(made.q).risk <= max_risk).all())
    assert "Training diverged (the loss is not finite); every member keeps its last state with a risk below τ" in caplog.text
    assert "from steps [0, 0]. Lower `lr` or `entropy_weight` to go further." in caplog.text


class Root(Likelihood):
    """A likelihood that is always zero, with a slope of 0·∞."""

    def nll(self, output: Tensor, y: Tensor) -> Tensor:
        return (0 * output[..., 0]).abs().sqrt()

    def predict(self, outputs: Tensor) -> Prediction:
        return Prediction(mean=outputs[..., 0].mean(0))

    def score(self, outputs: Tensor) -> Tensor:
        return outputs[..., 0].var(0)

    def epistemic(self, outputs: Tensor) -> Tensor:
        return outputs[..., 0].var(0)


def test_a_gradient_that_is_not_a_number_ends_at_the_last_good_state(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "offmap"):
        made, _, _ = solve(models(), likelihood=Root(), solver="sgd")
    assert made.history.stop_reason == "diverged"
    assert "Training diverged" in caplog.text
    assert finite(made)


def test_a_diverged_entropy_weight_is_not_chosen_over_one_that_went_well():
    made, _, _ = solve(
        models(), solver="sgd", entropy_weight=(1.0, 3e38), regularizer=torch.exp, initial_raw_scale=1.0, max_risk=1e9
    )
    assert made.history.chosen["entropy_weight"] == 1.0
    assert made.history.stop_reason == "finished"


# -------------------------------------------------------------------------------------------------------- a user's own ω


def by_hand() -> Parameterization:
    """Scaling with normal noise, as a user would write it."""

    def log_density(weights: dict[str, Tensor], mean: dict[str, Tensor], scale: dict[str, Tensor]) -> Tensor:
        each = [torch.distributions.Normal(mean[n], scale[n]).log_prob(w).flatten(2).sum(2) for n, w in weights.items()]
        return torch.stack(each).sum(0)

    return Parameterization(lambda mean, scale, z: {n: mean[n] + scale[n] * z[n] for n in mean}, log_density)


def test_a_users_own_scaling_ends_where_ours_with_the_log_does():
    # H = ½ Σ log φ² + constants, hence twice the tradeoff
    nets = [n.double() for n in models(members=2)]
    common = {"solver": "sgd", "basis": "identity", "noise": "normal", "lr": 0.05}
    ours, _, _ = solve(nets, regularizer="log", entropy_weight=1.0, **common)
    theirs, validation, max_risk = solve(nets, parameterization=by_hand(), entropy_weight=2.0, **common)
    for member in range(2):
        torch.testing.assert_close(log_scales(theirs, member), log_scales(ours, member), rtol=1e-5, atol=1e-6)
    assert bool((validation.evaluate(theirs.q).risk <= max_risk).all())
    torch.testing.assert_close(theirs.q.entropy(draws=300), ours.q.entropy(), rtol=0, atol=4 * math.sqrt(ours.q.dimension / 600))


def test_a_users_own_parameterization_is_never_rotated():
    made, _, _ = solve(models(), solver="sgd", basis="svd", noise="normal", parameterization=by_hand())
    assert len(made.q.rotation) == 0


def test_fits_of_a_users_own_parameterization_are_ranked_by_its_entropy():
    # φ is a precision here: the smaller it is, the wider the law
    def log_density(weights: dict[str, Tensor], mean: dict[str, Tensor], scale: dict[str, Tensor]) -> Tensor:
        each = [torch.distributions.Normal(mean[n], 0.01 / scale[n]).log_prob(w).flatten(2).sum(2) for n, w in weights.items()]
        return torch.stack(each).sum(0)

    own = Parameterization(lambda mean, scale, z: {n: mean[n] + 0.01 / scale[n] * z[n] for n in mean}, log_density)
    options = {"solver": "sgd", "noise": "normal", "parameterization": own, "initial_raw_scale": 2.0, "rescale": False}
    alone = {t: float(solve(models(), entropy_weight=t, **options)[0].q.entropy()) for t in (1e-3, 50.0)}
    assert alone[50.0] > alone[1e-3]
    assert solve(models(), entropy_weight=(1e-3, 50.0), **options)[0].history.chosen["entropy_weight"] == 50.0


@pytest.mark.parametrize("solver", ["closed-form", "refine"])
def test_of_several_eps_the_closed_form_of_highest_entropy_wins(solver: str):
    eps_values = (1e-4, 1e-1)
    alone = {f: float(solve(models(), solver="closed-form", eps=f)[0].q.mean_log_square().mean()) for f in eps_values}
    made = solve(models(), solver=solver, eps=eps_values)[0]
    assert made.history.chosen["eps"] == pytest.approx(max(alone, key=lambda f: alone[f]))
    if solver == "closed-form":
        assert float(made.q.mean_log_square().mean()) == pytest.approx(max(alone.values()))


@pytest.mark.parametrize("solver", ["closed-form", "refine"])
def test_all_eps_are_tried_in_one_distribution(solver: str, monkeypatch: pytest.MonkeyPatch):
    """Each holds φ and the bases: for a large model, one more is more than its draws take."""
    made: list[float] = []
    plain = maxwent.WeightDistribution
    monkeypatch.setattr(maxwent, "WeightDistribution", lambda *args, **options: made.append(1.0) or plain(*args, **options))
    solve(models(), solver=solver, eps=(1e-4, 1e-3, 1e-2, 1e-1))
    assert len(made) == 1


def test_no_graph_is_held_while_factors_are_searched(monkeypatch: pytest.MonkeyPatch):
    """A graph would hold a copy of φ for every floor: models may be large."""
    held: weakref.WeakSet[Any] = weakref.WeakSet()
    counts, evaluate = list[int](), Validation.evaluate

    class Box:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor
            held.add(self)

    monkeypatch.setattr(Validation, "evaluate", lambda *args, **options: counts.append(len(held)) or evaluate(*args, **options))
    with torch.autograd.graph.saved_tensors_hooks(Box, lambda box: box.tensor):
        solve(models(members=2), solver="closed-form", eps=(1e-4, 1e-3, 1e-2))
    assert len(counts) > 10
    assert set(counts) == {0}


def test_a_fit_knows_the_risk_it_ends_with():
    made, validation, _ = solve(models(members=2), solver="refine")
    assert made.history.final_risk == pytest.approx(validation.evaluate(made.q).risk.tolist(), rel=1e-3)
    made, validation, _ = solve(models(members=2), solver="refine", rescale=False)
    assert made.history.final_risk == validation.evaluate(made.q).risk.tolist()
    made, validation, _ = solve(models(members=2), solver="closed-form")
    assert made.history.final_risk == pytest.approx(validation.evaluate(made.q).risk.tolist(), rel=1e-3)


def test_a_users_own_parameterization_has_no_closed_form():
    for solver in ("closed-form", "refine"):
        with pytest.raises(ConfigError, match="A parameterization of your own has no closed form: pass `solver='sgd'`"):
            solve(models(), solver=solver, parameterization=by_hand())


def test_softplus_keeps_scales_positive_however_hard_they_are_pushed():
    made, _, _ = solve(models(), solver="sgd", entropy_weight=1e-6, lr=5.0, steps=40)
    assert all(bool((s > 0).all()) for s in made.q.scale().values())
    assert all(torch.equal(F.softplus(made.q.raw_scale[n]), s) for n, s in made.q.scale().items())


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_max_risk_below_the_base_risk_is_reported_as_out_of_reach(solver, caplog):
    with caplog.at_level(logging.WARNING, logger="offmap"):
        solve(models(), solver=solver, max_risk=-1e3)
    assert "stays above `max_risk` [-1000.0] however small the distribution: raise `max_risk`" in caplog.text
