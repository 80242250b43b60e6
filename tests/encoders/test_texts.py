"""Prompts of classes: several prompt templates, and several texts for one class."""

import copy

import pytest
import torch
from lives import images_of, learned, stream, tiny_base, tiny_learner
from reference import randn
from small_runs import parse
from torch.nn import functional as F

from dulbe_peft import ClassIncrementalLearner, LearnerArguments, Task, run_stream
from dulbe_peft.encoders.loading import unit_text_embeds
from dulbe_peft.photos.commands.main import main
from dulbe_peft.photos.deployment.parts import class_facts
from dulbe_peft.photos.runs.run_settings import given_settings, pick

TEMPLATES = ("a photo of the digit {}.", "the number {}.", "{}")
NAMES = ("a0", "b0", "a1", "b1")


def trained(**args):
    return learned(tiny_learner(classifiers=("bridge", "text"), **args), 2)


@torch.no_grad()
def mean_of_texts(learner, *groups):
    """Return the normalised mean of each group's unit embeddings: texts encoded one by one, averaged in float64."""
    rows = []
    for group in groups:
        ids = [learner.processor.tokenizer([text], return_tensors="pt")["input_ids"] for text in group]
        embeds = [learner.clip.get_text_features(input_ids=each).pooler_output.double() for each in ids]
        rows.append(F.normalize(F.normalize(torch.cat(embeds), dim=1).mean(dim=0), dim=0))
    return torch.stack(rows).float()


@pytest.fixture(scope="module")
def of_all():
    return trained(prompt_template=list(TEMPLATES))


def test_classifiers_use_the_mean_of_all_templates_also_after_saving_and_export(of_all, tmp_path):
    actual = of_all.classifiers["text"].text_embeds
    prompts = [[template.replace("{}", name) for template in TEMPLATES] for name in NAMES]
    assert (actual - mean_of_texts(of_all, *prompts)).abs().max() < 1e-6
    assert (actual - mean_of_texts(of_all, *(each[:1] for each in prompts))).abs().max() > 1e-3
    of_all.save_pretrained(tmp_path / "it")
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "it", copy.deepcopy(tiny_base()[0]))
    assert loaded.args.prompt_template == TEMPLATES and loaded.args.training_template is None
    assert class_facts(loaded.state, loaded.classifiers["text"])["prompts"] == prompts


def adapter(learner):
    return {name: value for name, value in learner.model.state_dict().items() if "dulbe" in name}


def test_training_uses_one_template(of_all):
    """Training gives the same adapter as with the first template only; another template gives another adapter."""
    for args, same in (
        ({"prompt_template": TEMPLATES[0]}, True),
        ({"prompt_template": list(TEMPLATES[1:]), "training_template": TEMPLATES[0]}, True),
        ({"prompt_template": TEMPLATES[1]}, False),
    ):
        learner = trained(**args)
        equal = [torch.equal(value, adapter(of_all)[name]) for name, value in adapter(learner).items()]
        assert all(equal) == same, args


def arguments_of(*flags):
    actual = parse(["run", *flags])
    return pick(LearnerArguments, given_settings(actual.pop("config"), actual))


def test_templates_are_read_from_flags_files_and_yaml(tmp_path):
    (tmp_path / "three.txt").write_text("\n".join(TEMPLATES) + "\n", encoding="utf-8")
    (tmp_path / "run.yaml").write_text('prompt_template: ["a {}", "an {}"]\n', encoding="utf-8")
    assert arguments_of("--prompt-template", "one, {}").prompt_template == "one, {}"
    assert arguments_of("--prompt-template", "a {}", "--prompt-template", "an {}").templates == ("a {}", "an {}")
    assert arguments_of("--prompt-template", str(tmp_path / "three.txt")).templates == TEMPLATES
    assert arguments_of("--config", str(tmp_path / "run.yaml")).templates == ("a {}", "an {}")
    assert LearnerArguments(prompt_template=["a {}"]) == LearnerArguments(prompt_template="a {}")


TEXTS = {"a0": ["the digit zero.", "a round digit", "null"], "b1": ["drei"]}
ALL = (TEXTS["a0"], ["the digit b0."], ["the digit a1."], TEXTS["b1"])


def frozen(**fields):
    return tiny_learner("frozen", ("text", "bridge"), prompt_template="the digit {}.", **fields)


