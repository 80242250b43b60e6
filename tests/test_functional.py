import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from dulbe_peft.classifiers.geodesics import bridge_prototypes, reliability, reliability_weights, slerp
from dulbe_peft.strategies.losses import bidirectional_kl, cross_modal_loss
from dulbe_peft.subspaces.support import allocate_layer, historical_support, orthonormal_complement

few = settings(max_examples=25, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def unit(*shape, seed=0):
    return F.normalize(randn(*shape, seed=seed), dim=-1)


def statistic(width, tokens=200, seed=0):
    """Decaying spectrum, so that the top eigenvectors are well apart."""
    rows = randn(tokens, width, seed=seed) * torch.logspace(0, -1, width)
    return rows.T @ rows


def projector_gap(found, expected):
    found, expected = found.double(), expected.double()
    return (found @ found.T - expected @ expected.T).abs().max().item()


def assert_orthonormal(*bases):
    stacked = torch.cat(bases, dim=1).double()
    gap = (stacked.T @ stacked - torch.eye(stacked.shape[1], dtype=torch.float64)).abs()
    assert gap.numel() == 0 or gap.max() < 2e-6


def energy(gradient, basis):
    return (gradient.double() @ basis.double()).square().sum().item()


# ---------------------------------------------------------------------- supports


def test_support_spans_the_top_eigenvectors_in_order():
    matrix = statistic(24)
    found = historical_support(matrix, 5, 8)
    expected, values = reference.support(matrix, 5)
    assert found.dtype == torch.float32 and found.shape == (24, 5)
    assert_orthonormal(found)
    assert projector_gap(found, expected) < 1e-5
    rayleigh = (found.double().T @ matrix.double() @ found.double()).diagonal()
    torch.testing.assert_close(rayleigh, values[:5], rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("tokens", "support_rank", "residual_rank", "expected"),
    [(200, 6, 8, 6), (4, 128, 8, 4), (200, 128, 8, 16), (200, 128, 24, 0), (200, 0, 8, 0), (200, 24, 0, 24)],
)
def test_support_rank_is_clamped(tokens, support_rank, residual_rank, expected):
    found = historical_support(statistic(24, tokens), support_rank, residual_rank)
    assert found.shape == (24, expected)
    assert_orthonormal(found)


def test_support_ignores_eigenvalues_below_float32_rounding():
    width = 16
    tolerance = width * torch.finfo(torch.float32).eps
    values = torch.tensor([1.0, 0.5, tolerance * 1.5, tolerance * 0.5] + [0.0] * 12, dtype=torch.float64)
    rotation = torch.linalg.qr(randn(width, width, dtype=torch.float64)).Q
    assert historical_support(rotation * values @ rotation.T, 10, 2).shape[1] == 3


def test_support_of_zero_statistics_is_empty():
    assert historical_support(torch.zeros(8, 8), 4, 2).shape == (8, 0)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (torch.full((4, 4), float("nan")), "NaN or infinity"),
        (torch.full((4, 4), float("inf")), "NaN or infinity"),
        (torch.ones(4, 3), "square"),
        (torch.ones(4), "square"),
        (torch.triu(torch.ones(4, 4)), "symmetric"),
        (-torch.eye(4), "positive semi-definite"),
    ],
)
def test_support_refuses_what_is_no_statistic(matrix, message):
    with pytest.raises(ValueError, match=f"fc1.*{message}|{message}.*fc1"):
        historical_support(matrix, 2, 1, name="fc1")


# ---------------------------------------------------------------------- bases


@pytest.mark.parametrize("shape", [(16, 24), (24, 16), (20, 20), (5, 24)])
@pytest.mark.parametrize(("shared_rank", "residual_rank"), [(1, 8), (2, 3), (0, 4), (3, 0)])
def test_bases_equal_the_reference(shape, shared_rank, residual_rank):
    width = shape[1]
    gradient, matrix = randn(*shape) * torch.logspace(0, -1, width), statistic(width)
    rank = min(6, width - residual_rank)
    found = allocate_layer(gradient, historical_support(matrix, rank, residual_rank), shared_rank, residual_rank)
    expected = reference.bases(gradient, matrix, shared_rank, residual_rank, rank)
    assert_orthonormal(*found)
    assert projector_gap(found[0], expected[0]) < 1e-5
    if residual_rank <= shape[0]:
        assert projector_gap(found[1], expected[1]) < 1e-5


