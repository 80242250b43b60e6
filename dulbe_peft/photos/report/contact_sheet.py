"""Write a page that shows the photographs of a table of `predict --csv`, grouped by their predicted class."""

from itertools import groupby
from operator import itemgetter
from pathlib import Path

from dulbe_peft.data.decoding import UnreadableImageError, decode_image
from dulbe_peft.data.glance import as_jpeg, thumbnail
from dulbe_peft.photos.report.html import jpeg_address, write_page
from dulbe_peft.utils.files import read_csv

COLUMNS = ["path", "predicted", "probability"]
MOST_PICTURES = 60  # pictures shown for each class
SIDE = 200  # pixels of a picture


def write_contact_sheet(table: Path, output: Path) -> Path:
    """Write a page of the photographs in a table of `predict --csv`, the least certain ones of each class first."""
    header, *rows = read_csv(table) or [[]]
    if header[: len(COLUMNS)] != COLUMNS:
        raise ValueError(f"{table} begins with the columns {header[:3]}, expected {COLUMNS}, as predict --csv writes")
    best: dict[str, tuple[str, float]] = {}
    for line, row in enumerate(rows, 2):
        try:
            path, name, probability = row[0], row[1], float(row[2])
        except (IndexError, ValueError) as error:
            raise ValueError(f"line {line} of {table} is not a row that predict writes: {error}") from error
        best.setdefault(path, (name, probability))
    predictions = sorted((name == "", name, probability, path) for path, (name, probability) in best.items())
    parts = [(name, list(rows)) for name, rows in groupby(predictions, key=itemgetter(1))]
    content = {"name": table.name, "images": len(best), "parts": parts, "most": MOST_PICTURES, "picture": _picture}
    write_page(output, "contact.html", content)
    return output


def _picture(path: str) -> str | None:
    """Return a photograph as an address for the page, or None if its file is missing or damaged."""
    try:
        return jpeg_address(as_jpeg(thumbnail(decode_image(path), SIDE)))
    except UnreadableImageError:
        return None
