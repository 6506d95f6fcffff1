"""Which implementation an Operation chooses: races, tables, forced and deterministic choices, pairs."""

import gc
import json
import os
import re
import subprocess
import sys
import threading
import time
import warnings
import weakref

import pytest
import torch
from probes import CASE, CPU, failing, operation, ran

from accelerant import ops
from accelerant.config import override
from accelerant.errors import CompileError, ConfigError, FallbackWarning, OutOfMemory, UnsupportedCase
from accelerant.runtime.dispatch import Case, Implementation, explain_quietly, force, race, saved_by
from accelerant.runtime.dispatch import operation as dispatch
from clock import Clock

CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    for module in (dispatch, race):
        monkeypatch.setattr(module, "time", CLOCK)


@pytest.fixture
def racing(book, tmp_path):
    with override(race="first_use", cache_dir=tmp_path):
        yield tmp_path


class Runs:
    """Counts calls, and takes its time."""

    def __init__(self, name, seconds=0.0):
        self.name, self.seconds, self.calls = name, seconds, 0

    def __call__(self, *_):
        self.calls += 1
        CLOCK.sleep(self.seconds)
        return self.name


def contest(own=4e-3, other=1e-4, **more):
    own, other = Runs("own", own), Runs("torch", other)
    first, second = Implementation("own", own, own=True, **more), Implementation("torch", other)
    return operation(first, second), own, other


def ship(monkeypatch, folder, model, entries):
    """Serve a model by a table of the device "Card", in a store within the folder."""
    (folder / "tables").mkdir()
    body = {"format": 1, "device": "Card", "serves": [model], "entries": entries}
    (folder / "tables" / "card.json").write_text(json.dumps(body))
    store = race.Choices(folder / "choices", folder / "tables")
    monkeypatch.setitem(race._stores, folder / "choices", store)


def decided(op, case=CASE, *args):
    (decision,) = explain_quietly(op, case, *args).decisions
    return decision


def test_without_the_setting_the_order_of_preference_holds(book, tmp_path):
    op, own, other = contest()
    with override(cache_dir=tmp_path):
        decision = decided(op)
    assert (decision.implementation, decision.reason, decision.raced) == ("own", "order of preference", ())
    assert (own.calls, other.calls) == (1, 0)
    assert not list(tmp_path.iterdir())


def test_the_fastest_is_chosen_once_a_bucket_and_the_reason_is_printed(racing, book):
    op, own, _ = contest()
    decision = decided(op)
    assert decision.implementation == "torch"
    assert dict(decision.raced).keys() == {"own", "torch"}
    assert re.fullmatch(
        r"raced \d+\.\d{4} ms against own \d+\.\d{4} ms \(\d{4}-\d\d-\d\d, this device\)", decision.reason
    ), decision.reason
    assert f"  chosen   torch (library): {decision.reason}" in str(decision)
    assert "not tried" not in str(decision)
    raced = own.calls
    assert op(CASE) == op(Case(CPU, torch.float32, (3, 7))) == "torch"
    assert own.calls == raced
    (row, other_row) = book.to_dict()["ops"]
    assert row["reason"] == decision.reason
    assert other_row["reason"].endswith(f" ms at 4x8 float32 ({time.strftime('%Y-%m-%d')}, this device)")
    op(Case(CPU, torch.float32, (3, 9)))
    op(Case(CPU, torch.float64, (4, 8)))
    op(Case(CPU, torch.float32, (4, 8), ("tanh",)))
    assert own.calls > raced
    assert sum(row["calls"] for row in book.to_dict()["ops"]) == 6  # a race's calls are no calls


def test_a_result_holds_for_other_settings_and_processes(racing, book):
    op, *_ = contest()
    with override(race="off"):
        assert op(CASE) == "own"
        op(CASE)
    assert op(CASE) == "torch"
    with override(race="off"):
        assert op(CASE) == "torch"
    race._stores.clear()
    later, own, other = contest()
    with override(race="off"):
        assert later(CASE) == "torch"
    assert (own.calls, other.calls) == (0, 1)


