"""`dulbe-peft env`: versions and the accelerator."""

import platform

from dulbe_peft.commands.options import command


@command()
def env() -> int:
    import torch

    from dulbe_peft.utils.folders import library_versions

    for name, version in library_versions().items():
        print(f"{name}: {version}")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    print(f"platform: {platform.platform()}")
    found = "none" if accelerator is None else accelerator.type
    print(f"accelerator: {found}, CPU threads: {torch.get_num_threads()}")
    return 0
