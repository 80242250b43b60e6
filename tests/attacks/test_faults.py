"""A table of wrong inputs, the error that each must raise, and words that its message must contain.

After every row, the learner is unchanged bit for bit: weights, `requires_grad`, gradients, classifiers, statistics,
and modes of modules. Errors of a single function are tested beside that function.
"""

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lives import differences, everything, images_of, learned, tiny_base, tiny_learner
from peft import get_peft_model

from dulbe_peft import (
    BridgeEnsembleHead,
    ClassIncrementalLearner,
    DualModeLoraConfig,
    LearnerArguments,
    Task,
    allocate_modes,
    probe_gradients,
    route_gradients,
    run_stream,
)

LAYER = "vision_model.encoder.layers.0.mlp.fc1"
NAN, V, T = math.nan, ValueError, TypeError


@pytest.fixture(scope="module")
def beginning():
    return learned(tiny_learner(), 1)


@pytest.fixture
def world(beginning, tmp_path):
    """Return what a row may use: a learner of the classes "a0" and "b0", its model, and a folder."""
    return SimpleNamespace(learner=beginning, model=beginning.model, tmp=tmp_path)


def adapt(model=None, adapter="default", **fields):
    config = DualModeLoraConfig(**{"residual_rank": 2, "text_rank": 0} | fields)
    return get_peft_model(model or copy.deepcopy(tiny_base()[0]), config, adapter_name=adapter)


def begin(world, change=lambda modes: modes, **fields):
    """Begin a task with valid bases after `change` has changed all of them and `fields` those of one layer."""
    layers = world.model.dual_mode_layers()
    modes = allocate_modes({n: torch.randn(x.out_features, x.in_features) for n, x in layers.items()}, None, 1, 2)
    return world.model.begin_task(change({**modes, LAYER: replace(modes[LAYER], **fields)}))


def features(model, pixels):
    return model.get_base_model().get_image_features(pixel_values=pixels).pooler_output


def probe(world, loss_fn):
    return probe_gradients(world.model, [images_of(0)[0][0][None]], loss_fn)


def unadapted_loss(model, _):
    return model.get_base_model().logit_scale * torch.ones((), requires_grad=True), 1


def adopt(world, args=None, **options):
    ClassIncrementalLearner(world.model, tiny_base()[1], args, **options)


def learn(world, dataset, names=("x", "y")):
    return world.learner.learn_task(dataset, names)


def one_class():
    learner = tiny_learner("frozen")
    learner.learn_task(images_of(0), ["one"])
    return learner


class Short(list):
    def __len__(self):
        return super().__len__() + 1


def learn_image(world, image):
    return learn(world, [(image, 0)], ["x"])


def learn_names(world, *names, **fields):
    learner = tiny_learner(**fields) if fields else world.learner
    learner.learn_task(images_of(*range(len(names))), names)


