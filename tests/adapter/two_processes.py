"""What test_two_processes.py launches in two processes: each has a part of the data, all get the whole's numbers."""

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
PARTS = (slice(0, 2), slice(2, 7))  # of the processes


def tiny_clip() -> CLIPModel:
    both = {"num_hidden_layers": 1, "num_attention_heads": 2, "projection_dim": 16}
    text = {**both, "hidden_size": 24, "intermediate_size": 48, "vocab_size": 99, "max_position_embeddings": 20}
    text |= {"bos_token_id": 97, "eos_token_id": 98, "pad_token_id": 98}
    vision = {**both, "hidden_size": 32, "intermediate_size": 64, "image_size": 16, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).eval()


class Features(nn.Module):
    """A model whose forward pass is that of the images, as DDP needs it."""

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
    """Probe and statistics of some rows of the data in batches."""
    probe = probe_gradients(model, batches, loss_fn)
    return dict(probe) | dict(collect_statistics(model, batches, loss_fn, OccupationStatistics()))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def alone(function, *arguments):
    """What a single process computes."""
    initialised, torch.distributed.is_initialized = torch.distributed.is_initialized, lambda: False
    try:
        return function(*arguments)
    finally:
        torch.distributed.is_initialized = initialised


def sums(model):
    """The measures of all data, also where a process has none of it, the model is wrapped, or one process fails."""
    rank = world()[0]
    mine = [slice(0, 2)] if rank == 0 else [slice(2, 5), slice(5, 7)]
    expected = alone(measured, copy.deepcopy(model), [slice(0, 7)])
    close(measured(model, mine), expected)
    close(measured(model, [] if rank == 0 else [slice(0, 7)]), expected)
    close(measured(DistributedDataParallel(copy.deepcopy(model)), mine), expected)
    close(measured(Accelerator(cpu=True).prepare(copy.deepcopy(model)), mine), expected)
    for call in (probe_gradients, lambda *args: collect_statistics(*args, OccupationStatistics())):
        try:
            call(model, [slice(0, 2), slice("no rows", None) if rank else slice(2, 4)], loss_fn)
        except (TypeError, RuntimeError) as error:
            assert rank or re.search("process 1 stopped: TypeError", str(error)), error
        else:
            raise SystemExit("an error of one process was not raised")


def gradients(model, both, scale):
    """What `both`, a function of features, accumulates over two calls of route_gradients."""
    model.zero_grad()
    for _ in range(2):
        route_gradients(model, *(scale * loss for loss in both(model)))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def routing(model):
    """Summed without a wrapper, and the mean with DDP, also by `routed_loss` and over images alone."""

    def both(rows):
        def losses(model):
            embeds = model.get_image_features(pixel_values=IMAGES[rows]).pooler_output
            return loss_of(embeds, LABELS[rows]), embeds.square().mean()

        return losses

    parts = [alone(gradients, copy.deepcopy(model), both(rows), 1) for rows in PARTS]
    total = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    close(gradients(model, both(PARTS[world()[0]]), 1), total)
    try:
        route_gradients(model, torch.tensor(float("nan")) if world()[0] else both(PARTS[0])(model)[0], None)
    except (ValueError, RuntimeError):
        close({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, total)
    else:
        raise SystemExit("a loss that is not finite was taken")
    model.zero_grad()
    # The text LoRA has no gradient from images alone: DDP has to look for it.
    parallel = DistributedDataParallel(Features(model), find_unused_parameters=True)
    for route in (route_gradients, lambda *args: routed_loss(*args).backward()):
        for _ in range(2):
            embeds = parallel(IMAGES[PARTS[world()[0]]])
            route(parallel, loss_of(embeds, LABELS[PARTS[world()[0]]]), embeds.square().mean())
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        close({name: found[name] for name in total}, {name: value / 2 for name, value in total.items()})
        model.zero_grad()


class Answers(nn.Module):
    """A head beside a parameter, without which DDP wraps nothing."""

    def __init__(self, head):
        super().__init__()
        self.head, self.scale = head, nn.Parameter(torch.ones(()))

    def forward(self, embeds):
        return self.scale * self.head(embeds)


def buffers():
    """DDP copies the first process's buffers over the others', and these answer by them."""
    features, head = torch.randn(6, 16, generator=torch.Generator().manual_seed(3)), BridgeEnsembleHead(16)
    head.add_classes(["a", "b"], features, torch.arange(6) % 2, features[:2])
    parallel = DistributedDataParallel(Answers(head))
    parallel(features)
    if world()[0]:
        head.text_embeds.copy_(F.normalize(features[2:4], dim=1))
        head(features)
    embeds = head.text_embeds.clone()
    found = parallel(features).detach()
    assert world()[0] == 0 or not torch.equal(head.text_embeds, embeds)
    assert torch.equal(found, copy.deepcopy(head)(features))


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = adapted_clip.learned(get_peft_model(tiny_clip(), DualModeLoraConfig(**adapted_clip.CONFIG)))
    sums(model)
    routing(model)
    buffers()
    probe = probe_gradients(model, [PARTS[world()[0]]], loss_fn)
    model.begin_task(allocate_modes(probe, None, config=model.active_config))
    print("ended", world()[0])
    leave()


if __name__ == "__main__":
    main()
