"""Guard files: safetensors with a JSON header. Written atomically, read without running code, tied to the models by digests.

A checksum tells of accidents, not of intent: whoever writes a file can compute it. So the header is declared field by field, and
kinds, ranges and shapes are checked before anything is built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from offmap import checks
from offmap._types import Weights
from offmap.atomic import digest, seal, unseal_as, write_whole
from offmap.checks import option
from offmap.data import Place, fork_rng
from offmap.data.image_spec import ImageSpec
from offmap.detector import Calibration
from offmap.errors import ConfigError, FileError, OffmapError, first_line
from offmap.guard import MOST_DRAWS, Guard, check_clip
from offmap.likelihoods import LIKELIHOODS
from offmap.model.forward import BatchedModel, LastLayer, OutputFn, first_tensor
from offmap.model.inspect import restore_state, restored_names
from offmap.model.matrix_view import MatrixView
from offmap.model.params import as_models, stack_models
from offmap.posterior.basis import Rotation
from offmap.posterior.distribution import WeightDistribution
from offmap.posterior.noise import noise_from_state, noise_state
from offmap.posterior.parameterization import COORDINATES, PARAMETERIZATIONS, WeightLaw, law_state
from offmap.posterior.predictive import History, Outputs, Predictive, Stochastic, as_predictive
from offmap.scores.score import SCORES

FORMAT = "offmap-guard-8"
KIND, REMEDY = "a guard file", "Save the guard again."
TENSORS = ("raw_scale", "state", "directions", "rotation")  # of a weight distribution
LARGEST_SIZE = 1 << 40

Value = TypeVar("Value")
Digests: TypeAlias = dict[str, tuple[tuple[int, ...], str, str]]
"""Shape, dtype and SHA-256 of tensors by name."""


@dataclass(frozen=True)
class ModelHeader:
    """How the models run."""

    chunk_size: int = option(1, "Draws at once.", at_least=1, at_most=LARGEST_SIZE)
    batch_size: int = option(1, "Rows at once.", at_least=1, at_most=LARGEST_SIZE)
    output_numbers: int = option(1, "Numbers in one output row.", at_least=1, at_most=LARGEST_SIZE)
    output_axes: int | None = option(None, "Axes of one output row.", at_least=0, at_most=64)
    last_layer: LastLayer | None = None


@dataclass(frozen=True)
class GuardHeader:
    """Options of the guard."""

    draws: int = option(50, "Draws of every member.", at_least=2, at_most=MOST_DRAWS)
    clip: float | None = option(None, "Bound on the draws that predict.", check=check_clip)
    seed: int = 0
    target: str = "labels"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class CalibrationHeader:
    """Options of the calibration; its tensors are in the file."""

    false_alarms: float = option(0.05, "Rate of false alarms.", check=lambda value: checks.fraction("false_alarms", value))
    exact: bool = True
    seen: bool = False
    effective_rows: int | None = option(None, "What the rows are worth.", at_least=1, at_most=LARGEST_SIZE)


@dataclass(frozen=True)
class Registered:
    """A registered score, likelihood or parameterization and its plain values; its tensors are in the file."""

    name: str
    config: dict[str, Any]


@dataclass(frozen=True)
class Header:
    """All that a guard file says beside its tensors."""

    format: str
    models: list[Digests]
    modules: dict[str, str]
    views: dict[str, MatrixView]
    why: dict[str, str]
    restore_state: list[str]
    noise: dict[str, Any]
    parameterization: Registered | None
    likelihood: Registered
    score: Registered
    model: ModelHeader
    guard: GuardHeader
    calibration: CalibrationHeader
    history: History
    custom_output_fn: bool
    about: dict[str, Any]
    image_spec: ImageSpec | None
    allow_nan: bool


def save(guard: Guard, path: str | Path) -> None:
    """Write a guard to `path`: with what is random about the weights, or without weights if its Predictive is the user's."""
    predictive, likelihood, score = guard.predictive, guard.likelihood, guard.score_module
    kind = next((name for name, cls in LIKELIHOODS.items() if cls is type(likelihood)), None)
    if kind is None or SCORES.get(score.name) is not type(score):
        raise ConfigError("To save a guard with a score or likelihood of your own, register it: a file holds no code.")
    entries, tensors = _of_weights(predictive) if isinstance(predictive, Stochastic) else _of_outputs(guard)
    state = likelihood.state()
    tensors |= {f"likelihood.{n}": v for n, v in state.items() if isinstance(v, Tensor)}
    tensors |= {
        f"calibration.{n}": t for n in ("scores", "residuals", "weights") if (t := getattr(guard.calibration, n)) is not None
    }
    tensors |= {f"score.{n}": t for n, t in score.state_dict().items()}
    header = Header(
        format=FORMAT,
        likelihood=Registered(kind, {n: v for n, v in state.items() if not isinstance(v, Tensor)}),
        score=Registered(score.name, score.config()),
        guard=GuardHeader(**{f.name: getattr(guard, f.name) for f in fields(GuardHeader)}),
        calibration=CalibrationHeader(**{f.name: getattr(guard.calibration, f.name) for f in fields(CalibrationHeader)}),
        history=guard.history,
        about=dict(guard.about),
        image_spec=guard.image_spec,
        allow_nan=guard.place.allow_nan,
        **entries,
    )
    try:
        content = seal(asdict(header), tensors)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Expected plain and short values in `about`, as JSON has them, but {first_line(error)}.") from error
    write_whole(checks.path("path", path), content, folders=False)


