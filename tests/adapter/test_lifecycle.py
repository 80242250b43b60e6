"""State outside PEFT's lifecycle: blocks, replaced weights, the user's configuration, damage, shards, lone tasks."""

import copy
import dataclasses
import inspect
import json
import pickle
import warnings
from contextlib import contextmanager

import pytest
import torch
from adapted_clip import CONFIG, IDS, PIXELS, image_features, learned, outputs, random_modes, randomise, shallow
from copies import copies
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.helpers import disable_input_dtype_casting
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_encoders import make_model
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

from dulbe_peft import (
    BridgeEnsembleHead,
    DualModeLoraConfig,
    OccupationStatistics,
    PooledBridgeHead,
    allocate_modes,
    collect_statistics,
    cross_modal_loss,
    probe_gradients,
    route_gradients,
    routed_loss,
)
from dulbe_peft.adapter.config import FORMAT, AdapterFacts, read_facts
from dulbe_peft.adapter.peft_model import DualModePeftModel
from dulbe_peft.adapter.saved import base_digests
from dulbe_peft.encoders.loading import pixel_values

LABELS = torch.tensor([0, 1, 0])
FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"


def adapted(clip, **fields):
    return get_peft_model(clip, DualModeLoraConfig(**CONFIG | fields))


@pytest.fixture(scope="module")
def models(tiny_clip):
    """A function that returns a model in its second task."""
    torch.manual_seed(1)
    return copies(learned(adapted(tiny_clip())))


@pytest.fixture
def model(models):
    return models()


@pytest.fixture(scope="module")
def small_clip(tiny_clip):
    """A function that returns `tiny_clip` with one block in each tower, for tests that need many."""
    return copies(shallow(tiny_clip()))


@pytest.fixture(scope="module")
def between_tasks(small_clip):
    """Two functions that return a model without an adapter of the text: in its second task, and after it."""
    torch.manual_seed(1)
    model = learned(adapted(small_clip(), text_rank=0))
    inside = copies(model)
    model.fold_task()
    return inside, copies(model)


def loss_fn(model, rows):
    images = F.normalize(model.get_image_features(pixel_values=PIXELS[rows]).pooler_output, dim=-1)
    texts = F.normalize(model.get_text_features(input_ids=IDS).pooler_output.detach(), dim=-1)
    return F.cross_entropy(10 * images @ texts.T, LABELS[rows]), len(LABELS[rows])


# ---------------------------------------------------------------- every verb inside every block

BLOCKS = {
    "held_weights": lambda model: model.held_weights(),
    "scaled": lambda model: model.scaled(0.5),
    "scaled to 1": lambda model: model.scaled(1),
    "scaled to 1 while held": lambda model: both(model.held_weights(), lambda: model.scaled(1)),
    "scaled to 1 while scaled": lambda model: both(model.scaled(0.5), lambda: model.scaled(1)),
    "scaled_history": lambda model: model.scaled_history(0),
    "previous_task": lambda model: model.previous_task(),
    "skip_zero_modes": lambda model: model.skip_zero_modes(),
    "trained_bases": lambda model: model.trained_bases(),
    "disable_adapter": lambda model: model.disable_adapter(),
}
VERBS = {
    "begin_task": lambda model, modes, folder: model.begin_task(modes),
    "fold_task": lambda model, modes, folder: model.fold_task(),
    "merge_adapter": lambda model, modes, folder: model.merge_adapter(),
    "collect_statistics": lambda model, modes, folder: dict(
        collect_statistics(model, [slice(None)], loss_fn, OccupationStatistics())
    ),
    "probe_gradients": lambda model, modes, folder: dict(probe_gradients(model, [slice(None)], loss_fn)),
    "save_pretrained": lambda model, modes, folder: (model.save_pretrained(folder), load_file(folder / FILE))[1],
    "get_peft_model_state_dict": lambda model, modes, folder: get_peft_model_state_dict(model),
}


@contextmanager
def both(first, second):
    with first, second():
        yield


