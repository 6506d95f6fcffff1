import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from train_workers import losses, small, until_signalled

from accelerant.cli.train_view import LineView, verdict
from accelerant.config import override
from accelerant.nn.train.config import PRESETS
from accelerant.runtime.host import usable_cores
from processes import Command
from requirements import require_backend

SOURCE = Path(__file__).parents[2] / "src"


def test_a_run_prints_its_summary_and_where_the_report_is(accelerant, text):
    status, output, errors = accelerant("train", text, "--steps", 3, "--device", "cpu", "--out", "out")
    assert status == 0
    assert re.search(r"validation loss +\d\.\d{3} nats a byte +\(unigram \d\.\d{3}, bigram \d\.\d{3}\)", output)
    assert re.search(r"throughput +[\d,]+ tokens/s on cpu \(1 thread\)", output)
    assert "report           out/report.html" in output
    assert "bigram model     not beaten yet; train on:  accelerant train --resume out --steps 2400\n" in output
    assert re.search(r'sample +the .*\nuse it +accelerant sample out --prompt "the "$', output, re.DOTALL)
    assert re.search(r"peak memory +[\d,]+ MiB resident at most, [\d,]+ MiB predicted \(\d+ MiB for a step\)", output)
    assert "step 3/3" in errors
    report = Path("out/report.html").read_text()
    assert "layer_norm" in report  # the ledger's rows

    status, output, _ = accelerant("train", "--resume", "out")
    assert status == 0
    assert "already finished" in output


def test_a_limit_in_seconds_ends_a_run_with_the_command_that_continues_it(accelerant, text):
    options = ("--lr", 1e-3, "--precision", "fp32", "--max-grad-norm", 0.5, "--out", "out")
    status, _, errors = accelerant("train", text, "--steps", 100_000, "--device", "cpu", "--max-seconds", 1.5, *options)
    assert status == 1
    assert re.search(r"--max-seconds:.* 1\.5 s.*; continue with: accelerant train --resume out", errors)
    recipe = json.loads(Path("out/config.json").read_text())["run"]["recipe"]
    assert (recipe["learning_rate"], recipe["max_grad_norm"]) == (1e-3, 0.5)
    status, _, errors = accelerant("train", "--resume", "out", "--max-grad-norm", 2)
    assert (status, "--resume continues a run as it was: leave out --max-grad-norm" in errors) == (2, True)
    assert "--micro-batch is --microbatch now" in accelerant("train", text, "--micro-batch", 2)[2]


@pytest.mark.slow
def test_json_is_one_object_and_nothing_else(accelerant, text, tmp_path):
    more = tmp_path / "more.txt"
    more.write_text("words " * 500)
    options = ("--steps", 2, "--seed", 9, "--device", "cpu", "--json")
    status, output, errors = accelerant("train", "--data", text, more, *options)
    assert status == 0
    summary = json.loads(output)
    assert summary["status"] == "done"
    assert summary["steps"] == 2
    assert summary["out"] == "runs/tiny"
    assert json.loads(Path("runs/tiny/summary.json").read_text()) == summary
    assert errors == ""
    config = json.loads(Path("runs/tiny/config.json").read_text())
    assert config["run"]["deterministic"] is True  # where it costs nothing
    assert config["run"]["data"] == [str(text), str(more)]
    assert config["run"]["seed"] == 9
    assert config["corpus"]["train_bytes"] + config["corpus"]["held_out_bytes"] == len(
        text.read_bytes() + more.read_bytes()
    )


