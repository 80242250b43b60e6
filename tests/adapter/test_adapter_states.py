"""Every public method of the adapter and of PEFT in every state of the model: it is right there, or it is refused.

Right means: the same result as outside of the state, and after the state the same outputs as if it had never been.
"""

import contextlib
import copy
import functools
import inspect
import types

import pytest
import torch
from adapted_clip import CONFIG, IDS, PIXELS, learned, outputs, random_modes, randomise, shallow
from copies import copies
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from dulbe_peft import (
    DualModeLoraConfig,
    OccupationStatistics,
    collect_statistics,
    export_lora,
    probe_gradients,
    route_gradients,
    routed_loss,
)
from dulbe_peft.adapter.base import DualModeLayer
from dulbe_peft.adapter.layer import DualModeLinear
from dulbe_peft.adapter.model import DualModeLoraModel
from dulbe_peft.adapter.states import REFUSED, STATES

pytestmark = pytest.mark.filterwarnings("ignore")
ALL = slice(None)


@pytest.fixture(scope="module")
def two(tiny_clip):
    """A function that returns a model in the second task of its adapters "default", which is active, and "other"."""
    torch.manual_seed(0)
    model = get_peft_model(shallow(tiny_clip()), DualModeLoraConfig(**CONFIG))
    model.add_adapter("other", DualModeLoraConfig(**CONFIG))
    for name in ("other", "default"):
        model.set_adapter(name)
        learned(model)
    return copies(model)


@pytest.fixture(scope="module")
def compiler():
    """Never run a layer uncompiled because there is code for too many states."""
    from torch._dynamo import config

    torch.compiler.reset()
    with config.patch(recompile_limit=1000, accumulated_recompile_limit=1000, fail_on_recompile_limit_hit=True):
        yield
    torch.compiler.reset()


@pytest.fixture(scope="module")
def folder(two, tmp_path_factory):
    """The folder in which "other" is saved."""
    place = tmp_path_factory.mktemp("saved")
    two().save_pretrained(place, selected_adapters=["other"])
    return place / "other"


def loss_fn(model, rows):
    images = F.normalize(model.get_image_features(pixel_values=PIXELS[rows]).pooler_output, dim=-1)
    texts = F.normalize(model.get_text_features(input_ids=IDS).pooler_output.detach(), dim=-1)
    return F.cross_entropy(10 * images @ texts.T, torch.tensor([0, 1, 0])[rows]), len(PIXELS[rows])


def inside(block):
    """Return an operation that gives the outputs inside a block."""

    def operation(model, kit):
        with block(model):
            return outputs(model)

    return operation


def gradients(function):
    def operation(model, kit):
        loss = loss_fn(model, ALL)[0]
        structure = model.get_image_features(pixel_values=PIXELS).pooler_output.square().sum()
        model.zero_grad()
        result = function(model, loss, structure)
        if result is not None:
            result.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    return operation


def statistics(model):
    return dict(collect_statistics(model, [ALL], loss_fn, OccupationStatistics()))


def saved(model, kit):
    model.save_pretrained(kit.new())
    return get_peft_model_state_dict(model)


def returned(function):
    """Return an operation whose result is a new model; its outputs are compared."""

    def operation(model, kit):
        clip = function(model)
        return clip.get_image_features(pixel_values=PIXELS).pooler_output.detach()

    return operation


def nothing(model, kit):
    return None


