"""The dual-mode adapter: `layer.py` is the method's layer, `gradients.py` probes and routes, `model.py` has tasks.

Importing this package registers the method with PEFT.
"""

import peft  # noqa: F401 - first, because whatever waits for PEFT imports the modules below

from dulbe_peft.adapter.model import register

register()
