"""Test that docs/classifiers.md says which classifiers can rename a class, join two, and remove an image."""

import re
from pathlib import Path

import pytest
import torch
from taught import KINDS, NAMED, learned

from dulbe_peft.classifiers import make_classifier

PAGE = (Path(__file__).parents[2] / "docs" / "classifiers.md").read_text(encoding="utf-8")


def named(pattern):
    (sentence,) = re.findall(pattern, " ".join(PAGE.split()))
    return set(re.findall(r"`(\w+)`", sentence))


EXACT = named(r"is exact up to rounding for (.*?), but settings")
REFUSES = named(r"only (`\w+`) refuses\.")
REMOVES = EXACT | named(r"(`\w+`) can also remove an image")
JOINS = EXACT | named(r"and (`\w+`) can join two classes")


@pytest.mark.plain(*KINDS)
@pytest.mark.parametrize("name", NAMED)
def test_page_says_which_classifier_can_rename_a_class(name):
    classifier = learned(name, range(4), per_class=20).fork()
    before = [*classifier.class_names]
    embed = torch.nn.functional.normalize(torch.arange(1.0, 65.0), dim=0)
    if name in REFUSES:
        with pytest.raises(ValueError, match="cannot rename"):
            classifier.rename_class(before[1], "new", embed)
    else:
        classifier.rename_class(before[1], "new", embed if classifier.reads_text else None)
        assert [*classifier.class_names] == [before[0], "new", *before[2:]]


def test_page_says_which_classifiers_remove_images_and_join_classes():
    rules = {name: make_classifier(name, 8).rule for name in NAMED}
    assert {name for name, rule in rules.items() if "forget images" in rule.can} == REMOVES
    assert {name for name, rule in rules.items() if "merge" in rule.can} == JOINS
