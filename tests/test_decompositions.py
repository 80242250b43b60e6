import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dulbe_peft.decompositions
from dulbe_peft.decompositions import asymmetry, eigh, top_eigenvectors

WIDTH, COUNT = 320, 16


def matrix_of(values, seed=0):
    values = torch.as_tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64)).Q
    return rotation * values @ rotation.T


def steps(*levels, rest=0.0):
    """A spectrum of (value, how often), the rest of the 320 filled up."""
    values = [value for value, times in levels for _ in range(times)]
    return torch.tensor(values + [rest] * (WIDTH - len(values)), dtype=torch.float64)


@pytest.fixture
def decomposed(monkeypatch):
    """Widths of all matrices that were decomposed in full."""
    widths = []

    def counting(matrix, name):
        widths.append(len(matrix))
        return eigh(matrix, name)

    monkeypatch.setattr(dulbe_peft.decompositions, "eigh", counting)
    return widths


def check(matrix, vectors, values, atol=1e-5):
    """The projector equals the one of the full decomposition, the order and the values too."""
    expected, exact = eigh(matrix, "reference")
    kept = vectors.shape[1]
    assert (vectors @ vectors.T - exact[:, :kept] @ exact[:, :kept].T).abs().max() < atol
    assert (vectors.T @ vectors - torch.eye(kept)).abs().max() < 1e-12
    torch.testing.assert_close(values[:kept], expected[:kept], rtol=1e-8, atol=1e-12 * float(expected[0]))


@pytest.mark.parametrize(
    "spectrum",
    [
        0.9 ** torch.arange(WIDTH),
        1.0 / torch.arange(1, WIDTH + 1) ** 4,
        torch.logspace(0, -30, WIDTH, dtype=torch.float64),
        torch.logspace(30, -8, WIDTH, dtype=torch.float64),
        steps((1e6, 1), (1.0, 5), (0.99, 10), (0.5, 20), rest=0.1),
        steps((1.0, COUNT), rest=0.5),
        steps((1.0, 15), (0.5, 1), (0.499, 1), rest=1e-3),
    ],
)
def test_a_large_matrix_gives_the_same_subspace_without_a_full_decomposition(spectrum, decomposed):
    matrix = matrix_of(spectrum)
    values, vectors = top_eigenvectors(matrix, COUNT, "S")
    assert decomposed and max(decomposed) < WIDTH
    assert vectors.shape == (WIDTH, COUNT)
    check(matrix, vectors, values)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), power=st.floats(0.0, 4.0), spike=st.floats(0, 12), equal=st.integers(0, 40))
def test_any_spectrum_captures_what_the_full_decomposition_does(seed, power, spike, equal):
    spectrum = torch.arange(1, WIDTH + 1, dtype=torch.float64) ** -power
    spectrum[0] *= 10**spike
    spectrum[1 : 1 + equal] = spectrum[1]
    matrix = matrix_of(spectrum, seed)
    values, vectors = top_eigenvectors(matrix, COUNT, "S")
    energy = (vectors.T @ matrix @ vectors).diagonal().sum()
    expected = spectrum.sort(descending=True).values[:COUNT]
    torch.testing.assert_close(energy, expected.sum(), rtol=1e-9, atol=0)
    torch.testing.assert_close(values[:COUNT], expected, rtol=1e-7, atol=1e-12 * float(expected[0]))


@pytest.mark.parametrize("rank", [0, 1, 3, 15, 16, 17])
def test_only_eigenvalues_above_the_floor_are_taken(rank):
    noise = matrix_of(1e-9 * torch.rand(WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64), 2)
    matrix = matrix_of(steps((1.0, rank))) + noise
    for floor in ({"absolute": 1e-6}, {"relative": 1e-6}) if rank else ({"absolute": 1e-6},):
        _, vectors = top_eigenvectors(matrix, COUNT, "S", **floor)
        assert vectors.shape == (WIDTH, min(rank, COUNT))
    assert top_eigenvectors(torch.zeros(WIDTH, WIDTH).double(), COUNT, "S", relative=1e-6)[1].shape == (WIDTH, 0)


@pytest.mark.parametrize("position", [0.999, 1.001])
def test_an_eigenvalue_at_the_floor_is_counted_right(position):
    matrix = matrix_of(steps((1.0, 1), (0.1, 4), (1e-4 * position, 1), rest=1e-6))
    assert top_eigenvectors(matrix, COUNT, "S", relative=1e-4)[1].shape[1] == (6 if position > 1 else 5)


@pytest.mark.parametrize(
    "spectrum",
    [
        torch.linspace(1.0, 0.9, WIDTH),
        torch.linspace(1.0, 0.0, WIDTH) ** 2,
        torch.cat([torch.linspace(30, 20, 3), torch.linspace(1.0, 0.9, WIDTH - 3)]),
    ],
)
def test_a_flat_spectrum_is_decomposed_in_float32_and_corrected(spectrum, decomposed):
    matrix = matrix_of(spectrum)
    values, vectors = top_eigenvectors(matrix, COUNT, "S")
    assert max(decomposed) < WIDTH
    check(matrix, vectors, values)
    rough = torch.linalg.eigh(matrix.float())[1].flip(1)[:, :COUNT].double()
    exact = eigh(matrix, "reference")[1][:, :COUNT]
    errors = [float((v @ v.T - exact @ exact.T).abs().max()) for v in (vectors, rough)]
    assert errors[0] < 0.01 * errors[1]


def test_what_cannot_be_certified_is_decomposed_in_full(decomposed, monkeypatch):
    matrix = matrix_of(0.9 ** torch.arange(WIDTH))
    monkeypatch.setattr(dulbe_peft.decompositions, "_none_above", lambda *_: False)
    values, vectors = top_eigenvectors(matrix, COUNT, "S")
    assert decomposed[-1] == WIDTH
    check(matrix, vectors, values)


def test_a_missed_eigenvector_is_noticed():
    matrix = matrix_of(0.5 ** torch.arange(WIDTH))
    values, vectors = eigh(matrix, "S")
    bound = float(values[16] + values[17]) / 2
    certified = dulbe_peft.decompositions._none_above
    assert certified(bound, matrix, values[:18], vectors[:, :18])
    without = [i for i in range(18) if i != 7]
    assert not certified(bound, matrix, values[without], vectors[:, without])


def test_the_start_is_fixed_and_no_global_random_number_is_drawn():
    matrix, state = matrix_of(0.9 ** torch.arange(WIDTH)), torch.get_rng_state()
    first, second = top_eigenvectors(matrix, COUNT, "S"), top_eigenvectors(matrix, COUNT, "S")
    assert torch.equal(first[1], second[1]) and torch.equal(torch.get_rng_state(), state)


def test_the_lowest_value_shows_a_negative_eigenvalue():
    matrix = matrix_of(torch.cat([0.9 ** torch.arange(WIDTH - 1), torch.tensor([-0.2])]))
    assert top_eigenvectors(matrix, COUNT, "S")[0][-1] < -0.19


def test_asymmetry_is_the_largest_difference_wherever_it_is():
    matrix = torch.ones(70, 70)
    for i, j in ((0, 69), (69, 0), (33, 34), (40, 2)):
        skewed = matrix.clone()
        skewed[i, j] = 3.0
        assert asymmetry(skewed, rows=16) == 2.0
    assert asymmetry(matrix) == 0.0
