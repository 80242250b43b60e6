"""HTML pages without any other file, readable in light and dark, from the templates in `assets/report`."""

import base64
import os
import re
from itertools import count
from pathlib import Path
from typing import Any

from dulbe_peft.metrics import accuracy
from dulbe_peft.photos.report.table import cells, filled, tuple_columns
from dulbe_peft.utils.files import output_file

PAGES = Path(__file__).parents[1] / "assets" / "report"
CONTENTS = "<!-- contents -->"


def write_page(path: Path, template: str, content: dict[str, Any], *folders: Path) -> None:
    """Write a page, whole or not at all, from a template, which may lie in one of `folders`."""
    from dulbe_peft.utils.templates import environment

    pages = environment(*folders, PAGES)
    pages.filters |= {"percent": percent, "count": "{:,}".format, "basename": os.path.basename}
    pages.globals |= {"cells": cells, "filled": filled, "columns": tuple_columns}
    page = with_contents(pages.get_template(template).render(content))
    with output_file(path, errors="backslashreplace") as file:  # names of files need not be UTF-8
        file.write(page)


def with_contents(page: str) -> str:
    """The page with a list of its parts, each of which becomes a place that a link leads to."""
    titles = re.findall(r"<h2>(.*?)</h2>", page, flags=re.DOTALL)  # a name has no tags: it is escaped
    numbers = count(1)
    page = re.sub("<h2>", lambda _: f'<h2 id="part-{next(numbers)}">', page)
    links = "".join(f'<li><a href="#part-{number}">{title}</a></li>' for number, title in enumerate(titles, 1))
    return page.replace(CONTENTS, f'<nav aria-label="Contents"><ol>{links}</ol></nav>' if len(titles) > 2 else "", 1)


def percent(fraction: float | None, digits: int = 2) -> str:
    """A fraction as people read it, in percent; empty where there is none."""
    return "" if fraction is None else accuracy.percent(fraction, digits)


def seconds(value: float | None) -> str:
    """Seconds as people read them; empty where there are none."""
    return "" if value is None else f"{value:.1f}"


def mib(size: int | None) -> str:
    """A number of bytes as people read it, in MiB; empty where there is none."""
    return "" if size is None else f"{size / 2**20:,.{1 if size > 2**18 else 2}f}"


def jpeg_address(content: bytes) -> str:
    """The content of a JPEG file as an address that holds it, for a page of one file."""
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"