@pytest.mark.plain("held_weights", "scaled")
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_inside_every_block_is_exact_or_refused(between_tasks, tmp_path, verb, block, zero):
    """Check that a call inside a block gives what it gives outside, or an error after which all is as it was."""
    model, twin = (between_tasks[zero]() for _ in range(2))
    modes, before = random_modes(model), image_features(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is nothing to fold
        expected = VERBS[verb](twin, modes, tmp_path / "outside")
        try:
            with BLOCKS[block](model):
                result = VERBS[verb](model, modes, tmp_path / "inside")
                if verb in ("begin_task", "fold_task", "merge_adapter") and block != "disable_adapter":
                    assert torch.equal(image_features(model), image_features(twin)), "wrong until the block ends"
        except ValueError as error:
            assert "block" in str(error) or "disable" in str(error)
            assert torch.equal(image_features(model), before)
            return
    if block == "trained_bases" and verb in ("collect_statistics", "probe_gradients"):
        # The backward pass has other products: sums of up to 100 terms in float32 differ by rounding.
        for name, tensor in expected.items():
            bound = 100 * torch.finfo(torch.float32).eps * float(tensor.abs().max())
            torch.testing.assert_close(result[name], tensor, rtol=0, atol=bound)
    else:
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert torch.equal(image_features(model), image_features(twin))


def test_loop_inside_held_weights_is_refused_and_each_task_inside_one_is_right(model):
    twin = copy.deepcopy(model)
    with model.held_weights(), pytest.raises(ValueError, match=r"a block is running .*held_weights"):
        model.begin_task(random_modes(model))
    for each in (model, twin):
        torch.manual_seed(3)
        for _ in range(2):
            each.begin_task(random_modes(each))
            with each.held_weights() if each is model else each.trained_bases([]):
                randomise(each.residual_parameters())
                features = image_features(each)
            assert torch.equal(image_features(each), features)
            each.fold_task()
    assert torch.equal(image_features(model), image_features(twin))
    model.merge_adapter()
    with pytest.raises(ValueError, match="call unmerge_adapter"), model.held_weights():
        raise AssertionError


# ---------------------------------------------------------------- weights that are replaced


def with_projection(clip):
    return adapted(clip, text_rank=0, modules_to_save=["visual_projection"])


@pytest.mark.parametrize("way", ["load_adapter", "set_state", "load_state_dict", "delete and add"])
def test_previous_task_is_unknown_after_the_weights_are_replaced(tiny_clip, tmp_path, way):
    other = learned(with_projection(tiny_clip()))
    other.save_pretrained(tmp_path)
    model = learned(with_projection(tiny_clip()))
    with model.previous_task():
        image_features(model)
    if way == "load_adapter":
        model.load_adapter(tmp_path, "default")
    elif way == "set_state":
        set_peft_model_state_dict(model, get_peft_model_state_dict(other))
    elif way == "load_state_dict":
        model.load_state_dict(other.state_dict())
    else:
        model.add_adapter("rest", DualModeLoraConfig(**CONFIG, text_rank=0))
        model.set_adapter("rest")
        model.delete_adapter("default")
        model.add_adapter("default", other.peft_config["default"])
        model.set_adapter("default")
    with (
        pytest.raises(ValueError, match="before this task is not known: call begin_task first"),
        model.previous_task(),
    ):
        raise AssertionError


def test_previous_task_has_the_modules_as_they_were_when_the_task_began(tiny_clip):
    model = with_projection(tiny_clip())
    model.begin_task(random_modes(model))
    before = image_features(model)
    randomise(p for p in model.parameters() if p.requires_grad)
    with model.previous_task():
        torch.testing.assert_close(image_features(model), before)
    assert not torch.allclose(image_features(model), before)


# ---------------------------------------------------------------- the user's configuration


@pytest.mark.parametrize("kind", ["get_peft_model", "from_pretrained"])
def test_results_are_not_written_into_the_configuration(tiny_clip, tmp_path, kind):
    config = DualModeLoraConfig(**CONFIG)
    model = get_peft_model(tiny_clip(), config)
    fresh = copy.deepcopy(config)
    learned(model, 3).save_pretrained(tmp_path / "first")
    if kind == "from_pretrained":
        model = PeftModel.from_pretrained(tiny_clip(), tmp_path / "first", config=config, is_trainable=True)
        assert model.history_rank == 6
        fresh = copy.deepcopy(config)
        learned(model, 1)
    state = model.state_dict()
    get_peft_model_state_dict(model)
    model.save_pretrained(tmp_path / "again")
    assert config == fresh and model.peft_config["default"] is config
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert len(pickle.dumps(config)) < 1200
    facts = read_facts(tmp_path / "again" / FILE)
    assert facts.tower == "vision" and facts.base_digests and facts.base_settings
    assert max(facts.history_ranks.values()) == model.history_rank > 0
    written = json.loads((tmp_path / "again" / CONFIG_FILE).read_text())
    assert set(written) <= {field.name for field in dataclasses.fields(config)}
    config.save_pretrained(tmp_path / "config")
    saved = DualModeLoraConfig.from_pretrained(tmp_path / "config")
    assert saved.facts == AdapterFacts()
    for again in (config, saved):  # the loop over seeds
        clip = tiny_clip()
        with torch.no_grad():
            clip.vision_model.encoder.layers[0].mlp.fc1.weight.mul_(2)  # another base model, too
        seed = get_peft_model(clip, again)
        assert not any(layer.history_rank("default") for layer in seed.dual_mode_layers().values())


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("part", ["dulbe_shared_B", "dulbe_P", "history_B", "text_A", "visual_projection"])
def test_changed_values_of_an_adapter_are_refused(tiny_clip, tmp_path, part):
    model = learned(adapted(tiny_clip(), modules_to_save=["visual_projection"]))
    expected = outputs(model)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_clip(), tmp_path)
    assert all(map(torch.equal, outputs(loaded), expected))
    loaded.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / FILE).keys() == load_file(tmp_path / "again" / FILE).keys()
    tensors = load_file(tmp_path / FILE)
    name = next(name for name in tensors if part in name and tensors[name].numel())
    tensors[name].view(-1)[0] *= 1.001
    with safe_open(tmp_path / FILE, framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, tmp_path / FILE, metadata)
    for load in (
        lambda: PeftModel.from_pretrained(tiny_clip(), tmp_path),
        lambda: model.load_adapter(tmp_path, "default"),
        lambda: loaded.load_adapter(tmp_path, "other"),
    ):
        with pytest.raises(ValueError, match=r"adapter_model.safetensors is damaged.*SHA-256"):
            load()
    assert all(map(torch.equal, outputs(model), expected))


