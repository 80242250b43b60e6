"""The report in a real browser, headless Chromium, where it and Playwright are installed."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from test_comparison_page import made_comparison

from dulbe_peft import ClassIncrementalLearner, LearnerArguments, class_incremental_tasks, load_clip, load_data
from dulbe_peft.comparison.comparison_file import write_comparison
from dulbe_peft.comparison.comparison_page import write_comparison_page
from dulbe_peft.demo import demo_model_folder
from dulbe_peft.report import write_report
from dulbe_peft.report.pictures import write_pictures

pytestmark = pytest.mark.slow
CHROMIUM = os.environ.get("DULBE_PEFT_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
# The contrast of every text with what lies behind it, by WCAG 2: relative luminance, colours with alpha blended.
CONTRASTS = """() => {
  const numbers = colour => (colour.match(/[\\d.]+/g) || []).map(Number);
  const behind = element => {
    let layers = [];
    for (let e = element; e; e = e.parentElement) layers.unshift(numbers(getComputedStyle(e).backgroundColor));
    return layers.reduce((under, [r, g, b, a = 1]) => [r, g, b].map((c, i) => a * c + (1 - a) * under[i]), [0, 0, 0]);
  };
  const light = rgb => rgb.map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("style")) continue;
    const style = getComputedStyle(element), svg = element.closest("svg");
    const [high, low] = [light(numbers(svg ? style.fill : style.color)), light(behind(element))].sort((a, b) => b - a);
    found.push([(high + 0.05) / (low + 0.05), walker.currentNode.data.trim().slice(0, 40)]);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def pages(digit_folders, tmp_path_factory):
    """The report of a run, that of two runs, and that of a comparison."""
    torch.set_num_threads(1)
    data, root = digit_folders(6, 4, 4), tmp_path_factory.mktemp("reports")
    for seed in (0, 1):
        clip, processor = load_clip(demo_model_folder())
        args = LearnerArguments(device="cpu", progress=False, seed=seed)
        learner = ClassIncrementalLearner(clip, processor, args=args, strategy="frozen", classifiers=("bridge", "lda"))
        tasks = class_incremental_tasks(load_data(data, "train"), load_data(data, "test"), increment=2)
        results = learner.run(tasks, root / f"seed-{seed}")
        write_pictures(root / f"seed-{seed}", [task.test for task in tasks], results)
    one = write_report(root / "seed-0", root / "one.html")
    two = write_report([root / "seed-0", root / "seed-1"], root / "two.html")
    write_comparison(made_comparison(), root)
    return [one, two, write_comparison_page(root, root / "comparison.html")]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.mark.parametrize("which", [0, 1, 2], ids=["one run", "two runs", "comparison"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1300])
def test_the_report_in_a_browser(pages, browser, which, scheme, width):
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page, address = context.new_page(), pages[which].as_uri()
    asked, said = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(address)
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    wide = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
    assert which != 2 or width < 1300 or page.evaluate(wide) == 0, "no column lies off the page"
    pictures = page.evaluate("[...document.images].map(i => [i.complete && i.naturalWidth > 0, i.alt])")
    assert bool(pictures) == (which != 2) and all(loaded and alt for loaded, alt in pictures)
    charts = page.evaluate("[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().height)")
    assert charts and min(charts) > 100
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")
    faint = [(round(ratio, 2), text) for ratio, text in page.evaluate(CONTRASTS) if ratio < 4.5]
    assert not faint, "texts with too little contrast"
    body = "document.querySelector('table.sort')"
    order = f"[...{body}.tBodies[0].rows].map(row => row.cells[0].textContent)"
    before = page.evaluate(order)
    page.evaluate(f"{body}.tHead.querySelector('button').click()")
    assert page.evaluate(order) == sorted(before, key=str.casefold), "a click on a column's head sorts by it"
    if pictures:
        side = "document.images[0].getBoundingClientRect().width"
        small, _, large = (page.evaluate(what) for what in (side, "document.images[0].focus()", side))
        assert large > 3 * small, "a click enlarges a picture"
    assert [url for url in asked if not url.startswith("data:")] == [address] and not said
    context.close()
