"""Run the image tower in onnxruntime or OpenVINO.

The tower is exported once, kept beside the feature store, and compared with torch before its features are used.
"""

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
from dulbe_peft.encoders import onnx_graphs
from dulbe_peft.encoders.loading import encoder_of
from dulbe_peft.encoders.onnx_graphs import EMBEDDING, LARGEST_FILE, PIXELS
from dulbe_peft.utils.extras import installed
from dulbe_peft.utils.files import read_json, replacing, write_json
from dulbe_peft.utils.folders import file_sha256
from dulbe_peft.utils.processes import on_main_process, world

PACKAGES = {"onnx": "onnxruntime", "openvino": "openvino"}
ENOUGH = 32  # a comparison with torch on this many images is not repeated
LEAST_COSINE = {"float32": 0.9999, "bfloat16": 0.9995, "int8": -1.0}  # int8 is judged by its predictions alone
MAX_DIFFERENT = 0.01  # fraction of predictions that may differ; in float32 and bfloat16 one prediction always may
# Two scores whose relative difference is smaller are ties. bfloat16 has eight significant bits, in torch as well.
TIES = {"float32": 1e-5, "bfloat16": 2.0**-8, "int8": 1e-5}
# All other matrix products keep their precision. With the values, the layers that write to the residual stream, the
# patches and the last projection in int8 too, 1 to 2 % more predictions differ, and a quarter of the time is saved.
IN_INT8 = ("q_proj", "k_proj", "fc1", "gate_proj", "up_proj")
CALIBRATION_IMAGES, COMPARISON_IMAGES = 300, 250  # int8 is calibrated, and then compared with torch, on at most these
Scores = Callable[[Tensor], Tensor]


class Tower:
    """An exported image tower. It maps pixel values (n, 3, height, width) to unit features (n, d) on the CPU."""

    def __init__(self, file: Path, backend: str, precision: str) -> None:
        self.file, self.backend, self.precision = file, backend, precision
        self.sha256 = file_sha256(file)
        with installed(f"the backend {backend}", backend):
            self.version = f"{PACKAGES[backend]} {version(PACKAGES[backend])}"
        if backend == "onnx":
            self._run = onnx_graphs.session(file)
        else:
            self._run, rounding = _compiled(file, precision)
            self.version += f", {rounding}" if precision == "int8" else ""
        self._place = f"{self.version}, {precision}, {torch.backends.cpu.get_cpu_capability()}, {self.sha256}"
        self._forced = False

    def __call__(self, pixels: Tensor) -> Tensor:
        return self._run(pixels)

    def is_checked(self, images: int) -> bool:
        """Return whether no further comparison with torch is needed for a batch of this many images.

        That is so after a comparison on this machine with at least that many images or `ENOUGH`, or if use is forced.
        """
        comparison = _records(self.file).get(self._place, {"images": 0})
        return self._forced or comparison["images"] >= min(images, ENOUGH)

    def check(self, features: Tensor, expected: Tensor, scores: Scores | None, force: bool) -> None:
        """Compare this tower's `features` with torch's, `expected`, both (n, d), and record the result.

        Raises:
            ValueError: If they differ too much, and `force` is not set.
        """
        cosine = float((features * expected).sum(dim=1).min())
        equal, count = equal_answers(features, expected, scores, TIES[self.precision]), len(features)
        comparison = {"cosine": cosine, "equal": equal, "images": count}
        most = max(self.precision != "int8", MAX_DIFFERENT * count)
        if cosine >= LEAST_COSINE[self.precision] and count - equal <= most:
            write_json(self.file.with_suffix(".json"), _records(self.file) | {self._place: comparison})
        elif force:  # holds for this process; the next one compares again
            self._forced = True
        else:
            raise ValueError(f"{self._describe(comparison)}; --force uses it anyway, --backend torch uses torch")
        print(f"dulbe-peft: {self._describe(comparison)}", file=sys.stderr)

    def report(self) -> None:
        """Print the result of the recorded comparison with torch, or that there was none on this machine."""
        comparison = _records(self.file).get(self._place)
        unknown = f"{self.backend} in {self.precision} is used, and was never compared with torch on this machine"
        print(f"dulbe-peft: {self._describe(comparison) if comparison else unknown}", file=sys.stderr)

    def _describe(self, comparison: Mapping[str, Any]) -> str:
        title = f"{self.backend} in {self.precision}, compared with torch in float32"
        cosine, images = comparison["cosine"], comparison["images"]
        percent = 100 * comparison["equal"] / images
        return f"{title}: lowest cosine {cosine:.5f}, equal predictions on {percent:.1f} % of {images} images"


def equal_answers(features: Tensor, expected: Tensor, scores: Scores | None, tie: float = TIES["float32"]) -> int:
    """Count the images for which `features` and `expected`, both (n, d), give the same prediction.

    The prediction is the class with the highest of the `scores`. Without `scores`, it is the nearest other image. A
    prediction also counts as equal if its score under `expected` is within `tie` of the highest one.
    """

    def predict(rows: Tensor) -> Tensor:
        if scores is not None:
            return scores(rows)
        return (rows @ expected.T).fill_diagonal_(-1) if len(expected) > 1 else rows.new_zeros(1, 1)

    ours, theirs = predict(features), predict(expected)
    best, chosen = theirs.max(dim=1).values, theirs.gather(1, ours.argmax(dim=1, keepdim=True))[:, 0]
    return int((chosen >= best - tie * best.abs().clamp(min=1)).sum())