@pytest.mark.parametrize("copied", ["half", "sliced", "quantised"])
def test_copy_that_somebody_else_wrote_loads_without_a_digest(tiny_clip, tmp_path, copied):
    """A getter hides nothing in the configuration, and a file of other tools has no digest to contradict."""
    model = learned(adapted(tiny_clip()))
    expected, size = outputs(model), len(pickle.dumps(model.peft_config["default"]))
    tensors = get_peft_model_state_dict(model)
    assert len(pickle.dumps(model.peft_config["default"])) == size < 1200
    if copied == "half":
        tensors = {name: tensor.half() for name, tensor in tensors.items()}
    elif copied == "sliced":  # the tensors of the vision tower
        tensors = {name: tensor for name, tensor in tensors.items() if "text_model" not in name}
    else:
        tensors = {name: (tensor * 256).round() / 256 for name, tensor in tensors.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / FILE, {"format": "pt"})
    model.peft_config["default"].save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Found missing adapter keys")
        loaded = PeftModel.from_pretrained(tiny_clip(), tmp_path)
    bound = 0.05 if copied == "quantised" else 0.01
    torch.testing.assert_close(image_features(loaded), expected[0], rtol=bound, atol=bound)


@pytest.mark.plain("None")
@pytest.mark.filterwarnings("ignore:You have passed exclude_modules")
@pytest.mark.parametrize("value", [None, [], {}, [None], {"a": None}, "x", 1.5, True], ids=repr)
def test_value_of_another_kind_in_the_configuration_is_named_or_changes_nothing(small_clip, tmp_path, value):
    """Every field of the file that is this method's own, with what an editor or another program may put there."""
    model = learned(adapted(small_clip()))
    model.save_pretrained(tmp_path)
    expected, file = outputs(model), tmp_path / CONFIG_FILE
    content = json.loads(file.read_text())
    refused = []
    for field in content.keys() - {"peft_type", "task_type"}:  # PEFT reads these two before any class of ours
        file.write_text(json.dumps(content | {field: value}))
        try:
            loaded = PeftModel.from_pretrained(small_clip(), tmp_path)
        except (ValueError, TypeError) as error:
            assert field in str(error) or str(value) in str(error), (field, error)
            refused.append(field)
        else:
            changes = field == "text_alpha" and isinstance(value, float)  # a number there is right, and scales
            assert changes or all(map(torch.equal, outputs(loaded), expected)), field
    assert {"shared_rank", "history_rank", "fold"} <= set(refused)


