"""Comparisons, published numbers, diagnostics and benchmarks. They run from a clone and are not part of the wheel."""
