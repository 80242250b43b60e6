"""Comparisons, published numbers, diagnostics and benchmarks: run from a clone, in no wheel."""
