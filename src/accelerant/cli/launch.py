"""A command in several processes: starts them with torch's elastic launcher, and joins those that torchrun started."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import typer

from accelerant.config import settings
from accelerant.errors import ConfigError, DeviceLost

if TYPE_CHECKING:
    import torch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_MEETING_S = 300.0  # for the processes of all machines to begin
_ENDING_S = "60"  # for a step and its checkpoint after Ctrl-C, before the launcher kills
_LOST = 75  # status of a process whose device is lost: another process may do better (EX_TEMPFAIL of sysexits.h)


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


def launch(
    count: int, backend: str | None, arguments: Sequence[str], *, restarts: int, kept: Callable[[], str],
    advice: Callable[[], str],
) -> NoReturn:  # fmt: skip
    """Run the command line `accelerant ARGUMENTS` in this number of processes, and exit with their status.

    All are started again if one of them was ended by a signal or has lost its device; `attempt` counts that. An error
    that a process reports itself is final: it would come again.

    Args:
        backend: cpu for processes without a GPU; otherwise each has one of this machine's.
        restarts: how often they are started again at most.
        kept: returns where processes that are started again go on; empty if they must not be.
        advice: returns what to do after an end that is final; empty if nothing helps.

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

    from accelerant.runtime.processes import OWN_LAUNCH

    logging.disable(logging.CRITICAL)  # the processes say why they end
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _ENDING_S)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or each process warns of another that has ended
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = (
        "1"  # rank 0 has the store: it outlives a launcher that is killed
    )
    taken = [name for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]
    taken = [name for name in taken if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN]  # nohup stays so
    name = f"{OWN_LAUNCH}{os.getpid()}-{uuid.uuid4().hex}"
    try:
        for number in itertools.count():
            config = LaunchConfig(
                1, 1, count, run_id=f"{name}.{number}", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
                local_addr="localhost", max_restarts=0, signals_to_handle=",".join(taken),
            )  # fmt: skip
            try:
                elastic_launch(config, sys.executable)("-m", "accelerant", *arguments)
                break
            except ChildFailedError as failed:
                status, reason = _cause(failed)
            if not reason or number == restarts or not (going_on := kept()):
                if reason:
                    print(f"accelerant: {reason}{f', restarts: {number}' * bool(number)}", file=sys.stderr)
                if status not in (2, 128 + signal.SIGINT, 128 + signal.SIGTERM) and (text := advice()):
                    print(f"accelerant: {text}", file=sys.stderr)
                raise typer.Exit(status)
            again = f"starting all {count} processes again (restart {number + 1} of at most {restarts})"
            print(f"accelerant: {reason}: {again}, {going_on}", file=sys.stderr, flush=True)
    except SignalException as ended:
        raise typer.Exit(128 + ended.sigval) from None
    raise typer.Exit(0)


def _cause(failed: ChildFailedError) -> tuple[int, str]:
    """Return the status of a failed group, and what ended it if that may not come again; else an empty text.

    The launcher ends the others by SIGTERM, and by SIGKILL those that do not react.
    """
    for rank, failure in sorted(failed.failures.items(), key=lambda each: each[1].timestamp):
        if failure.exitcode == _LOST:
            return 1, f"rank {rank} has lost its device"
        if failure.exitcode < 0 and failure.exitcode not in (-signal.SIGTERM, -signal.SIGINT):
            number = -failure.exitcode
            known = signal.Signals(number).name if number in set(signal.Signals) else ""
            return 128 + number, f"rank {rank} was ended by signal {number}{f' ({known})' * bool(known)}"
    code = failed.get_first_failure()[1].exitcode
    return (code if code > 0 else 128 - code), ""


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
    from accelerant.runtime.processes import OWN_LAUNCH, launch_id

    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ConfigError(f"WORLD_SIZE is {world_size()} and {missing[0]} is not set: start with --gpus, or torchrun")
    own = launch_id().startswith(OWN_LAUNCH)
    if own:
        _end_with(int(launch_id().split("-")[1]))
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store, number, size = next(rendezvous("env://", timeout=timedelta(seconds=_MEETING_S)))
        # torchrun's agent keeps one store for all attempts (torch 2.13), with the addresses of processes that died.
        store = PrefixStore(f"attempt-{_number('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        backend, place = ("cpu:gloo,cuda:nccl", device) if device.type == "cuda" else ("gloo", None)
        distributed.init_process_group(backend, store=store, rank=number, world_size=size, device_id=place)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0][:300]
        raise ConfigError(f"rank {rank()} cannot meet the other processes at {address}: {reason}") from None
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // _number("LOCAL_WORLD_SIZE", 1)))
    try:
        yield
    except (DeviceLost, torch.AcceleratorError) as error:
        lost = error if isinstance(error, DeviceLost) else DeviceLost(str(error).split("\n", maxsplit=1)[0])
        if own:
            vars(lost)["exit_status"] = _LOST
        raise lost from error.__cause__
    distributed.destroy_process_group()  # not after an error, when others may be waiting


def _end_with(launcher: int) -> None:
    """Send this process SIGTERM, once, when its launcher has died: nothing else would end it.

    Linux's PR_SET_PDEATHSIG sends it for each thread of the launcher, and the second one interrupts a checkpoint.
    """

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    if sys.platform != "win32":
        threading.Thread(target=watch, name="accelerant-launcher", daemon=True).start()
