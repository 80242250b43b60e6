"""Complete the pages while they are built, with tables of settings, parts of the README, formulas and links."""

from __future__ import annotations

import ast
import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
TABLES = ROOT / "research" / "benchmarks" / "tables.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of all tables, which stands beside the benchmarks."""
    files.append(File.generated(config, TABLES.name, abs_src_path=str(TABLES)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `{{ settings module.Class }}` by a table of fields and `{{ readme part }}` by a part of the README."""
    markdown = markdown.replace("](../research/benchmarks/tables.md", "](tables.md")
    markdown = re.sub(r"^\{\{ readme ([\w-]+) \}\}$", lambda m: _readme(m[1]), markdown, flags=re.MULTILINE)
    return re.sub(r"^\{\{ settings ([\w.]+)\.(\w+) \}\}$", lambda m: _table(m[1], m[2]), markdown, flags=re.MULTILINE)


def on_page_content(content: str, **_: Any) -> str:
    """Convert formulas to MathML, which needs no script, and link every [`Name`] of a docstring."""
    for pattern, display in ((r"\\\((.+?)\\\)", "inline"), (r"\\\[(.+?)\\\]", "block")):
        inside = re.compile(rf'(class="arithmatex">)\s*{pattern}\s*(?=<)', re.DOTALL)
        content = inside.sub(lambda m, display=display: m[1] + convert(html.unescape(m[2]), display=display), content)
    return re.sub(r"\[<code>(\w+)</code>\]", lambda m: _reference(m[1]), content)


def _reference(name: str) -> str:
    """A link to a name that a page of the reference describes, or to a public name of the package."""
    pages = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "reference").glob("*.md")))
    described = re.search(rf"^::: ([\w.]+\.{name})$", pages, flags=re.MULTILINE)
    return f'<autoref identifier="{described[1] if described else f"dulbe_peft.{name}"}"><code>{name}</code></autoref>'


def _readme(part: str) -> str:
    """Return what stands between two comments of the README, with links that work from a page of the docs."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"<!-- {part} -->\n(.*?)<!-- /{part} -->", text, flags=re.DOTALL)
    if found is None:
        raise ValueError(f"README.md has no part {part!r}")
    return found[1].replace("](docs/", "](")


def _table(module: str, name: str) -> str:
    tree = ast.parse((ROOT / "dulbe_peft" / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    cls = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    rows = ["| name | type | default | |", "|---|---|---|---|"]
    for node in cls.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.value, ast.Call):
            continue
        default, help_text = node.value.args[:2]
        cells = [ast.unparse(node.target), ast.unparse(node.annotation), ast.unparse(default)]
        text = ast.literal_eval(help_text)
        rows.append("| " + " | ".join(f"`{cell.replace(' | ', ' or ')}`" for cell in cells) + f" | {text} |")
    return "\n".join(rows)