def open_tower(
    clip: object, shape: tuple[int, ...], facts: Mapping[str, str], args: LearnerArguments, device: torch.device
) -> Tower | None:
    """Return the exported image tower of a model, adapter included, or print why there is none and return None.

    `facts` are those of `Encoder.facts`. In int8 they name the graph, which was calibrated earlier.
    """
    try:
        if device.type != "cpu":
            raise ValueError(f"it runs on the CPU only, and this model is on {device.type!r}")
        if args.precision == "int8":
            tower = Tower(int8_graph(facts["graph"]), args.backend, args.precision)
            tower.report()
            return tower
        return Tower(exported(clip, shape, facts), args.backend, args.precision)
    except ValueError as error:
        if world()[0] == 0:
            print(f"dulbe-peft: torch encodes instead of {args.backend}: {error}", file=sys.stderr)
        return None


def exported(clip: object, shape: tuple[int, ...], facts: Mapping[str, str]) -> Path:
    """Return the file with the graph of the image tower, and export it if the file is missing or damaged."""
    onnx_graphs.check_exportable(clip)
    versions = {name: version(name) for name in ("torch", "transformers", "onnxscript")}
    key = json.dumps([facts["weights"], facts["layers"], shape, versions], sort_keys=True)
    file = store_path().with_suffix(".encoders") / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.onnx"

    def export() -> None:
        if _records(file).get("graph") != (file_sha256(file) if file.is_file() else ""):
            print(f"dulbe-peft: the image tower is exported once, to {file}", file=sys.stderr)
            module = onnx_graphs.ImageEncoder(_plain(clip))
            if onnx_graphs.is_large(module):
                raise ValueError(f"its weights take more than {LARGEST_FILE:,} bytes")
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as temporary:
                onnx_graphs.write_graph(temporary, module, torch.zeros(2, *shape), (PIXELS, EMBEDDING))
            write_json(file.with_suffix(".json"), {"graph": file_sha256(file)})

    on_main_process(export)
    return file


def has_graph(sha256: str | None) -> bool:
    """Return whether this machine has an int8 graph and OpenVINO, which runs it."""
    if sha256 is None or find_spec("openvino") is None:
        return False
    with suppress(ValueError):
        return int8_graph(sha256).is_file()
    return False


def int8_graph(sha256: str) -> Path:
    """Return the file of the int8 graph with this SHA-256; raise a `ValueError` if this machine does not have it."""
    file = store_path().with_suffix(".encoders") / f"{sha256[:32]}.onnx"
    if not file.is_file() or file_sha256(file) != sha256:
        raise ValueError(
            f"the int8 graph {sha256[:32]} is not in {file.parent}: copy it from the machine that learned, "
            "or learn again"
        )
    return file


def quantised(file: Path, batches: Sequence[Tensor]) -> Tower:
    """Return the exported tower in int8, calibrated by NNCF on batches of pixel values."""
    with installed("int8", "openvino"):
        variable = os.environ.get("NNCF_CI")
        os.environ["NNCF_CI"] = "1"  # otherwise NNCF sends telemetry
        try:
            import nncf
        finally:
            os.environ.pop("NNCF_CI") if variable is None else os.environ.update(NNCF_CI=variable)
        import onnx
    print(f"dulbe-peft: int8 is calibrated on {sum(map(len, batches))} images", file=sys.stderr)
    nncf.set_log_level(logging.ERROR)
    data = nncf.Dataset([{PIXELS: batch.numpy()} for batch in batches])
    graph = onnx.load(file)
    unquantised = nncf.IgnoredScope(names=_products_in_float(graph.graph.node))
    options = {"model_type": nncf.ModelType.TRANSFORMER, "subset_size": len(batches), "ignored_scope": unquantised}
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():  # NNCF prints progress bars
        warnings.simplefilter("ignore")
        model = nncf.quantize(graph, data, **options)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        written = Path(folder) / "made.onnx"
        onnx.save(model, written)
        calibrated = written.rename(file.with_name(f"{file_sha256(written)[:32]}.onnx"))
    return Tower(calibrated, "openvino", "int8")


def _products_in_float(nodes: Iterable[Any]) -> list[str]:
    """Return the names of the matrix products outside the layers of `IN_INT8`.

    torch's exporter writes the module that a node belongs to into the node's metadata.
    """

    def is_int8(node: Any) -> bool:
        return any(f".{name}: " in note.value for note in node.metadata_props for name in IN_INT8)

    return [node.name for node in nodes if node.op_type in ("MatMul", "Gemm", "Conv") and not is_int8(node)]


def _records(file: Path) -> dict[str, Any]:
    """Return what is recorded beside a graph: its SHA-256 and each comparison with torch."""
    records = file.with_suffix(".json")
    return dict(read_json(records)) if records.is_file() else {}


def _plain(clip: Any) -> Any:
    """Return a copy of the model whose adapters are merged into the weights, W_0 + dW, without its text tower."""
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
    """Compile a graph with OpenVINO; return it as a function of pixel values, and the precision of its float layers.

    It runs in as many threads as torch.
    """
    with installed("OpenVINO", "openvino"):
        import openvino
    core = openvino.Core()
    has_bfloat16 = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if precision == "bfloat16" and not has_bfloat16:
        raise ValueError("OpenVINO has no bfloat16 on this processor")
    rounding = "f32" if precision == "float32" or not has_bfloat16 else "bf16"
    hints = {"INFERENCE_PRECISION_HINT": rounding, "INFERENCE_NUM_THREADS": str(torch.get_num_threads())}
    compiled = core.compile_model(str(file), "CPU", hints)
    return lambda rows: torch.from_numpy(compiled({0: rows.numpy()})[0].copy()), rounding