def _of_weights(predictive: Stochastic) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Describe a weight distribution and its models."""
    q, model = predictive.q, predictive.model
    if q.trainable_mean:
        raise ConfigError("A guard whose mean was trained cannot be saved: a file holds no weights, and the models' differ.")
    entries: dict[str, Any] = {
        "models": [_digests({n: t[m] for n, t in [*q.mean.items(), *q.fixed.items()]}, model.module) for m in range(q.members)],
        "modules": _modules(model.module),
        "views": dict(q.views),
        "why": q.why,
        "restore_state": restored_names(model.module),
        "noise": noise_state(q.noise),
        "parameterization": None if q.parameterization is None else Registered(**law_state(q.parameterization)),
        "model": ModelHeader(**{f.name: getattr(model, f.name) for f in fields(ModelHeader)}),
        "custom_output_fn": model.output_fn is not first_tensor,
    }
    return entries, {f"{kind}.{n}": t for kind in TENSORS for n, t in getattr(q, kind).items()}


def _of_outputs(guard: Guard) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Describe a Predictive of the user's, which stays with the user, by its outputs at a few inputs, if it gives them twice."""
    entries = dict[str, Any](
        models=[], modules={}, views={}, why={}, restore_state=[], noise={}, parameterization=None, model=ModelHeader()
    )
    entries["custom_output_fn"] = False
    if guard.probe is None:
        return entries, {}
    first, again = (_probe(guard.predictive, guard.probe, guard.seed) for _ in range(2))
    same = torch.equal(first, again) and bool(first.isfinite().all())
    return entries, {"probe.inputs": guard.probe, "probe.outputs": first} if same else {}


def _probe(predictive: Predictive, x: Tensor, seed: int) -> Tensor:
    """Return two draws of every member."""
    with fork_rng(seed):
        return predictive.outputs(x, 2, clip=None, seed=seed)


def load(
    path: str | Path, model: nn.Module | Sequence[nn.Module] | Outputs, *, strict: bool = True, output_fn: OutputFn | None = None
) -> Guard:
    """Read a guard.

    Args:
        path: A file that `Guard.save` wrote.
        model: The model or models that it was fitted on, or the Predictive that `offmap.guard` took: the file holds neither.
        strict: Refuse other weights than at fit time, and a Predictive with other outputs.
        output_fn: The function that was passed to `fit`, if one was.
    """
    return GuardFile.read(path).build(model, strict=strict, output_fn=output_fn)


