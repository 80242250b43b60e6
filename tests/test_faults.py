"""Faults in one table: what is done, the error it must give, and the words that must stand in the message.

After every row the learner (weights, buffers, `requires_grad`, gradients, head, statistics, modes of modules) and the
pristine base model are as before.
"""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import shutil
import struct
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from peft import PeftModel, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from dulbe_peft import (
    BridgeEnsembleHead,
    CheckpointError,
    ClassIncrementalLearner,
    DualModeLoraConfig,
    LearnerArguments,
    OccupationStatistics,
    Task,
    allocate_modes,
    bidirectional_kl,
    class_incremental_tasks,
    collect_statistics,
    cross_modal_loss,
    load_clip,
    load_data,
    probe_gradients,
    route_gradients,
    slerp,
)
from dulbe_peft.commands.main import main
from dulbe_peft.demo import DigitImages, demo_model_folder
from dulbe_peft.utils.folders import json_sha256, read_manifest

LAYER = "vision_model.encoder.layers.0.mlp.fc1"


# ---------------------------------------------------------------------- the world every row is tried in


def new_learner(base, **fields):
    torch.manual_seed(0)
    model = get_peft_model(copy.deepcopy(base[0]), DualModeLoraConfig(residual_rank=2, support_rank=8))
    settings = {"epochs": 1, "batch_size": 4, "device": "cpu", "progress": False} | fields
    return ClassIncrementalLearner(model, base[1], args=LearnerArguments(**settings))


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A learner of two tasks, its saved folder, and the base model; no row may change them."""
    from sklearn.datasets import load_digits

    AcceleratorState._reset_state(reset_partial_state=True)  # a process-wide singleton with one precision
    digits = load_digits()
    rows = np.concatenate([np.flatnonzero(digits.target == label)[:3] for label in range(10)])
    data = DigitImages(digits.images[rows], digits.target[rows])
    base = load_clip(demo_model_folder())
    learner = new_learner(base)
    for task in class_incremental_tasks(data, increment=2)[:2]:
        learner.learn_task(task.train, task.class_names)
    folder = tmp_path_factory.mktemp("faults") / "learner"
    learner.save_pretrained(folder)
    return SimpleNamespace(base=base, learner=learner, model=learner.model, saved=folder, digits=data)


@pytest.fixture
def world(shared, tmp_path, tiny_clip):
    """What a row may use: all of `shared`, a folder of its own, and a tiny model of its own."""
    return SimpleNamespace(**vars(shared), tmp=tmp_path, clip=tiny_clip())


def everything(world):
    """All that must survive a fault, as (name, value) pairs that can be compared."""
    kept = {}
    for title, model in (("learner", world.model), ("base", world.base[0]), ("clip", world.clip)):
        kept |= {f"{title} {name}": value.clone() for name, value in model.state_dict().items()}
        kept |= {f"{title} {name} requires": p.requires_grad for name, p in model.named_parameters()}
        kept |= {f"{title} {name} grad": p.grad is None for name, p in model.named_parameters()}
        kept |= {f"{title} {name} mode": module.training for name, module in model.named_modules()}
    kept |= {f"head {name}": value.clone() for name, value in world.learner.head.state_dict().items()}
    kept |= {f"S {name}": value.clone() for name, value in world.learner.statistics.items()}
    kept["tasks"], kept["step"] = list(world.learner.tasks), world.learner.state.step
    kept["history_rank"] = world.model.active_peft_config.history_rank
    return kept


def assert_unchanged(before, after):
    assert before.keys() == after.keys()
    for name, value in before.items():
        same = torch.equal(value, after[name]) if isinstance(value, torch.Tensor) else value == after[name]
        assert same, f"{name} was changed"


# ---------------------------------------------------------------------- what rows are made of


def adapt(world, adapter="default", model=None, **fields):
    return get_peft_model(model or world.clip, DualModeLoraConfig(**{"text_rank": 0, **fields}), adapter_name=adapter)


def pixels(world, count=2):
    return torch.zeros(count, 3, 16, 16)


def features(model, batch):
    return model.get_base_model().get_image_features(pixel_values=batch).pooler_output


def probe(world, batches, loss_fn=None):
    side = world.base[0].config.vision_config.image_size
    batches = [torch.full((2, 3, side, side), fill) for fill in batches]
    return probe_gradients(world.model, batches, loss_fn or (lambda model, x: (features(model, x).square().mean(), 2)))


def modes(world, **changes):
    """Bases that fit the learner's model, but for one layer's."""
    layers = world.model.dual_mode_layers()
    bases = allocate_modes({n: torch.randn(x.out_features, x.in_features) for n, x in layers.items()}, None, 1, 2)
    return {**bases, LAYER: replace(bases[LAYER], **changes)}


def begin(world, change):
    return world.model.begin_task(change(modes(world)))


def images(count, label=lambda index: index % 2):
    return [{"image": Image.new("RGB", (9, 7), (50 * i, 9, 99)), "label": label(i)} for i in range(count)]


def learn(world, dataset, names=("five", "six")):
    return world.learner.learn_task(dataset, names)


def learn_image(world, image):
    return learn(world, [{"image": image, "label": 0}], ["five"])


def learn_name(world, *names, **fields):
    """Two images a class; with settings of its own in a learner of its own."""
    learner = new_learner(world.base, **fields) if fields else world.learner
    learner.learn_task(images(2 * len(names), lambda index: index % len(names)), names)


def head(classes=2, **fields):
    """A head of two classes over four dimensions."""
    made = BridgeEnsembleHead(4, **fields)
    if classes:
        made.add_classes(["a", "b"][:classes], torch.eye(4)[:classes], list(range(classes)), torch.eye(4)[:classes])
    return made


def add(names=("c",), embeds=None, labels=(0,), texts=None):
    embeds = torch.eye(4)[2:3] if embeds is None else embeds
    return head().add_classes(list(names), embeds, labels, torch.eye(4)[:3] if texts is None else texts)


def copied(world):
    """A copy of the saved folder without its manifest, so that readers and not hashes must find the damage."""
    target = world.tmp / "copy"
    shutil.copytree(world.saved, target)
    (target / "manifest.json").unlink()
    return target


def with_json(world, file, **changes):
    folder = copied(world)
    content = json.loads((folder / file).read_text(encoding="utf-8"))
    for name, value in changes.items():
        content[name] = value
        if value is ...:
            del content[name]
    (folder / file).write_text(json.dumps(content), encoding="utf-8")
    return folder


def with_bytes(world, file, change):
    folder = copied(world)
    (folder / file).write_bytes(change((folder / file).read_bytes()))
    return folder


def with_tensors(world, file, change):
    """A file whose tensors `change` has altered, under the metadata it had."""
    folder = copied(world)
    with open(folder / file, "rb") as stream:
        size = struct.unpack("<Q", stream.read(8))[0]
        metadata = json.loads(stream.read(size)).get("__metadata__")
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, metadata)
    return folder


def committed(world, file, change):
    """A whole saved folder, manifest and all, with one file damaged."""
    target = world.tmp / "committed"
    shutil.copytree(world.saved, target)
    (target / file).write_bytes(change((target / file).read_bytes()))
    return target


def manifest(world, **changes):
    """A whole saved folder whose manifest says something else, under a hash that fits what it says."""
    content = json.loads((world.saved / "manifest.json").read_text(encoding="utf-8")) | changes
    del content["sha256"]
    content["sha256"] = json_sha256(content)
    return committed(world, "manifest.json", lambda _: json.dumps(content).encode())


class Bomb:
    """A pickle of it creates a file when it is opened."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def with_pickle(world, file, instead):
    """The tensors of `file` offered as a pickle under the name `instead`."""
    folder = copied(world)
    (folder / file).unlink()
    (folder / instead).write_bytes(pickle.dumps(Bomb(world.tmp / "opened")))
    return folder


