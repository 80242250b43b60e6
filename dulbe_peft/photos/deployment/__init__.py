"""What leaves the package: exports, and functions of batches."""

FORMATS = ("lora", "transformers", "onnx", "transformers.js")
PRECISIONS = ("float32", "float16", "int8")
