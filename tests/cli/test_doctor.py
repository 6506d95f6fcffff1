import functools
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import commands
from accelerant.algebra.field.program import field_add_source
from accelerant.bench.suites import first_wrong
from accelerant.cli import doctor_checks as doctor
from accelerant.config import override
from accelerant.runtime import registry
from accelerant.runtime.compilation.cache import kernel_key
from processes import Command

SOURCE = Path(__file__).parents[2] / "src"


run = functools.partial(commands.run, "doctor")


@pytest.fixture(scope="module")
def found():
    """The checks of a process of its own: the tests may have made Triton an interpreter here."""
    done = Command("doctor", "--json")
    checks = [doctor.Check(**check) for check in json.loads(done.communicate(300)[0])["checks"]]
    assert done.returncode == 0, [check for check in checks if check.status == "failed"]
    return {check.name: check for check in checks}


@pytest.mark.slow
def test_everything_is_looked_at(found):
    assert found.keys() >= {"accelerant", "python", "settings", "torch", "disk cache", "compiler LLVM", "compiler C"}
    assert found.keys() >= {f"backend {name}" for name in registry.BACKENDS}
    assert {check.status for check in found.values()} <= {"ok", "warning", "failed"}
    assert all(check.advice for check in found.values() if check.status != "ok")


def test_the_versions_of_array_libraries_are_shown(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for names in (("cupy-cuda13x",), ("cupy-cuda12x",)):
        for name in names:
            (info := tmp_path / f"{name.replace('-', '_')}-14.1.0.dist-info").mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 14.1.0\n")
            (info / "top_level.txt").write_text("cupy\n")
        (check,) = doctor._arrays()
        assert f"NumPy {np.__version__} (numpy)" in check.found
        assert "CuPy 14.1.0 (cupy-cuda12x), " in check.found or "CuPy 14.1.0 (cupy-cuda13x); JAX " in check.found
    assert check.status == "warning"
    assert "uninstall all but one" in check.advice


@pytest.mark.slow
def test_an_absent_backend_says_why(found):
    for name in registry.BACKENDS:
        reason = registry.reason_absent(name)
        if reason:
            assert reason in found[f"backend {name}"].found


@pytest.mark.slow
def test_each_device_proves_that_it_computes(found):
    for device in registry.devices():
        if device.available:
            line = found[f"compute {device.backend}:{device.index}"]
            assert line.status == "ok", line
            assert "ms by events" in line.found
            assert "result exact" in line.found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="these packages are for Linux")
def test_the_compilers_really_compile(found):
    assert "field_add for sm_90 in" in found["compiler NVRTC"].found
    assert "for sm_90 in" in found["compiler Triton"].found


@pytest.mark.slow
def test_for_people_and_programs(found, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "checks", lambda progress: iter(found.values()))
    status, output, errors = run(capsys, "--json")
    report = json.loads(output)
    assert errors == ""
    assert report["counts"] == {
        **dict.fromkeys(("ok", "warning", "failed"), 0),
        **Counter(check["status"] for check in report["checks"]),
    }
    assert status == (1 if report["counts"]["failed"] else 0)


def test_the_lines_and_their_advice(capsys, monkeypatch):
    monkeypatch.setattr(
        doctor,
        "checks",
        lambda progress: iter(
            [doctor.Check("engine", "ok", "it [runs]"), doctor.Check("wheels", "failed", "three", "find one")]
        ),
    )
    status, output, _ = run(capsys)
    assert status == 1
    assert output.splitlines() == [
        "ok      engine               it [runs]", "failed  wheels               three", f"{'':29}to do: find one",
        "1 ok, 0 warnings, 1 failed",
    ]  # fmt: skip


def test_a_wrong_result_is_found():
    provider, device = registry.create("cpu"), registry.find_device("cpu")
    launch, x, y = doctor._prepare(provider, device)
    assert "are wrong" in first_wrong(x, y, launch.sums())  # nothing ran yet
    launch.start()
    assert first_wrong(x, y, launch.sums()) == ""
    spoiled = provider.copy_to_host(launch.buffers[2], np.uint64, (launch.n,))
    spoiled[12345] ^= np.uint64(1)
    provider.copy_to_device(spoiled, out=launch.buffers[2])
    wrong = first_wrong(x, y, launch.sums())
    assert wrong.startswith(
        f"1 of {launch.n:,} sums are wrong, the first: {x[12345]} + {y[12345]} gave {spoiled[12345]}"
    )


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").touch()
    with override(cache_dir=tmp_path / "file"):
        (check,) = doctor._cache()
    assert check.status == "warning"
    assert "cannot be written" in check.found
    assert "ACCELERANT_CACHE_DIR" in check.advice


def test_a_damaged_cache_is_a_warning(tmp_path):
    (tmp_path / "kernels" / kernel_key(name="k")).mkdir(parents=True)
    with override(cache_dir=tmp_path):
        (check,) = doctor._cache()
    assert check.status == "warning"
    assert "1 damaged" in check.found


@pytest.mark.parametrize("which", ["the folder", "an entry"])
def test_a_cache_that_others_can_write_is_a_failure(tmp_path, which):
    with override(cache_dir=tmp_path):
        registry.create("cpu").compile(field_add_source())
        (entry,) = (tmp_path / "kernels").iterdir()
        (entry if which == "an entry" else entry.parent).chmod(0o770)
        (check,) = doctor._cache()
    assert check.status == "failed"
    assert "may be written by its group or by everyone" in check.found


def test_a_backend_that_was_asked_for_and_is_absent_fails():
    with override(backend="apple"):
        found = {check.name: check for check in doctor._backends()}
    assert found["backend apple"].status == "failed"
    with override(backend="abacus"):
        found = {check.name: check for check in doctor._backends()}
    assert found["settings"].status == "failed"
    assert "abacus" in found["settings"].found


@pytest.mark.parametrize("forced", [{"gelo_fwd": "torch"}, {"gelu_fwd": "trition"}])
def test_an_op_or_implementation_that_the_settings_misspell_fails(forced):
    with override(implementation=forced):
        found = {check.name: check for check in doctor._installation()}
    assert found["settings"].status == "failed"
    assert all(name in found["settings"].found for name in forced)


def test_a_check_that_breaks_is_a_failed_check():
    def broken():
        yield doctor.Check("first", "ok", "fine")
        raise RuntimeError("it broke\nbadly")

    first, second = doctor._guarded("part", broken)
    assert first.status == "ok"
    assert (second.name, second.status, second.found) == ("part", "failed", "RuntimeError: it broke")


def test_no_c_compiler_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert next(doctor._c_compiler()).status == "warning"


@pytest.mark.gpu
def test_the_gpu_is_seen_at_work():
    pytest.importorskip("pynvml")
    computed, seen = doctor.prove(registry.find_device("cuda"))
    assert computed.status == "ok", computed
    assert seen.status == "ok", seen
    assert "% busy" in seen.found
    assert "MiB" in seen.found
