"""A command in several processes: starts them with torch's elastic launcher, and joins those that torchrun started."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import typer

from accelerant.config import settings
from accelerant.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["joined", "launch", "own_device", "rank", "world_size"]

_MEETING_S = 300.0  # for the processes of all machines to begin
_ENDING_S = "60"  # for a step and its checkpoint after Ctrl-C, before the launcher kills


def world_size() -> int:
    """Return the number of processes that torchrun, or `launch`, has started; 1 without them."""
    return _number("WORLD_SIZE", 1)


def rank() -> int:
    """Return the number of this process among them."""
    return _number("RANK", 0) if world_size() > 1 else 0


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} in the environment must be a whole number, got {text[:40]!r}: torchrun sets it")
    return int(text)


def launch(count: int, backend: str | None, arguments: Sequence[str]) -> NoReturn:
    """Run the command line `accelerant ARGUMENTS` in this number of processes, and exit with their status.

    Args:
        backend: cpu for processes without a GPU; otherwise each has one of this machine's.

    Raises:
        ConfigError: there are fewer GPUs.
    """
    import torch

    if (backend or settings().backend).lower() != "cpu" and count > (present := torch.cuda.device_count()):
        gpus = f"{present} GPU{'s' * (present != 1)}"
        raise ConfigError(
            f"--gpus {count} is more than this machine has, {gpus}: with --device cpu it starts processes"
        )
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # the processes say why they end
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _ENDING_S)
    config = LaunchConfig(
        1, 1, count, run_id=f"accelerant-{os.getpid()}", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        local_addr="localhost", max_restarts=0,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-m", "accelerant", *arguments)
    except SignalException as ended:
        raise typer.Exit(128 + ended.sigval) from None
    except ChildFailedError as failed:
        number, failure = failed.get_first_failure()
        if failure.exitcode < 0:
            print(f"accelerant: rank {number} was ended by signal {-failure.exitcode}", file=sys.stderr)
        raise typer.Exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode) from None
    raise typer.Exit(0)


def own_device(device: torch.device) -> torch.device:
    """Return this process's device, of the kind of `device`; raise ConfigError if there is no GPU for it."""
    import torch

    if device.type != "cuda" or world_size() == 1:
        return device
    index, present = _number("LOCAL_RANK", 0), torch.cuda.device_count()
    if index >= present:
        gpus = f"{present} GPU{'s' * (present != 1)}"
        raise ConfigError(f"rank {rank()} is process {index} of this machine, counted from 0, which has {gpus}")
    return torch.device("cuda", index)


@contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """Join the other processes for the block, over gloo on the CPU and NCCL between GPUs; alone, do nothing.

    Raises:
        ConfigError: a variable of torchrun's is missing; the processes do not meet, or their port is in use.
    """
    if world_size() == 1:
        yield
        return
    import torch
    from torch import distributed
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    from accelerant.runtime.host import usable_cores

    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ConfigError(f"WORLD_SIZE is {world_size()} and {missing[0]} is not set: start with --gpus, or torchrun")
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store, number, size = next(rendezvous("env://", timeout=timedelta(seconds=_MEETING_S)))
        # torchrun's agent keeps one store for all attempts (torch 2.13), with the addresses of processes that died.
        store = PrefixStore(f"attempt-{_number('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        backend, own = ("cpu:gloo,cuda:nccl", device) if device.type == "cuda" else ("gloo", None)
        distributed.init_process_group(backend, store=store, rank=number, world_size=size, device_id=own)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0][:300]
        raise ConfigError(f"rank {rank()} cannot meet the other processes at {address}: {reason}") from None
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // _number("LOCAL_WORLD_SIZE", 1)))
    yield
    distributed.destroy_process_group()  # not after an error, when others may be waiting
