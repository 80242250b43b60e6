"""The script that test_two_processes.py runs in two processes, each with a part of the data."""

import copy
import re

import adapted_clip
import torch
from accelerate import Accelerator
from peft import get_peft_model
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import CLIPConfig, CLIPModel

from dulbe_peft import (
    BridgeEnsembleHead,
    DualModeLoraConfig,
    OccupationStatistics,
    allocate_modes,
    collect_statistics,
    probe_gradients,
    route_gradients,
    routed_loss,
)
from dulbe_peft.utils.processes import leave, world

IMAGES = torch.randn(7, 3, 16, 16, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(7) % 2
PARTS = (slice(0, 2), slice(2, 7))  # the rows of each process


def tiny_clip() -> CLIPModel:
    both = {"num_hidden_layers": 1, "num_attention_heads": 2, "projection_dim": 16}
    text = {**both, "hidden_size": 24, "intermediate_size": 48, "vocab_size": 99, "max_position_embeddings": 20}
    text |= {"bos_token_id": 97, "eos_token_id": 98, "pad_token_id": 98}
    vision = {**both, "hidden_size": 32, "intermediate_size": 64, "image_size": 16, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).eval()


class Features(nn.Module):
    """A model whose forward pass embeds images, because DDP only wraps `forward`."""

    def __init__(self, peft_model):
        super().__init__()
        self.peft_model = peft_model

    def forward(self, pixels):
        return self.peft_model.get_image_features(pixel_values=pixels).pooler_output

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("peft_model"), name)


def loss_of(embeds, labels):
    return F.cross_entropy(embeds[:, :2], labels)


def loss_fn(model, rows):
    return loss_of(model.get_image_features(pixel_values=IMAGES[rows]).pooler_output, LABELS[rows]), len(LABELS[rows])


def measured(model, batches):
    """Return the probe and the statistics of batches, each a slice of the data, in one dict."""
    probe = probe_gradients(model, batches, loss_fn)
    return dict(probe) | dict(collect_statistics(model, batches, loss_fn, OccupationStatistics()))


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def alone(function, *arguments):
    """Return what the function computes in a single process."""
    initialised, torch.distributed.is_initialized = torch.distributed.is_initialized, lambda: False
    try:
        return function(*arguments)
    finally:
        torch.distributed.is_initialized = initialised


def check_sums(model):
    """Check the measures of all data, also if a process has no data, the model is wrapped, or one process fails."""
    rank = world()[0]
    batches = [slice(0, 2)] if rank == 0 else [slice(2, 5), slice(5, 7)]
    expected = alone(measured, copy.deepcopy(model), [slice(0, 7)])
    assert_close(measured(model, batches), expected)
    assert_close(measured(model, [] if rank == 0 else [slice(0, 7)]), expected)
    assert_close(measured(DistributedDataParallel(copy.deepcopy(model)), batches), expected)
    assert_close(measured(Accelerator(cpu=True).prepare(copy.deepcopy(model)), batches), expected)
    for call in (probe_gradients, lambda *args: collect_statistics(*args, OccupationStatistics())):
        try:
            call(model, [slice(0, 2), slice("no rows", None) if rank else slice(2, 4)], loss_fn)
        except (TypeError, RuntimeError) as error:
            assert rank or re.search("process 1 stopped: TypeError", str(error)), error
        else:
            raise SystemExit("an error in one process was not raised")


def gradients(model, losses, scale):
    """Return what two calls of route_gradients accumulate for the two losses that `losses(model)` returns."""
    model.zero_grad()
    for _ in range(2):
        route_gradients(model, *(scale * loss for loss in losses(model)))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_routing(model):
    """Check that gradients are summed without a wrapper and averaged by DDP, also with `routed_loss`."""

    def losses_of(rows):
        def losses(model):
            embeds = model.get_image_features(pixel_values=IMAGES[rows]).pooler_output
            return loss_of(embeds, LABELS[rows]), embeds.square().mean()

        return losses

    parts = [alone(gradients, copy.deepcopy(model), losses_of(rows), 1) for rows in PARTS]
    total = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    assert_close(gradients(model, losses_of(PARTS[world()[0]]), 1), total)
    try:
        route_gradients(model, torch.tensor(float("nan")) if world()[0] else losses_of(PARTS[0])(model)[0], None)
    except (ValueError, RuntimeError):
        assert_close({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, total)
    else:
        raise SystemExit("a loss that is not finite was accepted")
    model.zero_grad()
    # The text LoRA has no gradient from images alone: DDP has to look for it.
    parallel = DistributedDataParallel(Features(model), find_unused_parameters=True)
    for route in (route_gradients, lambda *args: routed_loss(*args).backward()):
        for _ in range(2):
            embeds = parallel(IMAGES[PARTS[world()[0]]])
            route(parallel, loss_of(embeds, LABELS[PARTS[world()[0]]]), embeds.square().mean())
        averaged = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert_close({name: averaged[name] for name in total}, {name: value / 2 for name, value in total.items()})
        model.zero_grad()


class ScaledHead(nn.Module):
    """A head with a parameter, because DDP refuses a module without one."""

    def __init__(self, head):
        super().__init__()
        self.head, self.scale = head, nn.Parameter(torch.ones(()))

    def forward(self, embeds):
        return self.scale * self.head(embeds)


def check_buffers():
    """Check that the other processes use the first one's buffers after DDP has copied these over theirs."""
    features, head = torch.randn(6, 16, generator=torch.Generator().manual_seed(3)), BridgeEnsembleHead(16)
    head.add_classes(["a", "b"], features, torch.arange(6) % 2, features[:2])
    parallel = DistributedDataParallel(ScaledHead(head))
    parallel(features)
    if world()[0]:
        head.text_embeds.copy_(F.normalize(features[2:4], dim=1))
        head(features)
    embeds = head.text_embeds.clone()
    scores = parallel(features).detach()
    assert world()[0] == 0 or not torch.equal(head.text_embeds, embeds)
    assert torch.equal(scores, copy.deepcopy(head)(features))


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = adapted_clip.learned(get_peft_model(tiny_clip(), DualModeLoraConfig(**adapted_clip.CONFIG)))
    check_sums(model)
    check_routing(model)
    check_buffers()
    probe = probe_gradients(model, [PARTS[world()[0]]], loss_fn)
    model.begin_task(allocate_modes(probe, None, config=model.active_config))
    print(f"ended {world()[0]}\n", end="", flush=True)  # one write: both processes print
    leave()


if __name__ == "__main__":
    main()