@dataclass(frozen=True)
class GuardFile:
    """A guard file that was read and checked, before its models are there."""

    path: Path
    header: Header
    tensors: Weights = field(repr=False)

    @classmethod
    def read(cls, path: str | Path) -> GuardFile:
        """Read a file; a FileError names the first field of its header that is missing, unknown or of another kind."""
        path = checks.path("path", path)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise FileError(f"Cannot read {path}: {error.strerror}.") from error
        values, tensors = unseal_as(KIND, FORMAT, content, path, REMEDY)
        hints, parsed = _hints(Header), dict[str, Any]()
        for key in [*hints, *values]:
            try:
                parsed[key] = parse(values[key], hints[key])
            except (KeyError, ValueError, OverflowError, OffmapError) as error:
                raise FileError(f"{path} is damaged or not {KIND}: invalid header field {key!r}. {REMEDY}") from error
        return cls(path, Header(**parsed), tensors)

    def build(
        self, model: nn.Module | Sequence[nn.Module] | Outputs, *, strict: bool = True, output_fn: OutputFn | None = None
    ) -> Guard:
        """Build the guard around its models: see `offmap.load`."""
        try:
            if not self.header.models:
                return self._build_around(as_predictive(model), strict=strict)  # pyright: ignore[reportArgumentType]
            models = self._check_models(model, strict=strict, output_fn=output_fn)
            return self._build(models, output_fn or first_tensor)
        except OffmapError:
            raise
        except Exception as error:  # any other malformed content
            raise FileError(f"{self.path} is damaged or not {KIND} ({first_line(error)}). {REMEDY}") from error

    def _check_models(self, model: Any, *, strict: bool, output_fn: OutputFn | None) -> list[nn.Module]:
        """Return the models, refused unless they are those of fit time."""
        models = as_models(model)
        if len(models) != len(self.header.models):
            raise FileError(f"{self.path} was fitted on {len(self.header.models)} models, but got {len(models)}.")
        for member, module in enumerate(models):
            self._check_model(module, member, strict=strict)
        if self.header.custom_output_fn and output_fn is None:
            raise ConfigError(f"{self.path} was fitted with an `output_fn` of your own: pass the same function to `load`.")
        return models

    def _build_around(self, predictive: Predictive, *, strict: bool) -> Guard:
        """Build the guard around a Predictive of the user's, refused if `strict` and its outputs are others than at save time."""
        module = None if predictive.model is None else predictive.model.module
        place = Place.of(module, allow_nan=self.header.allow_nan)
        self._check_tensors({}, None)
        probe, then = (self.tensors.get(f"probe.{name}") for name in ("inputs", "outputs"))
        if probe is not None and then is not None and strict:
            now = _probe(predictive, probe.to(place.device), self.header.guard.seed).to(then)
            if now.shape != then.shape or not torch.allclose(now, then, rtol=1e-3, atol=1e-5 * float(then.abs().max())):
                raise FileError(
                    f"{self.path} belongs to another predictive: at some test inputs it gave other outputs, {tuple(then.shape)}, "
                    f"than this one, {tuple(now.shape)}. Pass the one that the guard was made with, or `strict=False` to use the "
                    "guard anyway."
                )
        return self._build_guard(predictive, place, probe)

    def _build(self, models: list[nn.Module], output_fn: OutputFn) -> Guard:
        header, scales, rotation = self.header, self._part("raw_scale."), self._part("rotation.")
        law = None if header.parameterization is None else self._build_law(header.parameterization)
        directions = self._part("directions.") if law is not None and law.spans else None
        stacked = stack_models(models, lambda name, tensor: name in (scales if directions is None else directions))
        self._check_tensors(stacked.mean, law)
        if header.restore_state:
            restore_state(stacked.module, header.restore_state)
        place = Place.of(stacked.module, allow_nan=header.allow_nan)
        q = WeightDistribution(
            stacked.mean,
            initial_scale={n: F.softplus(t) for n, t in scales.items()},
            rotation=Rotation(rotation, header.views, header.why),
            fixed=stacked.fixed,
            noise=noise_from_state(header.noise),
            parameterization=law,
            directions=directions,
        ).to(place.device)
        with torch.no_grad():
            for name, tensor in q.trained().items():
                tensor.copy_(self.tensors[name])
        model = BatchedModel(stacked.module, output_fn, **vars(header.model))
        return self._build_guard(Stochastic(model, q.requires_grad_(False), header.history), place)

    def _build_guard(self, predictive: Predictive, place: Place, probe: Tensor | None = None) -> Guard:
        """Read all but the Predictive."""
        header = self.header
        likelihood = LIKELIHOODS[header.likelihood.name]
        state: dict[str, Any] = {n: parse(v, _hints(likelihood)[n]) for n, v in header.likelihood.config.items()}
        state |= {n: t.to(place.device) for n, t in self._part("likelihood.").items()}
        scores, residuals = (self.tensors[f"calibration.{name}"].to(place.device) for name in ("scores", "residuals"))
        weights = self.tensors.get("calibration.weights")
        if weights is not None and not len(weights) == len(scores) == len(residuals):
            raise self._misfit("calibration.weights")
        if header.score.name not in SCORES:
            raise FileError(f"{self.path} was fitted with the score {header.score.name!r}, which is not registered: import the "
                            "module that registers it.")  # fmt: skip
        try:
            score = SCORES[header.score.name].from_config(header.score.config).eval()
        except LookupError as error:
            raise FileError(f"{self.path} was fitted with {error.args[0]}, which this version of offmap does not have. Fit the "
                            "guard again, or load it with the version that wrote it.") from error  # fmt: skip
        try:
            score.fill_buffers(self._part("score."))
        except ValueError as error:
            raise self._misfit(f"score.{error}") from error
        return Guard(
            predictive=predictive,
            likelihood=likelihood.from_state(state),
            score_module=score.to(place.device),
            calibration=Calibration(scores, residuals, weights=weights, **vars(header.calibration)),
            place=place,
            about=header.about,
            image_spec=header.image_spec,
            probe=probe,
            **vars(header.guard),
        )

    def _build_law(self, state: Registered) -> WeightLaw:
        """Build the parameterization of the header."""
        if state.name not in PARAMETERIZATIONS:
            raise FileError(f"{self.path} was fitted with the parameterization {state.name!r}, which is not registered: import "
                            "the module that registers it.")  # fmt: skip
        kind = type(PARAMETERIZATIONS[state.name])
        return kind(**{name: parse(value, _hints(kind)[name]) for name, value in state.config.items()})

    def _check_tensors(self, mean: Mapping[str, Tensor], law: WeightLaw | None) -> None:
        """Raise a FileError for the first tensor that does not fit models with these stacked weights and this law."""
        shapes, members = {f"raw_scale.{n}": tuple(m.shape) for n, m in mean.items()}, len(self.header.models)
        if law is not None and law.spans:
            k = self.tensors.get(name := f"raw_scale.{COORDINATES}", torch.empty(0, device="cpu")).shape[1:].numel()
            if not mean or k == 0:
                raise self._misfit(name)
            shapes = {f"directions.{n}": (members, k, *m.shape[1:]) for n, m in mean.items()} | {name: (members, k)}
        if law is not None:
            scale = {n: torch.empty(shape, device="meta") for n, shape in strip(shapes, "raw_scale.").items()}
            shapes |= {f"state.{name}": (members, *shape) for name, shape in law.shapes(scale).items()}
        for name in {**shapes, **self.tensors}:
            if name not in self.tensors or not _fits(name, self.tensors[name], mean, self.header.views, shapes):
                raise self._misfit(name)

    def _part(self, prefix: str) -> Weights:
        return strip(self.tensors, prefix)

    def _misfit(self, name: str) -> FileError:
        shape = tuple(self.tensors[name].shape) if name in self.tensors else "missing"
        return FileError(f"{self.path} is damaged or not {KIND}: `{name}`, {shape}, does not fit. {REMEDY}")

    def _check_model(self, model: nn.Module, member: int, *, strict: bool) -> None:
        """Raise a FileError with the first difference between a model of fit time and this one."""
        then, now = self.header.models[member], _digests(dict(model.state_dict()), model)
        before, after = _describe(then, self.header.modules), _describe(now, _modules(model))
        for part in before | after:
            was, is_now = before.get(part, "nothing"), after.get(part, "nothing")
            if was != is_now:
                raise FileError(
                    f"{self.path} belongs to another architecture: {part} was {was} at fit time and is {is_now} now (member "
                    f"{member})."
                )
        other = [name for name in then if then[name] != now[name]]
        if strict and other:
            raise FileError(
                f"{self.path} was fitted on other weights: `{other[0]}` differs (member {member}). Load the weights of fit "
                "time, or pass `strict=False` to use the guard anyway."
            )


