"""The default score joins disagreement and distance, which see different things.

Every term is a logarithm, counted in standard deviations over in-distribution rows (`ZScore`). For tables, series and texts, rows
of the training data set the scales, each compared with the others only (leave-one-out), and the mean of the terms is the score:

    disagreement   log u(x), the mean over members
    inputs         log ratio(x) of `offmap.scores.distance`, in the inputs
    layers         the same in the inputs of hidden layers of all members, side by side; the mean over them

Image classifiers have other terms. Validation images set their scales, because models know their training images by heart, and
the soft maximum, log mean exp, is the score: what one term finds OOD is, and terms that tell nothing do little harm:

    disagreement   log u(x), the mean over members
    logits         −log Σ_c exp z_c of the base models' logits, the energy
    last layer     the log distance to the nearest directions of training images in the inputs of the last layer
    layers         log ratio(x) of directions in the inputs of convolutions (mean and deviation of each channel), averaged
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap._torch_private import tree_leaves
from offmap._types import Inputs
from offmap.data.batch import Shared, rows_of, take_rows
from offmap.errors import ConfigError, ModelError, ShapeError
from offmap.likelihoods import Likelihood
from offmap.model.capture import features as read_features
from offmap.model.params import detach_params
from offmap.posterior.noise import Normal
from offmap.random import generator
from offmap.scores.distance import LEAST_ROWS, KNNDistance, TableEncoder, ZScore
from offmap.scores.score import SCORES, Features, PaperScore, Reads, Score, ScoreData, register_score

SCALE_ROWS = 1000  # that set the scale of the disagreement: each takes all draws
WIDEST = 4096  # inputs of more numbers than this are not compared: their layers are
NARROW = 256  # numbers per row that distances in layers are found with, at most
TABLE_LAYERS, IMAGE_LAYERS = 3, 6  # to compare in, spread over the depth; of image classifiers, beside the last


class ScaledTerm(Score):
    """A number per row, in standard deviations over in-distribution rows."""

    def __init__(self, zscore: ZScore | None = None) -> None:
        super().__init__()
        self.zscore = zscore or ZScore()

    @classmethod
    def fit(cls, data: ScoreData) -> Self:
        """Take the scale of validation rows."""
        return cls(ZScore.fit(data.evaluate(cls.measure, thin_out(data.valid), cls.reads)))

    @staticmethod
    def measure(features: Features) -> Tensor:
        """Return the number per row, (B,)."""
        raise NotImplementedError

    def forward(self, features: Features) -> Tensor:
        """Score B rows, (B,)."""
        return self.zscore(self.measure(features))


@register_score("disagreement")
class Disagreement(ScaledTerm):
    """log u(x), the mean over members."""

    @staticmethod
    def measure(features: Features) -> Tensor:
        """Return log u(x), (B,) in float64."""
        return log_uncertainty(features.likelihood, features.outputs, features.members)


@register_score("energy")
class Energy(ScaledTerm):
    """−log Σ_c exp z_c of the base models' logits: low for inputs whose class is clear."""

    reads = Reads(draws=False, base=True)

    @staticmethod
    def measure(features: Features) -> Tensor:
        """Return the energy of the mean logits of every member, the mean over members, (B,) in float64."""
        logits = features.likelihood.logits(features.base_outputs)
        if logits is None:
            raise ConfigError("Expected a classification for the energy of logits, but this is a regression.")
        return -logits.double().unflatten(0, (features.members, -1)).mean(1).logsumexp(2).mean(0)


class DistanceTerm(Score):
    """The distance to training rows, the mean over the spaces they are compared in."""

    reads = Reads(draws=False)

    @classmethod
    def fit(cls, data: ScoreData) -> Score:
        """Fit the default score, of which this is a term; a ConfigError if it has none of this kind."""
        term = next((m for m in CombinedScore.fit(data).modules() if type(m) is cls), None)
        if term is None:
            raise nothing_to_compare(cls.name)
        return term

    def forward(self, features: Features) -> Tensor:
        """Score B rows, (B,)."""
        return torch.stack([space(vectors, features.itself) for space, vectors in self.compared(features)]).mean(0)


