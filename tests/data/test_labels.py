"""Test reading labels from tables of paths and labels, and from exiftool's keywords."""

import csv
import os
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image
from small_runs import opened

from dulbe_peft.data.digits import DIGITS
from dulbe_peft.data.readers import load_data
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.photos.commands.main import main
from dulbe_peft.photos.data.source import DataSource

MACHINE = ["--device", "cpu", "--no-progress"]
EXIFTOOL = shutil.which("exiftool")


def table(path, *rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return path


@pytest.fixture
def heap(digit_folders, tmp_path):
    """Write photographs with meaningless names into one folder; return path -> (digit, split)."""
    labels = {}
    (tmp_path / "heap").mkdir()
    for split in ("train", "test"):
        for name in DIGITS[:3]:
            for file in sorted((digit_folders(3, 4, 2) / split / name).iterdir()):
                target = tmp_path / "heap" / f"IMG_{len(labels):03d}.jpg"
                Image.open(file).convert("RGB").resize((64, 64)).save(target, quality=95)
                labels[f"heap/{target.name}"] = name, split
    return labels


def test_table_gives_labels_and_splits_of_images(heap, tmp_path, monkeypatch):
    rows = [[path, *facts] for path, facts in heap.items()]
    file = table(tmp_path / "labels.csv", ["path", "label", "split"], *rows, ["heap/none.jpg", "two", "val"])
    monkeypatch.chdir("/")  # paths are relative to the table, not to the working directory
    train, test, inventory = opened(file)
    for part, split in ((train, "train"), (test, "test")):
        names = {part.item_name(i): part.class_names[part.labels[i]] for i in range(len(part))}
        assert names == {str(tmp_path / path): label for path, (label, where) in heap.items() if where == split}
    assert [why for _, why in inventory.left_out] == ["the split 'val', which is neither trained nor tested on"]
    assert np.asarray(train[0]["image"]).shape == (64, 64, 3)
    assert DataSource(file).open_split("test")[0].class_names == test.class_names
    alone = table(tmp_path / "alone.csv", ["label", "path"], *([label, path] for path, (label, _) in heap.items()))
    train, test, _ = opened(alone, test_fraction=0.3)
    assert len(train) + len(test) == len(heap) and len(test)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [["number", "of"], ["1", "2"]],
            "has the columns .*expected path,label and maybe split, or SourceFile,Subject",
        ),
        (
            [["path", "predicted", "novelty"], ["a.jpg", "x", "0"]],
            "has predictions, in the column 'predicted', .* and rename the column to 'label'",
        ),
        ([["path", "label"], ["a.jpg", ""]], "has no row with a label in 'label'"),
        ([["path", "label"], ["", "x"]], "line 2 of .* has no path"),
        ([["path", "label"]], "names no image: it has only a header"),
        ([["path", "label", "split"], ["a.jpg", "x", ""]], "line 2 of .* has no split"),
        (
            [["path", "label"], ["a.jpg", "x"], ["./a.jpg", "y"]],
            "lists images twice: './a.jpg' is 'x' in line 2 and 'y' in line 3",
        ),
        ([["path", "label"], ["a.jpg"]], "line 2 of .* has 1 cells, expected 2"),
        ([["SourceFile", "Subject"], ["a.jpg", "x"]], "give a vocabulary, a file that lists the keywords"),
        ([["path", "label", "split"], ["a.jpg", "x", "val"]], "no split 'train'; its splits are \\['val'\\]"),
    ],
)
def test_error_says_what_a_table_lacks(tmp_path, rows, words):
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        opened(table(tmp_path / "labels.csv", *rows))


ROWS = [("img/a.jpg", "cat"), ("img/b.jpg", "cat"), ("img/c.jpg", "dog"), ("img/d.jpg", "dog")]


def csv_text(header, rows=ROWS, delimiter=",", end="\n"):
    return end.join(delimiter.join(row) for row in [header, *rows]) + end


def with_cells(*cells):
    return [(*row, cell) for row, cell in zip(ROWS, cells, strict=True)]


