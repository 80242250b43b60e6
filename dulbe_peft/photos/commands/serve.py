"""examples:
  dulbe-peft serve out --output taught
  dulbe-peft serve taught --output taught
  dulbe-peft serve taught --output taught --photos heap

Open the address that the command prints. On the page you can classify photographs, correct
predictions, add a class from a few photographs, and undo changes. The learner is saved in --output
after each change, and the second command continues with it; without --output, nothing is saved.

With --photos, the page asks for the labels of these photographs, one after the other, the most useful
first. Press 1 to 5 for a proposed class, or type a name and press Enter. Each label is written to
OUTPUT/labels.csv at once (an empty one means "none of these"), and read from there at the next start.
Labels are learned five at a time, and when the server stops. Below, the page lists all labels and the
learner's answers, by folder, class and doubt, to correct and to undo.

Only this machine can reach the page unless --host allows others, and photographs stay on this
machine. Open the page by its address, or by a name given with --name. If you have no learner yet,
dulbe-peft suggest --model MODEL heap says which photographs to label first.
"""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le

from dulbe_peft.photos.commands.advice import print_next_command
from dulbe_peft.photos.commands.flags import ONLY, OVERWRITE, SUM_UP, File, Folder
from dulbe_peft.photos.commands.options import Load, answers_of, command, learner_options, settings_of
from dulbe_peft.photos.commands.paths import FOLDER, check_images, claim
from dulbe_peft.photos.data.source import GROUPING, DataSource
from dulbe_peft.utils.settings import setting


@command(settings=settings_of(DataSource, GROUPING))
@learner_options()
def serve(
    learner: str,
    load: Load,
    output: Folder | None = setting(None, "save the learner here after each change (default: do not save)"),
    photos: Folder | None = setting(None, "folder of photographs to label and to look at"),
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 lets the whole network connect"),
    names: tuple[str, ...] = setting((), "further name of the page, such as that of a proxy", flag="--name"),
    port: Annotated[int, Ge(0), Le(65535)] = setting(7860, "port to listen on; 0 chooses a free one"),
    only: File | None = ONLY,
    sum_up: File | None = SUM_UP,
    overwrite: bool = OVERWRITE,
    **groups: Any,
) -> None:
    name = f"[{host}]" if ":" in host else host
    if photos is None and any(groups.values()):
        raise ValueError("--group and --group-seconds are for --photos: give the folder, too")
    if photos is not None:
        if not os.path.isdir(photos):
            raise FileNotFoundError(f"--photos {photos} is not a folder")
        check_images([photos])
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]
        raise OSError(f"cannot listen on {name}:{port}: {why}; give another --port or --host") from error
    with ExitStack() as held:
        if output is not None:
            held.enter_context(_reserved(output, learner, photos, overwrite))
        loaded = load()
        from dulbe_peft.photos.serving import make_server

        answers = answers_of(only, sum_up, loaded.class_names)
        given = {"output": output, "photographs": photos, **groups, **answers}
        server = held.enter_context(make_server(loaded, host, port, names, **given))
        left_out = [] if server.app.labelling is None else server.app.labelling.left_out
        for line in [*left_out, *server.app.notes]:
            print(line)
        kept = "changes are not saved without --output" if output is None else f"changes are saved in {output}"
        print(f"open http://{name}:{server.server_address[1]} (Ctrl-C stops the server; {kept})", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            with server.app.lock:  # wait for a change that is in progress
                server.app.finish()
                if server.app.unsaved:
                    print("the changes were not saved: next time, give --output FOLDER", file=sys.stderr)
        if output is not None and Path(output).is_dir():
            print_next_command("predict", output, photos or "PHOTOS")


@contextmanager
def _reserved(output: str, learner: str, photos: str | None, overwrite: bool) -> Iterator[None]:
    """Lock the output folder for this server. It may continue with the learner there, but not replace another one."""
    from dulbe_peft.utils.folders import LOCK_SUFFIX, CheckpointError, exclusive, parse_manifest

    place = Path(output).resolve()
    # Lock the folder before `claim` may rename it.
    with exclusive(place.with_name(f".{place.name}.serving{LOCK_SUFFIX}"), output):
        if place != Path(learner).resolve():
            claim(("--output", output, FOLDER), apart=[learner, photos], overwrite=overwrite)
            if place.is_dir() and any(place.iterdir()):
                go_on = f"serve {output} --output {output} continues with it, and --overwrite starts again"
                raise FileExistsError(f"{output} exists: {go_on}")
        else:
            try:
                kind = parse_manifest(place).kind
            except CheckpointError:
                kind = "run"
            if kind != "learner":
                raise FileExistsError(f"{output} is a {kind!r} folder, which serve does not change: give another one")
        yield