@pytest.mark.parametrize("shape", [(16, 24), (24, 16), (5, 24)])
def test_first_task_takes_the_top_singular_vectors_one_by_one(shape):
    gradient = randn(*shape)
    found = allocate_layer(gradient, None, 2, 3)
    for mine, theirs in zip(found, reference.first_task_bases(gradient, 2, 3), strict=True):
        for column, expected in zip(mine.T, theirs.T, strict=True):
            assert abs(column.double() @ expected) > 1 - 1e-6


def test_large_layer_agrees_with_a_full_decomposition():
    gradient, matrix = randn(96, 384) * torch.logspace(0, -2, 384), statistic(384, tokens=800)
    found = allocate_layer(gradient, historical_support(matrix, 32, 8), 1, 8)
    expected = reference.bases(gradient, matrix, 1, 8, 32)
    assert max(projector_gap(a, b) for a, b in zip(found, expected, strict=True)) < 1e-4


@few
@given(seed=seeds, shared_rank=st.integers(0, 3), residual_rank=st.integers(0, 4), support_rank=st.integers(0, 12))
def test_identities_of_the_paper(seed, shared_rank, residual_rank, support_rank):
    gradient, matrix = randn(9, 12, seed=seed), statistic(12, seed=seed + 1)
    occupied = historical_support(matrix, support_rank, residual_rank)
    shared, residual = allocate_layer(gradient, occupied, shared_rank, residual_rank)
    kept = occupied.shape[1]
    assert shared.shape == (12, shared_rank) and residual.shape == (12, residual_rank)
    assert_orthonormal(shared, residual)
    assert_orthonormal(occupied, residual)
    response = gradient.double() @ occupied.double()
    if kept >= shared_rank:
        top = torch.linalg.eigvalsh(response.T @ response).flip(0)[:shared_rank].sum().item()
        assert energy(gradient, shared) == pytest.approx(top, rel=1e-5, abs=1e-9)
    outside = gradient.double() - response @ occupied.double().T
    squares = torch.linalg.svdvals(outside).square()[:residual_rank].sum().item()
    assert energy(gradient, residual) == pytest.approx(squares, rel=1e-5, abs=1e-9)
    _, values = reference.support(matrix, 12)
    if residual_rank and kept < 12:
        worst = torch.linalg.eigvalsh(residual.double().T @ matrix.double() @ residual.double()).max()
        assert worst <= values[kept] + 1e-5 * values[0]


@pytest.mark.parametrize("rank", [0, 1, 2, 5])
def test_residual_stays_outside_the_support_where_the_gradient_is_rank_deficient(rank):
    matrix = statistic(20)
    occupied = historical_support(matrix, 7, 6)
    gradient = randn(15, rank) @ randn(rank, 20, seed=1)
    shared, residual = allocate_layer(gradient, occupied, 2, 6)
    assert_orthonormal(shared, residual)
    assert_orthonormal(occupied, residual)
    inside = occupied @ (occupied.T @ shared)
    torch.testing.assert_close(inside, shared, rtol=0, atol=1e-6)


def test_residual_stays_outside_the_support_where_the_gradient_lies_inside_it():
    occupied = historical_support(statistic(20), 7, 6)
    gradient = randn(15, 7) @ occupied.T
    shared, residual = allocate_layer(gradient, occupied, 1, 6)
    assert_orthonormal(occupied, residual)
    assert_orthonormal(shared, residual)
    assert energy(gradient, residual) < 1e-10 * energy(gradient, torch.eye(20))