NAMED = ["path", "label"]
TABLES = {  # the content of the file, and part of the note about it
    "names of others": (csv_text(["image", "category"]), "the column 'image', the labels from the column 'category'"),
    "an id": (csv_text(["id", "target"], [(path[:-4], name) for path, name in ROWS]), "such as img/a to img/a.jpg"),
    "an id alone": (csv_text(NAMED, [(path[4:-4], name) for path, name in ROWS]), "such as a to img/a.jpg"),
    "the other column": (csv_text(["file_name", "what it is"]), "the labels from the column 'what it is'"),
    "semicolons": (csv_text(NAMED, delimiter=";"), ""),
    "tabs": (csv_text(NAMED, delimiter="\t"), ""),
    "blanks": (
        csv_text(NAMED, [(path, f' "{name}"' if place % 2 else name) for place, (path, name) in enumerate(ROWS)]),
        "",
    ),
    "bom and windows": (
        "\ufeff" + csv_text(NAMED, [(path.replace("/", "\\"), name) for path, name in ROWS], end="\r\n"),
        "",
    ),
    "a row twice": (csv_text(NAMED, [*ROWS, ROWS[0]]), "the row repeats an earlier one"),
    "no label": (csv_text(NAMED, [*ROWS, ("img/e.jpg", ""), ("img/f.jpg", "NaN")]), "no label in the table"),
    "one hot": (
        csv_text(
            ["image", "cat", "dog"], [(path, str(int(name == "cat")), f"{name == 'dog':.1f}") for path, name in ROWS]
        ),
        "the labels from the columns cat, dog",
    ),
    "a picture as text": (
        csv_text([*NAMED, "pixels"], with_cells(*["0" * 2**18] * 4)),
        "further columns, which --group can name: 'pixels'",
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_other_programs_are_read_with_a_note_about_guesses(tmp_path, name):
    content, note = TABLES[name]
    (tmp_path / "img").mkdir()
    for number, letter in enumerate("abcdef"):
        Image.new("RGB", (8, 8), (40 * number, 0, 0)).save(tmp_path / "img" / f"{letter}.jpg")
    (tmp_path / "labels.csv").write_bytes(content.encode())
    train, _, inventory = opened(tmp_path / "labels.csv")
    read = [(train.item_name(i), train.class_names[train.labels[i]]) for i in range(len(train))]
    assert read == [(str(tmp_path / path), label) for path, label in ROWS]
    assert not note or any(note in line for line in inventory.problems()), inventory.problems()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (csv_text([*NAMED, "label"], with_cells(*"abcd")), "has the column 'label' twice"),
        (
            csv_text(["path", "class", "category"], with_cells(*"abcd")),
            "'class' and 'category': choose .* by --label-column",
        ),
        (csv_text(NAMED, [("https://x.org/a.jpg", "cat")]), "has a URL, .*: download the images first"),
        (csv_text(NAMED, [("a.jpg", "cat|red"), ("b.jpg", "red|dog"), ("c.jpg", "dog|cat")]), "in one cell: an image"),
        (csv_text(NAMED, [("a.jpg", "['cat']")]), "in one cell: an image must have one class"),
        (
            csv_text(["path", "cat", "dog"], [("a.jpg", "1", "1"), ("b.jpg", "0", "1")]),
            "line 2 .*: an image must have one",
        ),
        (csv_text(NAMED, [*ROWS, *((path, "fox") for path, _ in ROWS)]), "'img/a.jpg' is 'cat' in line 2 and .*d.jpg"),
        (
            csv_text(NAMED, [("a.jpg", "Cat"), ("b.jpg", "cat")]),
            "'Cat' in line 2 and 'cat' in line 3, two spellings of one name",
        ),
    ],
)
def test_ambiguous_tables_are_refused(tmp_path, content, words):
    (tmp_path / "labels.csv").write_text(content)
    with pytest.raises(ValueError, match=words):
        opened(tmp_path / "labels.csv")


