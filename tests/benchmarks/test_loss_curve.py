"""Loss curves on a CPU: runs, what an interruption leaves, distances and noise, the page."""

import json
import math
import signal
from xml.etree import ElementTree

import pytest

from accelerant.bench.record import Environment
from accelerant.errors import ConfigError, DivergenceError, FormatError
from accelerant.nn import layers
from accelerant.nn.train import step as step_module
from accelerant.runtime import registry
from benchmarks import loss_curve as curve
from benchmarks import loss_curve_page as curve_page
from benchmarks.loss_curve import CurveRecord, CurveSettings, LossCurve, main, run
from benchmarks.loss_curve_page import MARKS, comparisons, markdown, picture, table, update_page, write_curve
from refusals import assert_raises


class Quiet:
    def phase(self, text):
        pass

    def advance(self, share, text=""):
        pass

    def note(self, text):
        pass


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("Beautiful is better than ugly. Explicit is better than implicit. " * 60)
    return str(file)


def settings(text, **changes):
    given = {"steps": 60, "batch": 4, "context": 16, "precisions": ("fp32",), **changes}
    return CurveSettings("tiny", data=(text,), **given)


def cpu():
    return registry.find_device("cpu")


def made(**curves):
    """A record of curves given as numbers."""
    steps = len(next(iter(curves.values())))
    given = CurveSettings("tiny", steps, precisions=("bf16", "fp8"))
    names = {"torch": "torch", "bf16": "accelerant, bf16", "fp8": "accelerant, fp8"}
    names |= {"rounded": "torch, rounded", "reseeded": "torch, reseeded"}
    found = [LossCurve(names[name], list(losses), 2.0) for name, losses in curves.items()]
    return CurveRecord(given, Environment.of(cpu()), {"source": "a text"}, 1000, found)


# --- runs ------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_ours_lies_with_plain_pytorch(text, tmp_path):
    """In float32 on one device two programs of one mathematics differ by rounding; other weights by much more."""
    record = run(settings(text), cpu(), tmp_path / "out", Quiet())
    assert [each.name for each in record.curves] == ["torch", "accelerant, fp32", "torch, rounded", "torch, reseeded"]
    assert all(len(each.losses) == 60 and each.losses[-1] < each.losses[0] - 1 for each in record.curves)
    first = [each.losses[0] for each in record.curves]
    assert first[1] == pytest.approx(first[0], abs=1e-4)
    assert abs(first[3] - first[0]) > 1e-3
    by_name = {each.name: each for each in comparisons(record)}
    ours = by_name["accelerant, fp32"]
    assert ours.within == {"rounded": True, "reseeded": True}
    assert 0 < ours.distance < 0.1 * by_name["torch, reseeded"].distance
    assert CurveRecord.load(tmp_path / "out" / "curve.json").settings == record.settings


