"""What the docs need that mkdocs does not do by itself. Not a page."""

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")
_ROLE = re.compile(r":(?:func|class|meth|attr):(?=<code>)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files of the repository that are not pages: readers of the site have only their names."""
    return _OUTSIDE.sub(r"`\1`", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings use Sphinx's roles, which Markdown does not know."""
    return _ROLE.sub("", html)