@pytest.mark.parametrize("content", ["null", "[]", "{}", '{"tower": 3}', "{"])
def test_damaged_metadata_is_named(tiny_clip, tmp_path, content):
    learned(adapted(tiny_clip())).save_pretrained(tmp_path)
    save_file(load_file(tmp_path / FILE), tmp_path / FILE, {"format": "pt", FORMAT: content})
    with pytest.raises(ValueError, match=f"the metadata '{FORMAT}' is damaged"):
        PeftModel.from_pretrained(tiny_clip(), tmp_path)


# ---------------------------------------------------------------- shards


@pytest.fixture
def mesh(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_every_door_refuses_a_sharded_model(model, mesh, tmp_path):
    modes, loss = random_modes(model), loss_fn(model, slice(None))[0]
    name, layer = next(iter(model.dual_mode_layers().items()))
    weight = layer.dulbe_shared_B["default"]
    layer.dulbe_shared_B["default"] = nn.Parameter(distribute_tensor(weight.data, mesh))
    assert isinstance(layer.dulbe_shared_B["default"], DTensor), name
    for door in (
        lambda: probe_gradients(model, [slice(None)], loss_fn),
        lambda: collect_statistics(model, [slice(None)], loss_fn, OccupationStatistics()),
        lambda: model.begin_task(modes),
        model.fold_task,
        lambda: routed_loss(model, loss, None),
        lambda: route_gradients(model, loss, None),
        model.merge_adapter,
        model.merge_and_unload,
        lambda: get_peft_model_state_dict(model),
        lambda: model.save_pretrained(tmp_path / "saved"),
    ):
        with pytest.raises(ValueError, match="is sharded over processes .*launch without sharding"):
            door()
    assert not (tmp_path / "saved" / FILE).exists()


# ---------------------------------------------------------------- layers that are never called


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.fc1 = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)
        self.spare = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc1(self.attn(x, x, x)[0])


@pytest.mark.parametrize("targets", [["out_proj"], r".*out_proj|fc1", "all-linear"])
def test_layer_inside_multihead_attention_is_refused(targets):
    base = Attention()
    with pytest.raises(ValueError, match=r"attn.out_proj' belongs to a torch.nn.MultiheadAttention"):
        get_peft_model(base, DualModeLoraConfig(target_modules=targets, residual_rank=2, text_rank=0))
    assert type(base.fc1) is nn.Linear


def test_probe_names_layers_without_a_gradient():
    config = DualModeLoraConfig(target_modules=["fc1", "spare"], residual_rank=2, text_rank=0)
    model, x = get_peft_model(Attention(), config), torch.randn(2, 3, 8)
    with pytest.warns(UserWarning, match=r"no gradient in 1 of 2 adapted layers.*\['spare'\]"):
        probe_gradients(model, [x], lambda model, x: (model(x).square().mean(), len(x)))


# ---------------------------------------------------------------- loading, publishing, precision


def test_methods_that_replace_those_of_peft_keep_their_arguments():
    ours = {name for name in vars(DualModePeftModel) if hasattr(PeftModel, name) and not name.startswith("_")}
    assert ours == {
        "from_pretrained",
        "save_pretrained",
        "load_adapter",
        "push_to_hub",
        "print_trainable_parameters",
        "create_or_update_model_card",
    }
    for name in ours - {"from_pretrained"}:
        theirs = inspect.signature(getattr(PeftModel, name)).parameters
        accepted = inspect.signature(getattr(DualModePeftModel, name)).parameters
        assert set(theirs) - {"self"} <= set(accepted) or {"commit", "kwargs"} & set(accepted), name


