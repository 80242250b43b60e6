"""JSON files as pydantic models. A damaged or foreign file raises an error that names the file and the field."""

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dulbe_peft.utils.files import write_json

R = TypeVar("R", bound="Record")
Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]


class Record(BaseModel):
    """The content of a JSON file. An unknown field, a missing field and NaN are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def read_record(path: str | Path, kind: type[R]) -> R:
    """Return the record in a JSON file. If it is invalid, a `ValueError` names the file and the field."""
    content = Path(path).read_bytes()
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise ValueError(f"{path} is damaged or foreign: {first_problem(error)}") from error


def write_record(path: Path, record: Record) -> None:
    """Write a record as JSON, replacing the file in one step."""
    write_json(path, record.model_dump(mode="json"))


def first_problem(error: ValidationError) -> str:
    """Describe the first problem that pydantic found, in one line: the field, the reason and the value."""
    problem = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in problem["loc"])
    value = "" if isinstance(problem["input"], (dict, list, bytes)) else f", got {problem['input']!r:.100}"
    return f"{field + ': ' if field else ''}{problem['msg']}{value}"