# Operation -> what it does; None: it does not depend on the state, or needs a model with prompts or generated text.
OPERATIONS = {
    # the adapter's own
    "begin_task": lambda m, kit: m.begin_task(kit.modes),
    "fold_task": lambda m, kit: m.fold_task(),
    "fold_if_trained": lambda m, kit: m.fold_if_trained(),
    "keep_share": lambda m, kit: m.keep_share(0.5),
    "keep": lambda m, kit: m.keep(0.5),
    "save_beginning": lambda m, kit: m.save_beginning(),
    "save_first_beginning": lambda m, kit: m.save_first_beginning("default"),
    "add_weighted_adapter": lambda m, kit: (
        m.add_weighted_adapter(["default", "other"], [0.5, 0.7], "sum"),
        m.set_adapter("sum"),
    )[0],
    "held_weights": inside(lambda m: m.held_weights()),
    "previous_task": inside(lambda m: m.previous_task()),
    "scaled": inside(lambda m: m.scaled(0.25)),
    "scaled_history": inside(lambda m: m.scaled_history(0.25)),
    "rows_with_adapters": inside(lambda m: m.rows_with_adapters(ROWS)),
    "trained_bases": inside(lambda m: m.trained_bases()),
    "skip_zero_modes": inside(lambda m: m.skip_zero_modes()),
    "shared_parameters": lambda m, kit: [p.detach().clone() for p in m.shared_parameters()],
    "residual_parameters": lambda m, kit: [p.detach().clone() for p in m.residual_parameters()],
    "dual_mode_layers": lambda m, kit: len(m.dual_mode_layers()),
    "check_state": None,
    "collect_statistics": lambda m, kit: statistics(m),
    "probe_gradients": lambda m, kit: dict(probe_gradients(m, [ALL], loss_fn)),
    "route_gradients": gradients(route_gradients),
    "routed_loss": gradients(routed_loss),
    "export_lora": lambda m, kit: bool(export_lora(m, kit.new())),
    # PEFT's
    "add_adapter": lambda m, kit: (m.add_adapter("third", DualModeLoraConfig(**CONFIG)), m.set_adapter("third"))[0],
    "inject_adapter": None,
    "set_adapter": lambda m, kit: m.set_adapter("other"),
    "delete_adapter": lambda m, kit: m.delete_adapter("default"),
    "delete_adapter of another": lambda m, kit: m.delete_adapter("other"),
    "load_adapter": lambda m, kit: (m.load_adapter(kit.folder, "default"), None)[1],
    "load_adapter of another": lambda m, kit: (m.load_adapter(kit.folder, "third"), m.set_adapter("third"))[1],
    "set_peft_model_state_dict": lambda m, kit: (
        set_peft_model_state_dict(m, get_peft_model_state_dict(kit.twin, adapter_name="other")),
        None,
    )[1],
    "load_state_dict": lambda m, kit: (m.load_state_dict(kit.folded), None)[1],
    "state_dict": lambda m, kit: m.state_dict(),
    "get_peft_model_state_dict": lambda m, kit: get_peft_model_state_dict(m),
    "save_pretrained": saved,
    "create_or_update_model_card": lambda m, kit: m.create_or_update_model_card(kit.card),
    "disable_adapter": inside(lambda m: m.disable_adapter()),
    "disable_adapter_layers": lambda m, kit: m.base_model.disable_adapter_layers(),
    "enable_adapter_layers": lambda m, kit: m.base_model.enable_adapter_layers(),
    "merge_adapter": lambda m, kit: m.merge_adapter(),
    "unmerge_adapter": lambda m, kit: m.unmerge_adapter(),
    "merge_and_unload": returned(lambda m: m.merge_and_unload()),
    "unload": returned(lambda m: m.unload()),
    "get_base_model": lambda m, kit: isinstance(m.get_base_model(), nn.Module),
    "get_nb_trainable_parameters": lambda m, kit: m.get_nb_trainable_parameters()[1],
    "print_trainable_parameters": lambda m, kit: m.print_trainable_parameters(),
    "set_requires_grad": lambda m, kit: m.set_requires_grad("default", False),
    "supports_lora_conversion": lambda m, kit: m.supports_lora_conversion(),
    "forward": lambda m, kit: outputs(m),
    "copy": lambda m, kit: outputs(copy.deepcopy(m)),
    "get_layer_status": None,
    "get_model_status": None,
    "get_model_config": None,
    "from_pretrained": None,
    "push_to_hub": None,  # it writes what `save_pretrained` writes
    "prepare_model_for_gradient_checkpointing": None,
    "generate": None,
    "get_prompt": None,
    "get_prompt_embedding_to_save": None,
}
ROWS = {"pixel_values": ["other", "default", "__base__"], "input_ids": ["default", "other"]}


