"""The pages as a site: they build with two themes, and at 1280 pixels nothing scrolls sideways in a browser."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")
pytest.importorskip("latex2mathml")

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow
# What is wider than its place, by its text, and the width of the page.
TOO_WIDE = """() => [
  [...document.querySelectorAll("pre, pre code, table, .md-typeset__scrollwrap")]
    .filter(box => box.clientWidth && box.scrollWidth > box.clientWidth + 1).map(box => box.innerText.slice(0, 80)),
  document.documentElement.scrollWidth]"""


def build(site, theme=None):
    """Build the pages in strict mode, where a warning is an error. With -q there would be no warnings to count."""
    config = ROOT / "mkdocs.yml"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    command += ["--theme", theme] if theme else []
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return site


def test_pages_build_with_a_theme_that_comes_with_mkdocs(tmp_path):
    site = build(tmp_path / "site", theme="readthedocs")
    pages = sorted(ROOT.glob("docs/*.md"))
    assert len(pages) > 15
    assert all((site / page.stem / "index.html").is_file() or page.stem == "index" for page in pages)
    start = (site / "index.html").read_text(encoding="utf-8")
    assert '<img alt="Each month brings photographs' in start and (site / "images" / "stream.svg").is_file()
    assert "<math" in (site / "method" / "index.html").read_text(encoding="utf-8")


def test_nothing_scrolls_sideways_at_1280_pixels(tmp_path):
    pytest.importorskip("material")
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium")
    site = build(tmp_path / "site")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        for path in sorted(site.rglob("index.html")):
            page.goto(path.as_uri())
            wide, width = page.evaluate(TOO_WIDE)
            assert not wide and width <= 1280, f"{path.relative_to(site)}: {wide}, {width}"
        browser.close()
