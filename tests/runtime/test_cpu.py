"""What only the CPU provider does; what every provider does stands in tests/conformance."""

import gc
import os
import threading
import time
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from accelerant.algebra.field.program import field_add_source
from accelerant.config import override
from accelerant.errors import CompileError, LaunchError, OutOfMemory
from accelerant.runtime import host, provider, registry
from accelerant.runtime.compilation.cache import KernelCache
from accelerant.runtime.compilation.kernel import KernelSource
from accelerant.runtime.providers import cpu as module

MIB = 1 << 20


@pytest.fixture
def cpu():
    return registry.create("cpu")


def test_a_launch_uses_every_core(cpu, monkeypatch):
    """The range is split evenly, whatever the number of cores."""
    kernel = cpu.compile(field_add_source())
    seen = []
    monkeypatch.setattr(cpu, "cores", 3)
    kernel.handle = lambda begin, end, *_: seen.append((begin, end))
    x = cpu.allocate(8)
    cpu.launch(kernel, (1000,), (256,), (x, x, x, 256_000))
    assert sorted(seen) == [(0, 85333), (85333, 170666), (170666, 256000)]


class _Heavy:
    """A builder whose indices are much work."""

    key = "define void @heavy(i64 %begin, i64 %end) {\n ret void\n}"

    def __init__(self, least_share):
        self.least_share = least_share

    def build(self, target):
        return self.key


