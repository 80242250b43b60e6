"""Training steps of a compiled model: one graph, and the gradients of two separate backward passes."""

from collections import Counter

import pytest
import torch
from adapted_clip import CONFIG, learned, shallow
from peft import get_peft_model
from reference import randn
from torch.nn import functional as F
from transformers import CLIPVisionModelWithProjection

from dulbe_peft import DualModeLoraConfig, route_gradients

WEIGHT = 0.25
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is:DeprecationWarning")  # torch 2.11


@pytest.fixture
def setting():
    """Restore, after the test, the setting of torch that compiling an adapted layer changes, and the compiled code."""
    from torch._functorch import config

    torch.compiler.reset()
    with config.patch(donated_buffer=True):
        yield config
    torch.compiler.reset()


@pytest.fixture
def graphs(monkeypatch):
    """Compile with a backend that makes the real graphs without a C++ compiler, and return the forward graphs."""
    made, real = [], torch.compile

    def backend(graph, inputs):
        made.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(torch, "compile", lambda function: real(function, backend=backend))
    return made


@pytest.fixture
def model(tiny_clip):
    settings, targets = shallow(tiny_clip()).config.vision_config, ["k_proj", "fc1"]
    config = DualModeLoraConfig(**CONFIG, target_modules=targets)
    return learned(get_peft_model(CLIPVisionModelWithProjection(settings), config)).train()


def losses(model, rows):
    images = F.normalize(model(pixel_values=randn(rows, 3, 16, 16, seed=3)).image_embeds, dim=-1)
    texts = F.normalize(randn(2, images.shape[1], seed=4), dim=1)
    return F.cross_entropy(10 * images @ texts.T, torch.arange(rows) % 2), (images**3).sum()


def expected_gradients(model, rows, routed):
    """Return the gradients from two separate calls of autograd, without compiling."""
    with torch.compiler.set_stance("force_eager"):
        task, structure = losses(model, rows)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = dict(zip(named, torch.autograd.grad(task, list(named.values()), retain_graph=True), strict=True))
    shared = [name for name in named if "shared_B" in name]
    assert shared
    for name, part in zip(shared, torch.autograd.grad(structure, [named[n] for n in shared]), strict=True):
        gradients[name] = gradients[name] + routed * WEIGHT * part
    return gradients


def step(model, rows, routed=True):
    """Return the gradients of one routed step."""
    model.zero_grad(set_to_none=True)
    task, structure = losses(model, rows)
    route_gradients(model, task, structure if routed else None, structure_weight=WEIGHT)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
def test_compiled_steps_have_exact_gradients_and_one_graph(model, graphs, setting):
    """The first step, without a structure loss, compiles a backward pass that would not have to keep anything."""
    torch._dynamo.utils.counters.clear()
    model.forward = torch.compile(model.forward)
    steps = [(2, False), (2, True), (2, True), (3, True), (4, True), (3, True)]
    made = []
    for rows, routed in steps:
        torch.testing.assert_close(step(model, rows, routed), expected_gradients(model, rows, routed))
        made.append(len(graphs))
    assert made == [1, 1, 1, 2, 2, 2], "a further graph for all other batch sizes"
    assert torch._dynamo.utils.counters["graph_break"] == Counter()


@pytest.mark.slow
def test_new_task_compiles_nothing_inside_held_weights(model, graphs, setting):
    model.forward = torch.compile(model.forward)
    for _ in range(3):
        learned(model, 1).train()
        with model.held_weights():
            torch.testing.assert_close(step(model, 2), expected_gradients(model, 2, True))
    assert len(graphs) == 1, "for every rank of the history"


def test_setting_is_changed_only_where_a_trained_layer_is_compiled(model, setting):
    step(model, 2)
    assert setting.donated_buffer
    layer = next(iter(model.dual_mode_layers().values()))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        compiled(torch.ones(2, layer.in_features))
    assert setting.donated_buffer
    compiled(torch.ones(2, layer.in_features))
    assert not setting.donated_buffer


def test_task_begins_inside_autocast(model):
    with torch.autocast("cpu", torch.bfloat16):
        learned(model, 1)
