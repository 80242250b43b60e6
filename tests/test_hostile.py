"""What a careless or hostile user does to files: none of somebody's is lost, and each error names what is wrong."""

from __future__ import annotations

import os
import unicodedata
from dataclasses import replace

import pytest
from lives import images_of, learned, tiny_learner
from PIL import Image

from dulbe_peft import ImageFolder
from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.commands.outputs import check_outputs
from dulbe_peft.commands.settings import read_yaml
from dulbe_peft.comparison.compare import compare
from dulbe_peft.comparison.plan import read_plan
from dulbe_peft.files import read_lines
from dulbe_peft.report import write_figures
from dulbe_peft.report.collect import _examples
from dulbe_peft.streams.folders import Found
from dulbe_peft.streams.gallery import Gallery
from dulbe_peft.streams.names import check_class_names
from dulbe_peft.streams.tasks import Task

STREAM = "streams: {s: {model: demo, data: demo-digits, increment: 5}}\n"
METHOD = "methods: {frozen: {strategy: frozen}}\n"


@pytest.mark.parametrize(
    "name, beside, message",
    [
        ("data.npz", None, "is a file that the command reads"),
        ("link.npz", None, "is a file that the command reads"),
        ("config.json", None, "choose another name"),
        ("sources.json", None, "choose another name"),
        ("predictions.csv", "results.json", "choose another name"),
        ("classifier.json", "manifest.json", "choose another name"),
        ("new.json", "learner.json", "holds a saved learner"),
    ],
)
def test_an_output_is_no_file_that_is_read_or_kept(tmp_path, name, beside, message):
    (tmp_path / "data.npz").write_bytes(b"images")
    (tmp_path / "link.npz").symlink_to("data.npz")
    for other in (beside, name if name != "new.json" else None):
        if other and not (tmp_path / other).exists():
            (tmp_path / other).write_text("{}")
    with pytest.raises((ValueError, FileExistsError), match=message):
        check_outputs(
            ("--x", str(tmp_path / name), tmp_path.joinpath(name).suffix), inputs=[str(tmp_path / "data.npz")]
        )


def test_two_flags_do_not_write_one_file(tmp_path):
    for path in ("-", str(tmp_path / "answers")):
        with pytest.raises(ValueError, match="--csv and --json both name"):
            check_outputs(("--csv", path, ".csv"), ("--json", path, ".json"))
    check_outputs(("--csv", str(tmp_path / "predictions.csv"), ".csv"), ("--json", None, ".json"))


def test_a_run_replaces_no_file_of_others(tmp_path):
    (tmp_path / "results.json").write_text("mine")
    with pytest.raises(FileExistsError, match=r"results\.json is there"):
        tiny_learner().run([Task(images_of(0, 1), None, ("a", "b"))], tmp_path)
    assert (tmp_path / "results.json").read_text() == "mine"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "out"
    images = images_of(0, 1)
    tiny_learner().run([Task(images, images, ("a", "b"))], folder)
    return folder


def test_a_report_writes_through_a_link_and_replaces_no_picture_of_others(run, tmp_path):
    from dulbe_peft.cli import main

    page, link = tmp_path / "page.html", tmp_path / "link.html"
    page.write_text("old")
    link.symlink_to(page)
    assert main(["report", str(run), str(run / ".." / "out"), "--output", str(link)]) == 0
    assert link.is_symlink() and "1 run" not in page.read_text() and page.read_text() != "old"
    assert "Several runs" not in page.read_text()
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "depths.png").write_text("mine")
    with pytest.raises(FileExistsError, match=r"depths\.png"):
        write_figures(run, pictures)
    with pytest.raises(FileExistsError, match="saved learner"):
        write_figures(run, run / "task-001" / "x")
    files = write_figures(run, tmp_path / "figures")
    assert write_figures(run, tmp_path / "figures") == files


def test_a_picture_that_is_a_link_is_not_shown(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "private.jpg")
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "a.jpg").symlink_to(tmp_path / "private.jpg")
    (folder / "index.json").write_text('{"hits": [{"file": "a.jpg"}]}')
    assert _examples(folder) == {"hits": []}


def test_a_comparison_stays_out_of_learners_and_of_what_it_measures_with(tmp_path):
    (tmp_path / "learner.json").write_text("{}")
    (tmp_path / "c.yaml").write_text(STREAM + METHOD)
    with pytest.raises(FileExistsError, match="saved learner"):
        compare(read_plan(tmp_path / "c.yaml"), tmp_path / "new")
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        compare(read_plan(tmp_path / "c.yaml"), tmp_path.parent / "elsewhere", jobs=0)
    (tmp_path / "learner.json").unlink()
    (tmp_path / "c.yaml").write_text(STREAM.replace("increment: 5", f"retention: {tmp_path}") + METHOD)
    with pytest.raises(ValueError, match="lies in --data"):
        compare(read_plan(tmp_path / "c.yaml"), tmp_path / "new")


