"""`python docs/tree.py` writes the folders of the library, with their files and what is inside, into docs/design.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PAGE = Path(__file__).parent / "design.md"
PACKAGE = Path(__file__).parents[1] / "src" / "offmap"
BLOCK = re.compile(r"(?<=<!-- files -->\n).*?(?=<!-- /files -->)", re.DOTALL)


def sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()) + " ", maxsplit=1)[0].strip()


def folders() -> str:
    """Return one table row for each folder: its sentence, and the names of its files."""
    rows = ["| folder | what is inside | files |", "|---|---|---|"]
    for folder in [PACKAGE, *sorted(p.parent for p in PACKAGE.rglob("__init__.py") if p.parent != PACKAGE)]:
        name = folder.relative_to(PACKAGE.parent).as_posix()
        files = ", ".join(f"`{path.stem}`" for path in sorted(folder.glob("*.py")) if not path.stem.startswith("__"))
        rows.append(f"| `{name}/` | {sentence(folder / '__init__.py')} | {files} |")
    return "\n".join(rows) + "\n"


def page() -> str:
    """Return the design page with its table of folders as they are."""
    return BLOCK.sub(lambda _: folders(), PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
