"""Test reading labels from the tables of other programs: spreadsheets, JSON, boxes, taxa, paths in two columns."""

import csv
import gzip
import json
import sys
import zipfile

import pytest
from PIL import Image
from small_runs import opened
from test_labels import labels_of, pictures, table

from dulbe_peft.data.columns import clock, time_of
from dulbe_peft.data.names import names_from_file
from dulbe_peft.data.readers import load_data
from dulbe_peft.photos.data.looking import times_taken
from dulbe_peft.photos.data.source import DataSource

KINDS = ["coat", "hat", "coat", "hat"]
FILES = [f"img/{number}.png" for number in range(4)]


def relative(root, file, **settings):
    """Return path -> label, with paths relative to the folder."""
    images = load_data(file, None, **settings)
    names = [images.class_names[label] for label in images.labels]
    return {images.item_name(index).removeprefix(f"{root}/"): name for index, name in enumerate(names)}


def spreadsheet(path, sheets, merged=(), hidden=()):
    """Write an Excel file: name of a sheet -> rows of texts, numbers and truth values."""

    def cell(value, place):
        if isinstance(value, bool):
            return f'<c r="{place}" t="b"><v>{int(value)}</v></c>'
        if isinstance(value, (int, float)):
            return f'<c r="{place}"><v>{value}</v></c>'
        return f'<c r="{place}" t="inlineStr"><is><t>{value}</t></is></c>' if value else ""

    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    relation = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    kinds = "http://schemas.openxmlformats.org/package/2006"
    with zipfile.ZipFile(path, "w") as book:
        listed, links, types = "", "", ""
        for number, (name, rows) in enumerate(sheets.items(), start=1):
            state = ' state="hidden"' if name in hidden else ""
            listed += f'<sheet name="{name}" sheetId="{number}" r:id="r{number}"{state}/>'
            links += f'<Relationship Id="r{number}" Type="{relation}/worksheet" Target="worksheets/{number}.xml"/>'
            types += (
                f'<Override PartName="/xl/worksheets/{number}.xml" ContentType='
                '"application/vnd.openxmlformats-officedocument.spreadsheetml.worksheet+xml"/>'
            )
            lines = [
                f'<row r="{r}">{"".join(cell(value, f"{chr(65 + c)}{r}") for c, value in enumerate(row))}</row>'
                for r, row in enumerate(rows, start=1)
            ]
            areas = "".join(f'<mergeCell ref="{area}"/>' for area in merged)
            areas = f"<mergeCells>{areas}</mergeCells>" if areas else ""
            text = f'<worksheet xmlns="{main}"><sheetData>{"".join(lines)}</sheetData>{areas}</worksheet>'
            book.writestr(f"xl/worksheets/{number}.xml", text)
        book.writestr(
            "xl/workbook.xml", f'<workbook xmlns="{main}" xmlns:r="{relation}"><sheets>{listed}</sheets></workbook>'
        )
        book.writestr(
            "xl/_rels/workbook.xml.rels", f'<Relationships xmlns="{kinds}/relationships">{links}</Relationships>'
        )
        book.writestr(
            "_rels/.rels",
            f'<Relationships xmlns="{kinds}/relationships"><Relationship Id="r0" Type="{relation}/officeDocument" '
            'Target="xl/workbook.xml"/></Relationships>',
        )
        book.writestr(
            "[Content_Types].xml",
            f'<Types xmlns="{kinds}/content-types"><Default Extension="rels" ContentType='
            '"application/vnd.openxmlformats-package.relationships+xml"/><Default Extension="xml" ContentType='
            '"application/xml"/><Override PartName="/xl/workbook.xml" ContentType='
            f'"application/vnd.openxmlformats-officedocument.spreadsheetml.sheet.main+xml"/>{types}</Types>',
        )
    return path


