"""example:
  dulbe-peft export out exported --format onnx

lora:             a standard LoRA adapter for the base model, if you serve that model anyway
transformers:     an image classifier for pipeline("image-classification", FOLDER, trust_remote_code=True)
onnx:             graphs of the encoder and of the classifier; needs the extra onnx
transformers.js:  one graph for JavaScript; needs the extra onnx

Each format contains the learner's classifier, and a README.md with the code to use it.
"""

import sys

from dulbe_peft.photos.commands.advice import print_next_command
from dulbe_peft.photos.commands.flags import OVERWRITE
from dulbe_peft.photos.commands.options import Load, command, learner_options
from dulbe_peft.photos.commands.paths import FOLDER, claim
from dulbe_peft.photos.deployment import FORMATS, PRECISIONS
from dulbe_peft.utils.settings import setting


@command()
@learner_options(choose=True, encodes=False)
def export(
    learner: str,
    load: Load,
    output: str = setting(..., "folder for the export; only an earlier export is replaced", place=True),
    kind: str | None = setting(
        None,
        "the format of the export (default: lora if the learner has trained, otherwise transformers)",
        flag="--format",
        choice=FORMATS,
    ),
    compress_to: int | None = setting(
        None, "for lora: write the best approximation of this rank, and print its error"
    ),
    precision: str = setting("float32", "precision of the encoder's weights in a graph", choice=PRECISIONS),
    overwrite: bool = OVERWRITE,
) -> None:
    claim(("OUTPUT", output, FOLDER), overwrite=overwrite)
    loaded = load()
    from dulbe_peft.adapter.lora_export import COMPRESSION_FILE
    from dulbe_peft.photos.deployment.formats import default_format, export_learner
    from dulbe_peft.photos.deployment.graph import GRAPH_FACTS_FILE
    from dulbe_peft.utils.files import read_json

    kind = kind or default_format(loaded.state)
    folder = export_learner(loaded, output, kind, None, compress_to, precision)
    if compress_to is not None:
        error = read_json(folder / COMPRESSION_FILE)["relative_error"]
        print(f"relative error {error:.2e} over all layers; {COMPRESSION_FILE} has the error of each layer")
    if kind == "onnx":
        difference = read_json(folder / GRAPH_FACTS_FILE)["largest_difference"]
        print(f"largest difference from PyTorch's probabilities, on random pixels: {difference:.1e}")
    if doubt := loaded.state.doubt:
        print(doubt, file=sys.stderr)
    print(f"written, in the format {kind}: {folder}")
    print(f"how to use it: {folder / 'README.md'}")
    print_next_command("serve", learner)
