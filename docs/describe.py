"""Describe public names as Markdown, from their signatures and docstrings; `generate.py` writes it into the pages."""

from __future__ import annotations

import ast
import copy
import inspect
import pkgutil
import re
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

from dulbe_peft.metrics.answers import Predict

REFERENCE = re.compile(r"(<!-- reference: ([\w.]+) -->).*?(<!-- end of reference -->)", re.DOTALL)
PAGES = Path(__file__).parent / "reference"
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Reference|Example):$")
PACKAGES = ("dulbe_peft", "research")
WIDTH = 108  # of a line of code, in characters
OVERLOADS = {"ClassIncrementalLearner.predict": Predict}  # methods whose overloads stand in a protocol


def with_reference(text: str) -> str:
    """Return a page with what is between its markers written anew."""
    places = {
        name.rpartition(".")[2]: f"{path.name}#{name.rpartition('.')[2].lower()}"
        for path in sorted(PAGES.glob("*.md"))
        for _, name, _ in REFERENCE.findall(path.read_text(encoding="utf-8"))
    }
    return REFERENCE.sub(lambda m: f"{m[1]}\n\n{linked(described(m[2]), places)}\n\n{m[3]}", text)


def linked(text: str, places: dict[str, str]) -> str:
    """Return the text with every [`Name`] as a link to its description, or as code if no page describes it."""
    return re.sub(
        r"\[`(\w+)`\](?!\()", lambda m: f"[`{m[1]}`]({places[m[1]]})" if m[1] in places else f"`{m[1]}`", text
    )


def described(name: str) -> str:
    """Return the heading, signature and docstring of a name, and of its public methods or a module's functions."""
    thing = pkgutil.resolve_name(name)
    if inspect.ismodule(thing):
        members = [value for key, value in vars(thing).items() if not key.startswith("_")]
        own = [value for value in members if getattr(value, "__module__", "") == name and callable(value)]
        return "\n\n".join(entry("##", value.__name__, value) for value in own if inspect.getdoc(value))
    parts = [entry("##", name.rpartition(".")[2], thing)]
    if inspect.isclass(thing):
        for key, value in members_of(thing, name).items():
            parts.append(entry("###", key, value))
    return "\n\n".join(parts)


@cache
def described_things() -> list[tuple[str, Any]]:
    """Return everything that a page describes, with its name."""
    pages = "".join(path.read_text(encoding="utf-8") for path in PAGES.glob("*.md"))
    return [(name, pkgutil.resolve_name(name)) for _, name, _ in REFERENCE.findall(pages)]


@cache
def parsed(thing: Any) -> Any:
    """Return the parsed source of a class or function."""
    return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]


def members_of(cls: type, name: str) -> dict[str, Any]:
    """Return the public methods and properties of a class, also those of its bases that no page describes."""
    bases = [
        each
        for other, each in described_things()
        if other != name and inspect.isclass(each) and each in cls.__mro__[1:]
    ]
    elsewhere = {owner for each in bases for owner in each.__mro__}
    found: dict[str, Any] = {}
    for owner in cls.__mro__:
        if owner.__module__.partition(".")[0] in PACKAGES and (owner is cls or owner not in elsewhere):
            for key, value in vars(owner).items():
                value = getattr(value, "__func__", value)
                value = (
                    inspect.unwrap(value.fget if isinstance(value, property) else value) if value is not None else 0
                )
                if not key.startswith("_") and inspect.isfunction(value) and value.__doc__:
                    found.setdefault(key, value)
    return found


def entry(level: str, name: str, thing: Any) -> str:
    signature = f'```python title="signature"\n{signature_of(name, thing)}\n```'
    if protocol := OVERLOADS.get(getattr(thing, "__qualname__", "")):
        signature = signature.replace(" -> Any", "") + f"\n\n{forms(protocol)}"
    return f"{level} `{name}`\n\n{signature}\n\n{markdown(inspect.getdoc(thing) or '', foreign(thing))}".rstrip()