def test_spreadsheet_of_a_colleague_is_read(tmp_path):
    """A title above the header, columns without known names, merged cells, numbers, and further sheets."""
    pytest.importorskip("python_calamine")
    pictures(tmp_path, *FILES)
    rows = [["Kleider 2026"], [], ["Foto", "Kiste", "Art"], *([file, 7, ""] for file in FILES)]
    rows[3][2], rows[5][2] = "coat", "hat"
    sheets = {"Liste": rows, "Notizen": [["nur", "Text"], ["a", "b"]], "Alt": [["path", "label"], ["x", "y"]]}
    file = spreadsheet(tmp_path / "Kleider.xlsx", sheets, ["A1:C1", "C4:C5", "C6:C7"], hidden=["Alt"])
    images = load_data(file, None, label_column="Art")
    assert relative(tmp_path, file, label_column="Art") == dict(
        zip(FILES, ["coat", "coat", "hat", "hat"], strict=True)
    )
    assert images.columns["Kiste"]() == ["7"] * 4
    assert "the sheet 'Liste' is read, and not 'Notizen'" in images.notes[0]
    with pytest.raises(
        ValueError, match=r"choose 'Kiste' \(1 value, such as '7'\) or 'Art' \(2 values.* by --label-col"
    ):
        load_data(file, None)
    rows[4][2] = rows[6][2] = "?"
    spreadsheet(file, {"Liste": rows})
    assert relative(tmp_path, file, label_column="Art") == {FILES[0]: "coat", FILES[2]: "hat"}
    rows[4][:] = [FILES[0], 7, "hat"]
    with pytest.raises(ValueError, match=r"'img/0.png' is 'coat' in row 4 and 'hat' in row 5"):
        load_data(spreadsheet(file, {"Liste": rows}), None, label_column="Art")
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"Kleider.xlsx cannot be read as a spreadsheet"):
        load_data(file, None)


def test_missing_reader_of_spreadsheets_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "python_calamine", None)
    (tmp_path / "labels.xlsx").write_bytes(b"")
    with pytest.raises(ImportError, match=r'labels.xlsx needs .*: pip install "\.\[excel\]"'):
        load_data(tmp_path / "labels.xlsx", None)


@pytest.mark.parametrize("lines", [False, True])
def test_exiftools_json_is_read(tmp_path, lines):
    pictures(tmp_path, "a.png", "b.png", "c.png")
    rows = [
        {"SourceFile": "a.png", "Subject": ["holiday", "cat"]},
        {"SourceFile": "b.png", "Subject": "dog"},
        {"SourceFile": "c.png"},
    ]
    file = tmp_path / "tags.json"
    file.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows, indent=1))
    (tmp_path / "words.txt").write_text("cat\ndog\n")
    assert labels_of(file, vocabulary=str(tmp_path / "words.txt")) == {"a.png": "cat", "b.png": "dog"}


def test_json_of_one_object_per_image_is_read_and_other_json_is_refused(tmp_path):
    pictures(tmp_path, "a.png", "b.png")
    file = tmp_path / "labels.json"
    rows = [{"image": "a.png", "choice": "cat\u2028"}, {"image": "b.png", "choice": ["dog"]}]
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    assert labels_of(file) == {"a.png": "cat", "b.png": "dog"}
    with gzip.open(tmp_path / "labels.json.gz", "wt", encoding="utf-8") as packed:
        json.dump(rows, packed)
    assert labels_of(tmp_path / "labels.json.gz") == {"a.png": "cat", "b.png": "dog"}
    for content, words in (
        ({"images": [{"id": 1}], "annotations": [], "categories": [{}]}, "keys of a COCO file, but is none"),
        ({"photos": [{"id": 1}], "version": 3}, "expected a list of objects, one per image"),
        (
            {"images": [{"file": "a.png"}], "detection_categories": {"1": "animal"}},
            "what a machine found .* Timelapse",
        ),
        (
            [{"id": 1, "data": {"image": "a.png"}, "annotations": []}],
            "has tasks of Label Studio, but no choice of a person: annotate them there",
        ),
        ([{"image": "a.png", "choice": ["dog", "cat"]}], "'dog##cat' in one cell"),
        ([1, 2], "does not hold a list of JSON objects"),
    ):
        file.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=words):
            load_data(file, None)


