"""Preprocess the images of a data set for the model, and read batches of them in threads or worker processes."""

import copy
import math
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info
from tqdm.auto import tqdm

from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.data import decoding
from dulbe_peft.data.augmentation import augmented
from dulbe_peft.data.decoding import UnreadableImageError
from dulbe_peft.data.images import LabelledImages, PixelMemory
from dulbe_peft.encoders.loading import ImageOnlyProcessor, encoder_of, image_shape, pixel_values
from dulbe_peft.utils import processes
from dulbe_peft.utils.workers import available_cores

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMAGE_RESIZES = ("crop", "squash")
# A JPEG is decoded with at least this many times the pixels that the processor resizes a side to, and with at least so
# many. `research.benchmarks.scaled` compares the answers with those for whole images: with less, some change.
MARGIN, LEAST_SIDE = 6, 1344
PixelRow = tuple[torch.Tensor, int, int, bytes, str]  # pixel values, label, index, content, error ("" if readable)


def with_image_resize(processor: Any, model: "PreTrainedModel", resize: str) -> Any:
    """Return a copy of the processor with another resize.

    "crop" resizes the short side and crops the centre; "squash" resizes the whole image to a square.
    """
    if resize not in IMAGE_RESIZES:
        raise ValueError(f"image_resize must be one of {', '.join(IMAGE_RESIZES)}, got {resize!r}")
    old, size = processor.image_processor, image_shape(model)[-1]
    if encoder_of(model).patches or not hasattr(old, "do_center_crop"):
        raise ValueError(f"image_resize is {resize!r}, but {type(old).__name__} cannot crop: leave image_resize out")
    square, crop = {"height": size, "width": size}, resize == "crop"
    new = type(old).from_dict(
        old.to_dict()
        | {"do_resize": True, "do_center_crop": crop, "size": {"shortest_edge": size} if crop else square}
        | {"crop_size": square}
    )
    if isinstance(processor, ImageOnlyProcessor):
        return ImageOnlyProcessor(new)
    return type(processor)(image_processor=new, tokenizer=processor.tokenizer)


def jpeg_side(processor: Any, model: object, whole_images: bool) -> int:
    """Return how many pixels each side of a JPEG file needs when it is decoded, or 0 if it is decoded whole.

    It is decoded whole unless the processor resizes every image to the same short side, or to the same size.
    """
    settings = processor.image_processor.to_dict() if hasattr(processor.image_processor, "to_dict") else {}
    size, resizes = settings.get("size"), settings.get("do_resize") is True and not encoder_of(model).patches
    if whole_images or not resizes or not isinstance(size, dict):
        return 0
    fixed = bool(size) and {*size} <= {"shortest_edge", "height", "width"}
    return max(MARGIN * max(size.values()), LEAST_SIDE) if fixed else 0


