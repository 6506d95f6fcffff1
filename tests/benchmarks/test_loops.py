"""The suite loops: tiny models in every loop compute what they did before, and one that does not is marked."""

import contextlib
import io
import json

import pytest

pytest.importorskip("transformers", reason="the suite measures models of transformers, an optional package")

import torch

from accelerant.bench import BenchmarkRecord, Row
from accelerant.bench.record import COMPILED
from accelerant.bench.suite import CaseFailedError, run_suite
from accelerant.cli.bench import run_command
from accelerant.errors import ConfigError
from accelerant.runtime import registry
from benchmarks import loop_cells, loops
from benchmarks.loop_cells import DYNAMIC, FAMILIES, LOOPS, Cell
from benchmarks.loops import LoopsSuite


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch):
    monkeypatch.setattr(loop_cells, "_NEW_TOKENS", 12)


def status(*arguments):
    with pytest.raises(SystemExit) as exit_:
        run_command(LoopsSuite, ["--device", "cpu", "--json", *arguments])
    return exit_.value.code or 0


@pytest.mark.slow
def test_two_families_in_three_loops_by_the_command(tmp_path, capsys):
    cells = ["--family", "llama", "--family", "bert", "--loop", "fixed", "--loop", "padded-right", "--loop", "generate"]
    assert status(*cells, "--steps", "3", "--out", str(tmp_path)) == 0
    printed = json.loads(capsys.readouterr().out)
    measured = {(row["op"], row["case"].partition(",")[0], row["runner"]) for row in printed["rows"]}
    trained = {(family, loop) for family in ("llama", "bert") for loop in ("fixed", "padded-right")}
    assert measured == {
        *((family, loop, runner) for family, loop in {*trained, ("llama", "generate")}
          for runner in ("torch", "accelerant")),
        *((f"{family} {what}", loop, "accelerant") for family, loop in trained for what in ("results", "gradients")),
        *((f"{family} {what}", loop, "accelerant") for family, loop in {*trained, ("llama", "generate")}
          for what in ("first steps", "over torch")),
        ("llama results", "generate", "accelerant"),
    }  # fmt: skip
    rows = BenchmarkRecord.load(tmp_path / "record.json").rows
    for row in rows:
        if row.unit == "ppm":  # tokens are equal, losses and gradients within the bound
            assert row.reached
            assert row.target >= row.p50
            assert (row.error == 0.0) or not row.case.startswith("generate")
        elif row.unit == "ms":
            assert row.p20 <= row.p50 <= row.p80
            assert row.cold_ms > 0
    times = {(row.op, row.case, row.runner): row.p50 for row in rows}
    speed = times["llama over torch", "fixed, 2 x 16", "accelerant"]
    assert 0.2 < speed * times["llama", "fixed, 2 x 16", "accelerant"] / times["llama", "fixed, 2 x 16", "torch"] < 5
    left, speeds = printed["notes"][0], printed["notes"][-1]
    assert left == "bert generate: left out, it generates no text"
    assert "of 5 cells" in speeds
    assert status(*cells, "--steps", "3", "--out", str(tmp_path), "--resume", "--max-seconds", "0") == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == len(rows)  # nothing was left to measure


@pytest.mark.parametrize(("family", "factor"), [("llama", 1.001), ("gpt2", float("nan"))])
def test_a_replacement_that_computes_something_else_is_marked(family, factor, tmp_path, capsys, monkeypatch):
    real = loop_cells.patch

    def broken(model, **options):
        report = real(model, **options)
        changed = model.get_submodule(next(change.name for change in report.changed if change.kind == "mlp"))
        forward = changed.forward
        changed.forward = lambda x: forward(x) * factor
        return report

    monkeypatch.setattr(loop_cells, "patch", broken)
    arguments = ["--family", family, "--loop", "fixed", "--steps", "3", "--out", str(tmp_path)]
    for more in ([], ["--resume"]):
        assert status(*arguments, *more) == 1
        rows = json.loads(capsys.readouterr().out)["rows"]
        (result,) = [row for row in rows if row["op"] == f"{family} results"]
        assert result["note"].startswith("wrong: largest difference ")
        assert any(row["op"] == family and row["runner"] == "torch" and row["p50"] > 0 for row in rows)


