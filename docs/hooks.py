"""Hooks of mkdocs: pages from notebooks and from the command line; a page that asks other servers for anything is refused."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))

import commands
from percent import EXAMPLES, markdown, read, scripts

ASKS = re.compile(r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\ssrc=[\"']?((?:https?:)?//[^\"'\s>]+)"
                  r"|<link\b(?![^>]*\brel=[\"']?canonical)[^>]*?\shref=[\"']?((?:https?:)?//[^\"'\s>]+)"
                  r"|(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)", re.IGNORECASE)  # fmt: skip


SHORT = re.compile(r"<code>([^<>\n]{1,24})</code>")


def find_requests(html: str) -> list[str]:
    """Addresses on other servers that a browser would fetch to show this page. Links that a reader may follow do not count."""
    return ["".join(found) for found in ASKS.findall(html)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of every notebook, the notebook and its script, and a page of the command line's options."""
    files.append(File.generated(config, "cli-options.md", content=commands.markdown()))
    for name, script in scripts().items():
        files.append(File.generated(config, f"examples/{name}.md", content=markdown(read(name), name)))
        files.append(File.generated(config, f"examples/{name}.ipynb", content=(EXAMPLES / f"{name}.ipynb").read_bytes()))
        files.append(File.generated(config, f"examples/{name}.py", content=script))
    return files


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Let the search rank pages of results below pages that people write."""
    if page.file.src_uri.startswith("results/"):
        page.meta["search"] = {"boost": 0.1}


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that cannot be read offline, and mark short code: no line may break behind the first hyphen of `--json`."""
    if foreign := find_requests(output):
        raise PluginError(f"{page.file.src_uri} asks other servers for {foreign}: put a copy into docs/assets.")
    return SHORT.sub(r'<code class="short">\1</code>', output)
