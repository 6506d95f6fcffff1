"""What each process of the tests of data parallel training does; apart, so that a fresh interpreter can import it."""

import datetime
import math
import os
import sys
import traceback

import torch
import torch.distributed as dist
from torch import nn

from accelerant.errors import AccelerantError, DivergenceError, UnsupportedCase
from accelerant.nn import GPT, GPTConfig, layers
from accelerant.nn.optim import AdamW
from accelerant.nn.train import Callback, TrainConfig, fit
from accelerant.nn.train.objective import Objective
from accelerant.nn.train.step import LossScale, TrainStep
from accelerant.ops.transformer import block
from accelerant.runtime.processes import PeerMemory, Processes
from processes import forkserver

ROWS, CLASSES, IGNORED = 24, 5, -100


def launch(target, folder, *args, processes=2):
    """Run target(rank, *args) in processes that know each other through a file; return what each returned."""
    folder.mkdir(exist_ok=True)
    context = forkserver()
    queue = context.Queue()
    started = [
        context.Process(target=_enter, args=(r, target, str(folder), processes, queue, args)) for r in range(processes)
    ]
    for each in started:
        each.start()
    try:
        found = dict(queue.get(timeout=240) for _ in started)  # a limit for processes that hang, on a loaded machine
    finally:
        for each in started:
            each.join(10)
            each.kill()
    return [found[rank] for rank in range(processes)]


def _enter(rank, target, folder, processes, queue, args):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes,
        timeout=datetime.timedelta(seconds=120),
    )  # fmt: skip
    try:
        found = target(rank, *args)
    except BaseException:
        found = traceback.format_exc()
        print(f"rank {rank}: {found}", file=sys.stderr, flush=True)
    queue.put((rank, found))
    queue.close()
    queue.join_thread()
    dist.destroy_process_group()


class Net(nn.Module):
    """A tied weight, a layer that only some rows use, one that none uses, and dropout on request."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embedding, self.middle = nn.Embedding(CLASSES, 8), nn.Linear(8, 8)
        self.norm, self.rare, self.unused = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("offset", torch.full((8,), 0.25))

    def forward(self, x):
        hidden = self.norm(torch.tanh(self.middle(self.embedding(x) + self.offset)))
        if (x[:, 0] == 0).any():
            hidden = hidden + self.rare(hidden) * (x[:, :1] == 0).unsqueeze(-1)
        return self.dropout(hidden) @ self.embedding.weight.T


def net(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    return Net(dropout)


def rows(count=ROWS, seed=1):
    """Inputs and targets (count, 4), of which some are ignored; in the second half of the rows most are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, CLASSES, (count, 4), generator=generator)
    x[count // 2 :, 0] = 1  # the rare layer is not used there
    y = torch.randint(0, CLASSES, (count, 4), generator=generator)
    y[torch.rand(y.shape, generator=generator) < torch.linspace(0.1, 0.8, count)[:, None]] = IGNORED
    return x, y


def flat(model):
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()]).tolist()


def config(**changes):
    values = {
        "steps": 6, "batch_size": 8, "accumulate": 2, "learning_rate": 1e-2, "max_grad_norm": 0.3, "device": "cpu",
        "evaluations": 2, "predict_memory": False,
    }  # fmt: skip
    return TrainConfig(**{**values, **changes})


def fitted(rank, dropout=0.0, stop_at=None, resume=False, **changes):
    """Train with `fit`; every rank begins with other weights than rank 0's."""
    model = net(seed=rank, dropout=dropout)
    torch.manual_seed(5)
    stop = [Stop(stop_at)] if stop_at else []
    history = fit(model, *rows(), config(**changes), validation=rows(9, 5), callbacks=stop, resume=resume)
    return {
        "losses": history.losses, "norms": [record.grad_norm for record in history.records], "parameters": flat(model),
        "evaluations": [(each.loss, each.rows, each.metrics["accuracy"]) for each in history.evaluations],
        "status": history.status, "steps": history.steps,
    }  # fmt: skip