@pytest.mark.parametrize("tasks", [1, 2])
def test_adapter_over_float64_base_runs_in_float64(tiny_clip, tasks):
    """Compare with the merged model: the bound is that of float64, not of float32."""
    model = adapted(tiny_clip().double())
    assert {tensor.dtype for name, tensor in model.state_dict().items() if "dulbe_" in name} == {torch.float64}
    learned(model, tasks)
    features = image_features(model)
    torch.testing.assert_close(image_features(model.merge_and_unload()), features, rtol=1e-12, atol=1e-12)


def test_begin_task_refuses_an_adapter_that_was_loaded_for_inference(model, tiny_clip, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_clip(), tmp_path)
    with pytest.raises(
        ValueError, match="no parameter of the adapter 'default' is trainable: load it with is_trainable"
    ):
        loaded.begin_task(random_modes(loaded))
    PeftModel.from_pretrained(tiny_clip(), tmp_path, is_trainable=True).begin_task(random_modes(loaded))


def test_safe_merge_in_float16_merges_nothing_if_a_sum_overflows(tiny_clip):
    model = learned(adapted(tiny_clip().half(), text_rank=0))
    layer = list(model.dual_mode_layers().values())[-1]
    layer.dulbe_residual_B["default"].data.fill_(6e4)
    layer.base_layer.weight.data.fill_(6e4)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match="NaNs detected"):
            merge(safe_merge=True)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_gradients_have_the_strides_of_their_parameters(model):
    """Check what DistributedDataParallel warns about."""
    loss_fn(model, slice(None))[0].backward()
    assert all(p.grad.stride() == p.stride() for p in model.parameters() if p.grad is not None)


def test_expression_that_names_text_layers_without_text_rank_warns(tiny_clip):
    with pytest.warns(UserWarning, match=r"also matches 2 layers of the text tower.*text_rank is 0"):
        adapted(tiny_clip(), target_modules=r".*k_proj", text_rank=0)


@pytest.mark.parametrize("name", ["visual_projection", "text_projection", "token_embeddings"])
def test_other_projection_or_token_embeddings_are_another_base_model(model, tiny_clip, tmp_path, name):
    model.save_pretrained(tmp_path)
    clip = tiny_clip()
    part = clip.text_model.embeddings.token_embedding if name == "token_embeddings" else getattr(clip, name)
    part.weight.data.mul_(2)
    with pytest.warns(
        UserWarning, match=rf"other weights in the {name}: it was made on a model without a name, a CLIPM"
    ):
        PeftModel.from_pretrained(clip, tmp_path)


def test_other_pooling_head_of_siglip_is_another_base_model():
    siglip = make_model("siglip")
    before = base_digests(siglip)
    siglip.vision_model.head.probe.data.mul_(2)
    assert {key for key, digest in base_digests(siglip).items() if before[key] != digest} == {
        "pooling_head bfloat16",
        "pooling_head float16",
    }


def test_adapter_made_from_the_configuration_of_a_saved_one_has_no_history(model, tiny_clip, tmp_path):
    model.fold_task()
    model.save_pretrained(tmp_path)
    config = DualModeLoraConfig.from_pretrained(tmp_path)
    config.inference_mode = False
    fresh = get_peft_model(tiny_clip(), config)
    fresh.begin_task(probe_gradients(fresh, [slice(None)], loss_fn))  # without a warning that there are no statistics
    assert max(config.facts.history_ranks.values()) > 0 and not any(
        layer.history_rank("default") for layer in fresh.dual_mode_layers().values()
    )


def test_error_names_the_module_of_a_class_that_is_called_linear(tiny_clip):
    class Linear(nn.Module):
        pass

    clip = tiny_clip()
    clip.vision_model.encoder.layers[0].mlp.fc1 = Linear()
    with pytest.raises(ValueError, match=r"is a test_lifecycle\.\S*Linear, but only torch.nn.Linear"):
        adapted(clip)


