"""A guard's score from one pass of the first base model: `distill` trains a head, `DistilledGuard` scores with it.

The inputs of an example and of some hidden layers are there after one pass. A head of three small layers reads the guard's score
off them:

    score(x) = c + s·(head(g·W·(features(x) − m)) + slope·log⁺(r/ρ))

with c and s the median and the spread of the guard's scores on in-distribution data, and W the whitening of in-distribution
features, which becomes part of the head's first layer. Farther away than in-distribution rows, at a radius r > ρ, g bounds the
radius to ρ·(2 − ρ/r), so that the head tells directions apart, and the score grows with log r, as one that joins logarithms of
distances does; far OOD rows give the slope. Of other scores, such as variances, asinh((score − c)/s) is learned, which grows so,
too. OOD rows to learn from are made of in-distribution ones alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from offmap import checks
from offmap._types import Data, Inputs
from offmap.data import Batch, Rows, fork_rng
from offmap.data.batch import WIDEST, take_rows
from offmap.data.batches import load_train_valid, mark_repeats, sample_rows, watch_repeats
from offmap.detector import Calibration, Detector
from offmap.errors import ConfigError, DataError
from offmap.export.module import BaseModels, GuardModule, example_rows, export_module, layers_of, with_weights
from offmap.export.onnx import ExportInfo, check_path
from offmap.fit import REFERENCE_ROWS
from offmap.guard import Guard
from offmap.likelihoods import Prediction
from offmap.maxwent.train import adam, minimize
from offmap.model.capture import CONVOLUTIONS
from offmap.model.capture import features as read_features
from offmap.model.forward import MODEL_ERRORS, model_failed
from offmap.model.params import all_params
from offmap.posterior.noise import Normal
from offmap.random import generator
from offmap.scores.combine import CombinedScore
from offmap.scores.score import Features, Reads, Score, ScoreData, spread_out
from offmap.scores.terms import Term, directions, project

LAYERS, NARROW = 3, 256
"""Layers that the head reads, and numbers per row of each, at most."""

WIDTH = 64
"""Units of the head's hidden layers."""

STEPS = 1500
"""Of the head's training with Adam; the learning rate rises over a tenth of them and falls like a cosine."""


