"""Test that two processes learn what one process learns from the same batches, and that sharding is refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dulbe_peft.utils.processes import choose_device, padded_shard, refuse_sharded, shard

STREAM = Path(__file__).with_name("distributed_stream.py")
# `lora_sub` uses notes of `plan`, and `cl_lora` adds gradients of its own. The bounds are about three times the
# difference that another order of rows in a batch makes in one process, 6e-6 and 5.5e-5. Adam turns the rounding error
# of a gradient near zero into a part of its step, here of 1e-3, and CL-LoRA's gradients have rows near zero.
STRATEGIES = {"dulbe": 2e-5, "lora_sub": 2e-5, "cl_lora": 1.5e-4}
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")


def launch(processes, output, strategies, *more):
    """Learn the stream with each strategy and return the script's output."""
    output.mkdir(exist_ok=True)
    start = (*LAUNCH, str(processes)) if processes > 1 else ()
    command = [sys.executable, *start, str(STREAM), str(output), str(processes), ",".join(strategies), *more]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def final_states(output, strategy="dulbe", processes=2):
    """Return the final state of each process."""
    return [load_file(output / f"{strategy}-{rank}.safetensors") for rank in range(processes)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Learn with every strategy in one process; returns the folder."""
    output = tmp_path_factory.mktemp("one")
    launch(1, output, STRATEGIES)
    return output


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Learn with every strategy in two processes; returns the folder and the output."""
    output = tmp_path_factory.mktemp("two")
    return output, launch(2, output, STRATEGIES)


@pytest.mark.rare
@pytest.mark.parametrize(("strategy", "bound"), STRATEGIES.items())
def test_two_processes_learn_the_same_as_one(alone, pair, strategy, bound):
    folder, output = pair
    (expected,), (first, second) = final_states(alone, strategy, 1), final_states(folder, strategy)
    assert first.keys() == second.keys() == expected.keys()
    assert all(torch.equal(first[name], second[name]) for name in expected)
    for name, tensor in expected.items():
        scale = max(1.0, float(tensor.abs().max())) if tensor.numel() else 1.0
        torch.testing.assert_close(first[name] / scale, tensor / scale, rtol=1e-4, atol=bound)
    assert output.count("task 3/3") == len(STRATEGIES)
    for file in ("results.json", "task-003/manifest.json", "task-003/learner.json", "task-003/adapter_config.json"):
        assert (folder / strategy / file).is_file()
    assert [path.name for path in (folder / strategy).iterdir() if path.name.startswith(".")] == []


@pytest.mark.rare
def test_two_processes_resume_a_run_of_one_process(alone, tmp_path):
    shutil.copytree(alone / "dulbe", tmp_path / "dulbe")
    original = json.loads((tmp_path / "dulbe" / "results.json").read_text())
    shutil.rmtree(tmp_path / "dulbe" / "task-003")
    assert "resuming after task-002" in launch(2, tmp_path, ["dulbe"])
    first, second = final_states(tmp_path)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert json.loads((tmp_path / "dulbe" / "results.json").read_text())["class_names"] == original["class_names"]


@pytest.mark.rare
def test_error_in_one_process_is_raised_in_all_processes(pair, tmp_path):
    """The script catches each error and continues; it must then learn the same as without errors."""
    launch(2, tmp_path, ["dulbe"], "break")
    for left, right in zip(final_states(pair[0]), final_states(tmp_path), strict=True):
        assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_shards_cover_all_rows_and_padded_shards_have_equal_size(count, monkeypatch):
    shares, parts = [], []
    for rank in range(3):
        monkeypatch.setattr("dulbe_peft.utils.processes.world", lambda rank=rank: (rank, 3))
        shares.append(padded_shard(range(count)))
        parts += shard(range(count))
    assert len({len(share) for share in shares}) == 1
    assert [row for share in shares for row in share][:count] == list(range(count))
    assert parts == list(range(count))


def test_sharded_modules_parameters_and_launches_are_refused(monkeypatch):
    wrapped = type("FullyShardedDataParallel", (nn.Module,), {})()  # has the name of torch's FSDP module
    with pytest.raises(ValueError, match="FullyShardedDataParallel is sharded"):
        refuse_sharded(nn.Sequential(wrapped))
    refuse_sharded(nn.Linear(2, 2))
    for mark in ("ds_id", "device_mesh"):
        model = nn.Linear(2, 2)
        setattr(model.weight, mark, 0)
        with pytest.raises(ValueError, match="weight is sharded.*ZeRO-3"):
            refuse_sharded(model)
    for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        with monkeypatch.context() as context, pytest.raises(ValueError, match=kind):
            context.setenv(f"ACCELERATE_USE_{kind}", "true")
            choose_device("cpu")
