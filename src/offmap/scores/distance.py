"""Distances to in-distribution rows, relative to how far those are from each other; and to their ellipsoid.

The distance to the nearest rows means little by itself: where data are sparse, in-distribution rows are far from each other
too. So it is divided by the same distance of the nearest rows themselves (as in local outlier factors). Rows are dealt to eight
parts, and the nearest row x_i(x) of every part counts: about as good as the ten nearest of all, and found in a third of the time.
With s_i the mean distance of row i to its own nearest, and f = 0.1 mean_i s_i:

    ratio(x) = (mean over parts of |x − x_i(x)| + f/10) / (mean over those x_i of s_i + f)

Numbers are compared in standard deviations. A word is the same or another one, so columns that stand for words have a scale of
their own, `TableEncoder`: standardised, an indicator of a word with a share of 0.1 % would stand 30 standard deviations away.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NEIGHBOURS = 10  # k of `find_nearest`
PARTS = 8  # of the rows, the nearest row of each of which counts; fewer where a part would have less than eight rows
SHARE = 0.1  # of the average spacing, added to the local one: copies of one row are at no distance at all
BLOCK_NUMBERS = 1 << 19  # held at once (2 MB, which stay in a core's cache), whatever the number of examples
TINY = 1e-150  # ratios are at least so large
COPIES = 1e-5  # of the size of the rows: what is nearer is a copy, but for the rounding of the layers that it passed
LEAST_SPACING = 1e-4  # of their size: rows that all have copies are at no distance from each other
LEAST_STD = 1e-3  # of log ratios: less is rounding
LEAST_ROWS = 3  # fewer have no spacing to speak of
RUNS = 16  # rows are looked through in so many runs, side by side, where they are many

FLAT = 3e-3
"""Directions in which rows vary less than this share of the most count as varying so much: `Ellipsoid` would see noise there."""

FEW_WORDS = 16
"""Whole numbers of so many values, or of √N in N rows, are words; those of more may be anything, such as ids or lengths."""


def find_nearest(rows: Tensor, x: Tensor, *, itself: Tensor | None = None, k: int = NEIGHBOURS) -> tuple[Tensor, Tensor]:
    """Find the k nearest rows: their distances (B, k) in float64, and their numbers (B, k).

    A matrix product in float32 finds them, around the rows' mean so that little cancels; their distances are then exact, for a
    difference of two numbers is rounded by its own size, not by theirs. Of N rows at most N − 1 are taken, as many as a row
    itself can see; `itself` (B,) are rows that each x is not compared with.
    """
    centre, k = rows.double().mean(0), min(k, len(rows) - 1)
    centred = (rows.double() - centre).float()
    squares = centred.square().sum(1)

    def find(x: Tensor, itself: Tensor | None) -> tuple[Tensor, Tensor]:
        gaps = torch.addmm(squares, (x.double() - centre).float(), centred.mT, alpha=-2)  # |x − row|² − |x|²
        if itself is not None:
            gaps.scatter_(1, itself[:, None].to(gaps.device), torch.inf)
        numbers = gaps.topk(k, dim=1, largest=False).indices
        return measure_lengths(rows[numbers] - x.unsqueeze(1)), numbers

    step = max(1, BLOCK_NUMBERS // max(len(rows), k * rows.shape[1]))
    if torch.compiler.is_compiling() or len(x) <= step:  # a graph takes any number of rows at once
        return find(x, itself)
    cuts = [slice(start, start + step) for start in range(0, len(x), step)]
    parts = [find(x[cut], None if itself is None else itself[cut]) for cut in cuts]
    return torch.cat([distances for distances, _ in parts]), torch.cat([numbers for _, numbers in parts])


def measure_lengths(vectors: Tensor) -> Tensor:
    """Return the lengths of vectors in float64, (..., D) -> (...): without copies, but in a graph."""
    if torch.compiler.is_compiling():
        return vectors.double().square().sum(-1).sqrt()
    return torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64)


def find_lowest(values: Tensor, parts: int) -> Tensor:
    """Return the places of the lowest values of every part, (B, N) -> (B, parts); the values of a part stand `parts` apart.

    >>> find_lowest(torch.tensor([[3.0, 0.0, 1.0, 2.0]]), 2)
    tensor([[2, 1]])
    """
    if torch.compiler.is_compiling() or len(values) < RUNS or values.shape[1] % (RUNS * parts):
        return values.unflatten(1, (-1, parts)).min(1).indices * parts + torch.arange(parts, device=values.device)
    values = values.unflatten(1, (RUNS, -1))  # (B, runs, N / runs): lowest values alone are found much faster than their places
    lowest = values.amin(1)
    places = lowest.unflatten(1, (-1, parts)).min(1).indices * parts + torch.arange(parts, device=values.device)
    run = values.gather(2, places.unsqueeze(1).expand(-1, RUNS, -1)).min(1).indices
    return run * lowest.shape[1] + places


def compute_log_ratio(distances: Tensor, numbers: Tensor, spacings: Tensor) -> Tensor:
    """Return log ratio(x), (B,), from distances (B, k) to rows of these numbers (B, k) and spacings (N,); NaN becomes ∞."""
    return log_ratio(distances, numbers, (spacings + SHARE * spacings.mean()).clamp_min(TINY), SHARE * SHARE * spacings.mean())


def log_ratio(distances: Tensor, numbers: Tensor, widened: Tensor, eps: Tensor) -> Tensor:
    """Return log ratio(x), (B,), from distances (B, k), spacings + f, (N,), and f/10; NaN becomes ∞."""
    ratio = (distances.mean(1) + eps) / widened[numbers].mean(1)
    return ratio.clamp_min(TINY).log().nan_to_num(nan=torch.inf, posinf=torch.inf)


class FittedModule(nn.Module):
    """A module whose state is its buffers; a file may give it buffers of other shapes, as long as they fit each other."""

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that the module's own buffers must have, by name, given what they hold."""
        return {}

    def fill_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        """Put tensors in the place of the buffers; a ValueError names the first that does not fit."""
        modules, names = dict(self.named_modules()), set(self.state_dict())
        for name in names ^ tensors.keys():
            raise ValueError(name)
        for name, tensor in tensors.items():
            owner, _, leaf = name.rpartition(".")
            setattr(modules[owner], leaf, tensor)
        for prefix, module in modules.items():
            if isinstance(module, FittedModule):
                for leaf, shape in module.buffer_shapes().items():
                    if tuple(getattr(module, leaf).shape) != shape:
                        raise ValueError(f"{prefix}.{leaf}")
                module.prepare()

    def prepare(self) -> None:
        """Compute what calls need of the buffers, once these are filled."""

    def config(self) -> dict[str, Any]:
        """Return plain values that `from_config` needs beside the buffers."""
        return {}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Build the module with empty buffers, which are then filled."""
        return cls(**config)


class ZScore(FittedModule):
    """Standard deviations above the in-distribution mean, −1 at least; a constant term counts 0.

    Far from the data a classifier may be sure of itself in every draw: that is no reason to trust it, and must not outweigh
    the distance.
    """

    mean: Tensor
    std: Tensor
    constant: bool

    def __init__(self, mean: Tensor | None = None, std: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(0.0, device="cpu") if mean is None else mean)
        self.register_buffer("std", torch.tensor(1.0, device="cpu") if std is None else std)
        self.prepare()

    def prepare(self) -> None:
        """Note whether the values did not vary."""
        self.constant = bool(self.std < 1e-6 * (1 + self.mean.abs()))

    @classmethod
    def fit(cls, values: Tensor) -> Self:
        """Take mean and standard deviation of the finite ones among these values, (N,)."""
        finite = values[values.isfinite()]
        if len(finite) < 2:
            finite = values.new_zeros(2)
        return cls(finite.mean(), finite.std(correction=0))

    @classmethod
    def fit_ratios(cls, values: Tensor) -> Self:
        """Take those of log ratios, (N,); of copies, which are all equal, the standard deviation is 1: far rows still count."""
        scale = cls.fit(values)
        return scale if bool(scale.std > LEAST_STD) else cls(scale.mean, torch.ones_like(scale.std))

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return one number each."""
        return {"mean": (), "std": ()}

    def forward(self, values: Tensor) -> Tensor:
        """(B,) -> (B,)."""
        if self.constant:
            return torch.where(values.isfinite(), 0.0, values)
        return ((values - self.mean) / self.std).clamp_min(-1.0)


