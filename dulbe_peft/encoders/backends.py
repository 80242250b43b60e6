"""The image tower in onnxruntime or OpenVINO: exported once, kept beside the feature store, compared with torch."""

import copy
import hashlib
import io
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.data.store import store_path
from dulbe_peft.encoders.loading import encoder_of
from dulbe_peft.encoders.onnx_graphs import (
    EMBEDDING,
    LARGEST_FILE,
    PIXELS,
    ImageEncoder,
    check_exportable,
    is_large,
    session,
    write_graph,
)
from dulbe_peft.utils.extras import installed
from dulbe_peft.utils.files import read_json, replacing, write_json
from dulbe_peft.utils.folders import file_sha256
from dulbe_peft.utils.processes import on_main_process, world

PACKAGES = {"onnx": "onnxruntime", "openvino": "openvino"}
ENOUGH = 32  # images of a comparison with torch that need not be made again
LEAST_COSINE = {"float32": 0.9999, "bfloat16": 0.9995, "int8": -1.0}  # of int8 the answers alone count
MOST_OTHERS = 0.01  # share of answers that may differ, and more than one of a batch
# Scores that are closer, by their size, are ties: bfloat16 holds eight binary digits, torch's own too.
TIES = {"float32": 1e-5, "bfloat16": 2.0**-8, "int8": 1e-5}
# The other products keep their precision: int8 of values, of what a block adds to its tokens, of patches and of the
# last projection costs 1 to 2 points of equal answers more, and saves a quarter of the time.
IN_INT8 = ("q_proj", "k_proj", "fc1", "gate_proj", "up_proj")
CALIBRATED, HELD_BACK = 300, 250  # images that int8 is calibrated on at most, and compared on
Scores = Callable[[Tensor], Tensor]


class Tower:
    """An exported image tower: pixel values (n, 3, height, width) to unit features (n, d), on the processor."""

    def __init__(self, file: Path, backend: str, precision: str) -> None:
        self.file, self.backend, self.precision = file, backend, precision
        self.sha256 = file_sha256(file)
        with installed(f"the backend {backend}", backend):
            self.version = f"{PACKAGES[backend]} {version(PACKAGES[backend])}"
        if backend == "onnx":
            self._run = session(file)
        else:
            self._run, rounding = _compiled(file, precision)
            self.version += f", {rounding}" if precision == "int8" else ""
        self._place = f"{self.version}, {precision}, {torch.backends.cpu.get_cpu_capability()}, {self.sha256}"
        self._forced = False

    def __call__(self, pixels: Tensor) -> Tensor:
        return self._run(pixels)

    def is_checked(self, images: int) -> bool:
        """Whether it was compared with torch here, on `ENOUGH` images or as many as there are now; or forced."""
        noted = _noted(self.file).get(self._place, {"images": 0})
        return self._forced or noted["images"] >= min(images, ENOUGH)

    def check(self, found: Tensor, expected: Tensor, scores: Scores | None, force: bool) -> None:
        """Compare its features, (n, d), with torch's; a `ValueError` where they disagree, unless `force`."""
        cosine = float((found * expected).sum(dim=1).min())
        equal, count = equal_answers(found, expected, scores, TIES[self.precision]), len(found)
        note = {"cosine": cosine, "equal": equal, "images": count}
        most = max(self.precision != "int8", MOST_OTHERS * count)
        if cosine >= LEAST_COSINE[self.precision] and count - equal <= most:
            write_json(self.file.with_suffix(".json"), _noted(self.file) | {self._place: note})
        elif force:  # by this process alone: the next one compares again
            self._forced = True
        else:
            raise ValueError(f"{self._said(note)}; --force uses it, --backend torch does without")
        print(f"dulbe-peft: {self._said(note)}", file=sys.stderr)

    def say(self) -> None:
        """Print what the comparison with torch found."""
        note = _noted(self.file).get(self._place)
        unknown = f"{self.backend} in {self.precision} is used, and has not been compared with torch here"
        print(f"dulbe-peft: {self._said(note) if note else unknown}", file=sys.stderr)

    def _said(self, note: Mapping[str, Any]) -> str:
        what = f"{self.backend} in {self.precision}, compared with torch in float32"
        share = 100 * note["equal"] / note["images"]
        return f"{what}: least cosine {note['cosine']:.5f}, {share:.1f} % of {note['images']} answers equal"


def equal_answers(found: Tensor, expected: Tensor, scores: Scores | None, tie: float = TIES["float32"]) -> int:
    """How many images have the same best class, or without `scores` of classes the same nearest image among them."""

    def answers(features: Tensor) -> Tensor:
        if scores is not None:
            return scores(features)
        return (features @ expected.T).fill_diagonal_(-1) if len(expected) > 1 else features.new_zeros(1, 1)

    ours, theirs = answers(found), answers(expected)
    best, own = theirs.max(dim=1).values, theirs.gather(1, ours.argmax(dim=1, keepdim=True))[:, 0]
    return int((own >= best - tie * best.abs().clamp(min=1)).sum())  # of two that are alike either may come first


