"""What offmap is made of: `python -m offmap_bench.checks.materials bill`, a software bill of materials, and `... audit`, a look at it.

The bill is CycloneDX 1.5 in JSON: every package that offmap and its extras bring, as installed here, with version, licence, the
SHA-256 of its list of files, and what it needs. The audit needs no connection. It looks whether each package has the version of
`constraints.txt`, is no pre-release, names a licence, and whether each of its files is the one that was installed. It does not
know of vulnerabilities: with a connection, install pip-audit, which is then asked as well.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from offmap_bench.paths import ROOT

BILL = ROOT / "build" / "sbom.json"
EXTRAS = ("demo", "images", "parquet", "detectors", "onnx", "serve", "ray")
"""What users install; tests and documentation bring more, which no user runs."""

Packages = Mapping[str, Distribution]


def installed(root: str = "offmap", extras: Iterable[str] = EXTRAS) -> dict[str, Distribution]:
    """A package and all that it needs, by name."""
    found: dict[str, Distribution] = {}
    queue: list[tuple[str, frozenset[str]]] = [(root, frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while queue:
        name, asked = queue.pop()
        if (canonicalize_name(name), asked) in seen:
            continue
        seen.add((canonicalize_name(name), asked))
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue  # an extra that is not installed here
        found[canonicalize_name(name)] = package
        queue += [(need.name, frozenset(need.extras)) for need in needs(package, asked)]
    return dict(sorted(found.items()))


def needs(package: Distribution, extras: Iterable[str] = ()) -> list[Requirement]:
    """What a package, with some extras, asks for on this machine."""
    if package.name == "offmap":  # what is written counts, not what was when it was installed
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
        return [Requirement(text) for texts in lists for text in texts]
    told = [Requirement(text) for text in package.requires or []]
    return [need for need in told if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in ("", *extras))]


def licence(package: Distribution) -> str:
    """The licence as the package tells it: an expression, a classifier or a line of text; empty if it tells none."""
    told = package.metadata
    classes = [line.rpartition(" :: ")[2] for line in told.get_all("Classifier") or [] if line.startswith("License :: OSI")]
    lines = (told.get("License") or "").strip().splitlines()
    return told.get("License-Expression") or " AND ".join(classes) or (lines[0][:80] if lines else "")


# ----------------------------------------------------------------------------------------------------------------- bill


def bill(packages: Packages, root: str = "offmap") -> dict[str, Any]:
    """The software bill of materials; equal packages give equal bills."""
    parts = [component(package) for name, package in packages.items() if name != root]
    refs = {name: reference(package) for name, package in packages.items()}
    graph = [
        {"ref": refs[name], "dependsOn": sorted({refs[key] for key in _names(package) if key in refs})}
        for name, package in packages.items()
    ]
    told: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": component(packages[root])},
        "components": parts,
        "dependencies": graph,
    }
    return {**told, "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(told, sort_keys=True))}"}


def _names(package: Distribution) -> set[str]:
    return {canonicalize_name(need.name) for need in needs(package, EXTRAS if package.name == "offmap" else ())}


def component(package: Distribution) -> dict[str, Any]:
    """One package."""
    told: dict[str, Any] = {
        "type": "library",
        "bom-ref": reference(package),
        "name": package.name,
        "version": package.version,
        "purl": reference(package),
        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256((package.read_text("RECORD") or "").encode()).hexdigest()}],
    }
    return told | ({"licenses": [{"license": {"name": licence(package)}}]} if licence(package) else {})


def reference(package: Distribution) -> str:
    """The address of a package, as package registries write it."""
    return f"pkg:pypi/{canonicalize_name(package.name)}@{package.version}"


# ---------------------------------------------------------------------------------------------------------------- audit


def pins(text: str) -> dict[str, str]:
    """Versions by name, as `constraints.txt` has them."""
    return {canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)}


def audit(packages: Packages, pinned: Mapping[str, str]) -> list[str]:
    """What is wrong, a line each."""
    wrong: list[str] = []
    for name, package in packages.items():
        if name == "offmap":
            continue
        version = Version(package.version)
        if name not in pinned:
            wrong.append(f"{name} {version} is not in constraints.txt")
        elif Version(pinned[name]).public != version.public:
            wrong.append(f"{name} is {version}, but constraints.txt has {pinned[name]}")
        if version.is_prerelease:
            wrong.append(f"{name} {version} is a pre-release")
        if not licence(package):
            wrong.append(f"{name} {version} names no licence")
        wrong += [f"{name} {version}: {path} is not the file that was installed" for path in changed(package)]
    return wrong


def changed(package: Distribution) -> list[str]:
    """Files that are missing, or whose SHA-256 is not the one in the package's list."""
    found: list[str] = []
    for file in package.files or []:
        if file.hash is None or file.hash.mode != "sha256" or str(file).endswith(".pyc"):
            continue
        try:
            raw = hashlib.sha256(Path(str(package.locate_file(file))).read_bytes()).digest()
        except OSError:
            raw = b""
        if base64.urlsafe_b64encode(raw).rstrip(b"=").decode() != file.hash.value:
            found.append(str(file))
    return found


def main() -> None:
    """The command line."""
    packages = installed()
    if sys.argv[1:] == ["bill"]:
        BILL.parent.mkdir(exist_ok=True)
        BILL.write_text(json.dumps(bill(packages), indent=1) + "\n", encoding="utf-8")
        print(f"{len(packages)} packages: {BILL}")
        return
    wrong = audit(packages, pins((ROOT / "constraints.txt").read_text(encoding="utf-8")))
    print(
        "\n".join(wrong) or f"{len(packages)} packages: versions as pinned, no pre-releases, licences named, files as installed."
    )
    if importlib.util.find_spec("pip_audit") is None:
        print("Known vulnerabilities were not looked up: that takes pip-audit and a connection.")
        sys.exit(bool(wrong))
    told = subprocess.run([sys.executable, "-m", "pip_audit", "--no-deps", "-r", str(ROOT / "constraints.txt")])
    sys.exit(bool(wrong) or told.returncode)


if __name__ == "__main__":
    main()
