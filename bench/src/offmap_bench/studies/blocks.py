"""Numbers that pages quote from other pages: `python -m offmap_bench.studies.blocks` writes them anew, and a test compares.

A page marks a place with `<!-- name -->` and `<!-- /name -->`. What stands between is made here from tables of the pages in
`docs/`, which are made from committed records by commands of their own.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

from offmap_bench.paths import DOCS, ROOT
from offmap_bench.studies.promises import page_table

DOCS = DOCS

Table = dict[str, dict[str, str]]
"""{row: {column: cell}}; rows by their first cell."""


def main() -> None:
    """Fill the blocks of every page."""
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if (made := filled(text, path)) != text:
            path.write_text(made, encoding="utf-8")
            print(f"changed: {path.relative_to(ROOT)}")


def pages() -> list[Path]:
    """Those that may quote."""
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]


def filled(text: str, path: Path) -> str:
    """The text of a page with its blocks as they should be. Links are written as they are in `docs`, and set right elsewhere."""
    for name, make in BLOCKS.items():
        pattern = re.compile(rf"<!-- {name} -->.*?<!-- /{name} -->", re.DOTALL)
        if pattern.search(text):
            made = make()
            if path.parent != DOCS:
                made = re.sub(r"\]\((?=[\w-]+\.md)", "](docs/", made)
            if path.name == "CHANGELOG.md":  # shown in two places, so without links
                made = re.sub(r"\[([^]]*)\]\(docs/([\w-]+\.md)[^)]*\)", r"\1 (`docs/\2`)", made)
            text = pattern.sub(lambda _, m=made, n=name: f"<!-- {n} -->\n{m}\n<!-- /{n} -->", text)
    return text


# ------------------------------------------------------------------------------------------------------- reading


def table(page: str, heading: str = "", *, first: str | None = None) -> Table:
    """The first table below a heading of a page in `docs`, or the first whose corner says `first`."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    if heading:
        text = re.split(rf"^#+ {re.escape(heading)}$", text, maxsplit=1, flags=re.MULTILINE)[1]
        text = re.split(r"^#+ ", text, maxsplit=1, flags=re.MULTILINE)[0]
    for lines in re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines.splitlines())
        if first is None or head[0] == first:
            return {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    raise LookupError(f"docs/{page}.md has no table below {heading!r} that starts with {first!r}.")


def mean(cell: str) -> str:
    """The number without its standard deviation: "96.6 ± 0.3" -> "96.6"."""
    return cell.partition(" ± ")[0]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table, numbers to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def joined(*parts: str) -> str:
    """Paragraphs, filled anew, and tables, as they are."""
    return "\n\n".join(part if part.startswith("|") else textwrap.fill(" ".join(part.split()), 128) for part in parts)


def uci(rows: dict[str, str], *, whole: bool = True) -> str:
    """AUROC and FPR@95 of some rows of the UCI page, {its name there: its name here}."""
    modes = [table("uci", f"Detection, {mode}") for mode in ("extrapolation", "interpolation")]
    header = ["", "AUROC, extrapolation", "AUROC, interpolation"] + ["FPR@95, extrapolation", "FPR@95, interpolation"] * whole
    body = [
        [name, *(mode[row][column] for column in ("AUROC", "FPR@95")[: 1 + whole] for mode in modes)]
        for row, name in rows.items()
    ]
    return markdown(header, body)


def option(*rows: str) -> str:
    """Some rows of the page about options."""
    found = table("options", "One option at a time")
    columns = [c for c in found["defaults"] if c != "option"]
    return markdown(["", *columns], [[row, *(found[row][c] for c in columns)] for row in rows])


# ------------------------------------------------------------------------------------------------------- blocks


def headline() -> str:
    """What the whole thing is worth, beside what it must be held against."""
    rows = {
        "Plain net": "plain net",
        "Deep ensemble ×5": "deep ensemble of 5",
        "MaxWEnt ×5, mixture variance": "offmap, 5 nets, the paper's score",
        "MaxWEnt ×1, default score": "**offmap, 1 net**",
        "MaxWEnt ×5, default score": "**offmap, 5 nets**",
        "Distance alone, inputs and layers": "offmap, distance alone",
        "Nearest row": "nearest training row, no net",
    }
    familiar = table("uci", "In-distribution data")
    ours, theirs = (mean(familiar[name]["RMSE"]) for name in ("MaxWEnt ×5, default score", "Deep ensemble ×5"))
    return joined(
        """Eight UCI regressions, each cut along its first principal component: the outer half is OOD (extrapolation), or
        the inner half (interpolation). Mean over the tables ± standard deviation over three seeds, per cent
        ([all methods and tables](uci.md)).""",
        uci(rows),
        f"""Predictions stay as good as they were: RMSE {ours} with a guard around five nets, {theirs} without. These tables were
        in sight, in part, when the default score was chosen ([how](choice.md)).""",
    )


def score() -> str:
    """Scores on UCI, and on tables that no benchmark has."""
    rows = {
        "MaxWEnt ×1, mixture variance": '`score="paper"`',
        "MaxWEnt ×1, variance of the means": '`score="epistemic"`',
        "Distance alone, inputs and layers": '`score="distance"`, five nets',
        "MaxWEnt ×1, default score": '`score="default"`',
        "Nearest row": "nearest row, no net",
    }
    found = table("choice")
    names = {"the paper's score": "paper", "u": "epistemic, in logarithms", "u + inputs + layers (the default)": "default",
             "nearest row": "nearest row, no net"}  # fmt: skip
    columns = ["refine, extrapolation", "refine, interpolation"]
    return joined(
        "One net, UCI tables, per cent ([UCI](uci.md)):",
        uci(rows),
        """Five nets, twelve tables that are in no benchmark of the paper, AUROC in per cent
        ([how the default was chosen](choice.md)):""",
        markdown(["", *columns], [[name, *(found[row][c] for c in columns)] for row, name in names.items()]),
    )


def images() -> str:
    """Image classifiers: ours beside some of the others."""
    columns = {
        "ResNet-20": ("images/cifar10/resnet20", "mean"),
        "ResNet-32": ("images/cifar10/resnet32", "mean"),
        "ResNet-56": ("images/cifar10/resnet56", "mean"),
        "MNIST": ("mnist, near and far", "mean"),
        "MNIST, open sets": ("mnist, open sets", "open set"),
        "CIFAR-10, open sets": ("cifar10, open sets", "open set"),
    }
    names = ("Entropy", "Energy", "KNN", "ODIN", "fDBD", "ViM", "ARPL", "Deep ensemble ×5", "offmap ×1", "offmap ×5")
    found = {head: (table("openood", heading), column) for head, (heading, column) in columns.items()}

    def cell(rows: Table, name: str, column: str) -> str:
        kept = {key.replace("\\*", "").strip("*"): row for key, row in rows.items()}
        return re.sub(r" \(.*", "", kept[name][column]) if name in kept else "–"

    body = [
        [f"**{name}**" if name.startswith("offmap") else name, *(cell(rows, name, column) for rows, column in found.values())]
        for name in names
    ]
    return joined(
        """AUROC in per cent, mean over near and far OOD images, or over test images of four classes that were not shown.
        ResNets on CIFAR-10 are given ones, others are trained here ([all methods, ranks, seeds and seconds](openood.md)).""",
        markdown(["", *columns], body),
    )


def members() -> str:
    """One net and five."""
    rows = {
        f"MaxWEnt ×{n}, {by}": f"{n} net{'s' * (n > 1)}, {by}"
        for by in ("variance of the means", "default score")
        for n in (1, 5)
    }
    familiar = table("uci", "In-distribution data")
    nll, rmse = (" to ".join(mean(familiar[f"MaxWEnt ×{n}, default score"][c]) for n in (1, 5)) for c in ("NLL", "RMSE"))
    return joined(uci(rows), f"On in-distribution data NLL goes from {nll}, RMSE from {rmse} ([UCI](uci.md)).")


def solver() -> str:
    """Closed form and refine: what they find, and what they take."""
    rows = {
        f"{name} ×{n}, {by}": f"{label}, {n} net{'s' * (n > 1)}, {by}"
        for by in ("variance of the means", "default score") for n in (1, 5)
        for name, label in (("Closed form", "`closed-form`"), ("MaxWEnt", "`refine`"))
    }  # fmt: skip
    size = "power, 4,089 + 216 rows"
    measured = table("speed", "A fit of five nets against the paper's settings")
    ways = ("closed form", "default solver", "paper's settings (extrapolated)")
    closed, refined, paper = (measured[f"{size}: {way}"]["best"] for way in ways)
    return joined(
        uci(rows),
        f"""For five nets on {size}, one thread, a fit takes {closed} (`closed-form`), {refined} (`refine`) and {paper}
        (`config="paper"`, extrapolated from 500 steps): [speed](speed.md).""",
    )


def basis() -> str:
    """SVD and identity."""
    step = table("speed", "An SVD step against a scaling step", first="claimed")["times the scaling step, one net"]["value"]
    return joined(
        option("defaults", "`basis='identity'`"),
        f"""([what the options do](options.md)) A gradient step in the SVD basis takes {step} times one without
        ([speed](speed.md)).""",
    )


def where() -> str:
    """All parameters, matrices, the last layer."""
    rows = option("defaults", "`params='matrices'`", "`params='last-layer'`")
    return joined(rows, "([what the options do](options.md))")


def draws() -> str:
    """More draws."""
    found = table("options", "How many draws")
    columns = [c for c in next(iter(found.values())) if c != "draws"]
    rows = markdown(["draws", *columns], [[n, *(found[n][c] for c in columns)] for n in found])
    return joined("AUROC, per cent ([what the options do](options.md)):", rows)


def clip() -> str:
    """Predictions with and without."""
    found = table("options", "What the clip does to predictions")
    return markdown(["clip", "NLL", "RMSE"], [[n, found[n]["NLL"], found[n]["RMSE"]] for n in found])


def laplace() -> str:
    """Kronecker-Laplace and ours."""
    found = table("laplace")
    rows = ("Kronecker-Laplace, marginal likelihood, linearised", "closed form, mean head", "refined, mean head")

    def three(column: str) -> str:
        first, second, third = (found[row][column] for row in rows)
        return f"{first}, {second} and {third}"

    return joined(
        f"""On the UCI tables, split 0, one net that predicts means, scored by the variance of the mean: Kronecker-Laplace by
        marginal likelihood, offmap's closed form and its default solver have an AUROC of {three("AUROC extrapolation")} in
        extrapolation,
        and of {three("AUROC interpolation")} in interpolation. Fits take {three("fit, s")} seconds, and scoring 1,000 rows
        {three("score, s")} ([the whole table](laplace.md))."""
    )


def maxwent() -> str:
    """The authors' package and ours."""
    times = table("speed", "Scoring 10,000 rows with 50 draws", first="claimed")
    best, usual = (times[f"times faster than the peer at its {which}"]["value"] for which in ("best", "default"))
    fits = table("speed", "Fitting on 4,000 rows")
    ways = ('offmap, solver="refine", 500 steps (the default)', "maxwent, 20,000 steps (extrapolated)")
    ours, theirs = (fits[way]["best"] for way in ways)
    return joined(
        f"""Scoring 10,000 rows with 50 draws of a 3 × 100 net, offmap is {best} times as fast as the package at its best batch
        size, and {usual} times as fast as at its default; a fit on 4,000 rows takes {ours} against {theirs} for 20,000 of its
        steps ([speed](speed.md))."""
    )


def numbers() -> str:
    """The changelog's headlines."""
    modes = [table("uci", f"Detection, {mode}") for mode in ("extrapolation", "interpolation")]
    names = ("MaxWEnt ×1, default score", "MaxWEnt ×5, default score", "MaxWEnt ×5, mixture variance", "Nearest row")
    one, five, paper, nearest = (" and ".join(mode[name]["AUROC"] for mode in modes) for name in names)
    digits = table("quality", "Handwritten digits")
    ours, baseline = (digits[name]["auroc digits 5–9"] for name in ("MaxWEnt-SVD ×5", "Nearest row"))

    def claimed(heading: str, what: str) -> str:
        return table("speed", heading, first="claimed")[what]["value"]

    scoring, fit = "Scoring 10,000 rows with 50 draws", "A fit of five nets against the paper's settings"
    quick, gemm = (claimed(scoring, what) for what in ("times faster than the peer at its best", "times the bare GEMM"))
    refined, closed = (claimed(fit, f"times faster than the paper's settings, {way}, sum") for way in ("default", "closed form"))
    memory = claimed("Memory while scoring", "MB more for 1,000,000 rows than for 10,000, streamed")
    points = [
        f"""AUROC on the UCI tables, extrapolation and interpolation, three seeds: one net {one}, five nets {five}, five nets with
        the paper's score {paper}, the nearest row {nearest}: [UCI](uci.md).""",
        f"""AUROC on digits 5–9 after 0–4, five seeds: five nets with the paper's score {ours}, the nearest row {baseline}:
        [Quality](quality.md).""",
        f"""Scoring is {quick} times as fast as the authors' package at its best, and takes {gemm} times the bare matrix products;
        a fit of five nets is {refined} times as fast as with the paper's settings (closed form: {closed}); a million rows take
        {memory} MB more than ten thousand: [Speed](speed.md).""",
    ]
    return "\n".join(textwrap.fill(" ".join(point.split()), 128, initial_indent="- ", subsequent_indent="  ") for point in points)


def promises() -> str:
    """Each promise, what holds it, and the last figures."""
    return page_table(table)


BLOCKS: dict[str, Callable[[], str]] = {
    "headline": headline, "images": images, "score": score, "members": members, "solver": solver, "basis": basis, "params": where,
    "draws": draws, "clip": clip, "laplace": laplace, "maxwent": maxwent, "numbers": numbers, "promises": promises,
}  # fmt: skip


if __name__ == "__main__":
    main()
