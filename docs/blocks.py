"""`python docs/blocks.py` fills in the numbers that pages quote from other pages, as `templates/blocks.toml` declares them.

A page marks a place with `<!-- name -->` and `<!-- /name -->`. What stands between comes from tables of pages in
`docs/results/`, which come from committed records.
"""

from __future__ import annotations

import json
import re
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from offmap_bench.paths import DOCS, RECORDS, RESULTS, ROOT
from offmap_bench.runner.shift_table import KINDS, ShiftResults, kind_of
from offmap_bench.runner.table import Results, format_table, methods_markdown, percent, spread
from offmap_bench.studies.study import TEMPLATES

Table = dict[str, dict[str, str]]
"""{row: {column: cell}}; rows by their first cell, without stars."""

SPECS: dict[str, dict[str, Any]] = tomllib.loads((TEMPLATES / "blocks.toml").read_text(encoding="utf-8"))
PROMISES: list[dict[str, Any]] = tomllib.loads((TEMPLATES / "promises.toml").read_text(encoding="utf-8"))["promise"]
BLOCKS = (*SPECS, "promises", "methods")
MODES = ("extrapolation", "interpolation")
UCI = {"score": ["uci", f"Detection, {MODES[0]}", "score"]}
UCI |= {f"{measure}, {mode}": ["uci", f"Detection, {mode}", measure] for measure in ("AUROC", "FPR@95") for mode in MODES}


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]


def write() -> None:
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if (new := fill_blocks(text, path)) != text:
            path.write_text(new, encoding="utf-8")
            print(f"changed: {path.relative_to(ROOT)}")


def fill_blocks(text: str, path: Path) -> str:
    """Return the text of a page with its blocks filled. Links are written as in `docs`, and adapted elsewhere."""
    for name in BLOCKS:
        pattern = re.compile(rf"<!-- {name} -->.*?<!-- /{name} -->", re.DOTALL)
        if pattern.search(text):
            block = render(name)
            if path.parent != DOCS:
                block = re.sub(r"\]\((?=[\w/-]+\.md)", "](docs/", block)
            if path.name == "CHANGELOG.md":  # shown in two places, so without links
                block = re.sub(r"\[([^]]*)\]\(docs/([\w/-]+\.md)[^)]*\)", r"\1 (`docs/\2`)", block)
            text = pattern.sub(lambda _, b=block, n=name: f"<!-- {n} -->\n{b}\n<!-- /{n} -->", text)
    return text


def render(name: str) -> str:
    """Fill one block: paragraphs are wrapped, tables stay as they are."""
    if name in ("promises", "methods"):
        return render_promises() if name == "promises" else methods_markdown()
    spec = SPECS[name]
    fields = {key: cell(*source) for key, source in spec.get("cells", {}).items()}
    fields |= {key: quote_table(table) for key, table in spec.get("tables", {}).items()}
    fields |= summarize_shifts(read_shifts(), spec["shifts"]) if "shifts" in spec else {}
    parts = [part.format(**fields) for part in spec["text"].strip().split("\n\n")]
    indents = ["  " if part.startswith("- ") else "" for part in parts]
    wrapped = [textwrap.fill(" ".join(p.split()), 128, subsequent_indent=i) for p, i in zip(parts, indents, strict=True)]
    shown = [part if part.startswith("|") else text for part, text in zip(parts, wrapped, strict=True)]
    return ("\n" if indents[0] else "\n\n").join(shown)


@cache
def read_shifts() -> Results:
    return Results.read("shifts")


