"""The default score: the weighted mean of the terms of `offmap.scores.terms`, with weights chosen from training rows alone.

No OOD data are needed: parts of the training rows are cut out in turn, and stand in for OOD rows.

    beyond     the outer half of a table along a column of numbers, or along a principal axis or a random direction of these
    between    the inner half of a table, likewise
    cluster    a cluster of the layers' inputs
    class      some of the classes
    group      a group that the user names, `groups=`: a site, a day, a speaker

Every term is fitted again to the rows that are kept; the models are not, so what they learned of the rows that were cut out is
still in their layers. A_tk is the AUROC of term t for cuts of kind k, their mean, and b_k the best of all terms:

    weight_t  ∝  Σ_k (b_k − 50) · exp((A_tk − b_k) / s_k)

with s = 8 points; 32 for clusters and classes, which the model has learned to tell apart, so that they tell less of what it has
not. Kinds that no term sees count for little, and a term that sees what no other sees keeps its weight. The mean over resampled
cuts of these weights pulls them towards equal ones where few cuts tell. Nothing here depends on OOD data or on chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from offmap._types import Inputs
from offmap.data.batch import flatten_inputs, rows_of, take_rows
from offmap.errors import ShapeError
from offmap.metrics import auroc, rank_correlation
from offmap.random import generator, permutation
from offmap.scores.distance import LEAST_ROWS, KNNDistance
from offmap.scores.score import SCALE_ROWS, SCORES, Cut, Features, PaperScore, Reads, Score, ScoreData, register_score
from offmap.scores.terms import TERMS, InputDistance, LayerTerm, Term, nothing_to_compare

TUNING_ROWS = 1000  # training rows that cuts are made of
WIDEST_TABLE = 200  # columns of inputs that are cut along
LEAST_TUNING = 40  # of fewer rows, no parts are cut out
SHARPNESS = 8.0  # points of AUROC that make a term's weight e times smaller
LEARNED = {"class": 32.0, "cluster": 32.0}  # the same, for cuts of what the model has learned to tell apart
RESAMPLES = 50
FEWEST = 5  # rows that a cut must hold, and keep
INNER = 0.25, 0.75  # quantiles that bound the inner half of the rows
COLUMNS, AXES, RANDOM, CLUSTERS, CLASSES, GROUPS = 6, 3, 2, 8, 6, 8  # cuts of each sort, at most

CORRUPTED_ROWS, EXPENSIVE = 100, 10**7  # validation rows, at most; a third of them where `ScoreData.price` is so high

Shifts = list[dict[str, Any]]
"""One plain dict per cut or corruption: kind, name, auroc, flagged, and terms, {name: auroc}; in per cent."""

Figures = dict[str, Any]
""""shifts", and "errors": {term: rank correlation with the errors of the base models on validation rows}."""


@register_score("default")
class CombinedScore(Score):
    """The weighted mean of several terms; `weights` (T,) sum to one. `figures` tell what they see, as `Guard.assess` reports."""

    tuned: ClassVar[bool] = True  # else weights are equal
    weights: Tensor

    def __init__(self, terms: Mapping[str, Score], weights: Tensor | None = None, figures: Figures | None = None) -> None:
        super().__init__()
        self.parts, self.figures = nn.ModuleDict(terms), figures or {}
        equal = torch.full((len(terms),), 1 / max(1, len(terms)), dtype=torch.float64, device="cpu")
        self.register_buffer("weights", equal if weights is None else weights / weights.sum())
        reads = [term.reads for term in terms.values()]
        layers = tuple(dict.fromkeys(name for r in reads for name in r.layers))
        self.reads = Reads(any(r.draws for r in reads), any(r.base for r in reads), layers)

    @classmethod
    def names(cls) -> list[str]:
        """Name the terms of this score."""
        return [name for name, kind in TERMS.items() if kind.by_default]

    @classmethod
    def fit(cls, data: ScoreData) -> Score:
        """Fit the terms that the data allow, and choose their weights; without two terms, the paper's score."""
        terms = fit_terms(cls.names(), data)
        return cls.join_terms(terms, data) if len(terms) > 1 else PaperScore()

    @classmethod
    def join_terms(cls, terms: Mapping[str, Score], data: ScoreData, weights: Tensor | None = None) -> Self:
        """Join terms with these weights, or those that cuts choose, and measure what they see."""
        measured = measure_cuts(terms, data)
        weights = choose_weights(measured, len(terms)) if weights is None and cls.tuned else weights
        score = cls(terms, weights).eval()
        score.figures = score.tell_figures(measured, data)
        return score

    @property
    def items(self) -> list[tuple[str, Score]]:
        """The terms with their names."""
        return list(self.parts.items())  # pyright: ignore[reportReturnType]

    def forward(self, features: Features) -> Tensor:
        """Score B rows, (B,)."""
        return self.join({name: term(features) for name, term in self.items})

    def join(self, terms: Mapping[str, Tensor]) -> Tensor:
        """Join terms (B,) to the score, (B,); infinite in one is infinite altogether."""
        stacked = torch.stack([terms[name].double() for name in self.parts])
        return (self.weights @ stacked).nan_to_num(nan=torch.inf, posinf=torch.inf)

    def terms(self, features: Features) -> dict[str, Tensor]:
        """Return every term, (B,) each, in standard deviations over in-distribution rows."""
        return {name: term(features) for name, term in self.items}

    def compared(self, features: Features) -> list[tuple[KNNDistance, Tensor]]:
        """Return what all terms compare."""
        return [pair for _, term in self.items for pair in term.compared(features)]

    def describe(self) -> str:
        """List the terms with their weights, the layers they read, and how many training rows they hold."""
        count = max((len(m.rows) for m in self.modules() if isinstance(m, KNNDistance)), default=0)
        words = [f"{name} {weight:.2f}" for name, weight in zip(self.parts, self.weights.tolist(), strict=True)]
        layers = f"; layers {', '.join(self.reads.layers)}" if self.reads.layers else ""
        return f"{', '.join(words)}{layers}; holds {count} training rows"

    def tell_figures(self, measured: Sequence[Measured], data: ScoreData) -> Figures:
        """Tell what the score sees of cuts and corrupted rows, and how its terms rank the errors of fresh rows."""
        clean = {name: torch.cat([term(f) for f in data.scale_features]) for name, term in self.items}
        known = [m for m in measured if bool((self.weights[~m.aurocs.isnan()] > 0).any())]
        shifts = [assess_cut(m, list(self.parts), self.weights, data.false_alarms) for m in known]
        errors = rank_errors(clean | {"score": self.join(clean)}, data)
        return {"shifts": shifts + assess_corruptions(self, clean, data), "errors": errors}

    def config(self) -> dict[str, Any]:
        """Return the terms' kinds and what they need, and what they see."""
        terms = {name: [term.name, term.config()] for name, term in self.items}
        return {"terms": terms, "figures": self.figures}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Build all terms with empty buffers; a LookupError names one of another version."""
        for name, (kind, _) in config["terms"].items():
            if kind not in SCORES:
                raise LookupError(f"the term {name!r} of the score")
        parts = {name: SCORES[kind].from_config(c) for name, (kind, c) in config["terms"].items()}
        return cls(parts, figures=dict(config.get("figures", {})))

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return one weight per term."""
        return {"weights": (len(self.parts),)}


