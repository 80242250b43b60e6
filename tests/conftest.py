"""Fixtures: tiny models built in code. Nothing needs the network or a file outside the repository.

No import at the top loads torch, because the process that only starts the others (pytest-xdist) reads this file, too.
"""
# ruff: noqa: E402 - the environment is set before torch is imported

import atexit
import gc
import os
import shutil
import signal
import tempfile
import uuid

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes, which takes longer to start
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a second thread that waits leaves its core to another process
STORES = tempfile.mkdtemp(prefix="dulbe-peft-store-")
atexit.register(shutil.rmtree, STORES, ignore_errors=True)
os.environ["DULBE_PEFT_STORE"] = os.path.join(STORES, "features.sqlite")

from collections.abc import Callable
from functools import wraps
from pathlib import Path

import pytest
from wrapt import when_imported

ACCELERATOR = None  # the accelerator of this machine, once torch is imported
THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))  # per test process; a second thread only slows tiny models down
LOADING = ("attacks", "checkpoints", "encoders", "utils")  # folders of tests that need a model loaded from its files
LOADED = {}  # returns of `from_pretrained`, by the class, the settings and the state of the folder's files
MOST_LOADED = 16  # models that are kept


@when_imported("torch")
def _compute_alike_on_every_machine(torch):
    """Use one thread, and hide hardware: precision "auto" is float32, and device "auto" is the CPU.

    Only learner/test_accelerator.py uses an accelerator.
    """
    global ACCELERATOR
    torch.cpu.get_capabilities = dict
    ACCELERATOR = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    torch.accelerator.is_available = lambda: False
    torch.set_num_threads(THREADS)


@when_imported("matplotlib")
def _leave_charts_empty(matplotlib):
    """Save charts as empty pictures, except inside `pages.drawn`. Drawing two charts takes as long as a short run."""
    from matplotlib.figure import Figure

    draw = Figure.savefig

    @wraps(draw)
    def savefig(figure, *args, **options):
        draw(Figure((0.1, 0.1)), *args, **options)

    Figure.savefig = savefig


@when_imported("transformers.modeling_utils")
def _copy_loaded_models(transformers):
    """Return a copy of the model that was loaded from the same files with the same settings before.

    Its weights are those in the file: `load_encoder` replaces the weights of what it has loaded by copies. Loading
    takes as long as a short run. It is not replaced in the folders `LOADING`, whose tests are about it.
    """
    from copies import sharing_copies

    kind = transformers.PreTrainedModel
    load = kind.from_pretrained.__func__

    @wraps(load)
    def from_pretrained(cls, name, *more, **settings):
        tested = Path(os.environ.get("PYTEST_CURRENT_TEST", "").split("::")[0]).parent.name in LOADING
        # Only `load_encoder` asks for `output_loading_info`.
        if tested or not settings.get("output_loading_info") or not Path(name).is_dir():
            return load(cls, name, *more, **settings)
        files = sorted((path.name, path.stat()) for path in Path(name).iterdir())
        of = tuple((file, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for file, stat in files)
        key = cls, str(name), of, more, repr(sorted(settings.items()))
        if key not in LOADED:
            LOADED[key] = sharing_copies(load(cls, name, *more, **settings))
            for oldest in list(LOADED)[:-MOST_LOADED]:
                del LOADED[oldest]
        return LOADED[key]()

    kind.from_pretrained = classmethod(from_pretrained)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Search for no garbage among the million objects that are imported now, which takes a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark as slow the cases that `plain` does not name, and as slow and left out those that `rare` names."""
    chosen = {}
    for item in items:
        names = {item.callspec.id, *item.callspec.id.split("-")} if hasattr(item, "callspec") else set()
        for mark in item.iter_markers("plain"):
            chosen.setdefault((item.path, item.originalname), []).append(bool(names & set(mark.args)))
            if not names & set(mark.args):
                item.add_marker("slow")
        if any(not mark.args or names & set(mark.args) for mark in item.iter_markers("rare")):
            item.add_marker("slow")
            item.add_marker("left_out")
    renamed = [name for (_, name), plain in chosen.items() if len(plain) > 1 and not any(plain)]
    if renamed:
        raise pytest.UsageError(f"`plain` names no case of {renamed}")


# Test files need not survive a crash, and waiting for the disk would take longer than the tests.
os.fsync = lambda _: None
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let their background processes ignore SIGINT


@pytest.fixture(scope="module", autouse=True)
def _imported_objects_are_not_searched_for_garbage():
    """Freeze the million imported objects, because transformers' training loop collects garbage at every call."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch):
    # Each test gets a separate feature store.
    import torch

    monkeypatch.setenv("DULBE_PEFT_STORE", os.path.join(STORES, uuid.uuid4().hex))
    # torch.manual_seed also formats the whole stack, for an accelerator that is initialised later.
    (torch.manual_seed if ACCELERATOR else torch.default_generator.manual_seed)(0)
    yield
    torch.set_num_threads(THREADS)


@pytest.fixture
def reads(monkeypatch):
    """Count by content how often each image is read to be encoded."""
    from collections import Counter

    from dulbe_peft.encoders.pixels import PixelDataset

    counts, read = Counter(), PixelDataset.__getitem__

    def counted(self, index):
        item = read(self, index)
        counts[item[3]] += 1
        return item

    monkeypatch.setattr(PixelDataset, "__getitem__", counted)
    return counts


@pytest.fixture(scope="session")
def tiny_clip():
    """A function that returns the same random CLIPModel every time: 16 x 16 images, 16 dimensions, 99 tokens."""
    import torch
    from copies import copies
    from transformers import CLIPConfig, CLIPModel

    both = {"num_hidden_layers": 2, "num_attention_heads": 2, "projection_dim": 16}
    text = {**both, "hidden_size": 24, "intermediate_size": 48, "vocab_size": 99, "max_position_embeddings": 20}
    text |= {"bos_token_id": 97, "eos_token_id": 98, "pad_token_id": 98}
    vision = {**both, "hidden_size": 32, "intermediate_size": 64, "image_size": 16, "patch_size": 8}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        clip = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).eval()
    return copies(clip)


