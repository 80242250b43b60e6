"""HTML pages without any other file, readable in light and dark, from the templates in `assets/report`."""

from importlib import resources
from pathlib import Path
from typing import Any

from dulbe_peft.metrics import accuracy
from dulbe_peft.report.table import best, filled, shown
from dulbe_peft.utils.files import output_file


def write_page(path: Path, template: str, content: dict[str, Any]) -> None:
    """Write a page, whole or not at all, from a template, with the style sheet and the script in it."""
    import jinja2

    assets = Path(str(resources.files("dulbe_peft") / "assets" / "report"))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(assets),
        autoescape=True,  # class names and paths are anybody's texts
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": percent,
        "mib": lambda size: "" if size is None else f"{size / 2**20:,.{1 if size > 2**18 else 2}f}",
        "count": "{:,}".format,
        "seconds": lambda value: "" if value is None else f"{value:,.1f}",
    }
    environment.globals |= {"shown": shown, "filled": filled, "best_cells": best}
    style, script = ((assets / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    page = environment.get_template(template).render(content, style=style, script=script)
    with output_file(path, errors="backslashreplace") as file:  # names of files need not be UTF-8
        file.write(page)


def percent(fraction: float | None, digits: int = 2) -> str:
    """A fraction as people read it, in percent; empty where there is none."""
    return "" if fraction is None else accuracy.percent(fraction, digits)