@register_score("equal")
class EqualScore(CombinedScore):
    """The terms of the default score with equal weights."""

    tuned = False


@register_score("distance")
class DistanceScore(CombinedScore):
    """The terms of the default score that compare with training rows."""

    @classmethod
    def names(cls) -> list[str]:
        """Name the distances."""
        return [name for name in super().names() if issubclass(TERMS[name], InputDistance | LayerTerm)]

    @classmethod
    def fit(cls, data: ScoreData) -> Score:
        """Fit the distances that the data allow; a ConfigError if there are none."""
        terms = fit_terms(cls.names(), data)
        if not terms:
            raise nothing_to_compare(cls.name)
        return cls.join_terms(terms, data)


@register_score("weighted")
class WeightedScore(CombinedScore):
    """Terms with weights of the user's."""

    @classmethod
    def fit_weights(cls, weights: Mapping[str, float], data: ScoreData) -> Score:
        """Fit terms of these names with these weights; a ConfigError names one that the data do not allow."""
        terms = fit_terms(list(weights), data)
        for name in weights:
            if name not in terms:
                raise nothing_to_compare(name)
        return cls.join_terms(terms, data, torch.tensor([float(w) for w in weights.values()], dtype=torch.float64, device="cpu"))


def fit_terms(names: Sequence[str], data: ScoreData) -> dict[str, Score]:
    """Fit the terms of these names that the data allow; none for too few rows, and for several positions each."""
    if sum(map(rows_of, data.train)) < LEAST_ROWS or data.sampler.likelihood.epistemic(data.few.outputs).ndim > 1:
        return {}
    assert data.reference  # one pass of the base models, which all terms read
    terms = {name: term for name in names if (term := TERMS[name].build(data)) is not None}
    return {name: term.fit_scale(data) for name, term in terms.items()}


