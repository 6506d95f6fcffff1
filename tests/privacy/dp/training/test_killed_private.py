"""Private training over two processes, one of which is killed (SIGKILL) at a random moment."""

import time

import pytest
import torch.distributed as dist
from killed_workers import STEPS, train

import soak
from accelerant.privacy import dp
from processes import forkserver

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
    recorded = sum(event.count for event in dp.Ledger.read(tmp_path / "ledger.jsonl").events)
    assert STEPS <= released <= recorded
    assert max(int(line) for line in (tmp_path / f"released-{attempt}-0").read_text().splitlines()) == STEPS