def test_rounding_of_a_gradient_inside_the_support_gives_no_direction():
    occupied = historical_support(statistic(20), 7, 6)
    exact = torch.linalg.qr(occupied.double()).Q
    for rows in (15, 40):
        _, residual = allocate_layer(randn(rows, 7, dtype=torch.float64) @ exact.T, occupied, 1, 6)
        assert_orthonormal(occupied, residual)


def test_faint_directions_stay_outside_the_support():
    occupied, beyond = historical_support(statistic(20), 7, 6), torch.linalg.qr(randn(20, 20, dtype=torch.float64)).Q
    beyond = torch.linalg.qr(beyond - occupied.double() @ (occupied.double().T @ beyond)).Q
    for rows in (15, 40):
        faint = randn(rows, 6, dtype=torch.float64) * torch.logspace(-1, -7, 6) @ beyond[:, :6].T
        gradient = randn(rows, 7, dtype=torch.float64) @ occupied.double().T + faint
        shared, residual = allocate_layer(gradient, occupied, 1, 6)
        assert_orthonormal(shared, residual)
        assert_orthonormal(occupied, residual)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_first_task_completes_a_rank_deficient_gradient(rank):
    gradient = randn(15, rank) @ randn(rank, 20, seed=1)
    shared, residual = allocate_layer(gradient, None, 1, 8)
    assert_orthonormal(shared, residual)
    total = energy(gradient, torch.eye(20))
    assert energy(gradient, torch.cat([shared, residual], dim=1)) == pytest.approx(total, rel=1e-5, abs=1e-12)


@pytest.mark.parametrize("support_rank", [0, 1, 2])
def test_shared_directions_are_completed_outside_a_support_that_is_too_small(support_rank):
    occupied = historical_support(statistic(20), support_rank, 4)
    gradient = randn(15, 20, seed=3)
    shared, residual = allocate_layer(gradient, occupied, 3, 4)
    assert_orthonormal(shared, residual)
    assert_orthonormal(occupied, residual)
    completed = shared[:, support_rank:]
    assert_orthonormal(occupied, completed)
    squares = torch.linalg.svdvals(gradient.double() @ (torch.eye(20) - occupied @ occupied.T).double()).square()
    assert energy(gradient, completed) == pytest.approx(squares[4 : 7 - support_rank].sum().item(), rel=1e-4)


def test_all_dimensions_can_be_used():
    occupied = historical_support(statistic(6), 128, 4)
    assert occupied.shape == (6, 2)
    assert_orthonormal(*allocate_layer(randn(3, 6), occupied, 2, 4))
    assert_orthonormal(*allocate_layer(torch.zeros(3, 6), None, 2, 4))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_bases_do_not_depend_on_the_gradients_scale(scale):
    gradient, occupied = randn(9, 12), historical_support(statistic(12), 4, 3)
    expected, found = allocate_layer(gradient, occupied, 1, 3), allocate_layer(gradient * scale, occupied, 1, 3)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_signs_are_fixed():
    gradient, occupied = randn(9, 12), historical_support(statistic(12), 4, 3)
    expected, found = allocate_layer(gradient, occupied, 2, 3), allocate_layer(-gradient, -occupied, 2, 3)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        assert (a.gather(0, a.abs().argmax(0, keepdim=True)) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_bases_are_float32_whatever_the_gradients_dtype(dtype):
    occupied = historical_support(statistic(12).to(dtype), 4, 3)
    bases = allocate_layer(randn(9, 12).to(dtype), occupied, 1, 3)
    assert {occupied.dtype, *(basis.dtype for basis in bases)} == {torch.float32}
    assert_orthonormal(*bases)


def test_allocate_layer_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"fc1.*exceed d_in = 12"):
        allocate_layer(randn(9, 12), None, 5, 8, name="fc1")
    with pytest.raises(ValueError, match=r"fc1.*NaN"):
        allocate_layer(randn(9, 12) * float("nan"), None, 1, 2, name="fc1")
    with pytest.raises(ValueError, match="2 dimensions"):
        allocate_layer(randn(9), None, 1, 2)
    with pytest.raises(ValueError, match="shape"):
        allocate_layer(randn(9, 12), torch.eye(12)[:, :6], 1, 8)
    with pytest.raises(ValueError, match="orthonormal"):
        allocate_layer(randn(9, 12), torch.ones(12, 2), 1, 8)
    with pytest.raises(TypeError, match="floating-point"):
        allocate_layer(torch.ones(9, 12, dtype=torch.int64), None, 1, 2)


