"""Wheel and source archive install with pip and with uv, and work in an environment of the declared dependencies alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13")

FIT = """
import torch, offmap
x = torch.rand(60, 2)
train, valid = (x[:40], x[:40, :1]), (x[40:], x[40:, :1])
guard = offmap.fit(torch.nn.Linear(2, 1), train, valid, solver="closed-form", draws=4, progress=False)
assert guard(x).ood.shape == (60,)
guard.save("g.guard"); offmap.load("g.guard", torch.nn.Linear(2, 1), strict=False)
print(offmap.__file__)
"""


def run(*command: object, **options: object) -> str:
    """Run a command without this checkout on its path, and return what it prints."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, env=env, **options)  # pyright: ignore
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def find_uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    return found or pytest.skip("needs uv: pip install 'offmap[test]'")


def find_python(version: str) -> str:
    """Return an interpreter of that version: this one, one of pyenv's, or one on the PATH; a shim of pyenv's may lead nowhere."""
    folders = [*sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin")), *map(Path, os.get_exec_path())]
    own = [Path(sys.executable)] if version == "{}.{}".format(*sys.version_info) else []
    ask = "import sys, venv; print('{}.{}'.format(*sys.version_info))"
    for python in [*own, *(folder / f"python{version}" for folder in folders)]:
        if python.exists() and subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout.strip() == version:
            return str(python)
    return pytest.skip(f"needs Python {version} on the PATH or under ~/.pyenv")


def closure(names: list[str]) -> dict[str, set[str]]:
    """Return the installed packages that these need, directly or not, each with its top-level files."""
    packages: dict[str, set[str]] = {}
    waiting = [Requirement(name) for name in names]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name in packages or not (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            continue
        try:
            found = distribution(name)
        except PackageNotFoundError:
            pytest.skip(f"needs {name}: pip install 'offmap[test]'")
        packages[name] = {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}
        waiting += [Requirement(text) for text in found.requires or []]
    return packages


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build the source archive, and the wheel from it, without the network."""
    pytest.importorskip("build", reason="needs build: pip install 'offmap[test]'")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


def create(folder: Path, installer: str, archive: Path, dependencies: list[str]) -> Path:
    """Install the archive into a new environment that holds links to these packages and what they need; return its folder."""
    # without pip, which takes seconds: pip and uv install into another environment than their own
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    (site,) = folder.glob("lib/python*/site-packages")
    here = Path(str(distribution("torch").locate_file("")))
    for files in closure(dependencies).values():
        for name in files:
            if (here / name).exists() and not (site / name).exists():
                (site / name).symlink_to(here / name)
    python = folder / "bin" / "python"
    if installer == "pip":
        run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-build-isolation", archive)
    else:  # uv does not see packages behind links: they are not to be looked up
        run(find_uv(), "pip", "install", "-q", "--python", python, "--offline", "--no-deps", "--no-build-isolation", archive)
    return folder


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_it_installs_and_works_with_its_declared_dependencies_alone(
    archives: dict[str, Path], installer: str, kind: str, tmp_path: Path
) -> None:
    if installer == "uv":
        find_uv()
    needed = [*(distribution("offmap").requires or []), *(["hatchling"] if kind == "sdist" else [])]
    folder = create(tmp_path / "env", installer, archives[kind], needed)
    if kind == "sdist":
        version = run(folder / "bin" / "offmap", "--version", cwd=tmp_path)
        assert version == f"offmap {distribution('offmap').version}\n"
        return
    where = run(folder / "bin" / "python", "-c", FIT, cwd=tmp_path).split()[-1]
    assert Path(where).is_relative_to(folder)


def test_the_source_archive_holds_the_library_and_the_files_that_belong_to_it(archives: dict[str, Path]) -> None:
    with tarfile.open(archives["sdist"]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    with zipfile.ZipFile(archives["wheel"]) as wheel:
        library = {f"src/{name}" for name in wheel.namelist() if name.startswith("offmap/")}
    assert {name for name in names if name.startswith("src/")} == library
    around = {name for name in names if not name.startswith("src/")}
    assert around == {"pyproject.toml", "PKG-INFO", "README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", ".gitignore"}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_file_compiles_without_a_warning(archives: dict[str, Path], version: str, tmp_path: Path) -> None:
    python = find_python(version)
    with zipfile.ZipFile(archives["wheel"]) as wheel:
        wheel.extractall(tmp_path)
    run(python, "-W", "error", "-m", "compileall", "-q", tmp_path / "offmap")


def test_the_versions_of_python_that_are_tested_are_the_ones_that_are_declared(archives: dict[str, Path]) -> None:
    with zipfile.ZipFile(archives["wheel"]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = wheel.read(name).decode()
    assert tuple(re.findall(r"^Classifier: Programming Language :: Python :: (3\.\d+)$", metadata, re.M)) == VERSIONS
    assert f"Requires-Python: >={VERSIONS[0]}\n" in metadata
    assert "Description-Content-Type: text/markdown\n" in metadata


def test_the_public_names_have_types() -> None:
    """As other projects' type checkers see them; pyright looks for packages beside the first Python of the PATH."""
    pyright = Path(sys.executable).with_name("pyright")
    if not pyright.exists():
        pytest.skip("needs pyright: pip install 'offmap[dev]'")
    path = os.pathsep.join([str(pyright.parent), os.environ.get("PATH", "")])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT / "src")}
    command = [pyright, "--verifytypes", "offmap", "--ignoreexternal", "--outputjson"]
    output = subprocess.run(command, capture_output=True, text=True, check=False, env=environment).stdout
    assert json.loads(output)["typeCompleteness"]["completenessScore"] >= 0.95