class PixelDataset(Dataset[PixelRow]):
    """Images as pixel values of `image_shape`, cached in memory if all of them fit into `cache_bytes`.

    After `keep_all`, the pixel values of files are those of the whole data set's memory, for all of its slices.
    """

    skips = False  # whether an unreadable image gives zeros instead of an error

    def __init__(
        self,
        images: LabelledImages,
        processor: Any,
        image_shape: tuple[int, ...],
        cache_bytes: int = 0,
        side: int = 0,
    ) -> None:
        self.images = images
        self.side = side  # as for `decode_smaller`
        self.labels = images.labels
        self.processor = processor
        self.image_shape = image_shape
        self.bytes, self.memory = 4 * math.prod(image_shape), images.pixels
        kept = self.memory.bytes > 0 and self.memory.way == self.way
        fits = not kept and 0 < self.bytes * len(images) <= cache_bytes
        if fits:
            _make_room(self.bytes * len(images), cache_bytes)
        self.cache: dict[int, torch.Tensor] | None = {} if fits else None
        self.augment: tuple[str, tuple[int, ...]] | None = None

    @cached_property
    def way(self) -> object:
        """Everything by which the pixel values of the same file can differ."""
        given = self.processor.image_processor
        return given.to_dict() if hasattr(given, "to_dict") else given, tuple(self.image_shape), self.side

    def keep_all(self, most: int) -> bool:
        """Keep the pixel values of all files of the data set from now on; return False if there is no room.

        All data sets of this process together may take `most` bytes.
        """
        size = self.bytes * self.images.whole
        others = sum(memory.bytes for memory in _memories if memory is not self.memory)
        if not self.images.stored or not 0 < size <= most - others:
            return False
        if self.memory.way != self.way:
            self.memory.release()
        self.memory.way, self.memory.bytes = self.way, size
        _memories.add(self.memory)
        return True

    def view(self, kinds: str, *seed: int) -> Self:
        """Return the same images with the augmentations `kinds`, drawn from the seed and each image's content."""
        if kinds == "none":
            return self
        view = copy.copy(self)
        view.cache, view.augment = None, (kinds, seed)
        return view

    def skipping(self) -> Self:
        """Return the same images, with zeros for an unreadable image instead of an error."""
        part = copy.copy(self)
        part.skips = True
        return part

    @property
    def is_cached(self) -> bool:
        """Whether the pixel values of all images are in memory."""
        if self._keeps:
            return all(position in self.memory.rows for position in self.images.indices.tolist())
        return self.cache is not None and len(self.cache) == len(self)

    @property
    def _keeps(self) -> bool:
        return self.augment is None and self.memory.bytes > 0 and self.memory.way == self.way

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> PixelRow:
        label = int(self.labels[index])
        try:
            content, pixels = self.read(index)
            return pixels, label, index, content or b"", ""
        except Exception as error:  # a user's data set may raise anything
            if self.skips:
                return torch.zeros(self.image_shape), label, index, b"", str(error) or type(error).__name__
            # A worker process passes its errors on by pickle, which not every class of errors supports.
            expected = isinstance(error, (TypeError, ValueError, OSError))
            if not expected and get_worker_info() is None:
                raise
            step = "read" if isinstance(error, UnreadableImageError) else "preprocessed"
            kind = "" if expected else f"{type(error).__name__}: "
            name = self.images.item_name(index)
            raise ValueError(f"image {index} ({name}) cannot be {step}: {kind}{error}") from error

    def read(self, index: int) -> tuple[bytes | None, torch.Tensor]:
        """Return an image's content (see `LabelledImages.contents`) and its pixel values, both from the same bytes.

        The content is None if the pixel values come from this data set's own cache. Errors do not name the image.
        """
        if self.cache is not None and index in self.cache:
            return None, self.cache[index]
        position, keeps = int(self.images.indices[index]), self._keeps
        entry = self.images.entry(index) if keeps else None
        if keeps and (found := self.memory.rows.get(position)) and found[0] == entry:
            return found[1:]
        content, image = self.images.read(index, self.side)
        if self.augment is not None:
            kinds, seed = self.augment
            image = augmented(image, kinds, (*seed, int.from_bytes(content or b"", "little")))
        pixels = pixel_values(self.processor, image)
        if pixels.shape != self.image_shape:
            raise ValueError(f"its pixel values are {tuple(pixels.shape)}, but the model takes {self.image_shape}")
        if self.cache is not None:
            self.cache[index] = pixels
        if keeps:
            self.memory.rows[position] = entry, content, pixels
        return content, pixels


_memories: WeakSet[PixelMemory] = WeakSet()  # those that `keep_all` uses


def _make_room(size: int, most: int) -> None:
    """Release what data sets keep unless `size` and all of it together are at most `most` bytes."""
    for memory in list(_memories):
        if size + sum(each.bytes for each in _memories) > most:
            memory.release()


MOST_THREADS = 16
UNSHOWN = 1.0  # seconds until a pass over images shows its progress bar


