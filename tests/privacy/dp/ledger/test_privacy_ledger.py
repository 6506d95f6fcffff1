"""The ledger: what it adds up, what it refuses, and that kill -9 never makes it forget."""

import collections
import copy
import itertools
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

from accelerant.errors import AccelerantError, BudgetExceeded, ConfigError, FormatError
from accelerant.privacy.dp import ledger as ledger_module
from accelerant.privacy.dp.ledger import Budget, PrivacyLedger, accounting
from accelerant.privacy.dp.ledger.accounting import PrivacyEvent, spent
from accelerant.privacy.dp.ledger.journal import LedgerJournal
from processes import in_threads
from refusals import assert_raises

STEP = PrivacyEvent("gaussian", 2.0, "poisson", 0.01)
OTHER = PrivacyEvent("laplace", 10.0)
CHEAP = PrivacyEvent("gaussian", 20.0)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "privacy.jsonl"


def counts(ledger):
    return {event.times(1): event.count for event in ledger.events}


def lines_of(path):
    return path.read_bytes().splitlines(keepends=True)


# --- adding up -------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_in_memory():
    with PrivacyLedger() as ledger:
        for _ in range(3):
            ledger.record(STEP)
        ledger.record(OTHER.times(2))
        assert ledger.events == (STEP.times(3), OTHER.times(2))
        assert ledger.epsilon(1e-5) == spent([STEP.times(3), OTHER.times(2)], 1e-5).epsilon
        assert ledger.epsilon(1e-5, method="rdp") == spent([STEP.times(3), OTHER.times(2)], 1e-5, method="rdp").epsilon
        more = ledger.remaining(STEP, epsilon=1.0, delta=1e-5, method="rdp")
        assert more > 100
    assert spent([STEP.times(3 + more), OTHER.times(2)], 1e-5, method="rdp").epsilon <= 1.0


def test_runs_on_the_same_file_add_up(path):
    for run in range(1, 4):
        with PrivacyLedger(path, dataset="mnist") as ledger:
            for _ in range(100):
                ledger.record(STEP)
            ledger.record(OTHER)
            assert counts(ledger) == {STEP: 100 * run, OTHER: run}
    assert [sum(run.counts.values()) for run in PrivacyLedger.read(path).runs] == [101] * 3
    assert PrivacyLedger(path).dataset == "mnist"


def test_a_ledger_that_is_being_written_can_be_read_and_shows_no_less(path):
    with PrivacyLedger(path) as ledger:
        for count in range(1, 60):
            ledger.record(STEP)
            assert counts(PrivacyLedger.read(path))[STEP] >= count
    assert counts(PrivacyLedger.read(path)) == {STEP: 59}


def test_few_records_for_many_steps(path):
    """The disk is waited for once in a block; a block is one in 32 of what was done."""
    with PrivacyLedger(path) as ledger:
        for count in range(1, 5001):
            ledger.record(STEP)
            if count % 777 == 0:
                assert count <= counts(PrivacyLedger.read(path))[STEP] <= count + count // 32 + 1
    assert len(lines_of(path)) < 240


def test_settle_writes_the_exact_number(path):
    ledger = PrivacyLedger(path)
    for _ in range(1000):
        ledger.record(STEP)
    ledger.settle()
    assert counts(PrivacyLedger.read(path)) == {STEP: 1000}
    for _ in range(20):
        ledger.record(STEP)
    assert counts(PrivacyLedger.read(path))[STEP] >= 1020
    ledger.close()
    assert counts(PrivacyLedger.read(path)) == {STEP: 1020}


def test_threads_share_a_ledger(path):
    ledger = PrivacyLedger(path)
    in_threads((lambda: [ledger.record(STEP) for _ in range(200)]) for _ in range(4))
    ledger.close()
    assert counts(PrivacyLedger.read(path)) == {STEP: 800}


def test_a_ledger_that_is_dropped_closes(path):
    PrivacyLedger(path).record(STEP)
    assert PrivacyLedger.read(path).runs[0].closed