def forms(protocol: Any) -> str:
    """Return a table of the types that a call returns, by its options, for one image and for several."""
    rows: dict[str, dict[str, str]] = {}
    for node in (each for each in parsed(protocol).body if isinstance(each, ast.FunctionDef)):
        options = [f"`{arg.arg}`" for arg, default in zip(node.args.kwonlyargs, node.args.kw_defaults) if not default]
        if len(options) == len(node.args.kwonlyargs):  # the last one stands for all combinations
            returned = ast.unparse(node.returns).replace("Scored", "tuple[str, float]").replace(" | ", " or ")
            rows.setdefault(", ".join(options) or "none", {})[ast.unparse(node.args.args[1].annotation)] = returned
    lines = ["| options | for one image | for several |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {key} | `{row['One']}` | `{row['object']}` |" for key, row in rows.items())])


def foreign(thing: Any) -> set[str]:
    """Return the fields that a class has from another library, whose versions differ."""
    if not inspect.isclass(thing):
        return set()
    by_others = [cls for cls in thing.__mro__ if cls.__module__.partition(".")[0] not in PACKAGES]
    ours = [cls for cls in thing.__mro__ if cls not in by_others]
    return {key for cls in by_others for key in vars(cls).get("__annotations__", {})} - {
        key for cls in ours for key in inspect.get_annotations(cls)
    }


def signature_of(name: str, thing: Any) -> str:
    """Return the signature as the source has it, so that it is the same with every version of Python."""
    kind = "class" if inspect.isclass(thing) else "def"
    returns, fields = "", []
    if kind == "class" and "__init__" in vars(thing) and hasattr(thing, "__dataclass_fields__"):
        fields = [typed(thing, key) for key in inspect.signature(thing).parameters if key not in foreign(thing)]
        arguments = ", ".join(fields)
    elif kind == "class" and "__init__" not in vars(thing):
        return f"class {name}: ..."
    else:
        function = inspect.unwrap(thing.__init__ if kind == "class" else thing)
        try:
            node = copy.deepcopy(parsed(function))
        except (OSError, TypeError):
            return f"class {name}: ..."
        if node.args.args and node.args.args[0].arg in ("self", "cls"):
            node.args.args = node.args.args[1:]
        arguments = ast.unparse(node.args)
        returns = f" -> {ast.unparse(node.returns)}" if node.returns and kind == "def" else ""
    line = f"def {name}({arguments}){returns}: ..."
    if len(line) > WIDTH:
        parts = [f"{each}," for each in fields]  # a field a line
        parts = parts or textwrap.wrap(arguments, WIDTH - 4, break_long_words=False, break_on_hyphens=False)
        line = f"def {name}(\n" + "\n".join(f"    {part}" for part in parts) + f"\n){returns}: ..."
    return line


def typed(cls: type, field: str) -> str:
    """Return a field with its type and default as the source has them; the limits of values stand in Args."""
    for owner in cls.__mro__:
        if owner.__module__.partition(".")[0] in PACKAGES and field in inspect.get_annotations(owner):
            body = parsed(owner).body
            node = next(each for each in body if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == field)
            kind, default = node.annotation, node.value
            if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Annotated":
                kind = kind.slice.elts[0]
            if isinstance(default, ast.Call):  # `setting(default, help)` or `dataclasses.field(default=...)`
                given = {each.arg: each.value for each in default.keywords}
                made = given.get("default_factory")
                default = default.args[0] if default.args else given.get("default", made and ast.Call(made, [], []))
            return f"{field}: {ast.unparse(kind)}" + (f" = {ast.unparse(default)}" if default else "")
    return field


def markdown(doc: str, left_out: set[str]) -> str:
    """Return a docstring as Markdown: Args, Attributes and Raises become lists."""
    parts, section, body = [], "", []
    for line in [*doc.splitlines(), "Reference:"]:
        found = SECTION.match(line)
        ended = section and line[:1].strip() and not found  # a section's lines are indented
        if not found and not ended:
            body.append(line)
            continue
        text = textwrap.dedent("\n".join(body)).strip()
        if section == "Example":
            parts.append(f"**Example**\n\n```pycon\n{text}\n```")
        elif section in ("Args", "Attributes", "Raises"):
            items = re.split(r"\n(?=\S)", text)
            rows = [re.sub(r"^(\*{0,2}[\w.]+):\s*", r"`\1`: ", " ".join(item.split())) for item in items]
            rows = [row for row in rows if row.partition(":")[0].strip("`") not in left_out]
            parts.append(f"**{section}**\n\n" + "\n".join(f"- {row}" for row in rows))
        elif text:
            parts.append(f"**{section}**\n\n{text}" if section else text)
        section, body = (found[1], []) if found else ("", [line])
    return "\n\n".join(parts)
