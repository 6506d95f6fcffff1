"""What each process of the tests of sharded checkpoints does; apart, so that a fresh interpreter can import it."""

import datetime
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from problems import Dense
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from accelerant.nn.optim import AdamW
from accelerant.nn.train.checkpoint import Checkpoints, gathered, restored
from processes import forkserver

CPU = torch.device("cpu")


def launch(target, processes, folder, *args):
    """Run target(rank, processes, folder, *args) in processes that know each other through a file."""
    forkserver()
    for store in Path(folder).glob("store-*"):
        store.unlink()
    torch.multiprocessing.start_processes(
        _enter, (target, processes, folder, *args), nprocs=processes, start_method="forkserver"
    )


def _enter(rank, target, processes, folder, *args):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store-{processes}", rank=rank, world_size=processes,
        timeout=datetime.timedelta(seconds=120),
    )  # fmt: skip
    try:
        target(rank, processes, Path(folder), *args)
    finally:
        dist.destroy_process_group()


def made(processes, *, sharded, seed, own=False):
    """A model, tied in one weight, and its optimizer."""
    torch.manual_seed(seed)
    model = Dense(width=7)  # which neither 2 nor 4 processes divide
    model.register_buffer("count", torch.tensor(3 + seed))
    if sharded:
        mesh = init_device_mesh("cpu", (processes,))
        fully_shard(model.middle, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, (AdamW if own else torch.optim.AdamW)(model.parameters(), lr=0.1)


def step(model, optimizer, seed):
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def whole(tensors):
    """Tensors in full, on every process."""
    return {name: (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone() for name, x in tensors.items()}


def saving(rank, processes, folder, sharded, own=False):
    """Save twice while training goes on; leave what was to be saved in files of torch."""
    model, optimizer = made(processes, sharded=sharded, seed=1, own=own)
    checkpoints = Checkpoints(folder)
    for number in (1, 2, 3):
        step(model, optimizer, number)
        torch.manual_seed(1000 * number + rank)
        tensors, values = gathered(model, optimizer, CPU)
        kept = whole(tensors)
        if rank == 0:
            torch.save(kept, folder / f"kept-{number}.pt")
        checkpoints.save(tensors, {**values, "step": number, "best": {}})
        for later in (10, 11):  # these change the tensors that are being written
            step(model, optimizer, later)
        assert checkpoints.finished(wait=True)
        assert not checkpoints.finished(wait=True)


def loading(rank, processes, folder, sharded, number, wrote, own=False):
    """Load into another model, and compare with what was saved."""
    model, optimizer = made(processes, sharded=sharded, seed=2, own=own)
    tensors, document, note = Checkpoints(folder).load(model.state_dict())
    assert note is None
    assert document["step"] == number
    restored(folder / "x", tensors, document, model, optimizer, CPU)
    kept = torch.load(folder / f"kept-{number}.pt")
    found = whole(gathered(model, optimizer, CPU)[0])
    for name, tensor in kept.items():
        if not name.startswith("random."):
            assert torch.equal(found[name], tensor), name
    assert found.keys() == kept.keys()
    if rank < wrote:
        generator = torch.Generator().manual_seed(1000 * number + rank)
        assert torch.equal(torch.get_rng_state(), generator.get_state())
    step(model, optimizer, 5)
    dist.barrier()


def both(rank, processes, folder, sharded, number, wrote, own=False):
    """Load, then save again from as many processes, in another folder."""
    loading(rank, processes, folder, sharded, number, wrote, own)
    again = folder / f"again-{processes}"
    if rank == 0:
        again.mkdir()
    dist.barrier()
    saving(rank, processes, again, sharded, own)