def read_batches(
    images: PixelDataset, batches: list[list[int]], args: LearnerArguments, device: torch.device, title: str
) -> Iterator[Any]:
    """Yield the collated tuples of the data set for each batch of rows, and show a progress bar with `title`.

    Raises:
        ChildProcessError: If a process that reads images died.
    """
    ahead = args.num_workers == "auto" and images.images.stored and not images.is_cached
    hidden = not args.progress or processes.world()[0] > 0
    # `disable=None` shows the bar only on a terminal.
    total, disable = sum(map(len, batches)), hidden or None
    with tqdm(total=total, desc=title, unit=" images", delay=UNSHOWN, leave=False, disable=disable) as bar:
        loader: Any
        if ahead:  # a batch of large photographs takes long, so the bar moves with each one that is read
            loader = _read_ahead(images, batches, device, bar.update)
        else:  # not prepared by accelerate, which would keep every data set and its pixels until the process ends
            loader = DataLoader(images, batch_sampler=batches, **loader_settings(args, device, len(batches)))
        for number, batch in enumerate(_raise_plainly(loader)):
            yield batch
            bar.update(0 if ahead else len(batches[number]))


def reading_threads(device: torch.device) -> int:
    """Return how many threads read images: one for each core that the encoder leaves free, at most `MOST_THREADS`.

    On a CPU it is at least half of the cores: the threads wait most of the time, because the encoder is slower.
    """
    cores = max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))  # other processes have theirs
    free = max(cores - torch.get_num_threads(), cores // 2) if device.type == "cpu" else cores - 1
    return min(max(1, free), MOST_THREADS)


def _read_ahead(
    images: PixelDataset, batches: list[list[int]], device: torch.device, update: Callable[[], object]
) -> Iterator[Any]:
    """Yield the collated batches while threads read the next two, in order; call `update` for each image.

    Only files are read in this way, because a user's data set may not allow several threads.
    """
    rows, pinned, most = chain.from_iterable(batches), device.type == "cuda", max(map(len, batches), default=0)
    pool = ThreadPoolExecutor(min(reading_threads(device), sum(map(len, batches)) or 1), "read")
    try:
        ahead = deque(pool.submit(images.__getitem__, row) for row in islice(rows, 2 * most))
        for batch in batches:
            read = []
            for _ in batch:
                read.append(ahead.popleft().result())
                update()
            values = default_collate(read)
            ahead.extend(pool.submit(images.__getitem__, row) for row in islice(rows, len(batch)))
            yield [value.pin_memory() if pinned and torch.is_tensor(value) else value for value in values]
    finally:  # after an error or Ctrl-C, only the images that are being read are finished
        pool.shutdown(cancel_futures=True)


def loader_settings(args: LearnerArguments, device: torch.device, batches: int) -> dict[str, Any]:
    """Return the arguments of a `DataLoader` that reads this many batches."""
    asked = 0 if args.num_workers == "auto" else args.num_workers
    workers = min(asked, batches)  # more workers would have nothing to read
    processes.check_open_files(workers)
    decoding.decoding_lock()  # must be set here: the workers inherit it
    return {
        "num_workers": workers,
        # Python 3.14 would pickle the data set, which some cannot be, and each worker would have a lock of its own.
        "multiprocessing_context": "fork" if workers and sys.platform == "linux" else None,
        "pin_memory": device.type == "cuda",
        "worker_init_fn": _leave_signals_to_the_main_process,
    }


def _leave_signals_to_the_main_process(_: int) -> None:
    """Make a worker ignore or obey signals quietly.

    A terminal or a scheduler signals every process, and an error from a worker would hide the signal.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


def _raise_plainly(batches: Iterable[object]) -> Iterator[object]:
    """Yield the batches, and raise an understandable error if a process that reads images dies."""
    try:
        yield from batches
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):
            raise
        raise ChildProcessError(
            f"a process that reads images died, perhaps because memory ran out ({error}): "
            "choose a smaller num_workers, or 0"
        ) from error
