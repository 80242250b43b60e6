"""Cards from template files in `assets/cards`, which anybody can edit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CARDS = Path(__file__).parents[1] / "assets" / "cards"


def render_card(name: str, **values: Any) -> str:
    """A template of `assets/cards` with these values; a value that it names and does not get is an error."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(CARDS),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the cards are Markdown
    )
    return environment.get_template(name).render(values)