def test_label_column_can_be_chosen_and_column_is_valid_gives_the_split(tmp_path):
    (tmp_path / "labels.csv").write_text(
        csv_text(
            ["id", "path", "class", "is_valid", "category"],
            [("1", "a.jpg", "x", "False", "cat"), ("2", "b.jpg", "x", "True", "cat")],
        )
    )
    for letter in "ab":
        Image.new("RGB", (8, 8), "red" if letter == "a" else "blue").save(tmp_path / f"{letter}.jpg")
    train, test, inventory = opened(tmp_path / "labels.csv", label_column="category")
    assert train.class_names == ("cat",) and len(train) == len(test) == 1
    assert (
        "the test split is 'valid'" in inventory.format() and "--group can name: 'id', 'class'" in inventory.format()
    )
    assert opened(tmp_path / "labels.csv", label_column="class")[0].class_names == ("x",)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_hugging_face_image_folders_are_read(tmp_path, suffix):
    """Read `metadata.csv` or `.jsonl` with the column `file_name`, in each split or above the splits."""
    for split, letters in (("train", "abc"), ("validation", "de")):
        (tmp_path / split).mkdir()
        rows = [(f"{letter}.png", "cat" if letter in "ad" else "dog") for letter in letters]
        for number, (file, _) in enumerate(rows):
            Image.new("RGB", (8, 8), (9, 99, 50 * number)).save(tmp_path / split / file)
        text = "".join(f'{{"file_name": "{file}", "animal": "{label}"}}\n' for file, label in rows)
        (tmp_path / split / f"metadata.{suffix}").write_text(
            text if suffix == "jsonl" else csv_text(["file_name", "animal"], rows)
        )
    for _ in range(2):
        _, test, inventory = opened(tmp_path)
        assert inventory.counts == {"train": {"cat": 1, "dog": 2}, "validation": {"cat": 1, "dog": 1}}
        assert "the labels from the column 'animal'" in inventory.format() and len(test) == 2
        above = [
            (f"{split}/{file}", label)
            for split in ("train", "validation")
            for file, label in (
                [("a.png", "cat"), ("b.png", "dog"), ("c.png", "dog")]
                if split == "train"
                else [("d.png", "cat"), ("e.png", "dog")]
            )
        ]
        for split in ("train", "validation"):
            (tmp_path / split / f"metadata.{suffix}").unlink(missing_ok=True)
        (tmp_path / "metadata.csv").write_text(csv_text(["file_name", "animal"], above))


@pytest.mark.parametrize(
    ("header", "first", "second"),
    [
        (["SourceFile", "Keywords"], ["cat; sea"], ["dog"]),
        (["SourceFile", "XMP:Subject", "IPTC:Keywords"], ["sea", "cat"], ["dog", "dog"]),
        (["SourceFile", "HierarchicalSubject"], ["animals|cat, dulbe|dog"], ["animals|dog"]),
        (["File:SourceFile", "Keywords"], ["cat##sea"], ["sea##dog"]),
    ],
)
def test_keywords_of_every_kind_are_read(tmp_path, header, first, second):
    """Read IPTC and hierarchical keywords, with groups and other separators, and ignore predictions of `predict`."""
    (tmp_path / "words.txt").write_text("cat\ndog\n")
    rows = [["a.jpg", *first], ["b.jpg", *second]]
    images = load_data(table(tmp_path / "tags.csv", header, *rows), None, vocabulary=str(tmp_path / "words.txt"))
    assert [images.class_names[label] for label in images.labels] == ["cat", "dog"]


