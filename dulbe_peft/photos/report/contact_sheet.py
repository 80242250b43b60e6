"""Write a page that shows the photographs of a table of `predict --csv`, grouped by their predicted class.

If the table has groups, an item or event has one card, with a strip of its photographs.
"""

from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from dulbe_peft.data.decoding import UnreadableImageError, decode_image
from dulbe_peft.data.glance import as_jpeg, thumbnail
from dulbe_peft.photos.report.html import jpeg_address, write_page
from dulbe_peft.utils.files import read_csv

COLUMNS = ["path", "predicted", "probability"]
MOST_PICTURES = 60  # pictures shown for each class
SIDE = 200  # pixels of a picture
VIEWS = 3  # further photographs of an item on its card
GROUP = "group"  # the column that `predict --group` writes


class Card(NamedTuple):
    """A photograph, or the photographs of an item; its answer and probability, and the name of the item or ""."""

    predicted: str
    probability: float
    paths: list[str]
    item: str


def write_contact_sheet(table: Path, output: Path) -> Path:
    """Write a page of the photographs in a table of `predict --csv`, the least certain ones of each class first."""
    header, *rows = read_csv(table) or [[]]
    if header[: len(COLUMNS)] != COLUMNS:
        raise ValueError(f"{table} begins with the columns {header[:3]}, expected {COLUMNS}, as predict --csv writes")
    column = header.index(GROUP) if GROUP in header else None
    cards: dict[tuple[str, str], Card] = {}
    seen = set[str]()
    for line, row in enumerate(rows, 2):
        try:
            path, name, probability = row[0], row[1], float(row[2])
            item = "" if column is None else row[column]
        except (IndexError, ValueError) as error:
            raise ValueError(f"line {line} of {table} is not a row that predict writes: {error}") from error
        if path not in seen:
            seen.add(path)
            cards.setdefault((item or path, name), Card(name, probability, [], item)).paths.append(path)
    ordered = sorted(cards.values(), key=lambda card: (card.predicted == "", *card))
    parts = [(name, list(of)) for name, of in groupby(ordered, key=lambda card: card.predicted)]
    content = {"name": table.name, "images": len(seen), "parts": parts, "most": MOST_PICTURES, "picture": _picture}
    content |= {"items": None if column is None else len({item for item, _ in cards}), "views": VIEWS}
    write_page(output, "contact.html", content)
    return output


def _picture(path: str) -> str | None:
    """Return a photograph as an address for the page, or None if its file is missing or damaged."""
    try:
        return jpeg_address(as_jpeg(thumbnail(decode_image(path), SIDE)))
    except UnreadableImageError:
        return None
