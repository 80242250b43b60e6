"""Augmented views: what each kind does, how classifiers and training use them, and that a run resumes with them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import write_saved
from lives import tiny_base
from PIL import Image
from small_runs import learner_of

from dulbe_peft import class_incremental_tasks, run_stream
from dulbe_peft.arguments import AUGMENTATIONS
from dulbe_peft.data.augmentation import CHANGES, augmented


@pytest.fixture(scope="module")
def base():
    return tiny_base()


@pytest.fixture(scope="module")
def tasks():
    """Return two tasks of two digits each, with eight training images and two test images per digit."""
    return class_incremental_tasks(write_saved.digits(0, 8), write_saved.digits(8, 10), increment=2)[:2]


def make_learner(base, strategy="frozen", classifiers="lda", **fields):
    fields.setdefault("adapter", {"target_modules": ["fc1"]})
    quick = {"epochs": 2, "batch_size": 8, "prompt_template": "the digit {}."}
    return learner_of(base, strategy, classifiers, **quick | fields)


def test_crop_is_a_window_of_the_image_and_flip_mirrors_it():
    assert tuple(CHANGES) == AUGMENTATIONS
    pixels = np.arange(40 * 30 * 3, dtype=np.uint32).reshape(30, 40, 3) // 15 % 256
    image = Image.fromarray(pixels.astype(np.uint8))
    outcomes = set()
    for seed in range(20):
        part = np.asarray(augmented(image, "crop", [seed]))
        height, width = part.shape[:2]
        assert 0.45 <= height * width / 1200 <= 1 and 0.7 <= width / height / (4 / 3) <= 1.45
        windows = np.lib.stride_tricks.sliding_window_view(np.asarray(image), part.shape).reshape(-1, *part.shape)
        assert (windows == part).all(axis=(1, 2, 3)).any()
        mirrored = np.asarray(augmented(image, "flip", [seed]))
        assert any(np.array_equal(mirrored, side) for side in (pixels, pixels[:, ::-1]))
        outcomes.add(np.array_equal(mirrored, pixels))
    assert outcomes == {True, False}


def test_affine_view_equals_the_formula_and_is_filled_with_the_border_colour():
    """Compare with a literal float64 reference: each pixel has the value of the position that it is mapped from."""
    row, column = np.mgrid[:64, :64].astype(float)
    ramp = np.where((row % 63 == 0) | (column % 63 == 0), 200, 40 + row + 2 * column)
    image = Image.fromarray(ramp.round().astype(np.uint8)).convert("RGB")
    view = np.asarray(augmented(image, "affine", [3, 5]))[..., 0].astype(float)
    random = np.random.default_rng([3, 5])
    angle, shear, zoom = (
        np.radians(random.uniform(-10, 10)),
        np.radians(random.uniform(-5, 5)),
        random.uniform(0.9, 1.1),
    )
    move = random.uniform(-0.1, 0.1, 2) * 64
    x, y = column + 0.5 - 32 - move[0], row + 0.5 - 32 - move[1]
    sheared = x + np.tan(shear) * y
    from_x = zoom * (np.cos(angle) * sheared - np.sin(angle) * y) + 31.5
    from_y = zoom * (np.sin(angle) * sheared + np.cos(angle) * y) + 31.5
    inside = (from_x > 4) & (from_x < 59) & (from_y > 4) & (from_y < 59)
    outside = (from_x < -1) | (from_x > 64) | (from_y < -1) | (from_y > 64)
    assert inside.sum() > 1500 and outside.sum() > 20
    assert np.abs(view - (40 + from_y + 2 * from_x))[inside].max() < 1.5
    assert (view[outside] == 200).all()


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_classifiers_weight_the_views_of_an_image_as_one_image(base, tasks, workers):
    """Compare with float64 by hand. View v of an image has the seed (seed, 0, v, content) at any index in any task."""
    names = ("lda", "bayes:features=0", "ridge", "prototype", "bridge")
    learner = make_learner(base, classifiers=names, augment="crop+affine", copies=2, num_workers=workers)
    alone = make_learner(base)  # encodes the views by hand

    def views(data):
        images = [data.image(i) for i in range(len(data))]
        seeds = [int.from_bytes(content, "little") for content in data.contents()]
        views = [[augmented(x, "crop+affine", [0, 0, v, s]) for x, s in zip(images, seeds)] for v in (1, 2)]
        return torch.stack([alone.image_embeds(view).double() for view in (images, *views)], dim=1)

    for task in tasks:
        learner.learn_task(task.train)
    learner.update_classes(tasks[0].train.at([0]))
    parts = [*((task.train, 2 * number) for number, task in enumerate(tasks)), (tasks[0].train.at([0]), 0)]
    rows = torch.cat([views(data) for data, _ in parts])
    labels = torch.cat([torch.as_tensor(data.labels) + first for data, first in parts])
    counts = labels.bincount()
    means = torch.stack([rows[labels == c].mean(dim=(0, 1)) for c in range(4)])
    away = rows - means[labels][:, None]
    scatter = sum(torch.outer(row, row) for row in away.flatten(0, 1)) / 3
    for name, classifier in learner.classifiers.items():
        assert torch.equal(classifier.counts, counts), name
        has_sums = hasattr(classifier, "sums")
        actual = classifier.sums / counts[:, None] if has_sums else getattr(classifier, "means", None)
        if actual is not None:
            torch.testing.assert_close(actual, means, rtol=1e-4, atol=1e-6, msg=name)
    for name in ("lda", "bayes"):
        torch.testing.assert_close(learner.classifiers[name].scatter, scatter, rtol=1e-4, atol=1e-5, msg=name)
        assert int(learner.classifiers[name].freedom) == len(labels) - 4
    factors = learner.classifiers["bayes"].factors
    torch.testing.assert_close(factors.T @ factors, scatter, rtol=1e-4, atol=1e-5)
    gram = sum(torch.outer(row, row) for row in rows.flatten(0, 1)) / 3
    torch.testing.assert_close(learner.classifiers["ridge"].gram, gram, rtol=1e-4, atol=1e-5)
    bridge = learner.classifiers["bridge"]
    visual = bridge.visual_prototypes.double() * bridge.lengths[:, None] / counts[:, None]
    torch.testing.assert_close(visual, means, rtol=1e-4, atol=1e-5)
    assert learner.estimate() == {}, "an image whose views were learned cannot be left out"
    other = replace(learner.args, augment="none")
    learner.change_settings(other)  # does not change how earlier images were learned
    assert learner.estimate() == {}
    with pytest.raises(ValueError, match="learned as 3 views"):
        learner.forget_images(tasks[0].train.at([1]))


@pytest.mark.slow
def test_resumed_run_with_views_equals_an_uninterrupted_one(base, tasks, tmp_path):
    options = {"strategy": "dulbe", "classifiers": "bridge", "augment": "crop+flip+affine", "copies": 1}
    whole, stopped, plain = (
        make_learner(base, **options | more) for more in ({}, {"num_workers": 1}, {"augment": "none"})
    )
    run_stream(whole, tasks, tmp_path / "whole")
    run_stream(stopped, tasks[:1], tmp_path / "stopped")
    run_stream(make_learner(base, **options), tasks, tmp_path / "stopped")
    run_stream(plain, tasks[:1], tmp_path / "plain")
    for name in ("adapter_model.safetensors", "head.safetensors"):
        file = f"task-002/{name}"
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "stopped" / file).read_bytes(), name
    augmented_one, other = (tmp_path / run / "task-001" / "adapter_model.safetensors" for run in ("whole", "plain"))
    assert other.read_bytes() != augmented_one.read_bytes()
    with pytest.raises(ValueError, match="augment"):
        run_stream(make_learner(base, **options | {"augment": "none"}), tasks, tmp_path / "whole")
