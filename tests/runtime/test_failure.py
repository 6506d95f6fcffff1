"""What happens when a device fails: before a launch, in a launch, and for good."""

import importlib.util
import subprocess
import sys
import warnings

import pytest
import torch

from accelerant.config import override
from accelerant.errors import DeviceLost, FallbackWarning, LaunchError, OutOfMemory
from accelerant.nn import GPT, GPTConfig
from accelerant.ops.norm import TUNED as NORM_PLANS
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation, explain_quietly, operations
from accelerant.runtime.ledger import ledger
from accelerant.runtime.providers.cpu import CpuProvider
from accelerant.runtime.providers.cuda_launch import cuda_error
from refusals import assert_raises

CPU = torch.device("cpu")


def forget():
    for operation in operations().values():
        operation.forget()
    for plans in NORM_PLANS.values():
        plans.forget()  # and the launches that are repeated past TritonKernel.launch


@pytest.fixture
def device(monkeypatch):
    """A device on which our kernels run: the GPU, or the interpreter on the CPU."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton has no wheel for this system")
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    forget()
    ledger().reset()
    yield torch.device("cuda" if torch.cuda.is_available() else "cpu")
    forget()


def step(device):
    """A training step of a small GPT from a fixed start: its loss, gradients and updated parameters."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=32, context=8, layers=1, heads=1, width=16)).to(device)
    tokens = torch.arange(16, device=device).reshape(2, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model.loss(tokens, (tokens + 1) % 32)
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.step()
    return [loss.detach(), *gradients, *(parameter.detach() for parameter in model.parameters())]


def count_launches(monkeypatch, fail_at=None, error=None):
    """Count launches of our kernels; the one numbered fail_at raises before anything runs."""
    calls = [0]
    launch = TritonKernel.launch

    def counted(self, *args, **kwargs):
        calls[0] += 1
        if calls[0] == fail_at:
            raise error
        launch(self, *args, **kwargs)

    monkeypatch.setattr(TritonKernel, "launch", counted)
    return calls


@pytest.mark.slow
def test_a_launch_that_fails_anywhere_in_a_training_step_changes_nothing(device, monkeypatch):
    with monkeypatch.context() as patch:
        calls = count_launches(patch)
        expected = step(device)
    total = calls[0]
    assert total >= 11  # layer norms and a gelu, forward and backward, with the norms' second pass
    for n in range(1, total + 1):
        forget()
        ledger().reset()
        with monkeypatch.context() as patch:
            count_launches(patch, n, LaunchError(f"call {n} refused"))
            with pytest.warns(FallbackWarning, match=f"triton failed, .* ran instead. LaunchError: call {n} refused"):
                results = step(device)
        for result, right in zip(results, expected, strict=True):
            torch.testing.assert_close(result, right, rtol=1e-4, atol=1e-5)
        (fallback,) = ledger().to_dict()["fallbacks"]
        other = "triton-atomic" if fallback["op"] == "embedding_bwd" else "torch"
        assert (fallback["wanted"], fallback["ran"]) == ("triton", other)
        rows = [row for row in ledger().to_dict()["ops"] if row["op"] == fallback["op"]]
        by_other = sum(row["calls"] for row in rows if row["implementation"] == other)
        assert fallback["count"] == by_other  # the call that failed, and each later one of its case in the step


def test_with_fallback_off_the_step_raises_and_the_next_one_is_right(device, monkeypatch):
    expected = step(device)
    with monkeypatch.context() as patch, override(fallback="forbid"):
        count_launches(patch, 3, LaunchError("call 3 refused"))
        assert_raises(LaunchError, "call 3 refused", step, device)
    for result, right in zip(step(device), expected, strict=True):
        assert torch.equal(result, right)


def test_a_lost_device_is_never_worked_around(device, monkeypatch):
    count_launches(monkeypatch, 2, DeviceLost("kernel 'x': CUDA_ERROR_ILLEGAL_ADDRESS"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        assert_raises(DeviceLost, "ILLEGAL_ADDRESS", step, device)
    assert not ledger().to_dict()["fallbacks"]


def test_an_error_that_the_provider_calls_sticky_becomes_device_lost(monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    op = Operation("sticky_probe", (Implementation("a", broken), Implementation("b", print)), cost=lambda _: Cost(0, 0))
    case = Case(CPU, torch.float32, (1,))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        op(case)  # on the CPU such words mean nothing
    monkeypatch.setattr(CpuProvider, "lost", lambda self, error: cuda_error(str(error), "the device"))
    assert_raises(DeviceLost, "This process can no longer use the device", op, case)


@pytest.mark.parametrize(("text", "kind"), [
    ("CUDA_ERROR_ILLEGAL_ADDRESS", DeviceLost),
    ("CUDA error: an illegal memory access was encountered", DeviceLost),
    ("CUDA error: unspecified launch failure", DeviceLost),
    ("CUDA_ERROR_LAUNCH_FAILED", DeviceLost),
    ("CUDA error: an illegal instruction was encountered", DeviceLost),
    ("CUDA error: device-side assert triggered", DeviceLost),
    ("CUDA_ERROR_MISALIGNED_ADDRESS", DeviceLost),
    ("CUDA_ERROR_INVALID_VALUE", LaunchError),
    ("CUDA error: invalid configuration argument", LaunchError),
    ("", LaunchError),
    ("CUDA_ERROR_OUT_OF_MEMORY: ...", OutOfMemory),
    ("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: ...", LaunchError),
])  # fmt: skip
def test_sticky_errors_refused_launches_and_full_memory_are_told_apart(text, kind):
    assert type(cuda_error(text, "x")) is kind


def test_memory_that_runs_out_names_the_op_the_bytes_and_the_holders():
    def greedy():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...")

    held = torch.ones(3_000_000)
    op = Operation("greedy_probe", (Implementation("only", greedy),), cost=lambda _: Cost(0, 0))
    caught = assert_raises(OutOfMemory, None, lambda: op(Case(CPU, torch.float32, (1,))))
    text = str(caught)
    assert "greedy_probe" in text
    assert "20" in text
    assert "3000000" in text.replace(",", "").replace("_", "")
    assert isinstance(caught.__cause__, torch.OutOfMemoryError)
    del held
    assert explain_quietly(lambda: 1).result == 1  # and the process goes on


TRAP = """
import sys, torch
from accelerant import Accelerator, ops
from accelerant.errors import DeviceLost
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import KernelSource
provider = registry.create("cuda")
text = 'extern "C" __global__ void trap(int *x) { if (x != nullptr) asm("trap;"); }'
kernel = provider.compile(KernelSource("trap", {"cuda": text}, {"trap": ("*i32",)}))
x = provider.allocate(64)
y = torch.ones(8, device="cuda")
provider.launch(kernel, (1,), (1,), (x,))
lost = 0
for use in (provider.synchronize, lambda: ops.gelu(y), lambda: Accelerator("cuda").synchronize()):
    try:
        use()
    except DeviceLost as error:
        lost += "no longer use the device" in str(error)
z = Accelerator("cpu").field_add([1], [2])
sys.stdout.write(f"{lost} {z.tolist()}")
sys.stdout.flush()
import os; os._exit(0)
"""


@pytest.mark.gpu
def test_a_kernel_that_truly_traps_costs_its_process_the_device_and_no_other():
    worker = subprocess.run([sys.executable, "-c", TRAP], capture_output=True, text=True, timeout=120)
    assert worker.stdout == "3 [3]", worker.stderr
    fine = "import torch, accelerant as acl; print(acl.ops.gelu(torch.zeros(3, device='cuda')).tolist())"
    other = subprocess.run([sys.executable, "-c", fine], capture_output=True, text=True, timeout=120, check=True)
    assert other.stdout.strip() == "[0.0, 0.0, 0.0]"
    assert torch.nn.functional.gelu(torch.zeros(2)).tolist() == [0.0, 0.0]


@pytest.mark.gpu
def test_running_out_of_gpu_memory_is_told_and_survived():
    from accelerant import ops

    free, total = torch.cuda.mem_get_info()
    held = torch.empty(int(free * 0.7), dtype=torch.uint8, device="cuda")
    with override(fallback="forbid"), pytest.raises(OutOfMemory, match="gelu_fwd") as caught:
        ops.gelu(torch.empty(1, device="cuda").expand(int(free * 0.2)))
    assert "uint8" in str(caught.value)
    del held
    torch.cuda.empty_cache()
    assert ops.gelu(torch.zeros(3, device="cuda")).tolist() == [0.0, 0.0, 0.0]
    assert total > 0
