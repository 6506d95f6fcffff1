import gc
import json
import re
import threading

import numpy as np
import pytest
import torch
from probes import CPU, operation

from accelerant.errors import LaunchError
from accelerant.runtime import html_page, ledger
from accelerant.runtime.dispatch import Case, Implementation
from accelerant.runtime.html_page import text_table
from accelerant.runtime.ledger import FallbackRecord, merged, quantile
from accelerant.runtime.providers import cpu as cpu_provider
from accelerant.runtime.streams.graphs import Graph, ahead_of_capture, counting
from clock import Clock
from refusals import assert_raises


@pytest.fixture
def op():
    return operation(Implementation("torch", lambda *args: None), name="graph_probe")


def case(rows):
    return Case(CPU, torch.float32, (rows,))


def calls(book):
    return {row["case"]: row["calls"] for row in book.to_dict()["ops"]}


def captured(book, op, *rows):
    with counting(lambda device: True) as counts:
        for each in rows:
            op(case(each))
    return book.captured("step", counts)


def test_a_captured_call_counts_when_it_is_replayed(book, op):
    op(case(4))
    manifest = captured(book, op, 4, 4, 8)
    assert calls(book) == {"4 float32": 1}
    manifest.replays += 10
    assert calls(book) == {"4 float32": 21, "8 float32": 10}
    assert calls(book) == {"4 float32": 21, "8 float32": 10}
    manifest.replays += 1
    (row, _) = book.to_dict()["ops"]
    assert (row["calls"], row["bytes"], row["flops"]) == (23, 2300, 161)


def test_the_manifest_is_in_every_view(book, op):
    manifest = captured(book, op, 4, 4)
    manifest.replays += 3
    (graph,) = book.to_dict()["graphs"]
    one = {"op": "graph_probe", "implementation": "torch", "device": "cpu", "case": "4 float32", "calls": 2}
    assert graph == {"graph": "step", "replays": 3, "ops": [one]}
    assert 'accelerant_graph_replays_total{graph="step"} 3' in book.to_prometheus()


def test_a_graph_that_goes_leaves_its_counts(book, op):
    manifest = captured(book, op, 4)
    manifest.replays += 3
    book.release(manifest)
    assert calls(book) == {"4 float32": 3}
    assert not book.to_dict()["graphs"]
    manifest.replays += 3
    assert calls(book) == {"4 float32": 3}


def test_reset_forgets_replays(book, op):
    manifest = captured(book, op, 4)
    manifest.replays += 3
    book.reset()
    assert calls(book) == {}
    manifest.replays += 2
    assert calls(book) == {"4 float32": 2}


def test_only_what_is_captured_counts_for_the_graph(book, op):
    """What another thread runs meanwhile is a call; what it captures, as autograd's threads do, is not."""
    here = threading.local()
    here.captures = True

    def elsewhere(captures):
        here.captures = captures
        op(case(8))

    with counting(lambda device: here.captures) as counts:
        op(case(4))
        for captures in (True, False):
            thread = threading.Thread(target=elsewhere, args=(captures,))
            thread.start()
            thread.join()
    manifest = book.captured("step", counts)
    assert sorted(manifest.calls.values()) == [1, 1]
    assert calls(book) == {"8 float32": 1}
    op(case(4))
    assert calls(book) == {"4 float32": 1, "8 float32": 1}


def test_cases_beyond_the_limit_count_too(book, op):
    for rows in range(1, 520):
        op(case(rows))
    before = calls(book)["other"]
    manifest = captured(book, op, 1000, 1001)
    assert calls(book)["other"] == before
    manifest.replays += 5
    assert calls(book)["other"] == before + 10


def test_an_unused_graph_has_nothing_to_replay():
    assert_raises(LaunchError, "'step' has nothing to replay", lambda: Graph("step").replay())


@pytest.mark.gpu
def test_a_graph_of_real_ops_forward_and_backward(book):
    import accelerant.ops

    x = torch.randn(64, 256, device="cuda", requires_grad=True)

    def step():
        (gradient,) = torch.autograd.grad(accelerant.ops.gelu(x).sum(), x)
        return gradient

    with ahead_of_capture():  # few elements are otherwise left to torch
        expected = step()
    book.reset()
    graph = Graph("step", book=book)
    gradient = graph.capture(step)
    with pytest.raises(LaunchError, match="captured already"):
        graph.capture(step)
    before = {row["op"]: row["calls"] for row in book.to_dict()["ops"]}
    gradient.zero_()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(gradient, expected)
    after = {row["op"]: row["calls"] for row in book.to_dict()["ops"]}
    assert before == {"gelu_fwd": 3, "gelu_bwd": 3}
    assert after == {"gelu_fwd": 8, "gelu_bwd": 8}
    assert book.to_dict()["graphs"][0]["replays"] == 5
    del graph
    gc.collect()
    assert not book.to_dict()["graphs"]
    assert {row["op"]: row["calls"] for row in book.to_dict()["ops"]} == after