def test_half_filled_in_table_of_suggest_is_read(tmp_path):
    """Rows without a label are left out and counted; files whose names are not UTF-8 are read."""
    name = os.fsdecode(b"\xff.jpg")
    for file in ("a.jpg", "b.jpg", name):
        Image.new("RGB", (8, 8), "red").save(tmp_path / file)
    with (tmp_path / "labels.csv").open("w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(f"path,reason,label,novelty\na.jpg,unsure,cat,1\nb.jpg,unsure,,1\n{name},unsure,dog,1\n")
    train, _, inventory = opened(tmp_path / "labels.csv")
    assert len(train) == 2 and [why for _, why in inventory.left_out] == ["no label in the table"]


def test_keywords_in_the_vocabulary_become_labels(tmp_path):
    (tmp_path / "words.txt").write_text("cat\ndog\n")
    rows = [["SourceFile", "Subject"], ["a.jpg", "holiday, cat"], ["b.jpg", "dog"], ["c.jpg", "sea"], ["d.jpg", ""]]
    rows += [["e.jpg", "sea"], ["e.jpg.xmp", "dog, sea"]]
    images = load_data(table(tmp_path / "tags.csv", *rows), None, vocabulary=str(tmp_path / "words.txt"))
    names = [(os.path.basename(images.item_name(i)), images.class_names[images.labels[i]]) for i in range(len(images))]
    assert names == [("a.jpg", "cat"), ("b.jpg", "dog"), ("e.jpg", "dog")]
    assert [os.path.basename(path) for path, _ in images.left_out] == ["c.jpg", "d.jpg"]
    Image.new("RGB", (9, 9)).save(tmp_path / "f.png")
    for words, more, why in (
        ("cat\ndog\n", ["f.png", "dog, cat"], "f.png has the keywords 'dog' and 'cat', which are all classes"),
        ("cat\ndog\n", ["./f.png", "cat"], "has the keywords 'dog' and 'cat'"),  # beside its sidecar
        ("cat, grey\n", ["f.png", ""], "'cat, grey' of .* contains ', '"),
    ):
        (tmp_path / "words.txt").write_text(words)
        both = table(tmp_path / "both.csv", *rows, ["f.xmp", "dog"], more)
        with pytest.raises(ValueError, match=why):
            load_data(both, None, vocabulary=str(tmp_path / "words.txt"))


def run(*words):
    return main([*map(str, words), *MACHINE])


def test_run_and_learn_take_a_table(heap, tmp_path, capsys):
    rows = [[path, *facts] for path, facts in heap.items()]
    june = table(tmp_path / "june.csv", ["path", "label", "split"], *(row for row in rows if row[1] != "two"))
    model = ["--model", demo_model_folder(), "--classifiers", "lda"]
    assert run("run", "--labels", june, *model, "--output", tmp_path / "june") == 0
    july = table(tmp_path / "july.csv", ["path", "label", "split"], *(row for row in rows if row[1] == "two"))
    capsys.readouterr()
    assert run("learn", tmp_path / "june", "--labels", july, "--output", tmp_path / "july") == 0
    printed = capsys.readouterr()
    assert "3 classes" in printed.out and "not used again" not in printed.err, "June's test images are inventory again"
    for words, why in (
        (["--labels", july, "--data", tmp_path], "omit --data"),
        (["--labels", tmp_path], "expected a .csv file"),
        ([], "--data is required"),
    ):
        assert run("learn", tmp_path / "june", *words, "--output", tmp_path / "no") == 2
        assert why in capsys.readouterr().err
    assert run("run", "--labels", july, "--data", tmp_path, *model, "--output", tmp_path / "no") == 2


@pytest.fixture
def learner(digit_folders, tmp_path):
    data = ["--data", digit_folders(3, 4, 2), "--output", tmp_path / "out"]
    assert run("run", *data, "--model", demo_model_folder(), "--classifiers", "lda") == 0
    return tmp_path / "out"


def test_predictions_are_written_as_a_table_for_exiftool(heap, learner, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("predict", learner, "heap", "--exiftool", "guesses.csv") == 0
    with open("guesses.csv", newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == ["SourceFile", "HierarchicalSubject"] and [path for path, _ in rows] == sorted(heap)
    assert {guess for _, guess in rows} <= {f"dulbe|{name}" for name in DIGITS[:3]}
    assert sum(guess == f"dulbe|{heap[path][0]}" for path, guess in rows) > len(rows) / 2
    assert run("rename", learner, "two", "a|b", "--output", "other") == 0
    assert run("predict", "other", "heap", "--exiftool", "more.csv") == 2
    assert "contains '|' or ', '" in capsys.readouterr().err and not os.path.exists("more.csv")


def exiftool(*words):
    return subprocess.run([EXIFTOOL, *words], check=True, capture_output=True, text=True).stdout


def keywords(*files):
    lines = exiftool("-csv", "-Subject", "-HierarchicalSubject", *map(str, files)).splitlines()
    return {row["SourceFile"]: row for row in csv.DictReader(lines)}


@pytest.mark.skipif(EXIFTOOL is None, reason="exiftool is not installed")
@pytest.mark.parametrize("sidecars", [False, True])
def test_real_exiftool_reads_labels_and_writes_predictions_once(heap, learner, tmp_path, monkeypatch, sidecars):
    """A person's tags are kept, and writing the same predictions again adds nothing."""
    monkeypatch.chdir(tmp_path)
    for path, (label, _) in heap.items():
        tags = [f"-Subject={label}", "-Subject=holiday", "-HierarchicalSubject=people|me", "-overwrite_original"]
        exiftool(*tags, *(["-o", f"{path}.xmp"] if sidecars else []), path)
    kind = ["-ext", "xmp"] if sidecars else []
    (tmp_path / "tags.csv").write_text(exiftool("-csv", "-r", "-Subject", *kind, "heap"))
    (tmp_path / "words.txt").write_text("\n".join(DIGITS[:3]))
    images = load_data("tags.csv", None, vocabulary="words.txt")
    labels = {images.item_name(i): images.class_names[images.labels[i]] for i in range(len(images))}
    assert labels == {path: label for path, (label, _) in heap.items()}
    for _ in range(2):
        assert run("predict", learner, "heap", "--exiftool", "guesses.csv") == 0
        exiftool("-csv+=guesses.csv", "-sep", ", ", "-overwrite_original", *kind, "heap")
        single = "-HierarchicalSubject<${HierarchicalSubject;NoDups}"
        exiftool("-sep", "##", single, "-overwrite_original", *kind, "heap")
    for file, row in keywords(*kind, "heap").items():
        assert row["Subject"] == f"{heap[file.removesuffix('.xmp')][0]}, holiday"
        mine, guess = row["HierarchicalSubject"].split(", ")
        assert mine == "people|me" and guess.startswith("dulbe|")


def pictures(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), "red").save(root / name)
    return root


def labels_of(file, **settings):
    images = load_data(file, None, **settings)
    return {images.item_name(i).rpartition("/")[2]: images.class_names[images.labels[i]] for i in range(len(images))}


@pytest.mark.parametrize("word", ["", "None", "N/A", "NA", "n/a", "NaN", "?", "-", "no_label", "Unlabeled", "null"])
def test_word_for_nothing_is_no_class(tmp_path, word):
    pictures(tmp_path, "a.png", "b.png")
    file = table(tmp_path / "labels.csv", ["path", "label"], ["a.png", "cat"], ["b.png", word])
    assert labels_of(file) == {"a.png": "cat"}
    assert not word or labels_of(file, one_label=True) == {"a.png": "cat", "b.png": word}


def test_rows_of_json_lines_need_not_be_alike(tmp_path):
    pictures(tmp_path, "a.png", "b.png")
    file = tmp_path / "labels.jsonl"
    file.write_text('{"path": "a.png", "label": null}\n\n{"path": "b.png", "label": "cat", "note": 1}\n')
    assert labels_of(file) == {"b.png": "cat"}
    file.write_text('{"path": "a.png", "label": "dog"}\n{"path": "b.png", "label": "cat", "split": "test"}\n')
    with pytest.raises(ValueError, match=r"line 1 of .*labels.jsonl has no 'split', which other lines have"):
        load_data(file, None)
    file.write_text('{"path": "a.png", "label": "dog"}\n\n{"path": "b.png"}\n')
    with pytest.raises(ValueError, match=r"line 3 of .* has no 'label', which other lines have"):
        load_data(file, None)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["Smith, Anna", "Smith, John", "Brown, Anna", "Brown, John"], "'Brown, Anna' in one cell: .* --one-label"),
        (["clear", "clear water", "clear road", "water road", "clear water road"], "'clear road' in one cell"),
    ],
)
def test_several_labels_in_a_cell_are_refused_unless_they_are_names(tmp_path, labels, words):
    names = [f"{number}.png" for number in range(len(labels))]
    pictures(tmp_path, *names)
    file = table(tmp_path / "labels.csv", ["path", "label"], *zip(names, labels, strict=True))
    with pytest.raises(ValueError, match=words):
        load_data(file, None)
    assert list(labels_of(file, one_label=True).values()) == labels