def diverged(rank):
    """The message of a training with one row that is not finite, in the batch of one process."""
    x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(2))
    x[7, 2] = math.nan
    try:
        fit(nn.Linear(4, 1), x, x[:, :1].nan_to_num(), config(steps=9, evaluations=1))
    except DivergenceError as error:
        return str(error)
    return "it did not diverge"


class Stop(Callback):
    """Stops after a step, in rank 1 alone if there are two."""

    def __init__(self, step):
        self.step = step

    def before_step(self, trainer, step):
        if step + 1 == self.step and Processes().rank == Processes().size - 1:
            trainer.stop("enough")


def stepped(rank, processes, accumulate, steps=4, weighed=False, wrapped=False, **options):
    """Do steps of a TrainStep on this process's share of each batch."""
    model = whole = net(seed=rank)
    if wrapped:
        model = nn.parallel.DistributedDataParallel(whole, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    objective = Objective(model, "cross_entropy", None)
    step = TrainStep(
        model, optimizer, lambda *batch: objective(model, *batch), max_grad_norm=0.3, accumulate=accumulate,
        weigh=objective.weigh if weighed else None, **options,
    )  # fmt: skip
    early = []
    if (reduction := step._reduction) is not None:
        finish = reduction.finish
        reduction.finish = lambda loss: (early.append(len(reduction._launched)), finish(loss))
    x, y = rows()
    if not weighed:
        y = y.clamp(min=0)  # as many targets in each row
    found = []
    for number in range(steps):
        x = x.roll(1, 0)  # so that the ranks use the rare layer at different times
        y = y.roll(1, 0)
        mine = slice(rank * len(x) // processes, (rank + 1) * len(x) // processes)
        batches = list(zip(x[mine].chunk(accumulate), y[mine].chunk(accumulate), strict=True))
        result = step(batches, 0.1 / (number + 1))
        found.append((float(result.loss), float(result.grad_norm)))
    return {
        "results": found, "parameters": flat(whole), "unused": whole.unused.weight.grad is None, "early": early,
        "gradients": [None if p.grad is None else p.grad.double().flatten().tolist() for p in whole.parameters()],
    }  # fmt: skip


def scaled(rank):
    """Steps in float16 of which the second overflows, in the last rank alone."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    step = TrainStep(
        model, optimizer, lambda x: model(x).square().mean(), precision=torch.float16,
        loss_scale=LossScale(torch.device("cpu"), initial=16.0),
    )  # fmt: skip
    found = []
    for number in range(3):
        overflows = number == 1 and rank == Processes().size - 1
        result = step([(torch.full((2, 4), 6e4 if overflows else 1.0),)], 0.01)
        found.append([float(step.loss_scale.value), float(step.loss_scale.skipped), math.isfinite(result.grad_norm)])
    return {"scales": found, "parameters": flat(model)}


def share_without_room(rank):
    """Ask for shared memory which rank 1 has not got; return the error."""

    class Symmetric:
        @staticmethod
        def empty_strided_p2p(*_):
            if rank == 1:
                raise torch.OutOfMemoryError("CUDA out of memory\nand a second line")

        @staticmethod
        def rendezvous(*_):
            raise AssertionError("others wait here")

    torch._C._distributed_c10d._SymmetricMemory = Symmetric
    try:
        PeerMemory(64, torch.float32, torch.device("cuda", 0))
    except UnsupportedCase as error:
        return str(error)


def tied(rank, processes=2):
    """Losses of a GPT whose fused functions run on the CPU; whether its table's gradient was summed in two parts."""
    layers.FUSED.add("cpu")
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=300, context=8, layers=2, heads=2, width=16))
    # The gradient of the keys' bias is 0 but for rounding, which the default eps would scale up to whole steps.
    step = TrainStep(
        model, AdamW(model.parameters(), lr=1e-2, eps=1e-5), model.loss, max_grad_norm=0.5, accumulate=2 // processes,
        bucket_bytes=4096,
    )  # fmt: skip
    losses, split, copied, copy = [], [], set(), torch._foreach_copy_

    def recorded(to, gradients):
        copied.update(tuple(each.shape) for each in gradients if each.dim() == 2)
        copy(to, gradients)

    torch._foreach_copy_ = recorded
    for number in range(8):
        drawn = torch.randint(300, (2, 2, 9), generator=torch.Generator().manual_seed(number))
        drawn[0, 0] = drawn[1, 0]  # rows that both look up
        batches = [drawn[0], drawn[1, : 1 if number > 5 else 2]]
        parts = [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in batches]
        losses.append(step([parts[rank]] if processes == 2 else parts, 1e-2).loss.item())
        table = None if step._reduction is None else step._reduction._table
        assert table is None or table.rows is None  # kept no longer than the step
        split.append(table is not None and table.split)
    torch._foreach_copy_ = copy
    layers.FUSED.discard("cpu")
    return losses, split, copied, [parameter.detach().sum().item() for parameter in model.parameters()]