@register_score("input-distance")
class InputDistance(DistanceTerm):
    """The distance to training rows in the inputs.

    Beside words an `encoder` turns them into vectors, and `numbers` are compared by themselves, too: rows with rare words are far
    from all others, among which a shift of a number is hard to see. The mean of both counts.
    """

    def __init__(
        self, space: KNNDistance | None = None, encoder: TableEncoder | None = None, numbers: KNNDistance | None = None
    ) -> None:
        super().__init__()
        self.space, self.encoder, self.numbers = space or KNNDistance(), encoder, numbers

    @classmethod
    def fit_rows(cls, parts: Sequence[Inputs], *, allow_nan: bool) -> Self | None:
        """Fit training rows, in parts of one shape each; None if they have no vectors, or no spacing."""
        vectors = concat_rows([flatten_inputs(part) for part in parts])
        if vectors is None:
            return None
        codes = concat_rows([flatten_codes(part) for part in parts])
        encoder = TableEncoder.fit(vectors, codes, allow_nan=allow_nan)
        rows = vectors if encoder is None else encoder(vectors, codes)
        space = KNNDistance.fit(rows, standardized=encoder is None)
        if encoder is None or space is None:
            return None if space is None else cls(space)
        return cls(space, encoder, KNNDistance.fit(rows[:, encoder.numbers], standardized=False))

    def compared(self, features: Features) -> list[tuple[KNNDistance, Tensor]]:
        """Return the inputs as vectors."""
        vectors = flatten_inputs(features.inputs)
        width = self.space.rows.shape[1] if self.encoder is None else len(self.encoder.indicators)
        if vectors is None or vectors.shape[1] != width:
            raise ShapeError(
                f"Expected {width} numbers per input, as at fit time, but got "
                f"{'another form' if vectors is None else vectors.shape[1]}. Bring inputs to one size, or fit with "
                "score='epistemic', which compares no inputs."
            )
        if self.encoder is None:
            return [(self.space, vectors)]
        vectors = self.encoder(vectors, flatten_codes(features.inputs))
        return [(self.space, vectors)] + ([(self.numbers, vectors[:, self.encoder.numbers])] if self.numbers is not None else [])

    def config(self) -> dict[str, Any]:
        """Return which of the optional modules there are."""
        return {name: True for name in ("encoder", "numbers") if getattr(self, name) is not None}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Build it with empty buffers."""
        encoder, numbers = config.get("encoder"), config.get("numbers")
        return cls(encoder=TableEncoder() if encoder else None, numbers=KNNDistance() if numbers else None)


@register_score("layer-distance")
class LayerDistance(DistanceTerm):
    """The distance to training rows in the inputs of some layers of all base models, side by side; the mean over layers.

    `widths` are numbers per row by layer. For `images` convolutions are read too, and every member's vectors get length one:
    away from the training data features shrink, and only their direction tells.
    """

    def __init__(self, widths: Mapping[str, int], images: bool = False, spaces: Sequence[KNNDistance] | None = None) -> None:
        super().__init__()
        self.reads, self.widths = Reads(False, layers=tuple(widths), pooled=images), dict(widths)
        self.spaces = nn.ModuleList(spaces or [KNNDistance() for _ in widths])
        for place, width in enumerate(widths.values()):
            self.register_buffer(f"directions{place}", directions(width), persistent=False)

    def compared(self, features: Features) -> list[tuple[KNNDistance, Tensor]]:
        """Return the inputs of every layer."""
        pairs: list[tuple[KNNDistance, Tensor]] = []
        for place, (name, space) in enumerate(zip(self.widths, self.spaces, strict=True)):
            rows = join_members(features, name, unit=self.reads.pooled)
            if rows is None:
                raise ModelError(
                    f"Expected `{name}` to get one row per example, as at fit time, but on these inputs it does not. "
                    "Check their form, or fit with score='epistemic', which compares no layers."
                )
            pairs.append((space, project(rows, getattr(self, f"directions{place}"))))  # pyright: ignore[reportArgumentType]
        return pairs

    def config(self) -> dict[str, Any]:
        """Return the layers."""
        return {"widths": self.widths, "images": self.reads.pooled}


@register_score("default")
class CombinedScore(Score):
    """Several terms, joined by their mean, or by their soft maximum if `soft`."""

    def __init__(self, terms: Mapping[str, Score], soft: bool = False) -> None:
        super().__init__()
        self.parts, self.soft = nn.ModuleDict(terms), soft
        reads = [term.reads for term in terms.values()]
        layers = tuple(dict.fromkeys(name for r in reads for name in r.layers))
        self.reads = Reads(any(r.draws for r in reads), any(r.base for r in reads), layers, any(r.pooled for r in reads))

    @classmethod
    def fit(cls, data: ScoreData) -> Score:
        """Choose the terms that the data allow; without any to compare with, the paper's score."""
        images = image_terms(data) if data.images else None
        if images is not None:
            return cls(images, soft=True)
        total, values = sum(map(rows_of, data.train)), list[Tensor]()
        if total >= LEAST_ROWS:
            values = [data.evaluate(Disagreement.measure, thin_out(part, total), Disagreement.reads) for part in data.train]
        if not values or any(v.ndim > 1 for v in values):  # too few rows, or several positions each
            return PaperScore()
        terms: dict[str, Score] = {"disagreement": Disagreement(ZScore.fit(torch.cat(values)))}
        inputs = InputDistance.fit_rows(data.train, allow_nan=data.allow_nan)
        if inputs is not None:
            terms["inputs"] = inputs
        layers = fit_layers(data, inputs)
        if layers is not None:
            terms["layers"] = layers
        return cls(terms) if len(terms) > 1 else PaperScore()

    @property
    def items(self) -> list[tuple[str, Score]]:
        """The terms with their names."""
        return list(self.parts.items())  # pyright: ignore[reportReturnType]

    def forward(self, features: Features) -> Tensor:
        """Score B rows, (B,)."""
        return self.join({name: term(features) for name, term in self.items})

    def join(self, terms: Mapping[str, Tensor]) -> Tensor:
        """Join terms (B,) to the score, (B,)."""
        return join(terms, soft=self.soft)

    def terms(self, features: Features) -> dict[str, Tensor]:
        """Return every term, (B,) each, in standard deviations over in-distribution rows."""
        return {name: term(features) for name, term in self.items}

    def compared(self, features: Features) -> list[tuple[KNNDistance, Tensor]]:
        """Return what all terms compare."""
        return [pair for _, term in self.items for pair in term.compared(features)]

    def describe(self) -> str:
        """List the terms, and how many training rows they hold."""
        count = max((len(m.rows) for m in self.modules() if isinstance(m, KNNDistance)), default=0)
        words = [f"{name} ({', '.join(term.reads.layers)})" if term.reads.layers else name for name, term in self.items]
        return f"{', '.join(words)}; holds {count} training rows"

    def distances(self) -> DistanceScore:
        """Return the score of the terms that compare with training rows."""
        return DistanceScore({name: term for name, term in self.items if isinstance(term, DistanceTerm)}, self.soft)

    def config(self) -> dict[str, Any]:
        """Return the terms' kinds and what they need."""
        return {"terms": {name: [term.name, term.config()] for name, term in self.items}, "soft": self.soft}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Build all terms with empty buffers."""
        return cls({name: SCORES[kind].from_config(c) for name, (kind, c) in config["terms"].items()}, config["soft"])


@register_score("distance")
class DistanceScore(CombinedScore):
    """The terms of the default score that compare with training rows."""

    @classmethod
    def fit(cls, data: ScoreData) -> Score:
        """Choose the terms that the data allow; a ConfigError if there are none."""
        score = super().fit(data)
        if not isinstance(score, CombinedScore):
            raise nothing_to_compare(cls.name)
        return score.distances()


def image_terms(data: ScoreData) -> dict[str, Score] | None:
    """Fit the terms for images of one class each; None if there are too few images, or no convolution gets one vector of each."""
    model = data.sampler.predictive.model
    if model is None or len(data.train) != 1 or rows_of(data.train[0]) < LEAST_ROWS:
        return None
    names, params = find_layers(data, None, pooled=True), detach_params(model.module)
    convolutions = [name for name in names if params[name].ndim > 2]
    if not convolutions:
        return None
    # the first convolution gets the image itself, whose colours tell little
    *inner, last = [name for name in names if name != convolutions[0]] or convolutions
    names = [*spread_out(inner, IMAGE_LAYERS), last]
    reference, fresh = (read_layers(data, part, names, images=True) for part in (data.train, [thin_out(data.valid)]))
    spaces: dict[str, KNNDistance] = {}
    for name, rows in reference.items():
        narrow = directions(rows.shape[1])
        space = KNNDistance.fit(project(rows, narrow), standardized=False, uniform=name == last)
        if space is not None:
            spaces[name] = space.refit_zscore(project(fresh[name], narrow))
    if last not in spaces:
        return None
    widths = {name: reference[name].shape[1] for name in spaces}
    terms: dict[str, Score] = {"disagreement": Disagreement.fit(data), "logits": Energy.fit(data)}
    terms["last layer"] = LayerDistance({last: widths.pop(last)}, True, [spaces.pop(last)])
    return terms | ({"layers": LayerDistance(widths, True, list(spaces.values()))} if spaces else {})


def fit_layers(data: ScoreData, inputs: InputDistance | None) -> LayerDistance | None:
    """Fit distances in some layers spread over the depth, but those that get the `inputs`; None if none has a spacing."""
    rows = read_layers(data, data.train, find_layers(data, inputs))
    spaces = {name: KNNDistance.fit(project(x, directions(x.shape[1])), standardized=False) for name, x in rows.items()}
    fitted = {name: space for name, space in spaces.items() if space is not None}
    chosen = spread_out(list(fitted), TABLE_LAYERS)
    return LayerDistance({n: rows[n].shape[1] for n in chosen}, spaces=[fitted[n] for n in chosen]) if chosen else None


def find_layers(data: ScoreData, inputs: InputDistance | None, *, pooled: bool = False) -> list[str]:
    """Name the parameters whose layers get one vector per row, whatever the rest of the batch, in order of execution.

    Layers that get the `inputs` themselves, which are compared already, are left out; if those are encoded, layers that get them
    standardised, too. `pooled`: convolutions count, too; of an image they get mean and standard deviation of every channel.
    """
    model, weights = data.sampler.predictive.model, data.sampler.predictive.mean_weights(0)
    if model is None or weights is None:
        return []
    # one member alone has its fixed weights in the model itself
    base = detach_params(model.module) | weights
    few, many = (
        read_features(model.module, base, take_rows(data.train[0], slice(0, n)), model.output_fn, maps=pooled)
        for n in (2, model.batch_size)
    )
    names: list[str] = []
    vectors = None if inputs is None else flatten_inputs(take_rows(data.train[0], slice(0, model.batch_size)))
    encoded = inputs is not None and inputs.encoder is not None
    for name, alone in few.items():
        rows = many.get(name, alone[:0])
        first = rows[: len(alone)].double()
        copied = vectors is not None and (torch.equal(rows, vectors.to(rows)) or (encoded and is_scaled(rows, vectors)))
        if first.shape == alone.shape and not copied:
            gap = (alone.double() - first).abs().amax()
            if gap <= 0.05 * first.abs().amax():  # alike up to rounding, in half precision as well
                names.append(name)
    return names


def is_scaled(rows: Tensor, vectors: Tensor) -> bool:
    """Return whether rows are the vectors, moved and stretched column by column, but for rounding and missing values."""
    if rows.shape != vectors.shape:
        return False
    present = vectors.isfinite()
    gaps, wide = (torch.where(present, t.double() - t.double()[:1], 0.0).nan_to_num() for t in (rows, vectors))
    scale = (gaps * wide).sum(0) / wide.square().sum(0).clamp_min(torch.finfo(torch.float64).tiny)
    return bool(((gaps - scale * wide).abs() <= 1e-3 * gaps.abs().amax(0)).all()) and bool((scale >= 0).all())


def read_layers(data: ScoreData, parts: Sequence[Inputs], names: list[str], *, images: bool = False) -> dict[str, Tensor]:
    """Read the inputs of these layers, of all members side by side, (N, D) each; those that some rows lack are left out."""
    if not names:
        return {}
    reads = Reads(False, layers=tuple(names), pooled=images)
    read = [data.sampler.features(rows, reads) for part in parts for rows in data.sampler.blocks(part)]
    matrices = {name: concat_rows([join_members(features, name, unit=images) for features in read]) for name in names}
    return {name: matrix for name, matrix in matrices.items() if matrix is not None}


def nothing_to_compare(name: str) -> ConfigError:
    """Return the error for data without vectors."""
    return ConfigError(
        "Expected three or more training rows whose inputs or layers are one vector per example, and not all the same, for "
        f"score={name!r}, but there are none. Pass score='paper'."
    )


def thin_out(rows: Inputs, total: int | None = None) -> Inputs:
    """Take every n-th row, so that about SCALE_ROWS of `total`, or of these, are left."""
    return take_rows(rows, slice(None, None, -(-(total or rows_of(rows)) // SCALE_ROWS)))


def concat_rows(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate matrices, if none is missing and they are equally wide."""
    matrices = [part for part in parts if part is not None]
    return torch.cat(matrices) if len(matrices) == len(parts) and len({m.shape[1] for m in matrices}) == 1 else None