def test_many_like_events_become_few_that_cost_no_less(path):
    """Adaptive clipping changes noise and delta a little in each step."""
    events = [PrivacyEvent("gaussian", 30 + index * 1e-3, delta=1e-12 * (1 + index / 1000)) for index in range(300)]
    with PrivacyLedger(path) as ledger:
        for event in events:
            ledger.record(event)
        assert sum(event.count for event in ledger.events) == 300
        assert len(ledger.events) < 30
        exact = spent(
            [PrivacyEvent("gaussian", sum(event.noise_multiplier**-2 for event in events) ** -0.5)], 1e-5
        ).epsilon
        assert exact <= ledger.epsilon(1e-5) <= 1.02 * exact
        assert sum(event.count * event.delta for event in ledger.events) >= sum(event.delta for event in events)


# --- budget ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_the_step_that_would_pass_the_budget_is_refused_before_anything_is_written(path, method):
    budget = Budget(epsilon=0.5, delta=1e-5, method=method)
    fits = PrivacyLedger().remaining(CHEAP, epsilon=0.5, delta=1e-5, method=method)
    with PrivacyLedger(path, budget=budget) as ledger:
        for _ in range(fits):
            ledger.require(CHEAP)
            ledger.record(CHEAP)
        before = path.read_bytes()
        for refused in (ledger.require, ledger.record):
            assert_raises(BudgetExceeded, r"budget is epsilon 0.5 at delta 1e-05.*Nothing was done", refused, CHEAP)
        assert path.read_bytes() == before
        assert ledger.epsilon(1e-5, method) <= 0.5
        assert ledger.events == (CHEAP.times(fits),)
    with PrivacyLedger(path, budget=budget) as ledger, pytest.raises(BudgetExceeded):
        ledger.record(CHEAP)


def test_a_budget_over_two_kinds_that_alternate():
    budget = Budget(epsilon=0.5, delta=1e-5, method="rdp")
    ledger = PrivacyLedger(budget=budget)
    kinds = (PrivacyEvent("laplace", 60.0), CHEAP, CHEAP)
    assert_raises(BudgetExceeded, None, lambda: collections.deque(map(ledger.record, itertools.cycle(kinds)), maxlen=0))
    assert ledger.epsilon(1e-5, "rdp") <= 0.5
    done = ledger.events
    assert (
        spent([*done, CHEAP], 1e-5, method="rdp").epsilon > 0.5
        or spent([*done, PrivacyEvent("laplace", 60.0)], 1e-5, method="rdp").epsilon > 0.5
    )


@pytest.mark.slow
def test_a_budget_asks_the_accountant_seldom(monkeypatch):
    asked = []
    monkeypatch.setattr(accounting, "spent", lambda *a, **k: asked.append(1) or spent(*a, **k))
    ledger = PrivacyLedger(budget=Budget(epsilon=1.0, delta=1e-5))
    for _ in range(1000):
        ledger.record(STEP)
    assert 0 < len(asked) < 60


def test_what_is_reserved_does_not_pass_the_budget_either(path):
    fits = PrivacyLedger().remaining(CHEAP, epsilon=0.5, delta=1e-5, method="rdp")
    ledger = PrivacyLedger(path, budget=Budget(epsilon=0.5, delta=1e-5, method="rdp"))
    for _ in range(fits - 1):
        ledger.record(CHEAP)
    assert counts(PrivacyLedger.read(path))[CHEAP] <= fits


def test_no_noise_passes_every_budget():
    with pytest.raises(BudgetExceeded, match="would make it inf"):
        PrivacyLedger(budget=Budget(epsilon=100, delta=1e-5)).record(PrivacyEvent("gaussian", 0.0))


@pytest.mark.parametrize("values", [(0.0, 1e-5), (math.inf, 1e-5), (1.0, 0.0), (1.0, 1e-5, "clt")])
def test_budgets_without_meaning(values):
    assert_raises(ConfigError, None, lambda: Budget(**dict(zip(("epsilon", "delta", "method"), values, strict=False))))