def hooked(rank):
    """Hook the table before step 0 or 3; return differences of what the hook saw to the gradient, and splits."""
    layers.FUSED.add("cpu")
    found = []
    for first in (0, 3):
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocab_size=300, context=8, layers=1, heads=2, width=16))
        step, table = TrainStep(model, AdamW(model.parameters(), lr=1e-2), model.loss), model.wte.weight
        tokens, seen, differences, split = torch.arange(16).view(2, 8) + rank, [], [], []
        for number in range(5):
            if number == first:
                table.register_hook(lambda gradient, seen=seen: seen.append(gradient))  # which stays as it is
            (whole,) = torch.autograd.grad(model.loss(tokens, tokens), table)
            seen.clear()
            step([(tokens, tokens)], 1e-2)
            differences += [(2 * each - whole).abs().max().item() for each in seen]
            split.append(step._reduction._table is not None and step._reduction._table.split)
        found.append((differences, split))
    layers.FUSED.discard("cpu")
    return found


def interrupted(rank):
    """Raise in a loss after its forward pass; return what is left of the step, and the gradient of a later pass."""
    layers.FUSED.add("cpu")
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=300, context=8, layers=1, heads=2, width=16))
    tokens, fails = torch.arange(16).view(2, 8), []

    def loss(*batch):
        found = model.loss(*batch)
        return found.expand(2) if fails else found  # not a scalar, which is refused

    step = TrainStep(model, AdamW(model.parameters(), lr=1e-2), loss)
    step([(tokens, tokens)], 1e-2)
    fails.append(True)
    try:
        step([(tokens, tokens)], 1e-2)
    except AccelerantError as error:
        left = len(block.table_sums), step._reduction._armed, type(error).__name__
    model.zero_grad()
    model.loss(tokens, tokens).backward()
    layers.FUSED.discard("cpu")
    return left, model.wte.weight.grad is not None


class Penalised:
    """A loss that uses the table of a GPT once more from some call on, after the model or before it."""

    def __init__(self, model, first, before=False):
        self.model, self.left, self.before = model, first, before

    def __call__(self, tokens, targets):
        self.left -= 1
        terms = [lambda: self.model.loss(tokens, targets), lambda: self.model.wte.weight.square().mean()]
        terms = terms[:1] if self.left >= 0 else terms[::-1] if self.before else terms
        return sum(term() for term in terms)


def penalised(rank):
    """Train with another use of the table in each step, then with one that comes later; return both outcomes."""
    layers.FUSED.add("cpu")
    found = []
    for first, before in ((0, False), (0, True), (3, False)):
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocab_size=300, context=8, layers=1, heads=2, width=16))
        step = TrainStep(model, AdamW(model.parameters(), lr=1e-2), Penalised(model, first, before))
        tokens = torch.arange(16).view(2, 8) + rank
        try:
            losses = [step([(tokens, tokens)], 1e-2).loss.item() for _ in range(5)]
            found.append((losses, step._reduction._table is None))
        except UnsupportedCase as error:
            found.append(str(error))
    layers.FUSED.discard("cpu")
    return found
