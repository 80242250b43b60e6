"""What the pages get while they are built: tables of settings, parts of the README, formulas, links."""

from __future__ import annotations

import ast
import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

ROOT = Path(__file__).parents[1]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put a table of fields for `{{ settings module.Class }}`, and a part of the README for `{{ readme part }}`."""
    markdown = re.sub(r"^\{\{ readme ([\w-]+) \}\}$", lambda m: _readme(m[1]), markdown, flags=re.MULTILINE)
    return re.sub(r"^\{\{ settings ([\w.]+)\.(\w+) \}\}$", lambda m: _table(m[1], m[2]), markdown, flags=re.MULTILINE)


def on_page_content(content: str, **_: Any) -> str:
    """Formulas that need no script, and a link for every [`Name`] of a docstring."""
    for pattern, display in ((r"\\\((.+?)\\\)", "inline"), (r"\\\[(.+?)\\\]", "block")):
        inside = re.compile(rf'(class="arithmatex">)\s*{pattern}\s*(?=<)', re.DOTALL)
        content = inside.sub(lambda m, display=display: m[1] + convert(html.unescape(m[2]), display=display), content)
    return re.sub(r"\[<code>(\w+)</code>\]", r'<autoref identifier="dulbe_peft.\1"><code>\1</code></autoref>', content)


def _readme(part: str) -> str:
    """What stands between two comments of the README, with its links as a page of the docs needs them."""
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
