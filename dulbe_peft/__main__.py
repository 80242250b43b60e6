"""`python -m dulbe_peft` is the command line `dulbe-peft`, which stands in `dulbe_peft.photos`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("dulbe_peft.photos", run_name="__main__")
