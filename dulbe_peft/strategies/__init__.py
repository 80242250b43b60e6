"""Strategies, each imported when it is first used; docs/strategies.md says where one differs from its paper."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