def test_complement_is_orthonormal_and_repeatable():
    basis = torch.linalg.qr(randn(10, 4, dtype=torch.float64)).Q
    found = orthonormal_complement(basis, 6)
    assert_orthonormal(basis, found)
    assert torch.equal(found, orthonormal_complement(basis, 6))
    assert orthonormal_complement(basis, 0).shape == (10, 0)
    with pytest.raises(ValueError, match="do not fit"):
        orthonormal_complement(basis, 7)


# ---------------------------------------------------------------------- slerp and reliability


@few
@given(seed=seeds, fraction=st.floats(0, 1))
def test_slerp_equals_the_textbook_and_moves_at_equal_speed(seed, fraction):
    start, end = unit(8, seed=seed), unit(8, seed=seed + 1)
    found = slerp(start, end, fraction)
    torch.testing.assert_close(found.double(), reference.slerp(start, end, fraction), rtol=0, atol=2e-6)
    theta = math.acos(float(start.double() @ end.double()))
    half = ((start.double() - found.double()).norm() / 2).item()
    assert 2 * math.asin(min(1.0, half)) == pytest.approx(fraction * theta, abs=2e-6)


@few
@given(seed=seeds, exponent=st.floats(-12, -1), opposite=st.booleans(), fraction=st.floats(0, 1))
def test_slerp_is_of_unit_norm_for_nearly_parallel_and_nearly_opposite_vectors(seed, exponent, opposite, fraction):
    start = unit(8, seed=seed)
    end = F.normalize((-start if opposite else start) + 10**exponent * randn(8, seed=seed + 1), dim=0)
    found = slerp(start, end, fraction)
    assert found.norm().item() == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(slerp(start, end, 0.0), start, rtol=0, atol=2e-6)
    torch.testing.assert_close(slerp(start, end, 1.0), end, rtol=0, atol=2e-6)
    theta = math.pi if opposite else 0.0
    half = min(1.0, ((start.double() - found.double()).norm() / 2).item())
    assert 2 * math.asin(half) == pytest.approx(fraction * theta, abs=20 * 10**exponent + 1e-3)


@pytest.mark.parametrize("index", range(5))
def test_slerp_between_exactly_opposite_vectors_follows_one_great_circle(index):
    start = torch.eye(4)[index] if index < 4 else unit(4)
    points = slerp(start, -start, torch.linspace(0, 1, 7)[:, None])
    assert points.isfinite().all()
    torch.testing.assert_close(points.norm(dim=1), torch.ones(7))
    torch.testing.assert_close(points @ start, torch.cos(torch.linspace(0, math.pi, 7)), rtol=0, atol=1e-6)
    assert torch.linalg.matrix_rank(points, atol=1e-4) == 2
    assert torch.equal(points, slerp(start, -start, torch.linspace(0, 1, 7)[:, None]))


def test_slerp_between_equal_vectors_is_that_vector():
    start = unit(3, 16)
    torch.testing.assert_close(slerp(start, start, 0.3), start, rtol=0, atol=1e-6)