# --- what does not add up --------------------------------------------------------------------------------------------
def test_other_units_relations_and_data_sets_are_refused(path):
    PrivacyLedger(path, unit="patient", dataset="a").close()
    before = path.read_bytes()
    for options, message in (
        ({}, "is of unit 'patient', not 'example'"),
        ({"unit": "patient", "neighbouring": "replace-one"}, "is of neighbouring 'add-or-remove-one'"),
        ({"unit": "patient", "dataset": "b"}, "is of the data set 'a', not 'b'.*any_dataset=True"),
    ):
        assert_raises(ConfigError, message, PrivacyLedger, path, **options)
    assert path.read_bytes() == before
    with PrivacyLedger(path, unit="patient", dataset="b", any_dataset=True) as ledger:
        ledger.record(STEP)
        assert ledger.statement().datasets == ("a", "b")
    PrivacyLedger(path, unit="patient", dataset="b").close()


def test_one_writer_at_a_time(path):
    with PrivacyLedger(path), pytest.raises(ConfigError, match="is open in another process, or elsewhere in this one"):
        PrivacyLedger(path)
    code = f"from accelerant.privacy.dp.ledger import PrivacyLedger\nPrivacyLedger({str(path)!r})"
    with PrivacyLedger(path):
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "is open in another process" in found.stderr
    PrivacyLedger(path).close()


def test_a_fork_of_the_process_may_not_write_and_does_not_close(path):
    if not hasattr(os, "fork"):
        pytest.skip("no fork on this system")
    ledger = PrivacyLedger(path)
    ledger.record(STEP)
    child = os.fork()
    if not child:
        status = 1
        try:
            ledger.record(STEP)
        except ConfigError as error:
            status = 0 if "only that one writes" in str(error) else 2
        finally:
            ledger.close()
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(ConfigError, match="is open in another process"):  # the child left the lock to us
        PrivacyLedger(path)
    ledger.record(STEP)
    ledger.close()
    assert counts(PrivacyLedger.read(path)) == {STEP: 2}


def test_a_worker_that_outlives_the_writer_does_not_hold_the_lock(path):
    if not hasattr(os, "fork"):
        pytest.skip("no fork on this system")
    ledger = PrivacyLedger(path)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(writer)
        os.read(reader, 1)  # until the parent is done
        os._exit(0)
    assert_raises(ConfigError, "is open in another process", PrivacyLedger, path)
    ledger.close()
    PrivacyLedger(path).close()
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0  # it outlived the writer
    os.close(reader)


def test_closed_read_and_copied_ledgers_record_nothing(path):
    ledger = PrivacyLedger(path)
    ledger.record(STEP)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        assert_raises(ConfigError, "neither copied nor pickled", copied, ledger)
    ledger.close()
    ledger.close()
    assert_raises(ConfigError, "is closed", ledger.record, STEP)
    assert counts(ledger) == {STEP: 1}
    assert_raises(ConfigError, r"opened by PrivacyLedger.read", lambda: PrivacyLedger.read(path).record(STEP))


def test_wrong_usage(tmp_path):
    for unit in ("", 3):
        assert_raises(ConfigError, rf"unit must name .* got {unit!r}", PrivacyLedger, unit=unit)
    assert_raises(ConfigError, r"budget must be a Budget, .* got 3", PrivacyLedger, budget=3)
    assert_raises(ConfigError, "got 'like'", PrivacyLedger, neighbouring="like")
    assert_raises(ConfigError, "cannot write to the ledger", PrivacyLedger, tmp_path / "nowhere" / "privacy.jsonl")
    assert_raises(ConfigError, "cannot be read", PrivacyLedger.read, tmp_path / "nothing")


def test_others_may_read_and_not_write(path):
    before = os.umask(0)
    try:
        PrivacyLedger(path).close()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644