def test_a_peer_that_fails_says_why_and_the_others_are_measured(cpu, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", broken)
    suite = LoopsSuite(family=("gpt2",), loop=("fixed",), runner=("patched", "compile"), steps=2)
    rows = {row.runner: row for row in run_suite(suite, cpu).rows if row.op == "gpt2"}
    assert list(rows) == [DYNAMIC, "torch", "accelerant"]
    assert rows[DYNAMIC].note == "RuntimeError: no C++ compiler"
    assert rows[DYNAMIC].p50 is None
    assert rows["accelerant"].p50 > 0


def test_every_family_has_every_loop_or_a_reason():
    cells = [Cell(family, loop, gpu) for family in FAMILIES for loop in LOOPS for gpu in (False, True)]
    has = {(cell.family, cell.loop) for cell in cells if not cell.left_out}
    for cell in cells:
        assert cell.left_out or 0 < cell.how.share <= 1
    assert {family for family, loop in has if loop == "generate"} == {
        *("gpt2", "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "mixtral", "t5", "whisper")
    }
    assert [loop for family, loop in sorted(has) if family == "llama-1b"] == ["bf16-weights"]
    assert {loop for family, loop in has if family == "llama"} == set(LOOPS)


@pytest.mark.parametrize("loop", ["varying", "padded-right", "padded-left", "packed"])
def test_batches_are_those_of_their_number(loop):
    cell = Cell("llama", loop, gpu=False)
    batches = cell.batches(6)
    again = cell.batches(4)
    assert all(torch.equal(x, again[3][name]) for name, x in batches[3].items())
    lengths = [batch["input_ids"].shape[1] for batch in batches]
    for batch, length in zip(batches, lengths, strict=True):
        assert length == 32 if loop == "packed" else 6 <= length <= 31
        if "padded" in loop:
            mask = batch["attention_mask"].bool()
            assert mask.sum(1).max() == length
            assert mask[:, 0 if loop == "padded-right" else -1].all()
            assert torch.equal(batch["labels"] == -100, ~mask)
    if loop == "packed":
        starts = batches[0]["position_ids"][0] == 0
        assert starts[0]
        assert torch.equal(batches[0]["labels"][0] == -100, starts)
        assert any(int((batch["position_ids"] == 0).sum()) > 1 for batch in batches)
    else:
        assert len(set(lengths)) > 1


def test_the_notes_count_cells_that_are_slower_than_they_were_and_than_torch_compile():
    def row(op, runner, p50, unit="ms"):
        return Row("loops", op, "fixed, 8 x 256", runner, runner, unit, p50=p50, p20=p50, p80=p50)

    rows = [
        row("a over torch", "accelerant", 0.9, "x"), row("b over torch", "accelerant", 1.0, "x"),
        row("a over torch", COMPILED, 0.5, "x"), row("a", "accelerant", 3.0), row("a", DYNAMIC, 2.0),
        row("b", "accelerant", 3.0), row("b", DYNAMIC, 4.0), row("c", "accelerant", 3.0),
        row("b first steps", "accelerant", 0.5, "x"),
    ]  # fmt: skip
    assert loops._summary(rows) == [
        "below 0.98 of the speed as it was: 1 of 2 cells: a fixed, 8 x 256 0.90",
        "first steps below 0.98 of it: 1 of 1 cells: b fixed, 8 x 256 0.50",
        f"faster than {DYNAMIC}: 1 of 2 cells (50%)",
    ]
    suite = LoopsSuite(family=("a",), loop=("fixed",))
    assert [suite.covers(row) for row in rows] == [*[False] * 3, True, True, *[False] * 4]


@pytest.mark.parametrize(("own", "wrong"), [(1.001, False), (0.9985, False), (0.998, True), (1.01, True)])
def test_what_differs_more_than_two_runs_must_be_about_as_near_to_float32(own, wrong):
    results = [[torch.tensor(value)] for value in (own, 1.001, 1.0011, 1.001)]
    row = Row("loops", "a", "fixed, 8 x 256", "accelerant", "")
    assert bool(loops._compared(row, results[0], results[1:]).wrong) is (own != 1.001)
    assert bool(loops._compared(row, results[0], results[1:], [torch.tensor(1.0)]).wrong) is wrong


@pytest.mark.parametrize(("own", "wrong"), [
    (1.001, ""), (0.9985, ""), (0.998, "b"), (None, "b"), (float("nan"), "b"),
])  # fmt: skip
def test_each_parameters_gradients_are_about_as_near_to_float32(own, wrong):
    def grads(value):
        return [torch.tensor([100.0, 0.0]), None if value is None else torch.tensor([value]), None]

    gradients = loops._Gradients(["a", "b", "frozen"], torch.float32)
    for _ in range(2):
        gradients.add([grads(value) for value in (1.001, 1.0011, 1.001, 1.0, own)])
    row = Row("loops", "a", "fixed, 8 x 256", "accelerant", "")
    found = gradients.compared(row, 4, range(3), 3)
    assert bool(found.wrong) is bool(wrong)
    assert not wrong or f" of {wrong}, 2 steps; " in found.note
    assert bool(gradients.compared(row, 4, range(3), None).wrong) is (own != 1.001)


@pytest.mark.parametrize(("options", "message"), [
    ({"family": ("gpt5",)}, "--family: no family 'gpt5'; there are gpt2, llama"),
    ({"loop": ("endless",)}, "--loop: no loop 'endless'; there are fixed, varying"),
    ({"runner": ("jax",)}, "--runner: no runner 'jax'; there are torch, patched"),
])  # fmt: skip
def test_unknown_names(options, message, cpu):
    with pytest.raises(ConfigError, match=message):
        LoopsSuite(**options).resolve(cpu)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample(6)
def test_every_loop_of_a_family_computes_what_it_did(family, cpu, monkeypatch):
    monkeypatch.setattr(loops, "_BLOCKS", 1)
    record = run_suite(LoopsSuite(family=(family,), loop=tuple(LOOPS), steps=6), cpu)  # raises where it does not
    results = {row.case.partition(",")[0] for row in record.rows if row.op == f"{family} results" and row.p50}
    assert results == {loop for loop in LOOPS if not Cell(family, loop, False).left_out}


@pytest.mark.slow
def test_runs_of_the_trainer_in_processes_of_their_own(cpu, monkeypatch):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate, an optional package")
    suite, child = LoopsSuite(family=("bert",), loop=("trainer",), steps=3), loops._run_child

    def here(family, runner, device, steps, moved, *rest):
        """Make the runs of the model as it was that only bound the difference in this process."""
        if not moved:
            return child(family, runner, device, steps, moved, *rest)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            loops.train(family, runner, device, steps, moved)
        return json.loads(printed.getvalue().splitlines()[-1])

    monkeypatch.setattr(loops, "_run_child", here)
    rows = {(row.op, row.case.partition(",")[0], row.runner): row for row in run_suite(suite, cpu).rows}
    for cache in ("trainer cold", "trainer warm"):
        assert rows["bert results", cache, "accelerant"].reached
        assert rows["bert over torch", cache, "accelerant"].p50 > 0
        for runner in ("torch", "accelerant"):
            assert 0 < rows["bert", cache, runner].cold_ms < 1e3 * rows["bert", cache, runner].p50

    def other(family, runner, *rest):
        losses = [1.0, 2.0 + (runner != "torch")]
        return {"losses": losses, "first_s": 1.0, "all_s": 2.0, "peak_bytes": 0, "note": ""}

    monkeypatch.setattr(loops, "_run_child", other)
    with pytest.raises(
        CaseFailedError, match=r"bert results trainer cold, .*, accelerant: wrong: largest difference 5"
    ):
        run_suite(suite, cpu)


@pytest.mark.gpu
def test_a_cell_on_a_gpu_by_every_runner():
    gpu = registry.find_device("cuda")
    suite = LoopsSuite(family=("gpt2",), loop=("fixed",), runner=("patched", "patched-compiled", "compile"), workers=1)
    rows = {row.runner: row for row in run_suite(suite, gpu).rows if row.op == "gpt2"}
    assert set(rows) == {"torch", "accelerant", COMPILED, DYNAMIC}
    assert all(row.p50 > 0 and row.peak_bytes > 0 for row in rows.values())
    assert "CUDA graphs: " in rows["accelerant"].note