def summarize_shifts(results: Results, names: Mapping[str, str]) -> dict[str, str]:
    """Return what short pages quote: two small tables of the default beside the baseline that does best, and counts.

    `first` has the first task of each kind, UCI aside; `worst` the three tasks on which the default is furthest behind.

    Args:
        names: What to call tasks.
    """
    numbers = ShiftResults(results)
    best = {task: max(each.items(), key=lambda pair: pair[1]) for task, each in numbers.baselines.items() if each}
    lead = {task: numbers.aurocs[numbers.default, task] - best[task][1] for task in best}
    ahead = sum(value > 0 for value in lead.values())
    firsts = {kind_of(task): task for task in reversed(best) if task.partition("/")[0] in KINDS.values()}

    def tabulate(tasks: Iterable[str]) -> str:
        rows: list[list[str]] = []
        for task, label in ((task, best[task][0]) for task in tasks):
            both = (spread(numbers.by_seed[each, task], percent) for each in (numbers.default, label))
            rows.append([names.get(task, task), *both, label])
        return format_table(["task", "offmap", "best baseline", "which"], rows)

    return {
        "first": tabulate(task for task in best if task in firsts.values()),
        "worst": tabulate(sorted(best, key=lambda task: lead[task])[:3]),
        "seeds": str(len(results.plan.seeds)),
        "baselines": str(sum(entry.name != "shift_guard" for entry in results.plan.entries)),
        "tasks": str(len(best)),
        "ahead": str(ahead),
        "behind": str(len(best) - ahead),
    }


def cell(page: str, heading: str, row: str, column: str, first: str = "", spread: str = "") -> str:
    """One cell, without its standard deviation unless `spread`: "96.6 ± 0.3" -> "96.6"."""
    value = read_table(page, heading, first=first or None)[row][column]
    return value if spread else value.partition(" ± ")[0]


def quote_table(spec: dict[str, Any]) -> str:
    """Copy a table or some of its rows, or join the four columns of UCI."""
    if "copy" in spec:
        table = read_table(*spec["copy"])
        return format_table(list(next(iter(table.values()))), [list(table[row].values()) for row in spec.get("rows", table)])
    columns = {name: (read_table(page, heading), there) for name, (page, heading, there) in UCI.items()}
    rows = [[here, *(table[there][column] for table, column in columns.values())] for there, here in spec["rows"].items()]
    return format_table(["", *columns], rows)


def read_table(page: str, heading: str = "", *, first: str | None = None) -> Table:
    """Read the first table below a heading of a page in `docs/results`, or the first whose corner says `first`."""
    text = (RESULTS / f"{page}.md").read_text(encoding="utf-8")
    if heading:
        text = re.split(rf"^#+ {re.escape(heading)}$", text, maxsplit=1, flags=re.MULTILINE)[1]
        text = re.split(r"^#+ ", text, maxsplit=1, flags=re.MULTILINE)[0]
    for lines in re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE):
        head, _, *rows = ([part.strip() for part in line.strip().strip("|").split("|")] for line in lines.splitlines())
        if first is None or head[0] == first:
            return {re.sub(r"\\\*|^\*+|\*+$", "", row[0]): dict(zip(head, row, strict=True)) for row in rows}
    raise LookupError(f"docs/results/{page}.md has no table below {heading!r} that starts with {first!r}.")


def render_promises() -> str:
    """Promises of `templates/promises.toml`, with the last figures."""
    models = re.findall(r"^\| \w+ \| .* \| (?:vmap|loop) \|$", (RESULTS / "models.md").read_text("utf-8"), re.MULTILINE)
    records = [json.loads(line) for line in (RECORDS / "trust.jsonl").read_text("utf-8").splitlines()]
    lines = ["| promise | last measured |", "|---|---|"]
    for promise in PROMISES:
        trials = [entry for entry in records if entry["name"] in promise.get("trials", ())]
        done, failures = sum(entry["done"] for entry in trials), sum(len(entry["failures"]) for entry in trials)
        figures = [f"[{done:,} trials](results/trust.md), {failures} failures"] if done else []
        cells = {key: cell(*source) for key, source in promise.get("cells", {}).items()}
        figures += [promise["figure"].format(zoo=f"{len(models):,}", **cells)] if "figure" in promise else []
        lines.append(f"| **{promise['name']}.** {promise['sentence']} | {'<br>'.join(figures)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    write()
