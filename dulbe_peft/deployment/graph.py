"""Model and classifier as one ONNX graph from pixel values to probabilities."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dulbe_peft.classifiers import Classifier
from dulbe_peft.deployment.classifier import class_facts
from dulbe_peft.deployment.merged import PixelsToProbabilities, merged_model
from dulbe_peft.deployment.pixels import processor_steps
from dulbe_peft.encoders.loading import image_size
from dulbe_peft.training.state import LearnerState
from dulbe_peft.utils.files import write_json

GRAPH_FILE = "model.onnx"
GRAPH_FACTS_FILE = "model.json"
INPUT, OUTPUT = "pixel_values", "probabilities"
OPSET = 20
LARGEST_FILE = 1_500_000_000  # bytes of weights in one file; an ONNX file holds less than 2 GiB
TOLERANCE = 1e-4
CHECKED_BATCHES = (1, 3, 8)


def write_graph(folder: Path, state: LearnerState, classifier: Classifier) -> dict[str, Any]:
    """Write `model.onnx` and `model.json` into an existing folder, and return what the second one holds."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"the export to ONNX needs the package {error.name}: pip install 'dulbe_peft[onnx]'"
        ) from error
    module = PixelsToProbabilities(merged_model(state), classifier).eval()
    size = image_size(state.base, state.processor)
    program = _exported(module, torch.zeros(2, 3, size, size), classifier.name)
    facts = class_facts(state, classifier)
    facts |= {"image_size": [size, size], "preprocessing": processor_steps(state.processor)}
    program.model.metadata_props.update({name: json.dumps(value) for name, value in facts.items()})
    weights = sum(tensor.nbytes for tensor in module.state_dict().values())
    program.save(str(folder / GRAPH_FILE), external_data=weights > LARGEST_FILE)
    facts["largest_difference"] = _largest_difference(folder / GRAPH_FILE, module, size)
    write_json(folder / GRAPH_FACTS_FILE, facts)
    return facts


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
def _exported(module: PixelsToProbabilities, pixels: torch.Tensor, name: str) -> Any:
    try:
        with _quiet_exporter():
            return torch.onnx.export(
                module,
                (pixels,),
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                input_names=[INPUT],
                output_names=[OUTPUT],
                dynamic_shapes={INPUT: {0: torch.export.Dim("batch")}},
            )
    except torch.onnx.OnnxExporterError as error:
        raise ValueError(f"the model with the {name!r} classifier cannot become an ONNX graph: {error}") from error


@torch.no_grad()
def _largest_difference(path: Path, module: PixelsToProbabilities, size: int) -> float:
    """The largest difference of a probability between onnxruntime and PyTorch; too large a one is a `ValueError`."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    generator, largest = torch.Generator().manual_seed(0), 0.0
    for batch in CHECKED_BATCHES:
        pixels = torch.randn(batch, 3, size, size, generator=generator)
        found = torch.from_numpy(session.run(None, {INPUT: pixels.numpy()})[0])
        largest = max(largest, float((found - module(pixels)).abs().max()))
    if not largest <= TOLERANCE:
        raise ValueError(f"the ONNX graph gives probabilities that differ by {largest:.1e} from PyTorch's")
    return largest
