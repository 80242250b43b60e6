"""Model and classifier as ONNX graphs: an encoder and a head, or both in one for transformers.js.

onnx              encoder.onnx  pixel values to unit features     head.onnx  these to probabilities
transformers.js   onnx/model.onnx  pixel values to log-scores, in the layout that the package of this name loads
"""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dulbe_peft.checkpoints.saving import PROCESSOR_FOLDER
from dulbe_peft.classifiers import Classifier
from dulbe_peft.deployment.classifier import class_facts
from dulbe_peft.deployment.merged import Head, ImageEncoder, merged_model
from dulbe_peft.deployment.pixels import processor_steps
from dulbe_peft.encoders.loading import image_size
from dulbe_peft.training.state import LearnerState
from dulbe_peft.utils.files import write_json

ENCODER_FILE, HEAD_FILE, GRAPH_FACTS_FILE = "encoder.onnx", "head.onnx", "model.json"
PIXELS, EMBEDDING, PROBABILITIES, LOGITS = "pixel_values", "image_embeds", "probabilities", "logits"
# What transformers.js calls each: the end of the file's name, and its `dtype`.
PRECISIONS = {"float32": ("", "fp32"), "float16": ("_fp16", "fp16"), "int8": ("_quantized", "q8")}
OPSET = 20
LARGEST_FILE = 1_500_000_000  # bytes of weights in one file; an ONNX file holds less than 2 GiB
TOLERANCE = 1e-4
CHECKED_BATCHES = (1, 3, 8)


def write_graphs(folder: Path, state: LearnerState, classifier: Classifier, precision: str) -> dict[str, Any]:
    """Write encoder, head and `model.json` into an existing folder, and return what the last one holds.

    The precision is the encoder's; the head stays in float32. A learner with further classes has the same encoder.
    """
    encoder, head, size = _parts(state, classifier)
    facts = class_facts(state, classifier)
    facts |= {"image_size": [size, size], "preprocessing": processor_steps(state.processor), "precision": precision}
    _write(folder / ENCODER_FILE, encoder, torch.zeros(2, 3, size, size), (PIXELS, EMBEDDING), precision)
    _write(folder / HEAD_FILE, head, torch.zeros(2, classifier.embed_dim), (EMBEDDING, PROBABILITIES), facts=facts)
    run_encoder, run_head = _session(folder / ENCODER_FILE), _session(folder / HEAD_FILE)
    facts["largest_difference"] = _largest_difference(
        lambda pixels: run_head(run_encoder(pixels)), nn.Sequential(encoder, head), size, precision
    )
    write_json(folder / GRAPH_FACTS_FILE, facts)
    state.processor.save_pretrained(str(folder / PROCESSOR_FOLDER))
    return facts


def write_for_javascript(folder: Path, state: LearnerState, classifier: Classifier, precision: str) -> None:
    """Write one graph, the configuration and the image processor as transformers.js looks for them."""
    encoder, head, size = _parts(state, classifier, probabilities=False)
    whole = nn.Sequential(encoder, head)
    path = folder / "onnx" / f"model{PRECISIONS[precision][0]}.onnx"
    path.parent.mkdir()
    _write(path, whole, torch.zeros(2, 3, size, size), (PIXELS, LOGITS), precision)
    run = _session(path)
    _largest_difference(
        lambda pixels: run(pixels).softmax(dim=1), lambda pixels: whole(pixels).softmax(dim=1), size, precision
    )
    names = {str(place): name for place, name in enumerate(classifier.class_names)}
    # The package picks its class by this type, and the class does no more than run the graph.
    config = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "id2label": names}
    write_json(folder / "config.json", config | {"label2id": {name: int(place) for place, name in names.items()}})
    settings = state.processor.image_processor.to_dict()
    kind = str(settings["image_processor_type"]).removesuffix("Pil").removesuffix("Fast")
    write_json(folder / "preprocessor_config.json", settings | {"image_processor_type": kind})


def _need_onnx() -> None:
    """Raise an ImportError that names the missing package."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"the export to ONNX needs the package {error.name}: pip install 'dulbe_peft[onnx]'"
        ) from error


def _parts(state: LearnerState, classifier: Classifier, probabilities: bool = True) -> tuple[ImageEncoder, Head, int]:
    _need_onnx()
    model = merged_model(state)
    return ImageEncoder(model).eval(), Head(classifier, probabilities).eval(), image_size(state.base, state.processor)


def _write(
    path: Path,
    module: nn.Module,
    example: Tensor,
    ends: tuple[str, str],
    precision: str = "float32",
    facts: dict[str, Any] | None = None,
) -> None:
    """Write one graph, and bring it to its precision; `facts` go into its metadata."""
    program = _exported(module, example, ends)
    program.model.metadata_props.update({name: json.dumps(value) for name, value in (facts or {}).items()})
    large = sum(tensor.nbytes for tensor in module.state_dict().values()) > LARGEST_FILE
    program.save(str(path), external_data=large)
    if precision == "float32":
        return
    reduced = path.with_name(f"reduced-{path.name}")
    with _quiet_exporter():
        _reduce(path, reduced, precision, large)
    for written in path.parent.glob(f"{path.name}*"):
        written.unlink()
    shutil.move(reduced, path)


def _reduce(path: Path, reduced: Path, precision: str, large: bool) -> None:
    """Write a graph again in another precision."""
    import onnx

    if large:
        raise ValueError(f"{precision} is served for graphs below {LARGEST_FILE:,} bytes: take float32")
    if precision == "float16":
        from onnxruntime.transformers.float16 import convert_float_to_float16

        onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=True), reduced)
        return
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.quant_utils import add_pre_process_metadata

    model = onnx.load(path)
    del model.graph.value_info[:]  # what the exporter noted of shapes contradicts what onnx infers
    add_pre_process_metadata(model)  # else it advises to optimise the graph, which the exporter has done
    quantize_dynamic(model, reduced, ["MatMul", "Gemm"], per_channel=True, weight_type=QuantType.QInt8)


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Hold back what the exporter says about packages and versions of its own; its errors come through."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:  # and no others: another thread may have something to say
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


@torch.no_grad()
def _exported(module: nn.Module, example: Tensor, ends: tuple[str, str]) -> Any:
    start, end = ends
    try:
        with _quiet_exporter():
            return torch.onnx.export(
                module,
                (example,),
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                input_names=[start],
                output_names=[end],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
            )
    except torch.onnx.OnnxExporterError as error:
        raise ValueError(f"the graph from {start} to {end} cannot be made: {error}") from error


def _session(path: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda rows: torch.from_numpy(session.run(None, {name: rows.numpy()})[0])


@torch.no_grad()
def _largest_difference(
    found: Callable[[Tensor], Tensor], expected: Callable[[Tensor], Tensor], size: int, precision: str
) -> float:
    """The largest difference of a probability between onnxruntime and PyTorch; too large a one is a `ValueError`."""
    generator, largest = torch.Generator().manual_seed(0), 0.0
    for batch in CHECKED_BATCHES:
        pixels = torch.randn(batch, 3, size, size, generator=generator)
        largest = max(largest, float((found(pixels) - expected(pixels)).abs().max()))
    if precision == "float32" and not largest <= TOLERANCE:
        raise ValueError(f"the ONNX graph gives probabilities that differ by {largest:.1e} from PyTorch's")
    return largest