@pytest.mark.slow
def test_a_run_begins_with_the_model_of_another_and_resumes_for_more_epochs(accelerant, text):
    first = json.loads(accelerant("train", text, "--steps", 40, "--device", "cpu", "--json", "--out", "first")[1])
    options = (text, "--device", "cpu", "--json", "--precision", "float16")
    status, output, errors = accelerant("train", *options, "--init-from", "first", "--epochs", 0.5, "--out", "second")
    assert (status, errors) == (0, "")
    summary = json.loads(output)
    assert summary["epochs"] == pytest.approx(0.5, abs=0.1)
    assert summary["loss_scale"] == "65,536, 0 steps skipped"
    assert summary["validation_loss"] < first["validation_loss"]
    recipe = json.loads(Path("second/config.json").read_text())["run"]["recipe"]
    assert (recipe["init_from"], recipe["learning_rate"]) == (str(Path("first").absolute()), 2e-4)
    status, output, _ = accelerant("train", "--resume", "second", "--epochs", 1, "--json")
    assert json.loads(output)["steps"] == 2 * summary["steps"] - 1  # half of an odd number, rounded up


@pytest.mark.slow
def test_threads_are_the_option_or_those_of_the_environment_or_one(accelerant, text, monkeypatch):
    import torch

    before = torch.get_num_threads()
    for environment, option, expected in ((None, (), 1), ("2", (), 2), ("2", ("--threads", 1), 1)):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if environment is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", environment)
            torch.set_num_threads(int(environment))  # as torch does when it is loaded
        run = ("train", text, "--steps", 1, "--device", "cpu", "--json", "--overwrite", *option)
        status, output, _ = accelerant(*run)
        torch.set_num_threads(before)
        assert status == 0
        assert json.loads(Path("runs/tiny/config.json").read_text())["run"]["recipe"]["cpu_threads"] == expected
        used = min(expected, usable_cores())
        assert json.loads(output)["device"] == f"cpu ({used} thread{'s' * (used != 1)})"


@pytest.mark.slow
def test_a_profile_is_written_beside_the_run(accelerant, text):
    status, output, _ = accelerant("train", "--data", text, "--steps", 12, "--device", "cpu", "--profile")
    assert status == 0
    assert json.loads(Path("runs/tiny/trace.json").read_text())["traceEvents"]
    assert "aten::mm" in Path("runs/tiny/kernels.txt").read_text()
    assert "profile          runs/tiny/kernels.txt, runs/tiny/trace.json" in output


@pytest.mark.slow
def test_recomputing_gives_the_same_losses_and_determinism_can_be_chosen(accelerant, text):
    for name, options in (("a", ("--no-deterministic",)), ("b", ("--recompute", "--deterministic"))):
        accelerant("train", "--data", text, "--steps", 3, "--device", "cpu", "--json", "--out", name, *options)
        assert json.loads(Path(name, "config.json").read_text())["run"]["deterministic"] is (name == "b")
    assert losses(Path("a")) == losses(Path("b"))


@pytest.mark.slow
def test_the_windows_of_a_step_and_of_its_parts(accelerant, text):
    given = ("train", "--data", text, "--steps", 1, "--device", "cpu", "--json", "--batch-size", 24)
    for more, sizes in (((), [24, 8]), (("--microbatch", 6), [24, 6])):  # of at most the preset's 8, what divides 24
        status, output, _ = accelerant(*given, *more, "--out", "out")
        assert status == 0
        recipe = json.loads(Path("out/config.json").read_text())["run"]["recipe"]
        assert [recipe["batch_size"], recipe["microbatch"]] == sizes
        assert json.loads(output)["tokens"] == 24 * 64