SETTINGS = [
    ("template without {}", lambda w: LearnerArguments(prompt_template="a photo"), V, "prompt_template {} 'a photo'"),
    ("template twice", lambda w: LearnerArguments(prompt_template=["a {}", "a {}"]), V, "the same text twice"),
    ("a prompt in quotes", lambda w: LearnerArguments(prompt_template="'a {}.',"), V, "leave them out of"),
    ("training without {}", lambda w: LearnerArguments(training_template="a"), V, "training_template exactly one {}"),
    ("views twice", lambda w: LearnerArguments(augment="crop+crop"), V, "augment none crop, flip, affine 'crop+crop'"),
    ("device unknown", lambda w: tiny_learner(device="quantum"), V, "device 'quantum'"),
    ("tracker unknown", lambda w: tiny_learner(log_with="nothing"), V, "nothing"),
    ("text_rank huge", lambda w: adapt(text_rank=10**9), V, "text_rank 1000000000 in_features"),
    ("no such block", lambda w: adapt(layers_to_transform=[99]), V, "layers_to_transform 99"),
    ("wrapped twice", lambda w: adapt(w.model), V, "already"),
    ("adapter name with a dot", lambda w: adapt(adapter="a.b"), V, "'a.b' adapter"),
    ("LoRA's rank", lambda w: DualModeLoraConfig(r=8), T, "unexpected keyword argument 'r'"),
    ("no regular expression", lambda w: adapt(target_modules="*"), V, "target_modules '*' regular expression"),
    ("no rank at all", lambda w: adapt(shared_rank=0, residual_rank=0), V, "both 0"),
    (
        "blocks of an expression",
        lambda w: adapt(target_modules=".*fc1", layers_to_transform=[0]),
        V,
        "layers_to_transform",
    ),
    ("no adapter", lambda w: ClassIncrementalLearner(*tiny_base()), V, "get_peft_model CLIPModel"),
    ("no processor", lambda w: ClassIncrementalLearner(w.model, None), T, "processor None"),
    ("head in the place of args", lambda w: adopt(w, BridgeEnsembleHead(8)), T, "args"),
]
METHOD = [
    ("modes of no layer", lambda w: w.model.begin_task({}), V, f"missing '{LAYER}'"),
    ("modes of another layer", lambda w: begin(w, lambda modes: {**modes, "x": modes[LAYER]}), V, "unknown 'x'"),
    ("modes of another rank", lambda w: begin(w, residual=torch.eye(32, 5)), V, "residual_rank 5, has 1 and 2"),
    ("basis not orthonormal", lambda w: begin(w, shared=torch.ones(32, 1)), V, "orthonormal"),
    ("basis NaN", lambda w: begin(w, shared=torch.full((32, 1), NAN)), V, f"{LAYER} NaN"),
    ("probe without batches", lambda w: probe_gradients(w.model, [], features), V, "batches is empty"),
    ("probe of something else", lambda w: probe(w, unadapted_loss), V, "gradient loss adapted"),
    ("probe without a size", lambda w: probe(w, lambda m, x: features(m, x).sum()), T, "loss_fn pair"),
    (
        "probe of a plain model",
        lambda w: probe_gradients(tiny_base()[0], [1], features),
        T,
        "get_peft_model CLIPModel",
    ),
    ("routing a constant", lambda w: route_gradients(w.model, torch.tensor(1.0), None), V, "task_loss depend"),
]
TASKS = [
    ("no images", lambda w: learn(w, []), V, "empty"),
    ("fewer images than its length", lambda w: learn(w, Short(images_of(0, 1))), V, "no item 2 length 3"),
    ("image None", lambda w: learn_image(w, None), V, "image 0 None"),
    ("image an address", lambda w: learn_image(w, "http://127.0.0.1:9/x.jpg"), V, "image 0 str PIL"),
    ("image an array", lambda w: learn_image(w, np.zeros((8, 8, 3), np.uint8)), V, "NumPy array Image.fromarray"),
    ("pixels uint8", lambda w: learn_image(w, torch.zeros(3, 16, 16, dtype=torch.uint8)), V, "image 0 uint8"),
    ("pixels of another size", lambda w: learn_image(w, torch.zeros(3, 17, 16)), V, "image 0 17 16"),
    ("pixels NaN", lambda w: learn_image(w, torch.full((3, 16, 16), NAN)), V, "image 0 NaN"),
    ("label out of range", lambda w: learn(w, images_of(1, 2)), V, "2 classes 0..1"),
    ("label too large", lambda w: learn(w, [(images_of(0)[0][0], 2**64)], ["x"]), (V, T), "label"),
    ("class without an image", lambda w: learn(w, images_of(0, 1), ["x", "y", "z"]), V, "'z' no image"),
    ("class of an earlier task", lambda w: learn_names(w, "a0", "y"), V, "'a0' already"),
    ("class too long", lambda w: learn_names(w, "ab " * 100), V, "'a ab tokens"),
    ("equal by style", lambda w: learn_names(w, "a_b", "a b", class_name_style="spaces"), V, "'a_b' 'a b' spellings"),
    ("another spelling of an old class", lambda w: learn_names(w, "A0"), V, "'A0' 'a0' spell"),
    ("nothing learned to predict", lambda w: tiny_learner().predict(images_of(0)[0][0]), V, "no task"),
    ("nothing learned to evaluate", lambda w: tiny_learner().evaluate(images_of(0)), V, "no task"),
    ("evaluating an unknown class", lambda w: w.learner.evaluate(images_of(0), ["x"]), V, "'x' not been learned"),
    ("more of an unknown class", lambda w: w.learner.update_classes(images_of(0), ["x"]), V, "'x' not been learned"),
    ("more of a label out of range", lambda w: w.learner.update_classes(images_of(7), ["a0"]), V, "7"),
    ("nothing learned to update", lambda w: tiny_learner().update_classes(images_of(0), ["a0"]), V, "no task"),
    ("forgetting an unknown class", lambda w: w.learner.forget_class("x"), V, "'x' not been learned"),
    ("forgetting the last class", lambda w: one_class().forget_class("one"), V, "'one' only"),
    ("merging what trains", lambda w: w.learner.merge(learned(tiny_learner(), 1)), V, "'dulbe' trained"),
    ("merging nothing", lambda w: tiny_learner("frozen").merge(tiny_learner("frozen")), V, "no task"),
    ("no reference images", lambda w: learned(tiny_learner("zscl"), 1), V, "zscl:reference_images=FOLDER"),
    ("views of tensors", lambda w: learn_names(w, "x", augment="crop"), V, "augment='crop' not preprocessed"),
    ("path of an image empty", lambda w: w.learner.predict(["", "photo.jpg"]), V, "the path of an image is ''"),
    ("stream of tuples", lambda w: run_stream(tiny_learner(), [(1, 2)], w.tmp), T, "tasks[0] Task tuple"),
    (
        "stream into a file",
        lambda w: run_stream(tiny_learner(), [Task([(0, 0)], None, ["a"])], __file__),
        V,
        "is a file",
    ),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("act", "error", "words"), [pytest.param(*row[1:], id=row[0]) for row in (*SETTINGS, *METHOD, *TASKS)]
)
def test_error_names_the_fault_and_changes_nothing(world, act, error, words):
    before, base = everything(world.learner), copy.deepcopy(tiny_base()[0].state_dict())
    with pytest.raises(error) as caught:
        act(world)
    missing = [word for word in words.split() if word not in str(caught.value)]
    assert not missing, f"{missing} not in the message: {caught.value}"
    assert not differences(everything(world.learner), before) and not differences(tiny_base()[0].state_dict(), base)
