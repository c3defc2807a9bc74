"""Guard files: safetensors with a JSON header. Written atomically, read without running code, tied to the models by digests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from offmap._types import Weights
from offmap.atomic import HEADER, write_whole
from offmap.data import Place
from offmap.detector import Calibration
from offmap.errors import ConfigError, FileError, OffmapError
from offmap.guard import Guard
from offmap.io.schema import Header, check_tensors, misfit, parse, parse_header
from offmap.likelihoods import LIKELIHOODS
from offmap.model.forward import BatchedModel, OutputFn, first_tensor
from offmap.model.inspect import forgotten, restore_state
from offmap.model.params import as_models, checksum, digest, sealed, stack_models
from offmap.posterior.basis import Rotation
from offmap.posterior.distribution import WeightDistribution
from offmap.posterior.noise import noise_from_state, noise_state
from offmap.posterior.predictive import Stochastic
from offmap.scores.score import SCORES, Score, fill_buffers

FORMAT = "offmap-guard-6"


def save(guard: Guard, path: str | Path) -> None:
    """Write a guard over a weight distribution to `path`."""
    predictive, likelihood, score = guard.predictive, guard.likelihood, guard.score_module
    if not isinstance(predictive, Stochastic) or predictive.q.parameterization is not None:
        raise ConfigError("Expected a guard made by `offmap.fit` with scaling or SVD weights; others cannot be saved.")
    if predictive.q.trainable_mean:
        raise ConfigError("A guard whose mean was trained cannot be saved: a file holds no weights, and the nets' are others.")
    kind = next((name for name, known in LIKELIHOODS.items() if known is type(likelihood)), None)
    if kind is None or SCORES.get(score.name) is not type(score):
        raise ConfigError(
            "A guard with a score or likelihood of your own cannot be saved unless it is registered: a file holds no code."
        )
    q, model, state = predictive.q, predictive.model, likelihood.state()
    tensors: dict[str, Any] = {f"likelihood.{n}": v for n, v in state.items() if isinstance(v, Tensor)}
    tensors |= {f"raw_scale.{n}": t for n, t in q.raw_scale.items()} | {f"rotation.{n}": t for n, t in q.rotation.items()}
    tensors |= {"calibration.scores": guard.calibration.scores, "calibration.residuals": guard.calibration.residuals}
    tensors |= {f"score.{n}": t for n, t in score.state_dict().items()}
    tensors = {n: t.detach().contiguous().cpu() for n, t in tensors.items()}
    members = [{n: t[m] for n, t in [*q.mean.items(), *q.fixed.items()]} for m in range(q.members)]
    header = {
        "format": FORMAT,
        "models": [digests(weights, model.module) for weights in members],
        "modules": modules(model.module),
        "views": {n: asdict(f) for n, f in q.views.items()},
        "why": q.why,
        "restore_state": forgotten(model.module),
        "noise": noise_state(q.noise),
        "likelihood": {"name": kind, "config": {n: v for n, v in state.items() if not isinstance(v, Tensor)}},
        "score": {"name": score.name, "config": score.config()},
        "model": {"chunk_size": model.chunk_size, "batch_size": model.batch_size, "output_numbers": model.output_numbers,
                 "output_axes": model.output_axes, "last_layer": model.last_layer},
        "guard": {"clip": guard.clip, "draws": guard.draws, "seed": guard.seed, "target": guard.target, "notes": guard.notes},
        "calibration": {"false_alarms": guard.calibration.false_alarms, "exact": guard.calibration.exact},
        "history": asdict(predictive.history),
        "custom_output_fn": model.output_fn is not first_tensor,
        "about": dict(guard.about),
        "image_spec": guard.image_spec and asdict(guard.image_spec),
    }  # fmt: skip
    try:
        text = json.dumps(header)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Expected plain values in `about`, as JSON has them, but {error}.") from error
    if 2 * len(text) > HEADER:
        raise ConfigError(f"Expected a header of at most {HEADER // 2} letters, but got {len(text)}. Shorten `about`.")
    # one entry: safetensors writes several in a random order, and equal guards should give equal files
    content = to_bytes(tensors, metadata={"offmap": sealed(text, tensors)})
    write_whole(Path(path), content, folders=False)


def load(
    path: str | Path, model: nn.Module | Sequence[nn.Module], *, strict: bool = True, output_fn: OutputFn | None = None
) -> Guard:
    """Read a guard.

    Args:
        path: A file that `Guard.save` wrote.
        model: The model or models that it was fitted on, which the file does not hold.
        strict: Refuse other weights than at fit time.
        output_fn: The function that was passed to `fit`, if one was.
    """
    return GuardFile.read(path).build(model, strict=strict, output_fn=output_fn)


@dataclass(frozen=True)
class GuardFile:
    """A guard file that was read and checked, before its models are there."""

    path: Path
    header: Header
    tensors: Weights = field(repr=False)

    @property
    def about(self) -> dict[str, Any]:
        """Plain values that the guard was given to keep."""
        return self.header.about

    @property
    def members(self) -> int:
        """How many models it belongs to."""
        return len(self.header.models)

    @classmethod
    def read(cls, path: str | Path) -> GuardFile:
        """Read a file, and check all that can be checked without its models."""
        path = Path(path)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise FileError(f"Cannot read {path}: {error.strerror}.") from error
        size = int.from_bytes(content[:8], "little")
        if size > HEADER:
            raise FileError(f"{path} is damaged or not a guard file (a header of {size} bytes). Save the guard again.")
        try:
            tensors = load_bytes(content)
            entry = json.loads(content[8 : 8 + size]).get("__metadata__", {}).get("offmap")
            expected, _, text = (entry or "").partition(" ")
            intact = expected == checksum(text, tensors)
            header = json.loads(text) if intact else None
        except Exception as error:  # whatever the bytes are, they are no guard
            raise damaged(path, error) from error
        if entry is None:
            raise FileError(f"{path} is not a guard file: it was not written by `Guard.save`.")
        if not intact:
            raise FileError(f"{path} is damaged (its checksum does not fit). Save the guard again.")
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            version = header.get("format") if isinstance(header, dict) else None
            raise FileError(f"{path} is not a guard file of this version: expected {FORMAT!r}, but got {version!r}.")
        return cls(path, parse_header(header, path), tensors)

    def build(self, model: nn.Module | Sequence[nn.Module], *, strict: bool = True, output_fn: OutputFn | None = None) -> Guard:
        """Build the guard around its models: see `offmap.load`."""
        models = as_models(model)
        self._check_models(models, strict=strict)
        if self.header.custom_output_fn and output_fn is None:
            raise ConfigError(f"{self.path} was fitted with a `output_fn` of your own: pass the same function to `load`.")
        try:
            return self._build(models, output_fn or first_tensor)
        except OffmapError:
            raise
        except Exception as error:  # any other malformed content
            raise damaged(self.path, error) from error

    def _build(self, models: list[nn.Module], output_fn: OutputFn) -> Guard:
        header, scales = self.header, self._part("raw_scale.")
        stacked = stack_models(models, lambda name, tensor: name in scales)
        check_tensors(self.tensors, stacked.mean, header.views, self.path)
        restore_state(stacked.module, header.restore_state)
        q = WeightDistribution(
            stacked.mean,
            initial_scale={n: torch.nn.functional.softplus(t) for n, t in scales.items()},
            rotation=Rotation(self._part("rotation."), header.views, header.why),
            fixed=stacked.fixed,
            noise=noise_from_state(header.noise),
        )
        place = Place.of(stacked.module)
        q.to(place.device)
        with torch.no_grad():
            for name, tensor in q.raw_scale.items():
                tensor.copy_(scales[name])
        q.requires_grad_(False)
        kind = LIKELIHOODS[header.likelihood.name]
        hints = get_type_hints(kind)
        state: dict[str, Any] = {n: parse(v, hints[n]) for n, v in header.likelihood.config.items()}
        state |= {n: t.to(place.device) for n, t in self._part("likelihood.").items()}
        scores, residuals = (self.tensors[f"calibration.{name}"].to(place.device) for name in ("scores", "residuals"))
        return Guard(
            predictive=Stochastic(BatchedModel(stacked.module, output_fn, **vars(header.model)), q, header.history),
            likelihood=kind.from_state(state),
            score_module=self._score().to(place.device),
            calibration=Calibration(scores, residuals, **vars(header.calibration)),
            place=place,
            about=header.about,
            image_spec=header.image_spec,
            **vars(header.guard),
        )

    def _score(self) -> Score:
        name, tensors = self.header.score.name, self._part("score.")
        if name not in SCORES:
            raise FileError(f"{self.path} was fitted with the score {name!r}, which is not registered: import the module that "
                            "registers it.")  # fmt: skip
        score = SCORES[name].from_config(self.header.score.config).eval()
        try:
            fill_buffers(score, tensors)
        except ValueError as error:
            raise misfit(self.path, f"score.{error}", tensors.get(str(error))) from error
        return score

    def _part(self, prefix: str) -> Weights:
        return {n.removeprefix(prefix): t for n, t in self.tensors.items() if n.startswith(prefix)}

    def _check_models(self, models: list[nn.Module], *, strict: bool) -> None:
        """Raise a FileError with the first difference between the models of fit time and these."""
        if len(models) != self.members:
            raise FileError(f"{self.path} was fitted on {self.members} nets, but {len(models)} were given.")
        for member, (model, then) in enumerate(zip(models, self.header.models, strict=True)):
            now = digests(dict(model.state_dict()), model)
            for name in then | now:
                if name not in then or name not in now:
                    where = "the given net" if name in now else "the net it was fitted on"
                    raise self._other_architecture(f"`{name}` exists in {where} only", member)
                if then[name][:2] != now[name][:2]:
                    (shape, dtype, _), (shape_now, dtype_now, _) = then[name], now[name]
                    raise self._other_architecture(
                        f"`{name}` was {shape} {dtype} at fit time and is {shape_now} {dtype_now} now", member
                    )
            before, after = self.header.modules, modules(model)
            for name in before | after:
                was, is_ = before.get(name, "nothing"), after.get(name, "nothing")
                if was != is_:
                    raise self._other_architecture(f"module `{name}` was {was} at fit time and is {is_} now", member)
            other = [name for name in then if then[name] != now[name]]
            if strict and other:
                raise FileError(
                    f"{self.path} was fitted on other weights: `{other[0]}` differs (member {member}). Load the weights of fit "
                    "time, or pass `strict=False` to use the guard all the same."
                )

    def _other_architecture(self, difference: str, member: int) -> FileError:
        return FileError(f"{self.path} belongs to another architecture: {difference} (member {member}).")


def damaged(path: Path, error: Exception) -> FileError:
    """Return the error for content that is no guard."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return FileError(f"{path} is damaged or not a guard file ({reason}). Save the guard again.")


def digests(weights: Mapping[str, Tensor], net: nn.Module) -> dict[str, tuple[tuple[int, ...], str, str]]:
    """Return shape, dtype and SHA-256 of every tensor that a call of the model reads, by name."""
    tensors = dict(net.named_parameters()) | dict(net.named_buffers())
    rows = {name: digest(weights.get(name, tensor)) for name, tensor in tensors.items()}
    return {name: (tuple(shape), dtype, code) for name, (shape, dtype, code) in rows.items()}


def modules(net: nn.Module) -> dict[str, str]:
    """Return the class of every module by name: models whose tensors are alike may still compute different things."""
    return {name: type(module).__name__ for name, module in net.named_modules()}