@pytest.mark.parametrize(("arguments", "message"), [
    (["--preset", "huge"], "unknown preset 'huge'; known are tiny, small, gpt2"),
    (["--data", "absent.txt"], "no file or folder '.*absent.txt'"),
    (["--data", "empty.txt"], "no text in .*empty.txt"),
    (["--data", "short.txt"], r"not enough data: the text has \d+ tokens, one window for training .* need 130; give"),
    (["--data", "stdlib", "text.txt"], "stdlib or paths, not both"),
    (["absent.txt"], "no file or folder '.*absent.txt'"),
    (["stdlib", "text.txt"], "stdlib or paths, not both"),
    (["--resume", "absent", "text.txt"], "--resume continues a run as it was: leave out --data"),
    (["--steps", "-3"], "steps must be above 0, got -3"),
    (["--steps", "9" * 23], f"steps must be at most 1,000,000,000, got {'9' * 23}"),
    (["--seed", "-1"], "seed must be 0 to"),
    (["--threads", "0"], "threads must be above 0, got 0"),
    (["--log", "paper"], "log must be jsonl or tensorboard, got 'paper'"),
    (["--microbatch", "5"], "microbatch must divide the batch of 8, got 5"),
    (["--batch-size", "24", "--microbatch", "16"], "microbatch must divide the batch of 24, got 16"),
    (["--batch-size", "0"], "batch_size must be above 0, got 0"),
    (["--batch-size", "-8"], "batch_size must be above 0, got -8"),
    (["--batch-size", "9" * 20],
     rf"--batch-size {'9' * 20} has .* GiB of tokens a step in windows of 64, and .* are free"),
    (["--resume", "absent", "--batch-size", "8"], "leave out --batch-size"),
    (["--device", "abacus"], "--device must be auto, cuda, opencl, webgpu or cpu, got 'abacus'"),
    (["--data", "text.txt", "--out", "text.txt/run"], "cannot write to text.txt/run: text.txt is not a folder"),
    (["--data", "text.txt", "--out", "text.txt"], "cannot write to text.txt: text.txt is not a folder"),
    (["--data", ""], "--data must not be empty"),
    (["--data", "text.txt", ""], "PATH must not be empty"),
    (["--out", ""], "--out must not be empty"),
    (["--resume", ""], "--resume must not be empty"),
    (["--resume", "absent"], "absent holds no run: there is no config.json"),
    (["--resume", "absent", "--steps", "0"], "steps must be above 0, got 0"),
    (["--epochs", "2", "--steps", "5"], "--steps 5 and --epochs 2 exclude each other: give one of them"),
    (["--epochs", "-1"], "epochs must be above 0, got -1.0"),
    (["--data", "text.txt", "--epochs", "1e300"], r"epochs must be fewer: 1e\+300 are .* steps"),
    (["--init-from", ""], "--init-from must not be empty"),
    (["--init-from", "absent"], "--init-from needs the folder of a run or of a GPT-2 model, got '.*absent'"),
    (["--init-from", "."], "config.json: no such file"),
    (["--resume", "absent", "--init-from", "x"], "leave out --init-from"),
    (["--width", "130"], "width must be a multiple of heads, got width 130 and 4 heads"),
    (["--heads", "3"], "width must be a multiple of heads, got width 32 and 3 heads"),
    (["--layers", "0"], "layers must be above 0, got 0"),
    (["--context", "-1"], "context must be above 0, got -1"),
    (["--layers", "99999"], "layers must be at most 4096, got 99999"),
    (["--layers", "4000", "--width", "400000"], r"a model of .* parameters takes .* GiB .* are free: give fewer"),
    (["--context", "100000", "text.txt"],
     "not enough data: the text has .* tokens, one window for training .* need 200,002; give"),
    (["--preset", "rnn", "--heads", "2"], "--heads is for a GPT, and rnn is a recurrent model: leave it out"),
    (["--init-from", "x", "--layers", "2"], "--init-from gives the model its shape: leave out --layers"),
    (["--resume", "absent", "--width", "64"], "leave out --width"),
    (["--learning-rate", "0"], "learning_rate must be above 0, got 0.0"),
    (["--private", "--noise-multiplier", "1", "--precision", "float16"], "does not go with --precision float16"),
])  # fmt: skip
def test_bad_input_is_one_line_and_status_2(accelerant, text, arguments, message):
    Path("empty.txt").touch()
    Path("short.txt").write_text("some words")
    before = sorted(path.name for path in Path().iterdir())
    device = () if "--device" in arguments else ("--device", "cpu")
    status, output, errors = accelerant("train", *arguments, *device, "--json")
    assert status == 2
    assert output == ""
    assert re.fullmatch(f"accelerant: .*{message}.*\n", errors)
    assert sorted(path.name for path in Path().iterdir()) == before


