"""Write model and classifier as ONNX graphs: an encoder and a head, or one graph for transformers.js.

onnx              encoder.onnx  pixel values to unit features     head.onnx  unit features to probabilities
transformers.js   onnx/model.onnx  pixel values to log-scores, in the layout that transformers.js loads

Model cards quote the functions that preprocess an image with only Pillow and numpy.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from dulbe_peft.checkpoints.saving import PROCESSOR_FOLDER
from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.data.decoding import decode_smaller, managed, standard_rgb, turn_of
from dulbe_peft.encoders import onnx_graphs
from dulbe_peft.encoders.loading import encoder_of, image_shape
from dulbe_peft.encoders.onnx_graphs import EMBEDDING, LARGEST_FILE, PIXELS
from dulbe_peft.photos.deployment.parts import CARDS, Head, class_facts, merged_model
from dulbe_peft.training.state import LearnerState
from dulbe_peft.utils.files import write_json
from dulbe_peft.utils.templates import render

ENCODER_FILE, HEAD_FILE, GRAPH_FACTS_FILE = "encoder.onnx", "head.onnx", "model.json"
PROBABILITIES, LOGITS = "probabilities", "logits"
# precision -> (suffix of the file's stem, name of the precision in transformers.js)
_NAMES = {"float32": ("", "fp32"), "float16": ("_fp16", "fp16"), "int8": ("_quantized", "q8")}
# Sizes of images on which preprocessing is compared, and the largest difference of pixel values that is rounding.
SIZES, PIXEL_TOLERANCE = ((301, 200), (97, 331), (64, 64), (17, 23), (640, 481)), 1e-5
CHECKED_BATCHES, TOLERANCE = (1, 3, 8), 1e-4  # of graphs: images in a batch, and the difference of probabilities


def rgb(image: Image.Image, side: int = 0) -> Image.Image:
    """Return an image as the learner reads it: upright, in sRGB, over white where it is transparent."""
    decode_smaller(image, side)
    image.load()
    turn = turn_of(image)
    image = standard_rgb(image)
    return image if turn is None else image.transpose(turn)


# The source of the functions that read an image, for model cards.
READS = "\n\n".join(inspect.getsource(function) for function in (managed, decode_smaller, turn_of, standard_rgb, rgb))


def pixel_values(image: Image.Image, steps: dict) -> np.ndarray:
    """Return the model's input for an image, float32, (3, height, width)."""
    image = rgb(image, steps["jpeg_side"])
    size = steps["size"] or [steps["shortest_edge"] * side // min(image.size) for side in image.size]
    image = image.resize(size, steps["resample"])
    if steps["crop"]:
        left, top = [(side - part) // 2 for side, part in zip(image.size, steps["crop"], strict=True)]
        image = image.crop((left, top, left + steps["crop"][0], top + steps["crop"][1]))
    values = np.asarray(image, dtype=np.float32) * np.float32(steps["rescale"])
    return ((values - np.float32(steps["mean"])) / np.float32(steps["std"])).transpose(2, 0, 1)


def processor_steps(processor: Any, jpeg_side: int = 0) -> dict[str, object] | None:
    """Return the `steps` with which `pixel_values` reproduces a transformers processor, or None if it cannot.

    `jpeg_side` is the `side` of `decode_smaller`.
    """
    image_processor = processor.image_processor
    try:
        settings = image_processor.to_dict()
        size, crop = settings["size"], settings.get("crop_size") or {}
        steps = {
            "size": [size["width"], size["height"]] if "width" in size else None,
            "shortest_edge": size.get("shortest_edge"),
            "resample": int(settings["resample"]),
            "crop": [crop["width"], crop["height"]] if settings.get("do_center_crop") else None,
            "rescale": settings["rescale_factor"],
            "mean": list(settings["image_mean"]),
            "std": list(settings["image_std"]),
            "jpeg_side": jpeg_side,
        }
        random = np.random.default_rng(0)
        for width, height in SIZES:
            image = Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
            expected = np.asarray(image_processor(images=image, return_tensors="np")["pixel_values"][0])
            values = pixel_values(image, steps)
            if values.shape != expected.shape or np.abs(values - expected).max() > PIXEL_TOLERANCE:
                return None
    except (AttributeError, KeyError, TypeError, ValueError):  # the processor has different settings
        return None
    return steps


def write_graphs(folder: Path, state: LearnerState, classifier: Classifier, precision: str) -> str:
    """Write the encoder in this precision, the head and `model.json`; return the code that uses them."""
    encoder, head, shape = _parts(state, classifier)
    steps = processor_steps(state.processor, state.jpeg_side)
    facts = class_facts(state, classifier)
    facts |= {"image_size": list(shape[1:]), "preprocessing": steps, "precision": precision}
    _write(folder / ENCODER_FILE, encoder, torch.zeros(2, *shape), (PIXELS, EMBEDDING), precision)
    example = torch.zeros(2, classifier.embed_dim)
    onnx_graphs.write_graph(folder / HEAD_FILE, head, example, (EMBEDDING, PROBABILITIES), facts)
    run_encoder, run_head = onnx_graphs.session(folder / ENCODER_FILE), onnx_graphs.session(folder / HEAD_FILE)
    facts["largest_difference"] = _largest_difference(
        lambda pixels: run_head(run_encoder(pixels)), nn.Sequential(encoder, head), shape, precision
    )
    write_json(folder / GRAPH_FACTS_FILE, facts)
    state.processor.save_pretrained(str(folder / PROCESSOR_FOLDER))
    return render(
        "use_onnx.txt",
        CARDS,
        image_processor=encoder_of(state.base).image_processor,
        processor_folder=PROCESSOR_FOLDER,
        encoder_file=ENCODER_FILE,
        head_file=HEAD_FILE,
        facts_file=GRAPH_FACTS_FILE,
        rgb=READS,
        jpeg_side=state.jpeg_side,
        # The code uses Pillow and numpy, or the image processor if they cannot reproduce its values.
        pixel_values=None if steps is None else inspect.getsource(pixel_values),
    )


def write_for_javascript(folder: Path, state: LearnerState, classifier: Classifier, precision: str, name: str) -> str:
    """Write graph, configuration and image processor in the layout of transformers.js; return the code to use them."""
    encoder, head, shape = _parts(state, classifier, probabilities=False)
    whole, (ending, dtype) = nn.Sequential(encoder, head), _NAMES[precision]
    path = folder / "onnx" / f"model{ending}.onnx"
    path.parent.mkdir()
    _write(path, whole, torch.zeros(2, *shape), (PIXELS, LOGITS), precision)
    run = onnx_graphs.session(path)
    _largest_difference(
        lambda pixels: run(pixels).softmax(dim=1), lambda pixels: whole(pixels).softmax(dim=1), shape, precision
    )
    labels = {str(index): label for index, label in enumerate(classifier.class_names)}
    # transformers.js selects its class by the model type, and the class for "vit" only runs the graph.
    config = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "id2label": labels}
    write_json(folder / "config.json", config | {"label2id": {label: int(index) for index, label in labels.items()}})
    settings = state.processor.image_processor.to_dict()
    kind = str(settings["image_processor_type"]).removesuffix("Pil").removesuffix("Fast")
    write_json(folder / "preprocessor_config.json", settings | {"image_processor_type": kind})
    return render("use_javascript.txt", CARDS, name=name, dtype=dtype)


def _parts(
    state: LearnerState, classifier: Classifier, probabilities: bool = True
) -> tuple[onnx_graphs.ImageEncoder, Head, tuple[int, ...]]:
    """Return the encoder, the head and the shape of an image; raise an `ImportError` if a package is missing."""
    try:
        onnx_graphs.check_exportable(state.base)
    except ValueError as error:
        raise ValueError(f"{error}: use 'transformers' or 'lora'") from error
    encoder, head = onnx_graphs.ImageEncoder(merged_model(state)), Head(classifier, probabilities)
    return encoder.eval(), head.eval(), image_shape(state.base, state.processor)


def _write(path: Path, module: nn.Module, example: Tensor, names: tuple[str, str], precision: str) -> None:
    """Write one graph in the given precision; `names` are those of its input and output."""
    if precision != "float32" and onnx_graphs.is_large(module):
        raise ValueError(f"{precision} is only available for graphs below {LARGEST_FILE:,} bytes: use float32")
    onnx_graphs.write_graph(path, module, example, names)
    if precision != "float32":
        with onnx_graphs.quiet_exporter():
            _reduce(path, precision)


def _reduce(path: Path, precision: str) -> None:
    import onnx

    model = onnx.load(path)
    if precision == "float16":
        from onnxruntime.transformers.float16 import convert_float_to_float16

        onnx.save(convert_float_to_float16(model, keep_io_types=True), path)
        return
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.quant_utils import add_pre_process_metadata

    del model.graph.value_info[:]  # the shapes recorded by the exporter contradict those that onnx infers
    add_pre_process_metadata(model)  # avoids advice to optimise the graph, which the exporter has already done
    quantize_dynamic(model, path, ["MatMul", "Gemm"], per_channel=True, weight_type=QuantType.QInt8)


@torch.no_grad()
def _largest_difference(
    actual: Callable[[Tensor], Tensor], expected: Callable[[Tensor], Tensor], shape: tuple[int, ...], precision: str
) -> float:
    """Return the largest difference between probabilities of onnxruntime and of PyTorch on random pixels.

    In float32, a difference above `TOLERANCE` raises a ValueError.
    """
    generator, largest = torch.Generator().manual_seed(0), 0.0
    for batch in CHECKED_BATCHES:
        pixels = torch.randn(batch, *shape, generator=generator)
        largest = max(largest, float((actual(pixels) - expected(pixels)).abs().max()))
    if precision == "float32" and not largest <= TOLERANCE:
        raise ValueError(f"the ONNX graph gives probabilities that differ by {largest:.1e} from PyTorch's")
    return largest