# ---------------------------------------------------------------- a loop of one's own


def test_second_task_without_statistics_warns_once(model):
    probe = probe_gradients(model, [slice(None)], loss_fn)
    for stats in (None, OccupationStatistics()):
        for plan in (lambda s: copy.deepcopy(model).begin_task(probe, s), lambda s: allocate_modes(probe, s)):
            with pytest.warns(UserWarning, match="has a history, but no statistics were given") as caught:
                plan(stats)
            assert len(caught) == 1
    stats = collect_statistics(model, [slice(None)], loss_fn, OccupationStatistics())
    model.begin_task(probe, stats)


def test_first_task_needs_no_statistics(tiny_clip):
    model = adapted(tiny_clip())
    model.begin_task(probe_gradients(model, [slice(None)], loss_fn))


@pytest.mark.parametrize("end", ["fold_task", "begin_task"])
def test_task_trained_in_random_bases_is_named_when_it_ends(tiny_clip, end):
    model = adapted(tiny_clip())
    randomise(model.residual_parameters())
    with pytest.warns(UserWarning, match="trained in random bases.*call begin_task before each task"):
        model.fold_task() if end == "fold_task" else model.begin_task(random_modes(model))


def test_task_loss_as_structure_loss_is_refused(model):
    loss = loss_fn(model, slice(None))[0]
    with pytest.raises(ValueError, match="structure_loss is the task loss itself"):
        route_gradients(model, loss, loss)


def test_routed_gradients_are_those_of_an_unscaled_loss_times_the_scale(model):
    """Check what a gradient scaler unscales afterwards: the structure loss must be scaled once."""

    def gradients(scale):
        model.zero_grad()
        images = model.get_image_features(pixel_values=PIXELS).pooler_output
        loss = routed_loss(model, loss_fn(model, slice(None))[0], (images**3).mean(), 2.0, scale=scale)
        (scale * loss).backward()
        return [p.grad / scale for p in model.shared_parameters()]

    for actual, expected in zip(gradients(1024.0), gradients(1.0), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-8)


def test_plain_lora_beside_the_method_is_untouched(tiny_clip, tmp_path):
    """Check that the methods of PeftModel that are wrapped still serve other adapters."""
    model = get_peft_model(tiny_clip(), LoraConfig(target_modules=["fc1"]))
    model.save_pretrained(tmp_path)
    model.load_adapter(tmp_path, "default")


@pytest.mark.parametrize("head", [BridgeEnsembleHead, PooledBridgeHead])
def test_logarithm_of_the_scale_warns_and_the_parameter_is_refused(tiny_clip, head):
    scale = tiny_clip().logit_scale
    with pytest.warns(UserWarning, match=r"logit_scale=2.65\d* is small.*clip.logit_scale.exp"):
        head(16, logit_scale=scale.item())
    with pytest.raises(TypeError, match=r"got a Parameter: pass clip.logit_scale.exp\(\).item\(\)"):
        head(16, logit_scale=scale)
    head(16, logit_scale=scale.exp().item())


@pytest.mark.parametrize("which", [0, 1])
def test_loss_of_features_that_are_not_unit_vectors_warns(which):
    features = [F.normalize(torch.randn(3, 8)), F.normalize(torch.randn(2, 8))]
    cross_modal_loss(*features, LABELS, 100.0)
    cross_modal_loss(*(part.half() for part in features), LABELS, 100.0)
    features[which] = 3 * features[which]
    with pytest.warns(UserWarning, match=r"has rows of length 3 to 3.*normalise them"):
        cross_modal_loss(*features, LABELS, 100.0)


def test_tensor_image_with_bytes_as_floats_warns():
    pixel_values(None, 3 * torch.randn(3, 8, 8).clamp(-1, 1))
    with pytest.warns(UserWarning, match="values up to 255, but it must be preprocessed"):
        pixel_values(None, torch.linspace(0, 255, 192).view(3, 8, 8))


# ---------------------------------------------------------------- names and settings


