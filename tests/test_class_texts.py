"""Several texts a class: what classifiers make of them, that they are saved and resumed, and what is refused."""

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from dulbe_peft import ClassIncrementalLearner, LearnerArguments, class_incremental_tasks
from dulbe_peft.commands.main import main
from dulbe_peft.data.readers import load_digit_images
from dulbe_peft.encoders.loading import unit_text_embeds

TEXTS = {"zero": ["the digit zero.", "a round digit", "null"], "three": ["drei"]}
NAMES = ("zero", "one", "two", "three")


@pytest.fixture(scope="module")
def tasks():
    return class_incremental_tasks(
        load_digit_images("train").at(slice(0, 120)), load_digit_images("test"), increment=2
    )


def learner_of(base, **fields):
    args = LearnerArguments(device="cpu", progress=False, prompt_template="the digit {}.", **fields)
    return ClassIncrementalLearner(
        copy.deepcopy(base[0]), base[1], args=args, strategy="frozen", classifiers=("text", "bridge")
    )


def literal(learner, *groups):
    """The mean of each group's unit embeddings, normalised, in float64."""
    rows = []
    for group in groups:
        ids = [learner.processor.tokenizer([text], return_tensors="pt")["input_ids"] for text in group]
        embeds = [unit_text_embeds(learner.clip, {"input_ids": each}).double() for each in ids]
        rows.append(F.normalize(torch.cat(embeds).mean(dim=0), dim=0))
    return torch.stack(rows).float()


def test_a_class_is_the_mean_of_its_texts(base, tasks):
    learner = learner_of(base)
    learner.learn_task(tasks[0].train, class_texts={"zero": TEXTS["zero"]})
    learner.learn_task(tasks[1].train, class_texts={"three": TEXTS["three"]})
    expected = literal(learner, TEXTS["zero"], ["the digit one."], ["the digit two."], ["drei"])
    for classifier in learner.classifiers.values():
        torch.testing.assert_close(classifier.text_embeds, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(learner.text_embeds(NAMES), expected, atol=1e-6, rtol=1e-5)
    first = literal(learner, ["the digit zero."], ["drei"])
    for template, wanted in ((None, first), ("a {}", literal(learner, ["a zero"], ["a three"]))):
        trained = learner_of(base, training_template=template).encoder.tokens(["zero", "three"], TEXTS)
        torch.testing.assert_close(unit_text_embeds(learner.clip, trained), wanted, atol=1e-6, rtol=1e-5)
    learner.forget_class("zero")
    assert learner.state.class_texts == {"three": ("drei",)}


def test_a_run_keeps_them_and_goes_on_with_the_same_ones(base, tasks, tmp_path):
    learner, whole = learner_of(base), learner_of(base)
    learner.run(tasks[:1], tmp_path / "run", class_texts={"zero": TEXTS["zero"]})
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "run")
    assert loaded.state.class_texts == {"zero": tuple(TEXTS["zero"])}
    assert torch.equal(loaded.text_embeds(["zero"]), learner.text_embeds(["zero"]))
    with pytest.raises(ValueError, match="texts of the class 'zero', which is learned, were"):
        learner_of(base).run(tasks[:2], tmp_path / "run", class_texts={"three": ["drei"]})
    learner_of(base).run(tasks[:2], tmp_path / "run", class_texts=TEXTS)
    found = whole.run(tasks[:2], tmp_path / "whole", class_texts=TEXTS)
    file = "task-002/learner.json"
    assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    expected = literal(whole, TEXTS["zero"], ["the digit one."], ["the digit two."], ["drei"])
    images = torch.cat([whole.image_embeds(task.test) for task in tasks[:2]])
    truth = np.concatenate([task.test.labels + 2 * number for number, task in enumerate(tasks[:2])])
    right = ((images @ expected.T).argmax(dim=1).numpy() == truth).mean()
    assert found["zero_shot"]["last_accuracy"] == pytest.approx(right)


def test_the_command_reads_them_from_a_file(tmp_path, capsys):
    file = tmp_path / "texts.yaml"
    file.write_text("zero: [the digit zero., nought, a round digit]\nno class: [nothing]\n")
    command = ["run", "--model", "demo", "--data", "demo-digits", "--strategy", "frozen", "--classifiers", "text"]
    command += ["--output", str(tmp_path / "run"), "--device", "cpu", "--no-progress", "--max-tasks", "1"]
    assert main([*command, "--class-texts", str(file)]) == 0
    assert "1 of 10 classes have texts of their own" in capsys.readouterr().out
    texts = ClassIncrementalLearner.from_pretrained(tmp_path / "run").state.class_texts
    assert texts == {"zero": ("the digit zero.", "nought", "a round digit")}


def test_texts_of_no_use_change_nothing(base, tasks):
    learner = learner_of(base)
    for texts, words in (
        (["an owl"], "must map class names to lists of texts, got a list"),
        ({"nine": ["an owl"]}, r"class_texts\['nine'\] is of no class here"),
        ({"zero": "an owl"}, r"class_texts\['zero'\] must be a list of one text or more, got 'an owl'"),
        ({"zero": ["null", " "]}, "not blank"),
        ({"zero": ["null " * 100]}, "tokens, the text tower takes"),
        ({"zero": ["a", "b"], "one": ["b", "a"]}, "classes 'zero' and 'one' give the same prompt"),
        ({"zero": ["Null"], "one": ["null"]}, "the same to the tokenizer"),
        # What stands behind the end sign would not be read, so two classes could have one text.
        ({"zero": ["null <|endoftext|> one"]}, r"holds '<\|endoftext\|>', a sign of the tokenizer's own"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            learner.learn_task(tasks[0].train, class_texts=texts)
    with pytest.raises(ValueError, match=r"'<\|endoftext\|>'"):
        learner.learn_task(tasks[0].train.at(slice(None), class_names=["owl<|endoftext|>a", "owl"]))
    assert not learner.tasks and not learner.state.class_texts
