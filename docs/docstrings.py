"""Docstrings as Markdown: doctests become code, and the star of `(B, *positions)` is a star."""

from __future__ import annotations

import re
from typing import Any

from griffe import Docstring, Extension, Object

DOCTEST = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)
STAR = re.compile(r"(?<=[(, ])\*(?=\w+[,)])")


class Markdown(Extension):
    """Rewrites every docstring once."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring = Docstring(rewritten(obj.docstring.value), lineno=obj.docstring.lineno, parent=obj)


def rewritten(text: str) -> str:
    """A docstring's text with its doctests in fences.

    >>> rewritten("Twice, (B, *positions).")
    'Twice, (B, \\\\*positions).'
    """
    return STAR.sub(r"\\*", DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", text))
