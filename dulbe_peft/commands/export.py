"""`dulbe-peft export`: write a saved learner in a form that works without this package."""

from collections.abc import Callable
from typing import Any

from dulbe_peft.commands.options import argument, command, learner_options, option
from dulbe_peft.commands.outputs import FOLDER, claim, overwrite_option, say_next
from dulbe_peft.deployment import FORMATS, PRECISIONS


@command()
@learner_options(choose=True, encodes=False)
@argument("output", "folder for the export; only an earlier export is replaced")
@option("--format", "kind", choice=FORMATS, default="lora", help="what to write (lora)")
@option("--compress-to", type=int, metavar="RANK", help="lora: best approximation of this rank; prints its error")
@option("--precision", choice=PRECISIONS, default="float32", help="of the encoder's weights in a graph (float32)")
@overwrite_option
def export(
    learner: str,
    load: Callable[[], Any],
    output: str,
    kind: str,
    compress_to: int | None,
    precision: str,
    overwrite: bool,
) -> int:
    """example:
      dulbe-peft export out exported --format onnx

    lora:             stock LoRA, for a base model that is served anyway
    transformers:     an image classifier that pipeline("image-classification", FOLDER, trust_remote_code=True) reads
    onnx:             graphs of the encoder and of the classifier; first: pip install 'dulbe_peft[onnx]'
    transformers.js:  one graph that JavaScript loads; needs the same

    Each format holds the learner's classifier, and a README.md with the lines of code that use it.
    """
    claim(("OUTPUT", output, FOLDER), reads=[learner], overwrite=overwrite)
    loaded = load()
    from dulbe_peft.adapter.export import COMPRESSION_FILE
    from dulbe_peft.deployment.export import export_learner
    from dulbe_peft.deployment.graph import GRAPH_FACTS_FILE
    from dulbe_peft.utils.files import read_json

    folder = export_learner(loaded, output, kind, None, compress_to, precision)
    if compress_to is not None:
        report = read_json(folder / COMPRESSION_FILE)
        errors = {name: row["relative_error"] for name, row in report["layers"].items()}
        worst = max(errors, key=errors.__getitem__)
        print(f"relative error {report['relative_error']:.2e} over all layers, most in {worst}: {errors[worst]:.2e}")
    if kind == "onnx":
        difference = read_json(folder / GRAPH_FACTS_FILE)["largest_difference"]
        print(f"largest difference of a probability from PyTorch's, on random pixels: {difference:.1e}")
    print(f"written: {folder}")
    print(f"how to use it: {folder / 'README.md'}")
    say_next("serve", learner)
    return 0
