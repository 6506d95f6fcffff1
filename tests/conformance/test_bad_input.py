"""What every backend must refuse, and what must go on in spite of it: wrong numbers, dead buffers, broken caches."""

import gc
import logging
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from accelerant.algebra.field.program import field_add_source
from accelerant.config import override
from accelerant.errors import CompileError, ConfigError, LaunchError, OutOfMemory, ShapeError
from accelerant.runtime.compilation.cache import KernelCache, kernel_key
from accelerant.runtime.compilation.kernel import Binary, KernelSource
from accelerant.runtime.memory.limits import limit, trim
from accelerant.runtime.provider import Buffer
from refusals import assert_raises

MIB = 1 << 20


def doubled(provider, kernel):
    """Five elements through field addition."""
    x = np.arange(5, dtype=np.uint64)
    a, z = provider.copy_to_device(x), provider.allocate(x.nbytes)
    provider.launch(kernel, (1,), (32,), (a, a, z, 5))
    return provider.copy_to_host(z, np.uint64, (5,)).tolist()


# --- devices ---------------------------------------------------------------------------------------------------------
TAKES_A_DEVICE = {
    "allocate": lambda provider, index: provider.allocate(8, index),
    "copy_to_device": lambda provider, index: provider.copy_to_device(np.zeros(2), index),
    "compile": lambda provider, index: provider.compile(field_add_source(), device=index),
    "synchronize": lambda provider, index: provider.synchronize(index),
    "memory": lambda provider, index: provider.memory(index),
    "record_event": lambda provider, index: provider.record_event(index),
    "trim": lambda provider, index: getattr(provider, "trim", provider.memory)(index),
}


@pytest.mark.parametrize("beyond", [True, False], ids=["beyond", "negative"])
@pytest.mark.parametrize("call", TAKES_A_DEVICE)
def test_the_number_of_an_absent_device_is_refused_with_the_range(provider, call, beyond):
    count = len(provider.devices())
    index = count if beyond else -1
    there = "one device, number 0" if count == 1 else f"devices 0 to {count - 1}"
    with pytest.raises(ConfigError, match=f"'{provider.name}' has {there}; got device {index}"):
        TAKES_A_DEVICE[call](provider, index)


# --- buffers ---------------------------------------------------------------------------------------------------------
def test_a_freed_buffer_gives_its_memory_back_at_once(provider):
    gc.collect()
    before = provider.memory().allocated_bytes
    buffer = provider.allocate(8 * MIB)
    assert provider.memory().allocated_bytes >= before + 8 * MIB
    buffer.free()
    assert provider.memory().allocated_bytes == before
    buffer.free()
    assert provider.memory().allocated_bytes == before


@pytest.mark.parametrize("size", [32, 0])
def test_a_freed_buffer_is_refused(provider, size):
    kernel = provider.compile(field_add_source())
    buffer, good = provider.allocate(size), provider.allocate(32)
    buffer.free()
    elements = size // 8
    for use in (
        buffer.data_ptr,
        lambda: provider.copy_to_device(np.zeros(elements), out=buffer),
        lambda: provider.copy_to_host(buffer, np.uint64, (elements,)),
        lambda: provider.launch(kernel, (1,), (32,), (good, good, buffer, elements)),
    ):
        assert_raises(LaunchError, rf"{size} bytes.*was freed", use)
    assert doubled(provider, kernel) == [0, 2, 4, 6, 8]


def test_memory_that_is_not_the_backends_is_refused(provider):
    kernel = provider.compile(field_add_source())
    alien, good = Buffer(4096, 32, 0, object()), provider.allocate(32)
    for use in (
        lambda: provider.copy_to_device(np.zeros(4), out=alien),
        lambda: provider.copy_to_host(alien, np.uint64, (4,)),
        lambda: provider.launch(kernel, (1,), (32,), (good, alien, good, 4)),
    ):
        assert_raises(LaunchError, f"was not allocated by the {provider.name} backend", use)
    elsewhere = torch.empty(4, dtype=torch.uint64, device="meta")
    with pytest.raises(LaunchError, match=r"argument 0: (the tensor is on meta|wanted a buffer, got Tensor)"):
        provider.launch(kernel, (1,), (32,), (elsewhere, good, good, 4))
    assert doubled(provider, kernel) == [0, 2, 4, 6, 8]


