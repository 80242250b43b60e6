"""PEFT's promises for every method, tested on an MLP and the CLIP classes: files, merging, precisions, adapters."""

import copy
import pickle
from functools import cache

import pytest
import torch
from adapted_clip import CONFIG, forget_digest, learned, shallow
from copies import copies
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from reference import randn
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CLIPModel, CLIPVisionModel, CLIPVisionModelWithProjection, Trainer, TrainingArguments

from dulbe_peft import DualModeLoraConfig
from dulbe_peft.adapter.base import DualModeLayer

FILE = "adapter_model.safetensors"


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin0 = nn.Linear(10, 20)
        self.lin1 = nn.Linear(20, 6)

    def forward(self, pixel_values):
        return self.lin1(self.lin0(pixel_values).relu())


@cache
def bases(kind, tiny_clip):
    """Return copies of a base model with one block in each tower."""
    clip = shallow(tiny_clip())
    if kind is CLIPModel:
        return copies(clip)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return copies((MLP() if kind is MLP else kind(clip.config.vision_config)).eval())


class Case:
    """A class of models: how one is created, adapted and run."""

    def __init__(self, kind, tiny_clip):
        self.kind, self.base, self.mlp = kind, bases(kind, tiny_clip), kind is MLP
        self.inputs = randn(*((5, 10) if self.mlp else (2, 3, 16, 16)), seed=3)

    def config(self, **fields):
        if self.mlp:
            fields = {"target_modules": ["lin0", "lin1"], "text_rank": 0, **fields}
        return DualModeLoraConfig(**{**CONFIG, "init_weights": False, **fields})

    def adapted(self, tasks=1, adapter_name="default", **fields):
        return learned(get_peft_model(self.base(), self.config(**fields), adapter_name=adapter_name), tasks)

    def __call__(self, model):
        inputs = self.inputs.to(next(model.parameters()).dtype)
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        if self.mlp:
            return model(inputs)
        if isinstance(base, CLIPModel):
            return model.get_image_features(pixel_values=inputs).pooler_output
        return model(pixel_values=inputs).last_hidden_state


@pytest.fixture(params=[MLP, CLIPVisionModel, CLIPModel], ids=lambda kind: kind.__name__)
def case(request, tiny_clip):
    return Case(request.param, tiny_clip)


def assert_close(actual, expected, atol=1e-5):
    torch.testing.assert_close(actual.float(), expected.float(), atol=atol, rtol=1e-4)


# Importing the package adds this filter, but pytest removes it after the first test.
@pytest.mark.plain("MLP", "CLIPVisionModel-e-False")
@pytest.mark.filterwarnings("ignore:Adapter name '.*' should not be contained")
@pytest.mark.parametrize(
    ("name", "low_cpu_mem_usage"), [("default", False), ("my_dulbe_adapter", True), ("e", False), ("dulbe_", True)]
)
def test_saved_adapter_loads_with_the_same_outputs(case, tmp_path, name, low_cpu_mem_usage):
    model = case.adapted(2, adapter_name=name)
    expected = case(model)
    model.save_pretrained(tmp_path)
    folder = tmp_path if name == "default" else tmp_path / name
    assert {file.name for file in folder.iterdir()} >= {FILE, "adapter_config.json"}
    assert all("dulbe_" in key and name not in key.split(".") for key in load_file(folder / FILE))
    loaded = PeftModel.from_pretrained(case.base(), folder, name, low_cpu_mem_usage=low_cpu_mem_usage)
    assert torch.equal(case(loaded), expected)
    loaded.load_adapter(folder, "further", low_cpu_mem_usage=low_cpu_mem_usage)
    loaded.set_adapter("further")
    assert torch.equal(case(loaded), expected)
    assert not any(tensor.is_meta for tensor in loaded.state_dict().values())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(case(copied), expected)


def test_pickle_of_plain_tensors_loads_and_other_pickles_are_refused(case, tmp_path):
    model = case.adapted()
    model.save_pretrained(tmp_path, safe_serialization=False)
    assert torch.equal(case(PeftModel.from_pretrained(case.base(), tmp_path)), case(model))
    torch.save(model, tmp_path / "adapter_model.bin")  # refers to classes, so it must not be unpickled
    with pytest.raises(ValueError, match="adapter_model.bin, a pickle"):
        PeftModel.from_pretrained(case.base(), tmp_path)


