"""Test strategies that keep input directions free, InfLoRA, KeepLoRA and LoDA, against versions in float64."""

import math

import pytest
import scipy.linalg
import torch
from peft import get_peft_model
from stepping import adapted, begin, end, new_task, train, update

from dulbe_peft import DualModeLoraConfig, LearnerArguments, OccupationStatistics
from dulbe_peft.papers.loda import general_pair, isolated_pair, recalibration
from dulbe_peft.papers.projection_memory import FREE, OCCUPIED, Subspace, top_directions
from dulbe_peft.strategies import NewTask, make_strategy

WIDTH = 10


def inputs(count, seed):
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(WIDTH, dtype=torch.float64, generator=generator) ** 2
    return torch.randn(count, WIDTH, dtype=torch.float64, generator=generator) * scales


def projector(basis):
    basis = basis.double()
    return basis @ basis.T


def fewest(squares, held, wanted):
    """Return how many leading squares must be added to `held` to reach `wanted`."""
    return next(count for count in range(len(squares) + 1) if held + squares[:count].sum() >= wanted)


def literal_dual_gpm(basis, side, moment, threshold):
    """Update InfLoRA's memory as the published code does, except that it starts in mode "remove"; `moment` is C.

    In the first task, the code counts the shares below the threshold, without the one that reaches it.
    """
    width = len(moment)
    total = torch.linalg.svdvals(moment).square().sum()
    if side == OCCUPIED:
        rest = moment - basis @ basis.T @ moment
        left, scales, _ = torch.linalg.svd(rest)
        squares = scales.square() / total
        count = fewest(squares, 1 - squares.sum(), threshold)
        if not basis.shape[1]:
            count = max(1, int((squares.cumsum(0) < threshold).sum()))
        basis = torch.cat([basis, left[:, :count]], dim=1)
    else:
        rest = basis @ basis.T @ moment
        left, scales, _ = torch.linalg.svd(rest)
        squares = scales.square() / total
        count = fewest(squares, 1 - squares.sum(), threshold)
        taken = left[:, :count]
        shrunk, _, _ = torch.linalg.svd(basis - taken @ taken.T @ basis, full_matrices=False)
        basis = shrunk[:, : basis.shape[1] - count]
    if side == OCCUPIED and basis.shape[1] > width / 2:
        complete, _, _ = torch.linalg.svd(basis)
        return complete[:, basis.shape[1] :], FREE
    return basis, side


def test_top_directions_are_free_and_padded_with_zeros():
    occupied = torch.linalg.qr(torch.randn(WIDTH, WIDTH - 2, dtype=torch.float64)).Q
    basis = top_directions(Subspace(occupied), inputs(200, 0).T @ inputs(200, 0), 4, "K")
    assert basis.shape == (WIDTH, 4) and (occupied.T @ basis).abs().max() < 1e-12
    torch.testing.assert_close(basis.T @ basis, torch.diag(torch.tensor([1.0, 1, 0, 0]).double()))
    line = torch.randn(WIDTH, 1, dtype=torch.float64)  # a task that uses one direction fills one column
    assert top_directions(Subspace(torch.zeros(WIDTH, 0)), line @ line.T, 4, "K").any(dim=0).sum() == 1


RANK = 4


def collected(adapter, task, decay=0.95):
    """Return statistics of random inputs with a decaying spectrum, in new directions for each task.

    Layers k and v read the same input.
    """
    statistics, inputs = OccupationStatistics(), {}
    generator = torch.Generator().manual_seed(task)
    for name, layer in adapter.dual_mode_layers().items():
        if name.endswith("v_proj"):
            continue
        width = layer.in_features
        turn = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
        tokens = torch.randn(300, width, generator=generator) * decay ** torch.arange(width) @ turn
        names = (name, name.replace("k_proj", "v_proj")) if name.endswith("k_proj") else (name,)
        statistics.update(names, tokens)
        inputs[names] = tokens.double()
    return statistics, inputs


def test_three_tasks_of_inflora_follow_the_formulas(tiny_clip):
    adapter = get_peft_model(tiny_clip(), DualModeLoraConfig(shared_rank=1, residual_rank=RANK - 1)).base_model
    strategy = make_strategy("inflora:energy=0.9,final_energy=0.99,tasks=2")
    literal: dict = {}
    memory, sides = None, set()
    for index, threshold in enumerate([0.9, 0.945, 0.99]):
        statistics, inputs = collected(adapter, index)
        task = NewTask(index, adapter, LearnerArguments(), memory, inputs=statistics)
        modes = strategy.plan(task)
        assert set(modes) == set(adapter.dual_mode_layers())
        for names, tokens in inputs.items():
            moment = tokens.T @ tokens / len(tokens)
            basis, side = literal.get(names, (torch.zeros(len(moment), 0).double(), OCCUPIED))
            inside = basis @ basis.T @ moment
            left, _, _ = torch.linalg.svd(moment - inside if side == OCCUPIED else inside)
            for name in names:
                actual = torch.cat([modes[name].shared, modes[name].residual], dim=1)
                assert modes[name].shared.shape[1] == 1
                torch.testing.assert_close(actual.T @ actual, torch.eye(RANK) / 3, rtol=0, atol=1e-5)
                torch.testing.assert_close(3 * projector(actual), projector(left[:, :RANK]), rtol=0, atol=1e-4)
                first = math.sqrt(3) * modes[name].shared[:, 0].double() @ left[:, 0]
                assert abs(float(first)) == pytest.approx(1, abs=1e-5)  # in descending order
            literal[names] = literal_dual_gpm(basis, side, moment, threshold)
        memory = strategy.remember(task, statistics)
        assert len(memory) == len(inputs)  # k and v share one entry
        kept = strategy.from_memory(memory)
        for names, (basis, side) in literal.items():
            assert kept[names[0]].side == kept[names[-1]].side == side
            torch.testing.assert_close(projector(kept[names[-1]].basis), projector(basis), rtol=0, atol=1e-4)
            sides.add(side)
    assert sides == {OCCUPIED, FREE}
    assert strategy.threshold(NewTask(9, adapter, LearnerArguments())) == 0.99  # it stays at final_energy


