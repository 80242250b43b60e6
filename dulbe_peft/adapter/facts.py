"""The forms of what a saved adapter's files say about it; `config` reads and writes them."""

from typing import TypeVar

from pydantic import ValidationError

from dulbe_peft.utils.records import Record, first_problem

RecordType = TypeVar("RecordType", bound=Record)


class MadeOn(Record):
    """What the configuration's file says about the base model."""

    tower: str | None = None
    base_digests: dict[str, str] = {}
    base_settings: dict[str, str] = {}


class SavedFacts(Record):
    """What the metadata of the adapter's file says, with a digest of its tensors."""

    tower: str | None
    base_digests: dict[str, str]
    base_settings: dict[str, str]
    sha256: str


def checked(kind: type[RecordType], content: object, what: str) -> RecordType:
    """Return the content as a record. If it does not have this form, raise a `ValueError` that names `what`."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise ValueError(f"{what} is damaged: {first_problem(error)}") from error
