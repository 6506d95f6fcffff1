import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accelerant.algebra.field.program import field_add_source
from accelerant.cli.cache import shipped_kernels
from accelerant.config import override
from accelerant.runtime import registry
from accelerant.runtime.compilation.cache import KNOWN, KernelCache, kernel_key
from accelerant.runtime.compilation.kernel import CUDA_TARGETS, KernelSource
from accelerant.runtime.providers.cuda import OfflineCudaProvider
from processes import Command

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture
def cache(tmp_path):
    with override(cache_dir=tmp_path):
        yield tmp_path / "kernels"


@pytest.fixture
def run(command_line, cache):
    return functools.partial(command_line, "cache")


def test_an_empty_cache(run, cache):
    status, output, _ = run("list")
    assert status == 0
    assert output == f"0 entries, 0.0 KiB, in {cache}\n"
    assert json.loads(run("list", "--json")[1]) == []
    assert run("clear")[:2] == (0, "removed 0 entries, 0.0 KiB\n")


def test_what_was_compiled_is_listed(run, cache):
    registry.create("cpu").compile(field_add_source())
    (entry,) = json.loads(run("list", "--json")[1])
    assert entry["name"] == "field_add"
    assert entry["compiler"].startswith("llvmlite")
    assert entry["size_bytes"] == sum(path.stat().st_size for path in (cache / entry["key"]).iterdir())
    assert 0 <= entry["age_s"] < 60
    assert entry["damage"] == ""
    _, output, _ = run("list")
    assert output.splitlines()[0].split() == ["kernel", "target", "compiler", "size", "age", "registers", "key"]
    assert "1 entry, " in output


@pytest.mark.parametrize("damage", ["no code", "no report", "torn report", "a list"])
def test_a_damaged_entry_is_listed_and_cleared(run, cache, damage):
    registry.create("cpu").compile(field_add_source())
    (folder,) = cache.iterdir()
    match damage:
        case "no code":
            (folder / "code").unlink()
        case "no report":
            (folder / "report.json").unlink()
        case "torn report":
            (folder / "report.json").write_text('{"name": "fie')
        case _:
            (folder / "report.json").write_text("[]")
    (entry,) = KernelCache().entries()
    assert entry.damage
    assert "damaged" in run("list")[1]
    (cache / f"{KNOWN}model").touch()  # a note that the kernels of a model are there
    assert run("clear", "--yes")[0] == 0
    assert not list(cache.iterdir())


def fill(cache, *names):
    from accelerant.runtime.compilation.kernel import Binary, Resources

    for name in names:
        binary = Binary(
            name.encode(), {name: name}, {name: Resources(registers=len(name)), "other": Resources(registers=3)}
        )
        KernelCache().get_or_build(
            kernel_key(name=name), lambda binary=binary: binary, name=name, target="sm_90", compiler="c 1"
        )


def test_what_an_entry_says_is_neither_markup_nor_control(run, cache):
    fill(cache, "gelu[/fwd]\x1b[31m")
    status, output, _ = run("list")
    assert (status, r"gelu[/fwd]\x1b[31m" in output) == (0, True)


def test_clear_selects_by_name(run, cache):
    fill(cache, "gelu_fwd", "gelu_bwd", "softmax_fwd")
    assert [entry.registers for entry in KernelCache().entries()] == [8, 8, 11]
    status, output, _ = run("clear", "gelu*", "--yes", "--json")
    assert status == 0
    assert json.loads(output)["removed"] == 2
    assert [entry.name for entry in KernelCache().entries()] == ["softmax_fwd"]


def test_clear_does_not_guess(run, cache):
    fill(cache, "gelu_fwd")
    status, output, errors = run("clear")
    assert (status, output) == (2, "")
    assert "needs --yes" in errors
    status, _, errors = run("clear", "glu", "--yes")
    assert status == 2
    assert errors == "accelerant: no kernel 'glu' here; there are gelu_fwd\n"
    assert len(KernelCache().entries()) == 1


def test_clear_removes_what_dead_processes_left(run, cache):
    fill(cache, "gelu_fwd")
    for name, age in ((".new-old", 7200), (".new-young", 0)):
        (cache / name).mkdir()
        os.utime(cache / name, (time.time() - age,) * 2)
    assert [entry.name for entry in KernelCache().entries()] == ["gelu_fwd"]
    assert json.loads(run("clear", "--yes", "--json")[1])["leftovers"] == 1
    assert [path.name for path in cache.iterdir()] == [".new-young"]