# ----------------------------------------------------------------------------------------------------------------- cuts


class Measured(NamedTuple):
    """A cut, the terms of all rows as if fitted without it, (T, N), and their AUROC, (T,), in per cent; NaN where unknown."""

    cut: Cut
    values: Tensor
    aurocs: Tensor


def measure_cuts(terms: Mapping[str, Score], data: ScoreData) -> list[Measured]:
    """Cut parts out of training rows, and measure how well every term, fitted to the others, sees them."""
    place, part = max(enumerate(data.examples), key=lambda pair: len(pair[1].numbers))
    rows = permutation(len(part.numbers), "cuts")[:TUNING_ROWS].sort().values
    if len(rows) < LEAST_TUNING:
        return []
    features = data.take(place, rows)
    labels = part.targets[rows] if data.labels is not None else None
    numbers = part.numbers[rows].tolist()
    if data.groups is not None and max(numbers) >= len(data.groups):
        raise ShapeError(f"Expected a label in `groups` for every row of `train`, but got {len(data.groups)}.")
    groups = None if data.groups is None else [data.groups[number] for number in numbers]
    result: list[Measured] = []
    for cut in make_cuts(terms, features, labels, groups):
        values = [t.measure_without(features, cut).double().cpu() for t in terms.values() if isinstance(t, Term)]
        cut = replace(cut, held=cut.held.cpu(), half=cut.half.cpu())
        aurocs = torch.tensor([compute_auroc(v, cut) for v in values], dtype=torch.float64, device="cpu")
        result.append(Measured(cut, torch.stack(values), aurocs))
    return result


def compute_auroc(values: Tensor, cut: Cut) -> float:
    """Return the AUROC of values (N,) of rows that were cut out against rows that were kept, in per cent; NaN if unknown."""
    kept, held = (values[rows & values.isfinite()] for rows in (cut.kept, cut.held))
    return 100 * float(auroc(kept, held)) if len(kept) and len(held) else math.nan


