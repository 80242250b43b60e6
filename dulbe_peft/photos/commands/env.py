"""example:
  dulbe-peft env

Please include all of this in a bug report. The last line gives the path and size of the feature store.
"""

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from dulbe_peft.photos.commands.options import command
from dulbe_peft.utils.terminal import counted

# transformers and PEFT import these if they are installed, so a version that does not fit stops every command.
OPTIONAL = (
    *("torchvision", "torchaudio", "timm", "torchao", "bitsandbytes", "flash-attn", "kernels", "deepspeed"),
    *("xformers", "triton", "tensorflow", "jax"),
)


@command()
def env() -> None:
    import torch

    from dulbe_peft.data.store import FeatureStore, store_path
    from dulbe_peft.utils.folders import library_versions

    for name, found in library_versions().items():
        print(f"{name}: {found}")
    for name in OPTIONAL:
        with suppress(PackageNotFoundError):
            print(f"{name}: {version(name)}")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    print(f"platform: {platform.platform()}")
    kind = "none" if accelerator is None else accelerator.type
    print(f"accelerator: {kind}, CPU threads: {torch.get_num_threads()}")
    store = FeatureStore(store_path())
    count, size = store.facts()
    content = f"{counted(count, 'feature')}, {size / 1e6:.1f} MB" if count else "empty"
    print(f"feature store: {store.path}, {content}")