def test_class_embedding_is_the_mean_of_its_texts():
    learner = frozen()
    for task, name in zip(stream(2), TEXTS, strict=True):
        learner.learn_task(task.train, task.class_names, class_texts={name: TEXTS[name]})
    expected = mean_of_texts(learner, *ALL)
    for classifier in learner.classifiers.values():
        torch.testing.assert_close(classifier.text_embeds, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(learner.text_embeds(NAMES), expected, atol=1e-6, rtol=1e-5)
    first = mean_of_texts(learner, ["the digit zero."], ["drei"])
    for template, wanted in ((None, first), ("a {}", mean_of_texts(learner, ["a a0"], ["a b1"]))):
        trained = frozen(training_template=template).encoder.tokens(list(TEXTS), TEXTS)
        torch.testing.assert_close(unit_text_embeds(learner.clip, trained), wanted, atol=1e-6, rtol=1e-5)
    learner.forget_class("a0")
    assert learner.state.class_texts == {"b1": ("drei",)}


def test_run_saves_class_texts_and_refuses_to_resume_with_others(tmp_path):
    tests = [(randn(3, 16, 16, seed=number), number % 2) for number in range(40)]
    tasks = [Task(task.train, tests, task.class_names) for task in stream(2)]
    learner, whole = frozen(), frozen()
    run_stream(learner, tasks[:1], tmp_path / "run", class_texts={"a0": TEXTS["a0"]})
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "run", copy.deepcopy(tiny_base()[0]))
    assert loaded.state.class_texts == {"a0": tuple(TEXTS["a0"])}
    assert torch.equal(loaded.text_embeds(["a0"]), learner.text_embeds(["a0"]))
    with pytest.raises(ValueError, match="texts of the learned class 'a0' were"):
        run_stream(frozen(), tasks, tmp_path / "run", class_texts={"b1": ["drei"]})
    run_stream(frozen(), tasks, tmp_path / "run", class_texts=TEXTS)
    actual = run_stream(whole, tasks, tmp_path / "whole", class_texts=TEXTS).contents()
    file = "task-002/learner.json"
    assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    truth = torch.arange(80) % 2 + torch.arange(80) // 40 * 2
    images = torch.cat([whole.image_embeds(task.test) for task in tasks])
    embeds = [mean_of_texts(whole, *texts) for texts in (ALL, [[f"the digit {name}."] for name in NAMES])]
    accuracy, with_names = (float(((images @ e.T).argmax(dim=1) == truth).double().mean()) for e in embeds)
    assert actual["zero_shot"]["last_accuracy"] == pytest.approx(accuracy) and accuracy != with_names


def test_command_reads_class_texts_from_a_file(digit_folders, tmp_path, capsys):
    file = tmp_path / "texts.yaml"
    file.write_text('zero: [the digit zero., nought, a round digit]\nZero: [nothing]\n"tw\\e[2Jo": [two]\n')
    command = ["run", "--model", "demo", "--data", str(digit_folders(4, 2, 1)), "--strategy", "frozen"]
    command += ["--classifiers", "text", "--increment", "2", "--output", str(tmp_path / "run")]
    command += ["--device", "cpu", "--no-progress"]
    assert main([*command, "--class-texts", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "1 of 4 classes have their own texts" in printed
    assert "left out: texts of classes that the data does not have (Zero, tw\\x1b[2Jo)" in printed
    texts = ClassIncrementalLearner.from_pretrained(tmp_path / "run" / "task-002").state.class_texts
    assert texts == {"zero": ("the digit zero.", "nought", "a round digit")}


def test_unusable_class_texts_are_refused_and_change_nothing():
    learner, (task,) = frozen(), stream(1)
    for texts, words in (
        (["an owl"], "must map class names to lists of texts, got a list"),
        ({"nine": ["an owl"]}, r"class_texts\['nine'\] belongs to no class here"),
        ({"a0": "an owl"}, r"class_texts\['a0'\] must be a list of one or more texts, got 'an owl'"),
        ({"a0": ["null", " "]}, "not blank"),
        ({"a0": ["null " * 100]}, "tokens, but the text tower takes"),
        ({"a0": ["a", "b"], "b0": ["b", "a"]}, "classes 'a0' and 'b0' give the same prompt"),
        ({"a0": ["Null"], "b0": ["null"]}, "give the same tokens"),
        # The model ignores everything after an end token, so two classes could have the same text.
        ({"a0": ["null <|endoftext|> one"]}, r"contains '<\|endoftext\|>', a special token of the tokenizer"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            learner.learn_task(task.train, task.class_names, class_texts=texts)
    with pytest.raises(ValueError, match=r"'<\|endoftext\|>'"):
        learner.learn_task(images_of(0, 1), ["owl<|endoftext|>a", "owl"])
    assert not learner.tasks and not learner.state.class_texts
