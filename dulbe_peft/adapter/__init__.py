"""The adapter as PEFT knows it. To import this package is to register the method with PEFT."""

import peft  # noqa: F401 - first, as the modules below are imported by whoever waits for it

from dulbe_peft.adapter.model import register

register()
