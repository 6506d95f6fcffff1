"""Random histories of a ledger, cut and edited: its epsilon is never below what was spent unless it says so."""

import collections
import json
import math
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import soak
from accelerant.errors import BudgetExceeded, ConfigError, FormatError
from accelerant.privacy.dp.ledger import Budget, PrivacyLedger, journal
from accelerant.privacy.dp.ledger.accounting import PrivacyEvent, spent
from accelerant.privacy.dp.ledger.journal import _START, _next_chain
from refusals import assert_raises

EVENTS = st.sampled_from(
    [
        PrivacyEvent("gaussian", 2.0, "poisson", 0.01),
        PrivacyEvent("gaussian", 20.0),
        PrivacyEvent("discrete_laplace", 50.0),
    ]
)
COUNTS = st.integers(1, 90)  # blocks are reserved in advance from 64 on
DELTA = 1e-5
TRIED = collections.Counter()


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch):
    """A reader waits for a head that is behind."""
    monkeypatch.setattr(time, "sleep", lambda _: None)


def epsilon(counts):
    return spent([event.times(count) for event, count in counts.items()], DELTA, method="rdp").epsilon


def abandon(ledger):
    """What a kill leaves: the lock is free, and nothing more is written."""
    ledger._writer._open = False
    ledger._writer._journal.close()