ODD = "base_model.model.encoder.layers.7.mlp.fc1.dulbe_shared_B"


def shorter(state):
    return state | {key: state[key][:, :-1].contiguous() for key in state if "history_B" in key}


@pytest.mark.plain("MLP", "CLIPVisionModel-shorter-does not fit its B")
@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda state: {key: value for key, value in state.items() if not key.endswith("dulbe_P")}, "missing"),
        (lambda state: state | {ODD: torch.zeros(4, 1)}, r"layers\.7"),
        (lambda state: {f"elsewhere.{key}": state[key] for key in state}, "of its .* keys matches a layer"),
        (shorter, "does not fit its B"),
    ],
)
def test_file_that_fits_only_in_part_is_refused(case, tmp_path, edit, words):
    case.adapted(2).save_pretrained(tmp_path)
    state = edit(load_file(tmp_path / FILE))
    save_file(state, tmp_path / FILE)
    forget_digest(tmp_path)
    model = case.adapted(2)
    expected = case(model)
    with pytest.raises(ValueError, match=words):
        PeftModel.from_pretrained(case.base(), tmp_path)
    with pytest.raises(ValueError, match=words):
        set_peft_model_state_dict(model, state)
    with pytest.raises(ValueError, match=words):
        model.load_adapter(tmp_path, "default")
    assert torch.equal(case(model), expected)
    if edit is shorter:  # loading with torch notices this, too
        with pytest.raises(RuntimeError, match=r"dulbe_history_P.* do not fit"):
            model.load_state_dict(edit(model.state_dict()), strict=False)


@pytest.mark.parametrize(
    ("dtype", "autocast_adapter_dtype"),
    [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, False)],
)
def test_merge_and_unmerge_work_in_every_precision(case, dtype, autocast_adapter_dtype):
    base = case.base().to(dtype)
    pristine = copy.deepcopy(base.state_dict())
    model = get_peft_model(base, case.config(), autocast_adapter_dtype=autocast_adapter_dtype).eval()
    allowed = torch.float32 if autocast_adapter_dtype else {dtype, torch.float32}
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    assert dtypes == {allowed} if autocast_adapter_dtype else dtypes <= allowed
    frozen = [buffer.dtype for name, buffer in model.named_buffers() if "dulbe_" in name]
    assert frozen and set(frozen) == {torch.float32}  # bases and history, whatever the base model's precision
    with torch.no_grad():
        expected, tolerance = case(model), 1e-5 if dtype is torch.float32 else 0.1
        assert torch.isfinite(expected).all()
        model.merge_adapter(safe_merge=True)
        merged_once = case(model)
        assert_close(merged_once, expected, tolerance)
        with pytest.warns(UserWarning, match="Already following adapters were merged|nothing to do"):
            model.merge_adapter()
        assert torch.equal(case(model), merged_once)
        saved = model.state_dict()  # holds the pristine base weights, also while an adapter is merged
        plain = {key.removeprefix("base_model.model.").replace(".base_layer", ""): saved[key] for key in saved}
        assert all(torch.equal(plain[key], value) for key, value in pristine.items())
        model.unmerge_adapter()
        assert torch.equal(case(model), expected)
        model.merge_adapter()
        model.load_state_dict(saved)  # unmerges
        assert torch.equal(case(model), expected)
        assert torch.equal(case(copy.deepcopy(model).merge_and_unload()), merged_once)
    assert all(torch.equal(value, pristine[key]) for key, value in model.unload().state_dict().items())