def test_slerp_broadcasts():
    start, end = unit(5, 8), unit(5, 8, seed=1)
    depths = torch.linspace(0, 1, 4)
    grid = slerp(start[:, None], end[:, None], depths[:, None])
    assert grid.shape == (5, 4, 8)
    for k, depth in enumerate(depths.tolist()):
        torch.testing.assert_close(grid[:, k], slerp(start, end, depth))
    torch.testing.assert_close(grid, bridge_prototypes(start, end, depths))
    per_row = slerp(start, end, torch.linspace(0, 1, 5)[:, None])
    torch.testing.assert_close(per_row[2], slerp(start[2], end[2], 0.5))
    torch.testing.assert_close(slerp(start, end, torch.tensor(0.5)), slerp(start, end, 0.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_slerp_takes_half_precision(dtype):
    start, end = unit(5, 64).to(dtype), unit(5, 64, seed=1).to(dtype)
    found = slerp(start, end, 0.5)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float().norm(dim=1), torch.ones(5), rtol=0, atol=5e-3)
    assert slerp(start, start, 0.5).isfinite().all() and slerp(start, -start, 0.5).isfinite().all()
    assert slerp(start.double(), end.double(), 0.5).dtype == torch.float64


@pytest.mark.parametrize("fraction", [-1e-3, 1.001, float("nan"), torch.tensor([[0.5], [2.0]])])
def test_slerp_refuses_fractions_outside_the_bridge(fraction):
    with pytest.raises(ValueError, match=r"fraction must lie in \[0, 1\]"):
        slerp(unit(2, 4), unit(2, 4, seed=1), fraction)


def test_slerp_refuses_other_vectors():
    with pytest.raises(ValueError, match="same d"):
        slerp(unit(4), unit(5), 0.5)
    with pytest.raises(ValueError, match="unsqueeze"):
        slerp(unit(3, 4), unit(3, 4, seed=1), torch.rand(3))
    for bad in (torch.zeros(4), 2 * unit(4), torch.full((4,), float("nan"))):
        with pytest.raises(ValueError, match="end must hold finite unit vectors"):
            slerp(unit(4), bad, 0.5)
    with pytest.raises(TypeError, match="floating-point"):
        slerp(torch.tensor([1, 0]), torch.tensor([0, 1]), 0.5)


@pytest.mark.parametrize("chunk_elements", [1, 16, 2**24])
def test_reliability_is_the_mean_probability_of_the_own_class(chunk_elements):
    bridges = bridge_prototypes(unit(5, 8), unit(5, 8, seed=1), torch.linspace(0, 1, 3))
    images, labels = unit(17, 8, seed=2), 2 + torch.arange(17) % 3
    found = reliability(images, labels, bridges, 20.0, first_class=2, chunk_elements=chunk_elements)
    for c in range(2, 5):
        for k in range(3):
            own = [row for row, label in zip(images, labels.tolist(), strict=True) if label == c]
            expected = [reference.softmax((20.0 * bridges[:, k] @ row).tolist())[c] for row in own]
            assert found[c - 2, k].item() == pytest.approx(sum(expected) / len(expected), rel=1e-4)
    weights = reliability_weights(found, 0.05)
    torch.testing.assert_close(
        weights[1].tolist(), reference.softmax((found[1] / 0.05).tolist()), rtol=1e-5, atol=1e-7
    )
    with pytest.raises(ValueError, match="class 1 has no image"):
        reliability(images, labels, bridges, 20.0, first_class=1)


# ---------------------------------------------------------------------- losses


@pytest.mark.parametrize("temperatures", [(5.0, 0.1), (1.0, 1.0), (2.0, 4.0)])
def test_bidirectional_kl_equals_explicit_sums(temperatures):
    student, teacher = randn(6, 4), randn(6, 4, seed=1)
    by_class, by_instance = reference.bidirectional_kl(student, teacher, *temperatures)
    mean = bidirectional_kl(student, teacher, *temperatures).item()
    assert mean == pytest.approx(by_class / 6 + by_instance / 4, rel=1e-4)
    batchmean = bidirectional_kl(student, teacher, *temperatures, reduction="batchmean").item()
    assert batchmean == pytest.approx((by_class + by_instance) / 6, rel=1e-4)


def test_batchmean_is_the_literal_kl_div():
    student, teacher = randn(6, 4), randn(6, 4, seed=1)
    literal = 0.0
    for a, b, t in ((student, teacher, 5.0), (student.T, teacher.T, 0.1)):
        sums = F.kl_div((a / t).log_softmax(1), (b / t).softmax(1), reduction="sum")
        literal += t**2 * sums.item() / 6
    assert bidirectional_kl(student, teacher, reduction="batchmean").item() == pytest.approx(literal, rel=1e-4)


def test_kl_is_finite_for_sharp_logits_and_reaches_the_student_alone():
    teacher = (100 * unit(32, 16) @ unit(8, 16, seed=1).T).requires_grad_()
    student = (100 * unit(32, 16, seed=2) @ unit(8, 16, seed=1).T).requires_grad_()
    loss = bidirectional_kl(student, teacher)
    loss.backward()
    assert loss.isfinite() and loss > 0 and student.grad.isfinite().all() and student.grad.abs().sum() > 0
    assert teacher.grad is None
    assert bidirectional_kl(teacher, teacher).item() == pytest.approx(0, abs=1e-6)
    half = bidirectional_kl(student.half(), teacher.half())
    assert half.dtype == torch.float32 and half.isfinite()


def test_gradient_of_the_kl_agrees_with_finite_differences():
    student, teacher = randn(3, 4, dtype=torch.float64).requires_grad_(), randn(3, 4, seed=1, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda logits: bidirectional_kl(logits, teacher, 5.0, 0.5), student)


@pytest.mark.parametrize(
    ("student", "teacher", "kwargs", "message"),
    [
        (torch.ones(3, 4), torch.ones(3, 5), {}, "(3, 4) and (3, 5)"),
        (torch.ones(3), torch.ones(3), {}, "old classes"),
        (torch.ones(3, 0), torch.ones(3, 0), {}, "not empty"),
        (torch.ones(3, 4), torch.ones(3, 4), {"class_temperature": 0.0}, "class_temperature"),
        (torch.ones(3, 4), torch.ones(3, 4), {"instance_temperature": float("nan")}, "instance_temperature"),
        (torch.ones(3, 4), torch.ones(3, 4), {"reduction": "sum"}, "'sum'"),
    ],
)
def test_kl_refuses_what_does_not_fit(student, teacher, kwargs, message):
    with pytest.raises(ValueError) as raised:
        bidirectional_kl(student, teacher, **kwargs)
    assert message in str(raised.value)


def test_cross_modal_loss_takes_tau_itself():
    images, texts, labels = unit(5, 8), unit(3, 8, seed=1), torch.tensor([0, 1, 2, 1, 0])
    expected = 0.0
    for row, label in zip(images, labels.tolist(), strict=True):
        expected -= math.log(reference.softmax((100.0 * texts @ row).double().tolist())[label]) / 5
    assert cross_modal_loss(images, texts, labels, 100.0).item() == pytest.approx(expected, rel=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = cross_modal_loss(images, texts, labels.int(), torch.tensor(100.0))
    assert inside.item() == pytest.approx(expected, rel=1e-4)
    assert cross_modal_loss(images.half(), texts.half(), labels, 100.0).dtype == torch.float32


def test_cross_modal_loss_refuses_what_does_not_fit():
    images, texts, labels = unit(5, 8), unit(3, 8, seed=1), torch.tensor([0, 1, 2, 1, 0])
    with pytest.raises(ValueError, match="image_embeds and text_embeds"):
        cross_modal_loss(images, texts[:, :4], labels, 100.0)
    with pytest.raises(ValueError, match="labels must be"):
        cross_modal_loss(images, texts, labels[:4], 100.0)
    with pytest.raises(ValueError, match="label 3 is out of range for 3 classes"):
        cross_modal_loss(images, texts, labels + 1, 100.0)
    with pytest.raises(ValueError, match="label -100"):
        cross_modal_loss(images, texts, torch.tensor([0, 1, -100, 1, 0]), 100.0)
    with pytest.raises(TypeError, match="integers"):
        cross_modal_loss(images, texts, labels.float(), 100.0)
