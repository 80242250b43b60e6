"""Several processes, as `accelerate launch` starts them: who holds which rows, and what is summed or copied.

Every process holds the whole model. Of each training batch it encodes its own rows, gathers the features of all, and
computes every loss on the whole batch; gradients flow back through its own rows alone. So they are **summed** over
processes, never averaged. The model is never wrapped: routed gradients bypass the hooks of a data-parallel wrapper.
With one process every function here returns what it was given.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import distributed, nn

T = TypeVar("T")


def world() -> tuple[int, int]:
    """This process's number and how many there are."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def padded_shard(rows: Sequence[T]) -> list[T]:
    """This process's rows of a batch that all know; each has as many, the last ones filled up with first rows."""
    rank, size = world()
    share = -(-len(rows) // size)
    return [rows[i % len(rows)] for i in range(rank * share, (rank + 1) * share)]


def shard(rows: Sequence[T]) -> Sequence[T]:
    """This process's part of `rows`, each row in exactly one process; may be empty."""
    rank, size = world()
    share = -(-len(rows) // size)
    return rows[rank * share : (rank + 1) * share]


def gather_rows(own: torch.Tensor, total: int) -> torch.Tensor:
    """The rows of all processes, (total, ...), from each one's `padded_shard`; gradients reach its own."""
    rank, size = world()
    if size == 1:
        return own
    parts = [torch.empty_like(own) for _ in range(size)]
    distributed.all_gather(parts, own.detach().contiguous())
    parts[rank] = own
    return torch.cat(parts)[:total]


@torch.no_grad()
def sum_over_processes(tensors: Iterable[torch.Tensor]) -> None:
    """Replace each tensor by its sum over all processes, in place; tensors of one dtype travel in common buffers."""
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
    """Replace each tensor by the first process's, in place."""
    if world()[1] > 1:
        for tensor in tensors:
            copy = tensor.contiguous()
            distributed.broadcast(copy, src=0)
            tensor.copy_(copy)


def on_main_process(make: Callable[[], T]) -> T:
    """What `make` returns or raises in the first process, in all of them; tensors in it should be on the CPU."""
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
    """Raise in all processes where the block raised in one, so that none waits for a process that stopped."""
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
    """Raise a `ValueError` in all processes where they were not given the same."""
    if any(other != value for other in gather_objects(value)):
        raise ValueError(f"{what} differ between the processes: every process needs the same, in the same order")


def gather_objects(value: T) -> list[T]:
    """Every process's value, in the order of their numbers; the values are pickled."""
    size = world()[1]
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    distributed.all_gather_object(values, value, group=_cpu_group())
    return values


def check_open_files(workers: int) -> None:
    """Raise an `OSError` where so few files may be open that processes that read images would wait for ever."""
    with suppress(ImportError):  # Windows has no such module
        import resource

        allowed, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], 64 + 8 * workers
        if workers and allowed != resource.RLIM_INFINITY and allowed < needed:
            raise OSError(f"num_workers={workers} needs {needed} open files, the system allows {allowed}: lower it")


def leave() -> None:
    """At the end of a program, together with the others: leave the group, whose threads must not outlive it."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()


@cache
def _cpu_group() -> distributed.ProcessGroup:
    return distributed.new_group(backend="gloo")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside what DDP, accelerate or `torch.compile` put around it."""
    while True:
        parallel = isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel))
        inner: Any = model.module if parallel else model._modules.get("_orig_mod")
        if inner is None:
            return model
        model = inner


def refuse_sharded(model: nn.Module) -> None:
    """Raise a `ValueError` where a parameter is not whole here: the method reads whole weights and gradients."""
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if parameter.is_meta:
            raise ValueError(
                f"{name} is on the meta device and has no values, as with weights that are offloaded to the disk: "
                "load the model without device_map and without offloading"
            )
    kinds = {type(module).__name__ for module in model.modules()}
    found = sorted(kinds & {"FullyShardedDataParallel", "DeepSpeedEngine"})
    found += [name for name, p in parameters.items() if hasattr(p, "ds_id") or hasattr(p, "device_mesh")]
    if found:
        raise ValueError(
            f"{found[0]} is sharded over processes (FSDP, tensor parallelism or DeepSpeed ZeRO-3): dual-mode adapters "
            "need whole weights in every process, launch without sharding"
        )
