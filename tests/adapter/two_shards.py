"""The script that test_two_processes.py runs in two processes, between which FSDP2 divides the parameters."""

import copy
import tempfile

import torch
from adapted_clip import CONFIG, learned, random_modes
from peft import get_peft_model, get_peft_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from two_processes import IMAGES, LABELS, PARTS, loss_of, tiny_clip

from dulbe_peft import (
    DualModeLoraConfig,
    OccupationStatistics,
    collect_statistics,
    export_lora,
    probe_gradients,
    route_gradients,
    routed_loss,
)
from dulbe_peft.adapter.states import REFUSED
from dulbe_peft.utils.processes import leave, world


def step_loss(model, rows):
    """Return the loss of rows with the fixed texts in the model, through `forward`, which FSDP2 wraps."""
    ids = torch.tensor([[97, 1, 2, 98], [97, 3, 98, 98]])
    output = model(pixel_values=IMAGES[rows], input_ids=ids)
    return loss_of(10 * output.image_embeds @ output.text_embeds.T, LABELS[rows])


def loss_fn(model, rows):
    return step_loss(model, rows), len(LABELS[rows])


def blocks(model):
    """Return a function for each context manager of the table, which enters it."""
    enter = {
        "held_weights": lambda: model.held_weights(),
        "previous_task": lambda: model.previous_task(),
        "scaled": lambda: model.scaled(0.5),
        "scaled_history": lambda: model.scaled_history(0.5),
    }
    return {name: (lambda block=block: block().__enter__()) for name, block in enter.items()}


def operations(model, modes):
    folder = tempfile.mkdtemp()
    loss = torch.ones((), requires_grad=True)
    return blocks(model) | {
        "begin_task": lambda: model.begin_task(modes),
        "fold_task": lambda: model.fold_task(),
        "fold_if_trained": lambda: model.fold_if_trained(),
        "keep_share": lambda: model.keep_share(0.5),
        "keep": lambda: model.keep(0.5),
        "merge_adapter": lambda: model.merge_adapter(),
        "merge_and_unload": lambda: model.merge_and_unload(),
        "collect_statistics": lambda: collect_statistics(model, [PARTS[0]], loss_fn, OccupationStatistics()),
        "probe_gradients": lambda: probe_gradients(model, [PARTS[0]], loss_fn),
        "routed_loss": lambda: routed_loss(model, loss, None),
        "route_gradients": lambda: route_gradients(model, loss, None),
        "get_peft_model_state_dict": lambda: get_peft_model_state_dict(model),
        "save_pretrained": lambda: model.save_pretrained(folder),
        "export_lora": lambda: export_lora(model, f"{folder}/lora"),
        "add_weighted_adapter": lambda: model.add_weighted_adapter(["default"], [1.0], "sum"),
    }


def check_refused(model, modes, when):
    """Check that every operation of the table that sharding makes wrong says so, in every process."""
    calls = operations(model, modes)
    assert {name for name, states in REFUSED.items() if "sharded" in states} <= calls.keys()
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            assert "sharded" in str(error), f"{name} {when}: {error}"
        else:
            raise SystemExit(f"{name} was accepted {when}")


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = learned(get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG)))
    twin, modes = copy.deepcopy(model), random_modes(model)
    mesh, clip = init_device_mesh("cpu", (2,)), model.get_base_model()
    for tower in (clip.vision_model, clip.text_model):
        for block in tower.encoder.layers:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={clip.logit_scale})  # FSDP2 refuses scalars
    check_refused(model, modes, "before the first pass")
    # One step over all rows, in one process, is the step of the mean of two processes with rows of equal number.
    rows = (slice(0, 3), slice(3, 6))[world()[0]]
    for each, part in ((model, rows), (twin, slice(0, 6))):
        optimizer = torch.optim.SGD((p for p in each.parameters() if p.requires_grad), 0.1)
        for _ in range(2):
            loss = step_loss(each, part)
            optimizer.zero_grad()
            loss.backward()
            if each is model:
                check_refused(model, modes, "after a pass, while parameters may be whole")
            optimizer.step()
    expected = dict(twin.named_parameters())
    moved = 0
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole(parameter.detach()), expected[name].detach(), rtol=1e-4, atol=1e-6)
        moved += parameter.requires_grad
    assert moved
    torch.testing.assert_close(step_loss(model, rows), step_loss(twin, rows), rtol=1e-4, atol=1e-6)
    with model.disable_adapter(), twin.disable_adapter():
        torch.testing.assert_close(step_loss(model, rows), step_loss(twin, rows), rtol=1e-4, atol=1e-6)
    check_refused(model, modes, "at the end")
    print(f"ended {world()[0]}\n", end="", flush=True)  # one write: both processes print
    leave()


if __name__ == "__main__":
    main()
