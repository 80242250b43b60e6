"""What the method costs beside what a user would run instead; `docs/performance.md` has the figures.

One command a file, such as `python -m research.benchmarks.step --threads 2 --batch 4`, from the root of the
repository. Every figure is a ratio of two sides that take turns in one process on the same inputs.
"""
