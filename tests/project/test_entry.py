"""`python -m dulbe_peft` in processes that Python starts; other tests have those of `processes`, which are checked."""

import os
import re
import signal
import subprocess
import sys

import processes
import pytest
from small_runs import MACHINE

pytestmark = pytest.mark.slow


def started(*words, **options):
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, **options)


def test_run_predict_and_serve_work_as_in_processes_of_tests(digit_folders, tiny_model, tmp_path):
    data, out = digit_folders(2, 3, 2), tmp_path / "out"
    settings = ["--strategy", "frozen", "--classifiers", "prototype", *MACHINE]
    run = ["run", "--model", tiny_model, "--data", data, "--output", out, "--overwrite", *settings]
    predict = ["predict", out, data / "test", "--top-k", "1"]
    printed = []
    for start in (started, processes.run):
        for words in (run, predict):
            done = start("-m", "dulbe_peft", *words)
            assert done.returncode == 0, done.stderr
            printed.append(re.sub(r"[\d.]+ s\b", "", done.stdout))
    assert printed[:2] == printed[2:] and all(printed)
    command = [sys.executable, "-m", "dulbe_peft", "serve", out, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert any(line.startswith("open http://127.0.0.1:") for line in process.stdout)
        process.terminate()
        rest = process.communicate(timeout=60)
    assert process.returncode == 143, rest


ENDS = """
import atexit, os, signal, sys
atexit.register(print, "at exit", flush=True)
print(sys.argv, __name__, sys.path[0], os.getcwd(), os.environ["CASE"], sys.stdin.read(), os.fsync.__module__)
{}
"""


@pytest.mark.parametrize(
    "last",
    [
        "",
        "sys.exit(3)",
        "sys.exit('no')",
        "1 / 0",
        "raise KeyboardInterrupt",
        "signal.raise_signal(signal.SIGINT)",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.close(1)",
        "import threading; threading.Thread(target=lambda: print('thread')).start()",
        "import dulbe_peft.gone",
        "print(sys.stdin, sys.stdout, sys.stderr, sys.stdout.buffer, sys.stdout is sys.__stdout__)",
    ],
)
def test_process_of_a_test_ends_as_one_of_python(last, tmp_path):
    given = {"env": os.environ | {"CASE": "some", "OMP_NUM_THREADS": "1"}, "cwd": tmp_path}
    words = ("-c", ENDS.format(last), "a", "b")
    theirs, ours = started(*words, stdin=subprocess.DEVNULL, **given), processes.run(*words, **given)
    assert (ours.args, ours.returncode, ours.stdout) == (theirs.args, theirs.returncode, theirs.stdout)
    # A traceback has the frames of the server besides.
    assert ours.stderr.splitlines()[-1:] == theirs.stderr.splitlines()[-1:]


def test_process_of_a_test_is_killed_by_its_number():
    process = processes.Process("-c", "import time; time.sleep(99)")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    assert process.poll() is None and process.pid != os.getpid()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == process.poll() == -signal.SIGTERM
