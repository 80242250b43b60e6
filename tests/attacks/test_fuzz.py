"""Random inputs: whatever is handed in, what comes out is right, or one of the documented errors."""

import dataclasses
import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dulbe_peft import CheckpointError, DualModeLoraConfig, LearnerArguments
from dulbe_peft.arguments import AdapterSettings
from dulbe_peft.commands.main import main
from dulbe_peft.data.names import check_class_names, format_prompts, normalized

DOCUMENTED = (ValueError, TypeError, FileNotFoundError, CheckpointError)
CHEAP = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(CHEAP, max_examples=150)

odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**9, 10**12, 2**63, -1, 0]),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-2, 2), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@MANY
@example(names=["\uf900"])  # whose recommended form is another character
@given(names=st.lists(st.one_of(st.text(), st.text("./\\ _aA\0\n\u202e🦊", max_size=8), odd_values), max_size=5))
def test_class_names_become_prompts_or_errors(names):
    try:
        checked = check_class_names(names)
    except DOCUMENTED:
        return
    wanted = [normalized(name) for name in names]
    assert list(checked) == wanted and json.loads(json.dumps(checked)) == wanted
    assert [format_prompts(name, ["a {}."]) for name in checked] == [[f"a {name}."] for name in wanted]


@MANY
@given(data=st.data(), kind=st.sampled_from([LearnerArguments, DualModeLoraConfig]))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_settings_of_any_value(data, kind):
    names = [
        field.name for field in dataclasses.fields(LearnerArguments if kind is LearnerArguments else AdapterSettings)
    ]
    fields = data.draw(st.dictionaries(st.sampled_from(names), odd_values, min_size=1, max_size=3))
    try:
        made = kind(**fields)
    except DOCUMENTED:
        return
    assert all(getattr(made, name) is not None or fields[name] is None for name in fields)


@settings(CHEAP, max_examples=25)
@given(content=st.one_of(st.binary(max_size=60), st.text("{}[]:-!&*#'\"a1\n ", max_size=40).map(str.encode)))
@example(content=b"!!python/object/apply:os.abort []")
def test_yaml_of_any_content(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("yaml") / "run.yaml"
    path.write_bytes(content)
    assert main(["run", "--config", str(path)]) == 2
