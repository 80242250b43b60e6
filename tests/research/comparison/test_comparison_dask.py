"""Test a comparison on several machines, with local clusters of two workers that share a folder."""

import os
import signal
import threading
import time
from contextlib import suppress

import pytest
from compared import without_times

from research.comparison.compare import compare
from research.comparison.plan import make_plan

pytestmark = [pytest.mark.rare, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def plan(digit_folders):
    quick = {"increment": 2, "epochs": 1, "batch_size": 4, "support_rank": 8, "residual_rank": 2, "device": "cpu"}
    content = {
        "streams": {"digits": {"model": "demo", "data": str(digit_folders(6, 6, 3)), **quick}},
        "methods": {"frozen": {"strategy": "frozen"}, "DuLBE": {"strategy": "dulbe"}},
        "classifiers": ["bridge", "lda"],
        "seeds": [0, 1],
    }
    return make_plan(content)


def test_killed_worker_does_not_change_the_results(plan, tmp_path):
    distributed = pytest.importorskip("distributed")
    killed = threading.Event()

    def kill_first_worker(processes):
        """Kill a worker as soon as any run has committed a task."""
        committed = False
        while not committed:
            time.sleep(0.02)
            with suppress(OSError):  # a temporary folder can disappear before it is read
                committed = any((tmp_path / "dask").rglob("task-001/manifest.json"))
        os.kill(processes[0], signal.SIGKILL)
        killed.set()

    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        processes = [nanny.pid for nanny in cluster.workers.values()]
        threading.Thread(target=kill_first_worker, args=[processes], daemon=True).start()
        entries = compare(plan, tmp_path / "dask", 2, "dask", cluster.scheduler_address, log=lambda _: None)
    assert killed.is_set()
    assert without_times(entries) == without_times(compare(plan, tmp_path / "local", 1, log=lambda _: None))


def test_ray_gives_the_same_results(plan, tmp_path):
    ray = pytest.importorskip("ray")
    messages = []
    entries = compare(plan, tmp_path / "ray", 2, "ray", log=messages.append)
    assert without_times(entries) == without_times(compare(plan, tmp_path / "local", 1, log=lambda _: None))
    assert messages and not ray.is_initialized()