def test_negative_shapes_are_refused(provider):
    assert_raises(ShapeError, r"\(-1, 2\)", lambda: provider.copy_to_host(provider.allocate(16), np.uint64, (-1, 2)))


def test_a_limit_is_kept_and_names_itself(provider):
    with limit(MIB, f"{provider.name}:0"):
        held = provider.allocate(MIB // 2)
        size = 1 << 36  # more than an allocator has in segments that are partly in use, which a limit does not count
        assert_raises(OutOfMemory, rf"{size:,} bytes asked on {provider.name}:0", provider.allocate, size)
        held.free()
    provider.allocate(128 * MIB).free()


def test_trim_empties_the_pool(provider):
    trim(f"{provider.name}:0")
    before = provider.memory().reserved_bytes
    provider.allocate(64 * MIB).free()
    trim(f"{provider.name}:0")
    assert provider.memory().reserved_bytes == before


# --- the cache -------------------------------------------------------------------------------------------------------
def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "accelerant.cache"]


@pytest.mark.parametrize("kind", ["a file", "refuses"])
def test_a_cache_that_cannot_be_written_is_bypassed_with_one_warning(provider, tmp_path, caplog, monkeypatch, kind):
    if kind == "a file":
        (tmp_path / "kernels").write_text("not a folder")
    else:  # a read-only folder stops everyone but root, and tests may run as root

        def refuse(**_):
            raise PermissionError(30, "Read-only file system")

        monkeypatch.setattr("accelerant.runtime.compilation.cache.tempfile", SimpleNamespace(mkdtemp=refuse))
    with override(cache_dir=tmp_path), caplog.at_level(logging.WARNING):
        for _ in range(2):
            kernel = provider.compile(field_add_source())
            assert not kernel.from_cache
            assert doubled(provider, kernel) == [0, 2, 4, 6, 8]
    (message,) = warnings_of(caplog)
    assert str(tmp_path / "kernels") in message


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "damage", ["torn code", "no code", "code is a folder", "torn report", "empty report", "entry is a file"]
)
def test_a_damaged_entry_is_replaced_with_one_warning_at_most(provider, tmp_path, caplog, damage):
    with override(cache_dir=tmp_path), caplog.at_level(logging.WARNING):
        provider.compile(field_add_source())
        (code,) = tmp_path.rglob("code")
        entry = code.parent
        if damage == "torn code":
            code.write_bytes(code.read_bytes()[:-7])
        elif damage == "no code":
            code.unlink()
        elif damage == "code is a folder":
            code.unlink()
            code.mkdir()
        elif damage == "torn report":
            (entry / "report.json").write_text((entry / "report.json").read_text()[:40])
        elif damage == "empty report":
            (entry / "report.json").write_text("{}")
        else:
            for path in entry.iterdir():
                path.unlink()
            entry.rmdir()
            entry.write_text("not a folder")
        again = provider.compile(field_add_source())
        assert not again.from_cache
        assert doubled(provider, again) == [0, 2, 4, 6, 8]
        assert provider.compile(field_add_source()).from_cache
    assert len(warnings_of(caplog)) == (0 if damage == "no code" else 1)


