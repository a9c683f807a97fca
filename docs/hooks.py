"""What the docs need that mkdocs does not do by itself. Not a page."""

import re
from pathlib import Path
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")
_ROLE = re.compile(r":(?:func|class|meth|attr):(?=<code>)")


def on_config(config: Any) -> Any:
    """Leave pages out of the navigation that are not written yet."""
    config["nav"] = [entry for entry in config["nav"] if _is_there(entry, Path(config["docs_dir"]))]
    return config


def _is_there(entry: dict[str, Any], folder: Path) -> bool:
    return all(not isinstance(page, str) or (folder / page).exists() for page in entry.values())


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files of the repository that are not pages: readers of the site have only their names."""
    return _OUTSIDE.sub(r"`\1`", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings use Sphinx's roles, which Markdown does not know."""
    return _ROLE.sub("", html)