def make_cuts(terms: Mapping[str, Score], features: Features, labels: Tensor | None, groups: Sequence[Any] | None) -> list[Cut]:
    """Cut the rows of these features along directions, in clusters, classes and groups."""
    vectors, layers = flatten_inputs(features.inputs), next((t for t in terms.values() if isinstance(t, LayerTerm)), None)
    learned = layers.vectors(features) if layers is not None else None
    image = isinstance(features.inputs, Tensor) and features.inputs.ndim > 2
    space = vectors if learned is None else learned
    if space is None:
        return []
    held: list[tuple[str, str, Tensor]] = []
    # directions of pixels, or of what a model learned, are no shifts that anybody would meet
    if vectors is not None and vectors.shape[1] <= WIDEST_TABLE and not image:
        for name, along in list_directions(vectors.double().nan_to_num(), find_numbers(terms, vectors)):
            held += list_halves(name, along)
    held += list_clusters(space.double().nan_to_num())
    if labels is not None and len(classes := labels.unique()) > 2:
        order = classes[permutation(len(classes), "classes").to(classes.device)]
        for number, some in enumerate(order.chunk(min(CLASSES, len(order)))):
            held.append(("class", f"classes left out, {number + 1}", torch.isin(labels, some)))
    if groups is not None:
        common = sorted({g: groups.count(g) for g in groups}.items(), key=lambda pair: (-pair[1], str(pair[0])))
        for group, _ in common[:GROUPS]:
            held.append(("group", f"group {group}", torch.tensor([g == group for g in groups], device="cpu")))
    squares: dict[int, Tensor] = {}
    cuts: list[Cut] = []
    for kind, name, rows in held:
        rows = rows.to(space.device)
        kept = (~rows).nonzero().flatten()
        if int(rows.sum()) >= FEWEST and len(kept) >= max(FEWEST, len(rows) // 3):
            half = torch.zeros_like(rows)
            half[kept[permutation(len(kept), "half")[: len(kept) // 2].to(kept.device)]] = True
            cuts.append(Cut(kind, name, rows, half, labels, squares))
    return cuts


def find_numbers(terms: Mapping[str, Score], rows: Tensor) -> Tensor:
    """Number the columns of a table (N, D) that are numbers: a half along a column of words is none that anybody would meet."""
    inputs = next((term for term in terms.values() if isinstance(term, InputDistance)), None)
    encoder = None if inputs is None else inputs.encoder
    every = torch.arange(rows.shape[1], device=rows.device)
    return every if encoder is None or not encoder.numbers.numel() else encoder.numbers


def list_directions(rows: Tensor, numbers: Tensor) -> list[tuple[str, Tensor]]:
    """List principal axes, random directions and columns of numbers of rows (N, D), with the rows along each, (N,)."""
    rows = rows[:, numbers]
    scale = rows.std(0, correction=0)
    white = (rows - rows.mean(0)) / torch.where(scale > 0, scale, 1.0)
    order = white.pow(3).mean(0).argsort()  # whatever the order of the columns, they are drawn in this one
    source = generator("directions of cuts", rows.shape[1])
    _, _, axes = torch.linalg.svd(white, full_matrices=False)
    along = [(f"principal axis {i + 1}", turn(white @ axis)) for i, axis in enumerate(axes[:AXES])]
    for i in range(RANDOM):
        weights = torch.randn(rows.shape[1], generator=source, dtype=rows.dtype, device="cpu")
        along.append((f"random direction {i + 1}", white[:, order] @ weights.to(white)))
    chosen = order[permutation(rows.shape[1], "columns of cuts")[:COLUMNS].to(order.device)].tolist()
    return along + [(f"column {int(numbers[c])}", rows[:, c]) for c in chosen]


def turn(along: Tensor) -> Tensor:
    """Turn a direction so that its longer tail is the high end: which sign an eigenvector has is chance."""
    return along * (1.0 if float(along.pow(3).mean()) >= 0 else -1.0)


def list_halves(name: str, along: Tensor) -> list[tuple[str, str, Tensor]]:
    """List the outer and the inner half of rows along a direction, (N,); none where equal values make it much more or less."""
    low, high = (along.quantile(share) for share in INNER)
    inner = (along > low) & (along < high)
    if not 0.3 <= float(inner.double().mean()) <= 0.7:
        return []
    outer, between = f"beyond the data, outer half of {name}", f"between the data, inner half of {name}"
    return [("beyond", outer, ~inner), ("between", between, inner)]


def list_clusters(rows: Tensor) -> list[tuple[str, str, Tensor]]:
    """Cluster rows (N, D) by k-means; each cluster is one."""
    rows = rows.double()
    centres = rows[permutation(len(rows), "clusters")[: min(CLUSTERS, len(rows) // 10)].to(rows.device)]
    nearest = torch.zeros(len(rows), dtype=torch.long, device=rows.device)
    for _ in range(10):
        nearest = torch.cdist(rows, centres).argmin(1)
        members = torch.nn.functional.one_hot(nearest, len(centres)).to(rows)
        counts = members.sum(0).unsqueeze(1)
        centres = torch.where(counts > 0, members.mT @ rows / counts.clamp_min(1), centres)
    return [("cluster", f"cluster {i + 1} of the data", nearest == i) for i in range(len(centres))]


# -------------------------------------------------------------------------------------------------------------- weights


def choose_weights(measured: Sequence[Measured], count: int) -> Tensor:
    """Choose the weights of so many terms, (T,), from their AUROC of every cut: the mean over resampled cuts."""
    if not measured:
        return torch.full((count,), 1 / max(1, count), dtype=torch.float64, device="cpu")
    aurocs = torch.stack([m.aurocs for m in measured])
    known = aurocs.nan_to_num(nan=float(aurocs.nanmean()))  # what cannot be told counts as the mean
    kinds = {kind: [i for i, m in enumerate(measured) if m.cut.kind == kind] for kind in {m.cut.kind for m in measured}}
    source, total = generator("resampled cuts"), torch.zeros(count, dtype=torch.float64, device="cpu")
    for _ in range(RESAMPLES):
        weights = torch.zeros_like(total)
        for kind, cuts in sorted(kinds.items()):
            drawn = torch.tensor(cuts, device="cpu")[torch.randint(len(cuts), (len(cuts),), generator=source, device="cpu")]
            means = known[drawn].mean(0)
            best = means.amax()
            weights += (best - 50).clamp_min(1.0) * ((means - best) / LEARNED.get(kind, SHARPNESS)).exp()
        total += weights / weights.sum()
    return total / total.sum()


# -------------------------------------------------------------------------------------------------------------- figures


def assess_cut(measured: Measured, names: Sequence[str], weights: Tensor, false_alarms: float) -> dict[str, Any]:
    """Tell what the joined score sees of a cut: its AUROC, and which share it flags at the threshold, in per cent."""
    cut, values, aurocs = measured
    kept = torch.where(cut.kept, values, torch.nan)
    mean = kept.nanmean(1, keepdim=True)
    std = (kept - mean).square().nanmean(1, keepdim=True).sqrt()
    known = ~aurocs.isnan()
    scaled = ((values - mean) / std.clamp_min(1e-12)).clamp_min(-1)[known]
    joined = weights[known] @ scaled / weights[known].sum()
    level = joined[cut.kept & joined.isfinite()].quantile(1 - false_alarms)
    held = joined[cut.held & ~joined.isnan()]
    alone = {name: value for name, value in zip(names, aurocs.tolist(), strict=True) if not math.isnan(value)}
    flagged = 100 * float((held > level).double().mean())
    return {"kind": cut.kind, "name": cut.name, "auroc": compute_auroc(joined, cut), "flagged": flagged, "terms": alone}


def assess_corruptions(score: CombinedScore, clean: Mapping[str, Tensor], data: ScoreData) -> Shifts:
    """Tell what the score sees of corrupted validation rows, against clean rows: as `assess_cut`, with the real draws."""
    level, shifts = score.join(clean).quantile(1 - data.false_alarms), Shifts()
    for name, rows in corrupt_rows(data):
        blocks = [score.terms(data.sampler.features(block, score.reads)) for block in data.sampler.blocks(rows)]
        terms = {term: torch.cat([block[term] for block in blocks]) for term in score.parts}
        joined = score.join(terms)
        alone = {term: 100 * float(auroc(clean[term], values)) for term, values in terms.items()}
        flagged, seen = 100 * float((joined > level).double().mean()), 100 * float(auroc(score.join(clean), joined))
        shifts.append({"kind": "corruption", "name": name, "auroc": seen, "flagged": flagged, "terms": alone})
    return shifts


def corrupt_rows(data: ScoreData) -> list[tuple[str, Inputs]]:
    """Corrupt some validation rows mildly: images and series by noise, blur and contrast, tables and tokens by mixing rows."""
    most = CORRUPTED_ROWS if not data.train or data.price < EXPENSIVE else CORRUPTED_ROWS // 3
    rows = take_rows(data.valid, slice(None, None, -(-rows_of(data.valid) // most)))
    if isinstance(rows, dict) and isinstance(ids := rows.get("input_ids"), Tensor) and ids.ndim == 2:
        return [("a third of the tokens from other rows", rows | {"input_ids": mix_columns(ids, 3)})]
    if not isinstance(rows, Tensor) or rows.ndim < 2 or len(rows) < FEWEST or rows.shape[1:] == (1,):
        return []
    if rows.ndim == 2:
        return [
            ("every value from another row", mix_columns(rows, 1)),
            ("a third of the values from other rows", mix_columns(rows, 3)),
        ]
    if not rows.is_floating_point():
        return []
    mean, noise = rows.flatten(1).mean(1).view(-1, *[1] * (rows.ndim - 1)), torch.empty_like(rows, device="cpu")
    noise.normal_(generator=generator("noise of rows"))
    blurred = rows
    for axis in range(max(2, rows.ndim - 2), rows.ndim):
        blurred = (blurred.roll(1, axis) + blurred + blurred.roll(-1, axis)) / 3
    noisy = rows + 0.3 * rows.std() * noise.to(rows)
    return [("noise", noisy), ("blur", blurred), ("half the contrast", (rows + mean) / 2)]


def mix_columns(rows: Tensor, every: int) -> Tensor:
    """Take every so-manieth column of rows (N, D) from other rows, each column from others."""
    mixed = rows.clone()
    for column in range(0, rows.shape[1], every):
        mixed[:, column] = rows[permutation(len(rows), "mixed", column).to(rows.device), column]
    return mixed


def rank_errors(terms: Mapping[str, Tensor], data: ScoreData) -> dict[str, float]:
    """Return the rank correlation of every term with the base models' errors on validation rows; nothing of few such rows."""
    if not data.fresh or data.targets.ndim > 2:
        return {}
    likelihood = data.sampler.likelihood
    predictions = [likelihood.predict(features.base_outputs) for features in data.scale_features]
    targets = data.targets[:: -(-rows_of(data.valid) // SCALE_ROWS)].split([rows_of(f.inputs) for f in data.scale_features])
    errors = torch.cat([likelihood.residual(p, y) for p, y in zip(predictions, targets, strict=True)])
    errors = errors.mean(1) if errors.ndim > 1 else errors
    if len(errors) != len(next(iter(terms.values()))) or not bool(errors.isfinite().all()):  # some rows have no target
        return {}
    return {name: float(rank_correlation(values.double(), errors.double())) for name, values in terms.items()}
