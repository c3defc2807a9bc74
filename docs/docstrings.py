"""Docstrings as Markdown: doctests become code, stars of shapes stay stars, and options document themselves."""

from __future__ import annotations

import ast
import re
from typing import Any

from griffe import Attribute, Docstring, ExprCall, Extension, Object

DOCTEST = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)
STAR = re.compile(r"(?<=[(, ])\*(?=\w+[,)])")


class Markdown(Extension):
    """Rewrite every docstring once, and give fields that are `option(default, text)` their text."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)  # in place: a new Docstring would not know its style

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        if isinstance(attr.value, ExprCall) and str(attr.value.function) == "option":
            default, text, *_ = attr.value.arguments
            attr.docstring = Docstring(ast.literal_eval(str(text)), lineno=attr.lineno, parent=attr)
            attr.value = default


def to_markdown(text: str) -> str:
    """Return a docstring's text with its doctests in fences.

    >>> to_markdown("Twice, (B, *positions).")
    'Twice, (B, \\\\*positions).'
    """
    return STAR.sub(r"\\*", DOCTEST.sub(lambda match: f"```pycon\n{match[0]}\n```", text))
