"""Images on their way through the model: in which batches, process, precision and backend."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, Self, cast

import numpy as np
import torch
import torch._functorch.config
from accelerate.utils import send_to_device
from peft.tuners.tuners_utils import BaseTunerLayer

from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.data.features import FeatureTable
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.data.store import EncoderKey, FeatureStore, open_store
from dulbe_peft.encoders import backends, loading
from dulbe_peft.encoders.identity import ImageTowerFacts, encoder_key
from dulbe_peft.encoders.patches import unpacked
from dulbe_peft.encoders.pixels import PixelDataset
from dulbe_peft.encoders.reading import read_batches
from dulbe_peft.encoders.text_encoder import TextEncoder
from dulbe_peft.utils import processes
from dulbe_peft.utils.devices import choose_device, has_bfloat16, settled_precision
from dulbe_peft.utils.profiling import Profile

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# A processor encodes so many images at once, and fills up a batch of fewer: the size of a product chooses its kernel,
# and each kernel rounds in its own way. Where even the place in such a batch does, each image is encoded by itself.
WHOLE = 8


def _filled(pixels: torch.Tensor, size: int) -> torch.Tensor:
    """Images that are filled up, with the first of them, to whole batches of a size."""
    missing = -len(pixels) % size
    return torch.cat([pixels, pixels[:1].expand(missing, *pixels.shape[1:])]) if missing else pixels


class Encoder(TextEncoder):
    """A dual encoder's two towers over data sets and class names, in the batches and precision of `args`."""

    def __init__(self, clip: Any, processor: Any, args: LearnerArguments, device: torch.device) -> None:
        super().__init__(clip, processor, args, device)
        self.profile = Profile()
        # Where features of images are found again, while nothing trains the model; None: nowhere.
        self.store: FeatureStore | None = None
        # Of the known classes, by what compares another backend with torch; None: their names do, or neighbours.
        self.scores: Callable[[torch.Tensor], torch.Tensor | None] | None = None
        self.graph: str | None = None  # SHA-256 of the int8 graph that a learner carries
        self._tower_facts = ImageTowerFacts()
        self._tower: tuple[str, backends.Tower | None] = ("", None)  # of the weights with a digest
        self._trains = False  # what moves at every task is not exported
        self._alike: dict[tuple[str, int], bool] = {}  # whether each place in a batch rounds alike, by what computes
        tower = loading.unit_image_embeds
        self._trained_tower = torch.compile(tower) if args.torch_compile else tower

    @classmethod
    def at_rest(cls, clip: Any, processor: Any, args: LearnerArguments) -> Self:
        """The encoder of a model that nothing trains, on the device that `args` name and with the user's store."""
        device = choose_device(args.device)
        precision = settled_precision(args.precision, None, False, has_bfloat16(device))
        made = cls(clip.to(device).eval(), processor, replace(args, precision=precision), device)
        made.store = open_store(True)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Without what a process keeps open or knows of its processor; the learner says how a backend compares."""
        return vars(self) | {"_tower": ("", None), "scores": None, "_alike": {}}

    def retain_graphs(self) -> AbstractContextManager[None]:
        """Around compiled forward passes and the two backward passes of each, which both read what it kept."""
        # Else the first backward pass may write over it; torch has no public name for this.
        return torch._functorch.config.patch(donated_buffer=False) if self.args.torch_compile else nullcontext()

    def images(self, images: LabelledImages, keep: bool = False) -> PixelDataset:
        """Preprocessed images; with `keep`, held in memory where that fits and cannot change them."""
        if images.features is not None:
            self._check_features(images.features)
        kept = keep and self.args.num_workers == 0 and self.args.teacher == "cached"
        cache_bytes = self.args.pixel_cache_mb * 2**20 if kept else 0
        return PixelDataset(images, self.processor, loading.image_shape(self.clip, self.processor), cache_bytes)

    def views(self, features: torch.Tensor, images: PixelDataset, title: str) -> torch.Tensor | None:
        """The images' own features, (n, d), and those of their augmented views: (n, 1 + copies, d); None: no views."""
        if self.way[1] == 1:
            return None
        views = [features]
        for number in range(1, self.way[1]):
            view = images.view(self.args.augment, self.args.seed, 0, number)
            views.append(self.dataset_embeds(view, f"{title} view {number}"))
        return torch.stack(views, dim=1)

    @property
    def way(self) -> tuple[str, int]:
        """How a learned image becomes rows of classifiers: precision and backend, and how many views there are."""
        by = "" if self.args.backend == "torch" else f" by {self.args.backend}"
        return self.args.precision + by, 1 if self.args.augment == "none" else 1 + self.args.copies

    @property
    def facts(self) -> dict[str, str]:
        """What tells this encoder's image features from those of others, on whichever machine."""
        graph = {"graph": self.graph or ""} if self.args.precision == "int8" else {}
        return self._tower_facts(self.clip, self.processor) | {"precision": self.args.precision} | graph

    @property
    def key(self) -> EncoderKey:
        """What makes two features of an image equal bit by bit: also versions, and what computes."""
        facts, attention, tower = self.facts, self.clip.config._attn_implementation, self.tower
        backend = None if tower is None else (tower.sha256, tower.backend, tower.version)
        return encoder_key(facts, attention, self.device, self.args.eval_batch_size, backend)

    @property
    def tower(self) -> backends.Tower | None:
        """The image tower of the backend that was asked for; None: torch's, also while the model is trained."""
        if not self._may_export:
            return None
        if self.args.precision == "int8" and self.graph is None:
            raise ValueError("int8 is calibrated on images first: encode some, or learn")
        facts = self.facts
        if self._tower[0] != facts["weights"]:
            shape = loading.image_shape(self.clip, self.processor)
            self._tower = facts["weights"], backends.open_tower(self.clip, shape, facts, self.args, self.device)
        return self._tower[1]

    def stored(self, contents: Sequence[bytes]) -> dict[bytes, np.ndarray]:
        """Features of images, as they are, that the user's store has, by content; none where the model is adapted."""
        if self.store is None or self.store.private or not contents:
            return {}
        return self._kept(lambda: contents)[1]

    def _kept(self, look: Callable[[], Sequence[bytes | None]]) -> tuple[Sequence[bytes | None], dict[bytes, Any]]:
        """What a look at images found, content by content, and those of their features that the store has."""
        store, graphless = self.store, self.args.precision == "int8" and self.graph is None  # which it will be
        if store is None or self.adapted or graphless:
            return [], {}
        key = self.key

        def ask() -> tuple[Sequence[bytes | None], dict[bytes, Any]]:
            contents = look()
            return contents, store.get(key, contents)

        return processes.on_main_process(ask)

    @property
    def _may_export(self) -> bool:
        """Whether the tower as it is can be another backend's: not of a part of what was learned, or of nothing."""
        if self.args.backend == "torch" or self._trains:
            return False
        layers = (module for module in self.clip.modules() if isinstance(module, BaseTunerLayer))
        return not any(layer.disable_adapters or getattr(layer, "_held", None) is not None for layer in layers)

    @torch.no_grad()
    def calibrate(self, images: PixelDataset) -> None:
        """Make the int8 graph on some of the images, and compare it with torch on others; does nothing otherwise."""
        if self.args.precision != "int8" or self.graph is not None or not self._may_export:
            return
        if len(images) < 2 * WHOLE or processes.world()[1] > 1:
            few = f"at least {2 * WHOLE} images to calibrate on, and a single process; here are {len(images)} images"
            raise ValueError(f"int8 needs {few}: take another precision")
        order = np.random.default_rng(0).permutation(len(images))
        held, facts = order[: min(backends.HELD_BACK, len(images) // 2)], self.facts
        used = order[len(held) :][: backends.CALIBRATED]

        def pixels(rows: np.ndarray) -> Sequence[torch.Tensor]:
            found = self.batches(images.skipping(), "calibrate", rows.tolist())
            return torch.cat([batch[0] for batch in found]).split(WHOLE)

        file = backends.exported(self.clip, loading.image_shape(self.clip, self.processor), facts)
        tower, parts = backends.quantised(file, pixels(used)), pixels(held)
        expected = torch.cat([loading.unit_image_embeds(self.clip, part) for part in parts])
        found = torch.cat([tower(part) for part in parts])
        tower.check(found, expected, self._scores(images, expected), self.args.force)
        self.graph, self._tower = tower.sha256, (facts["weights"], tower)

    def _check_features(self, features: FeatureTable) -> None:
        """Raise a `ValueError` unless the features are those that this encoder would give, as far as is known."""
        if self.adapted:
            raise ValueError("features stand in for the images of a frozen model, and this one has an adapter")
        if self.args.augment != "none":
            raise ValueError(f"features cannot be augmented, and augment is {self.args.augment!r}: give the images")
        features.check(self.embed_dim, self.facts)

    @property
    def adapted(self) -> bool:
        """Whether the model has an adapter, so that its features may move."""
        return any(isinstance(module, BaseTunerLayer) for module in self.clip.modules())

    def training_batches(self, images: PixelDataset, title: str, order: Sequence[int]) -> Iterator[Batch]:
        """Batches in `order`: the pixels of this process's rows, with labels and indices of the whole batch."""
        size, self._trains = self.args.batch_size, True
        starts = range(0, len(order), size)
        indices = torch.tensor(order, device=self.device)
        labels = torch.as_tensor(images.labels).to(self.device)[indices]
        parts = [processes.padded_shard(order[start : start + size]) for start in starts]
        loaded = iter(self._load(images, title, parts))
        for start in starts:
            with processes.raise_in_all():
                pixels, *_ = next(loaded)
            rows = slice(start, start + size)
            yield pixels.to(self.device, non_blocking=True), labels[rows], indices[rows]
        # End the processes that read images here. In a finalizer, Python would swallow a Ctrl-C that comes meanwhile.
        next(loaded, None)

    def batches(self, images: PixelDataset, title: str, rows: Sequence[int] | None = None) -> Iterator[Any]:
        """Batches of this process's part of the images, or of some `rows`: what the data set gives for each."""
        size, part = self.args.eval_batch_size, processes.shard(range(len(images)) if rows is None else rows)
        batches = [list(part[start : start + size]) for start in range(0, len(part), size)]
        for batch in self._load(images, title, batches):
            yield send_to_device(batch, self.device, non_blocking=True)

    def _load(self, images: PixelDataset, title: str, batches: list[list[int]]) -> Iterator[Any]:
        how = self.args.precision if self._tower[1] is None else f"{self.args.precision} by {self.args.backend}"
        return self.profile.batches(read_batches(images, batches, self.args, self.device, f"{title}, {how}"))

    def image_embeds(self, pixels: torch.Tensor) -> torch.Tensor:
        """Unit features of pixel values, (rows, d) in float32."""
        training = self.clip.training and torch.is_grad_enabled()  # each other pass would be compiled for itself
        tower = self._trained_tower if training else loading.unit_image_embeds
        with self.autocast():
            return tower(self.clip, pixels)

    def token_mask(self, pixels: torch.Tensor) -> torch.Tensor | None:
        """Which tokens of images are no padding, (rows, tokens) in bool; None: all of them."""
        return unpacked(pixels)["pixel_attention_mask"] if loading.encoder_of(self.clip).patches else None

    def gathered_image_embeds(self, pixels: torch.Tensor, total: int) -> torch.Tensor:
        """Unit features of a training batch of `total` images, (total, d), from the pixels of this process's rows."""
        return processes.gather_rows(self.image_embeds(pixels), total)

    def _places_alike(self, encode: Callable[[torch.Tensor], torch.Tensor], image: torch.Tensor, backend: str) -> bool:
        """Whether an image, (1, ...), has equal features in each place of a batch on this processor, bit by bit.

        With AVX2, for instance, MKL rounds the last rows of a product in another way than the others.
        """
        place = backend, torch.get_num_threads()
        if place not in self._alike:
            features = encode(image.repeat(WHOLE, *[1] * (image.ndim - 1)))
            self._alike[place] = bool((features == features[0]).all())
        return self._alike[place]

    def _encoded(
        self, pixels: torch.Tensor, images: PixelDataset, tower: backends.Tower | None, few: bool
    ) -> torch.Tensor:
        """Unit features of a batch, by the backend's tower where there is one, which is compared with torch first."""
        encode, backend = tower or self.image_embeds, "torch" if tower is None else tower.backend
        if self.device.type != "cpu":
            parts = [pixels if few else _filled(pixels, self.args.eval_batch_size)]
        elif few or not self._places_alike(encode, pixels[:1], backend):
            parts = list(pixels.split(1))
        else:  # what a larger batch computes does not fit the processor's caches
            parts = list(_filled(pixels, WHOLE).split(WHOLE))
        found = torch.cat([encode(part) for part in parts])[: len(pixels)]
        if tower is None:
            return found
        if tower.precision != "int8" and not tower.is_checked(len(pixels)):
            expected = loading.unit_image_embeds(self.clip, pixels)
            tower.check(found, expected, self._scores(images, expected), self.args.force)
        return found

    def _scores(self, images: PixelDataset, features: torch.Tensor) -> backends.Scores | None:
        """What answers for some images: the learned classifier, or their classes' names, or None."""
        if self.scores is not None and self.scores(features) is not None:
            return cast(backends.Scores, self.scores)
        names = images.images.class_names
        if len(names) < 2 or loading.encoder_of(self.clip).image_only:
            return None
        texts = self.text_embeds(names)
        return lambda features: features @ texts.T

    def dataset_embeds(self, images: PixelDataset, title: str = "encode") -> torch.Tensor:
        """Unit features of all images, (n, d)."""
        return self._embeds(images, title, False)[0]

    def each_embeds(self, parts: Sequence[LabelledImages]) -> list[torch.Tensor]:
        """Unit features of all images of each part, as `dataset_embeds` gives them; the store is asked once for all.

        What it lacks is encoded part by part, so that a batch never depends on which other parts there are.
        """
        for table in {id(part.features): part.features for part in parts if part.features is not None}.values():
            self._check_features(table)
        pictures = [part for part in parts if part.features is None]
        contents, found = self._kept(lambda: [content for part in pictures for content in part.contents()])
        rest, features = iter(contents), list[torch.Tensor]()
        for part in parts:
            if part.features is not None:
                features.append(torch.from_numpy(part.features.of(part)).to(self.device))
                continue
            rows = [found.get(content or b"") for content in islice(rest, len(part))]
            if rows and all(row is not None for row in rows):
                features.append(torch.from_numpy(np.stack(cast(list[np.ndarray], rows))).to(self.device))
            else:
                features.append(self.dataset_embeds(self.images(part)))
        return features

    def readable_embeds(
        self, images: PixelDataset, title: str, passing: bool = False
    ) -> tuple[torch.Tensor, dict[int, str]]:
        """Unit features, (n, d), with zeros for an image that cannot be read; and index -> why it cannot be.

        A few images in `passing`, whose answers alone are wanted, are not worth a whole batch, and are not stored.
        """
        features, unreadable = self._embeds(images, title, True, passing and len(images) < WHOLE)
        return features, {i: error for part in processes.gather_objects(unreadable) for i, error in part.items()}

    @torch.no_grad()
    def _embeds(
        self, images: PixelDataset, title: str, skip: bool, few: bool = False
    ) -> tuple[torch.Tensor, dict[int, str]]:
        """Features of all images, and what cannot be read, which is zero with `skip` and an error without it."""
        if images.images.features is not None:
            return torch.from_numpy(images.images.features.of(images.images)).to(self.device), {}
        self.calibrate(images)
        features = torch.zeros(len(images), self.embed_dim, device=self.device)
        store = None if few or self.adapted else self.store
        rows, copies = list(range(len(images))), dict[int, int]()
        if store is not None:
            key = self.key._replace(view="" if images.augment is None else json.dumps(images.augment))
            rows, copies = self._unknown(store, key, images, features)
        tower = self.tower if rows else None
        unreadable: dict[int, str] = {}
        with processes.raise_in_all():
            batches = self.batches(images.skipping() if skip else images, title, rows)
            for pixels, _, index, contents, errors in batches:
                features[index] = self._encoded(pixels, images, tower, few)
                found = [content or None for content in contents]
                for row, content in zip(index.tolist(), found, strict=True):
                    images.images.note_content(row, content)
                unreadable |= {i: error for i, error in zip(index.tolist(), errors, strict=True) if error}
                if store is not None:
                    store.put(key, found, features[index].cpu().numpy())
        features[list(unreadable)] = 0
        processes.sum_over_processes([features])
        for row, first in copies.items():
            features[row] = features[first]
        return features, unreadable | {row: unreadable[first] for row, first in copies.items() if first in unreadable}

    def _unknown(
        self, store: FeatureStore, key: EncoderKey, images: PixelDataset, features: torch.Tensor
    ) -> tuple[list[int], dict[int, int]]:
        """The rows that must be encoded, and copies of those; fills in the `features` that the store has."""

        def look() -> tuple[list[bytes | None], dict[bytes, Any]]:
            contents = images.images.contents()
            return contents, store.get(key, contents)

        contents, found = processes.on_main_process(look)
        rows, copies, first = list[int](), dict[int, int](), dict[bytes, int]()
        for row, content in enumerate(contents):
            if content is None or (content not in found and first.setdefault(content, row) == row):
                rows.append(row)
            elif content not in found:
                copies[row] = first[content]
        known = [row for row, content in enumerate(contents) if content in found]
        if known and processes.world()[0] == 0:  # the processes' features are added up
            rows_known = np.stack([found[contents[row] or b""] for row in known])
            features[known] = torch.from_numpy(rows_known).to(self.device)
        return rows, copies
