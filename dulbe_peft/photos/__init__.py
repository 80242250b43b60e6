"""The application for photographs: reading folders, the command line, reports, a labelling page and exports."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
