"""`python docs/tree.py` writes the files of the library, each with the first sentence of its docstring, into docs/design.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PAGE = Path(__file__).parent / "design.md"
PACKAGE = Path(__file__).parents[1] / "src" / "offmap"
BLOCK = re.compile(r"(?<=<!-- files -->\n).*?(?=<!-- /files -->)", re.DOTALL)


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()) + " ", maxsplit=1)[0].strip()


def files() -> str:
    """One table row for each file, a folder's own sentence first."""
    rows = ["| file | what is inside |", "|---|---|"]
    for folder in [PACKAGE, *sorted(p.parent for p in PACKAGE.rglob("__init__.py") if p.parent != PACKAGE)]:
        name = folder.relative_to(PACKAGE.parent).as_posix()
        rows.append(f"| **`{name}/`** | {sentence(folder / '__init__.py')} |")
        rows += [f"| `{path.name}` | {sentence(path)} |" for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    return "\n".join(rows) + "\n"


def page() -> str:
    """The design page with its table of files as they are."""
    return BLOCK.sub(lambda _: files(), PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
