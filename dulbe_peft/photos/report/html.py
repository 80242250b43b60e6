"""Write self-contained HTML pages, with a light and a dark scheme, from the templates in `assets/report`."""

import base64
import os
import re
from itertools import count
from pathlib import Path

from dulbe_peft.metrics import accuracy
from dulbe_peft.photos.report.table import cells, filled, tuple_columns
from dulbe_peft.utils.files import output_file

PAGES = Path(__file__).parents[1] / "assets" / "report"
CONTENTS = "<!-- contents -->"


def write_page(path: Path, template: str, content: dict[str, object], *folders: Path) -> None:
    """Write a page from a template, which may lie in one of `folders`. After an error, no partial file is left."""
    from dulbe_peft.utils.templates import environment

    pages = environment(*folders, PAGES)
    pages.filters |= {"percent": percent, "count": "{:,}".format}
    pages.filters |= {"basename": os.path.basename, "dirname": os.path.dirname}
    pages.globals |= {"cells": cells, "filled": filled, "columns": tuple_columns}
    page = with_contents(pages.get_template(template).render(content))
    with output_file(path, errors="backslashreplace") as file:  # file names need not be UTF-8
        file.write(page)


def with_contents(page: str) -> str:
    """Return the page with a table of contents, which links to each heading of level 2."""
    titles = re.findall(r"<h2>(.*?)</h2>", page, flags=re.DOTALL)  # names in titles are escaped
    numbers = count(1)
    page = re.sub("<h2>", lambda _: f'<h2 id="part-{next(numbers)}">', page)
    links = "".join(f'<li><a href="#part-{number}">{title}</a></li>' for number, title in enumerate(titles, 1))
    return page.replace(CONTENTS, f'<nav aria-label="Contents"><ol>{links}</ol></nav>' if len(titles) > 2 else "", 1)


def percent(fraction: float | None, digits: int = 2) -> str:
    """Format a fraction in percent, or return "" for None."""
    return "" if fraction is None else accuracy.percent(fraction, digits)


def seconds(value: float | None) -> str:
    """Format seconds with one decimal, or return "" for None."""
    return "" if value is None else f"{value:.1f}"


def mib(size: int | None) -> str:
    """Format a number of bytes in MiB, or return "" for None."""
    return "" if size is None else f"{size / 2**20:,.{1 if size > 2**18 else 2}f}"


def jpeg_address(content: bytes) -> str:
    """Return a data URL with the content of a JPEG file, for a self-contained page."""
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"
