"""Class names, and the prompts made from them."""

import ast
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path

NONE = "none of these"  # the prediction for images that belong to no class
# How people and programs write that an image has no class yet, as `class_key` returns it.
UNLABELLED = {"no label", "unlabeled", "unlabelled", "undefined", "not labeled", "not labelled", "unlabeled images"}
_QUOTES = " '\"`\u00ab\u00bb\u2018\u2019\u201a\u201c\u201d\u201e\u2039\u203a"
_LONGEST = 1000  # characters; text towers read fewer, and a tokenizer would need seconds for a million


def normalized(text: str) -> str:
    """Return a text in Unicode's form NFC, because operating systems encode accented letters differently."""
    return unicodedata.normalize("NFC", text)


def class_key(name: str) -> str:
    """Return a key by which spellings of one name are equal.

    It ignores case, extra blanks, enclosing quotation marks and invisible characters. Between letters or digits, `_`
    and `-` are blanks, and 1.0 is 1.
    """
    folded = unicodedata.normalize("NFKC", name).casefold()
    text = "".join(character for character in folded if unicodedata.category(character) != "Cf")
    text = re.sub(r"(?<=[^\W_])[-_](?=[^\W_])", " ", re.sub(r"^(\d+)\.0+$", r"\1", text.strip(_QUOTES)))
    return " ".join(text.split()) or name


def has_control_characters(name: str) -> bool:
    """Return whether a name contains characters such as a line break or a tab."""
    return any(unicodedata.category(character) == "Cc" for character in name)


def check_class_names(names: Iterable[str], seen: Collection[str] = ()) -> tuple[str, ...]:
    """Return normalized class names after a check that their keys differ from each other and from those of `seen`."""
    if isinstance(names, str):
        raise TypeError(f"class_names must be a sequence of strings, got the single string {names!r}")
    if isinstance(names, Set) or not isinstance(names, Iterable):
        raise TypeError(f"class_names must be a sequence of strings, got {names!r:.100}, which has no order")
    taken = {class_key(name): normalized(name) for name in seen}
    checked: dict[str, tuple[int, str]] = {}
    for position, name in enumerate(names):
        where = f"class_names[{position}]"
        if not isinstance(name, str):
            raise TypeError(f"{where} must be a string, got {name!r} of type {type(name).__name__}")
        if len(name) > _LONGEST:
            raise ValueError(f"{where} is {name!r:.60}... of {len(name)} characters; at most {_LONGEST} are allowed")
        if not name.strip():
            raise ValueError(f"{where} is {name!r}; a class name must not be blank")
        if has_control_characters(name):
            raise ValueError(f"{where} is {name!r}; a class name must not contain control characters")
        try:
            name.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"{where} is {name!r}, which cannot be written as UTF-8") from error
        name = normalized(str(name))  # turns NumPy's subclass of str into a plain str for JSON and pickle
        key = class_key(name)
        if key == NONE:
            raise ValueError(f"{where} is {name!r}, which is reserved for images of no class: rename the class")
        if key in checked:
            position, other = checked[key]
            spelt = f"both {name!r}" if name == other else f"{name!r} and {other!r}, two spellings of one name"
            raise ValueError(f"{where} and [{position}] are {spelt}; names must differ")
        if key in taken:
            spelt = "" if name == taken[key] else f" with the spelling {taken[key]!r}: use that spelling"
            raise ValueError(f"{where} is {name!r}, a class that was already seen{spelt}")
        checked[key] = len(checked), name
    if not checked:
        raise ValueError("class_names is empty; at least one class is needed")
    return tuple(name for _, name in checked.values())


