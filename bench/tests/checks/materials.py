"""What offmap is made of: `python -m checks.materials bill`, a software bill of materials, and `... audit`.

The bill is CycloneDX 1.5 in JSON: every package that offmap and its extras bring, as installed here, with version, licence, the
SHA-256 of its list of files, and what it needs. The audit needs no connection. It checks that each package has the version of
`constraints.txt`, is no pre-release, names a licence, and that each of its files is the one that was installed. It does not know
of vulnerabilities: with a connection, install pip-audit, which is then asked as well.
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
from contextlib import suppress
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from checks.records import replace_file
from offmap_bench.paths import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = tuple(extra for extra in PROJECT["optional-dependencies"] if extra not in ("test", "docs", "dev"))
"""What users install; tests and documentation bring more, which no user runs."""

Packages = Mapping[str, Distribution]


def find_packages() -> dict[str, Distribution]:
    """Offmap and all that it needs, by name; extras that are not installed here are left out."""
    packages: dict[str, Distribution] = {}
    queue = visited = {("offmap", frozenset(EXTRAS))}
    while queue:
        wanted: set[tuple[str, frozenset[str]]] = set()
        for name, extras in queue:
            with suppress(PackageNotFoundError):
                packages[name] = distribution(name)
                wanted |= {(canonicalize_name(need.name), frozenset(need.extras)) for need in needs(packages[name], extras)}
        queue, visited = wanted - visited, visited | wanted
    return dict(sorted(packages.items()))


def needs(package: Distribution, extras: Iterable[str] = ()) -> list[Requirement]:
    """What a package, with some extras, asks for on this machine; of offmap, what `pyproject.toml` says now."""
    if package.name == "offmap":
        lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
        return [Requirement(text) for texts in lists for text in texts]
    every = [Requirement(text) for text in package.requires or []]
    return [need for need in every if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in ("", *extras))]


def licence(package: Distribution) -> str:
    """The licence as the package declares it: an expression, a classifier or a line of text; empty if there is none."""
    about = package.metadata
    classes = [line.rpartition(" :: ")[2] for line in about.get_all("Classifier") or [] if line.startswith("License :: OSI")]
    lines = (about.get("License") or "").strip().splitlines()
    return about.get("License-Expression") or " AND ".join(classes) or (lines[0][:80] if lines else "")


def bill(packages: Packages) -> dict[str, Any]:
    """The software bill of materials; equal packages give equal bills."""
    parts = {name: component(package) for name, package in packages.items()}
    graph: list[dict[str, Any]] = []
    for name, package in packages.items():
        names = {canonicalize_name(need.name) for need in needs(package, EXTRAS if name == "offmap" else ())}
        graph.append({"ref": parts[name]["bom-ref"], "dependsOn": sorted(parts[n]["bom-ref"] for n in names if n in parts)})
    root = parts.pop("offmap")
    fields = {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": {"component": root},
        "components": list(parts.values()), "dependencies": graph,
    }  # fmt: skip
    return {**fields, "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(fields, sort_keys=True))}"}


def component(package: Distribution) -> dict[str, Any]:
    """One package, by the address that package registries use."""
    address = f"pkg:pypi/{canonicalize_name(package.name)}@{package.version}"
    files = hashlib.sha256((package.read_text("RECORD") or "").encode()).hexdigest()
    fields = {
        "type": "library", "bom-ref": address, "name": package.name, "version": package.version, "purl": address,
        "hashes": [{"alg": "SHA-256", "content": files}],
    }  # fmt: skip
    return fields | ({"licenses": [{"license": {"name": licence(package)}}]} if licence(package) else {})


def pins(text: str) -> dict[str, str]:
    return {canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)}


def audit(packages: Packages, pinned: Mapping[str, str]) -> list[str]:
    wrong: list[str] = []
    for name, package in packages.items():
        if name == "offmap":
            continue
        version, pin = Version(package.version), Version(pinned.get(name, package.version))
        faults = {
            f"{name} {version} is not in constraints.txt": name not in pinned,
            f"{name} is {version}, but constraints.txt has {pin}": pin.public != version.public,
            f"{name} {version} is a pre-release": version.is_prerelease,
            f"{name} {version} names no licence": not licence(package),
        }
        wrong += [fault for fault, holds in faults.items() if holds]
        wrong += [f"{name} {version}: {path} is not the file that was installed" for path in find_changes(package)]
    return wrong


def find_changes(package: Distribution) -> list[str]:
    """Files that are missing, or whose SHA-256 is not the one in the package's list."""

    def digest(path: Path) -> str:
        return (
            base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode() if path.is_file() else ""
        )

    listed = [f for f in package.files or [] if f.hash is not None and f.hash.mode == "sha256" and f.suffix != ".pyc"]
    return [str(f) for f in listed if f.hash and digest(Path(str(package.locate_file(f)))) != f.hash.value]


def main() -> None:
    packages = find_packages()
    if sys.argv[1:] == ["bill"]:
        replace_file(path := ROOT / "build" / "sbom.json", json.dumps(bill(packages), indent=1) + "\n")
        return print(f"{len(packages)} packages: {path}")
    wrong = audit(packages, pins((ROOT / "constraints.txt").read_text(encoding="utf-8")))
    fine = f"{len(packages)} packages: versions as pinned, no pre-releases, licences named, files as installed."
    print("\n".join(wrong) or fine)
    if importlib.util.find_spec("pip_audit") is None:
        print("Known vulnerabilities were not looked up: that takes pip-audit and a connection.")
        sys.exit(bool(wrong))
    code = subprocess.run([sys.executable, "-m", "pip_audit", "--no-deps", "-r", str(ROOT / "constraints.txt")]).returncode
    sys.exit(bool(wrong) or code)


if __name__ == "__main__":
    main()