class KNNDistance(FittedModule):
    """The z-score of log ratio(x) among in-distribution rows (N, D), kept around `centre` (D,) in units of `unit` (D,).

    `spacings` (N,) are the mean distances of every row to its nearest, `zscore` is the scale of the rows' own log ratios.
    `single`: the nearest of all rows counts, and all rows as equally far apart, so that its plain distance remains.
    """

    rows: Tensor
    centre: Tensor
    unit: Tensor
    spacings: Tensor
    padded: Tensor  # rows around their mean, as many in each part
    lengthened: Tensor  # (D + 1, N), −2 rows above their squared lengths, infinite for padding: one product gives all distances
    offset: Tensor  # what inputs are moved by before they are divided by `unit`
    widened: Tensor  # spacings + f
    eps: Tensor  # f/10
    copied: Tensor  # distances up to this one are those of copies
    parts: int  # how many there are

    def __init__(self, *tensors: Tensor, single: bool = False) -> None:
        super().__init__()
        for name, tensor in zip_longest(("rows", "centre", "unit", "spacings"), tensors):
            self.register_buffer(name, torch.empty(0, device="cpu") if tensor is None else tensor)
        for name in ("padded", "lengthened", "offset", "widened", "eps", "copied"):
            self.register_buffer(name, torch.empty(0, device="cpu"), persistent=False)
        self.zscore, self.single = ZScore(), single
        self.prepare()

    @classmethod
    def fit(cls, rows: Tensor, *, standardized: bool, single: bool = False) -> Self | None:
        """Fit the finite ones of these rows (N, D); None if they are too few or all the same.

        `standardized`: divide columns by their standard deviation, unless that is 0.
        """
        finite = rows[rows.isfinite().all(1)].double()
        if len(finite) < LEAST_ROWS or torch.equal(finite, finite[:1].expand_as(finite)):
            return None
        centre, unit = finite.mean(0), torch.ones_like(finite[0])
        if standardized:  # the mean of equal numbers is not always that number, so the standard deviation does not tell
            unit = torch.where(finite.amax(0) > finite.amin(0), finite.std(0, correction=0), unit)
        # half precision was enough for the model, not for what is computed here
        scaled = ((finite - centre) / unit).to(torch.promote_types(rows.dtype, torch.float32))
        space = cls(scaled, centre, unit, torch.ones(len(scaled), dtype=torch.float64, device=rows.device), single=single)
        distances, numbers = space.find_nearest(finite, torch.arange(len(scaled), device=scaled.device))
        spacings = distances.mean(1)
        space.spacings = spacings.mean().expand(len(spacings)).contiguous() if single else spacings
        space.prepare()
        space.zscore = ZScore.fit_ratios(log_ratio(distances, numbers, space.widened, space.eps))
        return space

    def prepare(self) -> None:
        """Compute what every call needs of the rows."""
        self.parts = 1 if self.single else max(1, min(PARTS, len(self.rows) // 8))
        if self.rows.ndim == 2 and self.rows.numel():
            middle = self.rows.double().mean(0)
            rows = (self.rows.double() - middle).to(self.rows.dtype)
            more = -len(rows) % (self.parts * (RUNS if len(rows) > 8 * RUNS * self.parts else 1))
            self.padded, self.offset = F.pad(rows, (0, 0, 0, more)), self.centre + middle * self.unit
            squares = rows.float().square().sum(1)
            size = squares.double().mean().sqrt()
            squares = F.pad(squares, (0, more), value=torch.inf)
            self.lengthened = torch.cat([-2 * self.padded.float(), squares.unsqueeze(1)], 1).mT.contiguous()
            spacing = torch.maximum(self.spacings.mean(), LEAST_SPACING * size)
            self.widened = F.pad((self.spacings + SHARE * spacing).clamp_min(TINY), (0, more), value=1.0)
            self.eps, self.copied = SHARE * SHARE * spacing, COPIES * size

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that belong to N rows of D numbers."""
        n, d = self.rows.shape if self.rows.ndim == 2 and self.rows.numel() else (-1, -1)
        return {"rows": (n, d), "centre": (d,), "unit": (d,), "spacings": (n,)}

    def config(self) -> dict[str, Any]:
        """Return whether the nearest row alone counts."""
        return {"single": True} if self.single else {}

    def forward(self, x: Tensor, itself: Tensor | None = None) -> Tensor:
        """Score rows, (B, D) -> (B,); `itself` (B,) are rows that each x is not compared with, −1 for none."""
        return self.zscore(self.log_ratio(x, itself))

    def log_ratio(self, x: Tensor, itself: Tensor | None = None) -> Tensor:
        """Return log ratio(x), (B, D) -> (B,)."""
        return log_ratio(*self.find_nearest(x, itself), self.widened, self.eps)

    def ties(self, x: Tensor) -> Tensor:
        """Tell which rows (B, D) have two neighbours in one part equally far up to rounding, (B,): either may count."""
        x, squares = self.scale(x).float(), self.lengthened[-1]
        gaps = (F.pad(x, (0, 1), value=1.0) @ self.lengthened).unflatten(1, (-1, self.parts))
        nearest, after = gaps.topk(2, dim=1, largest=False).values.unbind(1)
        highest = squares[squares.isfinite()].amax()
        return (after - nearest <= 1e-5 * (x.square().sum(1) + highest).unsqueeze(1)).any(1)

    def share_copied(self, x: Tensor) -> float:
        """Return the share of rows (B, D) that are kept rows, or of kept rows among them, whichever is more.

        Rows are equal if they are apart by less than a thousandth of the mean spacing. What copies among the kept rows explain
        is taken off: of more rows they explain more.
        """
        kept, near = self.rows.double() * self.unit + self.centre, self.spacings.mean() / 1000
        own, (distances, numbers) = self.find_nearest(kept, torch.arange(len(kept), device=x.device))[0], self.find_nearest(x)
        equal, copied = distances <= near, (own <= near).any(1).double().mean() * max(1.0, len(x) / len(kept))
        return float(max(equal.any(1).double().mean(), len(numbers[equal].unique()) / len(kept)) - copied)

    def scale(self, x: Tensor) -> Tensor:
        """Return rows in the units of those that are kept, around their mean."""
        return ((x.double() - self.offset) / self.unit).to(self.rows.dtype)

    def find_nearest(self, x: Tensor, itself: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Find the nearest row of every part: distances (B, parts) in float64, 0 to copies, and numbers (B, parts) of the rows.

        A matrix product in float32 finds them, around the rows' mean so that little cancels; their distances are then exact, for
        a difference of two numbers is rounded by its own size, not by theirs.
        """

        def find(x: Tensor, itself: Tensor | None) -> tuple[Tensor, Tensor]:
            # |x − row|² − |x|²; the rows of a part stand `parts` apart
            gaps = F.pad(x.float(), (0, 1), value=1.0) @ self.lengthened
            if itself is not None:
                known = (itself >= 0).nonzero().flatten()
                gaps[known, itself[known]] = torch.inf
            numbers = find_lowest(gaps, self.parts)
            distances = measure_lengths(self.padded[numbers] - x.unsqueeze(1))
            return torch.where(distances > self.copied, distances, 0.0), numbers

        x = self.scale(x)
        step = max(1, BLOCK_NUMBERS // max(len(self.rows), self.parts * self.rows.shape[1]))
        if torch.compiler.is_compiling() or len(x) <= step:  # a graph takes any number of rows at once
            return find(x, itself)
        cuts = [slice(start, start + step) for start in range(0, len(x), step)]
        parts = [find(x[cut], None if itself is None else itself[cut]) for cut in cuts]
        return torch.cat([distances for distances, _ in parts]), torch.cat([numbers for _, numbers in parts])


class Ellipsoid(FittedModule):
    """The z-score of log |W·(x − centre)|, with W the whitening of in-distribution rows (N, D)."""

    centre: Tensor
    whitening: Tensor
    offset: Tensor  # −W·centre

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in zip_longest(("centre", "whitening"), tensors):
            self.register_buffer(name, torch.empty(0, device="cpu") if tensor is None else tensor)
        self.register_buffer("offset", torch.empty(0, device="cpu"), persistent=False)
        self.zscore = ZScore()
        self.prepare()

    def prepare(self) -> None:
        """Compute what every call needs of the buffers."""
        if self.whitening.numel():
            self.offset = -(self.centre.to(self.whitening) @ self.whitening)

    @classmethod
    def fit(cls, rows: Tensor) -> Self | None:
        """Fit the finite ones of these rows (N, D); None if they are too few or all the same."""
        finite = rows[rows.isfinite().all(1)].double()
        if len(finite) < LEAST_ROWS or torch.equal(finite, finite[:1].expand_as(finite)):
            return None
        centre = finite.mean(0)
        space = cls(centre, find_whitening(finite - centre).to(torch.promote_types(rows.dtype, torch.float32)))
        space.zscore = ZScore.fit_ratios(space.log_ratio(finite))
        return space

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that belong to D numbers."""
        d = self.centre.numel() or -1
        return {"centre": (d,), "whitening": (d, d)}

    def forward(self, x: Tensor, itself: Tensor | None = None) -> Tensor:
        """Score rows, (B, D) -> (B,)."""
        return self.zscore(self.log_ratio(x))

    def log_ratio(self, x: Tensor, itself: Tensor | None = None) -> Tensor:
        """Return the log length of the whitened rows, (B, D) -> (B,)."""
        white = torch.addmm(self.offset, x.to(self.whitening), self.whitening)
        return measure_lengths(white).clamp_min(1e-15).log().nan_to_num(nan=torch.inf, posinf=torch.inf)


def find_whitening(rows: Tensor, flat: float = FLAT) -> Tensor:
    """Return V / max(s, flat · max s), (D, D), of rows (N, D) with second moment V·diag(s²)·Vᵀ, in float64."""
    values, vectors = torch.linalg.eigh(rows.mT @ rows / len(rows))
    sizes = values.clamp_min(0).sqrt()
    # as a file would give it back: products round otherwise where columns lie in one piece
    return (vectors / torch.maximum(sizes, flat * sizes.amax()).clamp_min(1e-30)).contiguous()


class TableEncoder(FittedModule):
    """Turn columns of a table into vectors whose distance counts numbers by how far apart they are, and words by being others.

    Two random rows are √2 apart in a number in units of its standard deviation, and so are two rows with different words:

        number      (x − mean) / standard deviation
        indicator   a column of two values, in units of their difference / √2; several next to each other of which every row has
                    exactly one (one-hot) in units of their difference, for another word changes two
        category    whole numbers of few values, taken apart into indicators
        missing     NaN stands at the mean, and 1 away from all that are not missing; on average √2 again

    What no row has, no word of a one-hot group or a missing value where none is missing, is surprising the more rows there are,
    and the less where words are often new: it costs √(N / (1 + rows with a word that no other row has)), by Good and Turing.

    `indicators` (D,) marks columns of two values; `numbers` (C,) are the columns of numbers that vary, if there are words beside
    them; `groups` (D + V, G) sums up the indicators of a group; `missing` (D,) are costs, or none, (0,), where NaN is not
    allowed; `categories` (2, V) are columns and values of the V indicators of whole numbers.
    """

    centre: Tensor
    unit: Tensor
    indicators: Tensor
    numbers: Tensor
    groups: Tensor
    missing: Tensor
    categories: Tensor

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        names = ("centre", "unit", "indicators", "numbers", "groups", "missing", "categories")
        for name, tensor in zip_longest(names, tensors):
            self.register_buffer(name, torch.empty(0, device="cpu") if tensor is None else tensor)

    @classmethod
    def fit(cls, rows: Tensor, codes: Tensor | None = None, *, allow_nan: bool = False) -> Self | None:
        """Fit rows (N, D) and the whole numbers (N, K) beside them; None if all columns are numbers that are never missing."""
        n, categories = len(rows), list_categories(codes)
        columns = _append_indicators(rows.double(), codes, categories)
        absent = columns.isnan()
        low, high = columns.where(~absent, torch.inf).amin(0), columns.where(~absent, -torch.inf).amax(0)
        varies, ones = low < high, columns == high
        indicators = varies & (ones | (columns == low) | absent).all(0)
        if not allow_nan and not bool(indicators.any()):
            return None
        centre = columns.nanmean(0).nan_to_num(0.0)
        filled = columns.where(~absent, centre)
        unit = torch.where(varies, ((filled - centre).square().sum(0) / (~absent).sum(0).clamp_min(1)).sqrt(), 1.0)
        unit = torch.where(indicators, (high - low) / 2**0.5, unit)
        words = indicators.nonzero().flatten()
        members = [words[group] for group in find_groups(ones[:, words])]
        marks = torch.cat([ones[:, torch.cat([words[:0], *members])], absent], 1)
        unseen = (n / (1 + int(marks[:, marks.sum(0) == 1].any(1).sum()))) ** 0.5
        groups = columns.new_zeros(columns.shape[1], len(members))
        for place, group in enumerate(members):
            unit[group] *= 2**0.5
            groups[group, place] = unseen
        some = absent.any(0) & ~absent.all(0)
        missing = torch.where(some, 1.0, unseen)[: rows.shape[1] if allow_nan else 0].double()
        numbers = (varies & ~indicators).nonzero().flatten() if len(words) else words
        return cls(centre, unit, indicators[: rows.shape[1]], numbers, groups, missing, categories)

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that belong to D columns, V indicators of whole numbers and G groups."""
        d, v = self.indicators.numel(), self.categories.shape[-1] if self.categories.ndim == 2 else -1
        groups = self.groups.shape[-1] if self.groups.ndim else -1
        missing = d if self.missing.numel() else 0
        width = {"centre": (d + v,), "unit": (d + v,), "indicators": (d,), "groups": (d + v, groups)}
        return {**width, "numbers": (self.numbers.numel(),), "missing": (missing,), "categories": (2, v)}

    def forward(self, rows: Tensor, codes: Tensor | None = None) -> Tensor:
        """Encode rows (B, D) and the whole numbers (B, K) beside them, as (B, D + V + G), and D more where NaN is allowed."""
        columns = _append_indicators(rows.double(), codes, self.categories)
        if self.missing.numel():
            columns = torch.where(columns.isnan(), self.centre, columns)
        scaled = (columns - self.centre) / self.unit
        parts = [scaled, scaled @ self.groups] if self.groups.numel() else [scaled]
        if self.missing.numel():
            parts.append(rows.isnan() * self.missing)
        return torch.cat(parts, 1).to(torch.promote_types(rows.dtype, torch.float32))

    def kinds(self) -> dict[str, list[int]]:
        """Number the columns that are no plain numbers: "indicators", "missing" (in some rows), and "categories" among codes."""
        marks = {"indicators": self.indicators, "missing": self.missing == 1.0}
        columns = {kind: where.nonzero().flatten().tolist() for kind, where in marks.items()}
        return columns | {"categories": self.categories[0].unique().tolist()}


def list_categories(codes: Tensor | None) -> Tensor:
    """List columns and values (2, V) of whole numbers (N, K), column by column, of those with few values."""
    if codes is None:
        return torch.empty(2, 0, dtype=torch.long, device="cpu")
    most = max(FEW_WORDS, len(codes) ** 0.5)
    values = [(k, column.unique()) for k, column in enumerate(codes.unbind(1))]
    pairs = [torch.stack([torch.full_like(words, k), words]) for k, words in values if len(words) <= most]
    return torch.cat([codes.new_empty(2, 0), *pairs], 1)


def _append_indicators(rows: Tensor, codes: Tensor | None, categories: Tensor) -> Tensor:
    """Append the indicators of the categories (2, V) among whole numbers (N, K) to rows: (N, D + V)."""
    if codes is None or not categories.numel():
        return rows
    return torch.cat([rows, (codes[:, categories[0]] == categories[1]).to(rows)], 1)


def find_groups(ones: Tensor) -> list[Tensor]:
    """Find runs of columns (N, C) of which every row has exactly one, bool: the numbers of their columns.

    >>> find_groups(torch.eye(3, dtype=torch.bool)[[0, 1, 2, 1]])
    [tensor([0, 1, 2])]
    """
    counts = torch.cat([ones.new_zeros(1, dtype=torch.long), ones.sum(0).cumsum(0)])
    stops = torch.searchsorted(counts, counts + len(ones)).tolist()
    groups, start = list[Tensor](), 0
    while start < ones.shape[1]:
        stop = stops[start]
        whole = stop < len(counts) and stop > start + 1 and bool((ones[:, start:stop].sum(1) == 1).all())
        if whole:
            groups.append(torch.arange(start, stop, device=ones.device))
        start = stop if whole else start + 1
    return groups
