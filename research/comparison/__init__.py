"""Comparisons of methods and classifiers on the same streams: the plan, the runs, and the table of results."""
