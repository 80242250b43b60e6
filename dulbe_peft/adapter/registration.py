"""Add the method to `PeftType`, PEFT's enumeration of methods, which was not made to be extended."""

from typing import Any

from peft.utils import PeftType

PREFIX = "dulbe_"


def register_peft_type() -> PeftType:
    """Add a real enumeration member, once, so that JSON, pickle and deepcopy work as for PEFT's own methods."""
    name = "DULBE"
    if name in PeftType.__members__:
        return PeftType[name]
    kind: Any = PeftType
    member: Any = str.__new__(PeftType, name)
    member._name_ = name
    member._value_ = name
    member.__objclass__ = PeftType
    member._sort_order_ = len(PeftType.__members__)
    PeftType._member_names_.append(name)
    PeftType._member_map_[name] = member
    PeftType._value2member_map_[name] = member
    if hasattr(kind, "_hashable_values_"):  # Python >= 3.13
        kind._hashable_values_.append(name)
    type.__setattr__(PeftType, name, member)
    return member


DULBE = register_peft_type()
