"""Generate the parts of the pages that code makes: `python docs/generate.py`, or some of these by name.

tables    the tables of results, between markers: `research.benchmarks.table`
frontier  `docs/images/frontier.svg`, from the stored cells: `research.benchmarks.curves`
outputs   what the code of a page prints, between markers; each page is run from the top to its last marker:

          <!-- output -->
          <!-- end of output -->

notebooks what the cells of `examples/training.ipynb` print
settings  the tables of settings, between `<!-- settings: module.Class -->` and `<!-- end of settings -->`
programs  the blocks whose title is the path of an example
readme    parts of the README, between `<!-- readme: PART -->` and `<!-- end of readme -->`
reference signatures and docstrings, between `<!-- reference: NAME -->` and `<!-- end of reference -->`
llms      `llms.txt`, the list of pages for language models
report, label, comparison
          the screenshots, with Playwright and Chromium; the last one takes minutes

MkDocs calls the functions `on_...` while it builds the pages.
"""

from __future__ import annotations

import ast
import html
import json
import os
import re
import runpy
import shlex
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from threading import Thread
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TABLES = ROOT / "research" / "benchmarks" / "tables.md"
PAGES = ("README.md", "docs/photographs.md")  # those with outputs
NOTEBOOK = "examples/training.ipynb"
WIDTH = 108  # of a line, in characters: what a page shows at 1280 pixels without scrolling
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
MARKED = re.compile(r"(<!-- output -->\n).*?(<!-- end of output -->)", re.DOTALL)
SETTINGS = re.compile(r"(<!-- settings: ([\w.]+)\.(\w+) -->).*?(<!-- end of settings -->)", re.DOTALL)
README = re.compile(r"(<!-- readme: ([\w-]+) -->).*?(<!-- end of readme -->)", re.DOTALL)
PROGRAM = re.compile(r'^(```python title="(examples/[\w./]+)"\n).*?^```\n', re.DOTALL | re.MULTILINE)
SCREEN = {"width": 1280, "height": 820}
# From the heading that contains a word to the next heading.
BELOW = """word => {
  const headings = [...document.querySelectorAll("h2")];
  const first = headings.findIndex(heading => heading.innerText.toLowerCase().includes(word));
  const top = headings[first].getBoundingClientRect();
  const end = headings[first + 1].getBoundingClientRect().top;
  return { x: top.left - 16, y: top.top + scrollY - 16, width: 1080, height: end - top.top - 8 };
}"""