class Histories(RuleBasedStateMachine):
    """A ledger that is written, closed, killed, damaged and merged into."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path, self.head = self.folder / "privacy.jsonl", self.folder / "privacy.jsonl.head"
        self.truth = collections.defaultdict(collections.Counter)  # by run
        self.checkpoints, self.heads = [], []

    @initialize()
    def begin(self):
        self.ledger = PrivacyLedger(self.path)

    def teardown(self):
        TRIED["histories"] += 1
        abandon(self.ledger)
        shutil.rmtree(self.folder)

    # --- what is spent
    @rule(event=EVENTS, count=COUNTS)
    def record(self, event, count):
        for _ in range(count):
            self.ledger.record(event)
        self.truth[self.ledger.run_id][event] += count

    @rule(delta=st.sampled_from([1e-7, 1e-5]), units=st.integers(1, 500))
    def describe(self, delta, units):
        self.ledger.describe(delta=delta, units=units)
        assert self.ledger.delta == delta

    @rule()
    def settle(self):
        self.ledger.settle()
        self.heads.append(self.head.read_bytes())

    @rule()
    def reopen(self):
        self.ledger.close()
        self.ledger = PrivacyLedger(self.path)

    @rule(torn=st.sampled_from([b"", b'{"record":{"kind":"used","run', b"\0\0\0"]))
    def kill(self, torn):
        TRIED["kills"] += 1
        abandon(self.ledger)
        self.path.write_bytes(self.path.read_bytes() + torn)
        self.ledger = PrivacyLedger(self.path)

    @rule()
    def checkpoint(self):
        self.checkpoints.append(self.ledger.by_run())

    @rule(event=EVENTS, count=COUNTS, data=st.data())
    def spend_elsewhere(self, event, count, data):
        """A run in memory, perhaps resumed from a checkpoint, whose own checkpoint is merged some time."""
        with PrivacyLedger() as other:
            if self.checkpoints and data.draw(st.booleans()):
                other.merge(data.draw(st.sampled_from(self.checkpoints)))
            other.record(event.times(count))
            self.truth[other.run_id][event] += count
            self.checkpoints.append(other.by_run())
            self.ledger.merge(other.by_run())

    @rule(data=st.data())
    def merge_again(self, data):
        if self.checkpoints:
            before = collections.Counter({event.times(1): event.count for event in self.ledger.events})
            self.ledger.merge(data.draw(st.sampled_from(self.checkpoints)))
            after = collections.Counter({event.times(1): event.count for event in self.ledger.events})
            assert after == before or self.ledger.unguarded  # all of it was merged, or is of this file

    # --- what happens to the files
    @rule(data=st.data(), goes_on=st.booleans())
    def damage(self, data, goes_on):
        TRIED["edits"] += 1
        abandon(self.ledger)
        whole, head = self.path.read_bytes(), self.head.read_bytes() if self.head.exists() else None
        kind = data.draw(st.sampled_from(["cut", "cut, no head", "cut, old head", "flip", "drop", "double", "swap"]))
        lines = whole.splitlines(keepends=True)
        at = data.draw(st.integers(0, len(lines) - 1))
        if kind.startswith("cut"):
            self.path.write_bytes(whole[: data.draw(st.integers(1, len(whole)))])
        elif kind == "flip":
            byte = data.draw(st.integers(0, len(whole) - 1))
            self.path.write_bytes(
                whole[:byte] + bytes([whole[byte] ^ data.draw(st.integers(1, 255))]) + whole[byte + 1 :]
            )
        elif kind == "drop":
            self.path.write_bytes(b"".join(lines[:at] + lines[at + 1 :]))
        elif kind == "double":
            self.path.write_bytes(b"".join(lines[: at + 1] + lines[at:]))
        else:
            self.path.write_bytes(b"".join(lines[:at] + lines[at + 1 : at + 2] + lines[at : at + 1] + lines[at + 2 :]))
        if kind == "cut, no head":
            self.head.unlink(missing_ok=True)
        elif kind == "cut, old head" and self.heads:
            old = data.draw(st.sampled_from(self.heads))
            if int(old.split()[0]) != self.path.read_bytes().count(b"\n"):  # else an older copy of both
                self.head.write_bytes(old)
        try:
            self.ledger = PrivacyLedger(self.path)
        except FormatError:
            goes_on = False
        else:
            self.check(self.ledger)
            if not goes_on:
                abandon(self.ledger)
        if not goes_on:  # an untouched copy is taken
            self.path.write_bytes(whole)
            self.head.unlink(missing_ok=True) if head is None else self.head.write_bytes(head)
            self.ledger = PrivacyLedger(self.path)

    # --- what must hold
    def check(self, ledger):
        assert ledger.unguarded or ledger.epsilon(DELTA, "rdp") >= self.least * (1 - 1e-12)

    @property
    def least(self):
        return epsilon(sum(self.truth.values(), collections.Counter()))

    @invariant()
    def never_less(self):
        self.check(self.ledger)
        self.check(PrivacyLedger.read(self.path))


@pytest.mark.search(120)
def test_no_history_hides_what_was_spent(record_property):
    TRIED.clear()
    examples, steps = (8, 40) if soak.MINUTES else (6, 12)
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    for name, count in TRIED.items():
        record_property(name, count)


# --- cut files -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lines", [2, 3, 4])
def test_the_statement_of_a_cut_ledger_without_its_head_says_so(tmp_path, lines):
    path = tmp_path / "privacy.jsonl"
    for _ in range(2):
        with PrivacyLedger(path) as ledger:
            ledger.record(PrivacyEvent("discrete_laplace", 4.0).times(3))
    assert "cut off" not in str(PrivacyLedger.read(path).statement())
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]))
    (tmp_path / "privacy.jsonl.head").unlink()
    found = str(PrivacyLedger.read(path).statement())
    assert "privacy.jsonl.head was missing or not readable when it was read: lines cut off the ledger" in found
    PrivacyLedger(path).close()  # which writes a head
    with PrivacyLedger(path) as ledger:  # and it is not forgotten
        assert "epsilon may be larger" in str(ledger.statement())
    assert "was missing or not readable when run 2 began" in str(PrivacyLedger.read(path).statement()) or lines > 2


def test_a_head_that_a_writer_is_about_to_write_is_no_old_one(tmp_path, monkeypatch):
    head = tmp_path / "privacy.jsonl.head"
    with PrivacyLedger(tmp_path / "privacy.jsonl") as ledger:
        before = head.read_bytes()
        ledger.record(PrivacyEvent("gaussian", 2.0))
        after = head.read_bytes()
        head.write_bytes(before)
        monkeypatch.setattr(time, "sleep", lambda _: head.write_bytes(after))
        assert not PrivacyLedger.read(tmp_path / "privacy.jsonl").unguarded


def test_a_file_that_was_emptied_with_its_head_says_so(tmp_path):
    path = tmp_path / "privacy.jsonl"
    path.touch()
    with PrivacyLedger(path) as ledger:
        assert ledger.unguarded
    assert not PrivacyLedger(tmp_path / "new.jsonl").unguarded


# --- interrupted, replaced and crafted files -------------------------------------------------------------------------
@pytest.mark.parametrize("at", range(1, 8))
def test_ctrl_c_at_any_write_leaves_a_ledger_that_can_be_read(tmp_path, monkeypatch, at):
    """A line of an event that did not happen may be longer than the next one, which takes its place."""
    flush, flushed, done = os.fsync, [], 0

    def interrupted(file):
        flush(file)
        flushed.append(file)
        if len(flushed) == at:
            raise KeyboardInterrupt

    PrivacyLedger(tmp_path / "privacy.jsonl").close()
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt), PrivacyLedger(tmp_path / "privacy.jsonl") as ledger:  # noqa: PT012
        for event in (PrivacyEvent("discrete_laplace", 4.0, note="a long note" * 9), PrivacyEvent("gaussian", 2.0)) * 2:
            ledger.record(event)
            done += 1
        ledger.settle()
        ledger.settle()
    with PrivacyLedger(tmp_path / "privacy.jsonl") as ledger:
        assert sum(event.count for event in ledger.events) == done


def test_ctrl_c_while_settling_under_counts_nothing(tmp_path, monkeypatch):
    path, event, recorded, size = tmp_path / "privacy.jsonl", PrivacyEvent("gaussian", 2.0), 0, 0
    ledger = PrivacyLedger(path)
    while recorded < 2000 or path.stat().st_size == size:  # until a block has been reserved
        size = path.stat().st_size
        ledger.record(event)
        recorded += 1

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        patch.setattr(journal, "open_regular", interrupted)  # of the copy of the last line's hash
        ledger.settle()
    for _ in range(20):
        ledger.record(event)
    assert sum(each.count for each in PrivacyLedger.read(path).events) >= recorded + 20
    abandon(ledger)


@pytest.mark.parametrize("how", ["deleted", "replaced", "truncated"])
def test_nothing_is_recorded_in_a_file_that_is_no_longer_the_ledger(tmp_path, how):
    path = tmp_path / "privacy.jsonl"
    ledger = PrivacyLedger(path)
    ledger.record(PrivacyEvent("gaussian", 2.0))
    if how == "deleted":
        path.unlink()
    elif how == "replaced":
        shutil.copy(path, tmp_path / "copy")
        (tmp_path / "copy").replace(path)
    else:
        path.write_bytes(b"")
    for action in (lambda: ledger.record(PrivacyEvent("gaussian", 2.0)), ledger.close):
        assert_raises(ConfigError, "was deleted, replaced or changed by another program", action)
    assert ledger.events == (PrivacyEvent("gaussian", 2.0),)


def test_the_head_follows_when_the_process_changes_its_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with PrivacyLedger("privacy.jsonl") as ledger:
        monkeypatch.chdir(tmp_path / "elsewhere")
        ledger.record(PrivacyEvent("gaussian", 2.0))
    assert not PrivacyLedger.read(tmp_path / "privacy.jsonl").unguarded
    assert not list((tmp_path / "elsewhere").iterdir())


EVENT = {"mechanism": "discrete_laplace", "noise_multiplier": 10.0, "sampling": "none"}


def craft(path, run=None, *records):
    """Write a ledger of records that no version writes, with the right checksums."""
    head = {"kind": "ledger", "version": 1, "unit": "example", "neighbouring": "add-or-remove-one", "dataset": ""}
    chain, lines = _START, []
    for record in (head, {"kind": "run", "run": 1} | (run or {}), *({"run": 1} | each for each in records)):
        chain = _next_chain(chain, record)
        lines.append(json.dumps({"record": record, "chain": chain}, separators=(",", ":")) + "\n")
    path.write_text("".join(lines))
    return path


HUGE = 10**400
CRAFTED = [
    *({"note": bad} for bad in ([1], 5, None)), {"source": {}}, {"secure": "no"}, {"idealised": 1}, {"delta": HUGE},
    {"noise_multiplier": HUGE}, {"noise_multiplier": True}, {"sample_rate": "1"}, {"unknown": 1}, {"mechanism": [1]},
]  # fmt: skip
CRAFTED_RUNS = [
    *({"budget": bad} for bad in (5, "abc", [1, 2], ["1", "1e-5", "pld"], [HUGE, 1e-5, "pld"], [1, 1e-5, "x"])),
    {"budget": [float("nan"), 1e-5, "pld"]}, {"loosened": 5}, {"loosened": [["x", 1, 2]]}, {"versions": [1]},
    {"versions": {"torch": [1]}}, {"time": [1]}, {"id": 5}, {"unguarded": [1]}, {"earlier": 1}, {"dataset": None},
]  # fmt: skip


def test_crafted_records_are_named(tmp_path):
    path = tmp_path / "privacy.jsonl"
    records = [{"kind": "reserve", "event": EVENT | bad, "count": 1} for bad in CRAFTED]
    records += [{"kind": "reserve", "event": EVENT, "count": bad} for bad in (HUGE, -1, True, 1.0)]
    records += [{"kind": "used", "closed": True, "events": bad} for bad in (5, [[EVENT]], [[EVENT, HUGE]], {})]
    records += [{"kind": "merged", "runs": bad} for bad in ([1], {"x": 5}, {"x": [EVENT]})]
    for crafted in (*((None, record) for record in records), *((run,) for run in CRAFTED_RUNS)):
        assert_raises(FormatError, r"privacy\.jsonl", PrivacyLedger.read, craft(path, *crafted))
        assert_raises(FormatError, r"privacy\.jsonl", PrivacyLedger, path)
    for bad in ({"a": 5}, {"a": {}}, {"a": "abc"}, {5: []}, {"a": [5]}, *({"a": [EVENT | bad]} for bad in CRAFTED)):
        with pytest.raises(FormatError), PrivacyLedger() as ledger:
            ledger.merge(bad)
    with pytest.raises(FormatError), PrivacyLedger() as ledger, pytest.warns(UserWarning, match="older version"):
        ledger.merge("abc")


def test_equal_events_of_a_record_add_up(tmp_path):
    """Our own records have each event once."""
    twice = [[EVENT, 3], [EVENT, 4]]
    for record in ({"kind": "merged", "runs": {"x": twice}}, {"kind": "used", "closed": True, "events": twice}):
        reserve = {"kind": "reserve", "event": EVENT, "count": 7}
        events = PrivacyLedger.read(craft(tmp_path / "privacy.jsonl", None, reserve, record)).events
        assert sum(event.count for event in events) == (14 if record["kind"] == "merged" else 7)


# --- budgets ---------------------------------------------------------------------------------------------------------
STEP = PrivacyEvent("discrete_laplace", 10.0)  # epsilon 0.1
TIGHT, LOOSE = Budget(epsilon=0.5, delta=DELTA, method="rdp"), Budget(epsilon=1.0, delta=DELTA, method="rdp")


def spend(ledger):
    """How many steps a budget allows."""
    for step in range(100):
        try:
            ledger.record(STEP)
        except BudgetExceeded:
            return step
    return 100


@pytest.mark.parametrize("ahead", [None, LOOSE], ids=["none before", "a looser before"])
def test_a_files_budget_holds_without_being_given_again(tmp_path, ahead):
    path = tmp_path / "privacy.jsonl"
    if ahead is not None:
        PrivacyLedger(path, budget=ahead).close()
    PrivacyLedger(path, budget=TIGHT).close()
    with PrivacyLedger(path) as ledger:
        assert ledger.budget == TIGHT
        allowed = spend(ledger)
        assert epsilon({STEP: allowed}) <= 0.5 < epsilon({STEP: allowed + 1})
    with PrivacyLedger(path) as ledger:
        assert spend(ledger) == 0
    found = PrivacyLedger.read(path)
    assert found.statement().budget == (0.5, DELTA, "rdp")
    assert_raises(BudgetExceeded, None, found.require, STEP)


def test_a_budget_is_loosened_by_name_and_the_file_says_so(tmp_path):
    path = tmp_path / "privacy.jsonl"
    PrivacyLedger(path, budget=Budget(epsilon=0.9, delta=DELTA, method="rdp")).close()
    PrivacyLedger(path, budget=TIGHT).close()  # which implies the first
    size = path.stat().st_size
    with pytest.raises(ConfigError, match=r"has the budget epsilon 0\.5 at delta 1e-05, and epsilon 1 at .* is looser"):
        PrivacyLedger(path, budget=LOOSE)
    assert path.stat().st_size == size
    with PrivacyLedger(path, budget=LOOSE, loosen_budget=True) as ledger:
        assert epsilon({STEP: spend(ledger)}) > 0.5
        assert "Run 3 gave up the budget of epsilon 0.5 at delta 1e-05 (rdp)" in str(ledger.statement())
    with PrivacyLedger(path) as ledger:
        assert (ledger.budget, spend(ledger)) == (LOOSE, 0)
    with PrivacyLedger(path, loosen_budget=True) as ledger:
        assert (ledger.budget, spend(ledger)) == (None, 100)
    assert "Run 5 gave up the budget of epsilon 1 at delta" in str(PrivacyLedger.read(path).statement())


def test_budgets_that_do_not_compare_hold_together(tmp_path):
    path = tmp_path / "privacy.jsonl"
    PrivacyLedger(path, budget=Budget(epsilon=5.0, delta=1e-9, method="rdp")).close()
    with PrivacyLedger(path, budget=TIGHT) as ledger:
        assert ledger.budget == TIGHT
        assert spend(ledger) < 50
    with PrivacyLedger(path, budget=Budget(epsilon=0.6, delta=1e-6, method="rdp")) as ledger:  # at another delta
        assert spend(ledger) == 0


# --- runs ------------------------------------------------------------------------------------------------------------
def counts(ledger):
    return {event.times(1): event.count for event in ledger.events}


def test_equal_events_of_another_run_are_added(tmp_path):
    with PrivacyLedger() as mine, PrivacyLedger(tmp_path / "privacy.jsonl") as file:
        file.record(STEP.times(100))
        mine.record(STEP.times(60))
        for _ in range(2):  # once, however often it is loaded
            file.merge(mine.by_run())
            assert counts(file) == {STEP: 160}
        mine.record(STEP.times(5))
        file.merge(mine.by_run())
        file.record(STEP)
        state = file.by_run()
    found = PrivacyLedger.read(tmp_path / "privacy.jsonl")
    assert counts(found) == {STEP: 166}
    assert "65 releases are of 1 other run(s), taken from checkpoints" in str(found.statement())
    with PrivacyLedger(tmp_path / "privacy.jsonl") as file:
        file.merge(state)
        file.merge(mine.by_run())
        assert counts(file) == {STEP: 166}
    with PrivacyLedger(tmp_path / "other.jsonl") as other:
        other.merge(state)
        assert counts(other) == {STEP: 166}


def test_a_merge_past_the_budget_writes_nothing(tmp_path):
    with PrivacyLedger() as mine, PrivacyLedger(tmp_path / "privacy.jsonl", budget=TIGHT) as file:
        mine.record(PrivacyEvent("discrete_laplace", 100.0))
        mine.record(STEP.times(30))
        size = file.path.stat().st_size
        assert_raises(BudgetExceeded, None, lambda: file.merge(mine.by_run()))
        assert_raises(FormatError, None, file.merge, {"a": [{"mechanism": "gaussian"}]})
        assert (counts(file), file.path.stat().st_size) == ({}, size)


def test_a_checkpoint_without_runs_is_added_in_full():
    with PrivacyLedger() as ledger:
        ledger.record(STEP.times(4))
        with pytest.warns(UserWarning, match="does not say which runs spent its events: all of them are added"):
            ledger.merge([STEP.times(4).to_dict()])
        assert counts(ledger) == {STEP: 8}
        ledger.merge([])


def test_a_file_of_an_older_version_gets_ids_for_its_runs(tmp_path, monkeypatch):
    path = tmp_path / "privacy.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr("accelerant.privacy.dp.ledger.journal.fresh_id", str)  # no id, as before there were any
        for _ in range(2):
            with PrivacyLedger(path) as ledger:
                ledger.record(STEP.times(3))
    assert "Runs of older versions are in the ledger" in str(PrivacyLedger.read(path).statement())
    assert [run.id for run in PrivacyLedger.read(path).runs] != ["", ""]
    with PrivacyLedger(path) as ledger:
        state = ledger.by_run()
    assert sorted(len(events) for events in state.values()) == [1, 1]
    with PrivacyLedger(path) as ledger:
        ledger.merge(state)
        assert counts(ledger) == {STEP: 6}
    assert PrivacyLedger.read(path).by_run() == state
    with PrivacyLedger() as other:
        other.record(STEP.times(6))
        other.merge(state)
        assert counts(other) == {STEP: 12}


def test_a_fork_of_a_run_in_memory_is_a_run_of_its_own():
    with PrivacyLedger() as ledger:
        ledger.record(STEP.times(3))
        read, write = os.pipe()
        if not (child := os.fork()):
            ledger.record(STEP.times(2))
            os.write(write, json.dumps(ledger.by_run()).encode())
            os._exit(0)
        os.waitpid(child, 0)
        ledger.record(STEP.times(2))
        ledger.merge(json.loads(os.read(read, 1 << 16)))
        os.close(read), os.close(write)
        assert counts(ledger) == {STEP: 7}


@pytest.mark.parametrize(("delta", "units", "message"), [
    (0.0, 5, "delta must be in"), ("1e-5", 5, "delta must be in"), (True, 5, "delta must be in"),
    (1e-5, -1, "units must be a whole number"), (1e-5, 1 << 70, "units must be below"),
    (1e-5, "many", "units must be a whole number"), ([1e-5], None, "delta must be in"),
])  # fmt: skip
def test_a_strangers_description_is_refused_by_its_line(tmp_path, delta, units, message):
    path = tmp_path / "privacy.jsonl"
    with PrivacyLedger(path) as ledger:
        ledger._writer._journal.append({"kind": "described", "run": 1, "delta": delta, "units": units})
    for opened in (PrivacyLedger, PrivacyLedger.read):
        assert_raises(FormatError, f"line 3: {message}", opened, path)


@pytest.mark.parametrize("method", ["pld", "rdp"])
@pytest.mark.parametrize("event", [PrivacyEvent("gaussian", 8.0), PrivacyEvent("laplace", 20.0)])
def test_a_budget_is_spent_to_its_last_bit_and_not_beyond(tmp_path, method, event):
    """The exact epsilon of five releases: five fit, one by one or at once, and with the next float below, four."""
    cost = spent([event.times(5)], DELTA, method=method).epsilon
    for limit, fit in ((cost, 5), (math.nextafter(cost, 0.0), 4)):
        for counts in ([1] * fit, [fit]):
            with PrivacyLedger(budget=Budget(epsilon=limit, delta=DELTA, method=method)) as ledger:
                for count in counts:
                    ledger.record(event.times(count))
                assert_raises(BudgetExceeded, None, ledger.record, event)
                assert sum(one.count for one in ledger.events) == fit
                assert ledger.epsilon(method=method) <= limit


def test_names_do_not_pass_for_lines_of_the_statement(tmp_path):
    """A stranger's ledger names its unit, its data and its notes."""
    forged = "patient\nEpsilon: 0.1 at delta 1e-09\x1b[2K"
    with PrivacyLedger(tmp_path / "privacy.jsonl", unit=forged, dataset=forged) as ledger:
        ledger.record(PrivacyEvent("gaussian", 1.0, note=forged, source=forged, secure=True))
        statement = ledger.statement()
    for text in (str(statement), statement.to_markdown()):
        lines = [line for line in text.splitlines() if "Epsilon" in line[:10]]
        assert len(lines) == 1
        assert "4.37718" in lines[0]
        assert "\x1b" not in text


@pytest.mark.parametrize("delta", [5e-324, 1e-300, 1e-17, 0.3, 1 - 2**-53])
@pytest.mark.parametrize(
    "events", [[], [PrivacyEvent("gaussian", 2.0)], [PrivacyEvent("gaussian", 0.02)], [PrivacyEvent("laplace", 1e-5)]]
)
def test_every_delta_and_epsilon_has_a_statement(delta, events):
    """No overflow, and never less epsilon than at a larger delta."""
    ledger = PrivacyLedger()
    for event in events:
        ledger.record(event)
    statement = ledger.statement(delta)
    assert statement.epsilon >= ledger.epsilon(min(1 - 2**-53, 2 * delta)) - 1e-12
    assert str(statement) and json.loads(statement.to_json())["delta"] == delta  # noqa: PT018