def load_adapter(world, folder, model=None):
    return PeftModel.from_pretrained(model or copy.deepcopy(world.base[0]), str(folder))


def load_learner(world, folder):
    return ClassIncrementalLearner.from_pretrained(folder, base_model=copy.deepcopy(world.base[0]))


def first_key(tensors, part):
    return next(key for key in tensors if part in key)


def truncate(data):
    return data[: len(data) // 2]


def empty(_):
    return b""


def folder_of(world, **files):
    for name, content in files.items():
        path = world.tmp / "root" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (world.tmp / "root").mkdir(exist_ok=True)
    return world.tmp / "root"


def png(mode="RGB", size=(1, 1)):
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, "PNG")
    return buffer.getvalue()


class Odd:
    """A dataset of three items of any kind."""

    def __init__(self, *items, length=None):
        self.items, self.length = items, length

    def __len__(self):
        return len(self.items) if self.length is None else self.length

    def __getitem__(self, index):
        return self.items[index]


# ---------------------------------------------------------------------- the table

NAN, INF = math.nan, math.inf
V, T, C, F = ValueError, TypeError, CheckpointError, FileNotFoundError

CONFIGURATION = [
    ("rank a float", lambda w: DualModeLoraConfig(residual_rank=8.0), T, "residual_rank int 8.0"),
    ("both ranks 0", lambda w: DualModeLoraConfig(shared_rank=0, residual_rank=0), V, "both 0"),
    ("no targets", lambda w: DualModeLoraConfig(target_modules=[]), V, "target_modules empty"),
    ("targets no expression", lambda w: adapt(w, target_modules="fc1("), V, "target_modules 'fc1('"),
    ("history huge", lambda w: adapt(w, history_rank=10**12), V, "history_rank 1000000000000"),
    ("text_rank huge", lambda w: adapt(w, text_rank=10**9), V, "text_rank 1000000000 in_features"),
    ("template without {}", lambda w: LearnerArguments(prompt_template="a photo"), V, "prompt_template {} 'a photo'"),
    ("device unknown", lambda w: new_learner(w.base, device="quantum"), V, "device 'quantum'"),
    ("tracker unknown", lambda w: new_learner(w.base, log_with="nothing"), V, "nothing"),
]

