"""Run the code of the README and of `photographs.md`, and write what it prints below it: `python docs/outputs.py`.

A block that prints stands above its markers:

<!-- output -->
<!-- end of output -->

A page is run from the top to its last marker, Python and `dulbe-peft` commands together.
"""

import os
import re
import shlex
import tempfile
import textwrap
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/by-hand.md", "docs/photographs.md")
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
WIDTH = 108  # of a line, in characters: what a page shows at 1280 pixels without scrolling
MARKED = re.compile(r"(<!-- output -->\n).*?(<!-- end of output -->)", re.DOTALL)


def with_outputs(text: str, folder: str | Path) -> str:
    """Run the blocks of a page in `folder`, and return the page with what they print between its markers."""
    namespace: dict = {"__name__": "__main__"}
    parts, end = [], 0
    for marked in MARKED.finditer(text):
        between = text[end : marked.start()]
        printed = [run(language, code, namespace, folder) for language, code in BLOCK.findall(between)]
        parts += [between, marked[1], "\n```text\n", printed[-1], "```\n\n", marked[2]]
        end = marked.end()
    return "".join(parts) + text[end:]


def run(language: str, code: str, namespace: dict, folder: str | Path) -> str:
    """Run one block in `folder` and return what it prints; of commands also what they say on standard error."""
    from dulbe_peft.photos.commands.main import main

    printed = StringIO()
    said = StringIO() if language == "python" else printed
    with chdir(folder), redirect_stdout(printed), redirect_stderr(said):
        if language == "python":
            exec(compile(code, "a block of the page", "exec"), namespace)
        else:
            for line in code.replace("\\\n", " ").splitlines():
                program, *arguments = shlex.split(line, comments=True)
                if program == "pip":
                    continue
                status = main(arguments) if program == "dulbe-peft" else f"the program is {program!r}"
                if status:
                    raise RuntimeError(f"{line}\n{status}\n{printed.getvalue()}")
    shown = [line for line in printed.getvalue().splitlines() if not line.startswith("{")]  # without a Trainer's logs
    lines = [textwrap.wrap(line, WIDTH, subsequent_indent="  ") or [""] for line in shown]
    return "".join(part + "\n" for parts in lines for part in parts)


if __name__ == "__main__":
    import torch

    torch.cpu.get_capabilities = dict  # as in the tests, so that images are encoded in float32 on every processor
    for page in PAGES:
        with tempfile.TemporaryDirectory() as work:
            os.environ["DULBE_PEFT_STORE"] = f"{work}/features.sqlite"
            text = with_outputs((ROOT / page).read_text(encoding="utf-8"), work)
        (ROOT / page).write_text(text, encoding="utf-8")
