"""`dulbe-peft serve`: a page in the browser to try a learner."""

from collections.abc import Callable
from typing import Any

import click

from dulbe_peft.commands.options import command, learner_options, option


@command()
@learner_options()
@option("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: the whole network (127.0.0.1)")
@option("--name", "names", multiple=True, metavar="NAME", help="by which the page is opened, too, as behind a proxy")
@option("--port", type=click.IntRange(0, 65535), default=7860, help="0: any free one (7860)")
def serve(learner: str, load: Callable[..., Any], host: str, names: tuple[str, ...], port: int) -> int:
    """example:
      dulbe-peft serve out

    Open the address that it prints. Drop photographs, correct an answer, add a class from a few
    photographs, take a change back, download the learner. Nobody else can reach the page unless
    --host says so, and what is dropped stays on this machine. The page is opened by its address, or
    by a --name.
    """
    name = f"[{host}]" if ":" in host else host
    loaded = load()
    from dulbe_peft.serving import make_server

    try:
        server = make_server(loaded, host, port, names)
    except OSError as error:
        raise OSError(
            f"{name}:{port} cannot be listened on: {error.strerror}; take another --port or --host"
        ) from error
    print(f"open http://{name}:{server.server_address[1]} (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return 0