def test_clear_leaves_what_the_cache_did_not_write(run, cache, tmp_path):
    """`kernels` may be anybody's folder when ACCELERANT_CACHE_DIR names a folder that has one."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    fill(cache, "gelu_fwd")
    others = [cache / "linux" / "code", cache / kernel_key(name="blob") / "weights", elsewhere / "code"]
    others += [cache / ".new-old" / "draft", cache / "notes"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    (cache / kernel_key(name="link")).symlink_to(elsewhere)
    os.utime(cache / ".new-old", (time.time() - 7200,) * 2)
    assert json.loads(run("clear", "--yes", "--json")[1]) | {"freed_bytes": 0} == {
        "removed": 1, "freed_bytes": 0, "leftovers": 0,
    }  # fmt: skip
    assert all(path.read_text() == "mine" for path in others)
    assert not (cache / kernel_key(name="gelu_fwd")).exists()


def test_a_cache_of_others_is_an_error(run, cache):
    fill(cache, "gelu_fwd")
    cache.chmod(0o777)
    for command in ("list", "clear"):
        status, _, errors = run(command)
        assert (status, "written by its group or by everyone" in errors) == (2, True)


def test_shipped_kernels_are_those_of_the_folders():
    names = {kernel.name for kernel in shipped_kernels()}
    assert "field_add" in names
    if sys.platform == "linux":
        assert names >= {"gelu_fwd", "gelu_bwd", "norm_fwd", "softmax_fwd"}
    assert all(kernel.source.entries for kernel in shipped_kernels())


def test_warm_of_a_cache_that_cannot_be_written_fails(run, tmp_path):
    (tmp_path / "file").touch()
    with override(cache_dir=tmp_path / "file"):
        status, _, errors = run("warm", "field_add", "--device", "cpu")
    assert status == 2
    assert f"kernel cache {tmp_path / 'file' / 'kernels'} cannot be written: " in errors
    assert "set ACCELERANT_CACHE_DIR" in errors


def test_warm_for_the_cpu(run, cache):
    status, output, errors = run("warm", "--device", "cpu")
    assert status == 0
    assert output.startswith("cpu: ")
    assert "field_add" in errors
    assert registry.create("cpu").compile(field_add_source()).from_cache


def test_warm_for_architectures_without_a_device(run, cache):
    pytest.importorskip("cuda.core", reason="cuda-core is for Linux and Windows")
    status, output, errors = run("warm", "field_add", "--arch", "sm_90", "--arch", "sm_80", "--json")
    assert (status, errors) == (0, "")
    rows = json.loads(output)
    assert [(row["kernel"], row["target"], row["from_cache"]) for row in rows] == [
        ("field_add", "sm_90", False),
        ("field_add", "sm_80", False),
    ]
    assert {(entry.name, entry.target) for entry in KernelCache().entries()} == {
        ("field_add", "sm_90"),
        ("field_add", "sm_80"),
    }
    assert all(row["from_cache"] for row in json.loads(run("warm", "field_add", "--arch", "sm_90", "--json")[1]))


@pytest.mark.slow
def test_warm_with_triton(tmp_path):
    """In a process of its own: the tests may have made Triton an interpreter here."""
    pytest.importorskip("triton")
    command = ("cache", "warm", "gelu_fwd", "--arch", "sm_80", "--json")
    done = Command(*command, environment={"ACCELERANT_CACHE_DIR": str(tmp_path)})
    output, errors = done.communicate(300)
    assert done.returncode == 0, errors
    rows = json.loads(output)
    assert {(row["kernel"], row["target"]) for row in rows} == {("gelu_fwd", "sm_80")}
    assert len(KernelCache(tmp_path / "kernels").entries()) == len(rows) == len({row["detail"] for row in rows})


def test_ahead_of_time_chooses_the_target_as_a_device_does():
    def target(wanted, *targets):
        made = KernelSource("k", {}, {"k": ()}, targets=targets)
        provider = OfflineCudaProvider(wanted)
        return provider._target(made, 0) if provider.serves(made) else None

    assert target("sm_90", *CUDA_TARGETS) == "sm_90"
    assert target("sm_90", "sm_90a") == "sm_90a"
    assert target("sm_90a", "sm_90a") == "sm_90a"
    assert target("sm_80", "sm_90a") is None
    assert target("sm_87") == "sm_87"


@pytest.mark.parametrize(("arguments", "message"), [
    (["warm", "glu"], "no kernel 'glu' here; there are "),
    (["warm", "--arch", "sm_1"], "unknown architecture 'sm_1'"),
    (["warm", "--device", "abacus"], "unknown backend 'abacus'"),
    (["warm", "--device", "rocm"], "backend 'rocm' is not available"),
    (["warm", "--device", "cpu", "--arch", "sm_90"], "--arch and --device cpu exclude each other"),
])  # fmt: skip
def test_bad_input_is_one_line_and_status_2(run, arguments, message):
    status, output, errors = run(*arguments)
    assert (status, output) == (2, "")
    assert errors.startswith("accelerant: ")
    assert message in errors
    assert errors.count("\n") == 1


@pytest.mark.gpu
def test_a_device_finds_what_was_compiled_ahead(run, cache):
    device = registry.find_device("cuda")
    assert run("warm", "field_add")[0] == 0
    assert {entry.target for entry in KernelCache().entries()} == {device.architecture}
    assert registry.create("cuda").compile(field_add_source()).from_cache


@pytest.mark.gpu
def test_an_op_finds_its_triton_kernel_compiled_ahead(tmp_path):
    """In a process of its own, where no kernel was loaded before."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])}
    environment["ACCELERANT_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "accelerant", "cache", "warm", "gelu_fwd"]
    subprocess.run(command, env=environment, check=True, timeout=120)
    before = {entry.key for entry in KernelCache(tmp_path / "kernels").entries()}
    script = (
        "import torch, accelerant as acl\n"
        "acl.ops.gelu(torch.randn(4096, 4096, device='cuda', dtype=torch.bfloat16), approximate='tanh')"
    )
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=120)
    assert {entry.key for entry in KernelCache(tmp_path / "kernels").entries()} == before