def task(image, *choices, cancelled=(), **more):
    """Return a task as Label Studio exports it, with an annotation for each list of choices."""
    annotations = [
        {
            "id": number,
            "was_cancelled": number in cancelled,
            "result": [
                {"type": "choices", "from_name": "choice", "to_name": "image", "value": {"choices": chosen}},
                {"type": "rectanglelabels", "from_name": "box", "value": {"rectanglelabels": ["car"], "x": 1}},
            ],
        }
        for number, chosen in enumerate(choices)
    ]
    return {"id": 7, "data": {"image": image, "camera": "A"}, "annotations": annotations, "project": 3} | more


def test_tasks_that_label_studio_exports_are_read(tmp_path):
    pictures(tmp_path, "in/a b.png", "in/b.png", "in/c.png", "in/d.png")
    file = tmp_path / "export.json"
    tasks = [
        task("/data/local-files/?d=photos/in/a%20b.png", ["cat"], ["dog"], cancelled=[1]),
        task("/data/local-files/?d=photos/in/b.png", ["dog"], ["dog"]),
        task("/data/local-files/?d=photos/in/c.png", ["cat"], predictions=[{"result": ["of a machine"]}]),
        task("/data/local-files/?d=photos/in/d.png"),
    ]
    file.write_text(json.dumps(tasks))
    assert relative(tmp_path, file) == {"in/a b.png": "cat", "in/b.png": "dog", "in/c.png": "cat"}
    file.write_text(json.dumps([task("/data/upload/3/1a2b3c4d-c.png", ["cat"]), task("in/b.png", ["dog"])]))
    assert relative(tmp_path, file) == {"in/c.png": "cat", "in/b.png": "dog"}
    for changed, words in (
        ([task("in/b.png", ["dog"], ["cat"])], "entry 1 of .* has annotations that differ, .*dog.* and .*cat"),
        ([*tasks, task("in/d.png", ["dog", "cat"])], "'dog##cat' in one cell"),
        ([*tasks, of_regions("in/d.png", "dog", "cat")], "'dog##cat' in one cell"),
        ([{"data": {"image": "in/b.png"}, "predictions": []}], "no choice of a person: annotate them there"),
        ([*tasks, task("in/d.png", annotations=[{"result": [{"type": "choices"}]}])], "entry 5 of .* is no task"),
        ([*tasks, 3], "entry 5 of .* is no task as Label Studio exports it"),
    ):
        file.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=words):
            load_data(file, None)


def of_regions(image, *kinds):
    """Return a task with a choice for each region of the image."""
    row = task(image, *([kind] for kind in kinds))
    first, *others = row["annotations"]
    first["result"] += [result for other in others for result in other["result"]]
    return row | {"annotations": [first]}


def test_regions_of_one_kind_are_one_choice_and_the_data_of_a_task_are_no_labels(tmp_path):
    pictures(tmp_path, "in/a.png", "in/b.png", "in/c.png")
    file = tmp_path / "export.json"
    tasks = [of_regions("in/a.png", "cat", "cat"), task("in/b.png", ["dog"]), task("in/c.png")]
    for name in ("choice", "label", "Label"):
        for each in tasks:
            each["data"] = {"image": each["data"]["image"], name: "older"}
        file.write_text(json.dumps(tasks))
        assert relative(tmp_path, file) == {"in/a.png": "cat", "in/b.png": "dog"}


def coco(annotations, **more):
    """Return a COCO file with three images, as data sets of camera traps have it."""
    images = [{"id": f"i{n}", "file_name": f"in/{n}.png", "location": n, "width": 9} for n in range(3)]
    categories = [{"id": 5, "name": "deer"}, {"id": 7, "name": "fox"}]
    rows = [{"id": k, "image_id": i, "category_id": c} | extra for k, (i, c, extra) in enumerate(annotations)]
    return {"info": {}, "images": images, "annotations": rows, "categories": categories} | more