def spread_out(names: list[str], most: int) -> list[str]:
    """Take at most so many of them, evenly spaced, the last among them.

    >>> spread_out(["a", "b", "c", "d", "e"], 2)
    ['b', 'e']
    """
    return names if len(names) <= most else [names[(i + 1) * len(names) // most - 1] for i in range(most)]


def join(terms: Mapping[str, Tensor], *, soft: bool) -> Tensor:
    """Join terms (B,) by their mean, or their soft maximum, log mean exp; infinite in one is infinite altogether."""
    stacked = torch.stack(list(terms.values()))
    joined = stacked.logsumexp(0) - math.log(len(stacked)) if soft else stacked.mean(0)
    return joined.nan_to_num(nan=torch.inf, posinf=torch.inf)


def log_uncertainty(likelihood: Likelihood, outputs: Tensor, members: int) -> Tensor:
    """Return log u in float64, (M·P, B, ...) -> (B,): the mean over members of the logarithm of each one's disagreement."""
    # the logarithm first, for one member may be wider than all others; members that are not random disagree with each other
    draws = outputs.shape[0] // members
    outputs = outputs.double()  # softmax and logarithm in float32 make noise of a confident classifier's tiny disagreement
    parts = outputs.unflatten(0, (members, draws)) if draws > 1 else outputs.unsqueeze(0)
    values = torch.stack([likelihood.epistemic(part) for part in parts]).nan_to_num(nan=torch.inf, posinf=torch.inf)
    # runtimes without log1p round a mutual information below this floor; variances have units, and only zero is cut
    return values.clamp_min(1e-12 if likelihood.classifies else 1e-30).log().mean(0)


def flatten_inputs(x: Inputs) -> Tensor | None:
    """Return floating-point inputs as rows, (B, D). None if there are none or too many, and for series beside lengths, masks or
    ids: their padding is not part of them.
    """
    size = rows_of(x)
    leaves = tree_leaves(dict(sorted(x.items())) if isinstance(x, dict) else x)
    rows = [t for t in leaves if isinstance(t, Tensor) and not isinstance(t, Shared) and t.shape[:1] == (size,)]
    floats = [t for t in rows if t.is_floating_point()]
    masked = len(floats) < len(rows) or (isinstance(x, dict) and "attention_mask" in x)
    padded = masked and any(t.ndim > 2 for t in floats)
    width = sum(t[0].numel() for t in floats)
    return torch.cat([t.reshape(size, -1) for t in floats], 1) if 0 < width <= WIDEST and not padded else None


def flatten_codes(x: Inputs) -> Tensor | None:
    """Return whole numbers beside the numbers of a table, (B, K); None if there are none, and for what may be tokens or masks."""
    size, vectors = rows_of(x), flatten_inputs(x)
    if vectors is None or isinstance(x, Tensor) or (isinstance(x, dict) and {"attention_mask", "input_ids"} & x.keys()):
        return None
    leaves = tree_leaves(dict(sorted(x.items())) if isinstance(x, dict) else x)
    rows = [t for t in leaves if isinstance(t, Tensor) and not isinstance(t, Shared) and t.shape[:1] == (size,)]
    alike = [t.shape for t in rows if t.is_floating_point() and t[0].numel() > 1]  # masks are as wide as what they mask
    codes = [t for t in rows if not t.is_floating_point() and t.ndim <= 2 and t.shape not in alike]
    return torch.cat([t.reshape(size, -1).long() for t in codes], 1) if codes else None


def join_members(features: Features, name: str, *, unit: bool) -> Tensor | None:
    """Put the inputs of one layer of all members side by side, (B, D), of length one each if `unit`; None if one has none."""
    parts = [inputs[name] for inputs in features.layer_inputs if name in inputs]
    if unit:
        parts = [F.normalize(rows.double(), dim=1).float() for rows in parts]
    return torch.cat(parts, 1) if len(parts) == features.members else None


def project(rows: Tensor, directions: Tensor | None) -> Tensor:
    """Turn rows (B, D) into directions (D, N), if there are some.

    Distances stay what they are to a few per cent (Johnson and Lindenstrauss), and are found in a fraction of the time.
    """
    if directions is None:
        return rows
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return rows @ directions.to(rows)


@lru_cache(maxsize=8)
def directions(width: int) -> Tensor | None:
    """Return random directions of variance 1/NARROW, (width, NARROW), the same ones always; None for rows of few numbers."""
    if width <= NARROW:
        return None
    return Normal().sample((width, NARROW), generator("directions", width)) / NARROW**0.5