MODEL = [
    ("ranks above in_features", lambda w: adapt(w, residual_rank=32), V, "33 in_features 32"),
    ("no such target", lambda w: adapt(w, target_modules=["k_prj"]), V, "k_prj 'k_proj'"),
    ("no such block", lambda w: adapt(w, layers_to_transform=[99]), V, "layers_to_transform 99"),
    (
        "nn.MultiheadAttention",
        lambda w: adapt(w, model=nn.Sequential(nn.MultiheadAttention(4, 2)), target_modules=["0"], residual_rank=1),
        V,
        "MultiheadAttention convert transformers layout",
    ),
    ("a convolution", lambda w: adapt(w, target_modules=["patch_embedding"]), V, "patch_embedding Conv2d Linear"),
    ("wrapped twice", lambda w: adapt(w, model=w.model), V, "already"),
    ("adapter name with a dot", lambda w: adapt(w, "a.b"), V, "'a.b' adapter"),
    ("unknown adapter", lambda w: w.model.set_adapter("other"), V, "other not found"),
    ("modes of no layer", lambda w: w.model.begin_task({}), V, f"missing '{LAYER}'"),
    ("modes of another layer", lambda w: begin(w, lambda m: {**m, "x": m[LAYER]}), V, "unknown 'x'"),
    (
        "modes of another rank",
        lambda w: w.model.begin_task(modes(w, residual=torch.eye(96, 5))),
        V,
        "shapes (96, 5) (96, 2)",
    ),
    ("basis not orthonormal", lambda w: w.model.begin_task(modes(w, shared=torch.ones(96, 1))), V, "orthonormal"),
    ("basis NaN", lambda w: w.model.begin_task(modes(w, shared=torch.full((96, 1), NAN))), V, f"{LAYER} NaN"),
]