@pytest.mark.parametrize(
    "spec, planned, last", [("inflora", 14, 13 / 14), ("inflora", None, 1.0), ("inflora:tasks=20", 14, 0.65)]
)
def test_threshold_of_inflora_follows_the_number_of_tasks_of_the_stream(tiny_clip, spec, planned, last):
    task = NewTask(13, adapted(tiny_clip()), LearnerArguments(), planned=planned)
    assert make_strategy(spec).threshold(task) == pytest.approx(0.95 + 0.05 * last)


def test_inflora_warns_if_fewer_directions_are_free_than_the_rank_asks_for(tiny_clip):
    adapter = adapted(tiny_clip(), residual_rank=RANK - 1)
    strategy, (statistics, _) = make_strategy("inflora"), collected(adapter, 0)
    names = [name for name in adapter.dual_mode_layers() if not name.endswith("v_proj")]
    widths = {name: layer.in_features for name, layer in adapter.dual_mode_layers().items()}
    memory = {
        f"free:{','.join(group)}": torch.eye(widths[group[0]])[:, : RANK - (group[0] == names[0])]
        for group in statistics.groups
    }
    task = NewTask(1, adapter, LearnerArguments(), memory, inputs=statistics)
    with pytest.warns(
        UserWarning, match=rf"in task 2, 1 inputs of layers .*layer '{names[0]}': {RANK - 1} of {RANK}\)"
    ):
        strategy.plan(task)
    memory[next(iter(memory))] = torch.eye(widths[names[0]])[:, :RANK]
    strategy.plan(task)


@pytest.mark.filterwarnings("ignore:inflora. in task 3")
@pytest.mark.parametrize("spec", ["inflora:energy=1", "keeplora:eps_f=1"])
def test_full_memory_leaves_no_direction_to_train(spec, tiny_clip):
    adapter, strategy = get_peft_model(tiny_clip(), DualModeLoraConfig()).base_model, make_strategy(spec)
    memory = None
    for index in (0, 1):  # after the first task, InfLoRA leaves one direction free
        memory = strategy.remember(NewTask(index, adapter, LearnerArguments(), memory), collected(adapter, index)[0])
    gradients = {n: torch.randn(m.out_features, m.in_features) for n, m in adapter.dual_mode_layers().items()}
    modes = strategy.plan(NewTask(2, adapter, LearnerArguments(), memory, gradients, collected(adapter, 2)[0]))
    assert not any(pair.shared.any() or pair.residual.any() for pair in modes.values())
    adapter.begin_task(modes, orthonormal=strategy.orthonormal)


def literal_principal(weight, share):
    """Return the first right singular vectors of W (d_out x d_in) whose squared values reach `share` of the total."""
    _, scales, right = torch.linalg.svd(weight.double())
    return right[: fewest(scales.square(), 0, share * scales.square().sum())].T


def test_three_tasks_of_keeplora_follow_the_formulas(tiny_clip):
    adapter = get_peft_model(tiny_clip(), DualModeLoraConfig(shared_rank=1, residual_rank=RANK - 1)).base_model
    layers = adapter.dual_mode_layers()
    strategy = make_strategy("keeplora:eps_w=0.3,eps_f=0.85")
    occupied = {name: literal_principal(layer.base_layer.weight.detach(), 0.3) for name, layer in layers.items()}
    memory = None
    for index in range(3):
        statistics, by_names = collected(adapter, index, decay=0.85)
        inputs = {name: tokens for names, tokens in by_names.items() for name in names}
        gradients = {name: torch.randn(layer.out_features, layer.in_features) for name, layer in layers.items()}
        task = NewTask(index, adapter, LearnerArguments(), memory, gradients)
        modes = strategy.plan(task)
        memory = strategy.remember(task, statistics)
        kept = strategy.from_memory(memory)
        assert set(kept) == set(modes) == set(layers)
        for name in layers:
            outside = torch.eye(len(occupied[name])).double() - projector(occupied[name])
            _, _, right = torch.linalg.svd(gradients[name].double() @ outside)
            actual = torch.cat([modes[name].shared, modes[name].residual], dim=1)
            torch.testing.assert_close(actual.T @ actual, torch.eye(RANK), rtol=0, atol=1e-5)
            torch.testing.assert_close(projector(actual), projector(right[:RANK].T), rtol=0, atol=1e-4)
            assert abs(float(actual[:, 0].double() @ right[0])) == pytest.approx(1, abs=1e-5)  # in descending order

            total, rest = inputs[name].square().sum(), inputs[name] @ outside
            _, scales, right = torch.linalg.svd(rest)
            count = fewest(scales.square() / total, 1 - rest.square().sum() / total, 0.85)
            occupied[name] = torch.cat([occupied[name], right[:count].T], dim=1)
            assert kept[name].basis.shape == occupied[name].shape
            torch.testing.assert_close(projector(kept[name].basis), projector(occupied[name]), rtol=0, atol=1e-4)


