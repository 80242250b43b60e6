"""The adapter as PEFT knows it."""

import peft  # noqa: F401 - registers the method, which imports every file of this wing in their right order
