"""The application on the library: folders of photographs, the command line, reports, a page to label on, exports."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
