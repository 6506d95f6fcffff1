import gc
import json
import re
import threading
import warnings
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from probes import CASE, CPU, failing, operation, ran

from accelerant import ops
from accelerant.config import override
from accelerant.errors import (
    AccelerantError,
    CompileError,
    ConfigError,
    DeviceLost,
    FallbackWarning,
    LaunchError,
    OutOfMemory,
    UnsupportedCase,
)
from accelerant.runtime import ledger as ledger_module
from accelerant.runtime import registry
from accelerant.runtime.dispatch import Case, Implementation, explain, explain_quietly, force
from accelerant.runtime.dispatch import operation as dispatch
from accelerant.runtime.dispatch.plan import observers
from accelerant.runtime.provider import Launches, noted, watched
from processes import in_threads
from refusals import assert_raises


def test_the_first_that_does_not_refuse_runs(book):
    op = operation(
        Implementation("fast", lambda x: "fast", refuses=lambda case: "rows of 8 are too short", own=True),
        Implementation("plain", lambda x: "plain"),
        Implementation("slow", lambda x: "slow"),
    )
    assert [op(CASE, 1) for _ in range(3)] == ["plain"] * 3
    (row,) = book.to_dict()["ops"]
    assert (row["implementation"], row["calls"], row["bytes"], row["flops"], row["own"]) == ("plain", 3, 300, 21, False)
    assert row["refused"] == [{"implementation": "fast", "reason": "rows of 8 are too short"}]


def test_no_implementation_is_an_error_with_every_reason(book):
    op = operation(
        Implementation("a", print, lambda case: "too odd"), Implementation("b", print, lambda case: "too even")
    )
    assert_raises(UnsupportedCase, r"4x8 float32 on cpu \(a: too odd; b: too even\)", op, CASE)


def test_a_bound_call_is_counted_and_obeys_what_changes(book):
    def bind(x):
        return lambda x: f"bound, {x}"

    op = operation(Implementation("fast", lambda x: "plain", own=True, bind=bind), Implementation("slow", lambda x: 0))
    call = op.bound(CASE)
    assert [call(number) for number in range(6)] == ["plain"] * 4 + ["bound, 4", "bound, 5"]  # four are timed
    assert ran(book) == {("probe", "fast"): 6}
    with force(probe="slow"):
        assert call(6) == 0
    explained = explain_quietly(call, 7)
    assert explained.result == "plain"
    assert [decision.implementation for decision in explained.decisions] == ["fast"]
    op.forget()
    assert [call(8), call(9)] == ["plain", "bound, 9"]
    assert ran(book) == {("probe", "fast"): 9, ("probe", "slow"): 1}


def test_what_is_explained_must_be_a_function():
    assert_raises(ConfigError, r"takes a function, as accelerant\.ops\.gelu, .* got 'gelu'", explain_quietly, "gelu", 7)


def test_a_bound_call_that_fails_falls_back(book):
    def bind(x):
        return failing(LaunchError("too many resources"))

    op = operation(
        Implementation("fast", lambda x: "fast", own=True, bind=bind), Implementation("plain", lambda x: "plain")
    )
    call = op.bound(CASE)
    assert [call(number) for number in range(4)] == ["fast"] * 4
    with pytest.warns(FallbackWarning, match="fast failed, plain ran instead"):
        assert call(4) == "plain"
    assert [call(number) for number in range(6)] == ["plain"] * 6


def test_a_failure_falls_back_from_the_inputs_warns_once_and_stays(book):
    calls = []

    def breaks(x):
        calls.append("breaks")
        raise CompileError("no such instruction", "log")

    op = operation(Implementation("fast", breaks, own=True), Implementation("plain", lambda x: x + 1))
    with pytest.warns(FallbackWarning, match=r"fast failed, plain ran instead. CompileError: no such instruction"):
        assert op(CASE, 1) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert op(CASE, 5) == 6
    assert calls == ["breaks"]
    (entry,) = book.to_dict()["fallbacks"]
    assert (entry["wanted"], entry["ran"], entry["count"]) == ("fast", "plain", 2)
    assert ran(book) == {("probe", "fast"): 1, ("probe", "plain"): 2}


