"""Take the pictures of the docs, with Playwright and Chromium: `python docs/pictures.py` from the repository's folder.

It runs the demo, the commands of `photographs.md`, and the comparison of the digits, which takes minutes.
"""

import os
import runpy
import shutil
import tempfile
from pathlib import Path
from threading import Thread
from typing import Any

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


def take_pictures(browser: Any, work: Path) -> None:
    """Write every picture; `work` is an empty folder."""
    page = browser.new_page(viewport=SIZE)

    ran("demo", "--output", str(work / "dulbe-demo"))
    page.goto((work / "dulbe-demo" / "report.html").as_uri())
    page.screenshot(path=IMAGES / "report.png")
    clip = page.evaluate(BELOW, "mistakes")
    page.screenshot(path=IMAGES / "report-mistakes.png", clip=clip, full_page=True)

    outputs = runpy.run_path(str(ROOT / "docs" / "outputs.py"))
    outputs["with_outputs"]((ROOT / "docs" / "photographs.md").read_text(encoding="utf-8"), work)
    learner = ClassIncrementalLearner.from_pretrained(work / "out-february")
    with make_server(learner, port=0, photographs=work / "february") as server:
        Thread(target=server.serve_forever, daemon=True).start()
        page.goto(f"http://127.0.0.1:{server.server_address[1]}")
        page.wait_for_selector("#label img")
        page.wait_for_load_state("networkidle")
        page.screenshot(path=IMAGES / "label.png")
        server.shutdown()

    from research.__main__ import commands

    plan = str(ROOT / "examples" / "comparisons" / "digits.yaml")
    ran("compare", plan, "--output", str(work / "comparison"), program=commands)
    ran("report", str(work / "comparison"), program=commands)
    page.goto(next((work / "comparison").glob("*.html")).as_uri())
    page.screenshot(path=IMAGES / "comparison.png")


def ran(*arguments: str, **program: Any) -> None:
    """Run a command, and raise an error if it fails."""
    if main(list(arguments), *program.values()):
        raise RuntimeError(f"{' '.join(arguments)} failed")


if __name__ == "__main__":
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("DULBE_PEFT_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as work, sync_playwright() as started:
        os.environ["DULBE_PEFT_STORE"] = f"{work}/features.sqlite"
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        take_pictures(browser, Path(work))
        browser.close()
