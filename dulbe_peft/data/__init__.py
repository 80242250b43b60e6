"""Labelled images: reading and decoding them, identifying them by content, and storing their features."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