def test_a_shipped_table_serves_until_there_is_a_local_result(racing, book, monkeypatch):
    key = race.key_of("probe", torch.float32, (4, 8))
    ms = {"own": 2.0, "torch": 1.0, "gone": 0.1}
    ship(monkeypatch, racing, race.model_of(CPU), {key: {"ms": ms, "case": "4x8 float32"}})
    op, own, _ = contest(own=1e-4, other=4e-3)
    with override(race="off"):
        decision = decided(op)
        assert decision.implementation == "torch"
        assert decision.reason == "shipped table for Card, raced 1.0000 ms against own 2.0000 ms"
        assert own.calls == 0
    assert decided(op).implementation == "own"
    with override(race="off"):
        assert decided(op).implementation == "own"


@pytest.fixture
def untabled(book, tmp_path, monkeypatch):
    """A device whose model no table serves, next to one with a table, under the default settings."""
    entries = {
        race.key_of("probe", torch.float32, (rows, 8, "none")): {"ms": ms, "case": f"{rows}x8 float32"}
        for rows, ms in {64: {"own": 1.0, "torch": 2.0}, 8192: {"own": 2.0, "torch": 1.0}}.items()
    }
    ship(monkeypatch, tmp_path, "Card", entries)
    monkeypatch.setattr(dispatch, "_TABLED", frozenset({"cpu"}))
    monkeypatch.setattr(dispatch, "_race_s", 0.0)
    with override(cache_dir=tmp_path):
        yield tmp_path / "choices"


def test_without_a_table_the_first_use_is_raced_for_a_limited_time(untabled, monkeypatch):
    op, own, _ = contest()
    assert decided(op).reason.startswith("raced")
    (path,) = untabled.glob("*.json")
    assert "probe float32 4 8" in path.read_text()
    assert dispatch._race_s > 4e-3
    monkeypatch.setattr(dispatch, "_race_s", dispatch.RACES_S)
    calls = own.calls
    assert decided(op).reason.startswith("raced")  # as kept
    decision = decided(op, Case(CPU, torch.float32, (16, 8)))
    assert (decision.implementation, decision.reason) == ("torch", "no table serves this GPU: libraries first")
    assert own.calls == calls


def test_a_race_by_default_ends_after_its_time(untabled, monkeypatch):
    monkeypatch.setattr(dispatch, "RACE_S", 0.0)
    op, own, other = contest()
    assert op(CASE) == "torch"
    assert (own.calls, other.calls) == (3, 4)  # no turn; torch ran the call


@pytest.mark.parametrize(("rows", "implementation"), [(1, "own"), (100, "own"), (4096, "torch")])
def test_without_a_race_an_own_kernel_is_first_where_it_won_on_the_nearest_model(untabled, rows, implementation):
    op, *_ = contest()
    with override(race="off"):
        decision = decided(op, Case(CPU, torch.float32, (rows, 8), ("none",)))
        assert decision.implementation == implementation
        if implementation == "own":
            assert decision.reason == "no table serves this GPU; the fastest on Card (64x8 float32)"
        for case in (Case(CPU, torch.float64, (rows, 8), ("none",)), Case(CPU, torch.float32, (rows, 8), ("tanh",))):
            assert op(case) == "torch"


@pytest.mark.gpu
def test_a_gpu_without_a_table_races_by_default(tmp_path, monkeypatch):
    store = race.Choices(tmp_path / "choices", tmp_path / "tables")
    monkeypatch.setitem(race._stores, tmp_path / "choices", store)
    monkeypatch.setattr(dispatch, "_race_s", 0.0)
    x = torch.randn(1 << 20, device="cuda", dtype=torch.bfloat16)
    with override(cache_dir=tmp_path):
        (decision,) = explain_quietly(ops.gelu, x).decisions
        assert dict(decision.raced).keys() == {"triton", "torch"}
        (decision,) = explain_quietly(ops.gelu, x).decisions
        assert decision.reason.endswith("this device)")
    assert 0 < dispatch._race_s < dispatch.RACES_S


def test_who_wins_may_refuse_a_case_of_the_bucket(racing, book):
    fast = Implementation("fast", Runs("fast"), refuses=lambda case: None if case.shape[0] == 4 else "4 rows only")
    op = operation(fast, Implementation("slow", Runs("slow", 4e-2)), Implementation("mid", Runs("mid", 4e-3)))
    assert op(CASE) == "fast"
    decision = decided(op, Case(CPU, torch.float32, (3, 8)))
    assert decision.implementation == "mid"
    assert decision.refused == (("fast", "4 rows only"),)