GRADIENTS = [
    ("probe without batches", lambda w: probe(w, []), V, "batches is empty"),
    ("probe of NaN images", lambda w: probe(w, [0.0, NAN]), V, "loss probe batch 1 nan"),
    (
        "probe of something else",
        lambda w: probe(
            w, [0.0], lambda m, x: (m.get_base_model().logit_scale * torch.ones((), requires_grad=True), 2)
        ),
        V,
        "gradient loss adapted",
    ),
    ("probe without a size", lambda w: probe(w, [0.0], lambda m, x: features(m, x).sum()), T, "loss_fn pair"),
    ("probe of a plain model", lambda w: probe_gradients(w.base[0], [1], features), T, "get_peft_model CLIPModel"),
    ("routing NaN", lambda w: route_gradients(w.model, torch.tensor(NAN), None), V, "task_loss nan finite"),
    ("routing a constant", lambda w: route_gradients(w.model, torch.tensor(1.0), None), V, "task_loss depend"),
    (
        "statistics never reached",
        lambda w: collect_statistics(w.model, [1], lambda m, x: None, OccupationStatistics()),
        V,
        "never reached vision_model",
    ),
    ("allocation of NaN", lambda w: allocate_modes({"l": torch.full((4, 20), NAN)}, None), V, "'l' NaN"),
    ("allocation above d_in", lambda w: allocate_modes({"l": torch.ones(4, 5)}, None), V, "9 5 'l'"),
    ("allocation of rank 0", lambda w: allocate_modes({"l": torch.ones(4, 20)}, None, 0, 0), V, "both 0"),
    (
        "statistics of another width",
        lambda w: allocate_modes({"l": torch.ones(4, 20)}, {"l": torch.eye(7)}),
        V,
        "'l' (20, 20) (7, 7)",
    ),
    ("slerp before the start", lambda w: slerp(torch.eye(3)[0], torch.eye(3)[1], -0.1), V, "[0, 1] -0.1"),
    ("slerp from zero", lambda w: slerp(torch.zeros(3), torch.eye(3)[1], 0.5), V, "start unit"),
    (
        "loss of label 2",
        lambda w: cross_modal_loss(torch.eye(2), torch.eye(2), torch.tensor([0, 2]), 1),
        V,
        "2 classes",
    ),
    ("KL at temperature 0", lambda w: bidirectional_kl(torch.eye(2), torch.eye(2), 0), V, "class_temperature 0"),
]

HEAD = [
    ("embed_dim 0", lambda w: BridgeEnsembleHead(0), V, "embed_dim 0"),
    ("one depth", lambda w: head(num_depths=1), V, "num_depths at least 2 1"),
    ("depth above 1", lambda w: head(depths=[0, 1.5]), V, "depths 1.5"),
    ("logit_scale 0", lambda w: head(logit_scale=0), V, "logit_scale positive 0"),
    ("class known", lambda w: add(["a"]), V, "'a' already"),
    ("class twice", lambda w: add(["c", "c"], torch.eye(4)[:2], [0, 1], torch.eye(4)), V, "'c' differ"),
    ("class name with NUL", lambda w: add(["c\0"]), V, "'c\\x00' control"),
    ("class without an image", lambda w: add(["c", "d"], None, [0], torch.eye(4)), V, "'d' no image"),
    ("zero features", lambda w: add(embeds=torch.zeros(1, 4)), V, "image_embeds row 0 zero"),
    ("NaN features", lambda w: add(embeds=torch.full((1, 4), NAN)), V, "image_embeds row 0 NaN"),
    (
        "features that cancel",
        lambda w: add(embeds=torch.tensor([[1.0, 0, 0, 0], [-1, 0, 0, 0]]), labels=[0, 0]),
        V,
        "'c' cancel",
    ),
    ("labels too short", lambda w: add(embeds=torch.ones(2, 4)), V, "labels (2,) (1,)"),
    ("label out of range", lambda w: add(labels=[1]), V, "label 1 1 classes"),
    ("labels floats", lambda w: add(labels=[0.0]), T, "labels integers float"),
    ("old texts missing", lambda w: add(texts=torch.eye(4)[:1]), V, "text_embeds 3 rows 1"),
    (
        "text zero",
        lambda w: add(texts=torch.eye(4)[:3] * torch.tensor([[1.0], [0], [1]])),
        V,
        "text_embeds row 1 zero",
    ),
    ("empty head asked", lambda w: head(classes=0)(torch.eye(4)), V, "no class"),
    ("head asked with another width", lambda w: head()(torch.ones(1, 9)), V, "4 (1, 9)"),
    (
        "learner's head of another width",
        lambda w: ClassIncrementalLearner(w.model, w.base[1], head=head(0)),
        V,
        "4 64",
    ),
]

