"""Random names: whatever is handed in, what comes out is right, or one of the documented errors."""

import json

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dulbe_peft.data.names import check_class_names, format_prompts, normalized

odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.lists(st.integers(-2, 2), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@example(names=["\uf900"])  # whose recommended form is another character
@given(names=st.lists(st.one_of(st.text(), st.text("./\\ _aA\0\n\u202e🦊", max_size=8), odd_values), max_size=5))
def test_class_names_become_prompts_or_errors(names):
    try:
        checked = check_class_names(names)
    except (ValueError, TypeError):
        return
    wanted = [normalized(name) for name in names]
    assert list(checked) == wanted and json.loads(json.dumps(checked)) == wanted
    assert [format_prompts(name, ["a {}."]) for name in checked] == [[f"a {name}."] for name in wanted]
