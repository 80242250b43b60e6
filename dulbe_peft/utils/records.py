"""JSON files as pydantic models: a file that is damaged or foreign ends in one error that names file and field."""

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dulbe_peft.utils.files import write_json

R = TypeVar("R", bound="Record")
Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]


class Record(BaseModel):
    """What a JSON file holds. Its fields are all there is: an unknown or missing one is an error, and so is NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def read_record(path: str | Path, kind: type[R]) -> R:
    """The record in a JSON file; a `ValueError` names the file and the field that are wrong."""
    content = Path(path).read_bytes()
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise ValueError(f"{path} is damaged or foreign: {first_problem(error)}") from error


def write_record(path: Path, record: Record) -> None:
    """Write a record as JSON; the file is replaced at once."""
    write_json(path, record.model_dump(mode="json"))


def first_problem(error: ValidationError) -> str:
    """The first thing that pydantic found, in one line: field, reason, and the value that was there."""
    problem: Any = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in problem["loc"])
    value = "" if isinstance(problem["input"], (dict, list, bytes)) else f", got {problem['input']!r:.100}"
    return f"{field + ': ' if field else ''}{problem['msg']}{value}"