def parse(value: Any, hint: Any) -> Any:
    """Return a value of JSON as the type says; a ValueError if it is another.

    >>> parse({"view": [2, 3], "outs": [0], "axes": [1], "blocks": []}, MatrixView)
    MatrixView(view=(2, 3), outs=(0,), axes=(1,), blocks=())
    """
    if type(value) is hint or hint is Any:
        return value
    kind, kinds = _parts(hint)
    if value is None and NoneType in kinds:
        return value
    if kind in (Union, UnionType):
        return parse(value, next(k for k in kinds if k is not NoneType))
    if kind is dict and isinstance(value, dict):
        return {name: parse(entry, kinds[1]) for name, entry in value.items()}
    if kind is list and isinstance(value, list):
        return [parse(entry, kinds[0]) for entry in value]
    if kind is tuple and isinstance(value, list):
        several = [kinds[0]] * len(value) if kinds[-1] is ... else kinds
        return tuple(parse(entry, k) for entry, k in zip(value, several, strict=True))
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if is_dataclass(hint) and isinstance(value, dict) and set(value) == {f.name for f in fields(hint)}:
        built: Any = hint(**{name: parse(entry, _hints(hint)[name]) for name, entry in value.items()})  # pyright: ignore
        checks.validate(built)
        return built
    raise ValueError(value)