def test_labels_with_blanks_are_classes_and_unusual_ones_are_noted(tmp_path):
    labels = ["red panda", "giant panda", "red fox", "arctic fox", "panda, animal"]
    names = [f"{number}.png" for number in range(len(labels))]
    pictures(tmp_path, *names, *(f"c{number}.png" for number in range(10)))
    file = table(tmp_path / "labels.csv", ["path", "label"], *zip(names, labels, strict=True))
    images = load_data(file, None)
    assert images.class_names == tuple(sorted(labels)) and "'panda, animal' is one class" in images.notes[0]
    rows = [[f"c{number}.png", f"a photo of thing {number}"] for number in range(10)]
    images = load_data(table(tmp_path / "captions.csv", ["path", "label"], *rows), None)
    assert (
        "each of the 10 images has a label of its own" in images.notes[0] and "look like captions" in images.notes[0]
    )
    with pytest.raises(ValueError, match="a column of labels without a name: column 3 of line 1"):
        load_data(table(tmp_path / "hot.csv", ["path", "cat", ""], ["0.png", "1", "0"]), None)


@pytest.mark.parametrize(
    ("on_disk", "named", "words"),
    [
        ("gro\u0308\u00dfe.png", "gr\u00f6\u00dfe.png", "by another encoding of accents"),
        ("Photos/IMG_1.PNG", "photos/img_1.png", "in another case"),
        ("photos/0007.png", "7", "without leading zeros"),
        ("img/a.png", "a", "elsewhere"),
    ],
)
def test_files_of_a_table_are_found_by_other_spellings(tmp_path, on_disk, named, words):
    pictures(tmp_path, on_disk, "other/b.png")
    file = table(tmp_path / "labels.csv", ["path", "label"], [named, "cat"], ["other/b.png", "dog"])
    images = load_data(file, None)
    assert [images.item_name(index) for index in range(2)] == [str(tmp_path / on_disk), str(tmp_path / "other/b.png")]
    assert f"1 path matched to files {words}, such as {named}" in images.notes[0]


