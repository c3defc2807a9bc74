"""The ways of the study of schedules: amplitudes under the draws, and factors of layers."""

from __future__ import annotations

import torch

from offmap.integrations.nets import mlp
from offmap.likelihoods import Gaussian
from offmap.maxwent import solve
from offmap.maxwent.config import CONFIGS
from offmap.model.forward import first_tensor
from offmap.model.params import StackedModel, at, choose, stack_models
from offmap_bench.runner.base_models import SILENT, prepare
from offmap_bench.studies.schedules import observe_draws, widen_layers
from offmap_bench.tasks.synthetic import regression


def make_task() -> tuple[StackedModel, solve.Task]:
    data = regression()
    trained = [mlp(1, 2, hidden=(8, 8), seed=seed) for seed in range(2)]
    nets = choose(stack_models(trained), data.train[0], None, first_tensor)
    train, valid, _ = prepare(trained, data, 128)
    return nets, solve.prepare(nets, train, valid, likelihood=Gaussian(), config=CONFIGS["default"], runtime=SILENT)


def test_amplitudes_under_the_draws_are_those_of_each_drawn_net_averaged() -> None:
    nets, task = make_task()
    task.q.set_scale(0.3)
    x = task.train.inputs
    observed = observe_draws(nets, task, turn=True, draws=4)
    weights = task.q.draw(range(4), seed=0, stream="fit")
    for member in range(2):
        moment = torch.zeros(8, 8, dtype=torch.float64)
        for draw in range(4):
            w = at(weights, 4 * member + draw)
            h = torch.relu(torch.relu(x @ w["0.weight"].T + w["0.bias"]) @ w["2.weight"].T + w["2.bias"]).double()
            moment += h.T @ h / len(x) / 4
        basis, last = observed.bases["4.weight"], nets.mean["4.weight"][member].double()
        expected = torch.linalg.eigvalsh(moment).flip(0).clamp_min(0).sqrt()
        torch.testing.assert_close(basis.input_rms[member, 0].double(), expected, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(basis.output_rms[member].double(), ((last @ moment) * last).sum(1).sqrt(), rtol=1e-4, atol=0)


def test_amplitudes_under_draws_that_hardly_move_are_those_of_the_nets() -> None:
    nets, task = make_task()
    task.q.set_scale(1e-9)
    for turn in (True, False):
        observed = observe_draws(nets, task, turn=turn)
        for name, basis in task.bases.items():
            torch.testing.assert_close(observed.bases[name].input_rms, basis.input_rms, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(observed.bases[name].output_rms, basis.output_rms, rtol=1e-4, atol=0)


def test_factors_of_layers_add_entropy_below_the_bound() -> None:
    _, task = make_task()
    solve.solve(task, solve.find_shape(task), 30.0)
    task.q.set_scale(lambda name: task.q.scale()[name] / (8.0 if name == "2.weight" else 1.0))  # a layer that is too tight
    before = {name: scale.clone() for name, scale in task.q.scale().items()}
    entropy = task.q.mean_log_square()
    widen_layers(task)
    assert bool((task.q.mean_log_square() > entropy + 0.5).all())
    assert bool((task.validation.evaluate(task.q).risk <= task.max_risk).all())
    for name, scale in task.q.scale().items():
        ratio = scale / before[name]
        torch.testing.assert_close(ratio, ratio.flatten(1)[:, :1].view(-1, *[1] * (scale.ndim - 1)).expand_as(ratio))