def open_tower(
    clip: Any, shape: tuple[int, ...], facts: Mapping[str, str], args: LearnerArguments, device: torch.device
) -> Tower | None:
    """The exported tower of a model, with the adapter that it has; None where there can be none, which is said.

    `facts` are the encoder's; of int8 they name the graph, which was calibrated before.
    """
    try:
        if device.type != "cpu":
            raise ValueError(f"it works on the processor, and this model is on {device.type!r}")
        if args.precision == "int8":
            tower = Tower(kept_graph(facts["graph"]), args.backend, args.precision)
            tower.say()
            return tower
        return Tower(exported(clip, shape, facts), args.backend, args.precision)
    except ValueError as error:
        if world()[0] == 0:
            print(f"dulbe-peft: torch encodes, and not {args.backend}: {error}", file=sys.stderr)
        return None


def exported(clip: Any, shape: tuple[int, ...], facts: Mapping[str, str]) -> Path:
    """The file of the tower's graph, made where it is not there."""
    check_exportable(clip)
    made = {name: version(name) for name in ("torch", "transformers", "onnxscript")}
    key = json.dumps([facts["weights"], facts["layers"], shape, made], sort_keys=True)
    file = store_path().with_suffix(".encoders") / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.onnx"

    def export() -> None:
        if _noted(file).get("graph") != (file_sha256(file) if file.is_file() else ""):  # or it is damaged
            print(f"dulbe-peft: the image tower is exported once, to {file}", file=sys.stderr)
            module = ImageEncoder(_plain(clip))
            if is_large(module):
                raise ValueError(f"its weights take more than {LARGEST_FILE:,} bytes")
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as temporary:
                write_graph(temporary, module, torch.zeros(2, *shape), (PIXELS, EMBEDDING))
            write_json(file.with_suffix(".json"), {"graph": file_sha256(file)})

    on_main_process(export)
    return file


def has_graph(sha256: str | None) -> bool:
    """Whether an int8 graph is on this machine, and OpenVINO, which runs it."""
    if sha256 is None or find_spec("openvino") is None:
        return False
    with suppress(ValueError):
        return kept_graph(sha256).is_file()
    return False


def kept_graph(sha256: str) -> Path:
    """The file of an int8 graph; a `ValueError` where it is not on this machine."""
    file = store_path().with_suffix(".encoders") / f"{sha256[:32]}.onnx"
    if not file.is_file() or file_sha256(file) != sha256:
        raise ValueError(f"the int8 graph {sha256[:32]} is not in {file.parent}: copy it, or learn anew")
    return file


def quantised(file: Path, batches: Sequence[Tensor]) -> Tower:
    """An exported tower in int8 by NNCF, calibrated on batches of pixel values."""
    with installed("int8", "openvino"):
        variable = os.environ.get("NNCF_CI")
        os.environ["NNCF_CI"] = "1"  # or NNCF reports to its makers that it was called
        try:
            import nncf
        finally:
            os.environ.pop("NNCF_CI") if variable is None else os.environ.update(NNCF_CI=variable)
        import onnx
    print(f"dulbe-peft: int8 is calibrated on {sum(map(len, batches))} images", file=sys.stderr)
    nncf.set_log_level(logging.ERROR)
    data = nncf.Dataset([{PIXELS: batch.numpy()} for batch in batches])
    graph = onnx.load(file)
    kept = nncf.IgnoredScope(names=_kept(graph.graph.node))
    how = {"model_type": nncf.ModelType.TRANSFORMER, "subset_size": len(batches), "ignored_scope": kept}
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():  # it draws bars
        warnings.simplefilter("ignore")
        model = nncf.quantize(graph, data, **how)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / "made.onnx"
        onnx.save(model, made)
        calibrated = made.rename(file.with_name(f"{file_sha256(made)[:32]}.onnx"))
    return Tower(calibrated, "openvino", "int8")


def _kept(nodes: Iterable[Any]) -> list[str]:
    """The products of a graph that are no layer of `IN_INT8`; torch's exporter notes the modules of each node."""

    def is_int8(node: Any) -> bool:
        return any(f".{name}: " in note.value for note in node.metadata_props for name in IN_INT8)

    return [node.name for node in nodes if node.op_type in ("MatMul", "Gemm", "Conv") and not is_int8(node)]


def _noted(file: Path) -> dict[str, Any]:
    """What is noted of a graph: its SHA-256, and each comparison with torch."""
    notes = file.with_suffix(".json")
    return dict(read_json(notes)) if notes.is_file() else {}


def _plain(clip: Any) -> Any:
    """A copy of the model with the weights W_0 + dW in place of W_0 and its adapters."""
    model = copy.deepcopy(clip).eval().requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            model.set_submodule(name, module.get_base_layer())
    text = encoder_of(model).text_tower
    if text is not None:
        delattr(model, text)
    return model


def _compiled(file: Path, precision: str) -> tuple[Callable[[Tensor], Tensor], str]:
    """A graph as a function of rows by OpenVINO, in as many threads as torch has, and the precision beside int8."""
    with installed("OpenVINO", "openvino"):
        import openvino
    core = openvino.Core()
    able = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if precision == "bfloat16" and not able:
        raise ValueError("OpenVINO has no bfloat16 on this processor")
    rounding = "f32" if precision == "float32" or not able else "bf16"
    hints = {"INFERENCE_PRECISION_HINT": rounding, "INFERENCE_NUM_THREADS": str(torch.get_num_threads())}
    made = core.compile_model(str(file), "CPU", hints)
    return lambda rows: torch.from_numpy(made({0: rows.numpy()})[0].copy()), rounding
