"""What only the CPU provider does; what every provider does stands in tests/conformance."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from accelerant.algebra.field.op import source
from accelerant.config import override
from accelerant.errors import LaunchError, OutOfMemory
from accelerant.runtime import memory, registry

MIB = 1 << 20


@pytest.fixture
def cpu():
    return registry.create("cpu")


def test_a_launch_uses_every_core(cpu, monkeypatch):
    """The range is split evenly, whatever the number of cores."""
    kernel = cpu.compile(source())
    seen = []
    monkeypatch.setattr(cpu, "cores", 3)
    kernel.handle = lambda begin, end, *_: seen.append((begin, end))
    x = cpu.allocate(8)
    cpu.launch(kernel, (1000,), (256,), (x, x, x, 256_000))
    assert sorted(seen) == [(0, 85333), (85333, 170666), (170666, 256000)]


def test_the_kernel_is_vectorised(cpu):
    """A packed comparison or a 256-bit register shows in the machine code where the processor has AVX2."""
    import llvmlite.binding as llvm

    if not llvm.get_host_cpu_features().get("avx2"):
        pytest.skip("this processor has no AVX2")
    target = cpu._machine()
    module = llvm.parse_assembly(source().dialects["llvm"].build("native"))
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = True
    builder = llvm.create_pass_builder(target, options)
    builder.getModulePassManager().run(module, builder)
    assert "vpaddq" in target.emit_assembly(module)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_launches_work_after_a_fork(cpu):
    kernel = cpu.compile(source())
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
    monkeypatch.setattr(memory, "_ceilings", {})
    total = registry.choose("cpu").memory_bytes
    part = 16 * MIB / total
    monkeypatch.setattr(registry, "_created", {})
    with override(memory_fraction=part):
        cpu = registry.create("cpu")
    cpu.allocate(8 * MIB).free()
    with pytest.raises(OutOfMemory, match=f"{32 * MIB:,} bytes asked on cpu:0; 0 are held and the limit is 16,7"):
        cpu.allocate(32 * MIB)


def test_tensors_of_another_device_are_refused(cpu):
    kernel = cpu.compile(source())
    x = cpu.allocate(8)
    with pytest.raises(LaunchError, match="argument 1: the tensor is on meta, not on the cpu"):
        cpu.launch(kernel, (1,), (1,), (x, torch.empty(1, device="meta"), x, 1))
