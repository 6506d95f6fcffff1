"""Two processes over gloo: one noise for both, one ledger, disjoint rows; and noise that nobody else repeats."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loops import classify, clipped_sums, mlp, points

from accelerant.privacy import dp

HERE = Path(__file__).parent

INPUTS = 200
"""Of the model, for 1,635 parameters: enough to tell the noise of one process from that of two."""

WORKER = """
import json, sys, datetime
import torch
sys.path.insert(0, {here!r})
from loops import classify, mlp, parameters, points, private
rank, folder, noise, clipping = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4]
of_a_group = int(sys.argv[5 + rank])
groups = torch.arange(40) // of_a_group if of_a_group else None
torch.set_num_threads(1)
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{{folder}}/meeting", rank=rank, world_size=2, timeout=datetime.timedelta(minutes=5)
)
model = mlp({inputs}, seed=rank)  # rank 0's parameters are everybody's
torch.manual_seed(7)
training = private(
    model, 1.0, noise_multiplier=noise, ledger=folder + "/spent.jsonl", clipping=clipping, groups=groups
)
rows = []
x, y = points(inputs={inputs})
index = torch.arange(40)
for batch in training.batches((x, y, index), microbatch=8, steps=2):
    rows += batch.tensors[2][batch.mask].tolist()
    classify(model, *batch.tensors[:2]).backward()
    training.optimizer.step()
found = {{
    "rows": sorted(rows),
    "parameters": torch.cat([p.flatten() for p in parameters(model)]).tolist(),
    "events": sum(event.count for event in training.ledger.events),
    "path": str(training.ledger.path),
    "norm": training.clipper.max_grad_norm,
    "expected": training.optimizer.expected_batch_size,
    "unit": training.ledger.unit,
    "noise": training.optimizer._release.source.integers((4,), 1000.0).tolist(),
}}
training.close()
print(json.dumps(found))
"""


def started_two(folder, noise, clipping="flat", rows_of_a_group=(0, 0)):
    """Exit status, output and errors of each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = WORKER.format(here=str(HERE), inputs=INPUTS)
    arguments = [str(folder), str(noise), clipping, *map(str, rows_of_a_group)]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    results = []
    for process in started:
        out, errors = process.communicate(timeout=400)  # a limit for a process that hangs, on a loaded machine too
        results.append((process.returncode, out, errors))
    return results


def run_two(*given, **options):
    results = []
    for status, out, errors in started_two(*given, **options):
        assert status == 0, errors[-2000:]
        results.append(json.loads(out.splitlines()[-1]))
    return results


@pytest.mark.slow
def test_two_processes_make_the_update_of_one(tmp_path):
    first, second = run_two(tmp_path, 0.0)
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
    assert sum(event.count for event in dp.Ledger.read(tmp_path / "spent.jsonl").events) == 2


@pytest.mark.slow
def test_the_noise_is_added_once_and_differs_in_each_process(tmp_path):
    first, second = run_two(tmp_path, 20.0)
    assert first["parameters"] == second["parameters"]
    assert first["noise"] != second["noise"]
    start = torch.cat([p.detach().double().flatten() for p in mlp(INPUTS, seed=0).parameters()])
    moved = torch.tensor(first["parameters"], dtype=torch.float64) - start
    # Two steps of 20 * 0.5 / 40 in each parameter: 8 deviations of it; noise of both ranks would give 0.51.
    assert float(moved.std()) == pytest.approx(0.36, rel=0.15)


@pytest.mark.slow
def test_the_adaptive_norm_is_the_same_in_each_process(tmp_path):
    first, second = run_two(tmp_path, 1.0, "adaptive")
    assert first["norm"] == second["norm"] != 0.5
    assert first["parameters"] == second["parameters"]


@pytest.mark.slow
def test_no_group_is_drawn_by_two_processes(tmp_path):
    found = run_two(tmp_path, 1.0, rows_of_a_group=(4, 4))  # at rate 1: each of ten groups once in each of two steps
    drawn = [[row // 4 for row in each["rows"]] for each in found]
    assert [sorted(groups) for groups in drawn] == [sorted([*range(0, 10, 2)] * 2), sorted([*range(1, 10, 2)] * 2)]
    assert found[0]["parameters"] == found[1]["parameters"]
    assert [each["expected"] for each in found] == [10.0, 10.0]
    assert [each["unit"] for each in found] == ["user", "user"]


@pytest.mark.slow
@pytest.mark.parametrize("rows_of_a_group", [(4, 5), (4, 0)])
def test_processes_with_groups_of_their_own_are_refused(tmp_path, rows_of_a_group):
    """A user would be in two shares."""
    for status, _, errors in started_two(tmp_path, 1.0, rows_of_a_group=rows_of_a_group):
        assert status == 1
        assert "ConfigError: groups must be those of all rows, the same in each process" in errors
    assert not (tmp_path / "spent.jsonl").exists()
