"""Test that the memory of a strategy is only read by this strategy, and is not missing where it is needed."""

import json
from dataclasses import replace

import pytest
from failing_files import edited
from lives import content, images_of, learned, tiny_base, tiny_learner

from dulbe_peft import CheckpointError, ClassIncrementalLearner
from dulbe_peft.checkpoints.saving import MEMORY_FILE, STATISTICS_FILE
from dulbe_peft.strategies import make_strategy
from dulbe_peft.utils.folders import MANIFEST


@pytest.mark.parametrize(
    "saved, other, words",
    [
        ("lora", "mg_clip", "the strategy 'mg_clip' needs its memory of the finished tasks, dict, got none"),
        (
            "lora",
            "dulbe",
            "the strategy 'dulbe' needs its memory of the finished tasks, OccupationStatistics, got none",
        ),
        ("dulbe", "bofa", "is the memory of the strategy 'dulbe', expected 'bofa'"),
        ("dulbe", "lora", "is the memory of the strategy 'dulbe', expected 'lora'"),
        ("cl_lora", "magmax", "is for .*cl_lora.*, expected the strategy 'magmax'"),
        ("cl_lora", "dulbe", "is for .*cl_lora.*, expected the strategy 'dulbe'"),
        ("dulbe", "", "the strategy 'dulbe' needs its memory .* got none"),
        ("moe_adapters", "", "the strategy 'moe_adapters' needs its memory .* got none"),
    ],
)
def test_memory_that_is_missing_or_of_another_strategy_is_refused(tmp_path, saved, other, words):
    learned(tiny_learner(saved, ("prototype",)), 1).save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "learner.json"
    if other:
        edited(file, "strategy", {"name": other, **make_strategy(other).settings()})
    else:  # the file is missing, and the learner says that it has no memory
        files = json.loads((tmp_path / "saved" / MANIFEST).read_text())["files"]
        for name in {STATISTICS_FILE, MEMORY_FILE} & files.keys():
            (tmp_path / "saved" / name).unlink()
            del files[name]
        edited(tmp_path / "saved" / MANIFEST, "files", files)
        edited(file, "memory", False)
    before = content(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=words):
        ClassIncrementalLearner.from_pretrained(tmp_path / "saved", base_model=tiny_base()[0])
    assert content(tmp_path / "saved") == before


def test_task_is_not_learned_without_the_memory_of_the_earlier_ones():
    learner = learned(tiny_learner("lora", ("prototype",)), 1)
    learner.use_state(replace(learner.state, strategy=make_strategy("mg_clip")))
    with pytest.raises(
        ValueError, match="the strategy 'mg_clip' needs its memory of the finished tasks, dict, got none"
    ):
        learner.learn_task(images_of(0, 1, seed=4), ["x", "y"])


def test_image_whose_features_are_not_finite_is_named():
    learner = learned(tiny_learner("frozen", ("lda",)), 1)
    (first, _), (second, _), *_ = images_of(0, 1)
    huge, words = second * 1e30, r"image 1 \(item 1\) cannot be used: its features are NaN or infinite"
    with pytest.warns(UserWarning, match="must be preprocessed"):
        for call in (learner.image_embeds, lambda images: learner.learn_task([(x, 0) for x in images], ["new"])):
            with pytest.raises(ValueError, match=words):
                call([first, huge, huge])
        rows = learner.predictions([first, huge, huge])
    assert rows[0].error is None and all("NaN or infinite" in (row.error or "") for row in rows[1:])
    assert learner.predictions([first])[0].classes == rows[0].classes