def similar_names(names: Iterable[str], known: Sequence[str]) -> list[tuple[str, str]]:
    """Return the names that may be misspelt, each with the known name that is within two edits or a plural of it."""
    pairs = []
    for name in names:
        key = class_key(name)
        for other in known:
            close = class_key(other)
            plural = {key.removesuffix("es"), key.removesuffix("s")} & {close, f"{close}s", f"{close}es"}
            plural |= {close.removesuffix("es"), close.removesuffix("s")} & {key}
            numbered = re.sub(r"\d+", "", key) == re.sub(r"\d+", "", close)  # names of a series, such as class_7
            if (
                key != close
                and not numbered
                and (plural or _edits(key, close, 2) <= min(2, (min(len(key), len(close)) - 1) // 3))
            ):
                pairs.append((name, other))
                break
    return pairs


def _edits(a: str, b: str, most: int) -> int:
    """Return the number of letters to insert, delete or replace to turn `a` into `b`, or more than `most`."""
    if abs(len(a) - len(b)) > most:
        return most + 1
    row = list(range(len(b) + 1))
    for place, letter in enumerate(a, start=1):
        before, row[0] = row[0], place
        for column, other in enumerate(b, start=1):
            before, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, before + (letter != other))
    return row[-1]


def learned_name(name: str, known: Sequence[str], what: str) -> str:
    """Return the normalized name of a learned class; for any other, raise an error: "it cannot be `what`"."""
    name = normalized(name)
    if name not in known:
        from dulbe_peft.utils.specs import closest

        hint = closest(name, known)
        raise ValueError(f"class {name!r:.100} has not been learned, so it cannot be {what}{hint:.300}")
    return name


def check_rename(old: str, new: str, known: Sequence[str]) -> tuple[str, str]:
    """Return both names normalized, after a check that `old` is a learned class and `new` is another name."""
    old, (new,) = learned_name(old, known, "renamed"), check_class_names([new])
    if new not in known:
        check_class_names([new], [name for name in known if name != old])
    if new == old:
        raise ValueError(f"the class {old!r:.100} already has this name")
    return old, new


def format_prompts(name: str, templates: Iterable[str], style: str = "verbatim") -> list[str]:
    """Replace "{}" in each template by the class name; with the style "spaces", underscores become spaces."""
    shown = name.replace("_", " ") if style == "spaces" else name
    return [template.replace("{}", shown) for template in templates]


def check_class_texts(texts: Mapping[str, Sequence[str]], class_names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return normalized texts of each class, after a check that `texts` maps known class names to lists of texts."""
    if not isinstance(texts, Mapping):
        raise TypeError(f"class_texts must map class names to lists of texts, got a {type(texts).__name__}")
    checked = {}
    for given, several in texts.items():
        where, name = f"class_texts[{given!r:.100}]", normalized(str(given))
        if name not in class_names:
            raise ValueError(f"{where} belongs to no class here; the classes are {list(class_names)[:5]} ...")
        if isinstance(several, str) or not isinstance(several, Sequence) or not several:
            raise TypeError(f"{where} must be a list of one or more texts, got {several!r:.100}")
        for text in several:
            if not isinstance(text, str) or not text.strip():
                raise TypeError(f"{where} must contain texts that are not blank, got {text!r:.100}")
            if len(text) > _LONGEST:
                raise ValueError(f"{where} has a text of {len(text)} characters; at most {_LONGEST} are allowed")
        checked[name] = tuple(dict.fromkeys(map(normalized, several)))
    return checked


def names_from_file(old: Sequence[str], path: str | Path) -> tuple[str, ...]:
    """Return the new names of classes, as a text file gives them.

    Each line has the old name, a tab, blanks or a colon, and the new name; or the lines have only the new names, in
    the order of the classes. Classes whose names are all whole numbers, such as 0, 1, 2 and 10, are sorted as numbers.
    Lines may be numbered from 0 or 1 on, as in `0 cat`, and may be a list or dict of Python or JSON.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"the file of class names, {str(path)!r}, does not exist")
    names = _names_in(file, old)
    if isinstance(names, dict):
        absent = [name for name in old if name not in names]
        if absent:
            raise ValueError(f"{file} has no line for the class {absent[0]!r} ({len(absent)} such classes)")
        return check_class_names(names[name] for name in old)
    if len(names) != len(old):
        raise ValueError(f"{file} has {len(names)} names, but the data has {len(old)} classes")
    numbers = all(name.isdecimal() for name in old)
    order = sorted(range(len(old)), key=lambda place: int(old[place])) if numbers else range(len(old))
    return check_class_names(name for _, name in sorted(zip(order, names, strict=True)))


def _names_in(file: Path, old: Sequence[str]) -> dict[str, str] | list[str]:
    """Return old name -> new name, or the new names in their order."""
    from dulbe_peft.utils.files import read_lines  # here, because most users of this module read no files

    lines = read_lines(file)
    if any(re.match(r"\s*(\w+\s*=\s*)?[\[({]|\s*[rb]?(['\"]).*\2\s*,\s*$", line) for line in lines):
        return _from_python(file, "\n".join(lines))
    if any("\t" in line for line in lines):
        split = [(name.strip(), new.strip()) for name, _, new in (line.partition("\t") for line in lines)]
    else:
        split = [(name.rstrip(":.,)"), new) for name, _, new in (line.strip().partition(" ") for line in lines)]
    pairs = {normalized(name): new.strip() for name, new in split}
    if pairs.keys() >= {*old} or (any("\t" in line for line in lines) and not _numbered(split)):
        return pairs
    if _numbered(split):
        return [new.strip() for _, new in split]
    if all(re.fullmatch(r"n\d{8}", name) for name, _ in split):
        raise ValueError(f"{file} names classes such as {split[0][0]!r}, which the data does not have")
    commas = len(lines) > 1 and all(line.endswith(",") for line in lines[:-1])
    return [line.rstrip(",") if commas else line for line in lines]


def _numbered(split: Sequence[tuple[str, str]]) -> bool:
    """Return whether the lines are numbered without a gap from 0 or 1 on."""
    numbers = [int(number) if number.isdecimal() and new.strip() else -1 for number, new in split]
    return len(numbers) > 1 and numbers in ([*range(len(numbers))], [*range(1, len(numbers) + 1)])


def _from_python(file: Path, text: str) -> dict[str, str] | list[str]:
    """Return the names in a list or dict of Python or JSON, of which the brackets may be absent."""
    code = re.sub(r"^\s*\w+\s*=\s*", "", text).strip().rstrip(",")
    try:
        value = ast.literal_eval(code if code[0] in "[({" else f"[{code}]")
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"{file} looks like a list of Python, but is none: write one name per line") from error
    names = list(value.values() if isinstance(value, dict) else value)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"{file} has values that are not texts: write one name per line")
    return {normalized(str(name)): new for name, new in value.items()} if isinstance(value, dict) else names
