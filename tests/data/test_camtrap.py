"""Test packages in Camtrap DP: observations of events, paths of every kind, packed tables, and groups."""

import gzip

import pytest
from small_runs import opened
from test_labels import labels_of, pictures, table

from dulbe_peft.data.camtrap import media_of
from dulbe_peft.data.columns import time_of
from dulbe_peft.data.readers import load_data

MEDIA = ["mediaID", "deploymentID", "timestamp", "filePath", "fileName"]
SEEN = ["mediaID", "deploymentID", "eventID", "eventStart", "eventEnd", "observationLevel", "observationType"]
SEEN += ["scientificName", "classificationMethod"]


def day(seconds, zone="Z"):
    return f"2024-05-01T10:00:{seconds:02d}{zone}"


def of_event(place, event, start, end, name, by="human"):
    return ["", place, event, day(start), day(end), "event", "animal" if name else "blank", name, by]


def of_file(media, name, by="human", kind="animal"):
    return [media, "d0", f"e-{media}", day(0), day(0), "media", kind, name, by]


@pytest.fixture
def package(tmp_path):
    """Write four photographs of the camera d0, a second apart, and one of d1; return a function that writes tables."""
    names = [f"{place}/{number}.png" for place, number in [("d0", 0), ("d0", 1), ("d0", 2), ("d0", 3), ("d1", 0)]]
    pictures(tmp_path, *(f"media/{name}" for name in names))
    rows = [[f"m{n}", name[:2], day(n % 4), f"media/{name}", name[3:]] for n, name in enumerate(names)]

    def write(*seen, media=rows):
        table(tmp_path / "observations.csv", SEEN, *seen)
        table(tmp_path / "media.csv", MEDIA, *media)
        return tmp_path

    write.rows = rows
    return write


def labels(folder, **settings):
    images = load_data(folder, None, **settings)
    paths = [images.item_name(index).removeprefix(f"{folder}/media/") for index in range(len(images))]
    return dict(zip(paths, (images.class_names[label] for label in images.labels), strict=True))


def test_observations_of_events_label_their_files(package):
    """Times have a zone; a file that has an observation of its own does not get the label of its event."""
    folder = package(
        of_event("d0", "e0", 0, 1, "Vulpes vulpes"),
        [
            "",
            "d0",
            "e1",
            "2024-05-01T12:00:02+02:00",
            "2024-05-01T12:00:03+02:00",
            "event",
            "animal",
            "Meles meles",
            "human",
        ],
        of_file("m3", "", kind="unknown"),
        of_event("d1", "e2", 0, 0, ""),
        of_event("d1", "e3", 30, 40, "Meles meles"),
        of_event("d9", "e4", 0, 9, "Meles meles"),
    )
    expected = {
        "d0/0.png": "Vulpes vulpes",
        "d0/1.png": "Vulpes vulpes",
        "d0/2.png": "Meles meles",
        "d1/0.png": "blank",
    }
    assert labels(folder) == expected
    images = load_data(folder, None)
    assert images.columns["eventID"]() == ["e0", "e0", "e1", "e2"]
    assert "4 files with the label of the whole event" in images.notes
    assert any(note.startswith("2 observations of events not used, because no file") for note in images.notes)


def test_several_labels_of_an_event_are_none_and_people_come_first(package):
    folder = package(
        of_event("d0", "e0", 0, 1, "Vulpes vulpes"),
        of_event("d0", "e0", 0, 0, "Meles meles"),
        of_event("d0", "e0", 0, 3, "Felis catus", "machine"),
    )
    assert labels(folder) == {"d0/1.png": "Vulpes vulpes"}
    expected = {"d0/1.png": "Vulpes vulpes", "d0/2.png": "Felis catus", "d0/3.png": "Felis catus"}
    assert labels(folder, machine_labels=True) == expected


def test_events_without_files_are_said(package):
    with pytest.raises(ValueError, match="no file with a label: 1 observation of events not used, because no file of"):
        labels(package(of_event("d0", "e0", 20, 30, "Vulpes vulpes")))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("media/d0", "{}.png"),
        ("media/d0/", "{}.png"),
        ("https://example.org/assets/{}/file", "{}.png"),
        ("https://example.org/assets/{}.png", "{}.png"),
        ("media/d0/{}.png", "another name.png"),
    ],
)
def test_path_may_be_a_folder_or_a_url_with_the_file_beside(package, path, name):
    media = [[f"m{n}", "d0", day(n), path.format(n), name.format(n)] for n in range(4)]
    folder = package(*(of_file(f"m{n}", "Vulpes vulpes") for n in range(4)), media=media)
    assert list(labels(folder)) == [f"d0/{n}.png" for n in range(4)]
    assert sorted(media_of(folder)) == [f"media/d0/{n}.png" for n in range(4)]


def test_url_without_a_file_is_named(package):
    media = [["m0", "d0", day(0), "https://example.org/a.png", "a.png"]]
    with pytest.raises(ValueError, match=r"line 2 of .*media.csv has a URL, https://example.org/a.png: download"):
        labels(package(of_file("m0", "Vulpes vulpes"), media=media))


@pytest.mark.parametrize("kind", ["gz", "parquet"])
def test_packed_tables_are_read(package, kind):
    folder = package(of_file("m0", "Vulpes vulpes"), of_file("m4", "Meles meles"))
    for file in (folder / "media.csv", folder / "observations.csv"):
        if kind == "gz":
            file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        else:
            arrow = pytest.importorskip("pyarrow.csv")
            from pyarrow.parquet import write_table

            write_table(arrow.read_csv(file), file.with_suffix(".parquet"))
        file.unlink()
    assert labels(folder) == {"d0/0.png": "Vulpes vulpes", "d1/0.png": "Meles meles"}
    assert opened(folder)[0].class_names == ("Meles meles", "Vulpes vulpes")
    if kind == "gz":
        (folder / "media.csv.gz").write_bytes((folder / "media.csv.gz").read_bytes()[:40])
        with pytest.raises(ValueError, match=r"media.csv.gz is not a complete gzip file"):
            labels(folder)


def test_two_files_of_one_id_in_a_folder_are_refused(package):
    media = [["m0", "d0", day(0), "media/d0", "0.png"], ["m0", "d0", day(0), "media/d0", "1.png"]]
    with pytest.raises(ValueError, match=r"has the mediaID 'm0' for 'media/d0/0.png' and 'media/d0/1.png'"):
        labels(package(of_file("m0", "Vulpes vulpes"), media=media))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2024-05-01T10:00:00Z", 1714557600),
        ("2024-05-01T12:00:00+02:00", 1714557600),
        ("2024-05-01T10:00:00.500Z", 1714557600.5),
        ("2024:05:01 10:00:00", 1714557600),
        ("2024-05-01", None),
        ("20240501", None),
        ("2024-13-01T10:00:00Z", None),
        ("", None),
    ],
)
def test_times_are_read_as_iso_and_exif_write_them(text, seconds):
    assert time_of(text) == seconds


def test_labels_of_a_package_do_not_depend_on_the_order_of_observations(package):
    seen = [
        of_event("d0", "e0", 0, 3, "Vulpes vulpes"),
        of_file("m0", "Meles meles"),
        of_file("m1", "Felis catus", "machine"),
    ]
    assert labels_of(package(*seen)) == labels_of(package(*reversed(seen)))
