"""The entry of the method in PEFT's table of types.

PEFT keeps its methods in the string enumeration `PeftType` and offers no way to add a member from outside.
`register_peft_type` adds a real one: JSON, pickle and deepcopy work as for PEFT's own methods.
"""

from typing import Any

from peft.utils import PeftType

PREFIX = "dulbe_"


def register_peft_type() -> PeftType:
    """Add the method to PEFT's enumeration of methods, once; later calls return the same member."""
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
