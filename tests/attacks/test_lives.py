"""Random sequences of calls of a learner, compared with a simple model of its expected state.

By default, there are a few short sequences. `DULBE_PEFT_LIVES=300` runs 300 longer ones.
"""

import copy
import math
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lives import content, differences, everything, images_of, learned, tiny_base, tiny_learner

from dulbe_peft import ClassIncrementalLearner, OccupationStatistics, Task, collect_statistics, run_stream
from dulbe_peft.encoders.loading import unit_image_embeds

LIVES = int(os.environ.get("DULBE_PEFT_LIVES", "0"))
PROBES = [image for image, _ in images_of(0, 1, 2, seed=99)]
FOLDERS = st.sampled_from(["one", "two"])
seeds = st.integers(0, 50)


class Ending(list):
    """Images, the last of which raises an error when it is read."""

    def __init__(self, images: list[Any], error: BaseException) -> None:
        super().__init__(images)
        self.error = error

    def __getitem__(self, index: int) -> Any:
        if index == len(self) - 1:
            raise self.error
        return super().__getitem__(index)


def unreadable(images: list[Any]) -> Ending:
    return Ending(images, OSError("the disk is gone"))


def spoiled(images: list[Any]) -> list[Any]:
    image, label = images[-1]
    return [*images[:-1], (torch.full_like(image, math.nan), label)]


# Fault of a task -> how to make it, and the error that it raises.
FAULTS = {
    "NaN in an image": (lambda images, names, known: (spoiled(images), names), ValueError),
    "an unreadable image": (lambda images, names, known: (unreadable(images), names), (ValueError, OSError)),
    "a class that is known": (lambda images, names, known: (images, [*names[:-1], known[0]]), ValueError),
}


def name_of(number: int) -> str:
    """Return a number as a word of letters that the tiny tokenizer knows."""
    return "".join("abcdefghij"[int(digit)] for digit in str(number))


def scores(learner: ClassIncrementalLearner) -> list[Any]:
    return learner.predict(PROBES, top_k=len(learner.class_names), return_scores=True)


