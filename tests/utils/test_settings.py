"""Test the types and limits of settings, and specs, which are settings written as one string."""

import inspect
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal, get_args

import numpy as np
import pytest
from annotated_types import Ge, Gt, Le

from dulbe_peft import CLASSIFIERS, STRATEGIES, DualModeLoraConfig
from dulbe_peft.arguments import AdapterSettings
from dulbe_peft.classifiers import parse_classifier
from dulbe_peft.classifiers.rule import setting_defaults
from dulbe_peft.photos.runs.run_settings import GROUPS
from dulbe_peft.strategies import make_strategy
from dulbe_peft.utils.settings import check_value, field_types
from dulbe_peft.utils.specs import convert, format_spec, parse_spec


def declared():
    """Yield for every setting of the package: the object's constructor, the name, the type, and a parser or None."""
    for owner in GROUPS.values():
        kind = DualModeLoraConfig if owner is AdapterSettings else owner
        for name, hint in field_types(owner).items():
            yield kind, name, hint, None
    for cls in CLASSIFIERS.values():
        for name in setting_defaults(cls.rule_type):
            yield (
                partial(cls, 8),
                name,
                field_types(cls.rule_type)[name],
                None if name == "text_dim" else partial(parse_classifier, f"{cls.name}:{name}=%s"),  # the model's
            )
    for cls in STRATEGIES.values():
        for name, hint in field_types(cls).items():
            yield cls, name, hint, partial(make_strategy, f"{cls.name}:{name}=%s")


def test_docstrings_name_every_setting():
    for kind in (DualModeLoraConfig, *GROUPS.values()):
        text = inspect.getdoc(kind)
        assert text.count("Args:\n") == 1 and not text.startswith("Args:"), kind
        helps = {field.name: field.metadata["help"] for field in fields(kind) if "help" in field.metadata}
        entries = dict(re.findall(r"^    (\w+): (.+?)(?=\n    \w|\n\n|\Z)", text, flags=re.MULTILINE | re.DOTALL))
        assert {name: " ".join(entry.split()) for name, entry in entries.items() if name in helps} == helps
        assert kind is DualModeLoraConfig or len(helps) == len(fields(kind))


def named(kind, name):
    return f"{getattr(kind, 'func', kind).__name__} {name}"


def limits():
    """Yield every limit of every setting."""
    for kind, name, hint, text in declared():
        for part in (hint, *get_args(hint)):
            for limit in getattr(part, "__metadata__", ()):
                if isinstance(limit, (Ge, Gt, Le)):
                    setting = kind, name, hint, part.__origin__, limit, text
                    yield pytest.param(*setting, id=f"{named(kind, name)} {limit}")


@pytest.mark.parametrize(("kind", "name", "hint", "number", "limit", "text"), list(limits()))
def test_limits_raise_the_same_message_from_python_and_text(kind, name, hint, number, limit, text):
    (edge,) = (getattr(limit, key) for key in ("ge", "gt", "le") if hasattr(limit, key))
    down = -1 if isinstance(limit, (Ge, Gt)) else 1
    beyond = edge + down if number is int else np.nextafter(float(edge), down * math.inf).item()
    wrong = edge if isinstance(limit, Gt) else beyond
    with pytest.raises(ValueError, match=f"^(the .*: )?{name} must be ") as error:
        kind(**{name: wrong})
    valid = np.nextafter(float(edge), math.inf).item() if isinstance(limit, Gt) else edge
    assert check_value(name, hint, valid) == valid and type(check_value(name, hint, np.array(valid)[()])) is number
    if text is not None:
        with pytest.raises(ValueError, match="must be") as parsed:
            text.func(text.args[0] % wrong)
        assert str(parsed.value) == str(error.value)


@pytest.mark.parametrize(("kind", "name"), [pytest.param(*row[:2], id=named(*row[:2])) for row in declared()])
def test_setting_of_wrong_type_is_refused(kind, name):
    with pytest.raises((TypeError, ValueError), match=f"^(the .*: )?{name} must be .*, got <object object"):
        kind(**{name: object()})


def test_many_settings_declare_limits():
    assert len(list(limits())) > 100 and {type(case.values[4]) for case in limits()} == {Ge, Gt, Le}


def test_configuration_with_numpy_integers_can_be_saved(tmp_path):
    config = DualModeLoraConfig(residual_rank=np.int64(2), layers_to_transform=list(np.array([0, 1, 3])))
    config.save_pretrained(tmp_path)
    saved = DualModeLoraConfig.from_pretrained(tmp_path)
    assert saved.residual_rank == 2 and saved.layers_to_transform == [0, 1, 3]


@dataclass(frozen=True)
class Settings:
    rank: int = 8
    energy: float = 0.97
    keep: bool = True
    name: str = "x"
    steps: int | None = None
    mode: float | Literal["auto"] = "auto"
    depths: Sequence[float] = ()
    pair: tuple[int, ...] = ()


def test_text_values_are_converted_to_field_types():
    texts = "rank=4,energy=1e-3,keep=no,name=4,steps=none,mode=0.5,depths=0/0.5/1,pair=1/2"
    parsed = Settings(**convert(Settings, parse_spec(f"s:{texts}")[1], "a thing"))
    assert parsed == Settings(4, 1e-3, False, "4", None, 0.5, [0.0, 0.5, 1.0], (1, 2))
    assert Settings(**convert(Settings, {"steps": "7", "mode": "auto"}, "a thing")) == Settings(steps=7, mode="auto")
    assert Settings(**convert(Settings, parse_spec(format_spec("s", vars(parsed)))[1], "a thing")) == parsed
    assert format_spec("s", {"depths": [0, 0.5], "keep": False}) == "s:depths=0/0.5,keep=false"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (":rank=4", "has no name"),
        ("lora:rank", "'rank' in 'lora:rank' is not a setting"),
        ("lora:rank=4,rank=5", "gives the setting 'rank' twice"),
        ("s:ranks=4", r"a thing has no setting 'ranks'; did you mean 'rank'\? \(known: rank, energy, "),
        ("s:name=4", "no setting 'name'"),
        ("s:rank=x/y", r"a thing: rank must be a valid integer, got \['x', 'y'\]"),
        ("s:mode=x", "a thing: mode must be a valid number or 'auto', got 'x'"),
    ],
)
def test_invalid_text_settings_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        convert(Settings, parse_spec(text)[1], "a thing", hidden=("name",))