def strip(values: Mapping[str, Value], prefix: str) -> dict[str, Value]:
    """Return what is filed under a prefix, by the rest of its name."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


_hints = cache(get_type_hints)
_parts = cache(lambda hint: (get_origin(hint), get_args(hint)))


def _fits(
    name: str, tensor: Tensor, mean: Mapping[str, Tensor], views: Mapping[str, MatrixView],
    shapes: Mapping[str, tuple[int, ...]],
) -> bool:  # fmt: skip
    """Whether a tensor fits the models and its view; those of a score or likelihood are checked by what is built of them."""
    kind, _, rest = name.partition(".")
    floating = tensor.is_floating_point()
    if kind in ("score", "likelihood"):
        return not floating or not bool(tensor.isnan().any())
    if kind == "probe":
        return floating and bool(tensor.isfinite().all())
    if kind == "calibration":
        axes = {"scores": (1,), "residuals": (1, 2), "weights": (1,)}.get(rest, ())
        in_range = rest != "weights" or (bool((tensor > 0).all()) and float(tensor.sum()) < 1)
        return floating and tensor.ndim in axes and tensor.numel() > 0 and not bool(tensor.isnan().any()) and in_range
    if not floating or not bool(tensor.isfinite().all()):
        return False
    return tensor.shape == shapes.get(name) or (
        kind == "rotation" and rest in mean and _rotates(tensor, views.get(rest), mean[rest])
    )


def _rotates(matrix: Tensor, view: MatrixView | None, mean: Tensor) -> bool:
    """Whether matrices (M, G, N, d, d) rotate the rows of a parameter (M, ...) under this view."""
    if view is None or sorted((*view.outs, *view.axes)) != list(range(len(view.view))):
        return False
    if math.prod(view.view) != mean[0].numel() or sum(view.blocks) != view.outputs or 0 in view.blocks:
        return False
    if matrix.ndim != 5 or matrix.shape[:2] != (len(mean), max(1, len(view.blocks))):
        return False
    pieces, width = matrix.shape[2], matrix.shape[3]
    return matrix.shape[4] == width and (pieces - 1) * width < view.fan_in <= pieces * width


def _digests(weights: Mapping[str, Tensor], model: nn.Module) -> Digests:
    """Return the digests of all tensors that a call of the model reads."""
    return {n: digest(weights.get(n, t)) for n, t in [*model.named_parameters(), *model.named_buffers()]}


def _describe(digests: Digests, modules: Mapping[str, str]) -> dict[str, str]:
    return {f"`{n}`": f"{row[0]} {row[1]}" for n, row in digests.items()} | {f"module `{n}`": m for n, m in modules.items()}


def _modules(model: nn.Module) -> dict[str, str]:
    """Return the class of every module by name: models whose tensors are alike may still compute different things."""
    # a graph has a class of its own, with the name of what was traced until it is copied
    return {
        name: "GraphModule" if isinstance(module, GraphModule) else type(module).__name__
        for name, module in model.named_modules()
    }
