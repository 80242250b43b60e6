"""Test that images which belong together are found, held out together, and carried to the tasks."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lives import content
from PIL import ExifTags, Image
from small_runs import call, opened

from dulbe_peft.data.images import labelled_images
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.metrics.evaluation import read_predictions
from dulbe_peft.photos.data.source import DataSource
from dulbe_peft.photos.data.splits import hold_out
from dulbe_peft.photos.report.advice import about_data
from dulbe_peft.photos.report.run_folder import read_run
from dulbe_peft.photos.report.run_page import write_report
from dulbe_peft.photos.report.shares import Share
from dulbe_peft.photos.runs.run_settings import StreamSettings
from dulbe_peft.photos.runs.setup import open_source, stream_tasks

CLASSES = ("ant", "bee", "cat")


def photo(path: Path, number: int, taken: str | None = None, fraction: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 255, (12, 12, 3), dtype=np.uint8)
    exif = Image.Exif()
    if taken is not None:
        exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.DateTimeOriginal] = taken
        exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.SubsecTimeOriginal] = fraction
    Image.fromarray(pixels).save(path, exif=exif)


@pytest.fixture
def items(tmp_path):
    """Return a folder with five items of each class, in a folder each, and four frames of each item."""
    for number in range(60):
        label, item, frame = number // 20, number // 4 % 5, number % 4
        photo(tmp_path / "items" / CLASSES[label] / f"item {item}" / f"{frame}.jpg", number)
    return tmp_path / "items"


def group_of(images) -> dict[str, int]:
    return {images.item_name(row): int(images.groups[row]) for row in range(len(images))}


def sizes(images) -> list[int]:
    return sorted(np.unique(images.groups, return_counts=True)[1].tolist())


@pytest.mark.parametrize("group", ["folder", r"(item \d)", r"(.*)/[^/]*$"])
def test_group_is_held_out_with_all_of_its_images(items, group):
    train, test, inventory = opened(items, test_fraction=0.3, group=group)
    assert len(test) and not set(train.groups) & set(test.groups)
    assert set(np.unique(train.labels)) == {0, 1, 2}, "every class keeps training images"
    several = group == r"(item \d)"  # the groups have images of all classes
    assert sizes(train) + sizes(test) == [12] * 5 if several else [4] * 15
    assert any(line.startswith("5 groups" if several else "15 groups") for line in inventory.notes)
    assert not any("in training and test" in line for line in inventory.notes)
    plain, _, _ = opened(items, test_fraction=0.3)
    assert plain.groups is None
    for part in (train.at([3, 0]), train.select(["cat", "ant"])):
        assert {name: group_of(train)[name] for name in group_of(part)} == group_of(part), "groups follow their images"


def test_groups_come_from_a_column_of_a_table(items):
    files = sorted(items.glob("*/*/*.jpg"))
    rows = []
    for number, file in enumerate(files):
        rows.append(f"{file.relative_to(items)},{file.parts[-3]},{file.stem},{'' if number else 'N/A'}")
    table = items / "labels.csv"
    table.write_text("\n".join(["path,label,camera,empty", *rows]))
    train, _, inventory = opened(table, group="camera")
    assert sizes(train) == [15] * 4
    assert "further columns, which --group can name: 'camera', 'empty'" in str(inventory.notes)
    table.write_text(table.read_text().replace("0.jpg,ant,0", "0.jpg,ant,"))
    train, _, inventory = opened(table, group="camera")
    assert sizes(train) == [1] * 5 + [10] + [15] * 3 and "5 images without a group" in str(inventory.notes)
    with pytest.raises(ValueError, match="--group is 'empty', but no image has a group: the value is missing"):
        opened(table, group="empty")
    with pytest.raises(ValueError, match="expected a column of the data .*'camera'"):
        opened(table, group="camra")
    train, _, _ = opened(table, group="folder")
    assert sizes(train) == [4] * 15, "a table's files have folders, too"


def test_bursts_are_divided_by_time_and_by_group(tmp_path):
    times = ["10:00:00", "10:00:01", "10:00:02", "10:00:59", "11:00:00", None]
    for number, time in enumerate(times * 2):
        taken = None if time is None else f"2026:05:01 {time}"
        photo(tmp_path / "heap" / CLASSES[number // 6] / f"{'AB'[number % 2]}{number}.jpg", number, taken, "50")
    photo(tmp_path / "timeless" / "ant" / "1.jpg", 1)
    train, _, inventory = opened(tmp_path / "heap", group_seconds=1)
    assert sizes(train) == [1, 1, 2, 2, 6] and "2 images without a group" in str(inventory.notes)
    assert sizes(opened(tmp_path / "heap", group_seconds=0.5)[0]) == [1, 1, 2, 2, 2, 2, 2]
    assert sizes(opened(tmp_path / "heap", group_seconds=1.5)[0]) == [1, 1, 2, 2, 6]
    assert sizes(opened(tmp_path / "heap", group_seconds=1.5, group="/([AB])")[0]) == [1, 1, 2, 2, 2, 2, 2]
    assert sizes(opened(tmp_path / "heap", group_seconds=1e6)[0]) == [1, 1, 10]
    with pytest.raises(ValueError, match="photographs do not say when they were taken"):
        opened(tmp_path / "timeless", group_seconds=1)


def test_bursts_are_those_of_one_camera_and_are_named_by_date(tmp_path):
    """Two cameras fire in the same minute; a burst of one camera may show two classes."""
    for number in range(12):
        folder = tmp_path / "cams" / CLASSES[number % 2] / f"site{number // 6}"
        photo(folder / f"{number}.jpg", number, f"2026:05:01 10:00:{number % 6:02d}")
    train, _, inventory = opened(tmp_path / "cams", group_seconds=1)
    assert sizes(train) == [6, 6] and len({*train.groups[:3]}) == 1
    assert {*inventory.group_names.values()} == {f"site{n} at 2026-05-01 10:00:00" for n in (0, 1)}
    assert not any("longer than" in note or "holds" in note for note in inventory.notes)
    for number in range(40):
        photo(tmp_path / "scans" / CLASSES[number // 20] / f"{number}.jpg", number, f"2026:05:01 10:{number:02d}:00")
    _, _, inventory = opened(tmp_path / "scans", group_seconds=60)
    name = "'at 2026-05-01 10:00:00'"
    assert f"the group {name} holds 40 of 40 images: is it really one item or event?" in inventory.notes
    longer = (
        f"1 group much longer than --group-seconds 60, such as {name} with 2340 seconds: if its photographs do not "
    )
    assert f"{longer}show the same, give fewer seconds" in inventory.notes
    rows = [f"{number}.jpg,x{number % 2},cam{number % 2}" for number in range(4)]
    for number in range(4):
        photo(tmp_path / f"{number}.jpg", number, "2026:05:01 10:00:00")
    (tmp_path / "labels.csv").write_text("\n".join(["path,label,deploymentID", *rows]))
    assert sizes(opened(tmp_path / "labels.csv", group_seconds=60)[0]) == [2, 2]


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ("(", "is no regular expression"),
        ("item", "expected a column of the data .it has no columns., 'folder' for"),
        ("(plant)", "no image has a group: the value is missing, or no path matches"),
    ],
)
def test_group_that_fits_no_image_is_refused(items, group, words):
    with pytest.raises(ValueError, match=words):
        opened(items, group=group)


def test_groups_in_both_splits_and_classes_of_one_group_are_reported(tmp_path):
    places = ("train/ant/x/1", "train/ant/x/2", "train/bee/y/1", "train/bee/z/1", "test/ant/x/3")
    for number, place in enumerate(places):
        photo(tmp_path / "data" / f"{place}.jpg", number)
    inventory = opened(tmp_path / "data", group="folder")[2]
    notes = " ".join(inventory.problems())
    assert "1 group in training and test images, such as 'ant/x', so the accuracy is too optimistic" in notes
    assert "all training images of 1 class are in one group, such as 'ant'" in notes
    assert "in one group" not in " ".join(inventory.problems(known=["ant"])), "further images of it were learned"


def test_group_of_several_classes_is_on_one_side():
    """The draws of two groups lie on different sides in most seeds, and the classes share one of them."""
    pairs = [(Image.new("RGB", (4, 4), (row, 0, 0)), row % 2) for row in range(8)]
    images = labelled_images(pairs).at(slice(None), class_names=("a", "b")).grouped([0, 0, 0, 1, 1, 0, 2, 2])
    held = 0
    for seed in range(20):
        try:
            train, test = hold_out(images, 0.4, seed)
        except ValueError:
            continue
        held += 1
        assert not set(train.groups) & set(test.groups) and set(train.labels) == {0, 1}
    assert held > 5
    with pytest.raises(ValueError, match="groups has 2 entries, but there are 8 images"):
        images.grouped([1, 2])


def test_sites_with_classes_of_their_own_can_be_held_out():
    """As in the example of Camtrap DP: each of four sites has a species that no other site has, and all are blank."""
    labels, sites = [], []
    for site in range(4):
        labels += [0] * 3 + [1 + site] * 2 + [5] * (site < 2)  # blank, the species of the site, one of two sites
        sites += [site] * (len(labels) - len(sites))
    pixels = np.random.default_rng(0).integers(0, 255, (len(labels), 4, 4, 3), dtype=np.uint8)
    pairs = [(Image.fromarray(row), label) for row, label in zip(pixels, labels, strict=True)]
    images = labelled_images(pairs).at(slice(None), class_names=tuple("abcdef")).grouped(sites)
    tested = set()
    for seed in range(20):
        train, test = hold_out(images, 0.3, seed)
        assert set(train.labels) == set(labels) and set(test.labels) <= {0, 5}
        for label in (0, 5):
            sides = [set(part.groups[part.labels == label]) for part in (train, test)]
            assert not set.intersection(*sides), "each class has each site on one side"
        tested |= {*test.labels.tolist()}
    assert tested == {0, 5}
    single = images.at(np.flatnonzero((images.labels > 0) & (images.labels < 5)))
    with pytest.raises(ValueError, match="no class has enough images, or enough groups to hold out"):
        hold_out(single, 0.3)


def test_times_of_a_table_come_before_those_of_the_photographs(tmp_path):
    """Camtrap DP and Timelapse have times; a photograph without one there has that of its EXIF."""
    times = ["2024-05-01T10:00:00Z", "2024-05-01T12:00:01+02:00", "2024-05-01 10:30:00", "", "?"]
    for number, taken in enumerate(["2026:05:01 10:00:00"] * 3 + ["2024:05:01 10:30:01", None]):
        photo(tmp_path / f"{number}.jpg", number, taken)
    rows = [f"{number}.jpg,{'ab'[number % 2]},{time}" for number, time in enumerate(times)]
    (tmp_path / "labels.csv").write_text("\n".join(["path,label,timestamp", *rows]))
    train, _, inventory = opened(tmp_path / "labels.csv", group_seconds=5)
    assert sizes(train) == [1, 2, 2] and "1 image without a group" in str(inventory.notes)
    assert train.groups[0] == train.groups[1] != train.groups[2] == train.groups[3]


def test_groups_reach_the_tasks_and_the_record_of_a_run(items, tmp_path, capsys):
    def tasks_of(group):
        source = DataSource(str(items), test_fraction=0.3, group=group)
        return stream_tasks(open_source(source), StreamSettings(increment=2))

    tasks = tasks_of("folder")
    assert [sizes(task.train) != [] for task in tasks] == [True, True]
    assert not {*tasks[0].train.groups} & {*tasks[0].test.groups, *tasks[1].train.groups}
    again = tasks_of("(item .)")
    assert again[0].train.fingerprint() != tasks[0].train.fingerprint(), "a run with other groups does not continue"
    command = [
        "run",
        "--model",
        demo_model_folder(),
        "--data",
        items,
        "--output",
        tmp_path / "out",
        "--group",
        "folder",
    ]
    assert call(*command, "--test-fraction", "0.3", "--classifiers", "prototype") == 0
    (entry,) = json.loads((tmp_path / "out" / "sources.json").read_text())["tasks"]
    assert entry["group"] == "folder" and DataSource.of(entry).open().train.groups is not None
    assert "15 groups of images" in capsys.readouterr().out
    assert call("evaluate", tmp_path / "out", "--data", items, "--group", "folder", "--with-learned") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["groups"]["num_groups"] == 15
    assert "where each of the 15 groups counts once: prototype" in captured.err
    assert call("evaluate", tmp_path / "out", "--data", items, "--group", "pot") == 2


@pytest.mark.slow
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "interrupted"])
def test_run_with_other_groups_than_before_is_refused_by_name(items, tiny_model, tmp_path, capsys, finished):
    out, named = tmp_path / "out", ["--group", "folder"]
    command = ["run", "--data", items, "--model", tiny_model, "--classifiers", "prototype"]
    ways = (([], named), (named, []), (named, ["--group", "(?:ant|bee)/(item .)/"]))
    for number, (first, then) in enumerate(ways):
        here = [*command, "--increment", "1", "--output", out / str(number)]
        assert call(*here, *first) == 0
        if not finished:
            shutil.rmtree(out / str(number) / "task-003")
        before = content(out / str(number))
        capsys.readouterr()
        assert call(*here, *then) == 2
        words = "give the same --group and --group-seconds, or choose another output folder"
        assert "belongs to another run: the training images of the finished tasks form" in (
            said := capsys.readouterr().err
        )
        assert words in said and content(out / str(number)) == before
    same = "([^/]+/item .)/[^/]+$"  # the same groups by other names
    assert call(*[*command, "--increment", "1", "--output", out / "1"], "--group", same) == 0


@pytest.mark.slow
def test_page_of_a_run_with_groups_counts_items_and_says_what_looks_alike(digit_folders, tmp_path):
    photos = digit_folders(3, 20, 0)
    for number, file in enumerate(sorted((photos / "train").rglob("*.png"))):
        folder = tmp_path / "photos" / file.parent.name / f"item{number % 5}"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder)
    words = ["run", "--data", tmp_path / "photos", "--model", demo_model_folder(), "--test-fraction", 0.4]
    words += ["--classifiers", "lda,bridge", "--device", "cpu", "--no-progress"]
    assert call(*words, "--output", tmp_path / "out", "--group", "folder") == 0
    newest = max((tmp_path / "out").glob("task-*"))
    rows = read_predictions(newest / "predictions.csv")
    items = {(Path(row.image).parent.parent.name, Path(row.image).parent.name): row.group for row in rows}
    assert len(items) == len({*items.values()}) and all(items.values()) and {*rows[0].others} >= {"bridge"}
    page = write_report(tmp_path / "out").read_text(encoding="utf-8")
    share = Share.of(rows)
    low, high = (f"{100 * end:.1f}" for end in share.interval)
    assert share.items == len(items) < share.images == len(rows)
    assert f"of {len(rows)} test images of {len(items)} items classified correctly" in page
    assert f"95 % interval {low} to {high})" in page and "many photographs look" not in page.lower()
    estimates = read_run(tmp_path / "out").results.estimates
    names = {row.true for row in rows} | {*estimates.classes}
    left = sum(name in estimates.classes and (name, f"item{n}") not in items for name in names for n in range(5))
    assert estimates.items == left > 0 and estimates.few_items, "of the classes that have several training items"
    assert call(*words, "--output", tmp_path / "plain") == 0
    said = "Many photographs look like one another; if they show the same items, give their groups (--group)"
    plain = read_run(tmp_path / "plain")
    assert plain.results.estimates.items == 0 and not plain.results.estimates.few_items
    assert (said in write_report(tmp_path / "plain").read_text(encoding="utf-8")) == plain.results.estimates.alike
    alike = plain.results.estimates.model_copy(update={"alike": True})
    run = replace(plain, results=plain.results.model_copy(update={"estimates": alike}))
    assert any(line.startswith(said) for line in about_data(run))