@pytest.mark.filterwarnings("ignore:Adapter default was active which is now deleted:UserWarning")
def test_deleting_one_of_two_active_adapters_leaves_the_other(case):
    model = case.adapted(2)
    first = case(model)
    model.add_adapter("second", case.config(residual_rank=1))
    model.set_adapter("second")
    second = case(model)
    model.base_model.set_adapter(["default", "second"])
    both = case(model)
    assert not torch.equal(first, second) and not torch.equal(both, first)
    with torch.no_grad():
        for names in (["default", "second"], ["second", "default"]):
            assert_close(case(copy.deepcopy(model).merge_and_unload(adapter_names=names)), both)
    model.set_adapter("default")
    assert torch.equal(case(model), first)
    model.delete_adapter("default")
    assert model.active_adapters == ["second"] and torch.equal(case(model), second)
    assert not any("default" in key.split(".") for key in model.state_dict())
    for layer in (module for module in model.modules() if isinstance(module, DualModeLayer)):
        assert not any("default" in value for value in vars(layer).values() if isinstance(value, (dict, list)))


@pytest.mark.parametrize("is_trainable", [False, True])
def test_modules_to_save_are_trained_saved_and_loaded(tiny_clip, tmp_path, is_trainable):
    mlp = Case(MLP, tiny_clip)
    model = mlp.adapted(target_modules=["lin0"], modules_to_save=["lin1"])
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[-2] for name in trainable} == {"dulbe_shared_B", "dulbe_residual_B", "default"}
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.1)
    before = copy.deepcopy(model.state_dict())
    mlp(model).square().sum().backward()
    optimizer.step()
    assert {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])} == trainable
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(mlp.base(), tmp_path, is_trainable=is_trainable)
    assert torch.equal(mlp(loaded), mlp(model))
    assert {name for name, p in loaded.named_parameters() if p.requires_grad} == (trainable if is_trainable else set())


class FeatureTrainer(Trainer):
    def compute_loss(self, model, inputs, **_):
        return model(**inputs).last_hidden_state.square().mean()


def test_trainer_resumes_from_a_checkpoint_exactly(tiny_clip, tmp_path):
    case = Case(CLIPVisionModel, tiny_clip)
    images = [{"pixel_values": torch.full((3, 16, 16), index / 8)} for index in range(8)]

    def trainer(model, **fields):
        arguments = {"max_steps": 4, "save_steps": 2, "learning_rate": 0.01, "per_device_train_batch_size": 4}
        arguments |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False}
        return FeatureTrainer(model, TrainingArguments(str(tmp_path), **arguments | fields), train_dataset=images)

    through = case.adapted(2)
    trainer(through).train()
    fresh = get_peft_model(case.base(), case.config())
    trainer(fresh, save_strategy="no").train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert fresh.history_rank == through.history_rank == 6
    got, expected = get_peft_model_state_dict(fresh), get_peft_model_state_dict(through)
    assert all(torch.equal(got[key], value) for key, value in expected.items())


@pytest.mark.filterwarnings("ignore:Adapter .* was active which is now deleted:UserWarning")
@pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute:UserWarning")
@pytest.mark.parametrize("kind", [CLIPVisionModel, CLIPVisionModelWithProjection, CLIPModel])
def test_adapter_methods_of_transformers_work(kind, tiny_clip, tmp_path):
    clip_case = Case(kind, tiny_clip)
    model = clip_case.adapted(2)
    expected = clip_case(model)
    model.save_pretrained(tmp_path / "saved")
    native = clip_case.base()
    plain = clip_case(native)
    native.load_adapter(str(tmp_path / "saved"))
    assert torch.equal(clip_case(native), expected)
    native.disable_adapters()
    assert torch.equal(clip_case(native), plain)
    native.enable_adapters()
    native.add_adapter(clip_case.config(), "second")
    assert not torch.equal(clip_case(native), expected)
    native.set_adapter("default")
    native.save_pretrained(tmp_path / "again")
    again = clip_case.base()
    again.load_adapter(str(tmp_path / "again"))
    assert torch.equal(clip_case(again), expected)
    native.delete_adapter(["default", "second"])
    assert torch.equal(clip_case(native), plain)


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [0, 2])
def test_model_compiles_into_one_graph(tiny_clip, tasks):
    case = Case(CLIPVisionModel, tiny_clip)
    model = case.adapted(tasks)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(compiled(pixel_values=case.inputs).last_hidden_state, case(model))
    compiled(pixel_values=case.inputs).last_hidden_state.square().sum().backward()
    assert all(p.grad is not None for p in (*model.shared_parameters(), *model.residual_parameters()))