@pytest.mark.filterwarnings("ignore")
class Life(RuleBasedStateMachine):
    """A learner, its expected state, and its saved folders."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.tasks: list[tuple[str, ...]] = []
        self.images: dict[str, int] = {}  # class -> number of its learned images
        self.sums: dict[str, torch.Tensor] = {}  # layer -> S, computed independently of the learner
        self.saved: dict[str, Any] = {}  # folder -> the learner's whole state, expected state and predictions
        self.answers: list[Any] | None = None
        self.born = 0

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @initialize(strategy=st.sampled_from(["dulbe", "dulbe", "merged_lora"]))
    def is_born(self, strategy: str) -> None:
        self.learner = tiny_learner(strategy, ("bridge", "prototype", "lda"))
        self.learns(seed=0, count=2)

    # ------------------------------------------------------------------ expected state

    @property
    def names(self) -> list[str]:
        return [name for task in self.tasks for name in task]

    def new_task(self, seed: int, count: int) -> tuple[list[Any], list[str]]:
        self.born += count
        labels = [label for label in range(count) for _ in range(1 + (seed + label) % 2)]
        return images_of(*labels, seed=seed), [name_of(self.born - n) for n in range(count)]

    def adds(self, images: list[Any], names: list[str]) -> None:
        """Count images, and add the layers' inputs for them, by the current model, to the expected sums."""
        for _, label in images:
            self.images[names[label]] = self.images.get(names[label], 0) + 1
        if not isinstance(self.learner.memory, OccupationStatistics):
            return
        pixels = torch.stack([image for image, _ in images])
        model, sums = self.learner.model, OccupationStatistics()
        collect_statistics(model, [pixels], lambda _, x: unit_image_embeds(self.learner.clip, x), into=sums)
        for layer, matrix in sums.items():
            self.sums[layer] = self.sums.get(layer, 0) + matrix.double()

    def learned(self, images: list[Any], names: list[str]) -> None:
        self.tasks.append(tuple(names))
        self.adds(images, names)
        self.answers = None

    @invariant()
    def is_what_it_must_be(self) -> None:
        learner = self.learner
        assert learner.tasks == self.tasks and list(learner.class_names) == self.names
        assert all(classifier.class_names == self.names for classifier in learner.classifiers.values())
        assert learner.head.counts.tolist() == [self.images[name] for name in self.names]
        for layer, matrix in self.sums.items():
            torch.testing.assert_close(learner.memory[layer].double(), matrix, rtol=1e-4, atol=1e-3)
        actual = scores(learner)
        assert self.answers is None or actual == self.answers
        self.answers = actual

    # ------------------------------------------------------------------ rules

    @rule(seed=seeds, count=st.integers(1, 2))
    def learns(self, seed: int, count: int) -> None:
        images, names = self.new_task(seed, count)
        self.learner.learn_task(images, names)
        self.learned(images, names)

    @rule(seed=seeds, place=st.integers(0, 20))
    def sees_more(self, seed: int, place: int) -> None:
        name, images = self.names[place % len(self.names)], images_of(0, 0, seed=seed)
        self.learner.update_classes(images, [name])
        self.adds(images, [name])
        self.answers = None

    @precondition(lambda self: len(self.names) > 2)
    @rule(place=st.integers(0, 20))
    def forgets(self, place: int) -> None:
        name = self.names[place % len(self.names)]
        self.learner.forget_class(name)
        self.tasks = [tuple(other for other in task if other != name) for task in self.tasks]
        del self.images[name]
        self.answers = None

    @rule(fault=st.sampled_from(sorted(FAULTS)), seed=seeds, update=st.booleans())
    def meets_an_error(self, fault: str, seed: int, update: bool) -> None:
        before = everything(self.learner)
        change, error = FAULTS[fault]
        images, names = change(*self.new_task(seed, 2), self.names)
        with pytest.raises(error):
            (self.learner.update_classes if update else self.learner.learn_task)(images, names)
        assert not differences(everything(self.learner), before)

    @rule(update=st.booleans(), seed=seeds)
    def is_interrupted(self, update: bool, seed: int) -> None:
        """Interrupt a call while images are read, as Ctrl-C does."""
        before = everything(self.learner)
        images, names = self.new_task(seed, 1)
        act = self.learner.update_classes if update else self.learner.learn_task
        with pytest.raises(KeyboardInterrupt):
            act(Ending(images, KeyboardInterrupt()), self.names[-1:] if update else names)
        assert not differences(everything(self.learner), before)

    @rule()
    def answers_another_thread(self) -> None:
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(scores, [self.learner] * 2)
        assert first == second and (self.answers is None or first == self.answers)

    @rule(folder=FOLDERS)
    def is_saved(self, folder: str) -> None:
        self.learner.save_pretrained(self.root / folder)
        kept = copy.deepcopy((self.tasks, self.images, self.sums, self.born))
        self.saved[folder] = everything(self.learner), kept, scores(self.learner)
        assert {path.name for path in self.root.iterdir()} >= set(self.saved)
        assert not [path for path in self.root.iterdir() if path.name.startswith(".")]

    @precondition(lambda self: self.saved)
    @rule(place=st.integers(0, 5))
    def is_loaded(self, place: int) -> None:
        folder = sorted(self.saved)[place % len(self.saved)]
        before, kept, answers = self.saved[folder]
        machine = {"device": "cpu", "progress": False}
        base = copy.deepcopy(tiny_base()[0])
        self.learner = ClassIncrementalLearner.from_pretrained(self.root / folder, base, machine=machine)
        actual = everything(self.learner)
        assert [name for name in differences(actual, before) if name != "learner"] == []
        assert scores(self.learner) == answers
        self.tasks, self.images, self.sums, self.born = copy.deepcopy(kept)
        self.answers = answers

    @rule()
    def is_copied(self) -> None:
        twin = copy.deepcopy(self.learner)
        assert not differences(everything(twin), everything(self.learner))
        learned(twin, 1, first=1000)
        self.learner = copy.deepcopy(self.learner)

    @rule()
    def is_merged_for_a_while(self) -> None:
        before = everything(self.learner)
        self.learner.model.merge_adapter()
        features = self.learner.image_embeds(PROBES)
        with pytest.raises(ValueError, match="unmerge_adapter"):
            self.learner.learn_task(*self.new_task(1, 1))
        self.learner.model.unmerge_adapter()
        torch.testing.assert_close(features, self.learner.image_embeds(PROBES), atol=1e-4, rtol=1e-3)
        assert not differences(everything(self.learner), before)

    @rule(seed=seeds, count=st.integers(1, 2), fails=st.booleans())
    def runs(self, seed: int, count: int, fails: bool) -> None:
        """Learn a task in a run. If test images cannot be read, neither the learner nor the folder has the task."""
        output = self.root / f"run {self.born}"
        images, names = self.new_task(seed, count)
        tests = images_of(*range(count), seed=seed + 1)
        known, before = [None] * len(self.tasks), everything(self.learner)
        if fails:
            with pytest.raises(ValueError, match="cannot be preprocessed"):
                run_stream(self.learner, [Task(images, unreadable(tests), names)], output, known_tests=known)
            assert not differences(everything(self.learner), before) and not list(output.glob("task-*"))
        results = run_stream(self.learner, [Task(images, tests, names)], output, known_tests=known).contents()
        self.learned(images, names)
        assert results["class_names"] == [list(task) for task in self.tasks]
        text, now = content(output), everything(self.learner)
        assert run_stream(self.learner, [Task(images, tests, names)], output, known_tests=known).contents() == results
        assert content(output) == text and not differences(everything(self.learner), now)
        shutil.rmtree(output)


Life.TestCase.settings = settings(
    max_examples=LIVES or 4,
    stateful_step_count=40 if LIVES else 10,
    derandomize=not LIVES,
    deadline=None,
    phases=(Phase.generate,),  # without shrinking, which takes minutes
    suppress_health_check=list(HealthCheck),
)
test_random_sequence_of_calls_keeps_the_learner_correct = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:the images that calibrate"
)(Life.TestCase)