@contextlib.contextmanager
def merged(model):
    model.merge_adapter()
    try:
        yield
    finally:
        if any(layer.merged for layer in model.modules() if hasattr(layer, "merged")):
            model.unmerge_adapter()


class Packed(nn.Linear):
    """A linear layer whose class has its own `forward`, as quantised layers have."""

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Sharded(FSDPModule, nn.Linear):
    """A layer as FSDP2 leaves it while a pass has gathered its parameters: they are plain and whole."""


@contextlib.contextmanager
def as_class(model, kind, every):
    layers = [layer.base_layer for layer in model.modules() if hasattr(layer, "base_layer")][: None if every else 1]
    for layer in layers:
        layer.__class__ = kind
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = nn.Linear


@contextlib.contextmanager
def without_values(model):
    """Put B_S of all layers on the meta device, as offloading does."""
    layers = list(model.dual_mode_layers().values())
    before = [layer.dulbe_shared_B["default"] for layer in layers]
    for layer in layers:
        layer.dulbe_shared_B["default"] = nn.Parameter(layer.dulbe_shared_B["default"].to("meta"))
    try:
        yield
    finally:
        for layer, parameter in zip(layers, before, strict=True):
            layer.dulbe_shared_B["default"] = parameter


@contextlib.contextmanager
def tied(model):
    """Let another part of the model use the weight of an adapted layer."""
    model.get_base_model().tied = next(iter(model.dual_mode_layers().values())).base_layer
    try:
        yield
    finally:
        del model.get_base_model().tied


# State -> a context that puts a model into it, and its names in the table.
PLACES = {
    "unfolded": (lambda m: contextlib.nullcontext(), set()),
    "held": (lambda m: m.held_weights(), {"held"}),
    "scaled": (lambda m: m.scaled(0.5), {"held", "altered", "replaced"}),
    "scaled_history": (lambda m: m.scaled_history(0.5), {"held", "altered", "replaced"}),
    "resting": (lambda m: m.previous_task(), {"held", "altered"}),
    "merged": (merged, {"merged"}),
    "disabled": (lambda m: m.disable_adapter(), {"disabled"}),
    "mixed": (
        lambda m: m.rows_with_adapters({"pixel_values": ["default"] * 3, "input_ids": ["default"] * 2}),
        {"mixed"},
    ),
    "trained_bases": (lambda m: m.trained_bases(), {"trained_bases"}),
    "sharded": (functools.partial(as_class, kind=Sharded, every=False), {"sharded"}),
    "packed": (functools.partial(as_class, kind=Packed, every=True), {"packed"}),
    "meta": (without_values, {"meta"}),
    "tied": (tied, {"tied"}),
}
BLOCKS = {"held", "scaled", "scaled_history", "resting"}
# Refused though the table does not say so: by the pass, by deleting, by loading, or by another row of the table.
ALSO = {
    "merge_and_unload": {"merged"} & set(),
    "delete_adapter": BLOCKS | {"mixed", "merged"},
    "load_adapter": BLOCKS,
    "set_peft_model_state_dict": BLOCKS,
    "load_state_dict": BLOCKS,
    # The loss does not depend on the modes, which the error says.
    "route_gradients": {"scaled", "resting", "merged", "disabled"},
    "routed_loss": {"scaled", "resting", "merged", "disabled"},
}


# FSDP2's modules refuse copies; loading gives values to what had none; the end of `disable_adapter` enables layers.
# A tied weight has a second key, which the saved state lacks.
SKIPPED = {("copy", "sharded"), ("disable_adapter_layers", "disabled"), ("load_state_dict", "tied")}
SKIPPED |= {(name, "meta") for name in ("load_adapter", "set_peft_model_state_dict", "load_state_dict")}
ROW_OF = {"save_pretrained": "get_peft_model_state_dict", "route_gradients": "routed_loss"}


