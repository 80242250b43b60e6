"""Several prompt templates: classifiers see the mean of the unit embeddings, losses see one template."""

import copy

import pytest
import torch
from lives import stream, tiny_base, tiny_learner
from small_runs import parse
from torch.nn import functional as F

from dulbe_peft import ClassIncrementalLearner, LearnerArguments
from dulbe_peft.deployment.parts import class_facts
from dulbe_peft.encoders.loading import tokenize
from dulbe_peft.runs.settings import given_settings, pick

TEMPLATES = ("a photo of the digit {}.", "the number {}.", "{}")
NAMES = ("a0", "b0", "a1", "b1")


def learned_from_stream(**args):
    learner = tiny_learner(classifiers=("bridge", "text"), **args)
    for task in stream(2):
        learner.learn_task(task.train, task.class_names)
    return learner


@torch.no_grad()
def literal(model, processor, names, templates):
    """Each prompt by itself, in float64 once it has left the tower."""
    rows = []
    for name in names:
        units = []
        for template in templates:
            ids = tokenize(processor, [template.replace("{}", name)], model)["input_ids"]
            units.append(F.normalize(model.get_text_features(input_ids=ids).pooler_output.double()[0], dim=0))
        rows.append(F.normalize(torch.stack(units).mean(dim=0), dim=0))
    return torch.stack(rows)


@pytest.fixture(scope="module")
def learned():
    return learned_from_stream(prompt_template=list(TEMPLATES))


def test_classifiers_see_the_mean_of_all_templates(learned):
    found = learned.classifiers["text"].text_embeds
    assert (found - literal(learned.clip, learned.processor, NAMES, TEMPLATES)).abs().max() < 1e-6
    assert (found - literal(learned.clip, learned.processor, NAMES, TEMPLATES[:1])).abs().max() > 1e-3


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


def test_templates_are_saved_and_exported(learned, tmp_path):
    learned.save_pretrained(tmp_path / "it")
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "it", copy.deepcopy(tiny_base()[0]))
    assert loaded.args.prompt_template == TEMPLATES and loaded.args.training_template is None
    facts = class_facts(loaded.state, loaded.classifiers["text"])
    assert facts["prompts"][1] == ["a photo of the digit b0.", "the number b0.", "b0"]


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
