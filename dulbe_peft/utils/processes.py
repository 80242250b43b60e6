"""Work in several processes, as `accelerate launch` starts them: sharing rows, and summing or copying tensors.

Every process holds the whole model. It encodes its own rows of each training batch, gathers the features of all rows,
and computes every loss on the whole batch. Gradients flow back only through its own rows, so they are **summed** over
processes, never averaged. The model is never wrapped, because routed gradients bypass the hooks of a data-parallel
wrapper. With a single process, every function here returns its input unchanged.

The device and the precision of a process are also chosen here.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import distributed, nn

T = TypeVar("T")
_SHARDED = (
    "is sharded over processes (FSDP, tensor parallelism or DeepSpeed ZeRO-3), but dual-mode adapters need whole "
    "weights in every process: launch without sharding"
)


def world() -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def padded_shard(rows: Sequence[T]) -> list[T]:
    """Return this process's rows of a batch that all processes have.

    All processes get equally many rows; the last ones are filled up with rows from the beginning.
    """
    rank, size = world()
    share = -(-len(rows) // size)
    return [rows[i % len(rows)] for i in range(rank * share, (rank + 1) * share)]


def shard(rows: Sequence[T]) -> Sequence[T]:
    """Return this process's part of `rows`, which may be empty. Each row goes to exactly one process."""
    rank, size = world()
    share = -(-len(rows) // size)
    return rows[rank * share : (rank + 1) * share]


def gather_rows(local: torch.Tensor, total: int) -> torch.Tensor:
    """Return the rows of all processes, (total, ...), from their `padded_shard`s. Gradients reach only local rows."""
    rank, size = world()
    if size == 1:
        return local
    parts = [torch.empty_like(local) for _ in range(size)]
    distributed.all_gather(parts, local.detach().contiguous())
    parts[rank] = local
    return torch.cat(parts)[:total]


def used_by_all(tensor: torch.Tensor) -> torch.Tensor:
    """Return a trained tensor that every process uses for the rows of all, with its gradient divided by their number.

    The sum of the gradients over the processes is then right, as it is for tensors that are used for local rows only.
    """
    size = world()[1]
    return tensor if size == 1 else tensor / size + (tensor - tensor / size).detach()


@torch.no_grad()
def sum_over_processes(tensors: Iterable[torch.Tensor]) -> None:
    """Replace each tensor by its sum over all processes, in place. Tensors of one dtype are sent in one buffer."""
    if world()[1] == 1:
        return
    buffers: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        buffers.setdefault(tensor.dtype, []).append(tensor)
    for group in buffers.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        distributed.all_reduce(flat)
        for tensor, part in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(part.view_as(tensor))


@torch.no_grad()
def copy_from_main(tensors: Iterable[torch.Tensor]) -> None:
    """Replace each tensor by that of the first process, in place."""
    if world()[1] > 1:
        for tensor in tensors:
            copy = tensor.contiguous()
            distributed.broadcast(copy, src=0)
            tensor.copy_(copy)


def on_main_process(make: Callable[[], T]) -> T:
    """Call `make` in the first process, and return its result or raise its error in all processes.

    Tensors in the result should be on the CPU.
    """
    rank, size = world()
    if size == 1:
        return make()
    outcome: list[Any] = [None, None]
    if rank == 0:
        try:
            outcome[0] = make()
        except Exception as error:
            outcome[1] = error
    distributed.broadcast_object_list(outcome, src=0, group=_cpu_group())
    if outcome[1] is not None:
        raise outcome[1]
    return cast(T, outcome[0])


@contextmanager
def raise_in_all() -> Iterator[None]:
    """Raise an error in all processes if the block raises one in any, so that none waits for a stopped process."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    messages = gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    stopped = [f"process {other} stopped: {message}" for other, message in enumerate(messages) if message]
    if stopped:
        raise RuntimeError(stopped[0])


def check_same_in_all(value: object, what: str) -> None:
    """Raise a `ValueError` in all processes unless `value` is the same in all of them."""
    if any(other != value for other in gather_objects(value)):
        raise ValueError(f"{what} differ between the processes: every process needs the same, in the same order")


def gather_objects(value: T) -> list[T]:
    """Return the values of all processes, in the order of their ranks. The values are pickled."""
    size = world()[1]
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    distributed.all_gather_object(values, value, group=_cpu_group())
    return values


def check_open_files(workers: int) -> None:
    """Raise an `OSError` if the limit of open files is so low that image-reading workers would wait for ever."""
    with suppress(ImportError):  # Windows has no such module
        import resource

        allowed, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], 64 + 8 * workers
        if workers and allowed != resource.RLIM_INFINITY and allowed < needed:
            raise OSError(
                f"num_workers={workers} needs {needed} open files, but the system allows {allowed}: use fewer workers"
            )


def leave() -> None:
    """Leave the process group at the end of a program, together with the others: its threads must not outlive it."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()


@cache
def _cpu_group() -> distributed.ProcessGroup:
    return distributed.new_group(backend="gloo")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of DDP, accelerate or `torch.compile`."""
    while True:
        parallel = isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel))
        inner: Any = model.module if parallel else model._modules.get("_orig_mod")
        if inner is None:
            return model
        model = inner


def refuse_offloaded(model: nn.Module) -> None:
    """Raise a `ValueError` if a parameter has no values."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"{name} is on the meta device and has no values, perhaps because weights are offloaded: "
                "load the model without device_map and without offloading"
            )


