"""`python docs/words.py` counts the words of every page and its sentences of more than 30 words; `-v` prints these."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONG = 30
"""Sentences of more words are reported."""

CODE = re.compile(r"^( *)```.*?^\1```$|<!--.*?-->|^<(?:div|picture).*?^</(?:div|picture)>$", re.DOTALL | re.MULTILINE)
INCLUDED = re.compile(r"^--8<-- \"([^:\"]+)(?::(\w+))?\"$", re.MULTILINE)
IMAGE = re.compile(r"!\[[^]]*\]\([^)]*\)(?:\{[^}]*\})?")
LINK = re.compile(r"!?\[([^]]*)\]\([^)]*\)(?:\{[^}]*\})?")
WORD = re.compile(r"\S*\w\S*")
BREAK = re.compile(r"(?<=[.!?:])[*_)\"”]*\s+(?=[*_(\"“`]*(?:[A-ZΑ-Ωτφ0-9`]|offmap ))")


def read(path: Path, *, code: bool = False) -> str:
    """Return a page with the files that it includes, by default without code and comments."""

    def include(found: re.Match[str]) -> str:
        text = (ROOT / found[1]).read_text(encoding="utf-8")
        return text if found[2] is None else text.split(f"[start:{found[2]}]")[1].split(f"[end:{found[2]}]")[0]

    text = INCLUDED.sub(include, path.read_text(encoding="utf-8"))
    return text if code else CODE.sub("", text)


def count_words(text: str) -> int:
    """Count the words that a reader sees, those of tables too.

    >>> count_words("Two [words](a.md) – | 3 |")
    3
    """
    return len(WORD.findall(LINK.sub(r"\1", text)))


def sentences(text: str) -> Iterator[str]:
    """Split the paragraphs and list items of a page into sentences.

    >>> list(sentences("# Head\\n\\nOne. Two\\ngoes on.\\n\\n- Three\\n- `four`"))
    ['One.', 'Two goes on.', 'Three', '`four`']
    """
    for block in re.split(r"\n\s*\n|^ *(?:[-*]|\d+\.) ", text, flags=re.MULTILINE):
        if not re.match(r"\s*(?:#|\||:::|=|\Z)", block):
            lines = " ".join(LINK.sub(r"\1", IMAGE.sub("", block)).split())
            yield from filter(WORD.search, BREAK.split(lines))


def long_sentences(text: str) -> list[str]:
    return [each for each in sentences(text) if count_words(each) > LONG]


def pages() -> dict[str, Path]:
    """Return README and all pages of the site that people write; results are written by commands."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    named = {path.relative_to(ROOT).as_posix(): path for path in paths}
    return {name: path for name, path in named.items() if not name.startswith("docs/results/")}


def main(verbose: bool) -> None:
    totals = [0, 0, 0]
    print(f"{'words':>6} {'sentences':>9} {'long':>5}")
    for name, path in pages().items():
        text = read(path)
        numbers = count_words(text), len(list(sentences(text))), len(long_sentences(text))
        totals = [total + number for total, number in zip(totals, numbers, strict=True)]
        print("{:6} {:9} {:5}  {}".format(*numbers, name))
        for each in long_sentences(text) if verbose else ():
            print(f"    {count_words(each)}: {each}")
    print("{:6} {:9} {:5}  in all".format(*totals))


if __name__ == "__main__":
    main("-v" in sys.argv[1:])
