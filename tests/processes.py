"""Processes of Python that start with torch, transformers and other slow packages imported.

`run` and `Process` are for a command `[sys.executable, *words]` what `subprocess.run` and `subprocess.Popen` are, for
the words `-c CODE ...` and `-m MODULE ...`. Each test process has one server: a Python of its own, started from the
command line, which imports `IMPORTED` and forks a process for each program.

Such a process is as good as one that Python starts. It does not descend from the test process, so it has none of its
modules, patches, caches and registries, and it waits for the disk. The server imports neither this package nor PEFT:
each process imports them itself, in its own order. Its number, streams, environment, working folder, arguments and
`__main__` are its own, signals act as usual, and it ends as Python ends, with traceback, functions of `atexit` and
status. Three things differ: all processes of a server share the seed of `hash`, they compute like the tests with one
thread and without a GPU, and they do not show what it takes to import `IMPORTED`. Where a test is about that, and once
for each kind of command (tests/project/test_entry.py), Python is started itself.
"""

import atexit
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from functools import cache
from types import ModuleType

IMPORTED = (
    *("torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor"),
    *("transformers.modeling_layers", "transformers.loss.loss_utils", "transformers.models.bloom.modeling_bloom"),
    *("transformers.models.clip.modeling_clip", "transformers.models.clip.processing_clip"),
    *("transformers.models.clip.image_processing_pil_clip", "transformers.models.clip.tokenization_clip"),
    *("accelerate", "click", "datasets", "matplotlib.figure", "PIL.Image", "pydantic", "scipy.stats", "sklearn.base"),
)
# Variables that Python or one of these packages reads when it starts. All processes have those of the server.
READ_AT_START = ("PYTHON", "LANG", "LC_", "OMP_", "MKL_", "HF_", "TRANSFORMERS_", "TOKENIZERS_")
THREADS, DEVICES = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}, {"CUDA_VISIBLE_DEVICES": ""}
ENVIRONMENT = {**os.environ, **THREADS, **DEVICES}
NUMBER = struct.Struct("i")


class Process:
    """A running program, with the methods of `subprocess.Popen` that tests use.

    `stdout` and `stderr` are open files or their numbers; without them, what is printed goes nowhere.
    """

    def __init__(self, *words, stdout=None, stderr=None, cwd=None, env=None):
        self.args, self.returncode = [sys.executable, *map(str, words)], None
        environment = {**THREADS, **(os.environ if env is None else env), **DEVICES}
        read = {name for name in ENVIRONMENT.keys() | environment if name.startswith(READ_AT_START)}
        changed = [name for name in read if environment.get(name) != ENVIRONMENT.get(name)]
        assert not changed, f"{changed} are read before the program starts: use subprocess"
        job = json.dumps([self.args[1:], environment, str(cwd or os.getcwd())]).encode()
        self._connection, other = socket.socketpair()
        with other, open(os.devnull, "r+b") as nowhere:
            streams = [nowhere if stream is None else stream for stream in (None, stdout, stderr)]
            numbers = [stream if isinstance(stream, int) else stream.fileno() for stream in streams]
            socket.send_fds(_server(), [b"\0"], [other.fileno(), *numbers])
        self._connection.sendall(NUMBER.pack(len(job)) + job)
        self.pid = self._number()

    def _number(self):
        received = self._connection.recv(NUMBER.size)
        assert received, "the server of processes has ended"
        return NUMBER.unpack(received)[0]

    def poll(self):
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout=None):
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = self._number()
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout) from None
            self._connection.close()
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def run(*words, check=False, **options):
    """Run a program to its end; return what `subprocess.run(..., capture_output=True, text=True)` returns."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = Process(*words, **{"stdout": out, "stderr": errors, **options})
        process.wait()
        out.seek(0)
        errors.seek(0)
        done = subprocess.CompletedProcess(process.args, process.returncode, out.read(), errors.read())
    if check:
        done.check_returncode()
    return done


@cache
def _server():
    """Start the server, and return the socket that takes a byte and four open files for each program."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, __file__, str(theirs.fileno())]
    nowhere = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=ENVIRONMENT, pass_fds=[theirs.fileno()], **nowhere)
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.shutdown, socket.SHUT_RDWR)  # `close` alone would leave it to processes forked by tests
    return ours


def serve(requests):
    """Fork a process that looks after each program. Returns only in a program's process, with what to run there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, and that ends the server
    while True:
        _, files, _, _ = socket.recv_fds(requests, 1, 4)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # those that have ended
                pass
        if not files:
            os._exit(0)
        if not os.fork():
            requests.close()
            return look_after(socket.socket(fileno=files[0]), files[1:])
        for file in files:
            os.close(file)


def look_after(connection, streams):
    """Fork a program's process, and send its number and its status. Returns in the program's process what to run."""
    with connection.makefile("rb") as received:
        job = json.loads(received.read(*NUMBER.unpack(received.read(NUMBER.size))))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if process := os.fork():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for file in (0, 1, 2, *streams):
            os.close(file)
        connection.sendall(NUMBER.pack(process))
        connection.sendall(NUMBER.pack(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])))
        os._exit(0)
    connection.close()
    for number, file in enumerate(streams):
        os.dup2(file, number)
        os.close(file)
    return job


def standard(name, number):
    """Open a standard stream as Python does when it starts."""
    given = getattr(sys, name)
    file = io.FileIO(number, "w" if number else "r", closefd=False)
    file.name = given.name
    buffer = file if given.write_through else io.BufferedWriter(file) if number else io.BufferedReader(file)
    lines = given.line_buffering or file.isatty()
    stream = io.TextIOWrapper(buffer, given.encoding, given.errors, "\n", lines, given.write_through)
    stream.mode = given.mode
    return stream


def become(words, environment, folder):
    """Run a program in this process as Python runs it, and end the process as Python ends."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = standard(name, number)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    importlib.invalidate_caches()
    sys.modules["numpy"].random.seed()
    main = sys.modules["__main__"] = ModuleType("__main__")
    kind, program, *arguments = words
    sys.argv = [kind, *arguments]
    sys.path.insert(0, folder if kind == "-m" else "")
    try:
        if kind == "-m":
            runpy._run_module_as_main(program)
        else:
            exec(compile(program, "<string>", "exec"), vars(main))
        status = 0
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    # Python then takes all modules apart, which takes longer than the rest and is of use to nobody.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    del sys.path[0]  # this folder
    for name in IMPORTED:
        with suppress(ModuleNotFoundError):  # older releases lack some of these modules
            importlib.import_module(name)
    assert threading.active_count() == 1, "a fork would leave the other threads behind"
    assert not {"peft", "dulbe_peft"} & sys.modules.keys(), "each process imports them itself"
    gc.collect()
    gc.freeze()  # a collection would copy the memory that the processes share
    become(*serve(socket.socket(fileno=int(sys.argv[1]))))
