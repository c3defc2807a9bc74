"""The files around the code agree with it."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml

import offmap

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_version_is_the_same_everywhere() -> None:
    cited = yaml.safe_load(text("CITATION.cff"))
    experiments = tomllib.loads(text("bench/pyproject.toml"))
    assert cited["version"] == PROJECT["project"]["version"] == experiments["project"]["version"] == offmap.__version__
    assert f"## {offmap.__version__}" in text("CHANGELOG.md")


def test_the_newest_version_begins_with_release_notes() -> None:
    newest = re.split(r"^## ", text("CHANGELOG.md"), flags=re.MULTILINE)[1]
    version, _, body = newest.partition("\n")
    assert version.startswith(offmap.__version__)
    assert body.strip().startswith(f"<!-- --8<-- [start:notes] -->\n### Release notes {offmap.__version__}\n\n**New**\n")
    assert body.index("**What to change**") < body.index("[end:notes]") < body.index("### Details")


def test_the_licence_is_the_same_everywhere() -> None:
    assert PROJECT["project"]["license"] == yaml.safe_load(text("CITATION.cff"))["license"] == "MIT"
    assert text("LICENSE").startswith("MIT License")


def test_the_paper_is_cited_alike() -> None:
    paper = yaml.safe_load(text("CITATION.cff"))["preferred-citation"]
    page = text("docs/citation.md")
    assert paper["title"] in page
    assert paper["url"] in page
    for number in (f"volume  = {{{paper['volume']}}}", f"number  = {{{paper['issue']}}}", f"{paper['start']}--{paper['end']}"):
        assert number in page


def test_types_are_told_to_type_checkers() -> None:
    assert (ROOT / "src" / "offmap" / "py.typed").exists()
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["src/offmap"]


def test_hooks_before_a_commit_are_local() -> None:
    repositories = yaml.safe_load(text(".pre-commit-config.yaml"))["repos"]
    assert [each["repo"] for each in repositories] == ["local"]
    assert {hook["entry"].split()[0] for hook in repositories[0]["hooks"]} == {".venv/bin/ruff", ".venv/bin/lint-imports"}


@pytest.mark.parametrize("kind", ["bug", "feature", "question"])
def test_an_issue_asks_for_what_an_answer_needs(kind: str) -> None:
    form = yaml.safe_load(text(f".github/ISSUE_TEMPLATE/{kind}.yml"))
    assert {"name", "description", "body"} <= set(form)
    fields = {field["id"]: field for field in form["body"] if "id" in field}
    assert any(field.get("validations", {}).get("required") for field in fields.values())
    assert kind != "bug" or {"happened", "code", "doctor"} <= set(fields)


def test_a_pull_request_is_asked_for_tests_and_words() -> None:
    assert {"make test", "CHANGELOG.md"} <= set(re.findall(r"make test|CHANGELOG\.md", text(".github/PULL_REQUEST_TEMPLATE.md")))


def test_the_security_policy_names_the_version_that_gets_fixes() -> None:
    newest = ".".join(offmap.__version__.split(".")[:2])
    assert f"| {newest} | yes |" in text("SECURITY.md")
    assert "in private" in text("SECURITY.md")


def test_contributing_fits_on_a_page() -> None:
    assert len(text("CONTRIBUTING.md").splitlines()) <= 60


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings: words in small letters, with hyphens, or what stands in braces behind."""
    headings = re.findall(r"^#+ (.*?)(?: \{ #([\w-]+) \})?$", page, flags=re.MULTILINE)
    return {named or re.sub(r"[^\w\s-]", "", words).strip().lower().replace(" ", "-") for words, named in headings}


def test_anchors_are_those_of_headings() -> None:
    assert anchors("# One\n\nNo # heading\n\n## What `a` guard, can see?\n\n### Three { #third }") == {
        "one", "what-a-guard-can-see", "third",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_and_targets_that_are_named_exist(name: str) -> None:
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?", text(name)):
        assert (ROOT / target).exists(), f"{name} links to {target}"
        assert not anchor or anchor in anchors(text(target or name)), f"{name} links to {target}#{anchor}"
    rules = set(re.findall(r"^([a-z]+):", text("Makefile"), flags=re.MULTILINE)) | {"unit", "slow"}
    for rule in re.findall(r"`make ([a-z]+)", text(name)):
        assert rule in rules, f"{name} names `make {rule}`"


def test_no_folder_of_tests_or_code_is_passed_over(pytestconfig: pytest.Config) -> None:
    """Pytest leaves folders out by their name, without a word."""
    files = [path for folder in ("src", "tests", "bench") for path in (ROOT / folder).rglob("*.py")]
    folders = {name for path in files for name in path.relative_to(ROOT).parts[:-1]}
    assert {"distributed", "model", "offmap", "offmap_bench"} <= folders
    assert [name for name in folders if any(fnmatch(name, left) for left in pytestconfig.getini("norecursedirs"))] == []


def test_the_design_page_names_every_folder_and_file() -> None:
    spec = spec_from_file_location("tree", ROOT / "docs" / "tree.py")
    assert spec is not None
    assert spec.loader is not None
    tree = module_from_spec(spec)
    spec.loader.exec_module(tree)
    assert tree.PAGE.read_text(encoding="utf-8") == tree.page(), "run `python docs/tree.py`"


@pytest.mark.parametrize("name", offmap.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(offmap, name) is not None
    assert name in dir(offmap)