LEARNER = [
    ("dataset empty", lambda w: learn(w, []), V, "empty"),
    ("dataset a generator", lambda w: learn(w, (x for x in images(2))), T, "generator __len__"),
    ("items numbers", lambda w: learn(w, Odd(1, 2)), T, "sample 0 int"),
    ("items without a label", lambda w: learn(w, Odd({"image": 1})), V, "sample 0 'label'"),
    ("image None", lambda w: learn_image(w, None), V, "image 0 None"),
    ("image an address", lambda w: learn_image(w, "http://127.0.0.1:9/x.jpg"), V, "image 0 str PIL"),
    ("pixels uint8", lambda w: learn_image(w, torch.zeros(3, 32, 32, dtype=torch.uint8)), V, "image 0 uint8"),
    ("pixels of another size", lambda w: learn_image(w, torch.zeros(3, 33, 32)), V, "image 0 33 32"),
    ("pixels NaN", lambda w: learn_image(w, torch.full((3, 32, 32), NAN)), V, "image 0 NaN"),
    ("label a float", lambda w: learn(w, images(2, lambda i: 0.0)), T, "sample 0 0.0 int"),
    ("label out of range in a task", lambda w: learn(w, images(2, lambda i: i + 1)), V, "2 classes 0..1"),
    ("class without an image in a task", lambda w: learn(w, images(2), ["x", "y", "z"]), V, "'z' no image"),
    ("class of an earlier task", lambda w: learn(w, images(2), ["zero", "y"]), V, "'zero' already"),
    ("class empty", lambda w: learn_name(w, ""), V, "'' blank"),
    ("class with a line break", lambda w: learn_name(w, "a\nb"), V, "'a\\nb' control"),
    ("class of 300 characters", lambda w: learn_name(w, "ab " * 100), V, "'a photo tokens"),
    (
        "prompts equal by style",
        lambda w: learn_name(w, "a_b", "a b", class_name_style="spaces"),
        V,
        "'a_b' 'a b' prompt",
    ),
    ("prompt of an old class", lambda w: learn_name(w, "Zero"), V, "zero. Zero. prompt"),
    ("no class to predict", lambda w: new_learner(w.base).predict(Image.new("RGB", (8, 8))), V, "no task"),
    ("no class to evaluate", lambda w: new_learner(w.base).evaluate(images(2)), V, "no task"),
    ("evaluating an unknown class", lambda w: w.learner.evaluate(images(2), ["zero", "x"]), V, "'x' not been learned"),
    (
        "a model without adapter",
        lambda w: ClassIncrementalLearner(w.base[0], w.base[1]),
        V,
        "get_peft_model CLIPModel",
    ),
    ("a processor of nothing", lambda w: ClassIncrementalLearner(w.model, None), T, "processor None"),
    ("stream of tuples", lambda w: new_learner(w.base).run([(1, 2)], w.tmp), T, "tasks[0] Task tuple"),
    ("stream into a file", lambda w: new_learner(w.base).run([Task([(0, 0)], None, ["a"])], __file__), V, "is a file"),
]

