"""Test that functions of batches equal the learner's predictions, for all forms of images and all engines."""

import io
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_runs import learner_of

from dulbe_peft.data.folders import ImageFolder
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.photos.deployment.batches import Featurizer, Predictor


@pytest.fixture(scope="module")
def saved(base, digit_folders, tmp_path_factory):
    """Return a saved learner of three digits, paths of test images, their features and predictions."""
    root = digit_folders(3, 8, 3)
    learner = learner_of(base, "frozen", "lda")
    learner.learn_task(ImageFolder(root, "train"))
    folder = tmp_path_factory.mktemp("learners") / "digits"
    learner.save_pretrained(folder)
    test = ImageFolder(root, "test")
    paths = [test.item_name(index) for index in range(len(test))]
    return folder, paths, learner.image_embeds(test).numpy(), learner.predict(test, return_scores=True)


def check(columns, saved):
    _, _, features, predictions = saved
    if "embedding" in columns:
        np.testing.assert_allclose(np.stack(list(columns["embedding"])), features, atol=1e-6)
    if "class" in columns:
        assert list(columns["class"]) == [name for name, _ in predictions]
        np.testing.assert_allclose(columns["probability"], [score for _, score in predictions], atol=1e-6)


FORMS = {
    "paths": list,
    "pillow": lambda paths: [Image.open(path) for path in paths],
    "arrays": lambda paths: np.stack([np.asarray(Image.open(path).convert("RGB")) for path in paths]),
    "grey": lambda paths: [np.asarray(Image.open(path))[:, :, None] for path in paths],
    "bytes": lambda paths: [Path(path).read_bytes() for path in paths],
    "bytearrays": lambda paths: [bytearray(Path(path).read_bytes()) for path in paths],
    "stored": lambda paths: [{"bytes": Path(path).read_bytes(), "path": None} for path in paths],
    "files": lambda paths: [io.BytesIO(Path(path).read_bytes()) for path in paths],
}


@pytest.fixture(scope="module")
def functions(saved):
    return Featurizer(saved[0]), Predictor(saved[0])


@pytest.mark.plain("paths", "arrays", "bytes")
@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_images_give_the_learners_predictions(saved, functions, form):
    batch = {"image": FORMS[form](saved[1]), "id": np.arange(len(saved[1]))}
    for function in functions:
        result = function(batch)
        check(result, saved)
        assert result["id"] is batch["id"] and set(batch) == {"image", "id"}


@pytest.mark.parametrize("model", ["demo", demo_model_folder()])
def test_featurizer_of_a_model_gives_the_same_features(saved, model):
    function = Featurizer(model)
    check(function({"image": saved[1]}), saved)
    embedding = function({"image": []})["embedding"]
    assert embedding.shape == (0, saved[2].shape[1]) and embedding.dtype == np.float32


def test_copies_share_the_loaded_learner_and_new_predictors_reload_it(saved):
    folder, *_ = saved
    first = Predictor(folder)
    assert len(pickle.dumps(first)) < 1000
    learner = first._learner()
    assert pickle.loads(pickle.dumps(first))._learner() is learner
    assert Predictor(folder)._learner() is not learner


def test_entry_that_is_not_an_image_is_refused_by_its_index(saved, functions, tmp_path):
    """A folder of three images, if accepted, would give three predictions and columns of different lengths."""
    good, several = saved[1][0], [str(shutil.copy(saved[1][0], tmp_path / name)) for name in ("1.png", "2.png")]
    note = tmp_path / "note.jpg"
    note.write_text("not an image")
    pixels = np.zeros((2, 4, 4, 3), np.uint8)
    nothing = ("", None, b"", {"bytes": None, "path": None})
    for kind in (*nothing, str(note), tmp_path, str(tmp_path), several, pixels, pixels[0].astype(float)):
        for function in functions:
            with pytest.raises(ValueError, match="^image 1 "):
                function({"image": [good, kind, good]})


def test_batches_without_images_and_wrong_arguments_are_refused(saved, functions):
    for function in functions:
        with pytest.raises(ValueError, match=r"the batch has no column 'image'; its columns are \['picture', 'id'\]"):
            function({"picture": saved[1], "id": [0]})
    with pytest.raises(TypeError, match="save it first"):
        Predictor(object())
    with pytest.raises(ValueError, match="eval_batch_size"):
        Predictor(saved[0], {"eval_batch_size": 0})


@pytest.mark.rare
@pytest.mark.parametrize("make", [Featurizer, Predictor])
def test_datasets_map_works_in_two_processes(saved, make):
    datasets = pytest.importorskip("datasets")
    folder, paths, _, _ = saved
    photos = datasets.Dataset.from_dict({"image": paths}).cast_column("image", datasets.Image())
    mapped = photos.map(make(folder), batched=True, batch_size=4, num_proc=2, remove_columns="image")
    assert "image" not in mapped.column_names
    check(mapped.with_format("numpy")[:], saved)


@pytest.mark.rare
def test_dask_applies_functions_of_batches(saved):
    distributed = pytest.importorskip("distributed")
    folder, paths, _, _ = saved
    parts = [{"image": paths[:4]}, {"image": paths[4:]}]
    with distributed.Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client:
        for make in (Featurizer, Predictor):
            results = client.gather(client.map(make(folder), parts))
            columns = set(results[0]) - {"image"}
            check({name: np.concatenate([part[name] for part in results]) for name in columns}, saved)


@pytest.mark.rare
@pytest.mark.filterwarnings("ignore")  # Ray warns about its own code
def test_ray_data_applies_functions_of_batches(saved):
    ray = pytest.importorskip("ray")
    folder, paths, _, _ = saved
    ray.init(num_cpus=2, include_dashboard=False)
    try:
        for make in (Featurizer, Predictor):
            rows = ray.data.from_items([{"image": path} for path in paths])
            mapped = rows.map_batches(make, fn_constructor_args=(str(folder),), batch_size=4, concurrency=2).take_all()
            mapped.sort(key=lambda row: paths.index(row["image"]))
            check({name: [row[name] for row in mapped] for name in mapped[0]}, saved)
    finally:
        ray.shutdown()
