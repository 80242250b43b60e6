"""The pictures of examples that a run keeps."""

import json

import numpy as np
import pytest
from PIL import Image

from dulbe_peft.metrics.evaluation import ImageResult
from dulbe_peft.report.pictures import EXAMPLES, OF_A_CLASS, SIDE, choose_examples, thumbnail, write_examples
from dulbe_peft.utils.folders import read_manifest


def rows(count):
    return [
        ImageResult(f"{i}.png", "cat", "cat" if i % 2 else "dog", ((7 * i) % count) / count, 1, i, {})
        for i in range(count)
    ]


def test_examples_are_the_surest_mistakes_and_the_least_sure_hits():
    chosen = choose_examples(rows(50))
    mistakes = sorted((row.probability for row in rows(50) if row.predicted == "dog"), reverse=True)
    hits = sorted(row.probability for row in rows(50) if row.predicted == "cat")
    assert [row.probability for row in chosen["mistakes"]] == mistakes[:EXAMPLES]
    assert [row.probability for row in chosen["hits"]] == hits[:EXAMPLES]
    assert [row.position for row in chosen["classes"]] == [0, 17, 34] and len(chosen["classes"]) == OF_A_CLASS


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "I;16"])
@pytest.mark.parametrize("size", [(8, 8), (640, 100), (3, 96), (97, 97)])
def test_thumbnails_are_small_and_keep_their_shape(mode, size):
    image = Image.fromarray(np.full(size[::-1], 9, np.uint8)).convert("L")
    image = Image.new("I;16", size) if mode == "I;16" else image.convert(mode)
    small = thumbnail(image)
    assert small.mode == "RGB" and max(small.size) <= SIDE and max(small.size) > SIDE / 2
    assert small.size[0] / small.size[1] == pytest.approx(size[0] / size[1], rel=0.1)


def test_pictures_show_the_right_images(tmp_path):
    """Image i is all of one grey, so a picture tells which image it shows; one of them is deleted after the test."""
    for i in range(60):
        Image.new("L", (96, 96), 4 * i).save(tmp_path / f"{i}.png")

    class Files(list):
        labels = np.zeros(60, dtype=np.int64)

        def __getitem__(self, i):
            return {"image": Image.open(tmp_path / f"{i}.png").convert("RGB"), "label": 0}

    chosen = choose_examples([ImageResult(str(i), "cat", "dog", i / 60, 2, i, {}) for i in range(60)])
    data = Files([{"image": Image.new("L", (96, 96)), "label": 0}] * 60)
    (tmp_path / "55.png").unlink()
    write_examples(tmp_path / "pictures", chosen, [None, data], ["1 file is no image"])
    index = json.loads((tmp_path / "pictures" / "index.json").read_text())
    assert [entry["image"] for entry in index["mistakes"]] == [str(i) for i in range(59, 47, -1) if i != 55]
    assert index["hits"] == [] and index["left_out"] == ["1 file is no image"]
    assert [entry["image"] for entry in index["classes"]] == ["0", "20", "40"]
    for entry in index["mistakes"] + index["classes"]:
        with Image.open(tmp_path / "pictures" / entry["file"]) as picture:
            assert abs(int(np.asarray(picture).mean()) - 4 * int(entry["image"])) <= 1
    assert read_manifest(tmp_path / "pictures")


def test_there_are_no_pictures_of_what_is_no_image_and_somebody_s_own_stay(tmp_path, capsys):
    for tests in ([None], [[{"image": np.zeros(3), "label": 0}] * 4]):
        write_examples(tmp_path / "pictures", choose_examples(rows(4)), tests)
        assert not list(tmp_path.iterdir())
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "mine.jpg").write_bytes(b"x")
    write_examples(
        tmp_path / "pictures", choose_examples(rows(4)), [[{"image": Image.new("L", (9, 9)), "label": 0}] * 4]
    )
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["mine.jpg"]
    assert "no pictures of examples" in capsys.readouterr().out
