"""MkDocs calls this for each page. A link to a file that is not on the site becomes the file's name."""

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([\w./-]+)\)")
"""A link that leaves docs/: to a file of the repository."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page as the site has it."""
    return OUTSIDE.sub(_named, markdown)


def _named(link: re.Match[str]) -> str:
    text, path = link[1], link[2]
    return f"`{path}`" if text.strip("`") in (path, path.rsplit("/", 1)[-1]) else f"{text} (`{path}`)"
