"""Test the report, the page of `serve` and the docs in headless Chromium, if it and Playwright are installed."""

import base64
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import served
from compared import made_comparison, write_into
from pages import drawn, learn
from PIL import Image

from dulbe_peft import ClassIncrementalLearner
from dulbe_peft.photos.report import write_report
from dulbe_peft.photos.serving import app
from research.comparison.comparison_page import write_comparison_page

pytestmark = pytest.mark.rare
CHROMIUM = os.environ.get("DULBE_PEFT_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
ROOT = Path(__file__).parents[3]
# The contrast of every text with its background by WCAG 2: relative luminance, with transparent colours blended.
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
def pages(tmp_path_factory):
    """Write the report of a run, the report of two runs, and the page of a comparison; return their paths."""
    root = tmp_path_factory.mktemp("reports")
    runs = [learn(root / f"seed-{seed}", strategy="frozen", seed=seed) for seed in (0, 1)]
    write_into(made_comparison(), root)
    with drawn():
        one, two = write_report(runs[0], root / "one.html"), write_report(runs, root / "two.html")
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
def test_report_has_contrast_sorts_tables_and_does_not_scroll_sideways(pages, browser, which, scheme, width):
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page, address = context.new_page(), pages[which].as_uri()
    requests, messages = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.goto(address)
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    wide = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
    assert which != 2 or width < 1300 or page.evaluate(wide) == 0, "a column lies off the page"
    pictures = page.evaluate("[...document.images].map(i => [i.complete && i.naturalWidth > 0, i.alt])")
    assert bool(pictures) == (which != 2) and all(loaded and alt for loaded, alt in pictures)
    charts = page.evaluate("[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().height)")
    assert charts and min(charts) > 100
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")
    faint = [(round(ratio, 2), text) for ratio, text in page.evaluate(CONTRASTS) if ratio < 4.5]
    assert not faint, "texts with too little contrast"
    # One class is named "50% of ...", which would be sorted as a number.
    body = "[...document.querySelectorAll('table.sort')].find(table => !table.tBodies[0].innerText.includes('50%'))"
    order = f"[...{body}.tBodies[0].rows].map(row => row.cells[0].textContent)"
    before = page.evaluate(order)
    page.evaluate(f"{body}.tHead.querySelector('button').click()")
    assert page.evaluate(order) == sorted(before, key=str.casefold), "a click on a header sorts by its column"
    if pictures:
        picture = "[...document.images].find(image => image.offsetWidth)"  # a phone hides some columns
        side = f"{picture}.getBoundingClientRect().width"
        small, _, large = (page.evaluate(what) for what in (side, f"{picture}.focus()", side))
        assert large > 3 * small, "a click enlarges a picture"
    assert [url for url in requests if not url.startswith("data:")] == [address] and not messages
    context.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return served.two_colours(tmp_path_factory.mktemp("served"))


SCRIPT = "<img src=x>"  # if the page interpreted it as HTML, it would request the picture
DROP = """([files, where]) => {
  const data = new DataTransfer();
  for (const [name, text] of files)
    data.items.add(new File([Uint8Array.from(atob(text), c => c.charCodeAt(0))], name));
  const event = { dataTransfer: data, bubbles: true, cancelable: true };
  for (const kind of ["dragover", "drop"]) document.querySelector(where).dispatchEvent(new DragEvent(kind, event));
}"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write photographs of three colours, a damaged one and a large one."""
    root = tmp_path_factory.mktemp("photos")
    for colour, name in enumerate(("red.jpg", "green.png", "blue.png", "blue 2.webp")):
        served.photo(min(colour, 2)).save(root / name)
    (root / "broken.jpg").write_bytes(b"no photograph")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (400, 400, 3), dtype=np.uint8)).save(root / "large.png")
    return root


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1300])
def test_learner_is_taught_and_downloaded_in_a_browser(folder, files, browser, tmp_path, monkeypatch, width, scheme):
    monkeypatch.setattr(app, "MOST_BYTES", 2**18)
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page, messages, requests = context.new_page(), [], []
    for event in ("console", "pageerror"):
        page.on(event, lambda what: messages.append(str(what)))
    asked = []
    page.on("dialog", lambda dialog: asked.append(dialog.message) or dialog.accept())
    page.on("request", lambda request: requests.append(request.url))

    def drop(*names, where):
        read = [(name, base64.b64encode((files / name).read_bytes()).decode()) for name in names]
        page.evaluate(DROP, [read, where])

    def read(place):
        """Return the classes and the probabilities of a card."""
        card = page.locator("article").nth(place)
        card.locator("form, .warn, .done").first.wait_for()
        return card.locator(".bar span").all_inner_texts(), [
            float(text[:-2]) for text in card.locator("b").all_inner_texts()
        ]

    def wait(text):
        page.get_by_text(text, exact=True).wait_for()

    with served.served(folder) as url:
        page.goto(url)
        wait("2 classes, classifier prototype")
        drop("red.jpg", "green.png", where="h1")
        page.locator("article").nth(1).wait_for()
        (first, shares), (second, _) = read(1), read(0)
        assert first == ["red", "green"] and second == ["green", "red"] and sum(shares) == pytest.approx(100, abs=0.2)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "files", "the keyboard reaches the field"
        page.set_input_files("#files", [files / "broken.jpg"])
        page.get_by_text("broken.jpg: image 1 cannot be read").wait_for()

        card = page.locator("article").nth(2)
        card.get_by_role("button", name="✓ red is correct").click()
        card.get_by_text("✓ Learned as red").wait_for()
        page.locator("#undo").click()
        wait("undone: 1 image of red")
        card.get_by_role("button", name="✓ red is correct").wait_for()
        assert card.locator("figcaption").inner_text() == "red.jpg"
        card = page.locator("article").nth(1)
        card.get_by_label("the correct class").fill("red")
        card.get_by_role("button", name="Teach this class").click()
        wait("learned: red")
        wait("Undo: 1 image of red")
        card.get_by_text("✓ Learned as red").wait_for()
        assert page.locator("#counts li").all_inner_texts() == ["red\n5", "green\n4"]
        assert page.get_by_text("The changes are not saved and will be lost when the server stops.").is_visible()
        page.fill("#name", SCRIPT)
        page.set_input_files("#examples", [files / "large.png"])
        page.get_by_role("button", name="Learn").click()
        page.get_by_text("MiB to send. Send at most 0.25 MiB at once.").wait_for()
        page.set_input_files("#examples", [files / "blue.png", files / "blue 2.webp"])
        page.get_by_role("button", name="Learn").click()
        wait("3 classes, classifier prototype")
        drop("blue.png", where="#drop")
        page.locator("article").nth(3).wait_for()
        assert read(0)[0][0] == SCRIPT
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
        faint = [(round(ratio, 2), text) for ratio, text in page.evaluate(CONTRASTS) if ratio < 4.5]
        assert not faint, "texts with too little contrast"

        with page.expect_download() as download:
            page.get_by_role("link", name="Download the learner").click()
        download.value.save_as(tmp_path / "learner.zip")
        for left in ("Undo: 1 image of red", "Undo"):
            page.locator("#undo").click()
            wait(left)
        wait("2 classes, classifier prototype")
        assert page.locator("#undo").is_disabled()
        assert len(messages) == 1 and "400 (Bad Request)" in messages[0], "only the broken file causes an error"
        assert asked and all(question.startswith("new class ") for question in asked)
        assert {address.startswith((url, "blob:", "data:")) for address in requests} == {True}
    context.close()
    with zipfile.ZipFile(tmp_path / "learner.zip") as archive:
        archive.extractall(tmp_path)
    learner = ClassIncrementalLearner.from_pretrained(tmp_path / "learner")
    assert learner.predict(Image.open(files / "blue.png")) == SCRIPT


