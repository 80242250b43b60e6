"""examples:
  dulbe-peft serve out --output taught
  dulbe-peft serve taught --output taught
  dulbe-peft serve taught --output taught --photos heap

Open the address that it prints. Drop photographs, say what is right, add a class from a few
photographs, take a change back. What is taught is saved in --output, which the second command
goes on with; without it the page can only be tried. With --photos the page asks what these are, one
after the other, the most useful first: 1 to 5 for a proposed class, or a name and Enter, Space to
skip, Backspace to take back. After each five the learner has learned them. Nobody else can reach the
page unless --host says so, and what is dropped stays on this machine. The page is opened by its
address, or by a --name. Where there is no learner yet, dulbe-peft suggest --model MODEL heap says
what to label for the first one.
"""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le

from dulbe_peft.photos.commands.named import FOLDER, check_images, claim, say_next
from dulbe_peft.photos.commands.options import OVERWRITE, Folder, Load, command, learner_options
from dulbe_peft.utils.settings import setting


@command()
@learner_options()
def serve(
    learner: str,
    load: Load,
    output: Folder | None = setting(None, "save the learner here after each change; without it, nothing is kept"),
    photos: Folder | None = setting(None, "photographs to label, the most useful ones first"),
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0: the whole network"),
    names: tuple[str, ...] = setting((), "by which the page is opened, too, as behind a proxy", flag="--name"),
    port: Annotated[int, Ge(0), Le(65535)] = setting(7860, "0: any free one"),
    overwrite: bool = OVERWRITE,
) -> None:
    name = f"[{host}]" if ":" in host else host
    if photos is not None:
        if not os.path.isdir(photos):
            raise FileNotFoundError(f"--photos {photos} is no folder")
        check_images([photos])
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]
        raise OSError(f"{name}:{port} cannot be listened on: {why}; take another --port or --host") from error
    with ExitStack() as held:
        if output is not None:
            held.enter_context(_own(output, learner, photos, overwrite))
        loaded = load()
        from dulbe_peft.photos.serving import make_server

        server = held.enter_context(make_server(loaded, host, port, names, output, photos))
        for line in [] if server.app.labelling is None else server.app.labelling.left_out:
            print(line)
        kept = "nothing that it learns is saved without --output" if output is None else f"saves in {output}"
        print(f"open http://{name}:{server.server_address[1]} (Ctrl-C ends it; {kept})", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            with server.app.turn:  # a change that was begun is finished
                server.app.finish()
                if server.app.unsaved:
                    print("what it was taught is not saved, and gone: --output FOLDER keeps it", file=sys.stderr)
        if output is not None and Path(output).is_dir():
            say_next("predict", output, photos or "PHOTOS")


@contextmanager
def _own(output: str, learner: str, photos: str | None, overwrite: bool) -> Iterator[None]:
    """Keep a folder for this server alone: it goes on with the learner that lies there, and replaces no other one."""
    from dulbe_peft.utils.folders import LOCK_SUFFIX, CheckpointError, exclusive, parse_manifest

    place = Path(output).resolve()
    with exclusive(place.with_name(f".{place.name}.serving{LOCK_SUFFIX}"), output):  # before anything is put aside
        if place != Path(learner).resolve():
            claim(("--output", output, FOLDER), apart=[learner, photos], overwrite=overwrite)
            if place.is_dir() and any(place.iterdir()):
                go_on = f"serve {output} --output {output} goes on with what is there, --overwrite begins anew"
                raise FileExistsError(f"{output} exists: {go_on}")
        else:
            try:
                kind = parse_manifest(place).kind
            except CheckpointError:
                kind = "run"
            if kind != "learner":
                raise FileExistsError(f"{output} is of the kind {kind!r}, which never changes: name another --output")
        yield
