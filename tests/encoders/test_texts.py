"""Texts of classes: several prompt templates, and several texts of a class."""

import copy

import numpy as np
import pytest
import torch
from lives import stream, tiny_base, tiny_learner
from small_runs import learner_of, parse
from torch.nn import functional as F

from dulbe_peft import ClassIncrementalLearner, LearnerArguments, class_incremental_tasks
from dulbe_peft.commands.main import main
from dulbe_peft.data.readers import load_digit_images
from dulbe_peft.deployment.parts import class_facts
from dulbe_peft.encoders.loading import unit_text_embeds
from dulbe_peft.runs.settings import given_settings, pick

TEMPLATES = ("a photo of the digit {}.", "the number {}.", "{}")
NAMES = ("a0", "b0", "a1", "b1")


def learned_from_stream(**args):
    learner = tiny_learner(classifiers=("bridge", "text"), **args)
    for task in stream(2):
        learner.learn_task(task.train, task.class_names)
    return learner


@torch.no_grad()
def mean_of_texts(learner, *groups):
    """The mean of each group's unit embeddings, normalised: each text by itself, in float64 once it left the tower."""
    rows = []
    for group in groups:
        ids = [learner.processor.tokenizer([text], return_tensors="pt")["input_ids"] for text in group]
        embeds = [learner.clip.get_text_features(input_ids=each).pooler_output.double() for each in ids]
        rows.append(F.normalize(F.normalize(torch.cat(embeds), dim=1).mean(dim=0), dim=0))
    return torch.stack(rows).float()


@pytest.fixture(scope="module")
def learned():
    return learned_from_stream(prompt_template=list(TEMPLATES))


def test_classifiers_see_the_mean_of_all_templates_which_are_saved_and_exported(learned, tmp_path):
    found = learned.classifiers["text"].text_embeds
    prompts = [[template.replace("{}", name) for template in TEMPLATES] for name in NAMES]
    assert (found - mean_of_texts(learned, *prompts)).abs().max() < 1e-6
    assert (found - mean_of_texts(learned, *(each[:1] for each in prompts))).abs().max() > 1e-3
    learned.save_pretrained(tmp_path / "it")
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "it", copy.deepcopy(tiny_base()[0]))
    assert loaded.args.prompt_template == TEMPLATES and loaded.args.training_template is None
    assert class_facts(loaded.state, loaded.classifiers["text"])["prompts"] == prompts


def adapter(learner):
    return {name: value for name, value in learner.model.state_dict().items() if "dulbe" in name}


def test_training_sees_one_template(learned):
    """The same adapter comes out as with that template alone; another one gives another adapter."""
    for args, same in (
        ({"prompt_template": TEMPLATES[0]}, True),
        ({"prompt_template": list(TEMPLATES[1:]), "training_template": TEMPLATES[0]}, True),
        ({"prompt_template": TEMPLATES[1]}, False),
    ):
        learner = learned_from_stream(**args)
        equal = [torch.equal(value, adapter(learned)[name]) for name, value in adapter(learner).items()]
        assert all(equal) == same, args


def arguments_of(*flags):
    found = parse(["run", *flags])
    return pick(LearnerArguments, given_settings(found.pop("config"), found))


def test_templates_from_flags_files_and_yaml(tmp_path):
    (tmp_path / "three.txt").write_text("\n".join(TEMPLATES) + "\n", encoding="utf-8")
    (tmp_path / "run.yaml").write_text('prompt_template: ["a {}", "an {}"]\n', encoding="utf-8")
    assert arguments_of("--prompt-template", "one, {}").prompt_template == "one, {}"
    assert arguments_of("--prompt-template", "a {}", "--prompt-template", "an {}").templates == ("a {}", "an {}")
    assert arguments_of("--prompt-template", str(tmp_path / "three.txt")).templates == TEMPLATES
    assert arguments_of("--config", str(tmp_path / "run.yaml")).templates == ("a {}", "an {}")
    assert LearnerArguments(prompt_template=["a {}"]) == LearnerArguments(prompt_template="a {}")


