"""`dulbe-peft env`: versions and the accelerator."""

from __future__ import annotations

import argparse
import platform
from typing import Any

from dulbe_peft.utils.folders import library_versions


def add(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser("env", help="print versions and the accelerator, for a bug report")
    parser.set_defaults(call=env)


def env(_: argparse.Namespace) -> int:
    """Print versions and the accelerator."""
    import torch

    for name, version in library_versions().items():
        print(f"{name}: {version}")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    print(f"platform: {platform.platform()}")
    found = "none" if accelerator is None else accelerator.type
    print(f"accelerator: {found}, CPU threads: {torch.get_num_threads()}")
    return 0