def test_hundred_photographs_are_labelled_with_the_keyboard_only(folder, browser, tmp_path):
    heap, output = tmp_path / "heap", tmp_path / "taught"
    heap.mkdir()
    for number in range(100):
        served.photo(number % 3, 100 + number).save(heap / f"{('red', 'green', SCRIPT)[number % 3]}-{number}.png")
    page, messages = browser.new_page(viewport={"width": 1300, "height": 900}), []
    for event in ("console", "pageerror"):
        page.on(event, lambda what: messages.append(str(what)))
    asked = []
    page.on("dialog", lambda dialog: asked.append(dialog.message) or dialog.accept())
    with served.served(folder, output=output, photographs=heap) as url:
        page.goto(url)
        left, taken_back = 100, False
        while left:
            page.get_by_text(f"{100 - left} labelled, {left} left").wait_for()
            name = Path(page.locator("#photo").get_attribute("alt")).name.rpartition("-")[0]
            proposed = page.evaluate(
                "[...document.querySelectorAll('#proposed button')].map(b => b.childNodes[1].data)"
            )
            if name in proposed:
                page.keyboard.press(str(1 + proposed.index(name)))
            else:
                page.keyboard.type(name)
                page.keyboard.press("Enter")
            left -= 1
            if left == 50 and not taken_back:
                page.get_by_text("50 labelled, 50 left").wait_for()
                page.keyboard.press("Backspace")
                page.get_by_text("49 labelled, 51 left").wait_for()
                page.keyboard.press("Space")
                page.get_by_text("skipped").wait_for()
                left, taken_back = 51, True
                width = page.viewport_size
                page.set_viewport_size({"width": 390, "height": 844})
                box = page.locator("#undo").bounding_box()
                assert page.evaluate("scrollY") == 0 and 500 < box["y"] <= 844 - box["height"], (
                    "the button is within reach of a thumb"
                )
                page.set_viewport_size(width)
        page.get_by_text("All photographs are labelled.").wait_for()
        assert page.locator("#undo").is_visible() and not page.locator("#named").is_visible()
        page.get_by_text("Each label is kept at once in").wait_for()
        assert asked == [f"new class {SCRIPT!r}?"], "a new class is asked for once"
        assert page.evaluate("document.documentElement.scrollWidth") <= 1300 and not messages
    page.locator("#undo").click()
    page.get_by_text("The server does not answer.").wait_for()
    page.close()
    learned = ClassIncrementalLearner.from_pretrained(output)
    assert learned.class_names == ("red", "green", SCRIPT)
    assert sum(map(len, learned.state.known.learned.values())) == 108


