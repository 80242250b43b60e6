"""A learner that knows two colours, and its web server."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import numpy as np
import tiny_encoders as tiny
from PIL import Image
from tiny_encoders import QUICK

from dulbe_peft import ClassIncrementalLearner, LearnerArguments, load_dual_encoder
from dulbe_peft.photos import serving


def photo(colour: int, number: int = 0) -> Image.Image:
    noise = np.random.default_rng([colour, number]).integers(0, 40, (16, 16, 3))
    noise[..., colour] += 200
    return Image.fromarray(noise.astype(np.uint8))


COLOURS = ("red", "green", "blue")


def heap_of(folder, *sites):
    """Save twelve photographs, four of each colour, in turn in these folders of a folder, or in it; return it."""
    for number in range(12):
        place = folder / (sites or ("",))[number % max(1, len(sites))]
        place.mkdir(parents=True, exist_ok=True)
        photo(number % 3, 100 + number).save(place / f"{COLOURS[number % 3]}-{number}.png")
    return folder


def two_colours(root):
    """Save a learner that distinguishes red from green, and return its folder."""
    base = tiny.save_encoder("clip", root / "base")
    model, processor = load_dual_encoder(base)
    learner = ClassIncrementalLearner(
        model, processor, args=LearnerArguments(**QUICK), strategy="frozen", classifiers="prototype"
    )
    rows = [{"image": photo(colour), "label": colour} for colour in (0, 1) for _ in range(4)]
    learner.learn_task(rows, ["red", "green"])
    learner.save_pretrained(root / "learner")
    return root / "learner"


@contextmanager
def running(folder, **options):
    server = serving.make_server(ClassIncrementalLearner.from_pretrained(folder), port=0, **options)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def served(folder, **options):
    with running(folder, **options) as server:
        yield f"http://127.0.0.1:{server.server_address[1]}"
