"""What the default score joins: terms, each a number per row that is high for OOD rows, in standard deviations over ID rows.

Every term is a logarithm, or grows like one. Validation rows set the scales (`ZScore`), or where these are fewer than 100,
training rows, each compared with the others only.

    disagreement   log u(x) of the draws, the mean over members
    energy         −log Σ_c exp z_c of the base models' logits
    gen            generalised entropy of the base models' probabilities
    inputs         log ratio(x) of `offmap.scores.distance`, in the inputs
    layers         the same in the inputs of some layers, side by side
    whitened       the log length of the same, with every layer's inputs at length one, whitened
    last-layer     the log distance to the nearest direction in the inputs of the last layer

Some more can be asked for by name: "entropy", "leverage", "class-distance" and "relative-class-distance".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from offmap._torch_private import tree_leaves
from offmap._types import Inputs
from offmap.data.batch import concat_rows, flatten_codes, flatten_inputs, rows_of
from offmap.errors import ConfigError, ModelError, ShapeError
from offmap.likelihoods import Likelihood
from offmap.metrics import rank_correlation
from offmap.model.forward import join_members
from offmap.posterior.noise import Normal
from offmap.posterior.predictive import Stochastic
from offmap.random import generator, permutation
from offmap.scores.distance import (
    LEAST_ROWS,
    Ellipsoid,
    FittedModule,
    KNNDistance,
    TableEncoder,
    ZScore,
    compute_log_ratio,
    find_whitening,
)
from offmap.scores.score import Cut, Features, Reads, Score, ScoreData, register_score

WIDE_INPUTS = 512  # inputs of more numbers are compared along WIDE random directions
WIDE = 128  # numbers per row
WHITENED = 512  # numbers per row that are whitened, at most
FOLDS = 20  # parts of the training rows, each measured by the ellipsoid of the others
TERMS: dict[str, type[Term]] = {}  # by name, those of the default score first


class Term(Score):
    """A number per row, in standard deviations over in-distribution rows; of several positions, the mean."""

    by_default: ClassVar[bool] = True

    @classmethod
    def build(cls, data: ScoreData) -> Self | None:
        """Fit the term, but for its scale; None if the data do not allow it."""
        return cls()

    @classmethod
    def fit(cls, data: ScoreData) -> Score:
        """Fit the term alone, as a score; a ConfigError if the data do not allow it."""
        term = cls.build(data) if sum(map(rows_of, data.train)) >= LEAST_ROWS else None
        if term is None:
            raise nothing_to_compare(cls.name)
        return term.fit_scale(data)

    def fit_scale(self, data: ScoreData) -> Self:
        """Take the scale of in-distribution rows."""
        raise NotImplementedError

    def measure_without(self, features: Features, cut: Cut) -> Tensor:
        """Return a number per row, (B,), as if the term had been fitted on the rows that are kept; NaN where it cannot tell."""
        raise NotImplementedError


class ScaledTerm(Term):
    """A term that is a function of the features, and has a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.zscore = ZScore()

    def fit_scale(self, data: ScoreData) -> Self:
        """Take the scale of in-distribution rows."""
        self.zscore = ZScore.fit(torch.cat([self.measure(features) for features in data.scale_features]))
        return self

    def measure(self, features: Features) -> Tensor:
        """Return the number per row, (B,)."""
        raise NotImplementedError

    def forward(self, features: Features) -> Tensor:
        """Score B rows, (B,)."""
        return self.zscore(self.measure(features))


AnyTerm = TypeVar("AnyTerm", bound=Term)


def register_term(name: str, *, by_default: bool = True) -> Callable[[type[AnyTerm]], type[AnyTerm]]:
    """Register a kind of term under a name, for `score={name: weight}` and for files.

    Args:
        name: The name.
        by_default: Whether the default score joins it.
    """

    def register(kind: type[AnyTerm]) -> type[AnyTerm]:
        kind.by_default = by_default
        TERMS[name] = register_score(name)(kind)
        return kind

    return register


