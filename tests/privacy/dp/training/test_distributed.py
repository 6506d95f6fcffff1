"""Two processes over gloo: one noise for both, one ledger, disjoint rows; and noise that nobody else repeats."""

import functools
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from killed_workers import STEPS, train
from loops import classify, clipped_sums, mlp, parameters, points, private

import soak
from accelerant.errors import AccelerantError
from accelerant.nn.optim import AdamW
from accelerant.privacy import dp
from accelerant.privacy.dp.training.step import PrivateStep
from processes import forkserver, group, results

INPUTS = 200
"""Of the model, for 1,635 parameters: enough to tell the noise of one process from that of two."""


def run(rank, folder, name, noise, clipping, of_a_group):
    groups = torch.arange(40) // of_a_group if of_a_group else None
    model = mlp(INPUTS, seed=rank)  # rank 0's parameters are everybody's
    torch.manual_seed(7)
    training = private(
        model, 1.0, noise_multiplier=noise, ledger=f"{folder}/{name}.jsonl", clipping=clipping, groups=groups
    )
    rows = []
    x, y = points(inputs=INPUTS)
    index = torch.arange(40)
    for batch in training.batches((x, y, index), microbatch=8, steps=2):
        rows += batch.tensors[2][batch.mask].tolist()
        classify(model, *batch.tensors[:2]).backward()
        training.optimizer.step()
    found = {
        "rows": sorted(rows),
        "parameters": torch.cat([p.flatten() for p in parameters(model)]).tolist(),
        "events": sum(event.count for event in training.ledger.events),
        "path": str(training.ledger.path),
        "norm": training.clipper.max_grad_norm,
        "expected": training.optimizer.expected_batch_size,
        "unit": training.ledger.unit,
        "noise": training.optimizer._release.source.integers((4,), 1000.0).tolist(),
    }
    training.close()
    return found


RUNS = [  # name, noise multiplier, clipping, rows of a group
    ("plain", 0.0, "flat", 0),
    ("noisy", 20.0, "flat", 0),
    ("adaptive", 1.0, "adaptive", 0),
    ("grouped", 1.0, "flat", 4),
]


