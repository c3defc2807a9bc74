"""Guard files: safetensors with a JSON header. Written atomically, read without running code, tied to the models by digests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from offmap._types import Weights
from offmap.data import Place
from offmap.data.image_spec import ImageSpec
from offmap.detector import Calibration
from offmap.errors import ConfigError, FileError, OffmapError
from offmap.guard import Guard
from offmap.io.atomic import HEADER, write_whole
from offmap.io.schema import check_header, check_tensors
from offmap.likelihoods import LIKELIHOODS, Likelihood
from offmap.model.forward import BatchedModel, OutputFn, first_tensor
from offmap.model.inspect import forgotten, restore_state
from offmap.model.matrix_view import MatrixView
from offmap.model.params import checksum, digest, sealed
from offmap.model.select import as_models, stack_models
from offmap.posterior.distribution import Rotation, WeightDistribution
from offmap.posterior.noise import noise_from_state, noise_state
from offmap.posterior.predictive import History, Stochastic
from offmap.scores.combine import CombinedScore

FORMAT = "offmap-guard-5"


def save(guard: Guard, path: str | Path) -> None:
    """Write a guard over a weight distribution to `path`."""
    predictive = guard.predictive
    if not isinstance(predictive, Stochastic) or predictive.q.parameterization is not None:
        raise ConfigError("Expected a guard made by `offmap.fit` with scaling or SVD weights; others cannot be saved.")
    if predictive.q.trainable_mean:
        raise ConfigError("A guard whose mean was trained cannot be saved: a file holds no weights, and the nets' are others.")
    if callable(guard.score_with) or type(guard.likelihood) not in LIKELIHOODS.values():
        raise ConfigError("A guard with a score or likelihood of your own cannot be saved: a file holds no code.")
    q, model = predictive.q, predictive.model
    law, tensors = _likelihood_state(guard.likelihood)
    tensors |= {f"raw_scale.{n}": t for n, t in q.raw_scale.items()} | {
        f"rotation.{n}": t.contiguous() for n, t in q.rotation.items()
    }
    tensors |= {"calibration.scores": guard.calibration.scores, "calibration.misses": guard.calibration.residuals}
    if guard.familiar is not None:
        tensors |= {f"in-distribution.{n}": t for n, t in guard.familiar.state().items()}
    header = {
        "format": FORMAT,
        "in-distribution": None if guard.familiar is None else guard.familiar.layers,
        "models": [digests(_member(q, m), model.net) for m in range(q.members)],
        "modules": modules(model.net),
        "frames": {n: asdict(f) for n, f in q.frames.items()},
        "why": q.why,
        "restore_state": forgotten(model.net),
        "noise": noise_state(q.noise),
        "likelihood": law,
        "model": {"chunk_size": model.chunk_size, "batch_size": model.batch_size, "output_numbers": model.output_numbers,
                 "output_axes": model.output_axes, "last_layer": model.last_layer},
        "guard": {"clip": guard.clip, "score_with": guard.score_with, "draws": guard.draws, "seed": guard.seed,
                  "target": guard.target, "notes": guard.notes},
        "calibration": {"false_alarms": guard.calibration.false_alarms, "exact": guard.calibration.exact},
        "history": asdict(predictive.history),
        "own_select": model.output_fn is not first_tensor,
    } | ({"about": dict(guard.about)} if guard.about else {}) | ({"image_spec": asdict(guard.image_spec)} if guard.image_spec else {})  # fmt: skip
    tensors = {n: t.detach().contiguous().cpu() for n, t in tensors.items()}
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
    path: str | Path, nets: nn.Module | Sequence[nn.Module], *, strict: bool = True, output_fn: OutputFn | None = None
) -> Guard:
    """Read a guard for these nets. Other weights than at fit time are refused unless `strict=False`."""
    path = Path(path)
    header, tensors = _read(path)
    try:
        return _built(path, header, tensors, as_models(nets), strict, output_fn)
    except OffmapError:
        raise
    except Exception as error:  # whatever else a file may have in mind
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FileError(f"{path} is damaged or not a guard file ({reason}). Save the guard again.") from error


def _built(
    path: Path, header: dict[str, Any], tensors: Weights, models: list[nn.Module], strict: bool, output_fn: OutputFn | None
) -> Guard:
    if len(models) != len(header["models"]):
        raise FileError(f"{path} was fitted on {len(header['models'])} nets, but {len(models)} were given.")
    for member, (model, known) in enumerate(zip(models, header["models"], strict=True)):
        given = digests(dict(model.state_dict()), model)
        _compare_architecture(path, member, known, given)
        _compare_modules(path, member, header["modules"], modules(model))
        if strict:
            _compare_weights(path, member, known, given)
    if header["own_select"] and output_fn is None:
        raise ConfigError(f"{path} was fitted with a `output_fn` of your own: pass the same function to `load`.")
    raw = _part(tensors, "raw_scale.")
    at = stack_models(models, lambda name, tensor: name in raw)
    frames = _frames(header["frames"])
    check_tensors(tensors, at.mean, frames, path)
    restore_state(at.net, header["restore_state"])
    q = WeightDistribution(
        at.mean,
        initial_scale={n: torch.nn.functional.softplus(t) for n, t in raw.items()},
        rotation=Rotation(_part(tensors, "rotation."), frames, header["why"]),
        fixed=at.fixed,
        noise=noise_from_state(header["noise"]),
    )
    place = Place.of(at.net)
    q.to(place.device)
    with torch.no_grad():
        for name, tensor in q.raw_scale.items():
            tensor.copy_(raw[name])
    q.requires_grad_(False)
    model = BatchedModel(at.net, output_fn or first_tensor, **header["model"])
    calibration = Calibration(
        tensors["calibration.scores"].to(place.device),
        tensors["calibration.misses"].to(place.device),
        **header["calibration"],
    )
    familiar = None
    if header["in-distribution"] is not None:
        familiar = CombinedScore.from_state(header["in-distribution"], _part(tensors, "in-distribution.")).to(place.device)
    options = header["guard"] | {"notes": tuple(header["guard"]["notes"]), "familiar": familiar}
    options["about"] = header.get("about", {})
    spec = header.get("image_spec")
    options["image_spec"] = None if spec is None else ImageSpec(**spec | {"shape": tuple(spec["shape"])})
    law = _likelihood(header["likelihood"], {n: t.to(place.device) for n, t in tensors.items()})
    predictive = Stochastic(model, q, History(**header["history"]))
    return Guard(predictive=predictive, likelihood=law, place=place, calibration=calibration, **options)


def about(path: str | Path) -> dict[str, Any]:
    """What a guard file says of itself in plain values: its `about`, and how many nets it belongs to as `members`."""
    header, _ = _read(Path(path))
    return {**header.get("about", {}), "members": len(header["models"])}


def _frames(state: dict[str, dict[str, list[int]]]) -> dict[str, MatrixView]:
    return {name: MatrixView(**{field: tuple(numbers) for field, numbers in frame.items()}) for name, frame in state.items()}


def digests(weights: Weights, net: nn.Module) -> dict[str, list[Any]]:
    """Shape, dtype and SHA-256 of every tensor that a call of the model reads, by name."""
    names = [n for n, _ in net.named_parameters()] + [n for n, _ in net.named_buffers()]
    own = dict(net.named_parameters()) | dict(net.named_buffers())
    return {n: digest(weights.get(n, own[n])) for n in names}


def modules(net: nn.Module) -> dict[str, str]:
    """The class of every module by name: models whose tensors are alike may still compute different things."""
    return {name: type(module).__name__ for name, module in net.named_modules()}


def _member(q: WeightDistribution, member: int) -> Weights:
    return {n: t[member] for n, t in [*q.mean.items(), *q.fixed.items()]}


def _compare_architecture(path: Path, member: int, known: dict[str, list[Any]], given: dict[str, list[Any]]) -> None:
    """Raise a FileError with the first difference between the models of the file and those given."""
    for name in known | given:
        if name not in known or name not in given:
            where = "the given net" if name in given else "the net it was fitted on"
            raise FileError(f"{path} belongs to another architecture: `{name}` exists in {where} only (member {member}).")
        if known[name][:2] != given[name][:2]:
            raise FileError(
                f"{path} belongs to another architecture: `{name}` was {tuple(known[name][0])} {known[name][1]} at fit time "
                f"and is {tuple(given[name][0])} {given[name][1]} now (member {member})."
            )


def _compare_modules(path: Path, member: int, known: dict[str, str], given: dict[str, str]) -> None:
    for name in known | given:
        before, now = known.get(name, "nothing"), given.get(name, "nothing")
        if before != now:
            raise FileError(
                f"{path} belongs to another architecture: module `{name}` was {before} at fit time and is {now} now "
                f"(member {member})."
            )


def _compare_weights(path: Path, member: int, known: dict[str, list[Any]], given: dict[str, list[Any]]) -> None:
    for name in known:
        if known[name][2] != given[name][2]:
            raise FileError(
                f"{path} was fitted on other weights: `{name}` differs (member {member}). Load the weights of fit time, or "
                "pass `strict=False` to use the guard all the same."
            )


def _read(path: Path) -> tuple[dict[str, Any], Weights]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileError(f"Cannot read {path}: {error.strerror}.") from error
    size = int.from_bytes(content[:8], "little")
    if size > HEADER:
        raise FileError(f"{path} is damaged or not a guard file (a header of {size} bytes). Save the guard again.")
    try:
        tensors = load_bytes(content)
        told = json.loads(content[8 : 8 + size]).get("__metadata__", {}).get("offmap")
        expected, _, text = (told or "").partition(" ")
        right = expected == checksum(text, tensors)
        header = json.loads(text) if right else None
    except Exception as error:  # whatever the bytes are, they are no guard
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FileError(f"{path} is damaged or not a guard file ({reason}). Save the guard again.") from error
    if told is None:
        raise FileError(f"{path} is not a guard file: it was not written by `Guard.save`.")
    if not right:
        raise FileError(f"{path} is damaged (its checksum does not fit). Save the guard again.")
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        version = header.get("format") if isinstance(header, dict) else None
        raise FileError(f"{path} is not a guard file of this version: expected {FORMAT!r}, but got {version!r}.")
    check_header(header, path)
    return header, tensors


def _part(tensors: Weights, prefix: str) -> Weights:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _likelihood_state(law: Likelihood) -> tuple[dict[str, Any], Weights]:
    values = law.state()
    tensors = {f"likelihood.{n}": v for n, v in values.items() if isinstance(v, Tensor)}
    plain = {n: v for n, v in values.items() if not isinstance(v, Tensor)}
    name = next(name for name, known in LIKELIHOODS.items() if known is type(law))
    return {"name": name, "fields": plain}, tensors


def _likelihood(state: dict[str, Any], tensors: Weights) -> Likelihood:
    return LIKELIHOODS[state["name"]].from_state(state["fields"] | _part(tensors, "likelihood."))
