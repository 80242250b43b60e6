"""example:
  dulbe-peft env

A bug report needs all of it. It says, too, where the feature store lies and how large it is.
"""

import platform

from dulbe_peft.photos.commands.options import command
from dulbe_peft.utils.terminal import counted


@command()
def env() -> None:
    import torch

    from dulbe_peft.data.store import FeatureStore, store_path
    from dulbe_peft.utils.folders import library_versions

    for name, version in library_versions().items():
        print(f"{name}: {version}")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    print(f"platform: {platform.platform()}")
    found = "none" if accelerator is None else accelerator.type
    print(f"accelerator: {found}, CPU threads: {torch.get_num_threads()}")
    store = FeatureStore(store_path())
    count, size = store.facts()
    held = f"{counted(count, 'feature')}, {size / 1e6:.1f} MB" if count else "empty"
    print(f"feature store: {store.path}, {held}")