def test_an_absent_device_is_refused(accelerant, text):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    status, output, errors = accelerant("train", "--data", text, "--device", "cuda", "--json")
    assert status == 2
    assert re.fullmatch(r"accelerant: backend 'cuda' is not available: .+\n", errors)
    assert output == ""
    assert not Path("runs").exists()


def test_a_missing_package_is_named_before_the_text_is_read(accelerant, text, monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    status, output, errors = accelerant("train", text, "--private", "--target-epsilon", 8)
    assert (status, output) == (2, "")
    assert errors == "accelerant: --private needs dp-accounting: pip install 'accelerant[privacy]'\n"


def test_an_unwritable_folder_is_refused(accelerant, text, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    out = locked / "run" if os.geteuid() else Path("/proc/run")  # root may write anywhere but there
    status, output, errors = accelerant("train", "--data", text, "--device", "cpu", "--out", out, "--json")
    assert status == 2
    assert re.fullmatch(f"accelerant: cannot write to {out}: .+\n", errors)
    assert output == ""


def test_unknown_options_are_wrong_usage(accelerant):
    status, _, errors = accelerant("train", "--color", "red")
    assert status == 2
    assert "--color" in errors


@pytest.mark.slow
def test_what_a_resumed_run_refuses(accelerant, text):
    accelerant("train", "--data", text, "--steps", 1, "--device", "cpu", "--json", "--out", "out")
    summary, config, checkpoint = (
        Path("out", name) for name in ("summary.json", "config.json", "checkpoint.safetensors")
    )
    values, whole = json.loads(config.read_text()), checkpoint.read_bytes()
    summary.unlink()
    checkpoint.write_bytes(whole[:-1])
    status, output, errors = accelerant("train", "--resume", "out", "--device", "cpu", "--json")
    assert status == 2
    assert re.fullmatch("accelerant: checkpoint out/checkpoint.safetensors is torn.*\n", errors)
    assert output == ""
    checkpoint.write_bytes(whole)

    recipe = {**values["run"]["recipe"], "steps": "60"}
    config.write_text(json.dumps({**values, "run": {**values["run"], "recipe": recipe}}))
    status, _, errors = accelerant("train", "--resume", "out", "--json")
    assert status == 2
    assert errors == "accelerant: not the settings of a run: steps must be a whole number, got '60'\n"

    assert values["backend"] == "cpu"
    config.write_text(json.dumps({**values, "backend": "abacus"}))
    status, _, errors = accelerant("train", "--resume", "out")
    assert status == 2
    assert "the backend in out/config.json must be auto, cuda, opencl, webgpu or cpu, got 'abacus'" in errors
    assert accelerant("train", "--resume", "out", "--device", "cpu", "--json")[0] == 0


def test_help_has_an_example_and_does_not_load_torch():
    script = (
        "import sys\nfrom accelerant.cli import main\n"
        "try:\n    main(['train', '--help'])\nfinally:\n    assert 'torch' not in sys.modules"
    )
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--preset" in done.stdout
    assert "accelerant train notes.txt" in done.stdout


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_writes_a_checkpoint_and_the_rest_is_the_same(accelerant, tmp_path, text, number):
    out = tmp_path / "out"
    arguments = ("train", "--data", text, "--steps", 200, "--device", "cpu", "--out", out)
    process = Command(*arguments, environment={"COLUMNS": "200"}, before=until_signalled)
    deadline = time.monotonic() + 200  # a limit for a process that hangs, on a loaded machine too
    while not (out / "metrics.jsonl").is_file() or len(losses(out)) < 3:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 128 + number, errors
    assert f"Continue with:  accelerant train --resume {out}" in output
    done = int(re.search(r"Stopped after step (\d+) of 200", output)[1])
    assert 3 <= done < 200
    assert len(losses(out)) == done
    assert not (out / "summary.json").exists()
    if number != signal.SIGINT:
        return

    status, resumed, errors = accelerant("train", "--resume", out, "--device", "cpu", "--json")
    assert status == 0, errors
    assert json.loads(resumed)["status"] == "done"
    straight = tmp_path / "straight"
    assert accelerant(*arguments[:-1], straight, "--json")[0] == 0  # on one thread too
    assert losses(out) == losses(straight)


@pytest.mark.slow
@pytest.mark.parametrize("device", [(), ("--device", "auto")])
def test_the_backend_of_the_settings_is_used_and_named(accelerant, text, monkeypatch, device):
    arguments = ("train", "--data", text, "--steps", 1, "--json", *device)
    with override(backend="apple"):
        status, _, errors = accelerant(*arguments)
        assert status == 2
        needs = "must be auto, cuda, opencl, webgpu or cpu, got 'apple': training needs cuda, opencl, webgpu or cpu"
        assert f"the setting backend {needs}" in errors
        monkeypatch.setenv("ACCELERANT_BACKEND", "apple")
        status, _, errors = accelerant(*arguments)
        assert status == 2
        assert f"ACCELERANT_BACKEND {needs}" in errors
        assert not Path("runs").exists()
    with override(backend="cpu"):
        assert accelerant(*arguments)[0] == 0
    assert json.loads(Path("runs/tiny/config.json").read_text())["backend"] == "cpu"


@pytest.mark.slow
def test_a_second_process_is_refused_and_a_killed_one_does_not_block(accelerant, tmp_path, text):
    out = tmp_path / "out"
    arguments = ("train", "--data", text, "--steps", 100_000, "--device", "cpu", "--out", out, "--json")
    process = Command(*arguments, before=small)
    try:
        deadline = time.monotonic() + 200
        while not (out / "metrics.jsonl").is_file() or len(losses(out)) < 1:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        status, _, errors = accelerant(*arguments)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert status == 2
    assert f"{out} is in use by process {process.pid}" in errors
    status, _, errors = accelerant("train", "--resume", out)
    assert status == 2
    again = f"start again with: accelerant train --preset tiny --data {text} --device cpu --steps 100000 --out {out}"
    assert again in errors
    assert accelerant(*arguments[:3], "--steps", 1, "--device", "cpu", "--out", out)[0] == 0


def test_the_verdict_is_a_success_or_the_command_that_leads_there():
    summary = {
        "validation_nats_per_byte": 2.0, "bigram_nats_per_byte": 2.5, "unigram_nats_per_byte": 3.5, "preset": "tiny",
        "steps": 100, "out": "a b",
    }  # fmt: skip
    assert verdict(summary) == "beaten: 20.0% less loss"
    assert verdict({**summary, "unigram_nats_per_byte": 1.9}).startswith("the unigram model has less loss than both")
    summary |= {"validation_nats_per_byte": 3.0, "steps_to_bigram": 1500}
    command = "accelerant train --resume 'a b' --steps"
    assert verdict(summary) == f"not beaten yet; about 1,500 steps more:  {command} 1600"
    assert verdict({**summary, "private": {}, "steps_to_bigram": None}).endswith(f"{command} 2400")
    assert verdict({**summary, "private": {"target_epsilon": None}}).endswith(f"{command} 1600")
    assert "start a new run" in verdict({**summary, "private": {"target_epsilon": 8.0}})  # --resume would refuse
    assert "no longer falls" in verdict({**summary, "steps": 2400, "steps_to_bigram": None})


def test_a_phase_shows_how_far_it_is_and_the_time_left(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr("accelerant.cli.train_view.time.monotonic", lambda: now[0])
    view = LineView()
    view.phase("encoding the text")
    now[0] += 2
    view.advance(0.1)  # too soon after the last line
    now[0] += 4
    view.advance(0.25)
    assert capsys.readouterr().err == "encoding the text ...\nencoding the text  25%  0:18 left\n"
    view.begin(done=0, total=5, device="cpu", predicted_bytes=3 << 20)
    assert capsys.readouterr().err == "training on cpu: step 0 of 5, 3 MiB predicted\n"
    view.advance(0.0, "step 1")
    now[0] += 6
    view.advance(0.5, "step 1")
    assert capsys.readouterr().err.splitlines()[-1] == "step 1  50%  0:06 left"
    now[0] += 600
    view.advance(0.1, "step 1")  # the same operation a second time
    now[0] += 6
    view.advance(0.4, "step 1")
    assert capsys.readouterr().err.splitlines()[-1] == "step 1  40%  0:12 left"


@pytest.mark.slow
@pytest.mark.parametrize("device", ["opencl", "webgpu"])
def test_training_on_a_device_without_torch_tensors_has_the_losses_of_the_cpu(accelerant, text, device, monkeypatch):
    require_backend(device)
    monkeypatch.setitem(PRESETS, "tiny", PRESETS["tiny"].replaced(sample_tokens=2))
    arguments = ("train", "--data", text, "--batch-size", 2, "--steps", 2, "--json")
    assert accelerant(*arguments, "--device", device, "--out", "device")[0] == 0
    assert accelerant(*arguments, "--device", "cpu", "--out", "host")[0] == 0
    assert json.loads(Path("device/config.json").read_text())["backend"] == device
    assert losses(Path("device")) == pytest.approx(losses(Path("host")), abs=1e-4)  # the requirement of issue 25
    status, output, _ = accelerant("train", "--resume", "device", "--steps", 3, "--json")
    assert (status, json.loads(output)["steps"]) == (0, 3)
    for options, message in (
        (("--precision", "bfloat16"), f"precision must be auto or float32 on {device}:0, got 'bfloat16'"),
        (("--private", "--target-epsilon", 3), "--private trains on cuda or cpu, got "),
    ):
        status, _, errors = accelerant(*arguments, "--device", device, "--out", "refused", *options)
        assert (status, message in errors) == (2, True)


def test_a_folder_of_all_kinds_of_files_says_what_was_read_skipped_and_why(accelerant, text):
    Path("notes").mkdir()
    Path("notes/win.txt").write_text("Zeile für Zeile\n" * 40, encoding="utf-16")
    status, _, errors = accelerant("train", "notes", "--steps", 1, "--device", "cpu", "--out", "out")
    assert status == 0
    assert "accelerant: read win.txt (as UTF-16)\n" in errors
    Path("notes/paper.pdf").write_bytes(b"%PDF-1.4\n" + bytes(range(256)) * 9)
    Path("notes/empty.txt").touch()
    Path("notes/data.json").write_text(json.dumps(list(range(20_000))))
    status, _, errors = accelerant("train", "notes", "--steps", 1, "--device", "cpu", "--out", "out")
    assert status == 0
    assert "encoding the text: 2 files, " in errors
    assert "left out empty.txt (empty); paper.pdf (PDF)\n" in errors
    assert "data.json is 99% of the text: " in errors
    report = Path("out/report.html").read_text()
    assert "The file data.json is 99% of the text: the model learns little else" in report
    assert "empty.txt (empty); paper.pdf (PDF)" in report
    Path("notes/data.json").unlink()
    Path("notes/win.txt").unlink()
    status, _, errors = accelerant("train", "notes", "--device", "cpu", "--out", "other")
    assert status == 2
    assert re.search(r"accelerant: no text in .*notes: empty.txt \(empty\); paper.pdf \(PDF\); give a file", errors)
