"""The engine of a model's process, also of a model that is split over several, each with a device of its own.

The first process of a split model plans the steps, draws the tokens and talks to the server. The others, which it
starts, get the inputs of each step through a socket and compute their part. All of them end with any one of them.
"""

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any, NoReturn

import numpy as np
import torch
from torch import distributed
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # which the stubs do not export

from accelerant.errors import AccelerantError, ConfigError
from accelerant.nn.serving import Engine
from accelerant.nn.serving.scheduler import StepShape
from accelerant.runtime.host import host_memory, usable_cores
from accelerant.service.jobs import wire
from accelerant.service.jobs.wire import ChildEnd
from accelerant.service.jobs.worker import find_devices

OF_ENGINE = ("max_batch_tokens", "block_size", "fast", "speculate")
"""Settings that are arguments of Engine."""

_CONTEXTS = 64
"""Sequences of full length that the cache has room for at most, unless the settings say how many tokens it has."""
_FIRST_S = 10.0
"""How long the first process may take to say why a model cannot be loaded, which the others then know too."""


def device_of(name: str) -> tuple[torch.device, str]:
    """Return torch's device for the name in the settings, and its label."""
    found, label, _ = find_devices(name)
    return torch.device("cuda:0" if found == "cuda" else found), label


def blocks_of_cache(model: Any, device: torch.device, cache_tokens: int, block_size: int, share: int = 1) -> int:
    """Return the blocks of a cache: those of the settings' tokens, or what fits the free memory.

    share: processes that have the host's memory together.
    """
    if cache_tokens:
        return max(1, cache_tokens // block_size)
    layers, kv_heads, width = model.cache_shape()
    size: int = 2 * layers * kv_heads * width * block_size * model.activation_dtype().itemsize
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] * 0.9
    else:
        memory = host_memory()
        free = memory.get("MemAvailable", memory["MemTotal"]) * 0.25 / share
    most: int = _CONTEXTS * -(-model.config.context // block_size)
    return max(1, min(int(free) // size, most))


class Followers:
    """The other processes of a split model.

    Attributes:
        began: whether all have their part of the model.
    """

    def __init__(self, given: dict[str, Any], device: torch.device) -> None:
        count, named = given["gpus"], given["devices"]
        if device.type == "cuda" and count > (present := torch.cuda.device_count()):
            raise ConfigError(f"--gpus {count} is more than this machine has: {present}")
        listening = socket.create_server(("127.0.0.1", 0))  # the store alone would listen on every interface
        port = listening.getsockname()[1]
        self.store = TCPStore(
            "127.0.0.1", port, count, True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self.began = False
        self._ends = []
        for rank in range(1, count):
            name = named[rank] if len(named) > 1 else f"cuda:{rank}" if device.type == "cuda" else device.type
            ours, theirs = socket.socketpair()
            with theirs:
                told = json.dumps({**given, "device": name, "rank": rank, "port": port})
                module = "accelerant.service.served_models.worker"
                command = [sys.executable, "-P", "-m", module, f"--socket={theirs.fileno()}", f"--model={told}"]
                process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            self._ends.append(ChildEnd(ours))
            threading.Thread(target=self._end_with, args=(process, rank), daemon=True).start()

    def send(self, shape: StepShape, host: np.ndarray) -> None:
        """Let the others compute a step."""
        for end in self._ends:
            end.send({"shape": astuple(shape)}, {"host": host})

    def _end_with(self, process: subprocess.Popen[bytes], rank: int) -> None:
        status = process.wait()
        if not self.began:
            time.sleep(_FIRST_S)
        print(f"process {rank} of the model ended with status {status}", file=sys.stderr, flush=True)
        os._exit(1)  # whatever the other threads wait for


def part_of_engine(
    given: Mapping[str, Any], device: torch.device, rank: int, store: Store,
    share: Callable[[StepShape, np.ndarray], None] | None = None,
) -> Engine:  # fmt: skip
    """Join the other processes of a split model; return the engine of this one's part."""
    from accelerant.distributed.tensor_parallel import load_split_model

    count, on_gpus = given["gpus"], device.type == "cuda"
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if on_gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, usable_cores() // count))
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpus else "gloo", store=store, rank=rank, world_size=count,
        device_id=device if on_gpus else None,
    )  # fmt: skip
    model, tokenizer = load_split_model(given["folder"], device, quantize=given["quantize"] or None)
    blocks = torch.tensor(blocks_of_cache(model, device, given["cache_tokens"], given["block_size"], count))
    distributed.all_reduce(blocks, distributed.ReduceOp.MIN)
    options = {name: given[name] for name in OF_ENGINE}
    return Engine(model, int(blocks), tokenizer=tokenizer, share=share, start=share is not None, **options)


def follow(given: Mapping[str, Any], connection: socket.socket) -> NoReturn:
    """Compute this process's part of the first one's steps, until that one ends."""
    end: ChildEnd = ChildEnd(connection)
    steps: queue.SimpleQueue[tuple[StepShape, np.ndarray]] = queue.SimpleQueue()

    def read() -> NoReturn:
        while True:
            head, body = end.receive()  # which ends the process at the end of the socket
            host = wire.restored(head["arrays"], body)["host"]
            steps.put((StepShape(*head["shape"]), np.array(host)))

    threading.Thread(target=read, daemon=True).start()
    try:
        store = TCPStore("127.0.0.1", given["port"], given["gpus"], False)
        engine = part_of_engine(given, device_of(given["device"])[0], given["rank"], store)
    except AccelerantError:
        raise SystemExit(1) from None  # the first process says why
    engine.follow(iter(steps.get, None))
    raise SystemExit(0)