COMPILES = """
import sys, time
from pathlib import Path
import numpy as np
from accelerant.algebra.field.program import field_add_source
from accelerant.runtime import registry
from accelerant.runtime.compilation.cache import KernelCache
from accelerant.testing import FakeProvider

name, folder, own = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
put = KernelCache._put

def put_together(self, temporary, key):
    (folder / own).touch()  # compiled, written, about to be renamed
    deadline = time.monotonic() + 200
    while len(list(folder.glob("process-*"))) < 2:
        assert time.monotonic() < deadline, "the other process did not come"
        time.sleep(0.002)
    put(self, temporary, key)

KernelCache._put = put_together
if name == "fake":
    registry.register(FakeProvider)
provider = registry.create(name)
kernel = provider.compile(field_add_source())
x = provider.copy_to_device(np.array([5, 6], np.uint64))
provider.launch(kernel, (1,), (32,), (x, x, x, 2))
print(kernel.from_cache, provider.copy_to_host(x, np.uint64, (2,)).tolist())
"""


@pytest.mark.slow
@pytest.mark.sample(2)  # the cache is the same for every backend
def test_two_processes_compile_the_same_kernel_at_once(provider, tmp_path):
    """Both have compiled it, and written it under a temporary name, before either puts it in its place."""
    environment = {**os.environ, "ACCELERANT_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", COMPILES, provider.name, str(tmp_path), f"process-{i}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for i in range(2)
    ]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.split() == ["False", "[10,", "12]"]
        assert "kernel cache" not in err
    (entry,) = (tmp_path / "cache" / "kernels").iterdir()
    assert sorted(path.name for path in entry.iterdir()) == ["code", "report.json"]
    with override(cache_dir=tmp_path / "cache"):
        assert provider.compile(field_add_source()).from_cache


def test_an_entry_that_another_process_put_first_stays(tmp_path):
    """Others may be reading it: it is not taken away and put again."""
    cache, binary, key = KernelCache(tmp_path), Binary(b"code", {}, {}), kernel_key(name="k")

    def build():
        other, _ = cache.get_or_build(key, lambda: binary)
        return other

    placed = []
    cache.get_or_build(key, lambda: (build(), placed.append((tmp_path / key).stat().st_ino))[0])
    assert [(tmp_path / key).stat().st_ino] == placed
    assert [path.name for path in tmp_path.iterdir()] == [key]


def test_what_a_dead_process_left_is_removed_when_it_is_old(provider, tmp_path):
    kernels = tmp_path / "kernels"
    for name, age_s in ((".new-dead", 7200), (".new-alive", 1)):
        (kernels / name).mkdir(parents=True)
        (kernels / name / "code").write_bytes(b"half")
        written = (kernels / name).stat().st_mtime - age_s
        os.utime(kernels / name, (written, written))
    with override(cache_dir=tmp_path):
        provider.compile(field_add_source())
    assert [path.name for path in kernels.glob(".new-*")] == [".new-alive"]


# --- kernels ---------------------------------------------------------------------------------------------------------
_TWO_PORTABLE = """
ACL_KERNEL void one(ACL_GLOBAL u64 *x, i64 n) { if (acl_global_id() < n) x[acl_global_id()] = 1; }
ACL_KERNEL void two(ACL_GLOBAL u64 *x, i64 n) { if (acl_global_id() < n) x[acl_global_id()] = 2; }
"""
_TWO_WGSL = """
@group(0) @binding(0) var<storage, read_write> x: array<vec2<u32>>;
@group(0) @binding(1) var<uniform> n: i32;
@compute @workgroup_size(1) fn one(@builtin(global_invocation_id) id: vec3<u32>) { x[id.x] = vec2<u32>(1u, 0u); }
@compute @workgroup_size(1) fn two(@builtin(global_invocation_id) id: vec3<u32>) { x[id.x] = vec2<u32>(2u, 0u); }
"""
_ONE_LLVM = "define void @{}(i64 %begin, i64 %end, ptr %x, i64 %n) {{\n  store i64 {}, ptr %x\n  ret void\n}}\n"


