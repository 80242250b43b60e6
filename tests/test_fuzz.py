"""Random inputs: whatever is handed in, what comes out is right, or one of the documented errors."""

import dataclasses
import json
from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dulbe_peft import (
    CheckpointError,
    DualModeLoraConfig,
    LearnerArguments,
    allocate_modes,
    bidirectional_kl,
    cross_modal_loss,
    slerp,
)
from dulbe_peft.arguments import AdapterSettings
from dulbe_peft.commands.main import main
from dulbe_peft.data.names import check_class_names, format_prompts

DOCUMENTED = (ValueError, TypeError, FileNotFoundError, CheckpointError)
CHEAP = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(CHEAP, max_examples=150)

sizes = st.integers(1, 7)
seeds = st.integers(0, 2**31)
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


def gaussian(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@CHEAP
@example(fraction=None, shape=[0, 3])
@given(fraction=st.one_of(odd_values, st.just(float("nan"))), shape=st.lists(st.integers(0, 3), max_size=3))
def test_slerp_of_anything(fraction, shape):
    try:
        point = slerp(torch.ones(shape), torch.eye(3)[0], fraction)
    except DOCUMENTED:
        return
    assert torch.isfinite(point).all()


@CHEAP
@given(
    shape=st.tuples(sizes, sizes),
    ranks=st.tuples(st.integers(-1, 8), st.integers(-1, 8), st.integers(-1, 9)),
    seed=seeds,
    scale=st.sampled_from([0.0, 1e-30, 1e-4, 1.0, 1e15, float("nan")]),
    kind=st.sampled_from(["none", "zero", "gram", "thin", "random", "another size"]),
)
def test_bases_are_orthonormal_for_every_gradient_and_history(shape, ranks, seed, scale, kind):
    gradient, width = gaussian(*shape, seed=seed, scale=scale), shape[1]
    tokens = gaussian(1 if kind == "thin" else 20, width, seed=seed + 1)
    history = {
        "none": None,
        "zero": torch.zeros(width, width),
        "random": gaussian(width, width, seed=seed + 2),
        "another size": torch.eye(width + 1),
    }.get(kind, tokens.T @ tokens)
    try:
        modes = allocate_modes({"l": gradient}, None if history is None else {"l": history}, *ranks)["l"]
    except DOCUMENTED:
        return
    bases = torch.cat([modes.shared, modes.residual], dim=1)
    assert modes.shared.shape == (width, ranks[0]) and modes.residual.shape == (width, ranks[1])
    torch.testing.assert_close(bases.T @ bases, torch.eye(bases.shape[1]), atol=1e-4, rtol=0)
    assert 0 <= modes.shared_capture <= 1 and 0 <= modes.residual_capture <= 1


@CHEAP
@given(
    n=st.integers(0, 4),
    classes=st.integers(0, 4),
    labels=st.lists(st.integers(-1, 4), max_size=4),
    temperatures=st.tuples(st.floats(), st.floats(0.01, 50)),
    scale=st.sampled_from([1.0, 100.0, 1e4]),
    seed=seeds,
)
def test_losses_are_finite_and_not_negative(n, classes, labels, temperatures, scale, seed):
    student, teacher = gaussian(n, classes, seed=seed, scale=scale), gaussian(n, classes, seed=seed + 1, scale=scale)
    with suppress(*DOCUMENTED):
        value = bidirectional_kl(student, teacher, *temperatures)
        assert value >= -1e-3 * max(temperatures) ** 2 and torch.isfinite(value)
    with suppress(*DOCUMENTED):
        value = cross_modal_loss(gaussian(n, 5), gaussian(classes, 5), torch.tensor(labels, dtype=torch.long), scale)
        assert value >= 0 and torch.isfinite(value)


@MANY
@given(names=st.lists(st.one_of(st.text(), st.text("./\\ _aA\0\n\u202e🦊", max_size=8), odd_values), max_size=5))
def test_class_names_become_prompts_or_errors(names):
    try:
        checked = check_class_names(names)
    except DOCUMENTED:
        return
    assert list(checked) == names and json.loads(json.dumps(checked)) == names
    assert [format_prompts(name, ["a {}."]) for name in checked] == [[f"a {name}."] for name in names]


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
