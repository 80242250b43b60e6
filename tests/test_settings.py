"""Numbers that settings take, and settings that stand in one text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import pytest
from annotated_types import Ge, Gt, Le

from dulbe_peft import DualModeLoraConfig, LearnerArguments
from dulbe_peft.arguments import AdapterSettings
from dulbe_peft.runs.settings import StreamArguments
from dulbe_peft.utils.settings import field_types
from dulbe_peft.utils.specs import convert, format_spec, parse_spec


def limits():
    """Every setting with its type and one of its limits."""
    for kind, declared in ((LearnerArguments,) * 2, (StreamArguments,) * 2, (DualModeLoraConfig, AdapterSettings)):
        for name, hint in field_types(declared).items():
            for part in (hint, *get_args(hint)):
                for limit in getattr(part, "__metadata__", ()):
                    yield pytest.param(kind, name, part.__origin__, limit, id=f"{name} {limit}")


@pytest.mark.parametrize(("kind", "name", "number", "limit"), list(limits()))
def test_a_setting_is_taken_at_its_limit_and_refused_beyond(kind, name, number, limit):
    (edge,) = (getattr(limit, key) for key in ("ge", "gt", "le") if hasattr(limit, key))
    down = -1 if isinstance(limit, (Ge, Gt)) else 1
    beyond = edge + down if number is int else np.nextafter(float(edge), down * math.inf).item()
    with pytest.raises(ValueError, match=f"^{name} must be "):
        kind(**{name: edge if isinstance(limit, Gt) else beyond})
    taken = np.nextafter(float(edge), math.inf).item() if isinstance(limit, Gt) else edge
    assert getattr(kind(**{name: taken}), name) == taken


def test_the_settings_have_limits():
    assert len(list(limits())) > 25 and {type(case.values[3]) for case in limits()} == {Ge, Gt, Le}


def test_a_configuration_with_numpy_s_ints_can_be_saved(tmp_path):
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


def test_values_take_the_types_of_the_parameters():
    texts = "rank=4,energy=1e-3,keep=no,name=4,steps=none,mode=0.5,depths=0/0.5/1,pair=1/2"
    made = Settings(**convert(Settings, parse_spec(f"s:{texts}")[1]))
    assert made == Settings(4, 1e-3, False, "4", None, 0.5, [0.0, 0.5, 1.0], (1, 2))
    assert Settings(**convert(Settings, {"steps": "7", "mode": "auto"})) == Settings(steps=7, mode="auto")
    assert Settings(**convert(Settings, parse_spec(format_spec("s", vars(made)))[1])) == made
    assert format_spec("s", {"depths": [0, 0.5], "keep": False}) == "s:depths=0/0.5,keep=false"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (":rank=4", "names nothing"),
        ("lora:rank", "'rank' in 'lora:rank' is no setting"),
        ("lora:rank=4,rank=5", "gives the setting 'rank' twice"),
        ("s:ranks=4", r"Settings has no setting 'ranks'; did you mean 'rank'\? \(known: rank, energy, "),
        ("s:name=4", "no setting 'name'"),
        ("s:mode=x", "mode must be a valid number.* or 'auto', got 'x'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        convert(Settings, parse_spec(text)[1], hidden=("name",))