def public_methods():
    """Return the public methods of the tuner and of PEFT's model, without those of every module."""
    for kind in (DualModeLoraModel, PeftModel):
        for name in dir(kind):
            method = inspect.getattr_static(kind, name)
            if isinstance(method, (types.FunctionType, classmethod, staticmethod)) and not hasattr(nn.Module, name):
                if not name.startswith("_"):
                    yield name


def test_every_public_method_and_every_state_has_a_row():
    assert set(public_methods()) <= OPERATIONS.keys()
    of_learners = {"learn_task", "update_classes"}
    assert REFUSED.keys() - of_learners <= OPERATIONS.keys()
    assert set().union(*(names for _, names in PLACES.values())) == STATES.keys()
    assert set().union(*REFUSED.values()) == STATES.keys()


def run(operation, model, kit):
    torch.default_generator.manual_seed(7)
    return operation(model, kit)


def close(actual, expected, where=""):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, msg=lambda text: f"{where}: {text}")


@pytest.fixture(scope="module")
def needed(two, folder):
    """What the operations need besides a model. They only read it."""
    torch.manual_seed(0)
    folded = two()
    before, modes = outputs(folded), random_modes(folded)
    folded.fold_task()
    return types.SimpleNamespace(folder=folder, twin=two(), before=before, modes=modes, folded=folded.state_dict())


@pytest.fixture
def kit(needed, tmp_path):
    numbers = iter(range(1000))
    return types.SimpleNamespace(**vars(needed), new=lambda: str(tmp_path / str(next(numbers))), card=tmp_path)


EVERY = pytest.mark.parametrize("name", [name for name, operation in OPERATIONS.items() if operation is not None])


@pytest.mark.plain("fold_task", "scaled", "export_lora")
@EVERY
def test_operation_is_right_or_refused_in_every_state(two, kit, name):
    operation, twin = OPERATIONS[name], two()
    expected = run(operation, twin, kit)
    gone = name in ("unload", "merge_and_unload")
    afterwards = None if gone else outputs(twin)
    for place, (enter, states) in PLACES.items():
        if (name, place) in SKIPPED:
            continue
        model, refused = two(), None
        with enter(model):
            try:
                result = run(operation, model, kit)
            except (ValueError, RuntimeError) as error:
                assert isinstance(error, ValueError) or place == "meta"  # torch's own errors name the device
                refused = error
            else:
                if place != "disabled":  # there, the adapter does not act, whatever happens to it
                    close_unless_state_shows(result, expected, place, name)
                if not gone and place in BLOCKS | {"mixed"}:
                    check_inside(model, twin, enter, place)
        table = bool(states & set(REFUSED.get(ROW_OF.get(name, name), ())))
        if table:
            assert refused is not None, f"{name} in {place} is not refused: {result!r:.200}"
        if refused is not None:
            assert table or place in ALSO.get(name, ()) or place == "meta", f"{name} in {place}: {refused}"
        if not (gone and refused is None):
            after = afterwards if refused is None else kit.before
            close(outputs(model), after, f"after {name} in {place}, {refused}")


@pytest.mark.slow
@EVERY
def test_operation_is_right_in_a_compiled_model(two, kit, compiler, name):
    """The compiled layers have run before the operation, so what they compiled is of the state before it.

    Code that was compiled for one operation is there for the next, but the pass before it makes the code of the state
    before it the first whose conditions are checked after it.
    """
    operation, twin, model = OPERATIONS[name], two(), two()
    expected = run(operation, twin, kit)
    layers = [layer for layer in model.modules() if isinstance(layer, DualModeLayer)]
    for layer in (layers[0], next(layer for layer in layers if isinstance(layer, DualModeLinear))):
        layer.compile(backend="eager")
    close(outputs(model), kit.before, "before")
    close(run(operation, model, kit), expected, f"result of {name}")
    if name not in ("unload", "merge_and_unload"):
        close(outputs(model), outputs(twin), f"after {name}")


def test_copy_of_a_compiled_model_uses_its_own_weights(two):
    """torch leaves what was compiled out of a copy, because it refers to the original."""
    model, expected = two(), outputs(two())
    for module in (next(m for m in model.modules() if isinstance(m, DualModeLinear)), model.base_model):
        module.compile(backend="eager")
    twin = copy.deepcopy(model)
    randomise(p for p in model.parameters() if p.requires_grad)
    assert all(module._compiled_call_impl is None for module in twin.modules())
    close(outputs(twin), expected)


