"""Benchmarks of the cost and the accuracy of the library; `docs/performance.md` has the figures.

Each file is one command, such as `python -m research.benchmarks.step --threads 2 --batch 4`, to run in the root of the
repository. A cost is usually a ratio of two sides that take turns in one process on the same inputs.
"""
