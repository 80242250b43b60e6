"""Encode images with the model: choose batches, process, precision and backend, and use the feature store."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, Self, cast

import numpy as np
import torch
from accelerate.utils import send_to_device
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.data.feature_tables import FeatureTable
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.data.store import EncoderKey, FeatureStore, open_store
from dulbe_peft.encoders import backends, loading
from dulbe_peft.encoders.encoding import Encoding, encoding_of, untouched
from dulbe_peft.encoders.identity import ImageTowerFacts, encoder_key
from dulbe_peft.encoders.loading import unpacked
from dulbe_peft.encoders.pixels import PixelDataset, jpeg_side, read_batches
from dulbe_peft.encoders.text_encoder import TextEncoder
from dulbe_peft.utils import processes
from dulbe_peft.utils.processes import choose_device, choose_precision, has_bfloat16
from dulbe_peft.utils.profiling import Profile
from dulbe_peft.utils.tensors import align_weights, aligned, from_array
from dulbe_peft.utils.torch_settings import evaluating

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# A CPU encodes this many images at once, and smaller batches are padded: the size of a matrix product selects its
# kernel, and kernels round differently. If even the position in such a batch changes the rounding, images are encoded
# one by one.
CPU_BATCH = 8


def _padded(pixels: torch.Tensor, size: int) -> torch.Tensor:
    """Repeat the first image until the number of images is a multiple of `size`."""
    missing = -len(pixels) % size
    return torch.cat([pixels, pixels[:1].expand(missing, *pixels.shape[1:])]) if missing else pixels


class Encoder(TextEncoder):
    """Encode data sets and class names with a dual encoder, in the batches and precision that `args` ask for."""

    def __init__(self, clip: PreTrainedModel, processor: Any, args: LearnerArguments, device: torch.device) -> None:
        super().__init__(clip, processor, args, device)
        self.profile = Profile()
        # Keeps image features as long as the model has no adapter; None keeps none.
        self.store: FeatureStore | None = None
        # Class scores of features, for comparing a backend's predictions with torch's; None: see `_scores`.
        self.scores: Callable[[torch.Tensor], torch.Tensor | None] | None = None
        self.graph: str | None = None  # SHA-256 of the learner's int8 graph
        # Returns how the learner's strategy encodes images and texts; None: as the model does.
        self.encodings: Callable[[], Encoding | None] | None = None
        self._encodings: list[Encoding | None] = []  # of the blocks of `encoding_by` that are running
        self._untouched = False  # whether a block uses the model without its adapter
        self._untouched_facts = ImageTowerFacts()
        self._tower_facts = ImageTowerFacts()
        self._tower: tuple[str, backends.Tower | None] = ("", None)  # digest of the weights, and their exported tower
        self._trains = False  # a tower that every task changes is not exported
        # Whether every position in a batch rounds in the same way, by backend, number of threads and `_shapes`.
        self._positions_equal: dict[tuple[str, int, tuple[object, ...]], bool] = {}
        tower = loading.unit_image_embeds
        self._trained_tower = torch.compile(tower) if args.torch_compile else tower

    @classmethod
    def at_rest(cls, clip: Any, processor: Any, args: LearnerArguments) -> Self:
        """Return an encoder for a model that will not be trained, with the device of `args` and the user's store."""
        device = choose_device(args.device)
        precision = choose_precision(args.precision, None, False, has_bfloat16(device))
        clip = clip.to(device).eval()
        align_weights(clip)
        made = cls(clip, processor, replace(args, precision=precision), device)
        made.store = open_store(True)
        return made

    def __getstate__(self) -> dict[str, object]:
        """Leave out the exported tower, measurements of this CPU, and functions that the learner sets again."""
        kept: dict[str, object] = {"_tower": ("", None), "_positions_equal": {}, "_encodings": [], "_untouched": False}
        return vars(self) | kept | {"scores": None, "encodings": None}

    @property
    def encoding(self) -> Encoding | None:
        """How images and texts are encoded now; None: as the model does."""
        if self._encodings:
            return self._encodings[-1]
        return encoding_of(self.args) if self.encodings is None else self.encodings()

    @contextmanager
    def encoding_by(self, encoding: Encoding | None) -> Iterator[None]:
        """Encode with `encoding`, or as the model does, while the block runs."""
        self._encodings.append(encoding)
        try:
            yield
        finally:
            self._encodings.pop()

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Encode with the untouched model while the block runs, and use the store of its features."""
        before = self._untouched
        with self.encoding_by(None), untouched(self.clip):
            self._untouched = True
            try:
                yield
            finally:
                self._untouched = before

    def query_embeds(self, images: PixelDataset, title: str, skip: bool = False, few: bool = False) -> torch.Tensor:
        """Return the unit features of all images by the untouched model, (n, d)."""
        with self.without_adapter():
            return self._embeds(images, title, skip, few)[0]

    @property
    def embed_dim(self) -> int:
        encoding = self.encoding
        return super().embed_dim if encoding is None else encoding.width(self.clip)

    @property
    def has_names(self) -> bool:
        """Whether class names have embeddings that can be compared with the image features or their projection."""
        encoding = self.encoding
        return loading.has_text(self.clip) and (encoding is None or encoding.names)

    @property
    def projection(self) -> torch.Tensor | None:
        """W, (d, width), by which features are projected before they are compared with texts; None if they are not."""
        encoding = self.encoding
        return None if encoding is None else encoding.projection(self.clip)

    def images(self, images: LabelledImages, keep: bool = False) -> PixelDataset:
        """Return the preprocessed images.

        `keep` caches them in memory if they fit, this process reads them, and they are the same in every pass.
        """
        if images.features is not None:
            self._check_features(images.features)
        cached = keep and self.args.num_workers in (0, "auto") and self.args.teacher == "cached"
        cache_bytes = self.args.pixel_cache_mb * 2**20 if cached else 0
        shape = loading.image_shape(self.clip, self.processor)
        return PixelDataset(images, self.processor, shape, cache_bytes, self.jpeg_side)

    def kept_images(self, images: LabelledImages) -> PixelDataset | None:
        """Return the preprocessed images, whose pixel values are kept for all slices of the data set.

        Returns None if they cannot be kept: because of `pixel_cache_mb`, worker processes, several processes that
        train, or a data set that changes its images.
        """
        pixels, limit = self.images(images), self.args.pixel_cache_mb * 2**20
        cached = self.args.num_workers in (0, "auto") and self.args.teacher == "cached" and processes.world()[1] == 1
        return pixels if cached and pixels.keep_all(limit) else None

    def views(self, features: torch.Tensor, images: PixelDataset, title: str) -> torch.Tensor | None:
        """Return `features`, (n, d), together with those of the augmented views, (n, 1 + copies, d).

        Returns None if the settings ask for no views.
        """
        if self.way[1] == 1:
            return None
        views = [features]
        for number in range(1, self.way[1]):
            view = images.view(self.args.augment, self.args.seed, 0, number)
            views.append(self.dataset_embeds(view, f"{title} view {number}"))
        return torch.stack(views, dim=1)

    @property
    def way(self) -> tuple[str, int]:
        """Precision and backend that turn a learned image into rows of classifiers, and the number of those rows."""
        by = "" if self.args.backend == "torch" else f" by {self.args.backend}"
        return self.args.precision + by, 1 if self.args.augment == "none" else 1 + self.args.copies

    @property
    def jpeg_side(self) -> int:
        """How many pixels each side of a JPEG file needs when it is decoded, or 0 if it is decoded whole."""
        return jpeg_side(self.processor, self.clip, self.args.whole_images)

    @property
    def facts(self) -> dict[str, str]:
        """Facts that distinguish this encoder's image features from another's, equal on every machine."""
        graph = {"graph": self.graph or ""} if self.args.precision == "int8" else {}
        by = {} if (encoding := self.encoding) is None else {"encoding": encoding.digest}
        facts = self._untouched_facts if self._untouched else self._tower_facts
        tower = facts(self.clip, self.processor, self._untouched)
        side = {"jpeg_side": str(self.jpeg_side)} if self.jpeg_side else {}
        return tower | {"precision": self.args.precision} | graph | by | side

    @property
    def key(self) -> EncoderKey:
        """Key of features that are equal bit by bit; it also covers versions, device and backend."""
        facts, attention, tower = self.facts, self.clip.config._attn_implementation, self.tower
        backend = None if tower is None else (tower.sha256, tower.backend, tower.version)
        return encoder_key(facts, attention, self.device, self.args.eval_batch_size, backend)

    @property
    def tower(self) -> backends.Tower | None:
        """The image tower of the requested backend. None means that torch encodes, as it does during training."""
        if not self._may_export:
            return None
        if self.args.precision == "int8" and self.graph is None:
            raise ValueError("int8 must be calibrated on images first: encode some images, or learn a task")
        facts = self.facts
        if self._tower[0] != facts["weights"]:
            shape = loading.image_shape(self.clip, self.processor)
            self._tower = facts["weights"], backends.open_tower(self.clip, shape, facts, self.args, self.device)
        return self._tower[1]

    def stored(self, contents: Sequence[bytes]) -> dict[bytes, np.ndarray]:
        """Return the features that the user's store has for images without augmentation, by content.

        The dict is empty if the model has an adapter.
        """
        if self.store is None or self.store.private or not contents:
            return {}
        return self._from_store(lambda: contents)[1]

    def _from_store(
        self, read_contents: Callable[[], Sequence[bytes | None]]
    ) -> tuple[Sequence[bytes | None], dict[bytes, np.ndarray]]:
        """Return what `read_contents` gives, and the features that the store has for these contents.

        Returns nothing if the features may change: with an adapter, or in int8 before its calibration.
        """
        store, uncalibrated = self.store, self.args.precision == "int8" and self.graph is None
        if store is None or self.adapted or uncalibrated:
            return [], {}
        key = self.key

        def ask() -> tuple[Sequence[bytes | None], dict[bytes, np.ndarray]]:
            contents = read_contents()
            return contents, store.get(key, contents)

        return processes.on_main_process(ask)

    @property
    def _may_export(self) -> bool:
        """Whether another backend may run the tower: not during training, nor while an adapter is off or scaled."""
        if self.args.backend == "torch" or self._trains:
            return False
        if self.encoding is not None:
            raise ValueError(
                f"the backend {self.args.backend!r} runs the model alone, but the strategy or the setting features "
                "changes how each image is encoded: choose the backend 'torch'"
            )
        layers = (module for module in self.clip.modules() if isinstance(module, BaseTunerLayer))
        return not any(layer.disable_adapters or not getattr(layer, "acts_as_saved", True) for layer in layers)

    @torch.no_grad()
    def calibrate(self, images: PixelDataset) -> None:
        """Make the int8 graph with some of the images, and compare it with torch on others.

        Does nothing in other precisions, or if the graph was made before.
        """
        if self.args.precision != "int8" or self.graph is not None or not self._may_export:
            return
        count, world = len(images), processes.world()[1]
        if count < 2 * CPU_BATCH or world > 1:
            raise ValueError(
                f"int8 needs at least {2 * CPU_BATCH} images for its calibration and a single process, got {count} "
                f"images and {world} processes: choose another precision"
            )
        order = np.random.default_rng(0).permutation(count)
        compared, facts = order[: min(backends.COMPARISON_IMAGES, count // 2)], self.facts
        calibrated = order[len(compared) :][: backends.CALIBRATION_IMAGES]

        def pixels(rows: np.ndarray) -> Sequence[torch.Tensor]:
            batches = self.batches(images.skipping(), "calibrate", rows.tolist())
            return torch.cat([batch[0] for batch in batches]).split(CPU_BATCH)

        file = backends.exported(self.clip, loading.image_shape(self.clip, self.processor), facts)
        tower, parts = backends.quantised(file, pixels(calibrated)), pixels(compared)
        expected = torch.cat([loading.unit_image_embeds(self.clip, part) for part in parts])
        features = torch.cat([tower(part) for part in parts])
        tower.check(features, expected, self._scores(images, expected), self.args.force)
        self.graph, self._tower = tower.sha256, (facts["weights"], tower)

    def _check_features(self, features: FeatureTable) -> None:
        """Raise a `ValueError` unless, as far as the table records it, this encoder would give the same features."""
        if self.adapted:
            raise ValueError("features replace the images of a frozen model only, and this model has an adapter")
        if self.args.augment != "none":
            raise ValueError(f"features cannot be augmented, but augment is {self.args.augment!r}: pass the images")
        features.check(self.embed_dim, self.facts)

    @property
    def adapted(self) -> bool:
        """Whether the model has an adapter, so that its features may change."""
        return not self._untouched and any(isinstance(module, BaseTunerLayer) for module in self.clip.modules())

    def training_batches(self, images: PixelDataset, title: str, order: Sequence[int]) -> Iterator[Batch]:
        """Yield batches in `order`: the pixels of this process's rows, and labels and indices of the whole batch."""
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
        # End the worker processes here. If a finalizer ended them, Python would swallow a Ctrl-C in the meantime.
        next(loaded, None)

    def batches(
        self, images: PixelDataset, title: str, rows: Sequence[int] | None = None, most: int | None = None
    ) -> Iterator[Any]:
        """Yield this process's share of the images, or of those in `rows`, as batches of the data set's tuples.

        A batch has `eval_batch_size` images, but not more than `most`.
        """
        size, part = self.args.eval_batch_size, processes.shard(range(len(images)) if rows is None else rows)
        size = size if most is None else min(size, most)
        batches = [list(part[start : start + size]) for start in range(0, len(part), size)]
        for batch in self._load(images, title, batches):
            yield send_to_device(batch, self.device, non_blocking=True)

    def _load(self, images: PixelDataset, title: str, batches: list[list[int]]) -> Iterator[Any]:
        numbers = self.args.precision if self._tower[1] is None else f"{self.args.precision} by {self.args.backend}"
        return self.profile.batches(read_batches(images, batches, self.args, self.device, f"{title}, {numbers}"))

    def image_embeds(self, pixels: torch.Tensor, queries: torch.Tensor | None = None) -> torch.Tensor:
        """Return the unit features of pixel values, (rows, d) in float32.

        `queries`, (rows, d), are their features by the untouched model. They are only used, and computed if they are
        None, if the encoding needs them.
        """
        if (encoding := self.encoding) is not None:
            if encoding.queries and queries is None:
                queries = self.untouched_embeds(pixels)
            with self.autocast():
                return encoding.image_embeds(self.clip, pixels, queries)
        training = self.clip.training and torch.is_grad_enabled()  # other passes would be compiled separately
        tower = self._trained_tower if training else loading.unit_image_embeds
        with self.autocast():
            return tower(self.clip, aligned(pixels))  # an image that was split from a batch may not be

    def unit_text_embeds(self, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
        encoding = self.encoding
        return super().unit_text_embeds(tokens) if encoding is None else encoding.text_embeds(self.clip, tokens)

    @torch.no_grad()
    def untouched_embeds(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the unit features of pixel values by the untouched model, (rows, d) in float32."""
        with self.without_adapter(), evaluating(self.clip), self.autocast():
            return loading.unit_image_embeds(self.clip, aligned(pixels))

    def token_mask(self, pixels: torch.Tensor) -> torch.Tensor | None:
        """Return which tokens are no padding, (rows, tokens) in bool; None if no model of this type pads images."""
        return unpacked(pixels)["pixel_attention_mask"] if loading.encoder_of(self.clip).patches else None

    def gathered_image_embeds(
        self, pixels: torch.Tensor, total: int, queries: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Encode this process's rows, and return the unit features of all `total` images of the batch, (total, d)."""
        return processes.gather_rows(self.image_embeds(pixels, queries), total)

    @property
    def _shapes(self) -> tuple[object, ...]:
        """What decides how products round: the shapes of all tensors, which adapters act, and in which way."""
        found = list[object]()
        for module in self.clip.modules():
            if isinstance(module, BaseTunerLayer):
                found += [module.merged, module.disable_adapters, getattr(module, "held_adapter", None)]
                found += module.active_adapters
            tensors = (*module._parameters.values(), *module._buffers.values())
            found += [None if tensor is None else tensor.shape for tensor in tensors]
        return tuple(found)

    def _positions_agree(
        self, encode: Callable[[torch.Tensor], torch.Tensor], image: torch.Tensor, backend: str
    ) -> bool:
        """Return whether an image has the same features bit by bit at every position of a batch.

        A random image of the shape of `image`, (1, ...), decides, so that a loaded learner comes to the same answer.
        This depends on the processor: with AVX2, for instance, MKL rounds the last rows of a product differently. It
        depends on the shapes of products, too, so a history that has grown is measured again.
        """
        way = backend if self.encoding is None else self.encoding.digest
        key = way, torch.get_num_threads(), self._shapes
        if key not in self._positions_equal:
            if not loading.encoder_of(self.clip).patches:  # packed patches contain their positions
                image = torch.randn(image.shape, generator=torch.Generator().manual_seed(0)).to(image)
            features = encode(image.repeat(CPU_BATCH, *[1] * (image.ndim - 1)))
            self._positions_equal[key] = bool((features == features[0]).all())
        return self._positions_equal[key]

    def _encoded(
        self,
        pixels: torch.Tensor,
        images: PixelDataset,
        tower: backends.Tower | None,
        few: bool,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the unit features of a batch, (n, d), computed by `tower`, or by torch if it is None.

        The tower is compared with torch first. `few` encodes the images one by one on a CPU, and unpadded on a GPU.
        `queries` are those of `image_embeds`.
        """
        encode, backend = tower or self.image_embeds, "torch" if tower is None else tower.backend
        if self.device.type != "cpu":
            size, padding = (len(pixels), 1) if few else (self.args.eval_batch_size,) * 2
        elif few or not self._positions_agree(encode, pixels[:1], backend):
            size = padding = 1
        else:  # the activations of a larger batch do not fit into the CPU's caches
            size = padding = CPU_BATCH
        given = [pixels] if queries is None else [pixels, queries]
        parts = zip(*(_padded(each, padding).split(size) for each in given), strict=True)
        features = torch.cat([encode(*part) for part in parts])[: len(pixels)]
        if tower is None:
            return features
        if tower.precision != "int8" and not tower.is_checked(len(pixels)):
            expected = loading.unit_image_embeds(self.clip, pixels)
            tower.check(features, expected, self._scores(images, expected), self.args.force)
        return features

    def _scores(self, images: PixelDataset, features: torch.Tensor) -> backends.Scores | None:
        """Return a function that scores classes: the learned classifier, or the images' class names.

        Returns None if there is neither; nearest neighbours are compared then.
        """
        if self.scores is not None and self.scores(features) is not None:
            return cast(backends.Scores, self.scores)
        names = images.images.class_names
        if len(names) < 2 or loading.encoder_of(self.clip).image_only:
            return None
        texts = self.text_embeds(names)
        return lambda features: features @ texts.T

    def dataset_embeds(self, images: PixelDataset, title: str = "encode") -> torch.Tensor:
        """Return the unit features of all images, (n, d)."""
        return self._embeds(images, title, False)[0]

    def each_embeds(self, parts: Sequence[LabelledImages]) -> list[torch.Tensor]:
        """Return the unit features of each part, as `dataset_embeds` would, but query the store once for all parts.

        Missing features are encoded part by part, so that a batch never depends on the other parts.
        """
        for table in {id(part.features): part.features for part in parts if part.features is not None}.values():
            self._check_features(table)
        pictures = [part for part in parts if part.features is None]
        contents, stored = self._from_store(lambda: [content for part in pictures for content in part.contents()])
        rest, features = iter(contents), list[torch.Tensor]()
        for part in parts:
            if part.features is not None:
                features.append(from_array(part.features.of(part)).to(self.device))
                continue
            rows = [stored.get(content or b"") for content in islice(rest, len(part))]
            if rows and all(row is not None for row in rows):
                features.append(from_array(np.stack(cast(list[np.ndarray], rows))).to(self.device))
            else:
                features.append(self.dataset_embeds(self.images(part)))
        return features

    def readable_embeds(
        self, images: PixelDataset, title: str, passing: bool = False
    ) -> tuple[torch.Tensor, dict[int, str]]:
        """Return the unit features, (n, d), with zeros for unreadable images, and a dict from their index to a reason.

        `passing` says that only predictions are wanted. Fewer images than a batch are then neither padded nor stored.
        """
        features, unreadable = self._embeds(images, title, True, passing and len(images) < CPU_BATCH)
        return features, {i: error for part in processes.gather_objects(unreadable) for i, error in part.items()}

    @torch.no_grad()
    def _embeds(
        self, images: PixelDataset, title: str, skip: bool, few: bool = False
    ) -> tuple[torch.Tensor, dict[int, str]]:
        """Return the features of all images, and the reason for each unreadable image by its index.

        With `skip`, the features of an unreadable image are zero; without it, the image is an error.
        """
        if images.images.features is not None:
            return from_array(images.images.features.of(images.images)).to(self.device), {}
        self.calibrate(images)
        features = torch.zeros(len(images), self.embed_dim, device=self.device)
        store = None if few or self.adapted else self.store
        rows, copies = list(range(len(images))), dict[int, int]()
        if store is not None:
            key = self.key._replace(view="" if images.augment is None else json.dumps(images.augment))
            rows, copies = self._fill_from_store(store, key, images, features)
            images.images.glances.stored = store.glance
        tower, encoding, queries = self.tower if rows else None, self.encoding, None
        if rows and encoding is not None and encoding.queries:
            queries = self.query_embeds(images, title, skip, few)
        unreadable: dict[int, str] = {}
        # A CPU encodes `CPU_BATCH` images at once, so that the next ones can be read meanwhile. A backend that has not
        # been compared with torch yet gets as many as possible.
        small = self.device.type == "cpu" and (tower is None or tower.is_checked(self.args.eval_batch_size))
        fresh = dict[int, bytes | None]()  # contents of the rows that the store does not have yet
        seen = dict[bytes | None, int]()  # the first row with each content, for files that occur several times
        batches = self.batches(images.skipping() if skip else images, title, rows, CPU_BATCH if small else None)
        with processes.raise_in_all(), ExitStack() as stack:

            def put() -> None:
                if store is not None:
                    store.put(key, [*fresh.values()], features[[*fresh]].cpu().numpy())
                    store.put_glances(images.images.kept_glances(fresh))
                fresh.clear()

            stack.callback(put)  # also after an error or Ctrl-C
            for pixels, _, index, contents, errors in batches:
                here = dict(zip(index.tolist(), (content or None for content in contents), strict=True))
                for row, content in here.items():
                    images.images.record_content(row, content)
                unreadable |= {row: error for row, error in zip(here, errors, strict=True) if error}
                known = {row for row, content in here.items() if content in seen and store is not None}
                seen |= {content: row for row, content in reversed(here.items()) if content and row not in known}
                if len(known) < len(here):
                    new = [place for place, row in enumerate(here) if row not in known]
                    rest, chosen = (pixels[new], index[new]) if known else (pixels, index)
                    asked = None if queries is None else queries[chosen]
                    features[chosen] = encoded = self._encoded(rest, images, tower, few, asked)
                    unreadable |= self._not_finite(encoded, chosen, images, skip)
                for row in known:
                    first = seen[here[row] or b""]
                    features[row] = features[first]
                    unreadable |= {row: unreadable[first]} if first in unreadable else {}
                fresh |= {row: content for row, content in here.items() if row not in known and row not in unreadable}
                if len(fresh) >= self.args.eval_batch_size:
                    put()
        features[list(unreadable)] = 0
        processes.sum_over_processes([features])
        for row, first in copies.items():
            features[row] = features[first]
        return features, unreadable | {row: unreadable[first] for row, first in copies.items() if first in unreadable}

    def _not_finite(
        self, features: torch.Tensor, index: torch.Tensor, images: PixelDataset, skip: bool
    ) -> dict[int, str]:
        """Return the images whose features are not finite, with the reason, or without `skip` raise a ValueError."""
        why = "its features are NaN or infinite, because of its pixels, the precision or the model"
        rows = index[~features.isfinite().all(dim=1).cpu()].tolist()
        if rows and not skip:
            raise ValueError(f"image {rows[0]} ({images.images.item_name(rows[0])}) cannot be used: {why}")
        return dict.fromkeys(rows, why)

    def _fill_from_store(
        self, store: FeatureStore, key: EncoderKey, images: PixelDataset, features: torch.Tensor
    ) -> tuple[list[int], dict[int, int]]:
        """Write the features that the store has into `features`, (n, d).

        Returns the rows that must be encoded, and a dict from each duplicate of such a row to this row.
        """

        def ask() -> tuple[list[bytes | None], dict[bytes, np.ndarray]]:
            # Without earlier features, reading the files only for their contents would read each one twice.
            contents = images.images.contents() if store.had(key) else images.images.known_contents()
            return contents, store.get(key, contents)

        contents, stored = processes.on_main_process(ask)
        rows, copies, first = list[int](), dict[int, int](), dict[bytes, int]()
        for row, content in enumerate(contents):
            if content is None or (content not in stored and first.setdefault(content, row) == row):
                rows.append(row)
            elif content not in stored:
                copies[row] = first[content]
        known = [row for row, content in enumerate(contents) if content in stored]
        if known and processes.world()[0] == 0:  # one process only, since the features of all processes are summed
            known_features = np.stack([stored[contents[row] or b""] for row in known])
            features[known] = torch.from_numpy(known_features).to(self.device)
        return rows, copies
