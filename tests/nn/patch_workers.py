"""What each process of the distributed tests of patch does."""

import torch

from processes import group, results

PROCESSES = 2


def launch(target, folder, *args):
    """Run target(rank, *args) in the processes of a group."""
    results(_enter, *((rank, target, folder, *args) for rank in range(PROCESSES)))


def _enter(rank, target, folder, *args):
    with group(rank, PROCESSES, folder):
        target(rank, *args)


def _whole(family):
    """The unpatched model's gradients over both processes' batches, and those batches."""
    from patch_models import batch, make, outcome

    parts = [batch(family, seed=10 + rank) for rank in range(PROCESSES)]
    model = make(family)
    found = [outcome(model, part)[2] for part in parts]
    return parts, {name: (found[0][name] + found[1][name]) / PROCESSES for name in found[0]}


def ddp(rank, families):
    """Gradients under DistributedDataParallel."""
    for family in families:
        _ddp(rank, family)


def _ddp(rank, family):
    from patch_models import make

    import accelerant as acl

    parts, wanted = _whole(family)
    model = make(family)
    acl.nn.patch(model)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    wrapped(**parts[rank])["loss"].backward()
    for name, parameter in model.named_parameters():
        if name in wanted:
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=2e-5, atol=2e-6)


def train_step(rank, family):
    """A step of TrainStep with a patched model, which sums the gradients itself."""
    from patch_models import make

    import accelerant as acl

    parts, wanted = _whole(family)
    plain, model = make(family), make(family)
    acl.nn.patch(model)
    names = list(parts[rank])

    def loss(*batch):
        return model(**dict(zip(names, batch, strict=True)))["loss"]

    step = acl.nn.train.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    step([tuple(parts[rank].values())], 0.1)
    for (name, here), before in zip(model.named_parameters(), plain.parameters(), strict=True):
        update = 0.1 * wanted[name] if name in wanted else torch.zeros_like(before)
        torch.testing.assert_close(here.detach(), before.detach() - update, rtol=2e-5, atol=2e-6, msg=name)


def ddp_and_fsdp(rank, families, cases):
    """All three, one after the other."""
    ddp(rank, families)
    for family in families:
        train_step(rank, family)
    fsdp(rank, cases)


def fsdp(rank, cases):
    """Gradients and updated weights under fully_shard, of whole blocks or of every linear layer too."""
    for family, leaves in cases:
        _fsdp(rank, family, leaves)


def _fsdp(rank, family, leaves):
    from patch_models import make
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    import accelerant as acl

    parts, wanted = _whole(family)
    plain, model = make(family), make(family)
    acl.nn.patch(model)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    blocks = model.transformer.h if family == "gpt2" else model.bert.encoder.layer if family == "bert" else None
    if blocks is None:
        blocks = model.vit.layers if family == "vit" else model.model.layers
    if leaves:
        for block in blocks:
            for module in block.modules():
                if next(module.children(), None) is None and next(module.parameters(), None) is not None:
                    fully_shard(module, mesh=mesh)
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        acl.distributed.shard(model, mesh)
        assert all(isinstance(block, FSDPModule) for block in blocks)
    assert list(model.state_dict()) == list(plain.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # what the second finds is sharded again
        optimizer.zero_grad()
        output = model(**parts[rank])
        output["loss"].backward()
        for name, parameter in model.named_parameters():
            if name in wanted:
                torch.testing.assert_close(parameter.grad.full_tensor(), wanted[name], rtol=2e-5, atol=2e-6)
    optimizer.step()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name in wanted:
                parameter -= 0.1 * wanted[name]
    for (name, sharded), (_, whole) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(sharded.full_tensor(), whole, rtol=2e-5, atol=2e-6, msg=name)