@pytest.mark.parametrize(
    "text, message",
    [
        (STREAM + METHOD + "reference: {method: frozen}", "reference must name method, classifier"),
        (STREAM + "methods: {m: {retention: photos}}", "'retention'"),
        (STREAM.replace("increment: 5", "choose: {epochs: [1]}") + METHOD, "'choose'"),
        (STREAM + "methods: {m: {choose: {learning_rate: [1e-4, 0.0001]}}}", "must list different values"),
    ],
)
def test_mistakes_in_a_comparison_s_file_are_named(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_plan(tmp_path / "c.yaml")


@pytest.mark.parametrize("kind", ["lists", "merges"])
def test_aliases_cannot_stand_for_everything(tmp_path, kind):
    first, line = ("[x]", "[{}]") if kind == "lists" else ("{y: 1}", "{{<<: [{}]}}")
    rows = [f"x0: &x0 {first}", *(f"x{n}: &x{n} " + line.format(",".join([f"*x{n - 1}"] * 9)) for n in range(1, 20))]
    (tmp_path / "c.yaml").write_text("\n".join(rows))
    with pytest.raises(ValueError, match="more than 100000 entries"):
        read_yaml(tmp_path / "c.yaml", "configuration")
    (tmp_path / "c.yaml").write_text("x: &x {y: 1}\nz: {<<: *x}\nself: &s [*s]\n")
    assert read_yaml(tmp_path / "c.yaml", "configuration")["z"] == {"y": 1}


def test_links_to_themselves_and_deep_folders_are_stepped_over(tmp_path):
    (tmp_path / "cat").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "cat" / "1.png")
    (tmp_path / "cat" / "loop.png").symlink_to("loop.png")
    (tmp_path / "loop").symlink_to("loop")
    deep = tmp_path / "cat" / os.path.join(*["d"] * 150)
    deep.mkdir(parents=True)
    found = Found(tmp_path / "cat")
    assert found.images == ["1.png", "loop.png"]
    assert "more than 100 folders deep" in {why for _, why in found.left_out}
    assert ImageFolder(tmp_path).class_names == ("cat",)


def test_a_name_that_is_not_utf8_is_left_out(tmp_path):
    (tmp_path / "cat").mkdir()
    for name in (b"1.png", b"\xff.png"):
        with open(os.fsencode(tmp_path / "cat") + b"/" + name, "wb") as file:
            Image.new("RGB", (4, 4)).save(file, "PNG")
    photos = ImageFolder(tmp_path)
    assert len(photos) == 1 and photos.left_out == [("\udcff.png", "the name is not UTF-8")]
    assert len(Found(tmp_path / "cat").images) == 2  # to predict, any name will do


def test_the_mark_of_an_editor_is_no_part_of_a_name(tmp_path):
    path = tmp_path / "names.txt"
    path.write_text("cat\n\ndog \n", encoding="utf-8-sig")
    assert read_lines(path) == ["cat", "dog"]
    path.write_text("cat", encoding="utf-16")
    with pytest.raises(ValueError, match=r"names\.txt is no text in UTF-8"):
        read_lines(path)


def test_names_of_the_same_letters_are_equal():
    one, other = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    assert one != other
    with pytest.raises(ValueError, match="names must differ"):
        check_class_names([one, other])
    with pytest.raises(ValueError, match="was seen already"):
        check_class_names([other], seen=[one])


def test_no_more_processes_than_batches(monkeypatch):
    learner = learned(tiny_learner(), 1)
    started = []
    monkeypatch.setattr(
        "dulbe_peft.encoder.DataLoader", lambda *_, num_workers, **__: started.append(num_workers) or []
    )
    learner.encoder.args = replace(learner.args, num_workers=1000)
    list(learner.encoder.batches(learner.encoder.images(images_of(0, 1)), ""))
    assert started == [1]


def test_layers_pattern_of_another_type_is_named():
    with pytest.raises(TypeError, match="layers_pattern"):
        DualModeLoraConfig(layers_pattern=3, layers_to_transform=[0])


def test_an_empty_path_is_not_the_current_folder():
    with pytest.raises(ValueError, match="the path of an image is ''"):
        Gallery(["", "photo.jpg"])