@pytest.mark.parametrize(("least", "total", "parts"), [(1, 3, 3), (1, 2, 2), (4, 7, 1), (4, 8, 2), (4, 99, 3)])
def test_a_kernel_says_how_few_indices_another_thread_is_worth(cpu, monkeypatch, least, total, parts):
    kernel = cpu.compile(KernelSource("heavy", {"llvm": _Heavy(least)}, {"heavy": ()}))
    monkeypatch.setattr(cpu, "cores", 3)
    seen = []
    kernel.handle = lambda begin, end: seen.append((begin, end))
    cpu.launch(kernel, (total,), (1,), ())
    assert sorted(seen) == [(total * i // parts, total * (i + 1) // parts) for i in range(parts)]


@pytest.mark.parametrize("where", ["before", "after"])
def test_an_exception_waits_for_the_other_cores(cpu, monkeypatch, where):
    """They write to memory that the caller frees once launch has raised."""
    kernel = cpu.compile(KernelSource("heavy", {"llvm": _Heavy(1)}, {"heavy": ()}))
    monkeypatch.setattr(cpu, "cores", 3)
    begun, done = threading.Event(), []

    class Interrupt(BaseException):
        pass

    def handle(begin, end):
        if begin == 0:
            assert begun.wait(60)
            raise Interrupt
        begun.set()
        time.sleep(0.1)
        done.append(begin)

    def interrupted(futures, real=module.wait):
        if not refused:
            refused.append(True)
            raise Interrupt
        return real(futures)

    refused = [True] * (where == "before")
    kernel.handle = handle
    monkeypatch.setattr(module, "wait", interrupted)
    with pytest.raises(Interrupt):
        cpu.launch(kernel, (3,), (1,), ())
    assert sorted(done) == [1, 2]


def test_the_share_is_read_again_from_a_cached_program(cpu):
    """It is no part of the code: two builders of one program may differ in it."""
    kernels = [cpu.compile(KernelSource("heavy", {"llvm": _Heavy(least)}, {"heavy": ()})) for least in (1, 50)]
    assert [kernel.metadata["least_share"] for kernel in kernels] == [1, 50]


def test_the_kernel_is_vectorised(cpu):
    """A packed comparison or a 256-bit register shows in the machine code where the processor has AVX2."""
    import llvmlite.binding as llvm

    if not llvm.get_host_cpu_features().get("avx2"):
        pytest.skip("this processor has no AVX2")
    target = cpu._machine()
    module = llvm.parse_assembly(field_add_source().dialects["llvm"].build("native"))
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = True
    builder = llvm.create_pass_builder(target, options)
    builder.getModulePassManager().run(module, builder)
    assert "vpaddq" in target.emit_assembly(module)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_launches_work_after_a_fork(cpu):
    kernel = cpu.compile(field_add_source())
    x = cpu.copy_to_device(np.ones(1 << 17, np.uint64))
    cpu.launch(kernel, (512,), (256,), (x, x, x, 1 << 17))
    child = os.fork()
    if child == 0:
        cpu.launch(kernel, (512,), (256,), (x, x, x, 1 << 17))
        good = (cpu.copy_to_host(x, np.uint64, (1 << 17,)) == 4).all()
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (cpu.copy_to_host(x, np.uint64, (1 << 17,)) == 2).all()


def test_the_memory_fraction_of_the_settings_holds_from_the_start(monkeypatch):
    monkeypatch.setattr(registry, "_created", {})
    monkeypatch.setattr(provider, "allocation_limits", {})
    total = registry.find_device("cpu").memory_bytes
    part = 16 * MIB / total
    monkeypatch.setattr(registry, "_created", {})
    with override(memory_fraction=part):
        cpu = registry.create("cpu")
    cpu.allocate(8 * MIB).free()
    with pytest.raises(OutOfMemory, match=f"{32 * MIB:,} bytes asked on cpu:0; 0 are held and the limit is 16,7"):
        cpu.allocate(32 * MIB)


def test_tensors_of_another_device_are_refused(cpu):
    kernel = cpu.compile(field_add_source())
    x = cpu.allocate(8)
    with pytest.raises(LaunchError, match="argument 1: the tensor is on meta, not on the cpu"):
        cpu.launch(kernel, (1,), (1,), (x, torch.empty(1, device="meta"), x, 1))


@pytest.mark.parametrize("owner", [lambda cpu: cpu, lambda cpu: cpu._counter])
def test_a_buffer_may_die_in_a_thread_that_holds_a_lock(cpu, owner):
    """The garbage collector runs where it likes, also inside a compile."""
    held = [cpu.allocate(64)]

    def work():
        with owner(cpu)._lock:
            held.clear()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()


def test_the_code_lives_as_long_as_its_kernel(cpu):
    kernel = cpu.compile(field_add_source())
    library = weakref.ref(kernel.handle.library)
    gc.collect()
    x = cpu.copy_to_device(np.ones(4, np.uint64))
    cpu.launch(kernel, (1,), (4,), (x, x, x, 4))
    assert cpu.copy_to_host(x, np.uint64, (4,)).tolist() == [2] * 4
    del kernel
    gc.collect()
    assert library() is None


def test_entries_of_one_name_are_their_own(cpu):
    """All code is in one linker; each kernel is a library there."""
    x = cpu.allocate(8)

    def store(value):
        body = f"store i64 {value}, ptr %x, align 8\n ret void"
        text = f"define void @store(i64 %begin, i64 %end, ptr %x) {{\n {body}\n}}"
        return cpu.compile(KernelSource("store", {"llvm": text}, {"store": ("*u64",)}))

    for kernel, value in [(store(value), value) for value in (3, 5, 7)]:
        cpu.launch(kernel, (1,), (1,), (x,))
        assert cpu.copy_to_host(x, np.uint64, (1,)).tolist() == [value]


def test_an_entry_that_is_not_in_the_code_is_a_compile_error(cpu):
    text = "define void @there(i64 %begin, i64 %end) {\n ret void\n}"
    with pytest.raises(CompileError, match="no entry 'elsewhere'"):
        cpu.compile(KernelSource("k", {"llvm": text}, {"elsewhere": ()}))


@pytest.mark.parametrize(("text", "expected"), [("max 100000", 8), ("350000 100000", 3), ("5000 100000", 1), ("", 8)])
def test_the_threads_keep_to_the_quota_of_the_control_group(monkeypatch, tmp_path, text, expected):
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(host, "_CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert host.usable_cores() == expected
    assert module.CpuProvider().cores == expected


def test_the_key_holds_what_the_code_depends_on(cpu, monkeypatch):
    cpu._machine()
    text = "define void @k(i64 %begin, i64 %end) {\n ret void\n}"

    def key(text=text, options=(), entries=("k",)):
        made = KernelSource("k", {"llvm": text}, dict.fromkeys(entries, ()), options=options)
        return cpu.key_of(made)

    keys = [key(), key(text + "\n"), key(options=("-x",)), key(entries=("l",)), key(entries=("k", "l"))]
    for name, value in (("_cpu", "abacus"), ("_features", "+beads"), ("_target", None)):
        with monkeypatch.context() as patch:
            patch.setattr(cpu, name, value if value else type("Target", (), {"triple": "abacus-none"}))
            keys.append(key())
    for name, changed in (("_LEVEL", 1), ("_PASSES", ()), ("_llvm_version", lambda: "LLVM 99")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, changed)
            keys.append(key())
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]


@dataclass(frozen=True)
class Written:
    """A builder whose text calls a function that is to be inlined."""

    written_out: bool = True

    @property
    def key(self):
        return "written"

    def build(self, target):
        return (
            "define internal i64 @twice(i64 %x) alwaysinline {\n %y = add i64 %x, %x\n ret i64 %y\n}\n"
            "define void @k(i64 %begin, i64 %end, ptr %x) {\n"
            " %place = alloca i64\n %a = load i64, ptr %x\n store i64 %a, ptr %place\n"
            " %b = load i64, ptr %place\n %c = call i64 @twice(i64 %b)\n store i64 %c, ptr %x\n ret void\n}\n"
        )


@pytest.mark.parametrize("few", [True, False])
def test_programs_that_are_written_out_get_few_passes(cpu, monkeypatch, few):
    source = KernelSource("k", {"llvm": Written(few)}, {"k": ("*u64",)})
    x = cpu.copy_to_device(np.array([21], np.uint64))
    cpu.launch(cpu.compile(source), (1,), (1,), (x,))
    assert cpu.copy_to_host(x, np.uint64, (1,)).tolist() == [42]
    keys = {cpu.key_of(KernelSource("k", {"llvm": Written(each)}, {"k": ("*u64",)})) for each in (True, False)}
    assert len(keys) == 2
    monkeypatch.setattr(module, "_FEW_PASSES", (*module._FEW_PASSES, "such_as_llvmlite_has_not"))
    assert not module._has_few(Written())


def test_a_kernel_that_another_process_compiles_is_waited_for(cpu):
    asked = []
    cpu.wait_for = asked.append
    made = field_add_source()
    cpu.compile(made)
    assert asked == [cpu.key_of(made)]
    assert KernelCache().has(asked[0])
    assert not KernelCache().has("0" * 64)


def test_a_cache_that_cannot_be_read_has_nothing(tmp_path):
    assert not KernelCache(tmp_path / ("x" * 300)).has("0" * 64)


def test_a_range_that_would_wrap_around_is_refused(cpu):
    kernel = cpu.compile(field_add_source())
    x = cpu.copy_to_device(np.ones(4, np.uint64))
    with pytest.raises(
        LaunchError, match="fewer than 9,223,372,036,854,775,808 indices, got 36,893,488,147,419,103,232"
    ):
        cpu.launch(kernel, (2**31, 2**31), (8,), (x, x, x, 4))
