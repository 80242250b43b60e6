"""Test that the command which a command advises keeps the flags of the call, and can be given as it is printed."""

import shlex
from pathlib import Path

import pytest
from small_runs import MACHINE, parse

from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.photos.commands.main import commands, main

ONLY, GROUPS, NAMES = "only.txt", "groups.csv", "names.txt"
READING = ["--only", ONLY, "--sum-up", GROUPS]
NEXT = "next: dulbe-peft "
# A call, and the flags that the advised command must have and must not have.
CALLS = [
    (["predict", "out", "heap", "--json", "a.json", *READING, "--top-k", "2"], [*READING, "--top-k", "2"], ["--json"]),
    (["predict", "out", "heap", "--exiftool", "a.csv", "--coverage", "0.7"], ["--coverage", "0.7"], ["--exiftool"]),
    (["predict", "out", "heap", "--json", "b.json", "--reject", "0.3"], ["--reject", "0.3"], ["--json"]),
    (["predict", "out", "heap", "--csv", "a.csv", *READING], [], READING[::2]),
    (["evaluate", "out", "--data", "photos", "--split", "train", "--with-learned"], ["--device", "cpu"], ["--split"]),
    (["evaluate", "out", "--data", "photos", "--precision", "float32"], ["--no-progress"], ["--precision"]),
    (["suggest", "out", "heap", "--group", "folder", "--count", "3"], ["--group", "folder"], ["--count"]),
    (["suggest", "out", "heap", "--csv", "s.csv", "--group", "folder"], ["--group", "group"], ["--csv"]),
    (["suggest", "out", "heap", "--model", "MODEL", "--precision", "float32"], ["--precision", "float32"], []),
    (["check", "photos", "--leave-out", "one,two", "--train-split", "train"], ["--leave-out", "one,two"], []),
    (["check", "photos", "--page", "p.html", "--whole-images"], ["--whole-images"], ["--page"]),
    (["features", "--model", "MODEL", "--data", "photos", "--class-names", NAMES], ["--class-names", NAMES], []),
    (["features", "--model", "MODEL", "--data", "photos", "--class-names", NAMES, "--output", "f.parquet"], [], [
        "--class-names"
    ]),
    (["rename", "out", "one", "eins", "--output", "renamed", "--num-workers", "0"], ["--num-workers", "0"], []),
    (["export", "out", "exported", "--precision", "float32"], ["--device", "cpu"], ["--precision", "--format"]),
    (["run", "--model", "MODEL", "--data", "photos", "--output", "run", "--seed", "3"], [], ["--seed", "--device"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def place(digit_folders, tmp_path_factory):
    """A working folder with photographs, a learner, and the files that flags name."""
    folder = tmp_path_factory.mktemp("advice")
    with pytest.MonkeyPatch.context() as context:
        context.chdir(folder)
        Path("photos").symlink_to(digit_folders(4, 6, 2))
        for number, file in enumerate(sorted(Path("photos/test").rglob("*.png"))[:6]):
            target = Path(f"heap/{number // 2}/{number}.png")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
        Path(ONLY).write_text("one\ntwo\n")
        Path(GROUPS).write_text("class,group\none,odd\nthree,odd\n")
        Path(NAMES).write_text("".join(f"{name}\tdigit {name}\n" for name in ("one", "three", "two", "zero")))
        run = ["run", "--model", str(demo_model_folder()), "--data", "photos", "--output", "out", *MACHINE]
        assert main([*run, "--classifiers", "lda,bridge"]) == 0
    return folder


@pytest.mark.plain(
    "predict out heap --exiftool a.csv --coverage 0.7",
    "evaluate out --data photos --precision float32",
    "suggest out heap --group folder --count 3",
    "check photos --leave-out one,two --train-split train",
    "rename out one eins --output renamed --num-workers 0",
    "export out exported --precision float32",
)
@pytest.mark.parametrize(("call", "kept", "gone"), CALLS, ids=[shlex.join(call) for call, *_ in CALLS])
def test_advised_command_keeps_the_flags_of_the_call(call, kept, gone, place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    words = [str(demo_model_folder()) if word == "MODEL" else word for word in call]
    machine = MACHINE[:2] if words[0] == "check" else MACHINE
    assert main([*words, *machine]) == 0
    captured = capsys.readouterr()
    (line,) = (line for line in (captured.out + captured.err).splitlines() if line.startswith(NEXT))
    advised = shlex.split(line.removeprefix(NEXT))
    for flag, *value in (kept[at : at + 2] for at in range(0, len(kept), 2)):
        assert advised[advised.index(flag) :][: 1 + len(value)] == [flag, *value]
    assert not {*gone} & {*advised} and parse(advised)


def test_photographs_are_sorted_into_the_classes_that_the_table_had(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    assert main(["predict", "out", "heap", "--only", ONLY, "--json", "c.json", *MACHINE]) == 0
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith(NEXT))
    assert main(shlex.split(line.removeprefix(NEXT))) == 0
    assert {path.name for path in Path("sorted").iterdir() if path.is_dir()} <= {"one", "two"}


def test_every_command_that_can_follow_is_a_command():
    for file in Path(__file__).parents[3].glob("dulbe_peft/photos/commands/*.py"):
        for part in file.read_text(encoding="utf-8").split("next_command(")[1:]:
            name = part.lstrip().partition('"')[2].partition('"')[0] if part.lstrip().startswith('"') else "run"
            assert name in commands.lines, file
