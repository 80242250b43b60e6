from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pytest

from dulbe_peft.utils.specs import convert, format_spec, parse_spec


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


def test_names_and_settings_are_told_apart():
    assert parse_spec("lora") == ("lora", {})
    assert parse_spec(" inflora : energy = 0.97 , rank=4") == ("inflora", {"energy": "0.97", "rank": "4"})
    assert parse_spec("a:b=c=d") == ("a", {"b": "c=d"})


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