DATA = [
    ("increment 0", lambda w: class_incremental_tasks(w.digits, increment=0), V, "increment 0 1..10"),
    ("increment too large", lambda w: class_incremental_tasks(w.digits, increment=11), V, "increment 11 1..10"),
    ("seed negative in a stream", lambda w: class_incremental_tasks(w.digits, increment=2, seed=-1), V, "seed -1"),
    (
        "order short",
        lambda w: class_incremental_tasks(w.digits, increment=2, class_order=[1]),
        V,
        "class_order absent",
    ),
    ("nothing there", lambda w: load_data(w.tmp / "x"), F, "/x exist"),
    ("no name of the hub", lambda w: load_data("gone/x"), F, "gone/x hf:gone/x"),
    ("a class folder without images", lambda w: load_data(folder_of(w, a__b=b""), None), V, "/a has no"),
    ("no such split", lambda w: load_data(folder_of(w, train__a__x=b""), "dev"), F, "'dev' 'train'"),
    (
        "an unreadable JPEG",
        lambda w: load_data(folder_of(w, **{"a__1.png": png(), "a__x.jpg": b"\xff\xd8\xff\xe0"}), None)[1],
        V,
        "image 1 a/x.jpg",
    ),
    (
        "an unreadable JPEG in a task",
        lambda w: learn(w, load_data(folder_of(w, **{"x__1.png": png()[:45], "y__1.png": png()}), None), ["x", "y"]),
        V,
        "image 0 x/1.png",
    ),
    (
        "a picture of a bomb's size",
        lambda w: load_data(folder_of(w, **{"a__1.png": bomb()}), None)[0],
        V,
        "image 0 a/1.png",
    ),
    (
        "a parquet file of other bytes",
        lambda w: load_data(folder_of(w, **{"train.parquet": b"PAR1 and no more PAR1"})),
        V,
        "root/train.parquet read",
    ),
]


def bomb():
    """A PNG whose header claims 60,000 by 60,000 pixels."""
    import zlib

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))


ADAPTER, CONFIG, HEAD_FILE, HEAD_CONFIG = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "head.safetensors",
    "head_config.json",
)
STATISTICS = "statistics.safetensors"


def adapter_tensors(change):
    return lambda w: load_adapter(w, with_tensors(w, ADAPTER, change))


def adapter_json(**changes):
    return lambda w: load_adapter(w, with_json(w, CONFIG, **changes))


def head_tensors(change):
    return lambda w: BridgeEnsembleHead.from_pretrained(with_tensors(w, HEAD_FILE, change))


def head_json(**changes):
    return lambda w: BridgeEnsembleHead.from_pretrained(with_json(w, HEAD_CONFIG, **changes))


def statistics(change):
    return lambda w: OccupationStatistics.load(with_tensors(w, STATISTICS, change) / STATISTICS)


def statistics_bytes(change):
    return lambda w: OccupationStatistics.load(with_bytes(w, STATISTICS, change) / STATISTICS)


def set_nan(part):
    def change(tensors):
        tensors[first_key(tensors, part)].view(-1)[0] = NAN

    return change


def drop(part):
    return lambda tensors: tensors.pop(first_key(tensors, part))


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


def reshape(part):
    def change(tensors):
        key = first_key(tensors, part)
        tensors[key] = tensors[key].T.contiguous()

    return change