def run_all(rank, folder):
    with group(rank, 2, folder):
        return {name: run(rank, folder, name, *given) for name, *given in RUNS}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Results of each run in both processes, and the folder of the ledgers."""
    folder = tmp_path_factory.mktemp("two")
    found = results(run_all, (0, folder), (1, folder))
    return {name: [each[name] for each in found] for name, *_ in RUNS}, folder


@pytest.mark.slow
def test_two_processes_make_the_update_of_one(both):
    (first, second), folder = both[0]["plain"], both[1]
    assert first["rows"] == sorted([*range(0, 40, 2)] * 2)  # two steps at rate 1, each over its own rows
    assert second["rows"] == sorted([*range(1, 40, 2)] * 2)
    assert first["parameters"] == second["parameters"]
    model = mlp(INPUTS, seed=0)
    for _ in range(2):
        for p, total in zip(model.parameters(), clipped_sums(model, classify, points(inputs=INPUTS), 0.5), strict=True):
            p.data -= (total / 40).float()
    wanted = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    torch.testing.assert_close(torch.tensor(first["parameters"], dtype=torch.float64), wanted, rtol=0, atol=1e-6)
    assert (first["events"], second["events"]) == (2, 2)
    assert second["path"] == "None"
    assert sum(event.count for event in dp.PrivacyLedger.read(folder / "plain.jsonl").events) == 2


@pytest.mark.slow
def test_the_noise_is_added_once_and_differs_in_each_process(both):
    first, second = both[0]["noisy"]
    assert first["parameters"] == second["parameters"]
    assert first["noise"] != second["noise"]
    start = torch.cat([p.detach().double().flatten() for p in mlp(INPUTS, seed=0).parameters()])
    moved = torch.tensor(first["parameters"], dtype=torch.float64) - start
    # Two steps of 20 * 0.5 / 40 in each parameter: 8 deviations of it; noise of both ranks would give 0.51.
    assert float(moved.std()) == pytest.approx(0.36, rel=0.15)


@pytest.mark.slow
def test_the_adaptive_norm_is_the_same_in_each_process(both):
    first, second = both[0]["adaptive"]
    assert first["norm"] == second["norm"] != 0.5
    assert first["parameters"] == second["parameters"]


@pytest.mark.slow
def test_no_group_is_drawn_by_two_processes(both):
    found = both[0]["grouped"]  # at rate 1: each of ten groups once in each of two steps
    drawn = [[row // 4 for row in each["rows"]] for each in found]
    assert [sorted(groups) for groups in drawn] == [sorted([*range(0, 10, 2)] * 2), sorted([*range(1, 10, 2)] * 2)]
    assert found[0]["parameters"] == found[1]["parameters"]
    assert [each["expected"] for each in found] == [10.0, 10.0]
    assert [each["unit"] for each in found] == ["user", "user"]


ADAM = {"kind": torch.optim.Adam, "lr": 0.1, "foreach": False}
OURS = {"kind": AdamW, "lr": 0.1}

STARTS = [  # name, argument, values in rank 0 and 1, arguments of both
    ("max_grad_norm", "max_grad_norm", 1.0, 10.0, {}),
    ("the norm of a layer", "max_grad_norm", {"0": 1.0, "2": 1}, {"0": 1.0, "2": 2.0}, {"clipping": "per_layer"}),
    ("sample_rate", "rate", 0.5, 0.25, {}),
    ("noise_multiplier", "noise_multiplier", 1.0, 2.0, {}),
    ("clipping", "clipping", "flat", "adaptive", {}),
    ("the quantile", "clipping", dp.AdaptiveClipping(quantile=0.5), dp.AdaptiveClipping(quantile=0.9), {}),
    ("insecure noise", "insecure", True, False, {}),
    ("steps", "steps", 10, 11, {}),
    ("loss_reduction", "loss_reduction", "mean", "sum", {}),
    ("groups", "groups", None, torch.arange(40) // 4, {}),
    ("other groups", "groups", torch.arange(40) // 5, torch.arange(40) // 4, {}),  # a user would be in two shares
    ("an invalid value", "delta", 1e-5, 2.0, {}),
    ("the learning rate", "optimizer", {"lr": 0.1}, {"lr": 0.2}, {}),
    ("the class", "optimizer", {"lr": 0.1}, {"lr": 0.1, "kind": torch.optim.Adam}, {}),
    ("momentum", "optimizer", {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1}, {}),
    ("a group", "optimizer", {"lr": 0.1, "groups": (1,)}, {"lr": 0.1, "groups": (2,)}, {}),
    ("betas", "optimizer", {**ADAM, "betas": (0.9, 0.999)}, {**ADAM, "betas": (0.9, 0.99)}, {}),
    ("a group's decay", "optimizer", {**ADAM, "weight_decay": 0.1}, {**ADAM, "weight_decay": 0.2}, {}),
    ("a state", "optimizer", {**ADAM, "stepped": True}, ADAM, {}),
    ("an own setting", "optimizer", {**OURS, "max_grad_norm": 1.0}, {**OURS, "max_grad_norm": 2.0}, {}),
    ("equal numbers", "max_grad_norm", 1, 1.0, {"ledger": None}),
    ("equal rates", "optimizer", {"lr": 1}, {"lr": torch.tensor(1.0)}, {"ledger": None}),
]


def optimizer_of(model, *, kind=torch.optim.SGD, groups=(4,), stepped=False, **options):
    """The first `groups[0]` parameters are a group, the others another; with `stepped`, after a step."""
    params = list(model.parameters())
    found = kind([{"params": part} for part in (params[: groups[0]], params[groups[0] :]) if part], **options)
    if stepped:
        for param in params:
            param.grad = torch.zeros_like(param)
        found.step()
    return found


DISAGREEMENTS = {
    "max_grad_norm": "ConfigError: max_grad_norm must be the same in each process: 1.0 in rank 0, 10.0 in rank 1",
    "the norm of a layer": "max_grad_norm must be .*: {'0': 1.0, '2': 1.0} in rank 0, {'0': 1.0, '2': 2.0} in rank 1",
    "sample_rate": "sample_rate must be the same in each process: 0.5 in rank 0, 0.25 in rank 1",
    "noise_multiplier": "noise_multiplier must be .*: 1.0 in rank 0, 2.0 in rank 1",
    "clipping": "clipping must be .*: flat in rank 0, AdaptiveClipping.*in rank 1",
    "the quantile": "clipping must be .*quantile=0.5.*in rank 0, .*quantile=0.9.* in rank 1",
    "insecure noise": "insecure must be .*: True in rank 0, False in rank 1",
    "steps": "steps must be .*: 10.0 in rank 0, 11.0 in rank 1",
    "loss_reduction": "loss_reduction must be .*: mean in rank 0, sum in rank 1",
    "groups": "groups must be those of all rows, the same in each process",
    "other groups": "groups must be those of all rows, the same in each process",
    "the learning rate": r"optimizer's lr must be .*: \[0.1\] in rank 0, \[0.2\] in rank 1",
    "the class": "optimizer must be .*: SGD in rank 0, Adam in rank 1",
    "momentum": r"optimizer's momentum must be .*: \[0.9\] in rank 0, \[0.0\] in rank 1",
    "a group": r"optimizer's parameters must be .*\[\['0.weight'\], \['0.bias'.*in rank 0",
    "betas": r"optimizer's betas must be .*: \[\[0.9, 0.999\]\] in rank 0, \[\[0.9, 0.99\]\] in rank 1",
    "a group's decay": r"optimizer's weight_decay must be .*: \[0.1\] in rank 0, \[0.2\] in rank 1",
    "a state": r"optimizer's state must be .*\{'0.bias': .* in rank 0, \{\} in rank 1",
    "an own setting": r"optimizer's max_grad_norm must be .*: \[1.0\] in rank 0, \[2.0\] in rank 1",
    "a default": "optimizer's default max_grad_norm must be .*: None in rank 0, inf in rank 1",
    "a later rate": r"optimizer's lr must be .*: \[1.0\] in rank 0, \[0.5\] in rank 1",
    "the rate of a step": "learning rate must be .*: 0.1 in rank 0, 0.2 in rank 1",
    "an invalid value": "delta must be a number, above 0 and at most 0.5; got 2.0",
    "dtypes": r"dtypes must be .*: \['torch.float32'\] in rank 0, \['torch.float64'\] in rank 1",
    "ledger": "ConfigError: .*cannot write to the ledger .*No such file or directory",
    "bound": "clipping norm must be the same in each process: 0.5 in rank 0, 10.0 in rank 1",
    "expected": "expected batch size must be .*: 40.0 in rank 0, 41.0 in rank 1",
    "frozen": r"trained parameters must be .*\['0.weight', '0.bias'.* in rank 0,.*\['0.weight', '2.weight'.* in rank 1",
    "sampled": "sampling must be the same in each process: poisson in rank 0, unknown in rank 1",
    "failure": r"ConfigError: (rank 1: )?\d+ rows went through backward passes, the batch has 20",
    "precision": "precision must be .*: torch.float32 in rank 0, torch.bfloat16 in rank 1",
}


def disagree(rank, folder):
    """Return what a process says of each difference from the other."""
    found, data = {}, points()

    def attempt(name, action):
        try:
            found[name] = action()
        except AccelerantError as error:
            found[name] = f"{type(error).__name__}: {error}"

    def start(setting, values, common):
        options = {"noise_multiplier": 1.0, "ledger": f"{folder}/spent.jsonl", **common, setting: values[rank]}
        model = mlp()
        if setting == "optimizer":
            options["optimizer"] = optimizer_of(model, **options["optimizer"])
        private(model, options.pop("rate", 1.0), **options).close()

    def step(change, own_batches=False, precision=None, rates=(0.1, 0.1)):
        with private(mlp(), 1.0, noise_multiplier=1.0, ledger=f"{folder}/steps.jsonl") as training:
            before = [p.detach().clone() for p in training.model.parameters()]
            if precision is not None:
                make = PrivateStep(
                    training, lambda x, y: classify(training.model, x, y), precision=precision, graph=False
                )
            if own_batches and rank:
                training.optimizer.expected_batch_size = 40.0
                classify(training.model, *data).backward()
            else:
                batch = next(iter(training._draws(data, steps=1)))
                if precision is not None:
                    return make(batch, rates[rank]) and None
                training.use(batch)
                classify(training.model, *batch.tensors).backward()
            if rank:
                change(training)
            try:
                training.optimizer.step()
            finally:
                assert all(torch.equal(a, b) for a, b in zip(before, training.model.parameters(), strict=True))
                found.setdefault("events", []).append(sum(event.count for event in training.ledger.events))

    def widen(training):
        training.clipper.max_grad_norm = 10.0

    def edit(training):
        training.optimizer.expected_batch_size = 41.0

    def default():
        model = mlp()
        own = optimizer_of(model, **OURS, max_grad_norm=1.0)
        if rank:
            own.defaults["max_grad_norm"] = float("inf")
        private(model, 1.0, noise_multiplier=1.0, optimizer=own).close()

    def slow_down(training):
        training.optimizer.param_groups[0]["lr"] = 0.5

    def freeze(training):
        training.optimizer.zero_grad()
        training.model[0].bias.requires_grad_(False)
        batch = next(iter(training._draws(data, steps=1)))
        training.use(batch)
        classify(training.model, *batch.tensors).backward()

    def spoil(training):
        training.optimizer.tracker.add(3)

    with group(rank, 2, folder):
        for name, setting, first, second, common in STARTS:
            attempt(name, functools.partial(start, setting, (first, second), common))
        narrow = mlp().double() if rank else mlp()
        attempt("dtypes", lambda: private(narrow, 1.0, noise_multiplier=1.0, ledger=f"{folder}/spent.jsonl"))
        attempt("ledger", lambda: private(mlp(), 1.0, noise_multiplier=1.0, ledger=f"{folder}/no/such/folder.jsonl"))
        found["exists"] = Path(folder, "spent.jsonl").exists()
        attempt("bound", lambda: step(widen))
        attempt("expected", lambda: step(edit))
        attempt("frozen", lambda: step(freeze))
        attempt("sampled", lambda: step(lambda training: None, own_batches=True))
        attempt("failure", lambda: step(spoil))
        attempt("a default", default)
        attempt("a later rate", lambda: step(slow_down))
        attempt("the rate of a step", lambda: step(None, precision=torch.float32, rates=(0.1, 0.2)))
        attempt("precision", lambda: step(None, precision=torch.bfloat16 if rank else torch.float32))
        torch.distributed.barrier()
    return found


@pytest.mark.slow
def test_processes_that_do_not_agree_all_say_what_differs(tmp_path):
    """Rank 0 draws the noise for its own bound, and records its own sampling: a rank of another is no private one."""
    found = results(disagree, (0, tmp_path), (1, tmp_path))
    for each in found:
        for name, message in DISAGREEMENTS.items():
            assert re.search(message, str(each[name])), (name, each[name])
        assert each["equal numbers"] is each["equal rates"] is None
        assert not each["exists"]
        assert each["events"] == [0, 0, 0, 0, 0, 0]
    assert dp.PrivacyLedger.read(tmp_path / "steps.jsonl").events == ()


# --- Private training over two processes, one of which is killed (SIGKILL) at a random moment -------------------------
KILLS = 5 if soak.MINUTES else 1

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo"),
]


def started(folder, attempt):
    context = forkserver()
    processes = [context.Process(target=train, args=(rank, str(folder), attempt), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    return processes


@pytest.mark.search(60)
@pytest.mark.parametrize("victim", [0, 1])
def test_the_ledger_has_every_step_that_was_released_and_training_goes_on(tmp_path, rng, record_property, victim):
    met = 0
    for attempt in range(KILLS + 1):
        processes = started(tmp_path, attempt)
        if attempt < KILLS:
            file = tmp_path / f"released-{attempt}-{victim}"
            while processes[victim].is_alive() and not file.exists():
                time.sleep(0.002)
            time.sleep(0.2 * rng.random())
            processes[victim].kill()
        for process in processes:
            process.join(120)
        assert None not in [process.exitcode for process in processes]
        met += processes[victim].exitcode == -9
        if not any(process.exitcode for process in processes):
            break
    record_property("kills", met)
    assert [process.exitcode for process in processes] == [0, 0]
    assert (tmp_path / "ended-0").read_text() == (tmp_path / "ended-1").read_text()
    # A process that ended has written what the one that was killed with it may not have come to write.
    released = 0
    for each in range(attempt + 1):
        files = [tmp_path / f"released-{each}-{rank}" for rank in range(2)]
        released += max(len(file.read_text().splitlines()) for file in files if file.exists())
    recorded = sum(event.count for event in dp.PrivacyLedger.read(tmp_path / "ledger.jsonl").events)
    assert STEPS <= released <= recorded
    assert max(int(line) for line in (tmp_path / f"released-{attempt}-0").read_text().splitlines()) == STEPS
