"""Give a task's batches to a `torch.utils.data.DataLoader` in the same order as the learner's own training loop."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from dulbe_peft.encoders.pixels import PixelRow
from dulbe_peft.training.task_trainer import TaskTrainer, epoch_order
from dulbe_peft.utils.processes import padded_shard

# An epoch, the indices of this process's rows of a batch, and those of all its rows.
Position = tuple[int, list[int], list[int]]


class Order:
    """Batch sampler of a task. It yields the epoch, the indices of this process's rows, and those of all rows."""

    def __init__(self, size: int, batch_size: int, seed: int, task: int) -> None:
        self.size, self.batch_size, self.seed, self.task, self.epoch = size, batch_size, seed, task, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return math.ceil(self.size / self.batch_size)

    def __iter__(self) -> Iterator[list[Position]]:
        order = epoch_order(self.size, self.seed, self.task, self.epoch)
        for start in range(0, self.size, self.batch_size):
            batch = order[start : start + self.batch_size]
            yield [(self.epoch, padded_shard(batch), batch)]


class EpochLoader(DataLoader[Any]):
    """A data loader that passes the number of a new epoch on to its batch sampler."""

    def __init__(self, batches: Dataset[dict[str, torch.Tensor]], order: Order, settings: dict[str, Any]) -> None:
        super().__init__(batches, batch_sampler=order, **settings)

    def set_epoch(self, epoch: int) -> None:
        cast(Order, self.batch_sampler).set_epoch(epoch)


class WholeBatches(Dataset[dict[str, torch.Tensor]]):
    """Data set of batches, indexed by `Order`: the pixels of this process's rows, labels and indices of all rows."""

    def __init__(self, task: TaskTrainer) -> None:
        self.images, self.seed, self.task = task.images, task.args.seed, task.index
        self.augment = task.args.augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: Position) -> dict[str, torch.Tensor]:
        epoch, rows, batch = key
        images = self.images.view(self.augment, self.seed, self.task, epoch + 1)
        pixels = torch.stack([images[row][0] for row in rows])
        labels = torch.as_tensor(self.images.labels[batch])
        return {"pixel_values": pixels, "labels": labels, "index": torch.tensor(batch)}


def collated(rows: Sequence[PixelRow]) -> dict[str, torch.Tensor]:
    """Collate rows of a `PixelDataset` into a batch for transformers."""
    return {"pixel_values": torch.stack([row[0] for row in rows]), "labels": torch.tensor([row[1] for row in rows])}
