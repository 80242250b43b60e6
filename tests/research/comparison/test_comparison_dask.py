"""A comparison over several machines: local clusters of two worker processes and a folder that both see."""

import os
import signal
import threading
import time
from contextlib import suppress

import pytest
from compared import without_times

from research.comparison.compare import compare
from research.comparison.plan import make_plan

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


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


def test_a_worker_that_is_killed_costs_nothing(plan, tmp_path):
    distributed = pytest.importorskip("distributed")
    killed = threading.Event()

    def kill_the_first_that_works(processes):
        """Kill a worker as soon as a task of some run is committed."""
        committed = False
        while not committed:
            time.sleep(0.02)
            with suppress(OSError):  # a temporary folder that is gone before it is looked into
                committed = any((tmp_path / "dask").rglob("task-001/manifest.json"))
        os.kill(processes[0], signal.SIGKILL)
        killed.set()

    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        processes = [nanny.pid for nanny in cluster.workers.values()]
        threading.Thread(target=kill_the_first_that_works, args=[processes], daemon=True).start()
        found = compare(plan, tmp_path / "dask", 2, "dask", cluster.scheduler_address, log=lambda _: None)
    assert killed.is_set()
    assert without_times(found) == without_times(compare(plan, tmp_path / "local", 1, log=lambda _: None))


def test_ray_finds_the_same(plan, tmp_path):
    ray = pytest.importorskip("ray")
    said = []
    found = compare(plan, tmp_path / "ray", 2, "ray", log=said.append)
    assert without_times(found) == without_times(compare(plan, tmp_path / "local", 1, log=lambda _: None))
    assert said and not ray.is_initialized()