def test_digits_that_begin_a_name_and_held_keys_label_nothing_by_mistake(folder, browser, tmp_path):
    heap = tmp_path / "heap"
    heap.mkdir()
    for number in range(6):
        served.photo(number % 3, 100 + number).save(heap / f"{number}.png")
    page = browser.new_page()
    page.on("dialog", lambda dialog: dialog.accept())
    with served.served(folder, output=tmp_path / "taught", photographs=heap) as url:
        page.goto(url)
        page.get_by_text("0 labelled, 6 left").wait_for()
        page.keyboard.type("2-way valve", delay=60)
        assert page.locator("#other").input_value() == "2-way valve"
        page.keyboard.press("Enter")
        page.get_by_text("1 labelled, 5 left").wait_for()
        page.keyboard.down("1")
        for _ in range(8):
            page.wait_for_timeout(60)
            page.keyboard.down("1")  # the browser repeats a key that is held down
        page.keyboard.up("1")
        page.get_by_text("2 labelled, 4 left").wait_for()
        page.wait_for_timeout(600)
        page.get_by_text("2 labelled, 4 left").wait_for()
        for _ in range(3):
            page.locator("#proposed button").nth(1).wait_for()
            before = page.locator("#state").inner_text()
            page.keyboard.press("2")
            page.wait_for_function("before => document.querySelector('#state').innerText !== before", arg=before)
        page.get_by_text("5 labelled, 1 left").wait_for()  # learned: now a class's name begins with a digit
        page.get_by_text("a digit begins a name").wait_for()
        page.keyboard.type("2")
        page.wait_for_timeout(600)
        assert page.locator("#other").input_value() == "2" and page.get_by_text("5 labelled, 1 left").is_visible()
        page.keyboard.press("Escape")
        page.locator("#counts button", has_text="2-way valve").click()
        page.locator("#to").fill("valve")
        page.locator("#edit button", has_text="Rename").click()
        page.locator("#said", has_text="2-way valve is now valve").wait_for()
        page.locator("#counts button", has_text="valve").click()
        page.locator("#forget").click()
        page.locator("#said", has_text="forgotten: valve").wait_for()
    page.close()
    assert ClassIncrementalLearner.from_pretrained(tmp_path / "taught").class_names == ("red", "green")