def test_coco_files_are_read_also_with_boxes(tmp_path):
    pictures(tmp_path, "in/0.png", "in/1.png", "in/2.png")
    file = tmp_path / "traps.json"
    file.write_text(json.dumps(coco([("i0", 5, {}), ("i2", 7, {})])))
    assert relative(tmp_path, file) == {"in/0.png": "deer", "in/2.png": "fox"}, (
        "an image without annotation is left out"
    )
    box = {"bbox": [1, 2, 3, 4]}
    file.write_text(json.dumps(coco([("i0", 5, box), ("i0", 5, box), ("i0", 7, box), ("i1", 7, box)])))
    assert relative(tmp_path, file) == {"in/0.png": "deer", "in/1.png": "fox"}, "the class with most boxes"
    for annotations, words in (
        ([("i0", 5, {}), ("i0", 7, {})], "lists images twice: .*0.png"),
        ([("i0", 9, {})], "keys of a COCO file, but is none: KeyError"),
        ([("i9", 5, {})], "keys of a COCO file, but is none: KeyError"),
    ):
        file.write_text(json.dumps(coco(annotations)))
        with pytest.raises(ValueError, match=words):
            load_data(file, None)
    for kind in ("images", "categories"):  # as in two files that were joined
        content = coco([("i0", 5, {})])
        content[kind].append(content[kind][1] | {"id": content[kind][0]["id"]})
        file.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=f"has 2 {kind} with the id .*: give each"):
            load_data(file, None)