def read(path: str | Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def write(path: str | Path, text: str) -> None:
    (ROOT / path).write_text(text, encoding="utf-8")


def on_files(files: Any, config: Any) -> Any:
    """Add the page of all tables, which stands beside the benchmarks."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, TABLES.name, abs_src_path=str(TABLES)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Link the page of all tables where the site has it; name other files of the repository, which it has not."""
    markdown = markdown.replace("](../research/benchmarks/tables.md", "](tables.md")
    return re.sub(r"\[([^\]]+)\]\(\.\./((?:examples|research|tests)/[^)]*)\)", r"\1 (`\2`)", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Convert formulas to MathML, which needs no script."""
    from latex2mathml.converter import convert

    for pattern, display in ((r"\\\((.+?)\\\)", "inline"), (r"\\\[(.+?)\\\]", "block")):
        inside = re.compile(rf'(class="arithmatex">)\s*{pattern}\s*(?=<)', re.DOTALL)
        content = inside.sub(lambda m, display=display: m[1] + convert(html.unescape(m[2]), display=display), content)
    return content


def readme_part(part: str) -> str:
    """Return what stands between two comments of the README, with links that work from a page of the docs."""
    found = re.search(rf"<!-- {part} -->\n(.*?)<!-- /{part} -->", read("README.md"), flags=re.DOTALL)
    if found is None:
        raise ValueError(f"README.md has no part {part!r}")
    text = re.sub(r"\]\((?!docs/|[a-z]+:|#)", "](../", found[1])
    return text.replace("](docs/", "](").strip()


def with_readme(text: str) -> str:
    """Return a page with the parts of the README between its markers, as they are now."""
    return README.sub(lambda m: f"{m[1]}\n\n{readme_part(m[2])}\n\n{m[3]}", text)


def with_settings(text: str) -> str:
    """Return a page with the table of each class of settings between its markers."""
    return SETTINGS.sub(lambda m: f"{m[1]}\n\n{fields(m[2], m[3])}\n\n{m[4]}", text)


def with_programs(text: str) -> str:
    """Return a page with each program that the title of a block names, as it is now."""
    return PROGRAM.sub(lambda m: f"{m[1]}{read(m[2])}```\n", text)


def fields(module: str, name: str) -> str:
    """Return the table of a class of settings, which is read and not imported."""
    tree = ast.parse(read(f"dulbe_peft/{module.replace('.', '/')}.py"))
    cls = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    rows = ["| name | type | default | |", "|---|---|---|---|"]
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
            default, text = node.value.args[:2]
            cells = [ast.unparse(part).replace(" | ", " or ") for part in (node.target, node.annotation, default)]
            rows.append("| " + " | ".join(f"`{cell}`" for cell in cells) + f" | {ast.literal_eval(text)} |")
    return "\n".join(rows)


def with_outputs(text: str, folder: str | Path) -> str:
    """Run the blocks of a page in `folder`, and return the page with what they print between its markers."""
    namespace: dict = {"__name__": "__main__"}
    parts, end = [], 0
    for marked in MARKED.finditer(text):
        between = text[end : marked.start()]
        printed = [run(language, code, namespace, folder) for language, code in BLOCK.findall(between)]
        parts += [between, marked[1], "\n```text\n", printed[-1], "```\n\n", marked[2]]
        end = marked.end()
    return "".join(parts) + text[end:]


def with_cell_outputs(notebook: dict[str, Any], folder: str | Path) -> dict[str, Any]:
    """Run the cells of code of a notebook in `folder`, and return the notebook with what they print."""
    namespace: dict = {"__name__": "__main__"}
    cells, number = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            printed = run("python", "".join(cell["source"]), namespace, folder).splitlines(keepends=True)
            outputs = [{"name": "stdout", "output_type": "stream", "text": printed}] if printed else []
            cell = {**cell, "execution_count": number, "outputs": outputs}
        cells.append(cell)
    return {**notebook, "cells": cells}


def run(language: str, code: str, namespace: dict, folder: str | Path) -> str:
    """Run one block in `folder` and return what it prints; of commands also what they say on standard error.

    Lines that install something are not run, and lines that a `Trainer` of transformers logs are not returned.
    """
    from dulbe_peft.photos.commands.main import main

    printed = StringIO()
    said = StringIO() if language == "python" else printed
    with chdir(folder), redirect_stdout(printed), redirect_stderr(said):
        if language == "python":
            exec(compile(code, "a block of the page", "exec"), namespace)
        else:
            for line in code.replace("\\\n", " ").splitlines():
                program, *arguments = shlex.split(line, comments=True)
                if program == "pip":
                    continue
                status = main(arguments) if program == "dulbe-peft" else f"the program is {program!r}"
                if status:
                    raise RuntimeError(f"{line}\n{status}\n{printed.getvalue()}")
    shown = [line for line in printed.getvalue().splitlines() if not line.startswith("{'")]
    lines = [textwrap.wrap(line, WIDTH, subsequent_indent="  ") or [""] for line in shown]
    return "".join(part + "\n" for parts in lines for part in parts)


def llms() -> str:
    """Return the title, what the library is, and every page of `mkdocs.yml` with its first sentence."""
    config = yaml.load(read("mkdocs.yml"), yaml.BaseLoader)
    lines = ["# dulbe_peft", "", f"> {config['site_description']}.", ""]
    lines += ['`pip install -c constraints.txt ".[photos]"` installs it; `dulbe-peft --help` lists the commands.', ""]
    for section in config["nav"]:
        ((title, pages),) = section.items()
        named = ((heading(path) if name in ("Start", "Reference") else name, path) for name, path in pages_of(pages))
        listed = (f"- [{name}](docs/{path}): {first_sentence(DOCS / path)}" for name, path in named)
        lines += [f"## {title}", "", *(line.removesuffix(": ") for line in listed), ""]
    return "\n".join(lines)


def pages_of(entry: Any) -> Iterator[tuple[str, str]]:
    """Yield the (title, path) of every page below an entry of the navigation."""
    for page in entry if isinstance(entry, list) else [{"Start": entry}]:
        ((name, path),) = page.items()
        if isinstance(path, list):
            yield from pages_of(path)
        else:
            yield name, path


def heading(path: str) -> str:
    return read(DOCS / path).partition("\n")[0].removeprefix("# ")


def first_sentence(path: Path) -> str:
    """Return the first sentence of a page's text, or nothing if the page has no text of its own."""
    for part in re.sub(r"```.*?```|<!--.*?-->", "", read(path), flags=re.DOTALL).split("\n\n"):
        words = " ".join(part.split())
        if words and words[0] not in "#|-!:{<":
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", words).replace("**", "")
            return re.sub(r":$", ".", re.split(r"(?<=[.:])\s", words)[0])
    return ""


def picture_report(page: Any, work: Path) -> None:
    """The top of the demo's report, and its most confident mistakes."""
    run("bash", "dulbe-peft demo --output dulbe-demo", {}, work)
    page.goto((work / "dulbe-demo" / "report.html").as_uri())
    take(page, "report")
    take(page, "report-mistakes", clip=page.evaluate(BELOW, "mistakes"), full_page=True)


def picture_label(page: Any, work: Path) -> None:
    """The page of `serve`, which asks for the label of a photograph, after the commands of `photographs.md`."""
    from PIL import Image
    from sklearn.datasets import load_sample_image

    from dulbe_peft import ClassIncrementalLearner
    from dulbe_peft.photos.serving import make_server

    with_outputs(read("docs/photographs.md"), work)
    heap = work / "heap"
    heap.mkdir()
    photograph = Image.fromarray(load_sample_image("china.jpg"))
    for number, corner in enumerate(range(80, 480, 80)):
        photograph.crop((corner, 60, corner + 160, 220)).save(heap / f"{number}.jpg")
    learner = ClassIncrementalLearner.from_pretrained("out-february")
    with make_server(learner, port=0, output="taught", photographs="heap") as server:
        Thread(target=server.serve_forever, daemon=True).start()
        page.goto(f"http://127.0.0.1:{server.server_address[1]}")
        page.wait_for_selector("#label img")
        page.wait_for_load_state("networkidle")
        take(page, "label")
        server.shutdown()


def picture_comparison(page: Any, work: Path) -> None:
    """The top of the page of a comparison."""
    from dulbe_peft.photos.commands.main import main
    from research.__main__ import commands

    main(["compare", str(ROOT / "examples" / "comparisons" / "digits.yaml"), "--output", "digits"], commands)
    main(["report", "digits"], commands)
    page.goto((work / "digits" / "report.html").as_uri())
    take(page, "comparison")


def take(page: Any, name: str, **options: Any) -> None:
    """Write a screenshot with 256 colours, which makes the file a third as large."""
    from PIL import Image

    path = DOCS / "images" / f"{name}.png"
    page.screenshot(path=path, **options)
    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)


def generate_tables() -> None:
    from research.benchmarks import common, table

    for page in table.PAGES:
        write(page, table.page(read(page), common.RESULTS))


def generate_frontier() -> None:
    from research.benchmarks import common, curves

    for name in curves.FIGURES:
        write(f"docs/images/{name}.svg", curves.figure(common.RESULTS, name))


@contextmanager
def new_folder() -> Iterator[str]:
    """Yield a folder to run a page in, with a feature store of its own, on a processor as plain as in the tests."""
    import torch

    torch.cpu.get_capabilities = dict  # so that images are encoded in float32 on every processor
    with tempfile.TemporaryDirectory() as work:
        os.environ["DULBE_PEFT_STORE"] = f"{work}/features.sqlite"
        yield work


def generate_outputs() -> None:
    for page in PAGES:
        with new_folder() as work:
            write(page, with_outputs(read(page), work))


def generate_notebooks() -> None:
    with new_folder() as work:
        notebook = with_cell_outputs(json.loads(read(NOTEBOOK)), work)
        write(NOTEBOOK, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def generate_settings() -> None:
    write("docs/settings.md", with_settings(read("docs/settings.md")))


def generate_programs() -> None:
    for page in sorted(DOCS.glob("*.md")):
        write(page, with_programs(read(page)))


def generate_readme() -> None:
    for page in sorted(DOCS.glob("*.md")):
        write(page, with_readme(read(page)))


def generate_reference() -> None:
    with_reference = runpy.run_path(str(DOCS / "describe.py"))["with_reference"]
    for page in sorted(DOCS.glob("reference/*.md")):
        write(page, with_reference(read(page)))


def generate_llms() -> None:
    write("llms.txt", llms())


def screenshot(picture: str) -> None:
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("DULBE_PEFT_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as work, sync_playwright() as started, chdir(work):
        os.environ["DULBE_PEFT_STORE"] = f"{work}/features.sqlite"
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        globals()[f"picture_{picture}"](browser.new_page(viewport=SCREEN), Path(work))
        browser.close()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # where `research` is
    texts = {
        "tables": generate_tables,
        "frontier": generate_frontier,
        "outputs": generate_outputs,
        "notebooks": generate_notebooks,
        "settings": generate_settings,
        "programs": generate_programs,
        "readme": generate_readme,
        "reference": generate_reference,
        "llms": generate_llms,
    }
    for part in sys.argv[1:] or [*texts, "report", "label", "comparison"]:
        texts[part]() if part in texts else screenshot(part)