TEXTS = {"zero": ["the digit zero.", "a round digit", "null"], "three": ["drei"]}
DIGIT_NAMES = ("zero", "one", "two", "three")


@pytest.fixture(scope="module")
def tasks():
    train, test = load_digit_images("train").at(slice(0, 120)), load_digit_images("test").at(slice(0, 120))
    return class_incremental_tasks(train, test, increment=2)


def frozen(base, **fields):
    return learner_of(base, "frozen", ("text", "bridge"), prompt_template="the digit {}.", **fields)


def test_a_class_is_the_mean_of_its_texts(base, tasks):
    learner = frozen(base)
    learner.learn_task(tasks[0].train, class_texts={"zero": TEXTS["zero"]})
    learner.learn_task(tasks[1].train, class_texts={"three": TEXTS["three"]})
    expected = mean_of_texts(learner, TEXTS["zero"], ["the digit one."], ["the digit two."], ["drei"])
    for classifier in learner.classifiers.values():
        torch.testing.assert_close(classifier.text_embeds, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(learner.text_embeds(DIGIT_NAMES), expected, atol=1e-6, rtol=1e-5)
    first = mean_of_texts(learner, ["the digit zero."], ["drei"])
    for template, wanted in ((None, first), ("a {}", mean_of_texts(learner, ["a zero"], ["a three"]))):
        trained = frozen(base, training_template=template).encoder.tokens(["zero", "three"], TEXTS)
        torch.testing.assert_close(unit_text_embeds(learner.clip, trained), wanted, atol=1e-6, rtol=1e-5)
    learner.forget_class("zero")
    assert learner.state.class_texts == {"three": ("drei",)}


def test_a_run_keeps_them_and_goes_on_with_the_same_ones(base, tasks, tmp_path):
    learner, whole = frozen(base), frozen(base)
    learner.run(tasks[:1], tmp_path / "run", class_texts={"zero": TEXTS["zero"]})
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "run")
    assert loaded.state.class_texts == {"zero": tuple(TEXTS["zero"])}
    assert torch.equal(loaded.text_embeds(["zero"]), learner.text_embeds(["zero"]))
    with pytest.raises(ValueError, match="texts of the class 'zero', which is learned, were"):
        frozen(base).run(tasks[:2], tmp_path / "run", class_texts={"three": ["drei"]})
    frozen(base).run(tasks[:2], tmp_path / "run", class_texts=TEXTS)
    found = whole.run(tasks[:2], tmp_path / "whole", class_texts=TEXTS)
    file = "task-002/learner.json"
    assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    expected = mean_of_texts(whole, TEXTS["zero"], ["the digit one."], ["the digit two."], ["drei"])
    images = torch.cat([whole.image_embeds(task.test) for task in tasks[:2]])
    truth = np.concatenate([task.test.labels + 2 * number for number, task in enumerate(tasks[:2])])
    right = ((images @ expected.T).argmax(dim=1).numpy() == truth).mean()
    assert found["zero_shot"]["last_accuracy"] == pytest.approx(right)


def test_the_command_reads_them_from_a_file(digit_folders, tmp_path, capsys):
    file = tmp_path / "texts.yaml"
    file.write_text('zero: [the digit zero., nought, a round digit]\nZero: [nothing]\n"tw\\e[2Jo": [two]\n')
    command = ["run", "--model", "demo", "--data", str(digit_folders(4, 2, 1)), "--strategy", "frozen"]
    command += ["--classifiers", "text", "--increment", "2", "--output", str(tmp_path / "run")]
    command += ["--device", "cpu", "--no-progress"]
    assert main([*command, "--class-texts", str(file)]) == 0
    said = capsys.readouterr().out
    assert "1 of 4 classes have texts of their own" in said
    assert "left out: texts of classes that are not there (Zero, tw\\x1b[2Jo)" in said
    texts = ClassIncrementalLearner.from_pretrained(tmp_path / "run" / "task-002").state.class_texts
    assert texts == {"zero": ("the digit zero.", "nought", "a round digit")}


def test_texts_of_no_use_change_nothing(base, tasks):
    learner = frozen(base)
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
