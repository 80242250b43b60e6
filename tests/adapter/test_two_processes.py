"""Hand-written training loops in two processes, each with a part of the data, or of the parameters (FSDP2)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_in_two_processes(script):
    script = Path(__file__).with_name(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    path = f"{script.parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "ended 0" in done.stdout and "ended 1" in done.stdout


@pytest.mark.rare
def test_probe_statistics_and_routed_gradients_cover_all_processes():
    run_in_two_processes("two_processes.py")


@pytest.mark.rare
def test_sharded_model_computes_and_trains_as_a_whole_one_and_refuses_everything_else():
    run_in_two_processes("two_shards.py")
