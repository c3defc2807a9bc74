"""One family of errors, and messages that name the nearest valid word."""

from __future__ import annotations

import inspect

import pytest

import offmap
from offmap import errors
from offmap.errors import OffmapError, first_line, nearest

NAMES = ["ModelError", "ShapeError", "ConfigError", "DataError", "FileError", "NotFittedError", "RankError"]


@pytest.mark.parametrize("name", NAMES)
def test_every_error_is_an_offmap_error(name: str) -> None:
    assert issubclass(getattr(errors, name), OffmapError)
    assert getattr(offmap.errors, name).__doc__


def test_there_are_no_other_errors() -> None:
    defined = {n for n, c in vars(errors).items() if inspect.isclass(c) and issubclass(c, Exception)}
    assert defined == {*NAMES, "OffmapError"}


def test_offmap_error_is_no_builtin_error() -> None:
    # `except ValueError` around a user's own code must not swallow ours
    assert OffmapError.__bases__ == (Exception,)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("refnie", "one of ['refine', 'sgd'] (did you mean 'refine'?)"),
        ("sdg", "one of ['refine', 'sgd'] (did you mean 'sgd'?)"),
        ("banana", "one of ['refine', 'sgd']"),
        ("", "one of ['refine', 'sgd']"),
    ],
)
def test_nearest_word_is_named_only_when_it_is_near(word: str, said: str) -> None:
    assert nearest(word, ("sgd", "refine")) == said


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("Too long.\nLine 3"), "Too long"),
        (ValueError(), "ValueError"),
        (FileNotFoundError(2, "No such file", "a"), "No such file"),
    ],
)
def test_the_first_line_of_an_error_has_no_full_stop(error: Exception, line: str) -> None:
    assert first_line(error) == line