def test_an_op_may_say_what_a_race_stands_for(racing, book):
    own, other = Runs("own"), Runs("torch", 4e-3)
    op = operation(
        Implementation("own", own),
        Implementation("torch", other),
        bucket=lambda case: (*race.rounded(case.shape[:1]), case.shape[1]),
    )
    op(Case(CPU, torch.float32, (4, 80), ("a",)))
    raced = other.calls
    op(Case(CPU, torch.float32, (3, 80), ("b",)))
    assert other.calls == raced
    op(Case(CPU, torch.float32, (3, 81)))
    assert other.calls > raced


def test_who_fails_in_a_race_is_out_and_a_preferred_one_counts_as_a_fallback(racing, book):
    op = operation(
        Implementation("fast", failing(CompileError("no such instruction", "log"))),
        Implementation("plain", Runs("plain")),
        Implementation("odd", failing(ZeroDivisionError("by zero"))),
    )
    with pytest.warns(FallbackWarning, match="fast failed, plain ran instead. CompileError: no such instruction"):
        decision = decided(op)
    assert decision.refused == (
        ("fast", "CompileError: no such instruction | log"),
        ("odd", "ZeroDivisionError: by zero"),
    )
    assert ran(book) == {("probe", "plain"): 1}
    op.forget()
    race._stores.clear()  # another process knows from the file
    with override(race="off"):
        decision = decided(op)
    assert decision.implementation == "plain"
    assert re.match(r"failed in the race of \d{4}-\d\d-\d\d: CompileError", dict(decision.refused)["fast"])


def test_where_all_fail_in_a_race_the_call_says_so(racing, book):
    fails = failing(ZeroDivisionError("by zero"))
    op = operation(Implementation("a", fails), Implementation("b", failing(KeyError("b"))))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            op(CASE)


def test_a_race_with_too_little_memory_is_not_kept(racing, book):
    outcomes = [OutOfMemory("8 bytes")]

    def sometimes():
        if outcomes:
            raise outcomes.pop()

    op = operation(Implementation("fast", sometimes), Implementation("plain", Runs("plain", 4e-3)))
    assert op(CASE) == "plain"
    assert not (racing / "choices").exists()
    assert op(CASE) is None
    assert decided(op).implementation == "fast"


def test_what_mutates_is_never_raced(racing, book):
    op, own, other = contest(mutates=True)
    assert decided(op).reason == "order of preference"
    assert (own.calls, other.calls) == (1, 0)


def test_what_cannot_be_raced_now_is_raced_later(racing, book):
    op, *_ = contest()
    assert op(CASE, torch.ones(2, device="meta")) == "own"
    assert op(CASE, torch.ones(2)) == "torch"


def test_a_race_leaves_no_tensor(racing, book):
    op = operation(Implementation("a", lambda x: x + 1), Implementation("b", lambda x: x * 2))
    x = torch.ones(3)
    gone = weakref.ref(x)
    op(CASE, x)
    del x
    gc.collect()
    assert gone() is None


def test_forcing(book):
    op, *_ = contest()
    assert op(CASE) == "own"
    with force(probe="torch"):
        decision = decided(op)
        assert (decision.implementation, decision.reason) == ("torch", "forced")
        assert decision.not_tried == ("own",)
        with force(probe="own"):
            assert op(CASE) == "own"
        with force(gelu_fwd="torch"):
            assert op(CASE) == "torch"
    assert op(CASE) == "own"
    with override(implementation="probe = torch"):
        assert op(CASE) == "torch"


def test_a_forced_choice_that_cannot_be_is_an_error_with_the_reason(book):
    op = operation(
        Implementation("fast", print, refuses=lambda case: "rows of 8 are too short"),
        Implementation("broken", failing(CompileError("no"))),
        Implementation("plain", lambda: "plain"),
    )
    with pytest.raises(ConfigError, match=r"there is no op 'prob' .*probe"), force(prob="fast"):
        pass
    known = "probe has the implementations fast, broken, plain; got 'triton'"
    with pytest.raises(ConfigError, match=known), force(probe="triton"):
        pass
    with override(implementation={"probe": "triton"}), pytest.raises(ConfigError, match="got 'triton'"):
        op(CASE)
    refusal = "forced to 'fast', which refuses 4x8 float32 on cpu: rows of 8 are too short"
    with force(probe="fast"), pytest.raises(UnsupportedCase, match=refusal):
        op(CASE)
    with force(probe="broken"), pytest.raises(CompileError):
        op(CASE)
    assert not book.to_dict()["fallbacks"]
    with pytest.warns(FallbackWarning):
        assert op(CASE) == "plain"
    with force(probe="plain"), warnings.catch_warnings(), override(fallback="forbid"):
        warnings.simplefilter("error")
        assert op(CASE) == "plain"
    with force(probe="broken"), pytest.raises(UnsupportedCase, match=r"which refuses .*CompileError: no"):
        op(CASE)