@pytest.mark.parametrize("name", ["dulbe_x", "dulbe_P", "weight", "bias"])
def test_names_that_a_file_could_not_tell_from_tensors_are_refused(tiny_clip, name):
    config = DualModeLoraConfig(**CONFIG, modules_to_save=["visual_projection"])
    with pytest.raises(ValueError, match=f"adapter name '{name}' cannot be told from"):
        get_peft_model(tiny_clip(), config, adapter_name=name)
    get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG), adapter_name=name)  # without such modules it can


def test_sum_with_an_unsuitable_name_leaves_nothing(model, tmp_path):
    before = outputs(model)
    with pytest.raises(ValueError, match=r"adapter name 'a\.b'"):
        model.add_weighted_adapter(["default"], [1.0], "a.b", "cat")
    assert set(model.peft_config) == {"default"} and all(map(torch.equal, outputs(model), before))
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "a.b").exists()


def test_text_targets_that_name_nothing_are_refused(tiny_clip):
    with pytest.raises(ValueError, match=r"text_target_modules has \['nope'\], .* it has \['fc1', 'fc2', 'k_proj'"):
        adapted(tiny_clip(), text_target_modules=["fc1", "nope"])
    with pytest.raises(ValueError, match="text_target_modules is an empty list: .* or text_rank=0"):
        DualModeLoraConfig(text_target_modules=[])


def test_casting_of_inputs_may_be_disabled_as_for_other_methods(model):
    expected = outputs(model)
    with disable_input_dtype_casting(model):
        assert all(map(torch.equal, outputs(model), expected))


class Tied(nn.Module):
    """Two layers that have one weight, or one layer at two places."""

    def __init__(self, whole):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        if whole:
            self.b = self.a
        else:
            self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x).tanh())


@pytest.mark.parametrize(("whole", "targets"), [(False, ["a", "b"]), (False, ["a"]), (True, ["a", "b"])])
def test_weights_that_are_used_twice_are_not_merged(whole, targets):
    base, x = Tied(whole), torch.randn(3, 8)
    pristine = copy.deepcopy(base.state_dict())
    model = learned(get_peft_model(base, DualModeLoraConfig(**CONFIG | {"text_rank": 0}, target_modules=targets)))
    expected = model(x)
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match="'[ab]' is also used elsewhere in the model"):
            merge()
    assert torch.equal(model(x), expected)
    assert all(torch.equal(value, pristine[name]) for name, value in model.unload().state_dict().items())


def test_other_scale_of_the_text_tower_is_refused(tiny_clip, tmp_path):
    """PEFT reads no configuration for an adapter that the model has, and writes one that was edited afterwards."""
    learned(adapted(tiny_clip(), text_alpha=4.0)).save_pretrained(tmp_path)
    model = learned(adapted(tiny_clip()))
    expected = outputs(model)
    with pytest.raises(ValueError, match="text_alpha / text_rank = 0.5, but the adapter 'default' of the model has"):
        model.load_adapter(tmp_path, "default")
    model.peft_config["default"].text_alpha = 7.0
    with pytest.raises(ValueError, match="text_alpha / text_rank = 0.875, but"):
        model.save_pretrained(tmp_path / "edited")
    assert not (tmp_path / "edited").exists() and all(map(torch.equal, outputs(model), expected))


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
def test_second_model_over_the_same_layers_is_refused(model):
    base, expected = model.get_base_model(), outputs(model)
    with pytest.raises(ValueError, match=r"already has adapters, .* call add_adapter\('second', config\)"):
        get_peft_model(base, DualModeLoraConfig(**CONFIG), adapter_name="second")
    assert all(map(torch.equal, outputs(model), expected))


def test_blocks_that_end_out_of_order_raise_and_leave_the_model_as_it_was(model):
    expected, (outer, inner) = outputs(model), (model.scaled(0.5), model.scaled(0.25))
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(ValueError, match="leave them in reverse order"):
        outer.__exit__(None, None, None)
    with pytest.raises(ValueError, match="leave them in reverse order"):
        inner.__exit__(None, None, None)
    assert all(map(torch.equal, outputs(model), expected))
    model.fold_task()  # no block is running