def test_paths_of_another_machine_are_matched_by_their_ends(tmp_path):
    pictures(tmp_path, "cat/0.png", "dog/0.png", "cat/1.png")
    paths = [f"D:\\data\\pets\\{name}" for name in ("cat\\0.png", "dog\\0.png", "cat\\1.png")]
    file = table(tmp_path / "labels.csv", ["path", "label"], *zip(paths, ("cat", "dog", "cat"), strict=True))
    images = load_data(file, None)
    assert [images.item_name(index) for index in range(3)] == [
        str(tmp_path / f"{a}.png") for a in ("cat/0", "dog/0", "cat/1")
    ]
    assert "3 paths matched to files by the end of the path" in images.notes[0]
    # One missing file of a table is not another one with the same name.
    rows = [["cat/0.png", "cat"], ["cat/1.png", "cat"], ["bird/0.png", "bird"]]
    file = table(tmp_path / "labels.csv", ["path", "label"], *rows)
    assert not load_data(file, None).notes


def test_camtrap_package_is_read_by_its_join(tmp_path):
    names = [f"media/{number}.png" for number in range(5)]
    pictures(tmp_path, *names)
    media = [[f"m{number}", f"d{number % 2}", name] for number, name in enumerate(names)]
    table(tmp_path / "media.csv", ["mediaID", "deploymentID", "filePath"], *media)
    seen = [["m0", "animal", "Vulpes vulpes"], ["m1", "animal", "Vulpes vulpes"], ["m1", "animal", "Vulpes vulpes"]]
    seen += [
        ["m2", "blank", ""],
        ["m3", "animal", "Meles meles"],
        ["m3", "animal", "Vulpes vulpes"],
        ["", "animal", "x"],
    ]
    seen += [["m4", "unclassified", ""]]
    table(tmp_path / "observations.csv", ["mediaID", "observationType", "scientificName"], *seen)
    for data in (tmp_path, tmp_path / "observations.csv"):
        images = load_data(data, None)
        assert labels_of(data) == {"0.png": "Vulpes vulpes", "1.png": "Vulpes vulpes", "2.png": "blank"}
        assert images.columns["deploymentID"]() == ["d0", "d1", "d0"]
        assert (
            "1 file left out, with several labels" in images.notes[1]
            and "1 observation of events not used" in images.notes[2]
        )
        with pytest.raises(ValueError, match="Camtrap DP package.*leave out the label column 'vernacularName'"):
            load_data(data, None, label_column="vernacularName")
    table(tmp_path / "media.csv", ["mediaID", "deploymentID"], *([row[0], row[1]] for row in media))
    with pytest.raises(ValueError, match=r"media.csv has no column 'filePath', which Camtrap DP 1.0 asks for"):
        load_data(tmp_path, None)