def test_memory_that_runs_out_is_tried_again_at_the_next_call(book):
    outcomes = iter([OutOfMemory("8 bytes"), None])

    def sometimes():
        error = next(outcomes)
        if error:
            raise error
        return "fast"

    op = operation(Implementation("fast", sometimes), Implementation("small", lambda: "small"))
    with pytest.warns(FallbackWarning):
        assert op(CASE) == "small"
    assert op(CASE) == "fast"


def test_policies(book):
    def fresh():
        return operation(
            Implementation("fast", failing(OutOfMemory("8 bytes"))), Implementation("plain", lambda: "plain")
        )

    op = fresh()
    with override(fallback="warn"):
        for _ in range(2):
            with pytest.warns(FallbackWarning):
                op(CASE)
    with override(fallback="forbid"), pytest.raises(OutOfMemory, match="8 bytes"):
        op(CASE)
    with override(fallback="allow"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert op(CASE) == "plain"  # announced above already
    (entry,) = book.to_dict()["fallbacks"]
    assert entry["count"] == 3


@pytest.mark.parametrize("error", [CompileError("no such instruction", "log"), LaunchError("too many threads")])
def test_policies_hold_for_what_is_broken_already(book, error):
    calls = []

    def breaks():
        calls.append("breaks")
        raise error

    op = operation(Implementation("fast", breaks), Implementation("plain", lambda: "plain"))

    def count():
        (entry,) = book.to_dict()["fallbacks"]
        return entry["count"]

    with override(fallback="warn"):
        for i in range(5):
            with pytest.warns(FallbackWarning, match="fast failed, plain ran instead") as caught:
                assert op(CASE) == "plain"
            assert len(caught) == 1
            assert caught[0].filename == __file__
            assert count() == i + 1
    with override(fallback="forbid"):
        raised = []
        for _ in range(2):
            with pytest.raises(type(error), match=str(error).splitlines()[0]) as caught:
                op(CASE)
            raised.append(caught.value)
        assert getattr(raised[0], "log", "") == getattr(error, "log", "")
        assert raised[0] is not raised[1]  # or its traceback would grow with each call
    with override(fallback="allow"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert op(CASE) == "plain"
    assert count() == 6
    assert calls == ["breaks"]
    assert ran(book)["probe", "plain"] == 6


def test_every_implementation_that_is_left_is_tried_in_turn(book):
    """Whatever fails first; explain shows what ran; only what did not lack memory is left out afterwards."""
    calls = []

    def failing_as(name, error):
        def run(x):
            calls.append(name)
            raise error

        return run

    op = operation(
        Implementation("fast", failing_as("fast", OutOfMemory("8 bytes"))),
        Implementation("mid", failing_as("mid", CompileError("no"))),
        Implementation("odd", print, refuses=lambda case: "too even"),
        Implementation("small", lambda x: x + 1),
    )
    with pytest.warns(FallbackWarning) as caught:
        explanation = explain_quietly(op, CASE, 1)
    assert explanation.result == 2
    (decision,) = explanation.decisions
    assert decision.implementation == "small"
    assert [name for name, _ in decision.refused] == ["fast", "mid"]
    assert len(caught) == 2
    assert {(row["wanted"], row["ran"]) for row in book.to_dict()["fallbacks"]} == {("fast", "small"), ("mid", "small")}
    assert op(CASE, 5) == 6
    assert calls == ["fast", "mid", "fast"]


def test_where_everything_fails_the_last_error_is_raised_and_nothing_fell_back(book):
    op = operation(
        Implementation("fast", failing(OutOfMemory("8 bytes"))), Implementation("slow", failing(LaunchError("refused")))
    )
    assert_raises(LaunchError, "refused", op, CASE)
    assert not book.to_dict()["fallbacks"]


def test_a_fallback_does_not_hold_the_memory_of_what_failed(book):
    class Block:
        pass

    held = []

    def greedy():
        block = Block()
        held.append(weakref.ref(block))
        raise OutOfMemory("8 bytes")

    op = operation(Implementation("fast", greedy), Implementation("small", lambda: held[-1]()))
    with pytest.warns(FallbackWarning):
        assert op(CASE) is None


def test_what_is_broken_is_kept_for_few_cases_and_holds_no_tensor(book, monkeypatch):
    monkeypatch.setattr(dispatch, "PLANS_LIMIT", 8)

    def breaks(x):
        raise CompileError("no")

    op = operation(Implementation("fast", breaks), Implementation("plain", lambda x: None))
    x = torch.ones(3)
    gone = weakref.ref(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in range(30):
            op(Case(CPU, torch.float32, (rows,)), x)
    assert 0 < len(op._broken) <= 8
    del x
    gc.collect()
    assert gone() is None


def test_the_last_failure_and_unknown_errors_pass_through(book):
    assert_raises(CompileError, None, lambda: operation(Implementation("only", failing(CompileError("no"))))(CASE))
    with pytest.raises(ZeroDivisionError):
        operation(Implementation("a", failing(ZeroDivisionError())), Implementation("b", lambda: 1))(CASE)
    failures = {row["implementation"]: row["failures"] for row in book.to_dict()["ops"]}
    assert failures["only"] == 1


class MarksFail:
    """A provider whose events fail from a given one on."""

    name = "cpu"

    def __init__(self, error, good):
        self.error, self.left = error, good

    def record_event(self, index):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return SimpleNamespace(done=lambda: False)

    def lost(self, error):
        return None


ERRORS = [
    DeviceLost("gone"), ValueError("odd"), MemoryError("1 GiB"), KeyboardInterrupt(), SystemExit(1), LaunchError("no"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
]  # fmt: skip


@pytest.mark.sample(5, 3)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["call", "last of two", "mutating", "mark before", "mark after", "race", "recorded"])
def test_every_failure_is_counted_once(book, monkeypatch, error, where):
    for module in (dispatch, ledger_module):
        monkeypatch.setattr(module, "_ledger", book)
    op = operation(Implementation("a", failing(error), mutates=where == "mutating"))
    run = partial(op, CASE)
    if where.startswith("mark"):
        provider = MarksFail(error, good=where == "mark after")
        monkeypatch.setattr(registry, "provider_of", lambda device: provider)
        op = operation(Implementation("a", lambda: 1))
        run = partial(op, CASE)
    elif where == "race":
        monkeypatch.setattr(dispatch, "race", failing(error))
        op = operation(Implementation("a", lambda x: 1), Implementation("b", lambda x: 1))
        run = partial(op, CASE, torch.zeros(4, 8))
    elif where == "last of two":
        op = operation(Implementation("b", failing(CompileError("no"))), Implementation("a", failing(error)))
        run = partial(op, CASE)
    elif where == "recorded":
        record = ledger_module.sole_record("probe", "a", "cpu", "cpu", "-", size_bytes=0)

        def run():
            with ledger_module.RecordedLaunch(record, MarksFail(error, good=1), 0):
                raise error

    with (
        override(race="first_use" if where == "race" else "off"),
        pytest.raises((type(error), OutOfMemory, AccelerantError)) as caught,
    ):
        run()
    counts = {row["implementation"]: (row["calls"], row["failures"]) for row in book.to_dict()["ops"]}
    assert counts["a"] == (1, 1)
    if isinstance(error, (MemoryError, RuntimeError)) and where in ("call", "last of two", "mutating", "recorded"):
        assert isinstance(caught.value, OutOfMemory)


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("call", [
    lambda x: ops.relu(x), lambda x: ops.gelu(x), lambda x: ops.add(x, x), lambda x: ops.softmax(x),
    lambda x: ops.log_softmax(x), lambda x: ops.relu(x.requires_grad_()), lambda x: ops.layer_norm(x, x[0], x[0]),
    lambda x: ops.swiglu(x, x), lambda x: ops.matmul(x, x.T), lambda x: ops.quantize_int8(x),
    lambda x: ops.dropout(x, 0.5), lambda x: ops.cross_entropy(x, torch.zeros(1, dtype=torch.int64).expand(len(x))),
    lambda x: ops.linear_gelu(x, x), lambda x: ops.attention(x[None, None], x[None, None], x[None, None]),
])  # fmt: skip
def test_host_memory_that_runs_out_is_out_of_memory(call):
    """A tensor of one number that claims 2^44 of them: its result takes more than any machine has."""
    x = torch.zeros(1).expand(1 << 22, 1 << 22)
    gc.collect()
    gc.freeze()  # each error lists the largest tensors among all objects of the process that are not frozen
    for _ in range(6):  # calls after the fourth are left to torch at once
        assert_raises(OutOfMemory, None, call, x)


def test_calls_from_threads_are_all_counted(book):
    op = operation(Implementation("plain", lambda: None))

    def work():
        for _ in range(500):
            op(CASE)

    in_threads([work] * 4)
    assert ran(book) == {("probe", "plain"): 2000}


def test_times_are_sampled(book):
    op = operation(Implementation("plain", lambda: torch.ones(1000).sum()))
    for _ in range(130):
        op(CASE)
    (row,) = book.to_dict()["ops"]
    assert row["timed"] == 5  # calls 2, 3, 4, 64, 128
    assert row["ms_first"] > 0
    assert 0 < row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"] < 1000


def test_cases_without_end_share_a_record(book):
    op = operation(Implementation("plain", lambda: None))
    for rows in range(600):
        op(Case(CPU, torch.float32, (rows,)))
    rows = book.to_dict()["ops"]
    assert len(rows) <= 514
    assert sum(row["calls"] for row in rows) == 600
    assert any(row["case"] == "other" and row["calls"] > 50 for row in rows)


def test_ledger_views(book):
    op = operation(Implementation('qu"ote', lambda: None), name="views")
    op(CASE)
    assert json.loads(book.to_json())["ops"][0]["op"] == "views"
    text = book.to_prometheus()
    assert r'implementation="qu\"ote"' in text
    for line in text.splitlines():
        assert re.fullmatch(
            r'# (HELP|TYPE) .+|[a-z_]+\{[a-z_]+="(?:[^"\\\n]|\\.)*"(?:,[a-z_]+="(?:[^"\\\n]|\\.)*")*\} \S+', line
        ), line
    assert "views" in str(book)
    book.reset()
    assert book.to_dict() == {"ops": [], "fallbacks": [], "graphs": [], "phases": []}


def test_explain_names_what_ran_and_what_refused(book, capsys):
    op = operation(
        Implementation("fast", lambda: 1, refuses=lambda case: "not here", own=True),
        Implementation("plain", lambda: 2),
        Implementation("slow", lambda: 3),
        name="explained",
    )
    explanation = explain(lambda: op(CASE))
    printed = capsys.readouterr().out
    assert explanation.result == 2
    assert repr(explanation).startswith("Explanation(1 decisions")  # it has been printed
    assert explanation._repr_html_() is None
    again = explain_quietly(lambda: op(CASE))
    assert repr(again) == str(again)
    assert '<td class="">fast: not here</td>' in again._repr_html_()
    assert "explained  4x8 float32  on cpu" in printed
    assert "refused  fast: not here" in printed
    assert "chosen   plain (library)" in printed
    assert "not tried  slow" in printed
    op(CASE)
    assert len(explanation.decisions) == 1  # nothing is seen after the call


# --- implementations that change their arguments ---------------------------------------------------------------------
class Step:
    """Adds 1 to x by a kernel of its own, where it gets that far."""

    def __init__(self, error, *, launched):
        self.error, self.launched, self.calls = error, launched, 0

    def __call__(self, x):
        self.calls += 1
        if self.launched:
            x += 1
            noted()
        if self.error is not None:
            raise self.error
        return x


def add_ten(x):
    x += 10
    return x


def changing(*runs):
    return operation(*(Implementation(name, run, own=own, mutates=True) for name, run, own in runs))


def test_what_failed_before_a_launch_is_followed_by_another_from_the_same(book):
    op = changing(("fast", Step(CompileError("odd", "log"), launched=False), True), ("plain", add_ten, False))
    x = torch.zeros(2)
    with pytest.warns(FallbackWarning, match="fast failed, plain ran instead"):
        op(CASE, x)
    assert x.tolist() == [10, 10]


@pytest.mark.parametrize("error", [CompileError("odd", "log"), LaunchError("refused"), UnsupportedCase("odd")])
def test_what_failed_after_a_launch_is_followed_by_none(book, error):
    step = Step(error, launched=True)
    op = changing(("fast", step, True), ("plain", add_ten, False))
    x = torch.zeros(2)
    caught = assert_raises(AccelerantError, "fast may have changed its arguments before it failed", op, CASE, x)
    assert type(caught) is AccelerantError  # none that an op around this one would fall back after
    assert caught.__cause__ is error
    assert x.tolist() == [1, 1]
    assert ran(book) == {("probe", "fast"): 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        op(CASE, x)  # its arguments are whole again, as far as anyone knows: the broken one stays out
    assert (step.calls, x.tolist()) == (1, [11, 11])


def test_memory_that_runs_out_after_a_launch_is_followed_by_none(book):
    op = changing(("fast", Step(OutOfMemory("8 bytes"), launched=True), True), ("plain", add_ten, False))
    x = torch.zeros(2)
    caught = assert_raises(OutOfMemory, "8 bytes", op, CASE, x)
    assert "may have changed its arguments" in caught.__notes__[0]
    assert x.tolist() == [1, 1]


def test_a_library_that_changes_its_arguments_is_never_followed(book):
    op = changing(("library", Step(LaunchError("refused"), launched=False), False), ("plain", add_ten, True))
    x = torch.zeros(2)
    assert_raises(AccelerantError, "library may have changed", op, CASE, x)
    assert x.tolist() == [0, 0]


def test_the_one_that_follows_is_watched_as_well(book):
    first, second = Step(CompileError("odd", "log"), launched=False), Step(LaunchError("refused"), launched=True)
    op = changing(("fast", first, True), ("middle", second, True), ("plain", add_ten, False))
    x = torch.zeros(2)
    assert_raises(AccelerantError, "middle may have changed", op, CASE, x)
    assert x.tolist() == [1, 1]


def test_launches_are_counted_for_the_thread_that_makes_them():
    with Launches() as outer:
        thread = threading.Thread(target=noted)
        thread.start()
        thread.join()
        assert not outer
        with Launches() as inner:
            noted()
        assert (outer.count, inner.count) == (1, 1)
    assert not watched
    noted()
    assert outer.count == 1


# --- torch's own autograd --------------------------------------------------------------------------------------------
BY_TORCH = Implementation("torch", lambda x: x * 2, differentiable=True)


def test_a_call_is_left_to_torch_where_torch_alone_serves_it(book):
    op = operation(Implementation("fast", lambda x: x, refuses=lambda case: "not here", own=True), BY_TORCH)
    seen = []
    observers.append(seen.append)
    try:
        assert op.torch_autograd_plan(CASE) is not None
        assert op(CASE, torch.ones(4, 8, requires_grad=True)).requires_grad
    finally:
        observers.remove(seen.append)
    (row,) = book.to_dict()["ops"]
    assert (row["calls"], row["failures"]) == (1, 0)
    assert row["reason"] == "the only one that serves this case; torch on the CPU: its own autograd where that serves"
    assert [(each.implementation, each.refused) for each in seen] == [("torch", (("fast", "not here"),))]


@pytest.mark.parametrize(("case", "others"), [
    (CASE, [Implementation("fast", lambda x: x, own=True)]),
    (CASE, [Implementation("slow", lambda x: x)]),
    (Case(torch.device("meta"), torch.float32, (4, 8)), []),
], ids=["another is preferred", "another serves", "no CPU"])  # fmt: skip
def test_a_call_is_not_left_to_torch(case, others, book):
    op = operation(*others, BY_TORCH)
    assert op.torch_autograd_plan(case) is None
    assert not book.to_dict()["ops"]


def test_a_call_is_not_left_to_torch_while_anything_is_forced(book):
    op = operation(BY_TORCH, name="autograd_probe")
    with force(autograd_probe="torch"):
        assert op.torch_autograd_plan(CASE) is None
    assert op.torch_autograd_plan(CASE) is not None


def test_what_torch_raises_is_counted(book):
    op = operation(Implementation("torch", failing(RuntimeError("torch says no")), differentiable=True))
    assert_raises(RuntimeError, "torch says no", op, CASE, 1)
    (row,) = book.to_dict()["ops"]
    assert (row["calls"], row["failures"]) == (1, 1)


def test_a_case_is_printed_with_its_shapes_and_options():
    options = (torch.int64, torch.Size([8, 64]), (2,), "", "tanh", (True, False), None)
    case = Case(torch.device("cpu"), torch.float32, (256, 128), options)
    assert str(case) == "256x128 float32 int64 8x64 2 tanh (True, False) None"
    assert str(Case(torch.device("cpu"), torch.float16, ())) == "scalar float16"
