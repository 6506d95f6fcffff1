"""A training whose processes are killed; apart, so that a fresh interpreter can import it."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from problems import Dense, spiral
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from accelerant.cli.train import joined
from accelerant.errors import OutOfMemory
from accelerant.nn.train import Callback, TrainConfig, fit


class Slow(Callback):
    """Gives the kills time to meet a step."""

    def before_step(self, trainer, step):
        time.sleep(0.02)


def train(rank, folder, steps, callbacks=(), device="cpu"):
    torch.manual_seed(1 + rank)  # rank 0's parameters are everybody's
    config = TrainConfig(
        steps=steps, batch_size=12, learning_rate=0.05, out=folder, checkpoint_every=4, device=device, seed=3
    )
    fit(Dense(dropout=0.2), *spiral(60, seed=4), config, callbacks=callbacks, resume=True)


def elastic(folder, steps, processes, restarts, device="cpu"):
    """Train in processes of torchrun's agent, which starts them again when one dies."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    config = LaunchConfig(
        1, 1, processes, run_id="killed", rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="localhost",
        max_restarts=restarts, start_method="fork" if device == "cpu" else "spawn", monitor_interval=0.1,
    )  # fmt: skip
    elastic_launch(config, _elastic)(folder, steps, device)


def _elastic(folder, steps, device):
    torch.set_num_threads(1)
    where = torch.device(device)
    if device == "cuda":
        where = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(where)
    with joined(where):
        Path(f"{folder}-{dist.get_rank()}.pid").write_text(str(os.getpid()))
        train(dist.get_rank(), folder, steps, [Slow()], device)


class Full(Callback):
    """Has no memory for step 3, in rank 1."""

    def before_step(self, trainer, step):
        if dist.get_rank() == 1 and step == 2:
            raise MemoryError("none left")


def out_of_memory(rank, folder):
    """The error of each process when one of them is out of memory."""
    try:
        train(rank, folder, 9, [Full()])
    except OutOfMemory as error:
        return str(error)
