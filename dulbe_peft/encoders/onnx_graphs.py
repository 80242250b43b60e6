"""Write ONNX graphs of modules with torch's exporter, and run them with onnxruntime."""

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dulbe_peft.encoders.loading import encoder_of, unit_image_embeds
from dulbe_peft.utils.extras import installed

PIXELS, EMBEDDING = "pixel_values", "image_embeds"
OPSET = 20
LARGEST_FILE = 1_500_000_000  # bytes of weights in one file; an ONNX file must be smaller than 2 GiB


class ImageEncoder(nn.Module):
    """Map pixel values (batch, 3, height, width) to unit features (batch, d) with a model without adapters."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        return unit_image_embeds(self.model, pixel_values)


def check_exportable(model: object) -> None:
    """Raise an `ImportError` that names a missing package, or a `ValueError` if the model cannot be exported."""
    with installed("ONNX", "onnx"):
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    if encoder_of(model).patches:
        raise ValueError(
            f"{encoder_of(model).title} computes positions for the size of each image, which a graph cannot do"
        )


def is_large(module: nn.Module) -> bool:
    """Return whether the weights are too large for one ONNX file."""
    return sum(tensor.nbytes for tensor in module.state_dict().values()) > LARGEST_FILE


@torch.no_grad()
def write_graph(
    path: Path, module: nn.Module, example: Tensor, ends: tuple[str, str], facts: dict[str, object] | None = None
) -> None:
    """Write the graph of a module for any batch size.

    Args:
        path: File to write.
        module: Maps one tensor to another.
        example: An input, (batch, ...).
        ends: Names of the input and the output.
        facts: Metadata of the graph, written as JSON.

    Raises:
        ValueError: If torch cannot export the module.
    """
    start, end = ends
    batch = ({0: torch.export.Dim("batch")},)
    options: dict[str, object] = {"dynamo": True, "verbose": False, "opset_version": OPSET, "dynamic_shapes": batch}
    try:
        with quiet_exporter():
            program: Any = torch.onnx.export(module, (example,), input_names=[start], output_names=[end], **options)
    except torch.onnx.OnnxExporterError as error:
        raise ValueError(f"torch cannot export the graph from {start} to {end}: {error}") from error
    program.model.metadata_props.update({name: json.dumps(value) for name, value in (facts or {}).items()})
    program.save(str(path), external_data=is_large(module))


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Silence the exporter's warnings about its packages and versions; errors are still raised."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:  # no others, because another thread may need to log
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def session(path: Path) -> Callable[[Tensor], Tensor]:
    """Return a graph as a function of its input, (batch, ...), that runs in as many threads as torch."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    graph = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = graph.get_inputs()[0].name
    return lambda rows: torch.from_numpy(graph.run(None, {name: rows.numpy()})[0])