def of_two(*entries):
    """A program of two kernels, declared with some of its entries."""
    texts = {
        "portable": _TWO_PORTABLE,
        "wgsl": _TWO_WGSL,
        "llvm": _ONE_LLVM.format("one", 1) + _ONE_LLVM.format("two", 2),
    }
    return KernelSource("two", texts, dict.fromkeys(entries, ("*u64", "i64")))


def test_a_program_that_is_declared_with_another_entry_is_another_kernel(provider, tmp_path):
    both = of_two("one", "two")
    with override(cache_dir=tmp_path):
        for source, entry, value in ((of_two("one"), "one", 1), (of_two("two"), "two", 2), (both, "one", 1)):
            kernel = provider.compile(source, entry=entry)
            assert not kernel.from_cache
            assert value_of(provider, kernel) == value
        other = provider.compile(both, entry="two")
        assert other.from_cache
        assert [value_of(provider, each) for each in (kernel, other)] == [1, 2]


def value_of(provider, kernel):
    """What a kernel of `of_two` writes."""
    x = provider.copy_to_device(np.zeros(1, np.uint64))
    provider.launch(kernel, (1,), (1,), (x, 1))
    return provider.copy_to_host(x, np.uint64, (1,)).item()


_OPTION = {"cuda": "--ptxas-options=-O1"} | dict.fromkeys(("opencl", "webgpu", "cpu", "fake"), "-DUNUSED=1")


@pytest.mark.sample(3)
@pytest.mark.parametrize("part", ["program", "options", "entries"])
def test_a_kernel_that_differs_in_one_part_has_an_entry_of_its_own(provider, tmp_path, part):
    plain, both = of_two("one"), of_two("one", "two")
    if part == "options":  # LLVM IR takes none
        plain = replace(plain, dialects={"portable": _TWO_PORTABLE, "wgsl": _TWO_WGSL})
    other = {
        "program": replace(plain, dialects={name: text + "\n\n" for name, text in plain.dialects.items()}),
        "options": replace(plain, options=(_OPTION[provider.name],)),
        "entries": both,
    }[part]
    with override(cache_dir=tmp_path):
        for count, source in enumerate((plain, other), 1):
            assert not provider.compile(source, entry="one").from_cache
            assert len(list(tmp_path.rglob("code"))) == count
        assert provider.compile(plain).from_cache
        assert provider.compile(other, entry="one").from_cache


def test_another_compiler_finds_no_entry_of_this_one(provider, tmp_path, monkeypatch):
    with override(cache_dir=tmp_path):
        provider.compile(of_two("one"))
        if provider.name in ("opencl", "webgpu"):
            monkeypatch.setattr(provider._devices[0], "identity", "another driver")
        else:
            version = "compilation.cuda._nvrtc_version" if provider.name == "cuda" else "providers.cpu._llvm_version"
            monkeypatch.setattr(f"accelerant.runtime.{version}", lambda: "another version")
        assert not provider.compile(of_two("one")).from_cache


@pytest.mark.parametrize("kind", ["i128", "f16", "", "u32*"])
def test_an_argument_type_that_is_unknown_is_refused(provider, kind):
    source = KernelSource("two", of_two("one").dialects, {"one": ("*u64", kind)})
    with pytest.raises(CompileError, match=f"'one', argument 1: unknown argument type '{re.escape(kind)}'"):
        provider.compile(source)


def test_buffers_that_die_inside_a_compile_or_an_allocation_do_not_block_it(provider, tmp_path):
    """As they do when the garbage collector runs there: here one dies at each call of a function in between."""
    held = [provider.allocate(8) for _ in range(500)]
    done = []

    def drop_one(frame, event, arg):
        if held and any(part in frame.f_code.co_filename for part in ("providers", "llvmlite", "pyopencl")):
            held.pop()

    def work():
        with override(cache_dir=tmp_path):
            sys.setprofile(drop_one)
            try:
                done.append(provider.allocate(8))
                done.append(provider.compile(field_add_source()))
            finally:
                sys.setprofile(None)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert len(done) == 2
    assert len(held) < 500