def test_general_pair_is_completed_if_rank_is_too_low():
    few = torch.zeros(WIDTH, WIDTH).double()
    few[4, 4] = 2.0
    basis = general_pair(few, 3)
    torch.testing.assert_close(basis.T @ basis, torch.eye(3).double(), rtol=0, atol=1e-10)
    assert basis[4].abs().max() == 1


def test_isolated_pair_accepts_slightly_negative_eigenvalues_but_no_large_ones():
    old = inputs(3, 0).T @ inputs(3, 0)  # of rank 3
    new = inputs(30, 1).T @ inputs(30, 1)
    slightly = old - 1e-6 * float(old.trace()) * torch.eye(WIDTH).double()
    assert torch.isfinite(isolated_pair(slightly, new, 3, ridge=1e-9)).all()
    with pytest.raises(ValueError, match="positive semi-definite"):
        isolated_pair(-old, new, 3, ridge=1e-3)


def test_recalibration_solves_the_least_squares_problem():
    old, new, up = inputs(40, 0), inputs(25, 1), torch.randn(6, 3).double()
    basis = general_pair(old.T @ old + new.T @ new, 3)
    # min over C of |C P' X_old'|^2 + |(C - B) P' X_t'|^2, with the inputs stacked as rows and their target outputs.
    stacked = torch.cat([old @ basis, new @ basis])
    wanted = torch.cat([torch.zeros(40, 6).double(), new @ basis @ up.T])
    literal = torch.linalg.lstsq(stacked, wanted).solution.T
    ours = up @ recalibration(basis, old.T @ old, new.T @ new)
    torch.testing.assert_close(ours, literal, rtol=1e-8, atol=1e-10)
    shares = torch.linalg.eigvals(recalibration(basis, old.T @ old, new.T @ new)).real
    assert ((shares > 0) & (shares < 1)).all()
    nothing_old = recalibration(basis, torch.zeros(WIDTH, WIDTH).double(), new.T @ new)
    torch.testing.assert_close(nothing_old, torch.eye(3).double(), rtol=0, atol=1e-8)


def test_three_tasks_of_loda_follow_the_formulas(tiny_clip):
    strategy, adapter, memory = make_strategy("loda:ridge=0.01"), adapted(tiny_clip()), None
    name = "vision_model.encoder.layers.1.mlp.fc1"
    layer, old = adapter.dual_mode_layers()[name], torch.zeros(32, 32).double()
    for index in range(3):
        task = new_task(adapter, index, memory)
        begin(strategy, task)
        new = task.inputs[name].double()
        basis = layer.dulbe_P["default"].double()
        if index == 0:
            _, vectors = torch.linalg.eigh(new)
            literal = vectors.flip(1)[:, :1], vectors.flip(1)[:, 1:3]
        else:
            _, vectors = torch.linalg.eigh(old + new)
            ridge = 0.01 * old.trace() / 32 * torch.eye(32).double()
            _, general = scipy.linalg.eigh(new.numpy(), (old + ridge).numpy())
            isolated = torch.from_numpy(general[:, ::-1][:, :2].copy())
            literal = vectors[:, -1:], torch.linalg.qr(isolated).Q
        torch.testing.assert_close(projector(basis[:, :1]), projector(literal[0]), rtol=0, atol=1e-4)
        torch.testing.assert_close(projector(basis[:, 1:]), projector(literal[1]), rtol=0, atol=1e-3)
        train(strategy, task)
        before, up = update(layer), layer.current_up("default").double()
        memory = end(strategy, task)
        assert up.norm() > 1e-3
        share = 1.0
        if index:  # the update along the general direction p is scaled by p'S_t p / p'(S_old + S_t)p
            p = basis[:, 0]
            share = float(p @ new @ p / (p @ (old + new) @ p))
            assert 0.01 < share < 0.99
        expected = before - (1 - share) * torch.outer(up[:, 0], basis[:, 0])
        torch.testing.assert_close(update(layer), expected, rtol=1e-5, atol=1e-6)
        old = old + new
        torch.testing.assert_close(memory[name].double(), old, rtol=1e-5, atol=1e-3)
