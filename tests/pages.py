"""What every page of ours must be, for tests of whatever writes one."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser

LOADERS = {"link", "iframe", "object", "embed", "video", "audio", "source", "base"}
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """Tags, ids, references and figures of a page; unclosed tags are an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.labels: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        values = dict(attrs)
        self.tags[tag] += 1
        if "id" in values:
            self.ids[values["id"]] += 1
        self.links += [values[name] for name in ("href", "xlink:href", "src") if name in values]
        for value in values.values():
            self.links += re.findall(r"url\(([^)]*)\)", value or "")
        assert tag != "img" or len(values["alt"]) > 10
        if values.get("role") == "img":
            self.labels.append(values.get("aria-label") or "")

    def handle_endtag(self, tag):
        assert self.open, f"closed but not opened: {tag}"
        assert self.open.pop() == tag


def check_page(text: str, *, scripts: bool = False) -> Page:
    """The page, if it is well-formed, loads nothing, has unique ids, describes every figure; `scripts` if it may have some."""
    page = Page(text)
    assert not LOADERS & set(page.tags)
    assert scripts or not page.tags["script"]
    assert not re.search(r"https?://|@import|//cdn", text)
    assert [i for i, n in page.ids.items() if n > 1] == []
    for link in page.links:
        assert link.startswith("data:image/png;base64,") or link[1:] in page.ids, link[:80]
    assert all(len(label) > 10 for label in page.labels)
    assert page.tags["figure"] == len(page.labels) == page.tags["figcaption"]
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    return page