@register_term("disagreement")
class Disagreement(ScaledTerm):
    """log u(x), the mean over members; only a fit knows the layers of the random parameters, and asks how they explain it."""

    names: Sequence[str] = ()
    explained: float = 1.0

    def measure(self, features: Features) -> Tensor:
        """Return log u(x), (B,) in float64."""
        values = log_uncertainty(features.likelihood, features.outputs, features.members)
        return values if values.ndim == 1 else values.flatten(1).mean(1)

    def fit_scale(self, data: ScoreData) -> Self:
        """Take the scale of in-distribution rows, and how much of it their leverage explains."""
        super().fit_scale(data)
        predictive, known = data.sampler.predictive, list(data.layers)
        random = predictive.q.mean if isinstance(predictive, Stochastic) else ()
        self.names = [name for name in known if name in random] or known[-1:]
        if self.names:
            whitening = {name: find_whitening(narrow_rows(data.layers[name]), 1e-3) for name in self.names}
            values = [(self.measure(f), self.mean_leverage(f.layer_inputs, whitening)) for f in data.scale_features]
            real, lever = (torch.cat(parts) for parts in zip(*values, strict=True))
            finite = real.isfinite() & lever.isfinite()
            self.explained = max(0.0, float(rank_correlation(real[finite], lever[finite]).nan_to_num()))
        return self

    def mean_leverage(self, layer_inputs: Sequence[Mapping[str, Tensor]], whitening: Mapping[str, Tensor]) -> Tensor:
        """Return the log leverage of rows, (B,), the mean over the random layers: what the closed form's draws disagree by."""
        rows = [(join_members(layer_inputs, name), white) for name, white in whitening.items()]
        return torch.stack([measure_leverage(narrow_rows(x), white) for x, white in rows if x is not None]).mean(0)

    def measure_without(self, features: Features, cut: Cut) -> Tensor:
        """Return the leverage among half of the rows kept, NaN for these; what it does not explain of ID rows is noise."""
        size = rows_of(features.inputs)
        if not self.names:
            return torch.full((size,), torch.nan, dtype=torch.float64, device="cpu")
        rows = {name: join_members(features.layer_inputs, name) for name in self.names}
        whitening = {name: find_whitening(narrow_rows(x[cut.half]), 1e-3) for name, x in rows.items() if x is not None}
        values = self.mean_leverage(features.layer_inputs, whitening)
        rest = cut.kept & ~cut.half
        values = (values - values[rest].mean()) / values[rest].std().clamp_min(1e-12)
        noise = torch.empty(size, dtype=values.dtype, device="cpu").normal_(generator=generator("unexplained", size)).to(values)
        return (self.explained * values + (1 - self.explained**2) ** 0.5 * noise).masked_fill(cut.half, torch.nan)


class LogitTerm(ScaledTerm):
    """A number per row of the base models' logits."""

    reads = Reads(draws=False, base=True)

    @classmethod
    def build(cls, data: ScoreData) -> Self | None:
        """Need no fit; None for a regression, and for several classes per row."""
        features = data.few
        logits = features.likelihood.logits(features.base_outputs)
        return None if logits is None or logits.ndim > 3 else cls()

    def measure(self, features: Features) -> Tensor:
        """Return the number for the mean logits of every member, the mean over members, (B,) in float64."""
        return self.of_logits(mean_logits(features)).mean(0)

    def measure_without(self, features: Features, cut: Cut) -> Tensor:
        """Return the number; NaN for classes that were cut out, for the model has logits for them."""
        values = self.measure(features)
        return values.fill_(torch.nan) if cut.kind == "class" else values

    def of_logits(self, logits: Tensor) -> Tensor:
        """Return the number for logits, (M, B, C) -> (M, B)."""
        raise NotImplementedError


@register_term("energy")
class Energy(LogitTerm):
    """−log Σ_c exp z_c (Liu et al., 2020): low for inputs whose class is clear."""

    def of_logits(self, logits: Tensor) -> Tensor:
        """Return the energy."""
        return -logits.logsumexp(2)


@register_term("gen")
class GeneralizedEntropy(LogitTerm):
    """Σ_c (p_c·(1 − p_c))^0.1 over the hundred likeliest classes (Liu et al., 2023): small probabilities count, too."""

    def of_logits(self, logits: Tensor) -> Tensor:
        """Return the generalised entropy."""
        p = logits.softmax(2)
        p = p.topk(100, dim=2).values if p.shape[2] > 100 else p
        return (p * (1 - p)).clamp_min(1e-30).pow(0.1).sum(2)


