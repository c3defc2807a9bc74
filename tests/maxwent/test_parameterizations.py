"""Fits of laws beside the diagonal one: within τ, wider than they began, kept in files and checkpoints like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offmap
from offmap.atomic import seal, unseal
from offmap.errors import ConfigError, DataError, FileError
from offmap.maxwent import train as loop
from offmap.maxwent.config import Config
from offmap.posterior.noise import Normal, Uniform
from offmap.posterior.parameterization import PARAMETERIZATIONS, Flow, LowRank, Parameterization, Subspace, WeightLaw
from trained import classes, classifier, inputs, regression, regressor

LAWS: dict[str, WeightLaw] = {
    "low-rank": LowRank(rank=2), "subspace": Subspace(dimensions=6, steps=30), "flow": Flow(dimensions=6, layers=2, hidden=8),
}  # fmt: skip
KINDS: dict[str, Any] = {
    "regression": (lambda m=0: regressor(m, log_variance=True), regression),
    "classification": (classifier, classes),
}
QUICK: dict[str, Any] = {"steps": 60, "check_every": 20, "risk_draws": 10, "draws": 8, "progress": False, "score": "epistemic"}


def nets(kind: str = "regression", members: int = 2) -> list[nn.Module]:
    return [KINDS[kind][0](m) for m in range(members)]


def fit_law(name: str, kind: str = "regression", members: int = 2, **options: Any) -> offmap.Guard:
    data = KINDS[kind][1]
    settings: dict[str, Any] = {**QUICK, "parameterization": LAWS[name], **options}
    return offmap.fit(nets(kind, members), data(80, 0), data(60, 1), **settings)


@pytest.mark.parametrize("solver", ["refine", "sgd"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAWS)
def test_a_fit_ends_within_its_risk_and_wider_than_it_began(name: str, kind: str, solver: Any):
    guard = fit_law(name, kind, solver=solver)
    history, q = guard.history, guard.predictive.q  # pyright: ignore[reportAttributeAccessIssue]
    assert all(risk <= bound for risk, bound in zip(history.final_risk, history.max_risk, strict=True))
    assert all(end > start for end, start in zip(history.final_entropy, history.entropy[0], strict=True))
    assert min(history.kept) > 0
    torch.testing.assert_close(q.mean_log_square(), torch.tensor(history.final_entropy))
    assert q.dimension == (6 if LAWS[name].spans else q.size)
    x = inputs(5, 9)
    assert guard(torch.cat([x, 40 + x])).score[5:].median() > guard.score(x).median()
    base = torch.stack([net(x) for net in nets(kind)])
    plain = guard.predict(x, clip=0.0)
    torch.testing.assert_close(
        *((plain.mean, base[..., 0].mean(0)) if kind == "regression" else (plain.probs, base.softmax(2).mean(0)))
    )


def test_of_several_entropy_weights_each_starts_anew():
    one, several = (fit_law("flow", entropy_weight=w).predictive.q for w in (1.0, (30.0, 1.0)))  # pyright: ignore
    alone = fit_law("flow", entropy_weight=30.0).predictive.q  # pyright: ignore
    best = max(one, alone, key=lambda q: float(q.entropy().mean()))
    assert all(torch.equal(t, best.trained()[n]) for n, t in several.trained().items())


@pytest.mark.parametrize("name", LAWS)
def test_a_guard_is_saved_exported_and_shown_like_any_other(name: str, tmp_path: Path):
    guard, x = fit_law(name), inputs(9, 4)
    guard.save(tmp_path / "guard")
    again = offmap.load(tmp_path / "guard", nets())
    assert again.predictive.q.parameterization == LAWS[name]  # pyright: ignore
    assert torch.equal(guard(x).score, again(x).score)
    assert torch.equal(guard.samples(x, 4), again.samples(x, 4))
    assert torch.equal(guard.interval(x).lower, again.interval(x).lower)
    guard.export(tmp_path / "guard.pt2", x)
    exported = torch.export.load(tmp_path / "guard.pt2").module()(x)
    torch.testing.assert_close(exported["score"], guard.score(x), rtol=1e-3, atol=1e-5)
    assert f"parameterization {LAWS[name]}" in str(guard.summary())
    assert ("entropy" in guard.summary().rows[0]) == (name == "low-rank")
    assert torch.equal(guard.to("cpu").score(x), guard.score(x))


def test_a_file_of_another_law_or_with_tensors_that_do_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "guard"
    fit_law("flow").save(path)
    header, tensors = unseal(path.read_bytes())
    for change in ("directions.0.weight", "state.0.in", "raw_scale.coordinates"):
        missing = [{}] if "directions" not in change else []  # a parameter without directions is not random
        for other in (*missing, {change: tensors[change][:, :2]}, {change: tensors[change] * torch.nan}):
            path.write_bytes(seal(header, {n: t for n, t in tensors.items() if n != change} | other))
            with pytest.raises(FileError, match="is damaged or not a guard file"):
                offmap.load(path, nets())
    for lie in ({"rank": 2}, {"dimensions": 6, "layers": 2, "hidden": -1}, {"dimensions": 6, "layers": 3, "hidden": 8}):
        path.write_bytes(seal(header | {"parameterization": {"name": "flow", "config": lie}}, tensors))
        with pytest.raises((FileError, ConfigError), match="is damaged or not a guard file|Expected `hidden`"):
            offmap.load(path, nets())
    path.write_bytes(seal(header, tensors))
    monkeypatch.delitem(PARAMETERIZATIONS, "flow")
    with pytest.raises(
        FileError, match="was fitted with the parameterization 'flow', which is not registered: import the module"
    ):
        offmap.load(path, nets())
    with pytest.raises(ConfigError, match="A guard with a parameterization of your own cannot be saved: a file holds no code"):
        fit_law("flow").save(path)


@pytest.mark.parametrize("name", LAWS)
def test_a_fit_that_was_killed_goes_on_to_the_same_guard(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole, calls, minimize = fit_law(name), [], loop.minimize
    monkeypatch.setattr("offmap.maxwent.checkpoint.Checkpoint.due", lambda _: True)

    def fit_and_die(*args: Any, **options: Any) -> str:
        calls.append(minimize(*args, **{**options, "steps": min(40, options["steps"])}))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("offmap.maxwent.solve.minimize", fit_and_die)
        with pytest.raises(KeyboardInterrupt):
            fit_law(name, checkpoint=tmp_path / "state")
    monkeypatch.setattr("offmap.maxwent.solve.wander", lambda *_, **__: pytest.fail("the directions were there"))
    rest = fit_law(name, checkpoint=tmp_path / "state")
    for n, tensor in whole.predictive.q.trained().items():  # pyright: ignore
        assert torch.equal(tensor, rest.predictive.q.trained()[n])  # pyright: ignore
    assert torch.equal(whole.score(inputs(7, 2)), rest.score(inputs(7, 2)))


def test_directions_of_a_member_do_not_depend_on_others():
    alone, both = (fit_law("subspace", members=m, solver="closed-form").predictive.q.directions for m in (1, 2))  # pyright: ignore
    for name, s in alone.items():
        torch.testing.assert_close(s[0].abs(), both[name][0].abs(), rtol=1e-2, atol=1e-3)


def test_a_subspace_has_a_closed_form_with_one_scale_for_all_directions():
    q = fit_law("subspace", solver="closed-form").predictive.q  # pyright: ignore
    phi = q.scale()["coordinates"]
    torch.testing.assert_close(phi, phi[:, :1].expand_as(phi))


def test_low_rank_noise_is_normal_unless_another_is_asked_for():
    assert fit_law("low-rank").predictive.q.noise == Normal()  # pyright: ignore
    assert fit_law("flow").predictive.q.noise == Uniform()  # pyright: ignore
    with pytest.raises(
        ConfigError, match="'low-rank'` has the entropy of a Gaussian: expected `noise` to be 'normal', but got 'un"
    ):
        fit_law("low-rank", noise="uniform")
    with pytest.raises(ConfigError, match="expected `noise` to be 'normal', but got 'uniform'"):
        Config(parameterization="low-rank")


def test_options_that_do_not_go_together_are_refused():
    for name in ("low-rank", "flow"):
        with pytest.raises(ConfigError, match=f"`parameterization='{name}'` has no closed form: pass `solver='refine'`"):
            fit_law(name, solver="closed-form")
    with pytest.raises(ConfigError, match=r"Expected `parameterization` to be .*did you mean 'flow'.*, but got 'flows'"):
        offmap.fit(nets(), regression(), regression(), parameterization="flows")
    with pytest.raises(ConfigError, match="A parameterization of your own has no closed form: pass `solver='sgd'`"):
        Config(parameterization=Parameterization(lambda mean, scale, z: z, lambda *_: torch.zeros(1)))
    with pytest.raises(DataError, match=r"became infinite while directions were sought: lower the rate of `Subspace\(lr=...\)`"):
        fit_law("subspace", parameterization=Subspace(lr=1e30))
    with pytest.raises(ConfigError, match="Expected a guard with a φ for every weight, but in this one directions stand for all"):
        offmap.diagnose(fit_law("flow"), regression(80, 0))
