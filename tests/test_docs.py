"""The pages are true: their code runs and prints what it says, their numbers are those of the records, nothing is left out."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import offmap
from browsing import browser
from citycams import Brightness, to_tensor, write_copy
from doc_code import ROOT, is_printed, is_same_line, module, packages, skip_without
from offmap.scores.score import SCORES
from offmap.scores.terms import TERMS
from offmap_bench.runner.plan import read_plan

blocks = module("blocks")

PAGES = {str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}
PRINTED = re.compile(r"^It prints:\n\n```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
LANGUAGES = {"python", "toml", "text", "sh", "bash", "console", "json", ""}
VALUE = re.compile(r"^(\[|\(|\{|'|tensor\(|torch\.Size|True|False|-?\d)")


def fences(page: str, language: str) -> list[str]:
    found = FENCE.finditer(PAGES[page].read_text(encoding="utf-8"))
    return [match["body"] for match in found if match["language"].strip() == language]


# ------------------------------------------------------------------------------------------------------- code


def three_lines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the three lines of the front page take for granted."""
    torch.manual_seed(0)
    x = torch.randn(120, 2)
    net = nn.Linear(2, 1)
    return {"offmap": offmap, "net": net, "train": (x[:60], net(x[:60]).detach()), "valid": (x[60:], x[60:, :1]), "x": x[:3]}