def test_forcing_comes_before_a_race(racing, book):
    op, own, other = contest()
    with force(probe="own"):
        assert op(CASE) == "own"
    assert (own.calls, other.calls) == (1, 0)


def test_where_determinism_is_asked_for_atomics_are_refused(book):
    op, *_ = contest(deterministic=False)
    assert op(CASE) == "own"
    with override(deterministic=True):
        decision = decided(op)
        assert decision.implementation == "torch"
        assert decision.refused == (("own", "not deterministic"),)
        assert [each.name for each in op.candidates(CASE)] == ["torch"]
        with force(probe="own"), pytest.raises(UnsupportedCase, match="not deterministic"):
            op(CASE)
    assert op(CASE) == "own"
    assert [each.name for each in op.candidates(CASE)] == ["own", "torch"]


def test_torch_may_ask_for_determinism(book):
    op, *_ = contest(deterministic=False)
    assert op(CASE) == "own"
    torch.use_deterministic_algorithms(True)
    try:
        assert op(CASE) == "torch"
    finally:
        torch.use_deterministic_algorithms(False)
    assert op(CASE) == "own"


def test_determinism_starts_no_race(racing, book):
    op, _, other = contest()
    with override(deterministic=True):
        assert op(CASE) == "own"
    assert other.calls == 0


def test_what_one_thread_forces_is_not_forced_on_another(book):
    op, *_ = contest(own=0.0, other=0.0)
    seen = []
    with force(probe="torch"):
        thread = threading.Thread(target=lambda: seen.append(op(CASE)))
        thread.start()
        thread.join()
        assert op(CASE) == "torch"
    assert seen == ["own"]


def test_a_backward_pass_follows_the_forward_pass_that_saved_for_it(book):
    forward = operation(Implementation("cudnn", lambda: 1, group="cudnn"), name="pair_fwd")
    backward = operation(
        Implementation("triton", lambda: "triton"),
        Implementation("cudnn", lambda: "cudnn", group="cudnn"),
        name="pair_bwd",
        pairs_with="pair_fwd",
    )
    assert decided(forward).reason == "the only one that serves this case; its backward will be cudnn's"
    case = CASE._replace(options=(saved_by("cudnn"),))
    decision = decided(backward, case)
    assert decision.implementation == "cudnn"
    assert decision.case == "4x8 float32 saved by cudnn"
    assert decision.reason == "the only one that serves this case; its forward was cudnn's"
    refusal = "pair_fwd saved its tensors in the form of cudnn, which this one does not read"
    assert decision.refused == (("triton", refusal),)
    own = decided(backward, CASE._replace(options=(saved_by(""),)))
    assert (own.implementation, own.case) == ("triton", "4x8 float32")
    refusal = r"'cudnn', which refuses .* pair_fwd saved its tensors in its own form"
    with force(pair_bwd="cudnn"), pytest.raises(UnsupportedCase, match=refusal):
        backward(CASE)


def test_unknown_ops_in_the_settings_are_named(tmp_path):
    """At the first choice of any op."""
    x = torch.ones(3, 5)
    for wrong, message in (("gelu_fdw=torch", r"'gelu_fdw' \(did you mean 'gelu_"), ("gelu_fwd=tritn", "got 'tritn'")):
        with override(implementation=wrong), pytest.raises(ConfigError, match=message):
            ops.relu(x)
    with override(implementation="adamw_step=torch, clip_sum=torch"):  # of modules that are imported on first use
        ops.relu(x)


@pytest.mark.slow
def test_unknown_ops_in_the_environment_are_named_before_their_module_is_imported():
    program = "import torch, accelerant; accelerant.ops.relu(torch.ones(7))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["ACCELERANT_IMPLEMENTATION"] = "adamw_sep=torch"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert "there is no op 'adamw_sep' (did you mean 'adamw_step'?)" in done.stderr