@pytest.mark.gpu
def test_no_garbage_is_collected_during_a_capture(book):
    x, seen = torch.zeros(8, device="cuda"), []

    def step():
        seen.append(gc.isenabled())
        return x + 1

    Graph("step", book=book).capture(step)
    assert seen == [True, True, True, False]
    assert gc.isenabled()


@pytest.mark.gpu
def test_a_capture_that_fails_counts_nothing(book):
    import accelerant.ops

    x = torch.randn(64, 256, device="cuda")
    accelerant.ops.gelu(x)
    book.reset()

    def step():
        accelerant.ops.gelu(x)
        raise ValueError("no")

    assert_raises(ValueError, "no", lambda: Graph("step", book=book).capture(step, warm_up=0))
    assert book.to_dict() == {"ops": [], "fallbacks": [], "graphs": [], "phases": []}


def test_a_count_that_is_taken_back_never_falls_below_none(book, op):
    for _ in range(5):
        op(case(4))
    (record,) = book.records()
    record.calls += 1
    book.discount(record)
    assert record.calls == 5
    book.reset()
    book.discount(record)
    assert record.calls == 0
    assert not book.records()


def test_a_reason_is_no_label_of_a_counter(book, op):
    """A series keeps its identity when the reason of a choice or of a fallback changes."""
    op(case(4))
    for reason in ("CompileError: one", "CompileError: other"):
        book.fallback(FallbackRecord("graph_probe", "4 float32 on cpu", "fast", "torch", reason))
    lines = book.to_prometheus().splitlines()
    with_reason = {line.split("{")[0] for line in lines if "reason=" in line}
    assert with_reason == {"accelerant_op_info", "accelerant_fallback_info"}
    series = [line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")]
    assert len(series) == len(set(series))
    (total,) = [line for line in lines if line.startswith("accelerant_fallbacks_total{")]
    assert total.endswith(" 2")


@pytest.mark.parametrize("text", ['a"b', "a\\", 'a\\"b', "a\nb", 'a\\nb", op="c'])
def test_labels_are_escaped_as_prometheus_reads_them(text):
    *_, written = ledger.metric_family("calls", "counter", "", [({"op": text, "ran": "b"}, 1)])
    found = re.fullmatch(r'calls\{op="((?:[^"\\\n]|\\[\\"n])*)",ran="b"\} 1', written)
    assert found
    assert re.sub(r"\\(.)", lambda part: {"n": "\n"}.get(part[1], part[1]), found[1]) == text


def test_quantiles_are_numpys():
    for samples in ([7.0], [1.0, 2.0], [0.0, 1.0, 5.0, 6.0, 30.0]):
        for q in (0.0, 0.2, 0.25, 0.5, 0.8, 0.99, 1.0):
            assert quantile(samples, q) == pytest.approx(np.quantile(samples, q), rel=1e-12), (samples, q)
    assert quantile([], 0.5) is None


def test_ledgers_of_several_processes_add_up():
    def exported(calls, ms, device="cpu"):
        book = ledger.Ledger()
        row = ledger.OpRecord(
            "gelu_fwd", "torch", "cpu", device, "8 float32", own=False, bytes_per_call=64, calls=calls
        )
        book.record(row).samples_ms.append(ms)
        for _ in range(calls):
            book.fallback(FallbackRecord("gelu_fwd", "8 float32", "triton", "torch", "no Triton"))
        book.captured("step", {}).replays = calls
        return json.loads(book.to_json())

    whole = merged([exported(2, 5.0), exported(3, 7.0), exported(1, 9.0, "cpu:1")])
    assert [(row["device"], row["calls"], row["bytes"], row["ms_p50"]) for row in whole["ops"]] == [
        ("cpu", 5, 320, 7.0),
        ("cpu:1", 1, 64, 9.0),
    ]
    assert whole["ops"][0]["ms_total"] == 2 * 5.0 + 3 * 7.0
    assert [row["count"] for row in whole["fallbacks"]] == [6]
    assert [row["replays"] for row in whole["graphs"]] == [6]
    lines = [line.rsplit(" ", 1)[0] for line in ledger.prometheus_text(whole).splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines))
    assert merged([]) == {"ops": [], "fallbacks": [], "graphs": [], "phases": []}