FILES = [
    ("adapter truncated", lambda w: load_adapter(w, with_bytes(w, ADAPTER, truncate)), V, f"{ADAPTER} damaged"),
    ("adapter NaN", adapter_tensors(set_nan("shared_B")), V, "shared_B NaN"),
    ("adapter key missing", adapter_tensors(drop("residual_B")), V, "residual_B missing"),
    ("adapter key unexpected", adapter_tensors(put("base_model.model.x.dulbe_P", torch.ones(2))), V, "x.dulbe_P"),
    ("adapter tensor turned", adapter_tensors(reshape("residual_B")), V, "residual_B shape"),
    ("adapter of another backbone", lambda w: load_adapter(w, copied(w), copy.deepcopy(w.clip)), V, "fit unknown"),
    (
        "adapter of another architecture",
        lambda w: load_adapter(w, copied(w), nn.Sequential(nn.Linear(4, 4))),
        V,
        "not found",
    ),
    (
        "adapter a pickle",
        lambda w: load_adapter(w, with_pickle(w, ADAPTER, "adapter_model.bin")),
        V,
        "adapter_model.bin pickle safetensors",
    ),
    ("adapter config with huge history", adapter_json(history_rank=10**12), V, "history_rank 1000000000000"),
    ("adapter config with another rank", adapter_json(residual_rank=5), V, "shape dulbe_P"),
    ("head truncated", lambda w: BridgeEnsembleHead.from_pretrained(with_bytes(w, HEAD_FILE, truncate)), V, "damaged"),
    ("head NaN", head_tensors(set_nan("visual_prototypes")), V, "visual_prototypes NaN"),
    ("head key missing", head_tensors(drop("reliability")), V, "reliability"),
    ("head of another width", head_tensors(put("text_embeds", torch.eye(4, 8))), V, "text_embeds (4, 64) (4, 8)"),
    (
        "head a pickle",
        lambda w: BridgeEnsembleHead.from_pretrained(with_pickle(w, HEAD_FILE, "head.bin")),
        F,
        HEAD_FILE,
    ),
    ("head config missing a field", head_json(logit_scale=...), V, "logit_scale"),
    ("head config of a class more", head_json(class_names=["a", "b", "c", "d", "e"]), V, "visual_prototypes (5, 64)"),
    ("statistics truncated", statistics_bytes(truncate), V, f"{STATISTICS} damaged"),
    ("statistics NaN", statistics(set_nan("fc1")), V, "fc1 NaN"),
    (
        "manifest truncated",
        lambda w: read_manifest(committed(w, "manifest.json", truncate)),
        C,
        "manifest.json damaged",
    ),
    ("manifest newer", lambda w: read_manifest(manifest(w, format_version=99)), C, "99"),
    (
        "manifest without files",
        lambda w: load_learner(w, manifest(w, files={})),
        C,
        "expected learner.json",
    ),
    (
        "manifest with a path",
        lambda w: read_manifest(manifest(w, files={"../x": {"sha256": "0", "size": 0}})),
        C,
        "'../x'",
    ),
    *(
        (
            f"committed {file} {title}",
            lambda w, f=file, c=change: load_learner(w, committed(w, f, c)),
            C,
            f"{file} damaged",
        )
        for file in (ADAPTER, CONFIG, HEAD_FILE, HEAD_CONFIG, STATISTICS, "learner.json")
        for title, change in (("truncated", truncate),)
    ),
    ("a learner that is not there", lambda w: load_learner(w, w.tmp / "x"), F, "x does not exist"),
    (
        "a learner of another backbone",
        lambda w: ClassIncrementalLearner.from_pretrained(w.saved, base_model=w.clip),
        C,
        "base model weights not",
    ),
]


def run_yaml(world, text):
    """`dulbe-peft run` with a configuration file; its one line on stderr as the message."""
    (world.tmp / "run.yaml").write_text(text, encoding="utf-8")
    return ["run", "--config", str(world.tmp / "run.yaml"), "--model", str(demo_model_folder()), "--dry-run"]


COMMAND_LINE = [
    ("YAML unknown key", lambda w: run_yaml(w, "shared_rnak: 2"), "'shared_rnak' 'shared_rank'"),
    ("YAML broken", lambda w: run_yaml(w, "a: ["), "not YAML"),
    ("YAML that runs code", lambda w: run_yaml(w, "!!python/object/apply:os.getcwd []"), "not YAML"),
    ("no YAML", lambda w: ["run", "--config", str(w.tmp / "none.yaml")], "none.yaml does not exist"),
    ("no model", lambda w: ["run", "--data", "x"], "--model"),
    ("exporting nothing saved", lambda w: ["export", str(w.tmp / "x"), str(w.tmp / "y")], "neither folder repository"),
]