@pytest.fixture(scope="session")
def base():
    """The packaged demo model and its processor. Tests must copy the model before adapting it."""
    from dulbe_peft import load_clip
    from dulbe_peft.encoders.registry import demo_model_folder

    return load_clip(demo_model_folder())


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """The folder of a tiny CLIP with random weights, for commands whose predictions need not be correct."""
    from tiny_encoders import save_encoder

    return save_encoder("clip", tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory) -> Path:
    """The folder of the tiny learner's run over two tasks, each a saved learner. Tests must not change it."""
    from lives import stream, tiny_learner

    from dulbe_peft import run_stream

    folder = tmp_path_factory.mktemp("finished") / "run"
    run_stream(tiny_learner(), stream(2), folder)
    return folder


@pytest.fixture
def run_copy(finished_run, tmp_path) -> Path:
    """A copy of `finished_run` that a test may change; `run_stream(tiny_learner(), stream(3), it)` continues it."""
    return shutil.copytree(finished_run, tmp_path / "run")


@pytest.fixture(scope="session")
def digit_folders(tmp_path_factory) -> Callable[[int, int, int], Path]:
    """A function that writes handwritten digits as PNG files in class folders, and returns the root folder.

    Its arguments are the number of classes, and the numbers of training and test images per class.
    """
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    from dulbe_peft.data.digits import DIGITS

    def write(classes: int, train: int, test: int) -> Path:
        root, data = tmp_path_factory.mktemp("some photos"), load_digits()
        for label in range(classes):
            for number, row in enumerate(np.flatnonzero(data.target == label)[: train + test]):
                folder = root / ("train" if number < train else "test") / DIGITS[label]
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray((data.images[row] * 15.9).astype(np.uint8)).save(folder / f"{number}.png")
        return root

    return write


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """A working folder for programs on pages, with 8 images of each digit.

    Strategies that a page registers are removed afterwards.
    """
    import write_saved

    from dulbe_peft.strategies import STRATEGIES
    from dulbe_peft.streams.tasks import class_incremental_tasks

    monkeypatch.chdir(tmp_path)
    train, test = write_saved.digits(0, 8), write_saved.digits(24, 30)
    monkeypatch.setattr(
        "dulbe_peft.streams.digits.digit_tasks",
        lambda increment=2: class_incremental_tasks(train, test, increment=increment),
    )
    monkeypatch.setattr(STRATEGIES, "_classes", dict(STRATEGIES._classes))
    return tmp_path
