"""Templates for pages, model cards and texts for a terminal."""

from functools import cache
from importlib import resources
from pathlib import Path

import jinja2

CARDS = Path(str(resources.files("dulbe_peft") / "assets" / "cards"))


@cache  # a process that writes many pages compiles each template once
def environment(*folders: Path) -> jinja2.Environment:
    """Return an environment that finds templates in `folders` and then among the cards. HTML templates are escaped."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, CARDS]),
        autoescape=jinja2.select_autoescape(["html"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: str, *folders: Path, **content: object) -> str:
    """Fill a template."""
    return environment(*folders).get_template(template).render(content)
