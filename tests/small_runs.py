"""Quick settings, and the tasks of two classes each that folders of digits give."""

from __future__ import annotations

from dulbe_peft import class_incremental_tasks, load_data

QUICK = {"epochs": 1, "batch_size": 4, "device": "cpu", "progress": False, "pixel_cache_mb": 0}


def tasks_of(root, order=None):
    """Tasks of two classes each; `order` holds names or numbers of the classes, None is that of the names."""
    order = None if order is None else list(order)
    return class_incremental_tasks(load_data(root, "train"), load_data(root, "test"), increment=2, class_order=order)
