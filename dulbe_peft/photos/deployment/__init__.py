"""Export learners to other formats, and apply them to batches of data-processing engines."""

FORMATS = ("lora", "transformers", "onnx", "transformers.js")
PRECISIONS = ("float32", "float16", "int8")
