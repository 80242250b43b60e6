"""Expressions that name layers: ordinary ones pass, and those that could run for ever do not."""

from __future__ import annotations

import re

import pytest

from dulbe_peft import DualModeLoraConfig
from dulbe_peft.adapter.expressions import check_expression

NAME = "vision_model.encoder.layers.11.self_attn.k_proj"


@pytest.mark.parametrize(
    "expression",
    [
        r".*\.fc1",
        r".*layers\.(3|5)\..*(k|v)_proj",
        r"vision_model\.encoder\.layers\.(?:[0-5]|1[01])\.mlp\.fc[12]",
        r".*\.layers\.\d+\.mlp\..*",
        r"(?!text).*(q|k|v)_proj",
        r"[a-z]{2,5}.*",
        r"(\.\w{1,3}){1,4}",
    ],
)
def test_ordinary_expressions_pass(expression):
    check_expression("target_modules", expression)
    assert DualModeLoraConfig(target_modules=expression).target_modules == expression


@pytest.mark.parametrize(
    "expression",
    [
        "([a-z._0-9]+)+!",
        "(?:[a-z._0-9]*)*!",
        "((aa|a)+)!",
        "(.|.)*!",
        "(.*)*!",
        "(?:.{1,50}){1,50}!",
        "(?P<x>.)(?:(?P=x)*)+!",
        "(?:(?:.+)?)+!",
        "(?=(.+)+!)",
        ".*.*.*.*.*.*!",
        "(" * 200 + ")" * 200 + "a" * 999,
        "*",
    ],
)
def test_an_expression_that_could_run_for_ever_is_refused(expression):
    with pytest.raises(ValueError, match="target_modules"):
        DualModeLoraConfig(target_modules=expression)


def test_the_worst_expression_that_passes_ends():
    expression = ".*.*.*.*.*!"
    check_expression("target_modules", expression)
    assert re.fullmatch(expression, NAME) is None


def test_a_layers_pattern_is_a_name():
    with pytest.raises(ValueError, match="layers_pattern has '\\(a\\+\\)\\+'"):
        DualModeLoraConfig(target_modules=["k_proj"], layers_to_transform=[0], layers_pattern=["(a+)+"])
