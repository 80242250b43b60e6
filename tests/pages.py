"""Parse HTML pages for tests, and make runs whose reports the tests read."""

import itertools
import re
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import write_saved
from matplotlib.figure import Figure
from peft import get_peft_model

from dulbe_peft import ClassIncrementalLearner, DualModeLoraConfig, LearnerArguments, load_clip, run_stream
from dulbe_peft import class_incremental_tasks as tasks_of
from dulbe_peft.data.digits import DIGITS
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.photos.report.pictures import write_pictures
from dulbe_peft.streams.tasks import Task

NAMES = ("zero", "<script>alert(1)</script>", "=SUM(A1)", '50% of a_b & "c"', "four", "five")


@contextmanager
def drawn():
    """Draw charts while the block runs. Outside of it, `conftest.py` saves them as empty pictures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", Figure.savefig.__wrapped__)
        yield


def digits(start, stop):
    images = write_saved.digits(start, stop).select(DIGITS[: len(NAMES)])
    images.class_names = NAMES
    return images


def learn(output, strategy="dulbe", seed=0, tests=True):
    clip, processor = load_clip(demo_model_folder())
    torch.manual_seed(seed)
    config = DualModeLoraConfig(residual_rank=2, support_rank=8, target_modules=["fc1"])
    model = get_peft_model(clip, config) if strategy == "dulbe" else clip
    args = LearnerArguments(epochs=1, batch_size=8, device="cpu", progress=False, seed=seed)
    learner = ClassIncrementalLearner(model, processor, args=args, strategy=strategy, classifiers=("bridge", "lda"))
    stream = tasks_of(digits(0, 6), digits(6, 16), increment=2)
    stream = stream if tests else [Task(task.train, None, task.class_names) for task in stream]
    results = run_stream(learner, stream, output, keep_features=strategy == "frozen").contents()
    write_pictures(output, [task.test for task in stream], results, ["2 files are no <images>"])
    return output


class Page(HTMLParser):
    """A parsed page: its tags with attributes, the text of its table cells, and its headings."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.tables, self.headings, self.text, self._open = [], [], [], "", None
        self.source = Path(path).read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._open = tag
        elif re.fullmatch("h[1-6]", tag):
            self.headings.append([int(tag[1]), ""])
            self._open = tag

    def handle_endtag(self, tag):
        if tag == self._open:
            self._open = None

    def handle_data(self, data):
        self.text += data
        if self._open in ("td", "th"):
            self.tables[-1][-1][-1] += data
        elif self._open:
            self.headings[-1][1] += data

    @property
    def words(self):
        return " ".join(self.text.split())

    def table(self, *heads):
        """Return the rows, without the header, of the first table whose header has these cells."""
        matching = [t for t in self.tables if set(heads) <= {cell.strip() for cell in t[0]}]
        assert matching, f"no table has the columns {heads}"
        return [[" ".join(cell.split()) for cell in row] for row in matching[0][1:]]


def check_self_contained(page):
    """Check that a page loads nothing, runs only one inline script, describes its images and has no empty columns."""
    assert not {"iframe", "object", "embed"} & {tag for tag, _ in page.tags}
    assert [attributes for tag, attributes in page.tags if tag == "script"] == [{}]
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href"):
            assert attributes.get(name, "#").startswith(("data:", "#")), (tag, attributes)
        assert tag != "img" or attributes["alt"]
        assert tag != "svg" or "role" not in attributes
    assert "@import" not in page.source and "url(http" not in page.source
    levels = [level for level, _ in page.headings]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert dict(page.tags)["html"] == {"lang": "en"}
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags
    for table in page.tables:  # no column is empty
        assert len(table) < 2 or all(
            any(cell.strip() for cell in column[1:]) or not column[0].strip() or column[0] == "test images"
            for column in itertools.zip_longest(*table, fillvalue="")
        ), table[0]
