"""The probe compared with autograd on merged weights, and the routing with two separate gradient calls."""

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


def test_probe_equals_gradient_of_mean_loss_and_leaves_model_unchanged(model):
    """Check that a shorter last batch counts by its size, and that the weight includes history and modes."""
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


def test_routed_gradients_equal_two_separate_backward_passes(model):
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    shared = {id(p) for p in model.shared_parameters()}
    literal = copy.deepcopy(model)
    task, structure = losses(literal)
    twins = dict(literal.named_parameters())
    expected = {name: torch.autograd.grad(task, twins[name], retain_graph=True)[0] for name in trainable}
    for name, parameter in trainable.items():
        if id(parameter) in shared:
            expected[name] = expected[name] + 0.25 * torch.autograd.grad(structure, twins[name], retain_graph=True)[0]
    seen_by_hooks, scale = {}, torch.nn.Parameter(torch.tensor(2.0))
    for parameter in model.shared_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen_by_hooks.update({id(p): p.grad.clone()}))
    for repeat in (1, 2):  # gradients accumulate, as with backward()
        task, structure = losses(model)
        route_gradients(model, scale / 2 * task, scale / 2 * structure, structure_weight=0.25)
        for name, parameter in trainable.items():
            torch.testing.assert_close(parameter.grad, repeat * expected[name], atol=1e-6, rtol=1e-4)
        assert all(torch.equal(seen_by_hooks[id(p)], p.grad) for p in model.shared_parameters()), "both parts"
        # A parameter outside the model gets the gradient of the task loss alone.
        torch.testing.assert_close(scale.grad, repeat * task.detach() / 2)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_is_exact_or_refused(model, reentrant):
    def gradients(backward):
        model.zero_grad(set_to_none=True)
        backward(*losses(model))
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def plain(task, structure):
        (task + structure).backward()

    backwards = [plain] if reentrant else [plain, lambda *both: route_gradients(model, *both)]
    expected = [gradients(backward) for backward in backwards]
    model.train()
    clip = model.get_base_model()
    clip.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    clip.vision_model.embeddings.register_forward_hook(lambda *args: args[-1].requires_grad_())
    for backward, unchecked in zip(backwards, expected, strict=True):
        torch.testing.assert_close(gradients(backward), unchecked, rtol=1e-5, atol=1e-6)
    if reentrant:
        model.zero_grad(set_to_none=True)
        with pytest.raises(ValueError, match="structure_loss has no gradient in any shared mode.*use_reentrant=False"):
            route_gradients(model, *losses(model))
        assert all(p.grad is None for p in model.parameters())


def test_errors_change_no_gradient_and_release_held_weights(model):
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
def test_routing_with_one_mode_or_without_structure_loss_equals_backward(tiny_clip, ranks):
    model = get_peft_model(tiny_clip(), DualModeLoraConfig(shared_rank=ranks[0], residual_rank=ranks[1]))
    learned(model, 1)
    twin = copy.deepcopy(model)
    losses(twin)[0].backward()
    task, structure = losses(model)
    route_gradients(model, task, None if ranks[0] else structure)  # without a shared mode, structure has no effect
    for routed, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert (routed.grad is None) == (plain.grad is None)
        assert routed.grad is None or torch.equal(routed.grad, plain.grad)


def test_gradients_of_half_precision_model_are_summed_in_float32(tiny_clip):
    model = get_peft_model(tiny_clip().to(torch.bfloat16), DualModeLoraConfig(residual_rank=2))
    pixels = torch.randn(2, 3, 16, 16, dtype=torch.bfloat16)

    def loss_fn(model, _):
        return model.get_image_features(pixels).pooler_output.float().square().mean(), 1

    once = probe_gradients(model, [0], loss_fn)
    often = probe_gradients(model, range(60), loss_fn)
    assert all(gradient.dtype == torch.float32 for gradient in once.values())
    torch.testing.assert_close(often, once, rtol=1e-3, atol=1e-6)