def close_unless_state_shows(result, expected, place, name):
    """Compare results. The outputs of a plain pass, also of one that measures, are those of the state itself."""
    shows = {"forward": BLOCKS, "skip_zero_modes": BLOCKS, "trained_bases": BLOCKS}
    shows |= {"state_dict": {"meta", "trained_bases", "tied"}, "shared_parameters": {"meta"}}
    shows |= {key: {"scaled_history", "trained_bases"} for key in ("route_gradients", "routed_loss")}
    if place not in shows.get(name, ()):
        close(result, expected, f"result of {name} in {place}")


def check_inside(model, twin, enter, place):
    """Check that a pass inside a block is that of a twin which entered the block after the operation, or refused."""
    try:
        inner = outputs(model)
    except ValueError as error:
        assert "a block is running" in str(error) or "adapter_names cannot" in str(error)
        return
    try:
        with enter(twin):
            close(inner, outputs(twin), f"inside {place}")
    except ValueError as error:
        assert "disabled" in str(error)  # the operation disabled the adapter


def test_pass_of_another_adapter_inside_a_block_is_refused(two):
    for block in (lambda m: m.held_weights(), lambda m: m.scaled(0.5), lambda m: m.previous_task()):
        model = two()
        with block(model):
            model.set_adapter("other")
            with pytest.raises(ValueError, match=r"weights of the adapter 'default', but \['other'\] is active"):
                outputs(model)
            with model.disable_adapter():
                outputs(model)  # the base model has no adapter
        alone = two()
        alone.set_adapter("other")
        assert all(map(torch.equal, outputs(model), outputs(alone)))


def test_switching_adapters_folds_once_for_each(two, monkeypatch):
    from dulbe_peft.adapter import layer as module

    model, folds, real = two(), [], module._fold
    monkeypatch.setattr(module, "_fold", lambda *arguments: folds.append(1) or real(*arguments))
    for _ in range(3):
        for name in ("default", "other"):
            model.set_adapter(name)
            outputs(model)
    assert len(folds) == 2 * len(model.dual_mode_layers())


@pytest.mark.plain("1-weight", "3-factors")
@pytest.mark.parametrize("fold", ["weight", "factors"])
@pytest.mark.parametrize("tasks", [1, 3])
def test_eager_compiled_and_autocast_passes_agree(tiny_clip, fold, tasks):
    """The three ways in which a layer computes its sum, and their gradients, against autocast's own products."""
    torch.manual_seed(0)
    layer = next(
        iter(
            learned(get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG, fold=fold)), tasks)
            .dual_mode_layers()
            .values()
        )
    )
    x = torch.randn(5, layer.in_features)
    torch.compiler.reset()
    results = {}
    for way, function in (("eager", layer), ("compiled", torch.compile(layer, backend="eager", fullgraph=True))):
        for dtype in (None, torch.bfloat16):
            inputs = x.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
                y = function(inputs)
            weight = layer.dulbe_residual_B["default"]
            results[way, dtype] = (y, *torch.autograd.grad(y.float().square().sum(), (inputs, weight)))
    exact = copy.deepcopy(layer).double()
    weight = exact.base_layer.weight + exact.get_delta_weight("default", torch.float64)
    y = F.linear(x.double(), weight, exact.base_layer.bias)
    for (_, dtype), (got, *_) in results.items():
        epsilon = torch.finfo(dtype or torch.float32).eps
        torch.testing.assert_close(got.double(), y, rtol=0, atol=8 * epsilon * float(y.abs().max()))
    for dtype in (None, torch.bfloat16):
        for one, other in zip(results["eager", dtype], results["compiled", dtype], strict=True):
            epsilon = torch.finfo(dtype or torch.float32).eps
            torch.testing.assert_close(one, other, rtol=0, atol=16 * epsilon * float(other.abs().max()))