class Head(nn.Module):
    """Three small layers and the scale of the guard's scores: (B, D) -> (B,).

    `logarithmic` scores are learned as they are, others as asinh. Buffers: mean and standard deviation of in-distribution
    features, (D,), and the `radius` ρ, below which 99 % of their rows lie; `shift` (WIDTH,) moves what the first layer gives.
    """

    mean: Tensor
    std: Tensor
    radius: Tensor
    shift: Tensor

    def __init__(self, reference: Tensor, centre: float, unit: float, seed: int = 0, *, logarithmic: bool = True) -> None:
        super().__init__()
        layers: list[nn.Linear] = []
        for place, (inputs, outputs) in enumerate([(reference.shape[1], WIDTH), (WIDTH, WIDTH), (WIDTH, 1)]):
            # without its own start, which would draw from the global generator; small weights: what is not learned stays smooth
            layer = skip_init(nn.Linear, inputs, outputs, device="cpu", dtype=torch.float32)
            assert isinstance(layer, nn.Linear)
            with torch.no_grad():
                layer.weight.copy_(Normal().sample((outputs, inputs), generator(seed, "head", place)) * (3 * inputs) ** -0.5)
                layer.bias.zero_()
            layers.append(layer)
        self.first: nn.Linear = layers[0]
        self.second: nn.Linear = layers[1]
        self.last: nn.Linear = layers[2]
        self.centre: float = centre
        self.unit: float = unit
        self.slope: float = 0.0
        self.logarithmic: bool = logarithmic
        rows = reference.double()
        std = rows.std(0, correction=0)
        self.register_buffer("mean", rows.mean(0))
        self.register_buffer("std", torch.where(std > 1e-6 * std.max(), std, std.max()).clamp_min(torch.finfo(std.dtype).tiny))
        self.register_buffer("shift", torch.zeros(WIDTH, device="cpu"))
        self.register_buffer("radius", torch.ones((), dtype=torch.float64, device="cpu"))
        self.radius = self.measure_radius(rows).quantile(0.99).clamp_min(1e-3)

    def measure_radius(self, features: Tensor) -> Tensor:
        """Return the root mean square of standardised features, (B, D) -> (B,) in float64."""
        return ((features.double() - self.mean) / self.std).square().mean(1).sqrt()

    def split(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return g, which bounds the radius, and log⁺(r/ρ): (B, D) -> (B, 1) each, in float64."""
        far = (self.measure_radius(features) / self.radius).clamp_min(1).unsqueeze(1)
        return (2 - 1 / far) / far, far.log()

    def after_first(self, hidden: Tensor, log_radius: Tensor) -> Tensor:
        """Run the other layers and add what grows with the radius, (B, WIDTH) and (B, 1) -> (B,)."""
        return (self.last(F.relu(self.second(F.relu(hidden)))) + self.slope * log_radius).squeeze(1)

    def forward(self, features: Tensor) -> Tensor:
        """Return the score, (B,); what is not finite is infinitely OOD."""
        scale, log_radius = (t.to(self.first.weight) for t in self.split(features))
        hidden = scale * F.linear(features.to(self.first.weight), self.first.weight, self.shift) + self.first.bias
        value = self.after_first(hidden, log_radius)
        value = value if self.logarithmic else value.clamp(-30, 30).sinh()  # float32 holds sinh of that with ease
        return (self.centre + self.unit * value).nan_to_num(nan=torch.inf, posinf=torch.inf)


class DistilledScore(Score):
    """The score that a head, once it is trained, reads off the inputs and the inputs of some layers of the first member.

    `widths` are numbers per row of the inputs, "", and of every layer; more than 256 are turned into random directions.
    """

    def __init__(self, widths: dict[str, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.widths: dict[str, int] = widths
        self.head: Head | None = None
        self.reads: Reads = Reads(False, layers=tuple(widths)[1:])
        for place, width in enumerate(widths.values()):
            fixed = directions(width, NARROW)
            self.register_buffer(f"directions{place}", None if fixed is None else fixed.to(dtype))

    @classmethod
    def fit(cls, data: ScoreData) -> Score:
        """Not fitted to data but to a guard, by `distill`."""
        raise NotImplementedError

    def read(self, features: Features) -> Tensor:
        """Return what the head reads, (B, D)."""
        parts = [features.inputs.flatten(1), *(features.layer_inputs[0][n] for n in self.reads.layers)]
        wide = [project(part, getattr(self, f"directions{place}")) for place, part in enumerate(parts)]
        return torch.cat([part.to(torch.promote_types(part.dtype, torch.float32)) for part in wide], 1)

    def forward(self, features: Features) -> Tensor:
        """Score B rows, (B,)."""
        assert self.head is not None
        return self.head(self.read(features))


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class DistilledGuard(Detector):
    """A detector that reads a guard's score off one pass of the first base model, whose prediction it gives.

    Args:
        guard: The teacher.
        base: The first member with its trained weights.
        score_module: The head that was trained on the guard's scores.
    """

    guard: Guard
    base: BaseModels
    score_module: DistilledScore

    def _describe(self) -> str:
        return f"one pass, taught by a guard of {self.guard.draws} draws"

    def block_rows(self) -> int:
        """Return how many rows the model runs at once."""
        return min(_rows_at_once(self.guard), self.guard.block_rows())

    @torch.no_grad()
    def _features(self, rows: Inputs) -> Features:
        x = check_rows(rows)
        try:
            return run_base(self.guard, self.base, x)
        except MODEL_ERRORS as error:
            raise model_failed(self.base.model[0], x, error) from error

    @torch.no_grad()
    def _score(self, features: Features) -> Tensor:
        return self.score_module(features).to(self.precision)

    def _predict(self, features: Features) -> Prediction:
        return self.guard.likelihood.predict(features.base_outputs)

    def export(self, path: str | Path, example: Inputs) -> ExportInfo:
        """Write pass, score and verdict as one graph, `.onnx` or `.pt2`, with the outputs and checks of `Guard.export`.

        Args:
            path: The file.
            example: Some inputs.
        """
        path = check_path(path)
        if self.place.device.type != "cpu":
            raise ConfigError(f"Expected a guard on the CPU, but it is on {self.place.device}. Export `guard.to('cpu')`.")
        rows, likelihood = check_rows(example_rows(self, example)), self.guard.likelihood
        module = GuardModule(rows, likelihood, self.score_module, self.calibration, self.precision, self.base).eval()
        facts = {"exact": True, "draws": 1, "members": 1, "half": False, "score": "one pass"}
        return export_module(self, module, rows, path, self.base.model[0], facts)


def run_base(guard: Guard, base: BaseModels, rows: Tensor) -> Features:
    """Run the first member, and return what a head may read of it."""
    run = base(rows)
    return Features(rows, guard.likelihood, 1, base_outputs=torch.stack(run.outputs), layer_inputs=run.layer_inputs)


def _rows_at_once(guard: Guard) -> int:
    model = with_weights(guard.predictive).model
    return 1024 if model.layers else model.batch_size


def distill(
    guard: Guard, train: Data, valid: Data | None = None, *, rows: int = 12_000, false_alarms: float = 0.05, seed: int = 0
) -> DistilledGuard:
    """Teach a small head the guard's score: a detector that costs about two passes instead of draws and neighbours.

    The head reads inputs and hidden layers of the first model. No OOD data are needed: the guard scores rows of `train`, and
    OOD ones made of them. Before you rely on the head, look at how well it keeps the guard's order on your data
    (`offmap.evaluate` takes both).

    Args:
        guard: The teacher. Its inputs must be one floating-point tensor or array.
        train: Training data, of which at most 4,096 rows are taken.
        valid: Rows the model has not seen, which set the threshold. None: a tenth of `train`, uncalibrated, with a warning.
        rows: How many OOD rows to make.
        false_alarms: Share of in-distribution rows that may be called OOD.
        seed: Seed of the OOD rows and of the head.
    """
    if not isinstance(guard, Guard):
        raise ConfigError(f"Expected a Guard, as `offmap.fit` gives, but got {type(guard).__name__}.")
    if guard.place.allow_nan:
        raise ConfigError("Expected a guard of complete inputs to distill, but this one allows NaN. Export the guard itself.")
    rows, seed = checks.integer("rows", rows, 100), checks.integer("seed", seed)
    with fork_rng(guard.seed):
        data, held = load_train_valid(train, valid, guard.place, seed=guard.seed, batch_size=128, target=guard.target)
        data = watch_repeats(data, held)
    false_alarms = checks.fraction("false_alarms", false_alarms, example=0.05)
    with fork_rng(guard.seed):
        parts = sample_rows(data, REFERENCE_ROWS, guard.seed)
        held, _ = mark_repeats(data, held)
    several = [check_rows(part) for part in parts]
    if len(several) != 1 or len(several[0]) < 20:
        shapes = ", ".join(str(tuple(part.shape)) for part in several[:3])
        raise DataError(f"Expected at least 20 training rows of one shape, but got {shapes}. Pad all rows to one length.")
    reference = several[0]
    ood = make_ood_rows(reference.flatten(1), rows, seed).unflatten(1, reference.shape[1:])
    base, score = prepare(guard, reference)
    step = _rows_at_once(guard)

    def read(x: Tensor) -> Tensor:
        return torch.cat([score.read(run_base(guard, base, x[i : i + step])) for i in range(0, len(x), step)])

    with torch.inference_mode(False):
        with torch.no_grad():
            far, near = read(ood), read(reference)
            far_scores, near_scores = guard.score(ood), guard.score(reference)
        times = -(-rows // 6 // len(near))  # in-distribution rows must not be forgotten among so many OOD ones
        features, scores = torch.cat([far, near.repeat(times, 1)]), torch.cat([far_scores, near_scores.repeat(times)])
        logarithmic = isinstance(guard.score_module, CombinedScore | Term)
        score.head = train_head(features, scores, near, guard.calibration.scores, seed=seed, logarithmic=logarithmic)
    with torch.no_grad():
        scores = score.head(read(check_rows(held.inputs))).to(guard.precision)
    calibration = Calibration(scores, None, false_alarms, seen=held.seen)
    calibration.warn_if_infinite(held.rows)
    return DistilledGuard(
        guard=guard, base=base, score_module=score, calibration=calibration, place=guard.place, target=guard.target,
        seed=guard.seed, image_spec=guard.image_spec,
    )  # fmt: skip


def check_rows(inputs: Inputs) -> Tensor:
    """Return one floating-point tensor of one row per example, or raise an error with the remedy."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        kind = f"a tensor of {inputs.dtype}" if isinstance(inputs, Tensor) else type(inputs).__name__
        raise DataError(
            f"Expected one floating-point tensor or array per example, but got {kind}: `distill` makes OOD rows "
            "by mixing in-distribution ones, and ids, masks or several inputs do not mix. Use the guard itself, with fewer "
            "`draws` if it must be fast, or fit it with params='last-layer', whose draws share one pass."
        )
    if not 1 <= inputs[0].numel() <= WIDEST:
        raise DataError(f"Expected 1 to {WIDEST} numbers per example, but got {inputs[0].numel()}. Use the guard itself.")
    return inputs


def prepare(guard: Guard, reference: Tensor) -> tuple[BaseModels, DistilledScore]:
    """Choose what is read off a pass of the first member: the inputs, and some layers spread over the depth."""
    predictive = with_weights(guard.predictive)
    model = predictive.model
    weights, few = {**all_params(model.module), **predictive.mean_weights(0)}, take_rows(reference, slice(0, 4))
    inputs = read_features(model.module, weights, few, model.output_fn, maps=True)
    names = [n for n, h in inputs.items() if _shows_input(model.module, n) and not torch.equal(h, few.flatten(1).to(h))]
    names = spread_out(names, LAYERS)
    base = BaseModels(model, [weights], names)
    with torch.no_grad():
        layers = base(few).layer_inputs[0]
    widths = {"": few[0].numel()} | {name: layers[name].shape[1] for name in names}
    return base, DistilledScore(widths, guard.precision).to(reference.device)


def _shows_input(model: nn.Module, name: str) -> bool:
    """Whether a parameter belongs to layers that show what they are given."""
    return all(isinstance(m, (nn.Linear, *CONVOLUTIONS)) for m in layers_of(model, name).values())


def train_head(
    features: Tensor, scores: Tensor, reference: Tensor, levels: Tensor, *, seed: int = 0, logarithmic: bool = True
) -> Head:
    """Train a head on the guard's scores (N,) of `features` (N, D), with weights and batches of that seed.

    Features of `reference` rows, (n, D), set the whitening. The guard's scores of in-distribution data are the `levels`, (n,):
    their median and the half of what 68 % span set the scale.
    """
    levels = levels[levels.isfinite()].double()
    levels = levels if len(levels) else levels.new_zeros(1)
    low, centre, high = levels.quantile(levels.new_tensor([0.16, 0.5, 0.84])).tolist()
    unit = (high - low) / 2 or 1.0
    head = Head(reference, centre, unit, seed, logarithmic=logarithmic).to(features.device)
    matrix, shift = fit_whitening(reference)
    wanted = ((scores.double() - centre) / unit).nan_to_num(nan=torch.inf).clamp(-1e9, 1e9)
    scale, log_radius = head.split(features)
    head.slope = fit_slope(log_radius[:, 0], wanted if logarithmic else wanted.asinh())
    white = torch.cat([scale * (features.double() @ matrix + shift), log_radius], 1)
    data = Rows(white.float(), wanted.asinh().float(), 256, "the guard's scores")

    def objective(step: int, batch: Batch) -> Tensor:
        x, y = batch
        assert isinstance(x, Tensor)
        value = head.after_first(head.first(x[:, :-1]), x[:, -1:])
        return F.smooth_l1_loss(value.asinh() if logarithmic else value, y)

    def schedule(step: int) -> float:
        return min(1.0, 10 * (step + 1) / STEPS) * (1 + math.cos(math.pi * step / STEPS)) / 2

    minimize(objective, adam(head.parameters(), lr=3e-3), data, steps=STEPS, seed=seed, schedule=schedule)
    with torch.no_grad():  # W·(f − m) becomes part of the first layer
        weight = head.first.weight
        head.shift.copy_(weight.double() @ shift)
        weight.copy_(weight.double() @ matrix.mT)
    return head.requires_grad_(False).eval()


def fit_slope(x: Tensor, y: Tensor) -> float:
    """Return the slope of least squares through (x, y), (N,) each, where x > 0, but 0 at least.

    >>> fit_slope(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([9.0, 3.0, 5.0]))
    2.0
    """
    x, y = x[x > 0], y[x > 0]
    gaps = x - x.mean()
    slope = float((gaps * y).sum() / gaps.square().sum())
    return max(0.0, slope) if math.isfinite(slope) else 0.0


def fit_whitening(reference: Tensor) -> tuple[Tensor, Tensor]:
    """Return W (D, D) and −m·W (D,) in float64: features (n, D) times W, plus the shift, are uncorrelated and of variance 1, or
    less where they vary by less than 3 % of the most.
    """
    rows = reference.double()
    mean = rows.mean(0)
    values, vectors = torch.linalg.eigh((rows - mean).mT @ (rows - mean) / len(rows))
    size = values.clamp_min(0).sqrt()
    matrix = vectors / size.clamp_min(3e-2 * float(size.max()) or 1.0)
    return matrix, -mean @ matrix


def make_ood_rows(rows: Tensor, count: int, seed: int = 0) -> Tensor:
    """Make rows near in-distribution ones (N, D), between them, beside them and far away, (count, D).

    Two sixths lie on lines through two rows, up to half their distance beyond; a sixth there with some noise; a sixth are rows
    with little to much noise; a sixth have some columns from other rows; the rest fill a box around all, or are scaled up, or
    have noise, up to a thousand times their spread.

    >>> make_ood_rows(torch.eye(3), 12).shape
    torch.Size([12, 3])
    """
    source, sixth = generator(seed, "strange"), count // 6
    middle, unit, width = rows.mean(0), rows.std(0, correction=0), rows.shape[1]

    def between(shape: Sequence[int], low: float, high: float) -> Tensor:
        return (low + (high - low) * torch.rand(*shape, generator=source, device="cpu")).to(rows)

    def pick(size: int) -> Tensor:
        return rows[torch.randint(len(rows), (size,), generator=source, device="cpu").to(rows.device)]

    def on_lines(size: int) -> Tensor:
        first, second = pick(size), pick(size)
        return first + between((size, 1), -0.5, 1.5) * (second - first)

    def noise(size: int, low: float, high: float) -> Tensor:
        normal = Normal().sample((size, width), source).to(rows)
        return unit * normal * 10 ** between((size, 1), low, high)

    def shuffle_columns(size: int) -> Tensor:
        others = torch.randint(len(rows), (size, width), generator=source, device="cpu").to(rows.device)
        swapped = between((size, width), 0, 1) < between((size, 1), 0, 1)
        return torch.where(swapped, rows.gather(0, others), pick(size))

    low, high, half = rows.amin(0), rows.amax(0), (count - 5 * sixth) // 2
    box = low + (high - low) * between((half, width), 0, 1)
    rest = count - 5 * sixth - half
    return torch.cat([
        on_lines(2 * sixth),
        on_lines(sixth) + noise(sixth, -2.5, -0.5),
        pick(sixth) + noise(sixth, -2.0, 0.3),
        shuffle_columns(sixth),
        middle + (box - middle) * between((half, 1), 0.5, 1.5),
        middle + (pick(rest - rest // 2) - middle) * 10 ** between((rest - rest // 2, 1), 0, 3),
        pick(rest // 2) + noise(rest // 2, 0, 3),
    ])  # fmt: skip
