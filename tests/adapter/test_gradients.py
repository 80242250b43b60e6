"""The probe against autograd on merged weights, and the routing against two literal gradient calls."""

import copy

import pytest
import torch
from adapted_clip import CONFIG, IDS, PIXELS, learned
from peft import get_peft_model
from torch.nn import functional as F

from dulbe_peft import DualModeLoraConfig, probe_gradients, route_gradients

LABELS = torch.tensor([0, 1, 0])


def features(model, rows=slice(None)):
    images = F.normalize(model.get_image_features(pixel_values=PIXELS[rows]).pooler_output, dim=-1)
    return images, F.normalize(model.get_text_features(input_ids=IDS).pooler_output, dim=-1)


def loss_fn(model, rows):
    images, texts = features(model, rows)
    return F.cross_entropy(10 * images @ texts.detach().T, LABELS[rows]), len(rows)


@pytest.fixture
def model(tiny_clip):
    return learned(get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG)))


def test_probe_is_the_gradient_of_the_mean_loss_and_leaves_the_model_as_it_was(model):
    """A short last batch counts by its size; history and current modes are in the weight that is differentiated."""
    plain = copy.deepcopy(model).merge_and_unload().requires_grad_(True)
    loss_fn(plain, torch.tensor([0, 1, 2]))[0].backward()
    model.train()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    probe = probe_gradients(model, [torch.tensor([0, 1]), torch.tensor([2])], loss_fn)
    expected = {name: plain.get_submodule(name).weight.grad for name in model.dual_mode_layers()}
    torch.testing.assert_close(probe, expected, atol=1e-6, rtol=1e-4)
    assert all(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters()) and [p.requires_grad for p in model.parameters()] == flags
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def losses(model):
    images, texts = features(model)
    return F.cross_entropy(10 * images @ texts.T, LABELS), (images**3).sum()


def test_routing_is_what_the_paper_says(model):
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    shared = {id(p) for p in model.shared_parameters()}
    literal = copy.deepcopy(model)
    task, structure = losses(literal)
    twins = dict(literal.named_parameters())
    expected = {name: torch.autograd.grad(task, twins[name], retain_graph=True)[0] for name in trainable}
    for name, parameter in trainable.items():
        if id(parameter) in shared:
            expected[name] = expected[name] + 0.25 * torch.autograd.grad(structure, twins[name], retain_graph=True)[0]
    told, scale = {}, torch.nn.Parameter(torch.tensor(2.0))
    for parameter in model.shared_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: told.update({id(p): p.grad.clone()}))
    for repeat in (1, 2):  # accumulates, as backward() does
        task, structure = losses(model)
        route_gradients(model, scale / 2 * task, scale / 2 * structure, structure_weight=0.25)
        for name, parameter in trainable.items():
            torch.testing.assert_close(parameter.grad, repeat * expected[name], atol=1e-6, rtol=1e-4)
        assert all(torch.equal(told[id(p)], p.grad) for p in model.shared_parameters()), "hooks see both parts"
        # What is elsewhere learns from the task alone.
        torch.testing.assert_close(scale.grad, repeat * task.detach() / 2)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_is_exact_or_refused(model, reentrant):
    def gradients(by):
        model.zero_grad(set_to_none=True)
        by(*losses(model))
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def plain(task, structure):
        (task + structure).backward()

    kinds = [plain] if reentrant else [plain, lambda *both: route_gradients(model, *both)]
    expected = [gradients(by) for by in kinds]
    model.train()
    clip = model.get_base_model()
    clip.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    clip.vision_model.embeddings.register_forward_hook(lambda *args: args[-1].requires_grad_())
    for by, wanted in zip(kinds, expected, strict=True):
        torch.testing.assert_close(gradients(by), wanted, rtol=1e-5, atol=1e-6)
    if reentrant:
        model.zero_grad(set_to_none=True)
        with pytest.raises(ValueError, match="structure_loss has no gradient in any shared mode.*use_reentrant=False"):
            route_gradients(model, *losses(model))
        assert all(p.grad is None for p in model.parameters())


def test_what_fails_touches_no_gradient_and_lets_the_weights_go(model):
    task, structure = losses(model)
    bad = float("nan") * task, float("inf") * structure, task[None]
    for arguments in ((bad[0], structure), (task, bad[1]), (bad[2], None), (task, structure, -1.0)):
        with pytest.raises(ValueError, match="finite|must be a scalar|must be at least 0"):
            route_gradients(model, *arguments)

    def batches():
        yield torch.tensor([0])
        raise RuntimeError("broken reader")

    with pytest.raises(RuntimeError, match="broken reader"):
        probe_gradients(model, batches(), loss_fn)
    with pytest.raises(ValueError, match="loss of probe batch 0 is nan"):
        probe_gradients(model, [torch.tensor([0])], lambda m, rows: (loss_fn(m, rows)[0] * float("nan"), 1))
    assert all(layer._held is None for layer in model.dual_mode_layers().values())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("ranks", [(0, 2), (2, 0)])
def test_one_mode_alone_and_the_first_task(tiny_clip, ranks):
    model = get_peft_model(tiny_clip(), DualModeLoraConfig(shared_rank=ranks[0], residual_rank=ranks[1]))
    learned(model, 1)
    twin = copy.deepcopy(model)
    losses(twin)[0].backward()
    task, structure = losses(model)
    route_gradients(model, task, None if ranks[0] else structure)  # without a shared mode, a structure loss is nothing
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)


def test_a_half_precision_model_s_gradients_are_summed_in_float32(tiny_clip):
    model = get_peft_model(tiny_clip().to(torch.bfloat16), DualModeLoraConfig(residual_rank=2))
    pixels = torch.randn(2, 3, 16, 16, dtype=torch.bfloat16)

    def loss_fn(model, _):
        return model.get_image_features(pixels).pooler_output.float().square().mean(), 1

    once = probe_gradients(model, [0], loss_fn)
    often = probe_gradients(model, range(60), loss_fn)
    assert all(gradient.dtype == torch.float32 for gradient in once.values())
    torch.testing.assert_close(often, once, rtol=1e-3, atol=1e-6)
