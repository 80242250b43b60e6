"""Take the screenshots of the docs, with Playwright and Chromium: `python docs/pictures.py`, or some by their names.

`report` runs the demo, `label` the commands of `photographs.md`, and `comparison` the comparison of the digits, which
takes minutes.
"""

import os
import runpy
import shutil
import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from threading import Thread
from typing import Any

from PIL import Image
from sklearn.datasets import load_sample_image

from dulbe_peft import ClassIncrementalLearner
from dulbe_peft.photos.commands.main import main
from dulbe_peft.photos.serving import make_server

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
SIZE = {"width": 1280, "height": 820}
# From the heading that contains a word to the next heading.
BELOW = """word => {
  const headings = [...document.querySelectorAll("h2")];
  const first = headings.findIndex(heading => heading.innerText.toLowerCase().includes(word));
  const top = headings[first].getBoundingClientRect();
  const end = headings[first + 1].getBoundingClientRect().top;
  return { x: top.left - 16, y: top.top + scrollY - 16, width: 1080, height: end - top.top - 8 };
}"""


def report(page: Any, work: Path) -> None:
    """The top of the demo's report, and its most confident mistakes."""
    ran("demo", "--output", "dulbe-demo")
    page.goto((work / "dulbe-demo" / "report.html").as_uri())
    take(page, "report")
    take(page, "report-mistakes", clip=page.evaluate(BELOW, "mistakes"), full_page=True)


def label(page: Any, work: Path) -> None:
    """The page of `serve`, which asks for the label of a photograph."""
    text = (ROOT / "docs" / "photographs.md").read_text(encoding="utf-8")
    runpy.run_path(str(ROOT / "docs" / "outputs.py"))["with_outputs"](text, work)
    heap = work / "heap"
    heap.mkdir()
    photograph = Image.fromarray(load_sample_image("china.jpg"))
    for number, corner in enumerate(range(80, 480, 80)):
        photograph.crop((corner, 60, corner + 240, 300)).save(heap / f"{number}.jpg")
    learner = ClassIncrementalLearner.from_pretrained("out-february")
    with make_server(learner, port=0, output="taught", photographs="heap") as server:
        Thread(target=server.serve_forever, daemon=True).start()
        page.goto(f"http://127.0.0.1:{server.server_address[1]}")
        page.wait_for_selector("#label img")
        page.wait_for_load_state("networkidle")
        take(page, "label")
        server.shutdown()


def comparison(page: Any, work: Path) -> None:
    """The top of the page of a comparison."""
    from research.__main__ import commands

    ran("compare", str(ROOT / "examples" / "comparisons" / "digits.yaml"), "--output", "digits", program=commands)
    ran("report", "digits", program=commands)
    page.goto((work / "digits" / "report.html").as_uri())
    take(page, "comparison")


def take(page: Any, name: str, **options: Any) -> None:
    """Write a screenshot with 256 colours, which makes the file a third as large."""
    path = IMAGES / f"{name}.png"
    page.screenshot(path=path, **options)
    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)


def ran(*arguments: str, **program: Any) -> None:
    """Run a command, and raise an error if it fails."""
    if main(list(arguments), *program.values()):
        raise RuntimeError(f"{' '.join(arguments)} failed")


if __name__ == "__main__":
    from playwright.sync_api import sync_playwright

    sys.path.insert(0, str(ROOT))  # where `research` is
    chromium = os.environ.get("DULBE_PEFT_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    pictures = {"report": report, "label": label, "comparison": comparison}
    with tempfile.TemporaryDirectory() as work, sync_playwright() as started, chdir(work):
        os.environ["DULBE_PEFT_STORE"] = f"{work}/features.sqlite"
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name in sys.argv[1:] or pictures:
            pictures[name](browser.new_page(viewport=SIZE), Path(work))
        browser.close()