# --- files that were cut or edited -----------------------------------------------------------------------------------
@pytest.fixture
def written(path):
    for _ in range(2):
        with PrivacyLedger(path) as ledger:
            for _ in range(20):
                ledger.record(STEP)
    return path


def test_every_changed_byte_is_noticed(written):
    data = written.read_bytes()
    for place in range(0, len(data), 37):
        changed = bytes([data[place] ^ 1])
        written.write_bytes(data[:place] + changed + data[place + 1 :])
        assert_raises(FormatError, r"privacy.jsonl, line \d+", PrivacyLedger.read, written)


def test_every_missing_or_doubled_or_moved_line_is_noticed(written):
    lines = lines_of(written)
    for place in range(len(lines)):
        for changed in (
            lines[:place] + lines[place + 1 :],
            lines[: place + 1] + lines[place:],
            lines[:place] + lines[place + 1 : place + 2] + lines[place : place + 1] + lines[place + 2 :],
        ):
            if changed == lines:
                continue
            written.write_bytes(b"".join(changed))
            assert_raises(FormatError, r"privacy.jsonl, line \d+", PrivacyLedger.read, written)


def test_a_cut_end_is_noticed(written):
    data, lines = written.read_bytes(), len(lines_of(written))
    for size in (0, len(data) // 2, data.rindex(b"\n", 0, -1) + 1, len(data) - 1):
        written.write_bytes(data[:size])
        with pytest.raises(FormatError, match=rf"line \d+: the file ends here, and had {lines} lines: it was cut"):
            PrivacyLedger(written)


def test_a_ledger_without_its_head_file_is_read(written):
    (written.parent / "privacy.jsonl.head").unlink()
    assert counts(PrivacyLedger.read(written)) == {STEP: 40}


def test_the_head_of_another_ledger(written, tmp_path):
    other = tmp_path / "other.jsonl"
    PrivacyLedger(other, unit="user").close()
    (written.parent / "privacy.jsonl.head").write_bytes((tmp_path / "other.jsonl.head").read_bytes())
    assert_raises(FormatError, r"privacy.jsonl.head belongs to another ledger", PrivacyLedger.read, written)


@pytest.mark.parametrize(("record", "message"), [
    ({"kind": "mystery", "run": 3}, "after it ended"),
    ({"kind": "run", "run": 7}, "run 7 follows run 2"),
    ({"kind": "ledger", "version": 1}, "has no other"),
    ({"no": "kind"}, "not a record that this version knows"),
])  # fmt: skip
def test_records_without_meaning(written, record, message):
    journal = LedgerJournal(written)
    journal.append(record)
    journal.close()
    assert_raises(FormatError, rf"line {len(lines_of(written))}: .*{message}", PrivacyLedger.read, written)


@pytest.mark.parametrize(("records", "message"), [
    ([{"kind": "ledger", "version": 2}], "a ledger of version 2, this one reads 1"),
    ([{"kind": "run", "run": 1}], "a ledger begins with one record"),
])  # fmt: skip
def test_first_records_without_meaning(path, records, message):
    journal = LedgerJournal(path)
    for record in records:
        journal.append(record)
    journal.close()
    assert_raises(FormatError, message, PrivacyLedger.read, path)


def test_more_used_than_reserved_is_no_ledger(path):
    ledger = PrivacyLedger(path)
    ledger.record(STEP)
    ledger._writer.used[STEP] += 5
    ledger.close()
    assert_raises(FormatError, "more was used than was reserved", PrivacyLedger.read, path)


@pytest.mark.parametrize(
    "text", [b"", b"not json\n", b"[]\n", b'{"record": 1, "chain": "a"}\n', b"[" * 100_000 + b"\n"]
)
def test_other_files_are_no_ledger(path, text):
    path.write_bytes(text)
    assert_raises(FormatError, "privacy ledger", PrivacyLedger.read, path)


@pytest.mark.parametrize("text", [b'{"summary": "of a run, in one line"}', b"\x89PNG", b'{"record":{"sort":1}'])
def test_a_file_of_one_line_without_an_end_is_not_taken_for_a_torn_ledger(path, text):
    path.write_bytes(text)
    for use in (PrivacyLedger, PrivacyLedger.read):
        assert_raises(FormatError, "line 1: no record of a privacy ledger", use, path)
    assert path.read_bytes() == text


@pytest.mark.parametrize("torn", [b"", b'{"rec', b'{"record":{"kind":"ledger","vers', b"\0\0\0", b'{"record":\0\0'])
def test_a_first_line_that_a_crash_cut_short_begins_a_ledger(path, torn):
    path.write_bytes(torn)
    assert_raises(FormatError, "not one whole record", PrivacyLedger.read, path)
    with PrivacyLedger(path) as ledger:
        ledger.record(STEP)
    assert counts(PrivacyLedger.read(path)) == {STEP: 1}


# --- crashes ---------------------------------------------------------------------------------------------------------
def test_a_torn_last_line_is_dropped_and_what_it_may_have_meant_is_counted(path):
    """A crash while the closing record is written: the reservations count."""
    ledger = PrivacyLedger(path)
    for _ in range(100):
        ledger.record(STEP)
    reserved = counts(PrivacyLedger.read(path))[STEP]
    head = (path.parent / "privacy.jsonl.head").read_bytes()
    ledger.close()
    (path.parent / "privacy.jsonl.head").write_bytes(head)
    data = path.read_bytes()
    last = data.rindex(b"\n", 0, -1) + 1
    for size in (*range(last, len(data) - 1, 11), len(data) - 1):
        path.write_bytes(data[:size])
        assert counts(PrivacyLedger.read(path)) == {STEP: reserved}
    with PrivacyLedger(path) as ledger:
        ledger.record(STEP)
    found = PrivacyLedger.read(path)
    assert counts(found) == {STEP: reserved + 1}
    assert [run.closed for run in found.runs] == [False, True]
    assert found.runs[1].facts["torn_bytes"] == len(data) - 1 - last


def test_a_full_disk_refuses_the_event(path, monkeypatch):
    ledger = PrivacyLedger(path)
    ledger.record(STEP)
    before = path.read_bytes()
    write = os.write

    def half(file, data):
        return write(file, data[: len(data) // 2])

    monkeypatch.setattr("accelerant.privacy.dp.ledger.journal.os.write", half)
    assert_raises(OSError, "No space left", ledger.record, STEP)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert counts(ledger) == {STEP: 1}
    ledger.record(STEP)
    ledger.close()
    assert counts(PrivacyLedger.read(path)) == {STEP: 2}


CHILD = """
import os, sys
from accelerant.privacy.dp.ledger.accounting import PrivacyEvent
from accelerant.privacy.dp.ledger import PrivacyLedger

path, out, parent = sys.argv[1:]
steps = (PrivacyEvent("gaussian", 2.0, "poisson", 0.01), PrivacyEvent("laplace", 10.0))
sys.stdout.write("ready")
sys.stdout.flush()
for line in sys.stdin:
    child = os.fork()
    if not child:
        file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        ledger = PrivacyLedger(path)
        done = 0
        while True:
            ledger.record(steps[done % 7 == 0])
            os.write(file, b".")  # the event happens: this survives kill -9
            done += 1
    print(child, flush=True)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.search(60)
def test_kill_9_at_any_moment_never_under_counts(tmp_path_factory, rng, record_property):
    """Processes are killed while they record; each event that happened is counted, and few that did not."""
    path = tmp_path_factory.mktemp("killed") / "privacy.jsonl"
    out = path.with_name("happened")
    server = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), str(out), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert server.stdout.read(5) == "ready"
    happened = total = 0
    for turn in range(20):
        out.write_bytes(b"")
        server.stdin.write("go\n")
        child = int(server.stdout.readline())
        if turn % 2:
            _until(lambda: out.stat().st_size >= 3 * turn)  # noqa: B023  asked at once
        else:
            time.sleep(
                0.0068 * turn * rng.random()
            )  # no wait for something: the moment of the kill, while it opens the file too
        os.kill(child, signal.SIGKILL)
        now = _when_unlocked(path)
        happened += out.stat().st_size
        counted = sum(counts(now).values())
        assert counted >= happened
        assert counted - total <= out.stat().st_size * 33 / 32 + 4
        total = counted
    server.stdin.close()
    assert server.wait(120) == 0
    assert happened >= 3 * sum(range(1, 20, 2))
    assert any(not run.closed for run in now.runs)
    PrivacyLedger(path).close()
    record_property("kills", 20)


def _when_unlocked(path):
    """The ledger, when the killed process is gone."""

    def free():
        try:
            PrivacyLedger(path).close()
        except ConfigError:
            return False
        return True

    _until(free)
    return PrivacyLedger.read(path)


def _until(holds):
    end = time.monotonic() + 120  # a limit for what never comes, on a loaded machine and a slow disk too
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.0005)


def test_a_process_that_ends_in_order_closes_its_ledger(path):
    code = (
        "import sys\nfrom accelerant.privacy.dp.ledger import PrivacyEvent, PrivacyLedger\n"
        "ledger = PrivacyLedger(sys.argv[1])\n"
        "for _ in range(1000): ledger.record(PrivacyEvent('gaussian', 1.0))\nraise ValueError"
    )
    found = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, check=False)
    assert found.returncode == 1
    assert counts(PrivacyLedger.read(path)) == {PrivacyEvent("gaussian", 1.0): 1000}


def test_neither_torch_nor_the_accountant_is_imported_to_record(path):
    code = (
        "import sys\nfrom accelerant.privacy.dp.ledger import PrivacyEvent, PrivacyLedger\n"
        "PrivacyLedger(sys.argv[1]).record(PrivacyEvent('gaussian', 1.0))\n"
        "print([name for name in ('torch', 'dp_accounting', 'scipy') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_lines_are_plain_json(written):
    """Whoever reads the file later needs nothing of ours."""
    kinds = [json.loads(line)["record"]["kind"] for line in lines_of(written)]
    assert kinds[:3] == ["ledger", "run", "reserve"]
    assert kinds[-1] == "used"


def test_the_errors_are_of_one_tree():
    assert issubclass(BudgetExceeded, AccelerantError)
    assert ledger_module.__all__ == ["Budget", "PrivacyEvent", "PrivacyLedger", "PrivacyStatement"]


def test_only_further_variants_of_the_same_event_are_rounded():
    """Each distinct event takes a composition; those of other notes or draws are events of their own."""
    ledger = PrivacyLedger()
    others = [PrivacyEvent("gaussian", 1.1, note=str(number)) for number in range(9)]
    kinds = [PrivacyEvent("laplace", 1.1), PrivacyEvent("gaussian", 1.1, "poisson", 0.5),
             PrivacyEvent("gaussian", 1.1, source="a"), PrivacyEvent("gaussian", 1.1, secure=True),
             PrivacyEvent("gaussian", 1.1, idealised=True)]  # fmt: skip
    variants = [PrivacyEvent("gaussian", 3.3 + number / 1000, delta=1e-9) for number in range(8)]
    for event in (*others, *kinds, *variants):
        ledger.record(event)
    assert set(counts(ledger)) == {*others, *kinds, *variants}
    ledger.record(variants[0])  # a known one
    ledger.record(PrivacyEvent("gaussian", 3.33331, delta=1.7e-9))
    (rounded,) = set(counts(ledger)) - {*others, *kinds, *variants}
    assert 3.33331 * 2 ** (-1 / 256) <= rounded.noise_multiplier < 3.33331
    assert 1.7e-9 < rounded.delta <= 1.7e-9 * 2**0.25
