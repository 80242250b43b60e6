"""The templates in `assets`: pages, model cards and texts for a terminal."""

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

ASSETS = Path(str(resources.files("dulbe_peft") / "assets"))


@cache  # a process that writes many pages compiles each template once
def environment() -> jinja2.Environment:
    """Where templates are found by name; what an HTML page shows is escaped, because it may be anybody's text."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([ASSETS / "report", ASSETS / "cards"]),
        autoescape=jinja2.select_autoescape(["html"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: str, **content: Any) -> str:
    """A template with its content."""
    return environment().get_template(template).render(content)
