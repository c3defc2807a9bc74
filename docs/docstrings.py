"""Docstrings as Markdown: doctests become code, and the star of `(B, *positions)` is a star."""

from __future__ import annotations

import ast
import re
from typing import Any

from griffe import Attribute, Docstring, ExprCall, Extension, Object

DOCTEST = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)
STAR = re.compile(r"(?<=[(, ])\*(?=\w+[,)])")


class Markdown(Extension):
    """Rewrites every docstring once."""

    def on_attribute(self, *, attr: Attribute, **_: Any) -> None:
        """Document a field by the second argument of its `option(default, doc, ...)`."""
        value = attr.value
        if isinstance(value, ExprCall) and str(value.function) == "option" and attr.docstring is None:
            attr.docstring = Docstring(ast.literal_eval(str(value.arguments[1])), parent=attr)

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring = Docstring(rewritten(obj.docstring.value), lineno=obj.docstring.lineno, parent=obj)


def rewritten(text: str) -> str:
    """A docstring's text with its doctests in fences.

    >>> rewritten("Twice, (B, *positions).")
    'Twice, (B, \\\\*positions).'
    """
    return STAR.sub(r"\\*", DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", text))