def test_what_is_done_is_not_done_again(text, tmp_path, monkeypatch):
    out = tmp_path / "out"
    first = run(settings(text, steps=4, noises=()), cpu(), out, Quiet())
    trained = []
    usual = curve._CurveRuns.train
    monkeypatch.setattr(curve._CurveRuns, "train", lambda self, name: trained.append(name) or usual(self, name))
    second = run(settings(text, steps=4, noises=("reseeded",)), cpu(), out, Quiet())
    assert trained == ["torch, reseeded"]
    assert second.curves[0].losses == pytest.approx(first.curves[0].losses, abs=1e-6)
    third = run(settings(text, steps=4, noises=()), cpu(), out, Quiet())
    assert trained == ["torch, reseeded"]
    assert [each.name for each in third.curves] == ["torch", "accelerant, fp32", "torch, reseeded"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch", "accelerant, fp32"])
def test_an_interrupted_run_goes_on(name, text, tmp_path, monkeypatch):
    monkeypatch.setattr(curve, "_READ_EVERY", 5)
    straight = run(settings(text, steps=20, noises=()), cpu(), tmp_path / "straight", Quiet())

    class Interrupt(Quiet):
        def advance(self, share, text=""):
            if text.startswith(f"{name}, loss") and share == 0.5:
                signal.raise_signal(signal.SIGINT)

    out = tmp_path / "out"
    assert_raises(KeyboardInterrupt, None, lambda: run(settings(text, steps=20, noises=()), cpu(), out, Interrupt()))
    assert (out / "checkpoint.safetensors").is_file()
    notes = []
    watch = Quiet()
    watch.note = notes.append
    found = run(settings(text, steps=20, noises=()), cpu(), out, watch)
    assert notes == [f"{name}: going on after 10 steps"]
    assert not (out / "checkpoint.safetensors").exists()
    for each, other in zip(found.curves, straight.curves, strict=True):
        assert each.losses == pytest.approx(other.losses, abs=1e-6)


def test_a_stop_at_the_last_step_keeps_the_run(text, tmp_path):
    class Interrupt(Quiet):
        def advance(self, share, text=""):
            if text.startswith("torch, loss") and share == 1.0:
                signal.raise_signal(signal.SIGINT)

    out = tmp_path / "out"
    assert_raises(KeyboardInterrupt, None, lambda: run(settings(text, steps=4, noises=()), cpu(), out, Interrupt()))
    assert [each.name for each in CurveRecord.load(out / "curve.json").curves] == ["torch"]
    assert not (out / "checkpoint.safetensors").exists()
    assert len(run(settings(text, steps=4, noises=()), cpu(), out, Quiet()).curves) == 2


def test_runs_of_other_code_are_not_put_beside_those_there(text, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setenv("ACCELERANT_COMMIT", "aaaaaaaaaaaa")
    run(settings(text, steps=4, noises=()), cpu(), out, Quiet())
    monkeypatch.setenv("ACCELERANT_COMMIT", "bbbbbbbbbbbb")
    assert len(run(settings(text, steps=4, noises=()), cpu(), out, Quiet()).curves) == 2
    with pytest.raises(ConfigError, match="made with commit aaaaaaaaaaaa, this run has bbbbbbbbbbbb"):
        run(settings(text, steps=4, noises=("reseeded",)), cpu(), out, Quiet())


@pytest.mark.slow
def test_fp8_beside_bfloat16(text, tmp_path, monkeypatch):
    """By casting to e4m3 and back, on a CPU."""
    monkeypatch.setattr(layers, "FUSED", {"cuda", "cpu"})
    for module in (curve, step_module):
        monkeypatch.setattr(module, "require_float8", lambda _device: None)
    record = run(
        settings(text, steps=30, precisions=("bf16", "fp8"), noises=("reseeded",)), cpu(), tmp_path / "out", Quiet()
    )
    assert record.settings.reference == "bf16"
    plain, bf16, fp8, _ = record.curves
    assert (plain.name, bf16.name, fp8.name) == ("torch", "accelerant, bf16", "accelerant, fp8")
    distance = {each.name: each.distance for each in comparisons(record)}
    assert distance["accelerant, bf16"] < distance["torch, reseeded"]
    assert distance["accelerant, fp8"] < 2 * distance["torch, reseeded"]
    assert fp8.losses != bf16.losses


@pytest.mark.parametrize(("changes", "words"), [
    ({"steps": 8}, "curves with steps 4, got 8"),
    ({"batch": 2}, r"curves with shape \(4, 16\), got \(2, 16\)"),
    ({"seed": 1}, "curves with seed 0, got 1"),
    ({"precisions": ("fp32", "bf16")}, "curves with reference fp32, got bf16"),
])  # fmt: skip
def test_a_folder_of_another_training_is_refused(changes, words, text, tmp_path):
    run(settings(text, steps=4, noises=()), cpu(), tmp_path / "out", Quiet())
    with pytest.raises(ConfigError, match=words):
        run(settings(text, **{"steps": 4, "noises": (), **changes}), cpu(), tmp_path / "out", Quiet())


@pytest.mark.parametrize(("changes", "words"), [
    ({"precisions": ("fp4",)}, "precision: no 'fp4'; there are fp32, bf16, fp8"),
    ({"precisions": ()}, "precision must name one of"),
    ({"precisions": ("bf16", "bf16")}, "names one twice"),
    ({"noises": ("loud",)}, "noise: no 'loud'; there are rounded, reseeded"),
    ({"steps": 1}, "steps must be 2 or more"),
    ({"context": 65}, "context must be 0 to 64 for tiny, got 65"),
])  # fmt: skip
def test_settings_without_meaning(changes, words, text):
    assert_raises(ConfigError, words, settings, text, **changes)


def test_fp8_where_there_is_none_is_refused_before_anything_runs(text, tmp_path):
    with pytest.raises(ConfigError, match="precision fp8 needs"):
        run(settings(text, precisions=("fp8",)), cpu(), tmp_path / "out", Quiet())
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_no_number_ends_the_run():
    with pytest.raises(DivergenceError, match="torch diverged at step 51: loss nan"):
        curve._require_finite(LossCurve("torch", [1.0] * 51 + [math.nan]))


def test_a_file_that_is_no_record(tmp_path):
    path = tmp_path / "curve.json"
    for content in ("", "[]", '{"format": "x"}', '{"format": "accelerant-curve-1"}'):
        path.write_text(content)
        assert_raises(FormatError, "no record of loss curves", CurveRecord.load, path)


# --- what curves say -------------------------------------------------------------------------------------------------
def test_distances_by_windows():
    """40 steps are 20 windows of two; noise that alternates within a window drops out."""
    base = [5.0] * 40
    record = made(
        torch=base,
        bf16=[x + (0.5 if i % 2 else -0.5) for i, x in enumerate(base)],
        fp8=[x + 0.03 for x in base],
        rounded=[x - 0.01 for x in base],
        reseeded=[x + 0.06 for x in base[:20]] + base[20:],
    )
    plain, bf16, fp8, rounded, reseeded = comparisons(record)
    assert plain.distance == bf16.distance == 0.0
    assert fp8.distance == pytest.approx(0.03)
    assert rounded.distance == pytest.approx(0.01)
    assert reseeded.distance == pytest.approx(0.06 * math.sqrt(0.5))
    assert reseeded.last == 0.0
    assert fp8.final == pytest.approx(5.03)
    assert bf16.within == {"rounded": True, "reseeded": True}
    assert fp8.within == {"rounded": False, "reseeded": True}
    assert plain.within == rounded.within == {}
    text = table(record)
    assert "accelerant, fp8: beyond what plain PyTorch differs from itself by, from the same initial weights" in text
    assert "accelerant, fp8: within what plain PyTorch differs from itself by, from other initial weights" in text
    assert "3.00" in text  # 0.03 over 0.01


def test_steps_that_fill_no_window_count_with_the_last():
    curve_of = LossCurve("torch", [1.0] * 4 + [2.0] * 3)
    assert curve_page._means(curve_of, 2) == [1.0, 1.0, pytest.approx(2.0)]
    assert curve_page._lengths(curve_of, 2) == [2, 2, 3]


def test_a_record_without_its_reference_is_refused():
    assert_raises(ConfigError, "the run of torch is not finished", lambda: comparisons(made(bf16=[1.0, 2.0])))


def test_files_and_pages(tmp_path):
    losses = [5.0 - i / 50 for i in range(100)]
    record = made(torch=losses, bf16=[x + 0.01 for x in losses], reseeded=[x - 0.02 for x in losses])
    write_curve(tmp_path, record)
    lines = (tmp_path / "curve.csv").read_text().splitlines()
    assert lines[:2] == ['step,torch,"accelerant, bf16","torch, reseeded"', "1,5.000000,5.010000,4.980000"]
    assert len(lines) == 101
    report = (tmp_path / "report.html").read_text()
    assert report.count("<svg") == 2
    assert "http" not in report.replace("http://www.w3.org", "")
    image = picture(record)
    assert image.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    ElementTree.fromstring(image)
    page = tmp_path / "page.md"
    page.write_text(f"# before\n\n{MARKS[0]}\n{MARKS[1]}\n\nafter\n")
    for _ in range(2):  # the second time there is something to take away
        update_page(page, markdown(record, "curve.svg", "curve.json"))
    text = page.read_text()
    assert text.startswith("# before\n\n<!-- curve")
    assert text.endswith("-->\n\nafter\n")
    assert text.count("![loss curves") == 1
    assert "| accelerant, bf16 |" in text
    page.write_text(MARKS[0])
    assert_raises(ConfigError, "has no section of curves", update_page, page, "")


# --- the command -----------------------------------------------------------------------------------------------------
def status(*arguments):
    exit_ = assert_raises(SystemExit, None, main, [*arguments])
    return exit_.code or 0


def test_the_command(text, tmp_path, capsys):
    out = tmp_path / "out"
    shared = ["--preset", "tiny", "--data", text, "--steps", "6", "--batch", "2", "--context", "8", "--device", "cpu"]
    assert status(*shared, "--noise", "reseeded", "--out", str(out), "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in printed["curves"]] == ["torch", "accelerant, fp32", "torch, reseeded"]
    assert {each.name for each in out.iterdir()} >= {"curve.json", "curve.csv", "curve.svg", "curve.md", "report.html"}
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("\n".join(MARKS))
    assert status("--out", str(out), "--page", str(page)) == 0
    assert "](../out/curve.svg)" in page.read_text()
    assert "`../out/curve.json`" in page.read_text()
    assert status(*shared, "--precision", "fp8", "--out", str(tmp_path / "other")) == 2
    assert "fp8 needs an NVIDIA GPU" in capsys.readouterr().err