def test_json_min_and_csv_of_label_studio_are_read(tmp_path):
    pictures(tmp_path, "in/a b.png", "in/b.png")
    rows = [
        {"image": f"/data/local-files/?d=photos/in/{name}", "id": number, "choice": kind, "annotator": 1}
        | {"annotation_id": number, "created_at": "2026-05-01T10:00:00Z", "lead_time": 3.5}
        for number, (name, kind) in enumerate((("a%20b.png", "cat"), ("b.png", "dog")), start=1)
    ]
    (tmp_path / "min.json").write_text(json.dumps(rows))
    with (tmp_path / "project.csv").open("w", newline="") as opened_file:
        writer = csv.DictWriter(opened_file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    for name in ("min.json", "project.csv"):
        assert relative(tmp_path, tmp_path / name) == {"in/a b.png": "cat", "in/b.png": "dog"}


@pytest.mark.parametrize(
    "header, rows",
    [
        ("File,RelativePath,DateTime,Species", "{},CamA,0{}-May-2026 10:00:00,{}"),
        ("File,RelativePath,Folder,Date,Time,Species", "{},CamA,Study,0{}-May-2026,10:00:00,{}"),
        ("Datei;Ordner;Datum;confidence;Species", "{};CamA;0{}.05.2026 10:00;0,95;{}"),
    ],
    ids=["Timelapse", "older Timelapse", "German Excel"],
)
def test_dates_of_timelapse_and_german_spreadsheets(tmp_path, header, rows):
    pictures(tmp_path, "CamA/1.png", "CamA/2.png", "CamB/1.png")
    file = tmp_path / "TimelapseData.csv"
    file.write_text("\n".join([header, *(rows.format(f"{n}.png", n, kind) for n, kind in ((1, "hat"), (2, "coat")))]))
    assert relative(tmp_path, file) == {"CamA/1.png": "hat", "CamA/2.png": "coat"}
    images = load_data(file, None)
    times = dict(zip(map(images.item_name, range(2)), times_taken(images), strict=True))
    assert times[str(tmp_path / "CamA/2.png")] - times[str(tmp_path / "CamA/1.png")] == 24 * 3600
    assert clock(times[str(tmp_path / "CamA/1.png")]) == "2026-05-01 10:00:00"


def test_apostrophe_of_another_program_is_no_part_of_a_path_unless_a_file_has_it(tmp_path):
    pictures(tmp_path, "a.png", "in/b.png", "-c.png", "'-d.png", "'e.png")
    rows = ["path,label", "'a.png,hat", "'in/b.png,coat", "'-c.png,hat", "'-d.png,coat", "'e.png,coat"]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    expected = {"a.png": "hat", "in/b.png": "coat", "-c.png": "hat", "'-d.png": "coat", "'e.png": "coat"}
    assert relative(tmp_path, tmp_path / "t.csv") == expected


@pytest.mark.parametrize("text", ["05/01/2026 10:00", "31-Feb-2026 10:00:00", "01-Mai-2026 10:00:00", "2026", "x"])
def test_times_that_are_ambiguous_or_wrong_are_none(text):
    assert time_of(text) is None


def test_german_confidences_choose_the_box(tmp_path):
    pictures(tmp_path, "a.png", "b.png")
    rows = ["file;Klasse;label;confidence", "a.png;1;hat;0,9", "a.png;1;coat;0,25", "b.png;2;coat;0,8"]
    (tmp_path / "boxes.csv").write_text("\n".join(rows))
    assert relative(tmp_path, tmp_path / "boxes.csv") == {"a.png": "hat", "b.png": "coat"}


TAXA = ["kingdom", "phylum", "class", "order", "family", "genus"]
ANIMALS = [
    ("Mammalia", "Didelphis", "virginiana", "Virginia Opossum"),
    ("Mammalia", "Odocoileus", "virginianus", "White-tailed Deer"),
    ("Aves", "Bubo", "virginianus", "Great Horned Owl"),
]


@pytest.mark.parametrize(
    ("columns", "settings", "expected"),
    [
        (["scientificName"], {}, ["Bubo virginianus", "Didelphis virginiana", "Odocoileus virginianus"]),
        (["species", "common_name"], {}, ["Bubo virginianus", "Didelphis virginiana", "Odocoileus virginianus"]),
        (
            ["species"],
            {"label_column": "species"},
            ["Bubo virginianus", "Didelphis virginiana", "Odocoileus virginianus"],
        ),
        (["specificEpithet"], {}, ["Bubo virginianus", "Didelphis virginiana", "Odocoileus virginianus"]),
        (["binomial as species"], {}, ["Bubo virginianus", "Didelphis virginiana", "Odocoileus virginianus"]),
        (["common_name"], {}, ["Great Horned Owl", "Virginia Opossum", "White-tailed Deer"]),
        (["species"], {"label_column": "class"}, ["Aves", "Mammalia"]),
        (["scientificName", "label"], {}, ["fowl", "game"]),
    ],
)
def test_class_beside_other_ranks_is_no_label(tmp_path, columns, settings, expected):
    pictures(tmp_path, "0.png", "1.png", "2.png")
    rows = []
    for number, (rank, genus, epithet, common) in enumerate(ANIMALS):
        cells = {"scientificName": f"{genus} {epithet}", "species": epithet, "specificEpithet": epithet}
        cells |= {
            "binomial as species": f"{genus} {epithet}",
            "common_name": common,
            "label": "game" if number else "fowl",
        }
        rows.append(
            [f"{number}.png", "Animalia", "Chordata", rank, "o", "f", genus, *(cells[name] for name in columns)]
        )
    names = ["species" if name == "binomial as species" else name for name in columns]
    file = table(tmp_path / "occurrence.csv", ["filename", *TAXA, *names], *rows)
    images = load_data(file, None, **settings)
    assert list(images.class_names) == expected
    if names == ["species", "common_name"]:
        assert "--label-column common_name takes them from there" in images.notes[0]


def test_table_with_ranks_alone_is_refused(tmp_path):
    file = table(tmp_path / "t.csv", ["filename", *TAXA], ["0.png", "Animalia", "Chordata", "Aves", "o", "f", "g"])
    with pytest.raises(ValueError, match="has the paths in 'filename', .* by --label-column"):
        load_data(file, None)


@pytest.mark.parametrize(
    ("header", "folder"),
    [
        (["RelativePath", "File"], "CamA"),
        (["folder", "file"], "CamA/"),
        (["Directory", "FileName"], "CamA\\"),
        (["path", "filename"], "CamA"),
    ],
)
def test_path_in_two_columns_is_joined(tmp_path, header, folder):
    """Photographs of the same names lie beside the table."""
    pictures(tmp_path, "1.png", "2.png", "3.png", "CamA/1.png", "CamA/2.png")
    rows = [[folder, "1.png", "hat"], [folder, "2.png", "coat"], ["", "3.png", "coat"]]
    file = table(tmp_path / "data.csv", [*header, "Species"], *rows)
    assert relative(tmp_path, file) == {"CamA/1.png": "hat", "CamA/2.png": "coat", "3.png": "coat"}
    assert f"the paths are read from {header[0]!r} and {header[1]!r}" in load_data(file, None).notes[0]


def test_column_that_only_looks_like_folders_is_named(tmp_path):
    """Photographs of the same names beside the table may be others."""
    pictures(tmp_path, "1.png", "2.png")
    file = table(tmp_path / "data.csv", ["folder", "file", "label"], ["A", "1.png", "hat"], ["B", "2.png", "coat"])
    words = r"no path of a file in 'folder' and 'file', such as A/1.png: .* or rename 'folder' if it has no folders"
    with pytest.raises(ValueError, match=words):
        load_data(file, None)


def test_longest_of_several_paths_is_read(tmp_path):
    pictures(tmp_path, "A/1.png", "B/1.png", "1.png")
    header = ["SourceFile", "FileName", "Directory", "species"]
    file = table(tmp_path / "t.csv", header, ["A/1.png", "1.png", "A", "hat"], ["B/1.png", "1.png", "B", "coat"])
    assert relative(tmp_path, file) == {"A/1.png": "hat", "B/1.png": "coat"}


BOXES = [  # image, label, confidence
    ("a.png", "cat", "0.4"),
    ("a.png", "dog", "0.9"),
    ("a.png", "cat", "0.5"),
    ("b.png", "cat", "0.7"),
    ("b.png", "cat", "0.8"),
    ("c.png", "cat", "0.6"),
    ("c.png", "dog", "0.6"),
    ("d.png", "", "0.1"),
]


@pytest.mark.parametrize(
    ("columns", "expected", "note"),
    [
        (
            ["xmin"],
            {"a.png": "cat", "b.png": "cat"},
            "2 images with boxes of several classes; each has the class with most",
        ),
        (
            ["bbox_left", "confidence"],
            {"a.png": "dog", "b.png": "cat"},
            "the class with the highest 'confidence', but 1,",
        ),
    ],
)
def test_rows_that_are_boxes_give_one_label(tmp_path, columns, expected, note):
    pictures(tmp_path, "a.png", "b.png", "c.png", "d.png")
    rows = [[image, label, "3", sure][: 2 + len(columns)] for image, label, sure in BOXES]
    file = table(tmp_path / "boxes.csv", ["relative_path", "label", *columns], *rows)
    images = load_data(file, None)
    assert labels_of(file) == expected
    assert any(note in each for each in images.notes), images.notes
    file = table(tmp_path / "plain.csv", ["path", "label"], *(row[:2] for row in BOXES))
    with pytest.raises(ValueError, match="lists images twice: 'a.png' is 'cat' in line 2 and 'dog' in line 3"):
        load_data(file, None)


@pytest.mark.parametrize(
    ("written", "on_disk"),
    [
        ("/data/local-files/?d=photos/my%20{}.png", "photos/my {}.png"),
        ("http://localhost:8080/data/local-files/?d=photos/my%20{}.png", "photos/my {}.png"),
        ("/data/upload/3/1a2b3c4d-{}.png", "{}.png"),
        ("photos/my%20{}.png", "photos/my {}.png"),
        ("photos/my%20{}.png", "photos/my%20{}.png"),  # as it is written
        ("file:///home/anna/pets/photos/{}.png", "photos/{}.png"),
        ("file:///D:/pets/photos/{}%23.png", "photos/{}#.png"),
        ("D:\\pets\\photos\\{}.png", "photos/{}.png"),
    ],
)
def test_paths_are_decoded_if_no_file_has_the_name_as_it_is_written(tmp_path, written, on_disk):
    names = ["0", "1"]
    pictures(tmp_path, *map(on_disk.format, names))
    file = table(
        tmp_path / "labels.csv", ["image", "label"], *([written.format(name), f"class {name}"] for name in names)
    )
    assert relative(tmp_path, file) == {on_disk.format(name): f"class {name}" for name in names}


def test_path_as_it_is_written_comes_before_a_decoded_one(tmp_path):
    pictures(tmp_path, "my 0.png", "my%200.png")
    file = table(tmp_path / "labels.csv", ["path", "label"], ["my%200.png", "hat"], ["my 0.png", "coat"])
    assert relative(tmp_path, file) == {"my%200.png": "hat", "my 0.png": "coat"}


def test_table_in_windows_encoding_is_read_and_said_or_refused(tmp_path):
    """Western European texts are read; the same bytes mean other letters elsewhere, so other texts are refused."""
    pictures(tmp_path, "gr\u00fcn.png", "a.png")
    file = tmp_path / "labels.csv"
    file.write_bytes("sep=;\npath;label\na.png;M\u00fctze\ngr\u00fcn.png;Kleid\n".encode("cp1252"))
    assert labels_of(file) == {"a.png": "M\u00fctze", "gr\u00fcn.png": "Kleid"}
    assert (
        "read in Windows' encoding for Western Europe, in which it has 'M\u00fctze'" in load_data(file, None).notes[0]
    )
    for label, encoding in (
        ("\u043a\u043e\u0448\u043a\u0430", "cp1251"),
        ("lis \u017c\u00f3\u0142ty", "cp1250"),
        ("caf\u00e9", "mac_roman"),
    ):
        file.write_bytes(f"path,label\na.png,{label}\n".encode(encoding))
        with pytest.raises(ValueError, match="line 2 of .* is not UTF-8 .*: save the table as CSV UTF-8"):
            load_data(file, None)
    file.write_bytes("path,label\na.png,T\u00fcr\n".encode() + "gr\u00fcn.png,T\u00fcr\n".encode("cp1252"))
    with pytest.raises(ValueError, match="line 3 of .* is not UTF-8"):
        load_data(file, None)


def test_lines_are_those_of_the_file(tmp_path):
    pictures(tmp_path, "a.png", "b.png")
    file = tmp_path / "labels.csv"
    file.write_text('path,label,note\n\na.png,coat,"two\nlines"\n\nb.png,Coat,x\n')
    with pytest.raises(ValueError, match=r"has 'coat' in line 3 and 'Coat' in line 6, two spellings of one name"):
        load_data(file, None)
    file.write_text("path,label\na.png,coat\nb.png,None of these\n")
    with pytest.raises(ValueError, match=r"line 3 of .*labels.csv: is 'None of these', which is reserved"):
        load_data(file, None)


def test_two_spellings_of_a_folder_are_refused_before_an_image_is_opened(tmp_path):
    pictures(tmp_path, "coat/1.png", "Coat/2.png", "hat/3.png")
    with pytest.raises(ValueError, match="has the folders 'Coat' and 'coat', two spellings of one name: move"):
        DataSource(str(tmp_path)).check()
    assert opened(tmp_path, leave_out=["Coat"])[0].class_names == ("coat", "hat")


@pytest.mark.parametrize("word", ["no_label", "Unlabeled", "undefined", "Unlabeled images"])
def test_folder_of_images_without_a_label_is_left_out_and_said(tmp_path, word):
    for name in ("cat", "dog", word):
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.new("RGB", (8, 8), (len(name), number, 9)).save(tmp_path / name / f"{number}.png")
    train, _, inventory = opened(tmp_path)
    assert train.class_names == ("cat", "dog")
    assert inventory.left_out == [
        (str(tmp_path / word), "no class by its name (rename the folder if it is one), 2 images")
    ]
    file = table(tmp_path / "labels.csv", ["path", "label"], ["cat/0.png", "cat"], ["dog/0.png", word])
    assert labels_of(file) == {"0.png": "cat"} and labels_of(file, one_label=True) == {"0.png": word}


@pytest.mark.parametrize(
    ("old", "text", "expected"),
    [
        (["0", "1", "10"], "0 a hat\n1 a coat\n10 a sock\n", ("a hat", "a coat", "a sock")),
        (["a", "b"], "0 a hat\n1 a coat\n", ("a hat", "a coat")),
        (["a", "b"], "1. a hat\n2. a coat\n", ("a hat", "a coat")),
        (["a", "b"], "0\ta hat\n1\ta coat\n", ("a hat", "a coat")),
        (["n01440764", "n01443537"], "n01443537 goldfish\nn01440764 tench\n", ("tench", "goldfish")),
        (["a", "b"], "\"a hat\",\n'a coat',\n", ("a hat", "a coat")),
        (["a", "b"], "classes = ['a hat', 'a coat']\n", ("a hat", "a coat")),
        (["0", "1"], "{1: 'a coat',\n 0: 'a hat, grey',}\n", ("a hat, grey", "a coat")),
        (["a", "b"], "a hat,\na coat\n", ("a hat", "a coat")),
        (["a", "b"], "7 up\n3 musketeers\n", ("7 up", "3 musketeers")),
        (["a", "b"], "b coat\na hat\n", ("hat", "coat")),
    ],
)
def test_class_names_are_read_as_people_paste_them(tmp_path, old, text, expected):
    (tmp_path / "names.txt").write_text(text)
    assert names_from_file(old, tmp_path / "names.txt") == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n01440764 tench\nn01443537 goldfish\n", "names classes such as 'n01440764', which the data does not have"),
        ("['a hat', a coat]\n", "looks like a list of Python, but is none"),
        ("[1, 2]\n", "values that are not texts"),
        ("0 a hat\n1 a coat\n2 a sock\n", "has 3 names, but the data has 2 classes"),
    ],
)
def test_class_names_that_are_unclear_are_refused(tmp_path, text, words):
    (tmp_path / "names.txt").write_text(text)
    with pytest.raises(ValueError, match=words):
        names_from_file(["a", "b"], tmp_path / "names.txt")


def test_number_of_cells_is_checked_with_the_line(tmp_path):
    with (tmp_path / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path", "label"], [], ["a.png", "b", "c"]])
    with pytest.raises(ValueError, match="line 3 of .* has 3 cells, expected 2"):
        load_data(tmp_path / "labels.csv", None)


def test_class_of_a_data_set_that_means_no_label_is_said(tmp_path):
    datasets = pytest.importorskip("datasets")
    names = datasets.ClassLabel(names=["cat", "dog", "unlabeled"])
    features = datasets.Features({"image": datasets.Image(), "label": names})
    rows = {"image": [Image.effect_noise((8, 8), 9 + n) for n in range(3)], "label": [0, 1, 2]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "train.parquet")
    train, _, inventory = opened(tmp_path)
    assert len(train.class_names) == 3
    assert "'unlabeled' is read as a class; --leave-out 'unlabeled' leaves it out" in inventory.notes[0]
    assert opened(tmp_path, leave_out=["unlabeled"])[0].class_names == ("cat", "dog")