def tables_and_cameras(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The files that the page about data reads."""
    rng = np.random.RandomState(0)
    for name, count in (("cars", 120), ("trucks", 30)):
        regions = rng.choice(["north", "south", "east", "west"], count)
        rows = [f"{rng.randint(1, 200)},{rng.rand():.3f},{region},{rng.randint(500, 40_000) + 0.5}" for region in regions]
        (folder / f"{name}.csv").write_text("\n".join(["power,wear,region,price", *rows]) + "\n", encoding="utf-8")
    write_copy(folder / "data" / "citycam")
    monkeypatch.setenv("OFFMAP_DATA", str(folder / "data"))
    return {"net": Brightness(), "transform": to_tensor}


def without_own_term(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The page registers a term, which is gone after the test."""
    for registry in (SCORES, TERMS):
        monkeypatch.setitem(registry, "ink", None)  # pyright: ignore[reportArgumentType]
        del registry["ink"]
    return {}


BEFORE: dict[str, Callable[[Path, pytest.MonkeyPatch], dict[str, Any]]] = {
    "docs/index.md": three_lines, "docs/data.md": tables_and_cameras,
    "docs/data-images.md": tables_and_cameras,
    "docs/score.md": without_own_term,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:The '.*_dataloader' does not have many workers")
@pytest.mark.parametrize("page", [page for page in PAGES if fences(page, "python")])
def test_the_code_of_a_page_runs_and_prints_what_it_says(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "\n".join(fences(page, "python"))
    skip_without(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OFFMAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    names = {"__name__": "__main__"} | BEFORE.get(page, lambda *_: {})(tmp_path, monkeypatch)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), torch.random.fork_rng(devices=[]):
        exec(compile(code, page, "exec"), names)
    lines = iter(printed.getvalue().splitlines())
    for claim in claims(code):
        assert claim in lines, f"{page} says {claim!r}, but it prints\n{printed.getvalue()}"
    for block in PRINTED.findall(PAGES[page].read_text(encoding="utf-8")):
        assert is_printed(block, printed.getvalue()), f"run `python docs/printed.py {page}`; it prints\n{printed.getvalue()}"
    pictures = module("pictures")
    for name in pictures.NAME.findall(PAGES[page].read_text(encoding="utf-8")):
        drawn = pictures.words(pictures.draw(name, names)["light"])
        shown = pictures.words((pictures.FOLDER / f"{name}-light.svg").read_text(encoding="utf-8"))
        assert all(is_same_line(*pair) for pair in zip(shown, drawn, strict=True)), f"run `python docs/printed.py {page}`"
    for name in re.findall(r"guard\.save\(\"(.*)\"\)", code):
        assert (tmp_path / name).exists()


def test_the_packages_of_code_are_found() -> None:
    assert packages("import os, torch.nn\nfrom sklearn.datasets import load_wine\nimport offmap") == {"torch", "sklearn"}


@pytest.mark.parametrize("code", ["folder = os.environ['OFFMAP_DATA']\nfolder / \"no/such.npz\"", "import no_such_package"])
def test_code_without_its_data_or_packages_is_skipped(code: str) -> None:
    with pytest.raises(pytest.skip.Exception, match="needs no.such"):
        skip_without(code)


def claims(code: str) -> list[str]:
    """What comments after a print say that it prints, where they look like a value."""
    said = re.findall(r"^ *print\(.*\)  # (.*)$", code, flags=re.MULTILINE)
    return [each for each in said if VALUE.match(each)]


def test_what_is_printed_may_differ_by_rounding_only() -> None:
    block = "shift   AUROC  flagged\nbeyond  74.0   31 %\n  an example: 1\nwith +0.68, last-layer 99.9\n"
    assert is_printed(block, f"before\n{block}after\n")
    assert is_printed(block, "shift AUROC flagged\nbeyond 75.0 30 %\n  another\nwith +0.70, last-layer 100.0\n")
    assert not is_printed(block, "shift AUROC flagged\nbeyond 77.0 30 %\nwith +0.70, last-layer 100.0\n")
    assert not is_printed(block, "shift AUROC flagged\nbeyond 74.0 31 %\nwith +0.78, last-layer 99.9\n")
    assert not is_printed(block, "shift AUROC flagged\nbetween 74.0 31 %\nwith +0.68, last-layer 99.9\n")


def test_claims_are_values_and_not_remarks() -> None:
    code = "print(a)  # tensor([1])\nprint(b)  # a remark\n    print(c)  # True False\nx = 1  # 2\nprint(d)  # -3.5\n"
    assert claims(code) == ["tensor([1])", "True False", "-3.5"]


@pytest.mark.parametrize("page", PAGES)
def test_a_block_is_of_a_language_that_is_checked_or_plain(page: str) -> None:
    found = {match["language"].strip() for match in FENCE.finditer(PAGES[page].read_text(encoding="utf-8"))}
    assert found <= LANGUAGES, f"{found - LANGUAGES}: Python is checked as `python`, what cannot run is `text`"
    for body in fences(page, "text"):
        assert not body.startswith(("import ", "from ")), "Python that could run is marked `python`"


@pytest.mark.parametrize("page", [page for page in PAGES if fences(page, "toml")])
def test_a_plan_on_a_page_can_be_read(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for body in fences(page, "python"):
        if named := re.match(r"# (\w+\.py)", body):
            (tmp_path / named[1]).write_text(body, encoding="utf-8")
    for body in fences(page, "toml"):
        (tmp_path / "plan.toml").write_text(body, encoding="utf-8")
        assert read_plan(tmp_path / "plan.toml").name


# ------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("path", blocks.pages(), ids=lambda path: path.name)
def test_quoted_numbers_are_those_of_the_pages_they_come_from(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert blocks.fill_blocks(text, path) == text, "run `python -m offmap_bench.studies pages`"


def test_every_block_is_quoted_somewhere() -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in blocks.pages())
    assert [name for name in blocks.BLOCKS if f"<!-- {name} -->\n" not in texts] == []


def test_a_block_is_filled_with_links_that_fit_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCKS", ("one",))
    monkeypatch.setattr(blocks, "render", lambda name: "1.5 ([UCI](uci.md))")
    text = "a\n<!-- one -->\nold\n<!-- /one -->\nb"
    shown = {name: blocks.fill_blocks(text, path).splitlines()[2] for name, path in (
        ("docs", blocks.DOCS / "a.md"), ("root", ROOT / "README.md"), ("changelog", ROOT / "CHANGELOG.md"))}  # fmt: skip
    assert shown == {"docs": "1.5 ([UCI](uci.md))", "root": "1.5 ([UCI](docs/uci.md))", "changelog": "1.5 (UCI (`docs/uci.md`))"}


# ------------------------------------------------------------------------------------------------------- the site


def test_every_public_name_is_in_the_api() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    shown = re.findall(r"^::: offmap\.([\w.]+)$", text, flags=re.MULTILINE)
    assert sorted(shown) == sorted(set(shown))
    names = {path.rpartition(".")[2] for path in shown}
    assert [name for name in offmap.__all__ if name not in names and name != "__version__"] == []


def test_the_api_shows_functions_and_not_the_modules_of_their_name() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    shown = re.findall(r"^::: offmap\.(\w+)$", text, flags=re.MULTILINE)
    assert [name for name in shown if (ROOT / "src" / "offmap" / f"{name}.py").exists() and name != "errors"] == []


def test_docstrings_are_shown_with_their_doctests_as_code() -> None:
    pytest.importorskip("griffe", reason="needs griffe: pip install 'offmap[docs]'")
    to_markdown = module("docstrings").to_markdown
    assert to_markdown("Rows (B, *positions), a*b.") == "Rows (B, \\*positions), a*b."
    text = "Twice.\n\n>>> x = [\n...     1]\n>>> x\n[1]\n\nThe end."
    assert to_markdown(text) == "Twice.\n\n```pycon\n>>> x = [\n...     1]\n>>> x\n[1]\n```\n\nThe end."


def public_objects(page: str = "*") -> Iterator[Any]:
    """What pages of the API show, as griffe reads it, with every page's choice of members."""
    griffe = pytest.importorskip("griffe", reason="needs griffe: pip install 'offmap[docs]'")
    extensions = griffe.load_extensions(str(ROOT / "docs" / "docstrings.py"))
    package = griffe.load("offmap", extensions=extensions, search_paths=[str(ROOT / "src")], docstring_parser="google")
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "api").glob(f"{page}.md"))]
    for name, options in re.findall(r"^::: offmap\.([\w.]+)\n((?:    .*\n)*)", "\n".join(texts), re.MULTILINE):
        shown = package[name]
        while shown.is_alias:
            shown = shown.final_target
        yield shown
        chosen = re.search(r"members: \[(.*)\]", options)
        if shown.is_class and "members: false" not in options:
            names = chosen[1].split(", ") if chosen else [each for each in shown.members if not each.startswith("_")]
            yield from (shown.all_members[each] for each in names)


def test_every_parameter_of_the_api_is_explained() -> None:
    unknown: list[str] = []
    for shown in public_objects():
        documented = [each.docstring for each in (shown, shown.parent) if each.docstring]
        sections = shown.docstring.parsed if shown.docstring else []
        assert not any("Args:" in each.value for each in sections if each.kind.value == "text"), f"a list in {shown.path}"
        words = set(re.findall(r"\w+", " ".join(each.value for each in documented)))
        names = {each.name.lstrip("*") for each in shown.parameters} if shown.is_function else set()
        unknown += [f"{shown.path}({name})" for name in sorted(names - words - {"self", "cls"})]
    assert unknown == []


@pytest.mark.parametrize(
    ("html", "foreign"),
    [
        ('<script src="https://cdn.example/x.js"></script>', ["https://cdn.example/x.js"]),
        ("<img alt='a' src='//server.example/a.png'>", ["//server.example/a.png"]),
        ('<link rel="stylesheet" href="https://fonts.example/css">', ["https://fonts.example/css"]),
        ("<style>@import 'https://a.example/b.css'; p { background: url(//c.example/d.png) }</style>",
         ["https://a.example/b.css", "//c.example/d.png"]),
        ('<a href="https://example.org">a link</a><img src="own.svg"><link rel="canonical" href="https://example.org/">', []),
    ],
)  # fmt: skip
def test_a_page_that_loads_from_other_servers_is_found(html: str, foreign: list[str]) -> None:
    pytest.importorskip("mkdocs", reason="needs mkdocs: pip install 'offmap[docs]'")
    assert module("hooks").find_requests(html) == foreign


DOORS = ("Start", "Guides", "Understand", "Reference", "Results")
WORDS = 1500
"""The most that a page outside Results may have, code included."""


def navigation() -> dict[str, list[str]]:
    """The pages of every tab of the site."""
    nav = yaml.safe_load(re.sub(r"!!\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))["nav"]
    return {title: list(_leaves(entries)) for section in nav for title, entries in section.items()}


def _leaves(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    for each in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from _leaves(each)


def test_the_site_has_four_doors_and_results() -> None:
    assert tuple(navigation()) == DOORS


def test_the_navigation_holds_every_page_once() -> None:
    listed = [page for pages in navigation().values() for page in pages]
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    made = {f"examples/{path.stem}.md" for path in (ROOT / "examples").glob("*.py")} | {"cli-options.md"}
    assert sorted(listed) == sorted(written | made)


def test_results_are_a_folder_and_a_tab_of_their_own() -> None:
    for door, pages in navigation().items():
        assert {page.startswith("results/") for page in pages} == {door == "Results"}, door


@pytest.mark.parametrize("page", module("words").pages())
def test_a_page_is_short(page: str) -> None:
    assert len(module("words").read(PAGES[page], code=True).split()) <= WORDS, (
        "split it, cut it, or generate it into docs/results"
    )


@pytest.mark.parametrize("page", sorted(path.stem for path in (ROOT / "docs" / "api").glob("*.md")))
def test_a_page_of_the_api_is_short(page: str) -> None:
    assert sum(len(f"{shown.name} {shown.docstring.value}".split()) for shown in public_objects(page) if shown.docstring) <= WORDS


def test_few_sentences_are_long() -> None:
    words = module("words")
    texts = [words.read(path) for path in words.pages().values()]
    long, total = sum(len(words.long_sentences(text)) for text in texts), sum(len(list(words.sentences(text))) for text in texts)
    assert long <= total / 25, "run `python docs/words.py -v`"


def test_readme_fits_on_two_screens() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_words_and_long_sentences_are_counted() -> None:
    words = module("words")
    text = "# Not this\n\nOne sentence. With [a link](x.md#here)\non two lines.\n\n| no | table |\n\n- An item. offmap too."
    assert list(words.sentences(text)) == ["One sentence.", "With a link on two lines.", "An item.", "offmap too."]
    assert words.count_words(text) == 16
    assert words.long_sentences("word " * 30) == []
    assert len(words.long_sentences("word " * 31)) == 1


def test_search_works_on_pages_opened_from_a_disk(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs mkdocs: pip install 'offmap[docs]'")
    with browser() as running:
        build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
        subprocess.run(build, cwd=ROOT, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
        tab = running.new_page()
        foreign: list[str] = []
        tab.on("request", lambda request: None if request.url.startswith("file:") else foreign.append(request.url))
        tab.goto((tmp_path / "index.html").as_uri())
        tab.click("input.md-search__input")
        tab.keyboard.type("nonsense")
        tab.wait_for_selector(".md-search-result__item a[href*='nonsense.html']")
        assert foreign == []