def test_file_whose_name_is_not_utf8_is_learned_from_a_table(heap, tmp_path, capsys):
    rows = [[path, *facts] for path, facts in heap.items()]
    for place in (0, -1):  # a training and a test image
        name = os.fsdecode(b"heap/\xffphoto%d.jpg" % abs(place))
        os.rename(tmp_path / rows[place][0], tmp_path / name)
        rows[place][0] = name
    with (tmp_path / "labels.csv").open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        csv.writer(file).writerows([["path", "label", "split"], *rows])
    model = ["--model", demo_model_folder(), "--classifiers", "lda"]
    assert run("run", "--labels", tmp_path / "labels.csv", *model, "--output", tmp_path / "out") == 0
    assert main(["report", str(tmp_path / "out")]) == 0, capsys.readouterr().err


SEEN = ["mediaID", "observationType", "scientificName", "classificationMethod"]


def package(folder, media, *seen):
    """Write a Camtrap DP package whose files are media/0.png and so on, and return its folder."""
    names = [f"media/{number}.png" for number in range(4)]
    pictures(folder, *names)
    table(folder / "media.csv", ["mediaID", "filePath"], *(media or ([f"m{n}", name] for n, name in enumerate(names))))
    table(folder / "observations.csv", SEEN, *seen)
    return folder


def test_labels_of_people_come_before_those_of_a_machine(tmp_path):
    people = [["m0", "animal", "Vulpes vulpes", "human"], ["m1", "BLANK", "", "human"]]
    machine = [[f"m{n}", "animal", "Mustela putorius", "machine"] for n in range(4)]
    folder = package(tmp_path, None, *people, *machine)
    assert labels_of(folder) == {"0.png": "Vulpes vulpes", "1.png": "blank"}
    note = "the labels of 2 files are only a machine's, and "
    assert note + "not used: --machine-labels uses them" in load_data(folder, None).notes
    expected = {"0.png": "Vulpes vulpes", "1.png": "blank", "2.png": "Mustela putorius", "3.png": "Mustela putorius"}
    assert labels_of(folder, machine_labels=True) == expected
    assert note + "used" in load_data(folder, None, machine_labels=True).notes
    package(tmp_path, None, *machine)
    with pytest.raises(ValueError, match=r"has only labels of a machine: --machine-labels uses them"):
        load_data(folder, None)


@pytest.mark.parametrize(
    "media, words",
    [
        ([["m0", "media/0.png"], ["m0", "media/1.png"]], "the mediaID 'm0' for 'media/0.png' and 'media/1.png'"),
        ("mediaID,filePath,filePath\nm0,media/0.png,media/1.png\n", "has the column 'filePath' twice"),
    ],
)
def test_camtrap_package_that_contradicts_itself_is_refused(tmp_path, media, words):
    folder = package(tmp_path, media if isinstance(media, list) else None, ["m0", "animal", "x", "human"])
    if isinstance(media, str):
        (folder / "media.csv").write_text(media)
    with pytest.raises(ValueError, match=words):
        load_data(folder, None)


@pytest.mark.parametrize("file", ["labels.csv", "labels.jsonl", "metadata.csv", "metadata.jsonl", "exif.csv"])
def test_row_that_names_a_pipe_or_a_device_is_left_out_and_named(tmp_path, file):
    """Reading a pipe would wait for ever, and reading /dev/zero would fill the memory."""
    pictures(tmp_path, "a.png", "b.png")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    names = ["a.png", "b.png", "pipe.png", "zero.png", "/dev/zero"]
    path = tmp_path / file
    key = "SourceFile" if file == "exif.csv" else "file_name"
    if path.suffix == ".csv":
        table(path, [key, "Subject" if file == "exif.csv" else "label"], *([name, "cat"] for name in names))
    else:
        path.write_text("".join(f'{{"file_name": "{name}", "label": "cat"}}\n' for name in names))
    (tmp_path / "words.txt").write_text("cat\n")
    given = {"vocabulary": str(tmp_path / "words.txt")} if file == "exif.csv" else {}
    data = tmp_path if path.stem == "metadata" else path
    train, _, inventory = DataSource(str(data), **given).open()
    assert len(train) == 2
    assert {name: why for (*_, name, _), why in inventory.unreadable} == dict.fromkeys(
        [str(tmp_path / name) for name in names[2:4]] + ["/dev/zero"],
        "it is a pipe, a device or a socket, expected a file",
    )