# --- phases and tables -----------------------------------------------------------------------------------------------
@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (ledger, cpu_provider):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def sleeper(clock):
    """An op of 2 ms."""
    return operation(Implementation("torch", lambda: clock.sleep(0.002)), name="sleeper")


def test_a_phase_has_its_calls_and_the_time_that_no_op_has(op, sleeper, clock, book):
    op(case(4))
    with book.phase("training"):
        for _ in range(3):
            sleeper(case(4))
        with book.phase("evaluation"):
            op(case(4))
            clock.sleep(0.01)
        sleeper(case(4))
    phases = {phase["phase"]: phase for phase in book.to_dict()["phases"]}
    counted = {name: {row["op"]: row["calls"] for row in phase["ops"]} for name, phase in phases.items()}
    assert counted == {"training": {"sleeper": 4}, "evaluation": {"graph_probe": 1}}
    training, evaluation, outside = ledger.sections(json.loads(book.to_json()))
    assert training.seconds >= 0.008
    assert evaluation.seconds >= 0.01
    assert [row["calls"] for row in outside.rows] == [1]
    assert training.rest + training.rows[0]["share"] == pytest.approx(1)
    assert evaluation.rest > 0.8
    lines = str(book).splitlines()
    assert any(line.startswith("training: 0.0") for line in lines)
    assert sum(line.startswith("not attributed") for line in lines) == 2


def test_the_first_call_counts_as_it_was_timed_in_the_phase_that_it_ran_in(book, op):
    """It may compile the kernel."""
    for name in ("before", "after", "after"):
        with book.phase(name):
            op(case(4))
    (record,) = book.records()
    record.samples_ms.clear()
    record.samples_ms.extend([2.0, 2.0])
    record.first_ms = 99.0
    phases = {phase["phase"]: phase["ops"][0] for phase in book.to_dict()["phases"]}
    assert {name: (row["calls"], row["ms_total"]) for name, row in phases.items()} == {
        "before": (1, 99.0), "after": (2, 4.0),
    }  # fmt: skip


def test_phases_of_two_threads_end_in_any_order(book, clock):
    one, other = book.phase("one"), book.phase("other")
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    other.__exit__(None, None, None)
    before = {phase["phase"]: phase["seconds"] for phase in book.to_dict()["phases"]}
    clock.sleep(0.002)
    assert {phase["phase"]: phase["seconds"] for phase in book.to_dict()["phases"]} == before


def test_a_single_call_has_a_time_which_the_median_leaves_out(book, sleeper):
    sleeper(case(4))
    (row,) = book.to_dict()["ops"]
    assert row["ms_p50"] is None
    assert row["ms_total"] == row["ms_first"] >= 2
    assert "*" in str(book)
    sleeper(case(4))
    (row,) = book.to_dict()["ops"]
    assert row["timed"] == 1
    assert row["ms_total"] == pytest.approx(row["ms_first"] + row["ms_p50"])
    assert repr(book) == str(book)
    book.reset()
    assert "sleeper" not in str(book)


def test_the_backward_passes_of_torchs_autograd_are_observed(book):
    op = operation(Implementation("torch", torch.sin, differentiable=True), name="sine_fwd")
    x = torch.ones(4, requires_grad=True)
    for _ in range(200):
        op(case(4), x).sum().backward()
    for _ in range(100):
        with torch.no_grad():
            op(case(4), x)
    forward, backward = book.to_dict()["ops"]
    assert (forward["calls"], backward["op"], backward["calls"]) == (300, "sine_bwd", 200)
    assert backward["timed"] == 6  # calls 2, 3, 4, 64, 128, 192


def test_the_tables_of_a_person_escape(book):
    operation(Implementation("<b>", lambda: None), name="<script>")(case(4))
    with book.phase("<i>"):
        pass
    html = book._repr_html_()
    assert not any(tag in html for tag in ("<script>", "<b>", "<i>"))
    assert "&lt;script&gt;" in html


def test_a_table_wraps_to_the_terminal_and_never_elsewhere(monkeypatch):
    rows = [("op", "case", "calls"), ("gelu_fwd", "16x64x512 float32 tanh", "1,024")]
    for width in (30, 58):
        lines = text_table(rows, numbers=("calls",), width=width)
        assert max(map(len, lines)) <= width
        assert "".join("".join(lines).split()).count("1,024") == 1
        assert all(word in " ".join(lines) for word in rows[1][1].split())
    assert len(text_table(rows, width=1_000)) == len(text_table(rows)) == 2
    monkeypatch.setattr(html_page.sys, "stdout", None)
    assert len(text_table(rows)) == 2