@register_term("entropy", by_default=False)
class Entropy(LogitTerm):
    """The log entropy of the base models' probabilities."""

    def of_logits(self, logits: Tensor) -> Tensor:
        """Return the logarithm of the entropy."""
        logs = logits.log_softmax(2)
        return (logs.exp() * logs).sum(2).neg().clamp_min(1e-30).log()


@register_term("inputs")
class InputDistance(Term):
    """The distance to training rows in the inputs.

    Beside words an `encoder` turns them into vectors, and `numbers` are compared by themselves, too: rows with rare words are far
    from all others, among which a shift of a number is hard to see. The mean of both counts.
    """

    reads = Reads(draws=False)
    centre: Tensor
    unit: Tensor
    narrow: Tensor | None

    def __init__(
        self, space: KNNDistance | None = None, encoder: TableEncoder | None = None, numbers: KNNDistance | None = None,
        width: int = 0, columns: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.space, self.encoder, self.numbers, self.width = space or KNNDistance(), encoder, numbers, width
        wide = encoder is None and width > WIDE_INPUTS
        self.register_buffer("narrow", directions(width, WIDE) if wide else None, persistent=False)
        for name, column in zip(("centre", "unit"), columns or [torch.zeros(0, device="cpu")] * 2, strict=True):
            self.register_buffer(name, column)

    @classmethod
    def build(cls, data: ScoreData) -> Self | None:
        """Fit training rows, in parts of one shape each; None if they have no vectors, or no spacing."""
        return cls.fit_rows(data.train, allow_nan=data.allow_nan)

    @classmethod
    def fit_rows(cls, parts: Sequence[Inputs], *, allow_nan: bool) -> Self | None:
        """Fit training rows, in parts of one shape each; None if they have no vectors, or no spacing."""
        vectors = concat_rows([flatten_inputs(part) for part in parts])
        if vectors is None:
            return None
        codes = concat_rows([flatten_codes(part) for part in parts])
        flat = all(leaf.ndim <= 2 for part in parts for leaf in tree_leaves(part) if isinstance(leaf, Tensor))
        encoder = TableEncoder.fit(vectors, codes, allow_nan=allow_nan) if flat or allow_nan else None
        columns = None
        if encoder is None and vectors.shape[1] > WIDE_INPUTS:
            finite = vectors[vectors.isfinite().all(1)].double()
            spread = finite.std(0, correction=0)
            columns = finite.mean(0), torch.where(finite.amax(0) > finite.amin(0), spread, torch.ones_like(spread))
        term = cls(encoder=encoder, width=vectors.shape[1], columns=columns)
        rows = term.encode(vectors, codes)
        space = KNNDistance.fit(rows, standardized=encoder is None and columns is None)
        if space is None:
            return None
        numbers = KNNDistance.fit(rows[:, encoder.numbers], standardized=False) if encoder is not None else None
        return cls(space, encoder, numbers, vectors.shape[1], columns)

    def encode(self, vectors: Tensor, codes: Tensor | None) -> Tensor:
        """Turn inputs (B, D) and whole numbers (B, K) beside them into what is compared."""
        if self.encoder is not None:
            return self.encoder(vectors, codes)
        return vectors if self.narrow is None else project((vectors - self.centre) / self.unit, self.narrow)

    def compared(self, features: Features) -> list[tuple[KNNDistance, Tensor]]:
        """Return the inputs as vectors, with what they are compared with."""
        vectors = flatten_inputs(features.inputs)
        if vectors is None or vectors.shape[1] != self.width:
            raise ShapeError(
                f"Expected {self.width} numbers per input, as at fit time, but got "
                f"{'another form' if vectors is None else vectors.shape[1]}. Bring inputs to one size, or fit with "
                "score='epistemic', which compares no inputs."
            )
        rows = self.encode(vectors, flatten_codes(features.inputs))
        numbers = [] if self.numbers is None or self.encoder is None else [(self.numbers, rows[:, self.encoder.numbers])]
        return [(self.space, rows), *numbers]

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that belong to D inputs, if these are wide."""
        width = 0 if self.narrow is None else self.width
        return {"centre": (width,), "unit": (width,)}

    def fit_scale(self, data: ScoreData) -> Self:
        """Take the scale of in-distribution rows."""
        pairs = [(self.compared(features), features.itself) for features in data.scale_features]
        for place, (space, _) in enumerate(pairs[0][0]):
            values = [space.log_ratio(spaces[place][1], itself) for spaces, itself in pairs]
            space.zscore = ZScore.fit_ratios(torch.cat(values))
        return self

    def forward(self, features: Features) -> Tensor:
        """Score B rows, (B,)."""
        values = [space.zscore(space.log_ratio(x, features.itself)) for space, x in self.compared(features)]
        return values[0] if len(values) == 1 else torch.stack(values).mean(0)

    def measure_without(self, features: Features, cut: Cut) -> Tensor:
        """Return the mean z-score of log ratios among the rows that are kept."""
        return torch.stack([ratio_without(space, vectors, cut) for space, vectors in self.compared(features)]).mean(0)

    def config(self) -> dict[str, Any]:
        """Return the width, and which of the optional modules there are."""
        return {"width": self.width} | {name: True for name in ("encoder", "numbers") if getattr(self, name) is not None}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Build it with empty buffers."""
        encoder, numbers = config.get("encoder"), config.get("numbers")
        return cls(
            encoder=TableEncoder() if encoder else None, numbers=KNNDistance() if numbers else None, width=int(config["width"])
        )


class LayerTerm(Term):
    """A distance in the inputs of some layers of all base models, side by side; `widths` are numbers per row by layer.

    With `unit` every layer's inputs get length one: away from the training data features shrink, and only their direction tells.
    Else they are divided by their size on training rows, so that all layers count alike. Inputs of convolutions are mean and
    standard deviation of every channel, those of tokens their mean.
    """

    unit: ClassVar[bool] = True
    narrow: ClassVar[int | None] = None  # numbers per row that are compared; None: by the draws' price
    last_only: ClassVar[bool] = False
    sizes: Tensor
    compared_rows: Tensor
    directions: Tensor | None
    scale: Tensor | None

    def __init__(self, widths: Mapping[str, int], most: int = WIDE, space: Any = None, sizes: Tensor | None = None) -> None:
        super().__init__()
        self.reads, self.widths, self.most = Reads(False, layers=tuple(widths)), dict(widths), most
        self.register_buffer("sizes", torch.ones(len(widths), device="cpu") if sizes is None else sizes)
        self.compared_rows = torch.zeros(0, dtype=torch.long, device="cpu")  # not in files: only a fit asks for it
        self.register_buffer("directions", directions(sum(widths.values()), most), persistent=False)
        self.register_buffer("scale", None, persistent=False)
        self.space = space or self.new_space()
        self.prepare()

    def prepare(self) -> None:
        """Compute what numbers are multiplied with unless they get length one: (D, most) directions, or (D,) factors."""
        if not self.unit:
            widths = torch.tensor(list(self.widths.values()), device=self.sizes.device)
            factors = self.sizes.reciprocal().repeat_interleave(widths)
            self.scale = factors if self.directions is None else factors.unsqueeze(1) * self.directions.to(factors)

    @classmethod
    def new_space(cls) -> Any:
        """Return an empty space, which a file fills."""
        return KNNDistance()

    @classmethod
    def fit_space(cls, rows: Tensor) -> Any:
        """Fit rows (N, D); None if they have no spacing."""
        return KNNDistance.fit(rows, standardized=False)

    @classmethod
    def build(cls, data: ScoreData) -> Self | None:
        """Fit the inputs of the layers that get one vector per row; None if there are none, or none with a spacing."""
        rows = data.layers
        names = list(rows)[-1:] if cls.last_only else [n for n, x in rows.items() if not torch.equal(x, x[:1].expand_as(x))]
        if not names:
            return None
        sizes = torch.stack([(rows[n].double() - rows[n].double().mean(0)).square().sum(1).mean().sqrt() for n in names])
        term = cls({n: rows[n].shape[1] for n in names}, cls.narrow or data.width, sizes=sizes.clamp_min(1e-30).float())
        term.compared_rows = data.compared
        term.space = cls.fit_space(term.join_layers([rows[n][data.compared] for n in names], data.sampler.predictive.members))
        return None if term.space is None else term

    def find_own_places(self, itself: Tensor | None) -> Tensor | None:
        """Return the places of training rows (B,) among those that are compared with; −1 for those that are not."""
        if itself is None:
            return None
        places = torch.searchsorted(self.compared_rows, itself.cpu()).clamp_max(len(self.compared_rows) - 1)
        return torch.where(self.compared_rows[places] == itself.cpu(), places, -1)

    def join_layers(self, rows: Sequence[Tensor], members: int) -> Tensor:
        """Put the inputs of the layers, (B, D) each, side by side, as at most `most` numbers per row.

        Those of every layer and member get length one if `unit`; else all of a layer are divided by its size.
        """
        if self.scale is None:
            rows = [part / part.norm(dim=1, keepdim=True).clamp_min(1e-12) for x in rows for part in x.float().chunk(members, 1)]
        joined = rows[0].float() if len(rows) == 1 else torch.cat([x.float() for x in rows], 1)
        if self.scale is not None:
            return joined * self.scale if self.directions is None else joined @ self.scale
        return joined if self.directions is None else joined @ self.directions.to(joined)

    def vectors(self, features: Features) -> Tensor:
        """Return what is compared, (B, D)."""
        rows = [join_members(features.layer_inputs, name) for name in self.widths]
        for name, row in zip(self.widths, rows, strict=True):
            if row is None:
                raise ModelError(
                    f"Expected `{name}` to get one row per example, as at fit time, but on these inputs it does not. "
                    "Check their form, or fit with score='epistemic', which compares no layers."
                )
        return self.join_layers([row for row in rows if row is not None], features.members)

    def compared(self, features: Features) -> list[tuple[KNNDistance, Tensor]]:
        """Return what is compared with training rows."""
        return [(self.space, self.vectors(features))] if isinstance(self.space, KNNDistance) else []

    def fit_scale(self, data: ScoreData) -> Self:
        """Take the scale of in-distribution rows."""
        measured = [self.space.log_ratio(self.vectors(f), self.find_own_places(f.itself)) for f in data.scale_features]
        self.space.zscore = ZScore.fit_ratios(torch.cat(measured))
        return self

    def forward(self, features: Features) -> Tensor:
        """Score B rows, (B,)."""
        return self.space.zscore(self.space.log_ratio(self.vectors(features), self.find_own_places(features.itself)))

    def measure_without(self, features: Features, cut: Cut) -> Tensor:
        """Return the log ratio among the rows that are kept."""
        return ratio_without(self.space, self.vectors(features), cut)

    def config(self) -> dict[str, Any]:
        """Return the layers, and how many numbers of theirs are compared."""
        return {"widths": self.widths, "most": self.most}


@register_term("layers")
class LayerDistance(LayerTerm):
    """The distance to training rows in the inputs of the layers."""

    unit = False


@register_term("whitened")
class WhitenedDirections(LayerTerm):
    """The length of the layers' directions after whitening: how far from the ellipsoid of the training rows."""

    narrow = WHITENED

    @classmethod
    def new_space(cls) -> Any:
        """Return an empty ellipsoid."""
        return Ellipsoid()

    @classmethod
    def fit_space(cls, rows: Tensor) -> Any:
        """Fit the ellipsoid."""
        return Ellipsoid.fit(rows)

    def fit_scale(self, data: ScoreData) -> Self:
        """Take the scale of validation rows; of few, that of parts of the training rows by the ellipsoid of the others."""
        if data.fresh:
            return super().fit_scale(data)
        rows = self.join_layers([data.layers[n][data.compared] for n in self.widths], data.sampler.predictive.members)
        values: list[Tensor] = []
        for fold in permutation(len(rows), "folds").chunk(FOLDS):
            space = Ellipsoid.fit(rows[torch.isin(torch.arange(len(rows), device="cpu"), fold, invert=True)])
            values += [] if space is None else [space.log_ratio(rows[fold])]
        self.space.zscore = ZScore.fit_ratios(torch.cat(values)) if values else self.space.zscore
        return self

    def measure_without(self, features: Features, cut: Cut) -> Tensor:
        """Return the log length among half of the rows that are kept, NaN for these."""
        rows = self.vectors(features).double()
        space = Ellipsoid.fit(rows[cut.half])
        values = rows[:, 0] if space is None else space.log_ratio(rows)  # all rows the same: none is farther
        return values.masked_fill(cut.half, torch.nan)


@register_term("last-layer")
class LastLayerDistance(LayerTerm):
    """The distance to the nearest direction of a training row in the inputs of a classifier's last layer."""

    last_only = True

    @classmethod
    def build(cls, data: ScoreData) -> Self | None:
        """Fit the inputs of the last layer; None for a regression, whose last layers tell no more than the others."""
        return super().build(data) if data.sampler.likelihood.classifies else None

    @classmethod
    def new_space(cls) -> Any:
        """Return an empty space."""
        return KNNDistance(single=True)

    @classmethod
    def fit_space(cls, rows: Tensor) -> Any:
        """Fit rows of which the nearest one counts."""
        return KNNDistance.fit(rows, standardized=False, single=True)


@register_term("leverage", by_default=False)
class Leverage(WhitenedDirections):
    """The whitened length of the last layer's inputs: how far the closed form's draws of that layer disagree."""

    unit, last_only = False, True


class ClassEllipsoids(FittedModule):
    """Whitened distances to the mean of the nearest class, `relative`: beyond the distance to the mean of all rows."""

    means: Tensor
    whitening: Tensor
    centre: Tensor
    overall: Tensor

    def __init__(self, *tensors: Tensor, relative: bool = False) -> None:
        super().__init__()
        for place, name in enumerate(("means", "whitening", "centre", "overall")):
            self.register_buffer(name, tensors[place] if tensors else torch.empty(0, device="cpu"))
        self.zscore, self.relative = ZScore(), relative

    @classmethod
    def of_classes(cls, rows: Tensor, labels: Tensor, *, relative: bool) -> Self:
        """Fit rows (N, D) of these classes (N,)."""
        rows, (classes, index) = rows.double(), labels.unique(return_inverse=True)
        means = torch.zeros(len(classes), rows.shape[1], dtype=rows.dtype, device=rows.device).index_add_(0, index, rows)
        means = means / index.bincount().unsqueeze(1)
        whitening, centre = find_whitening(rows - means[index], 3e-2), rows.mean(0)
        overall = find_whitening(rows - centre, 3e-2)
        return cls(means @ whitening, whitening, centre, overall, relative=relative)

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that belong to C classes of D numbers."""
        d, c = self.centre.numel() or -1, len(self.means) if self.means.ndim == 2 else -1
        return {"means": (c, d), "whitening": (d, d), "centre": (d,), "overall": (d, d)}

    def forward(self, x: Tensor, itself: Tensor | None = None) -> Tensor:
        """Score rows, (B, D) -> (B,)."""
        return self.zscore(self.log_ratio(x))

    def log_ratio(self, x: Tensor, itself: Tensor | None = None) -> Tensor:
        """Return the log distance to the nearest mean, or how much shorter than to the mean of all it is, (B,)."""
        white = x.double() @ self.whitening
        gaps = white.square().sum(1, keepdim=True) + self.means.square().sum(1) - 2 * white @ self.means.mT
        nearest = gaps.amin(1).clamp_min(1e-30)
        if self.relative:
            return nearest - ((x.double() - self.centre) @ self.overall).square().sum(1)
        return nearest.log()


@register_term("class-distance", by_default=False)
class ClassDistance(LayerTerm):
    """The whitened distance to the mean direction of the nearest class in the last layer (Mueller & Hein, 2025: MDS++)."""

    last_only, narrow = True, WIDE
    relative: ClassVar[bool] = False

    @classmethod
    def new_space(cls) -> Any:
        """Return empty ellipsoids."""
        return ClassEllipsoids(relative=cls.relative)

    @classmethod
    def fit_space(cls, rows: Tensor) -> Any:
        """Hold the rows until their classes are known."""
        return ClassEllipsoids(relative=cls.relative)

    @classmethod
    def build(cls, data: ScoreData) -> Self | None:
        """Fit the last layer's directions of every class; None where rows have no class each."""
        labels, rows = data.labels, data.layers
        if labels is None or not rows or len(labels) != len(next(iter(rows.values()))):
            return None
        term = super().build(data)
        if term is not None:
            name, members = next(iter(term.widths)), data.sampler.predictive.members
            vectors = term.join_layers([rows[name]], members)
            term.space = ClassEllipsoids.of_classes(vectors, labels, relative=cls.relative)
        return term

    def measure_without(self, features: Features, cut: Cut) -> Tensor:
        """Return the distance to classes of half of the rows that are kept, NaN for these."""
        rows = self.vectors(features)
        if cut.labels is None or not bool(cut.half.any()):
            return rows.new_full((len(rows),), torch.nan, dtype=torch.float64)
        space = ClassEllipsoids.of_classes(rows[cut.half], cut.labels[cut.half], relative=self.relative)
        return space.log_ratio(rows).masked_fill(cut.half, torch.nan)


@register_term("relative-class-distance", by_default=False)
class RelativeClassDistance(ClassDistance):
    """How much nearer the nearest class is than all rows together (Ren et al., 2021, of directions: RMDS++)."""

    relative = True


# ------------------------------------------------------------------------------------------------------------- measures


def ratio_without(space: KNNDistance, x: Tensor, cut: Cut) -> Tensor:
    """Return the z-scores (N,) of log ratios of rows x (N, D) among those of them that are kept, each but with itself."""
    squares = cut.distances(space, x)
    kept = cut.kept.nonzero().flatten()
    parts = 1 if space.single else max(1, min(8, len(kept) // 8))
    gaps = F.pad(squares[:, kept], (0, -len(kept) % parts), value=torch.inf)
    nearest, places = gaps.unflatten(1, (-1, parts)).min(1)
    numbers = (places * parts + torch.arange(parts, device=places.device)).clamp_max(len(kept) - 1)
    distances = nearest.double().sqrt()
    spacings = distances[kept].mean(1)
    spacings = spacings.mean().expand(len(kept)) if space.single else spacings
    values = compute_log_ratio(distances, numbers, spacings)
    return (values - values[kept].mean()) / values[kept].std().clamp_min(1e-12)


def measure_leverage(rows: Tensor, whitening: Tensor) -> Tensor:
    """Return the log length of whitened rows, (B, D) -> (B,)."""
    return (rows @ whitening).square().sum(1).clamp_min(1e-30).log().mul(0.5)


def mean_logits(features: Features) -> Tensor:
    """Return the logits of every base model, (M, B, C) in float64."""
    logits = features.likelihood.logits(features.base_outputs)
    if logits is None:
        raise ConfigError("Expected a classification for a score of logits, but this is a regression.")
    return logits.double().unflatten(0, (features.members, -1)).mean(1)


def log_uncertainty(likelihood: Likelihood, outputs: Tensor, members: int) -> Tensor:
    """Return log u in float64, (M·P, B, ...) -> (B,): the mean over members of the logarithm of each one's disagreement."""
    # the logarithm first, for one member may be wider than all others; members that are not random disagree with each other
    draws = outputs.shape[0] // members
    outputs = outputs.double()  # softmax and logarithm in float32 make noise of a confident classifier's tiny disagreement
    parts = outputs.unflatten(0, (members, draws)) if draws > 1 else outputs.unsqueeze(0)
    values = torch.stack([likelihood.epistemic(part) for part in parts]).nan_to_num(nan=torch.inf, posinf=torch.inf)
    # runtimes without log1p round a mutual information below this floor; variances have units, and only zero is cut
    return values.clamp_min(1e-12 if likelihood.classifies else 1e-30).log().mean(0)


# -------------------------------------------------------------------------------------------------------------- vectors


def project(rows: Tensor, directions: Tensor | None) -> Tensor:
    """Turn rows (B, D) into directions (D, N), if there are some.

    Distances stay what they are to a few per cent (Johnson and Lindenstrauss), and are found in a fraction of the time.
    """
    if directions is None:
        return rows
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return rows @ directions.to(rows)


def narrow_rows(rows: Tensor) -> Tensor:
    """Turn rows (B, D) into at most WHITENED numbers each, in float64: an ellipsoid of D numbers takes D³ products to find."""
    return project(rows, directions(rows.shape[1], WHITENED)).double()


@lru_cache(maxsize=16)
def directions(width: int, narrow: int) -> Tensor | None:
    """Return random directions of variance 1/narrow, (width, narrow), the same ones always; None for rows of few numbers."""
    if width <= narrow:
        return None
    return Normal().sample((width, narrow), generator("directions", width, narrow)) / narrow**0.5


def nothing_to_compare(name: str) -> ConfigError:
    """Return the error for data without what the score reads: logits, or vectors."""
    vectors = "whose inputs or layers are one vector per example, and not all the same,"
    needs = "of a classifier, with one class per row," if issubclass(TERMS.get(name, Term), LogitTerm) else vectors
    return ConfigError(
        f"Expected three or more training rows {needs} for score={name!r}, but there are none. Pass score='paper'."
    )
