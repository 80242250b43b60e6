"""Subspaces of weights: `occupation.py` collects the statistics S of old tasks, `allocation.py` plans the modes."""
