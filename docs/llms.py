"""Write `llms.txt`, the list of pages for language models, from the documentation: `python docs/llms.py`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parent
ROOT = DOCS.parent


def llms() -> str:
    """Return the title, what the library is, and every page of `mkdocs.yml` with its first sentence."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    what = readme.split("<!-- first-screen -->")[1].strip().split("\n\n")[0].replace("\n", " ")
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), yaml.BaseLoader)["nav"]
    lines = ["# dulbe_peft", "", f"> {what}", ""]
    lines += [
        '`pip install -c constraints.txt ".[photos]"` installs it; `dulbe-peft --help` lists the commands.',
        "",
    ]
    for section in nav:
        ((title, pages),) = section.items()
        lines += [f"## {title}", ""]
        for name, path in pages_of(pages):
            lines.append(f"- [{name}](docs/{path}): {first_sentence(DOCS / path)}".removesuffix(": "))
        lines.append("")
    return "\n".join(lines)


def pages_of(entry: Any) -> Iterator[tuple[str, str]]:
    """Yield the (title, path) of every page below an entry of the navigation."""
    for page in entry if isinstance(entry, list) else [{"Start": entry}]:
        ((name, path),) = page.items()
        if isinstance(path, list):
            yield from pages_of(path)
        else:
            yield name, path


def first_sentence(path: Path) -> str:
    """Return the first sentence of a page's text, or nothing if the page has no text of its own."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for part in text.split("\n\n"):
        words = " ".join(part.split())
        if words and words[0] not in "#|-!:{<":
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", words).replace("**", "")
            return re.sub(r":$", ".", re.split(r"(?<=[.:])\s", words)[0])
    return ""


if __name__ == "__main__":
    (ROOT / "llms.txt").write_text(llms(), encoding="utf-8")