@pytest.mark.parametrize(
    "typed, labelled, words",
    [
        ("1", 1, ""),
        ("111111", 1, "1 was pressed 6 times, and counts for one photograph."),
        ("12", 0, "Nothing was labelled: 12 is no key. Press one digit for each photograph."),
        ("12-gauge", 0, ""),
    ],
)
def test_digits_typed_fast_label_one_photograph_or_none(folder, browser, tmp_path, typed, labelled, words):
    heap = tmp_path / "heap"
    heap.mkdir()
    for number in range(6):
        served.photo(number % 3, 100 + number).save(heap / f"{number}.png")
    page = browser.new_page()
    with served.served(folder, output=tmp_path / "taught", photographs=heap) as url:
        page.goto(url)
        page.get_by_text("0 labelled, 6 left").wait_for()
        page.keyboard.type(typed, delay=40)
        page.wait_for_timeout(800)
        page.get_by_text(f"{labelled} labelled, {6 - labelled} left").wait_for()
        assert page.locator("#other").input_value() == ("12-gauge" if typed == "12-gauge" else "")
        said = page.locator("#said").inner_text()
        assert said == words if words else "pressed" not in said
        if typed != "12-gauge":  # the next key is that of the next photograph
            page.keyboard.press("1")
            page.get_by_text(f"{labelled + 1} labelled, {5 - labelled} left").wait_for()
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_labels_are_seen_filtered_corrected_and_undone_on_the_page(folder, browser, tmp_path, width, scheme):
    heap, output = tmp_path / "heap", tmp_path / "taught"
    for number in range(12):
        site = heap / ("north", "south")[number % 2]
        site.mkdir(parents=True, exist_ok=True)
        served.photo(number % 2, 100 + number).save(site / f"{number}.png")
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page, messages = context.new_page(), []
    page.on("pageerror", lambda what: messages.append(str(what)))
    page.on("dialog", lambda dialog: dialog.accept())
    shown = page.locator("#rows article")

    def wait(count):
        page.wait_for_function("count => document.querySelectorAll('#rows article').length === count", arg=count)

    def correct(place, button, name=None):
        shown.nth(place).locator("button").first.click()
        if name is not None:
            page.locator("#right").fill(name)
        page.locator("#one").get_by_role("button", name=button).click()

    with served.served(folder, output=output, photographs=heap) as url:
        page.goto(url)
        page.get_by_text("0 photographs.").wait_for()
        for count in range(1, 7):
            page.locator("#proposed button").first.click()
            wait(count)
        name = shown.nth(0).locator("small").last.inner_text()
        correct(0, "It is this", "blue")
        page.locator("#said", has_text=": blue").wait_for()
        page.locator("#rows article:first-child b", has_text="blue").wait_for()
        assert name == shown.nth(0).locator("small").last.inner_text()
        correct(0, "None of these")
        page.locator("#rows article:first-child b", has_text="none of these").wait_for()
        correct(0, "Take the label away")
        wait(5)
        for words in ("none of these", "blue"):
            page.locator("#filters .undo").click()
            wait(6)
            page.locator("#rows article:first-child b", has_text=words).wait_for()
        page.select_option("#kind", "answers")
        wait(6)
        page.select_option("#order", "doubt")
        page.get_by_role("button", name="✓ right").first.click()
        wait(5)
        page.select_option("#kind", "all")
        wait(12)
        page.select_option("#site", "north")
        wait(6)
        page.select_option("#class", "blue")
        page.select_option("#site", "")
        wait(1)
        page.wait_for_function("[...document.querySelectorAll('#rows img')].every(i => i.complete && i.naturalWidth)")
        faint = [(round(ratio, 2), text) for ratio, text in page.evaluate(CONTRASTS) if ratio < 4.5]
        assert not faint and page.evaluate("document.documentElement.scrollWidth") <= width
    with served.served(output, output=output, photographs=heap) as url:  # the next day
        page.goto(url)
        wait(7)
        page.select_option("#class", "blue")
        wait(1)
        correct(0, "It is this", "green")
        wait(0)
        page.select_option("#class", "")
        wait(7)
        page.locator("#filters .undo").click()
        page.locator("#rows b", has_text="blue").wait_for()
    context.close()
    assert not messages
    assert ",blue," in (output / "labels.csv").read_text()


# The texts of elements that are wider than their container, and the width of the page.
TOO_WIDE = """() => [
  [...document.querySelectorAll("pre, pre code, table, .md-typeset__scrollwrap")]
    .filter(box => box.clientWidth && box.scrollWidth > box.clientWidth + 1).map(box => box.innerText.slice(0, 80)),
  document.documentElement.scrollWidth]"""


def build(site, theme=None):
    """Build the pages in strict mode, in which warnings are errors. With -q, mkdocs would count no warnings."""
    config = ROOT / "mkdocs.yml"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    command += ["--theme", theme] if theme else []
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return site


def test_docs_build_with_a_theme_of_mkdocs(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("latex2mathml")
    site = build(tmp_path / "site", theme="readthedocs")
    pages = sorted(ROOT.glob("docs/*.md"))
    assert len(pages) > 15
    assert all((site / page.stem / "index.html").is_file() or page.stem == "index" for page in pages)
    start = (site / "index.html").read_text(encoding="utf-8")
    assert '<img alt="How DuLBE splits a gradient' in start and (site / "images" / "method.svg").is_file()
    assert "<math" in (site / "method" / "index.html").read_text(encoding="utf-8")


def test_docs_do_not_scroll_sideways_at_1280_pixels(tmp_path, browser):
    pytest.importorskip("material")
    pytest.importorskip("latex2mathml")
    site = build(tmp_path / "site")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    for path in sorted(site.rglob("index.html")):
        page.goto(path.as_uri())
        wide, width = page.evaluate(TOO_WIDE)
        assert not wide and width <= 1280, f"{path.relative_to(site)}: {wide}, {width}"
    page.close()
