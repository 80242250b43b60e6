"""Test that commands that read labelled images have the same options for it, and that no message offers others."""

import ast
import re
import shlex
from pathlib import Path

import click
import pytest
from PIL import Image

import dulbe_peft
from dulbe_peft.photos.commands.main import commands, main

READERS = {  # the words of each command that reads labelled images, up to the images
    "run": "run --model {model} --output {out} --no-store",
    "learn": "learn {learner} --output {out} --no-store",
    "check": "check",
    "evaluate": "evaluate {learner} --no-store",
    "features": "features --model {model} --output {out}.parquet --no-store",
}


def options(name):
    """Return the option strings of a command."""
    command = commands.get_command(click.Context(commands), name)
    return {word for parameter in command.params for word in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


def picture(path, number):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.effect_noise((12, 12), 10 + number).convert("RGB").save(path)


def heap(root, classes=("a", "b"), count=4):
    """Write photographs into one folder; return their paths and labels."""
    rows = [(f"img/{name}{number}.png", name) for name in classes for number in range(count)]
    for number, (path, _) in enumerate(rows):
        picture(root / path, number + 100 * ("zero" in classes))
    return rows


def csv(root, header, rows):
    (root / "t.csv").write_text("\n".join([header, *(",".join(row) for row in rows)]))
    return ["--labels", str(root / "t.csv")]


def folders(root, *places):
    for number, place in enumerate(places):
        picture(root / "data" / f"{place}.png", number)
    return ["--data", str(root / "data")]


def camtrap(root):
    rows = heap(root)
    (root / "media.csv").write_text("mediaID,filePath\n" + "\n".join(f"{n},{row[0]}" for n, row in enumerate(rows)))
    seen = [f"{n},animal,{row[1]},machine" for n, row in enumerate(rows)]
    header = "mediaID,observationType,scientificName,classificationMethod\n"
    (root / "observations.csv").write_text(header + "\n".join(seen))
    return ["--data", str(root)]


@pytest.fixture(scope="module")
def learner(tmp_path_factory, tiny_model):
    root = tmp_path_factory.mktemp("learner")
    data = csv(root, "path,label", heap(root, ("zero", "one")))
    words = ["run", "--model", str(tiny_model), "--output", str(root / "out"), "--classifiers", "prototype"]
    assert main([*words, *data, "--no-store", "--no-progress"]) == 0
    return root / "out"


FAULTS = {
    "two columns of labels": lambda root: csv(root, "path,class,category", [(*row, "x") for row in heap(root)]),
    "no column of labels": lambda root: csv(root, "path,one,two", [(*row, "x") for row in heap(root)]),
    "no column of paths": lambda root: csv(root, "one,two,three", [(row[1], "x", "y") for row in heap(root)]),
    "two columns of paths": lambda root: csv(
        root, "photo,image,label", [(row[0], f"x{row[0]}", "y") for row in heap(root)]
    ),
    "keywords": lambda root: csv(root, "SourceFile,Subject", heap(root)),
    "a list of labels": lambda root: csv(root, "path,label", [(path, f'"[{name}]"') for path, name in heap(root)]),
    "guesses": lambda root: csv(root, "path,predicted,novelty", [(*row, "0") for row in heap(root)]),
    "a URL": lambda root: csv(root, "path,label", [(f"https://x.org/{path}", name) for path, name in heap(root)]),
    "a machine's labels": camtrap,
    "other splits": lambda root: folders(root, *(f"seg_{s}/{c}/1" for s in ("train", "test") for c in "ab")),
    "a flat folder": lambda root: folders(root, "1", "2"),
    "a table in the folder": lambda root: ["--data", str(root)] * bool(csv(root, "path,label", heap(root))),
    "one class of all": lambda root: folders(root, "images/1", "images/2"),
    "no group": lambda root: [*csv(root, "path,label", heap(root)), "--group", "(zebra)"],
    "no such column": lambda root: [*csv(root, "path,label", heap(root)), "--group", "zebra"],
    "no time": lambda root: [*csv(root, "path,label", heap(root)), "--group-seconds", "5"],
    "numbers": lambda root: csv(root, "path,label", heap(root, ("0", "1"))),
    "a damaged photograph": lambda root: [*damaged(root), "--strict"],
    "damaged photographs": lambda root: damaged(root),
    "further columns": lambda root: csv(root, "path,label,camera", [(*row, "x") for row in heap(root)]),
    "taxa": lambda root: csv(root, "path,genus,species,common_name", [(*row, "x", "y") for row in heap(root)]),
}


def damaged(root):
    words = csv(root, "path,label", heap(root))
    (root / "img/a0.png").write_bytes(b"no picture")
    return words


@pytest.mark.plain("learn")
@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_messages_offer_only_options_that_the_command_has(
    fault, command, tiny_model, learner, tmp_path, capsys, monkeypatch
):
    """A sentence may name the options of another command beside that command."""
    monkeypatch.chdir(tmp_path)
    data = FAULTS[fault](tmp_path)
    words = shlex.split(READERS[command].format(model=tiny_model, learner=learner, out=tmp_path / "out"))
    if command == "check" and data[0] == "--data":
        data = data[1:]
    main([*words, *data])
    said = "".join(capsys.readouterr())
    assert "No such option" not in said
    for line in said.splitlines():
        for named, part in re.findall(r"(?:^|dulbe-peft ([a-z]+))(.*?)(?=dulbe-peft [a-z]|$)", line):
            others = [name for name in commands.lines if re.search(rf"\b{name}\b", part)] if not named else []
            allowed = set().union(*(options(name) for name in (named or command, *others)))
            assert {*re.findall(r"(?<![\w-])--[a-z][a-z-]+", part)} <= allowed, line


# The commands that call `claim`, which may offer to overwrite.
WRITERS = ("check", "suggest", "run", "report", "learn", "predict", "serve", "demo", "forget", "rename", "merge")
WRITERS += ("features", "export")
# Messages of shared modules, by a part of them, with options that not every command that reads images has. They are
# printed only by commands that have these options: by how they are called, or because they are of such a setting.
ELSEWHERE = {
    "--force uses it anyway": ("suggest", "run", "learn", "predict", "serve", "evaluate", "forget", "features"),
    "lower {}": ("run",),
    "is {}, but {} has learned nothing": ("suggest", "predict", "evaluate", "export"),
    "use only one of them, for example": ("run", "learn", "features"),
    "{}, such as {} (--again)": ("learn",),
    "has no test images; --test-fraction": ("run", "learn"),
    "keeping {} % of what this task changed": ("run",),
    "no class that is possible would be left": ("serve",),
    "there are no photographs to label": ("serve",),
    " --classifier {}": ("predict",),
    "--overwrite works only with a single process": WRITERS,
    "--overwrite would move {}": WRITERS,
    ", or --overwrite, which keeps it": WRITERS,
}


def texts_of(file):
    """Return the texts in a module, except docstrings that no command shows; {} stands for a value."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    inside, found = set(), []
    documented = (ast.FunctionDef, ast.ClassDef, *([] if file.stem in commands.lines else [ast.Module]))
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            inside.add(id(node.body[0].value))
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            found.append("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values))
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [*found, *(node.value for node in constants if id(node) not in inside)]


def test_every_text_offers_options_of_its_command_or_of_a_command_that_it_names():
    """The texts and the options are taken from the code, so that a new message or option is checked, too."""
    has, package = {name: options(name) for name in commands.lines}, Path(dulbe_peft.__file__).parent
    common, checked = set.intersection(*(has[name] for name in READERS)), 0
    wrong = list[str]()
    for file in sorted(package.rglob("*.py")):
        own = file.stem.replace("_", "-") if file.parent.name == "commands" else ""
        for line in (line for text in texts_of(file) for line in text.splitlines()):
            offered = {*re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", line)}
            if offered <= {line} or "var(" in line or "/--no-{}" in line or not offered:
                continue  # the name of an option alone, or no option
            named = [name for name in has if re.search(rf"\b{name}\b", line)]
            others = [names for part, names in ELSEWHERE.items() if part in line]
            allowed = set(has.get(own, common)).union(*(has[name] for name in named))
            allowed |= set.intersection(*(has[name] for name in others[0])) if others else set()
            wrong += [f"{file.name}: {line}"] * (not offered <= allowed)
            checked += 1
    assert not wrong, "\n".join(wrong)
    assert checked > 100


def test_options_of_data_are_those_of_every_command_that_reads_it():
    common = set.intersection(*map(options, READERS))
    assert common >= {"--labels", "--label-column", "--path-column", "--group", "--group-seconds", "--one-label"}
    assert common >= {"--vocabulary", "--machine-labels", "--leave-out", "--class-names", "--strict", "--image-column"}


@pytest.mark.parametrize("command", READERS)
def test_table_of_another_program_is_read_by_every_command(command, tiny_model, learner, tmp_path, capsys):
    rows = [(path, "zero" if name == "a" else "one", f"box {path[-5]}") for path, name in heap(tmp_path)]
    data = [*csv(tmp_path, "Foto,Art,Kiste", rows), "--label-column", "Art", "--group", "Kiste"]
    words = READERS[command].format(model=tiny_model, learner=learner, out=tmp_path / "out")
    assert main([*shlex.split(words), *data]) == 0, capsys.readouterr().err
    said = "".join(capsys.readouterr())
    assert "the paths are read from the column 'Foto', the labels from the column 'Art'" in said
    assert "4 groups of images" in said
    if command == "features":
        following = shlex.split(re.search("next: dulbe-peft (.*)", said)[1])
        assert "--label-column" not in following and following[following.index("--group") + 1] == "group"
        assert main([*following, "--dry-run"]) == 0 and "4 groups of images" in capsys.readouterr().out
