"""Rules as functions from tensors to tensors, without a classifier around them."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import reference
import torch
from taught import DIM, KINDS, NAMED, SCALE, SPECS, digits, task
from test_classifiers import lift

import dulbe_peft
from dulbe_peft.classifiers import Rule, classifier_of, make_classifier, parse_classifiers, per_class
from dulbe_peft.classifiers.checks import unit_features
from dulbe_peft.classifiers.state import State

# ridge and ranpac choose lambda on images that the classifier holds out.
WITHOUT_CHOICE = {"ridge": "ridge fixed", "ranpac": "ranpac fixed"}
TASKS = (range(3), range(3, 5))


def unit(rows):
    return unit_features(rows, "rows", DIM, None, "cpu")


def rule_of(name):
    (recipe,) = parse_classifiers(SPECS[name]).values()
    return recipe.kind.rule_type(embed_dim=DIM, logit_scale=SCALE, **recipe.chosen)


def learned_by(rule):
    """Return the tensors of a rule after two tasks. No function may change the tensors that it is given."""
    layouts = rule.layouts()
    state = State(layouts, {name: layout.empty() for name, layout in layouts.items()}, [])
    for classes in TASKS:
        images, labels = task(classes, 9)
        texts = unit(digits.texts[: classes.stop])
        own = texts[-len(classes) :]
        given = {"text_embeds": texts} if "text_embeds" in state else {}
        if rule.needs_each_text:
            given |= state.with_rows(each_text=unit(own), num_texts=torch.ones(len(classes), dtype=torch.int64))
        state, images = state.replaced(given), unit(images)
        before = {name: tensor.clone() for name, tensor in state.items()}
        new = [f"class {c}" for c in classes]
        changes = rule.added(state, images, labels + classes.start, new)
        assert all(torch.equal(state[name], before[name]) for name in before)
        state = state.replaced(changes, [*state.class_names, *new])
        state, _ = rule.judged(state, images, labels + classes.start)
    return state


@pytest.mark.parametrize("name", ["text", "prototype", "lda fixed", "gda fixed", "ridge fixed", "ranpac fixed"])
def test_scores_of_a_rule_equal_the_literal_float64_version(name):
    rule = rule_of(name)
    images = torch.cat([task(classes, 9)[0] for classes in TASKS])
    known = images, torch.arange(5).repeat_interleave(9).tolist(), digits.tests
    text = SCALE * reference.unit(digits.tests) @ reference.unit(digits.texts[:5]).T
    expected = {
        "text": lambda: text,
        "prototype": lambda: reference.class_mean_logits(*known, SCALE),
        "lda fixed": lambda: reference.lda_logits(*known, 0.1, prior_images=1.0),
        "gda fixed": lambda: text + 0.5 * reference.lda_logits(*known, None, prior_images=1.0),
        "ridge fixed": lambda: SCALE * reference.ridge_scores(*known, 0.5),
        "ranpac fixed": lambda: SCALE * reference.ridge_scores(*known, 20.0, lift=lift),
    }[name]()
    actual = rule.scores(learned_by(rule), unit(digits.tests)).double()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.plain(*KINDS)
@pytest.mark.parametrize("name", NAMED)
def test_a_rule_keeps_valid_tensors_and_its_classifier_the_same_ones(name):
    name = WITHOUT_CHOICE.get(name, name)
    rule, classifier = rule_of(name), make_classifier(SPECS[name], DIM, SCALE)
    state, tests = learned_by(rule), unit(digits.tests)
    state.check()
    rule.check(state)
    for classes in TASKS:
        images, labels = task(classes, 9)
        texts = digits.texts[: classes.stop]
        classifier.add_classes([f"class {c}" for c in classes], images, labels, texts)
    assert classifier.class_names == state.class_names and classifier.rule == rule
    assert {key for key, value in classifier.tensors().items() if not torch.equal(value, state[key])} <= {"errors"}
    assert torch.equal(classifier.logits(tests), rule.scores(state, tests))
    function, tensors = rule.formula(state)
    torch.testing.assert_close(function(tests, **tensors), rule.scores(state, tests), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("taken", ["classes", "replaced", "class_names", "layouts", "items", "novelty", "device"])
def test_tensors_with_names_of_a_state_or_a_classifier_are_refused(taken):
    @dataclass(frozen=True)
    class TakingRule(Rule):
        name = "taking"

        def tensors(self):
            return {taken: per_class(self.embed_dim)}

    with pytest.raises(TypeError, match=f"the 'taking' classifier: '{taken}' cannot be the name of a tensor"):
        classifier_of(TakingRule)(4)


def test_a_rule_that_can_something_unknown_is_refused():
    @dataclass(frozen=True)
    class FlyingRule(Rule):
        can = frozenset({"merge", "fly"})

    with pytest.raises(TypeError, match="FlyingRule.can must be of update, merge, .*got 'fly'"):
        classifier_of(FlyingRule)


def test_type_checkers_see_the_settings_of_every_classifier_that_has_a_class():
    found = []
    for path in Path(dulbe_peft.__file__).parent.glob("*/*.py"):
        text = path.read_text(encoding="utf-8")
        for cls, rule, body in re.findall(
            r"^class (\w+)\(\w+, rule=(\w+).*\):\n((?:    .*\n|\n)*)", text, re.MULTILINE
        ):
            assert f"@takes({rule})\n        def __init__" in body, cls
            found.append(cls)
    assert len(found) >= 11
