"""Training strategies. Each is imported on first use; docs/strategies.md says how each differs from its paper."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
