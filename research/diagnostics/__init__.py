"""Measure what training changed, by layer and by bridge depth, as in the paper's diagnostic figures."""