TABLE = [*CONFIGURATION, *MODEL, *GRADIENTS, *HEAD, *LEARNER, *DATA, *FILES]


def check_words(message, words):
    missing = [word for word in words.split() if word not in message]
    assert not missing, f"{missing} not in the message: {message}"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("act", "error", "words"), [pytest.param(*row[1:], id=row[0]) for row in TABLE])
def test_fault(world, act, error, words):
    before = everything(world)
    with pytest.raises(error) as caught:
        act(world)
    check_words(str(caught.value), words)
    assert_unchanged(before, everything(world))
    assert not (world.tmp / "opened").exists(), "a pickle was opened"


@pytest.mark.parametrize(("arguments", "words"), [pytest.param(*row[1:], id=row[0]) for row in COMMAND_LINE])
def test_command_line_fault(world, arguments, words, capsys):
    assert main(arguments(world)) == 2
    message = capsys.readouterr().err
    check_words(message, words)
    assert "Traceback" not in message


# ---------------------------------------------------------------------- what looks odd and works


@pytest.mark.parametrize(
    "names",
    [
        ["../../x"],
        ["/etc/passwd"],
        ["\u202eesrever"],
        ["🦊🦊", "naïve café"],
        ["a.b", "CON"],
        ["{} {0}", "%s"],
        ["x" * 40],
    ],
)
def test_odd_class_names_are_names(world, names):
    """They are learned, saved, loaded and predicted, and no file is made of them."""
    learner = new_learner(world.base)
    learner.learn_task(images(2 * len(names), lambda index: index % len(names)), names)
    assert set(learner.predict([image["image"] for image in images(2)])) <= set(names)
    learner.save_pretrained(world.tmp / "out" / "learner")
    assert [path.name for path in (world.tmp / "out").iterdir()] == ["learner"]
    assert load_learner(world, world.tmp / "out" / "learner").class_names == tuple(names)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "HSV", "I;16"])
def test_images_of_every_mode_and_of_one_pixel(world, mode):
    for size in ((1, 1), (40, 9)):
        assert world.learner.predict(Image.new(mode, size))[0] in world.learner.class_names


def test_small_tasks_and_empty_questions(world):
    """A task of one image, a batch of one, a class of one image, no image to predict, depths that repeat."""
    learner = new_learner(world.base, batch_size=1)
    learner.learn_task(images(1), ["one"])
    learner.learn_task(images(2), ["two", "three"])
    assert learner.predict([]) == []
    assert head(depths=[0, 0.5, 0.5])(torch.eye(4)).shape == (4, 2)


def test_support_rank_is_clamped_and_reported(world):
    found = allocate_modes({"l": torch.randn(4, 20)}, {"l": torch.eye(20)}, 1, 2, support_rank=10**9)
    assert found["l"].support_rank == 18


@pytest.mark.parametrize("failures", [1, 2])
def test_an_eigendecomposition_that_fails(monkeypatch, failures):
    """Once: another algorithm is tried, in float64. For good: a ValueError that names the matrix."""

    def failing(*_, **__):
        raise torch.linalg.LinAlgError("did not converge")

    gradient = torch.randn(6, 5)
    expected = allocate_modes({"l": gradient}, None, 1, 2)["l"].shared
    monkeypatch.setattr("dulbe_peft.subspaces.decompositions.linalg.eigh", failing)
    if failures == 2:
        monkeypatch.setattr(torch.linalg, "eigh", failing)
        with pytest.raises(ValueError, match="eigendecomposition of .*'l'.* failed"):
            allocate_modes({"l": gradient}, None, 1, 2)
        return
    torch.testing.assert_close(allocate_modes({"l": gradient}, None, 1, 2)["l"].shared, expected)
