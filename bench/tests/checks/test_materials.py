"""The bill of materials is whole, and the audit notices what it says it looks at."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest

from checks.materials import ROOT, audit, bill, find_changes, find_packages, licence, pins


@pytest.fixture(scope="module")
def packages() -> dict[str, Distribution]:
    return find_packages()


def make_package(folder: Path, version: str = "1.0", about: str = "License-Expression: MIT\n") -> Distribution:
    """A package of one file, as installers leave it."""
    inside = folder / "small-1.dist-info"
    inside.mkdir()
    (folder / "small.py").write_bytes(b"x = 1\n")
    sum_ = base64.urlsafe_b64encode(hashlib.sha256(b"x = 1\n").digest()).rstrip(b"=").decode()
    (inside / "RECORD").write_text(f"small.py,sha256={sum_},6\nsmall-1.dist-info/RECORD,,\n", encoding="utf-8")
    (inside / "METADATA").write_text(f"Metadata-Version: 2.4\nName: small\nVersion: {version}\n{about}", encoding="utf-8")
    return PathDistribution(inside)


def test_the_bill_names_every_package_with_its_version(packages: dict[str, Distribution]) -> None:
    fields = bill(packages)
    assert (fields["bomFormat"], fields["specVersion"], fields["metadata"]["component"]["name"]) == ("CycloneDX", "1.5", "offmap")
    assert {"torch", "numpy", "safetensors", "rich", "typer", "scikit-learn", "pyarrow"} <= {
        c["name"] for c in fields["components"]
    }
    assert all(re.fullmatch(r"pkg:pypi/[a-z0-9-]+@\S+", c["purl"]) for c in fields["components"])
    assert all(re.fullmatch("[0-9a-f]{64}", c["hashes"][0]["content"]) for c in fields["components"])


def test_what_the_bill_refers_to_is_there_once(packages: dict[str, Distribution]) -> None:
    fields = bill(packages)
    refs = [fields["metadata"]["component"]["bom-ref"], *(c["bom-ref"] for c in fields["components"])]
    assert len(refs) == len(set(refs)) == len(fields["dependencies"])
    graph = {each["ref"]: each["dependsOn"] for each in fields["dependencies"]}
    assert {ref for needed in graph.values() for ref in needed} <= set(refs)
    assert any(ref.startswith("pkg:pypi/torch@") for ref in graph[refs[0]])


def test_equal_packages_have_equal_bills(packages: dict[str, Distribution]) -> None:
    assert bill(packages) == bill(dict(packages))
    fewer = {name: package for name, package in packages.items() if name != "rich"}
    assert bill(fewer)["serialNumber"] != bill(packages)["serialNumber"]


def test_what_users_install_is_pinned(packages: dict[str, Distribution]) -> None:
    pinned = pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    assert [name for name in packages if name not in pinned and name != "offmap"] == []


def test_a_package_as_it_was_installed_passes(tmp_path: Path) -> None:
    package = make_package(tmp_path)
    assert licence(package) == "MIT"
    assert audit({"small": package}, {"small": "1.0"}) == []


def test_a_file_that_was_changed_or_removed_is_named(tmp_path: Path) -> None:
    package = make_package(tmp_path)
    (tmp_path / "small.py").write_bytes(b"x = 2\n")
    assert find_changes(package) == ["small.py"]
    assert audit({"small": package}, {"small": "1.0"}) == ["small 1.0: small.py is not the file that was installed"]
    (tmp_path / "small.py").unlink()
    assert find_changes(package) == ["small.py"]


@pytest.mark.parametrize(
    ("version", "about", "pinned", "wrong"),
    [
        ("2.0", "License-Expression: MIT\n", {"small": "1.0"}, "small is 2.0, but constraints.txt has 1.0"),
        ("1.0", "License-Expression: MIT\n", {}, "small 1.0 is not in constraints.txt"),
        ("1.0rc1", "License-Expression: MIT\n", {"small": "1.0rc1"}, "small 1.0rc1 is a pre-release"),
        ("1.0", "", {"small": "1.0"}, "small 1.0 names no licence"),
    ],
)
def test_other_versions_pre_releases_and_lacking_licences_are_reported(
    tmp_path: Path, version: str, about: str, pinned: dict[str, str], wrong: str
) -> None:
    assert audit({"small": make_package(tmp_path, version, about)}, pinned) == [wrong]