def refuse_sharded(model: nn.Module) -> None:
    """Raise a `ValueError` if the model is sharded, because the method reads whole weights.

    FSDP2 is found by its class among the modules, because parameters are whole while a pass has gathered them.
    """
    kinds = {base.__name__ for kind in {type(module) for module in model.modules()} for base in kind.__mro__}
    sharded = sorted(kinds & {"FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"})
    sharded += [n for n, p in model.named_parameters() if hasattr(p, "ds_id") or hasattr(p, "device_mesh")]
    if sharded:
        raise ValueError(f"{sharded[0]} {_SHARDED}")


def choose_device(name: str) -> torch.device:
    """Return the device named "auto", "cpu" or after an accelerator type, and join the processes of a launcher."""
    from accelerate import PartialState

    for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{kind}", "").lower() == "true":
            raise ValueError(f"the launcher shards the model ({kind}), but dual-mode adapters need whole weights")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name not in ("auto", "cpu") and (accelerator is None or accelerator.type != name):
        available = "no accelerator" if accelerator is None else f"only the accelerator {accelerator.type!r}"
        raise ValueError(f"device {name!r} was requested, but this machine has {available}")
    state = PartialState(cpu=name == "cpu")
    if state.num_processes > 1:
        return state.device
    # accelerate would return the device that the first learner in this Python process chose.
    return torch.device("cpu") if name == "cpu" or accelerator is None else accelerator


def has_bfloat16(device: torch.device) -> bool:
    """Return whether the hardware multiplies bfloat16 natively: AVX512_BF16, AMX, or compute capability 8."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    query = getattr(torch.cpu, "get_capabilities", dict)  # missing in older versions of torch; then float32 is used
    capabilities: dict[str, object] = query() if device.type == "cpu" else {}
    # The environment variable ATEN_CPU_CAPABILITY may forbid torch to use what the processor has.
    allowed = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return allowed and bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def choose_precision(requested: str, learned: str | None, trains: bool, able: bool) -> Any:
    """Choose the precision: the requested one, or the one that a learner `learned` in, or bfloat16 if that is fast.

    `able` says whether the hardware has bfloat16, and `trains` whether the model is trained. If the precision of a
    learner changes, a message says so.
    """
    if learned is None:
        return requested if requested != "auto" else "bfloat16" if able and not trains else "float32"
    precision = requested if requested != "auto" else learned if able else "float32"
    if precision != learned and world()[0] == 0:
        why = f"this machine uses {precision}" if requested == "auto" else f"{precision} was requested"
        message = f"this learner learned in {learned}, but {why}: its features differ from now on"
        print(f"dulbe-peft: {message}", file=sys.stderr)
    return precision
