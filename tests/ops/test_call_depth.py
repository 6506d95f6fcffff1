"""The Python calls and files of ours that a warm layer_norm enters, on the path of a CUDA tensor and on a CPU."""

import ctypes
import importlib
import sys
import threading
from pathlib import Path

import pytest
import torch

import accelerant
from accelerant import ops
from accelerant.ops import _differentiable, norm
from accelerant.ops._launch import Repeats
from accelerant.runtime.compilation.triton import recorders
from accelerant.runtime.providers import cuda_launch

gelu = importlib.import_module("accelerant.ops.gelu")
linear_gelu = importlib.import_module("accelerant.ops.linear_gelu")

PACKAGE = str(Path(accelerant.__file__).parent)
MOST_CALLS, MOST_FILES = 12, 5


def entered(run):
    """The code objects of ours that a call enters."""
    codes = []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            codes.append(frame.f_code)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return codes


def check(run, most=MOST_CALLS, most_files=MOST_FILES):
    for _ in range(5):  # the second to fourth calls are timed
        run()
    codes = entered(run)
    names = [f"{Path(code.co_filename).name}:{code.co_name}" for code in codes]
    assert 0 < len(names) <= most, (len(names), names)
    assert len({code.co_filename for code in codes}) <= most_files, names


@pytest.fixture
def on_a_device(interpreted, monkeypatch):
    """Launch as on a GPU, with a driver that does nothing; yields the pointers of each launch."""
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is for Linux and Windows")
    started = []
    monkeypatch.setattr(_differentiable, "_TENSORS", frozenset())  # no CPU fast path
    kernel = cuda_launch.LoadedKernel("norm_fwd", 7, ())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    thread = threading.local()
    thread.ready = True
    monkeypatch.setattr(cuda_launch, "_thread", thread)

    class Kernel:
        def launch(self, grid, args, constants, **options):
            pointers = [arg.data_ptr() for arg in args if isinstance(arg, torch.Tensor)]
            values = [ctypes.c_void_p() for _ in pointers]
            prepared = cuda_launch.PreparedLaunch(kernel, (1,) * 7, values, 0, "", range(len(pointers)))

            def note(*arguments):
                cells = (ctypes.c_void_p * len(pointers)).from_address(arguments[-2])
                started.append(tuple(ctypes.c_uint64.from_address(cell).value for cell in cells))
                return (0,)

            prepared._launch = note
            prepared.start(pointers)
            return prepared

    monkeypatch.setattr(norm, "KERNELS", {"fwd": Kernel(), "bwd": Kernel()})
    for each in (gelu.forward_kernel, gelu.backward_kernel):
        monkeypatch.setattr(each, "launch", Kernel().launch)
        monkeypatch.setattr(each, "known", {})
        each.plan.plans.add_dependent(each.known)
    norm._LAUNCHES.clear()
    yield started
    norm._LAUNCHES.clear()


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_layer_norm_on_a_device_crosses_few_calls_and_files(on_a_device, grad):
    x, weight, bias = torch.randn(4, 8, requires_grad=grad), torch.randn(8), torch.randn(8)
    check(lambda: ops.layer_norm(x, weight, bias))
    assert len(on_a_device) == 6
    assert all(values[0] == x.data_ptr() for values in on_a_device)


def test_gelu_on_a_device_crosses_few_calls_and_files(on_a_device):
    x = torch.randn(4, 8).requires_grad_()
    check(lambda: ops.gelu(x), 13, 6)
    y, dy = ops.gelu(x), torch.randn(4, 8)
    check(lambda: torch.autograd.grad(y, x, dy, retain_graph=True))
    assert on_a_device[-1][:2] == (dy.data_ptr(), x.data_ptr())


def test_the_backward_pass_of_linear_gelu_on_a_device_repeats_its_launches(on_a_device, monkeypatch):
    launched = []

    def launch(grid, args, constants, **options):
        prepared = gelu.forward_kernel.launch(grid, args, constants)
        pointers = tuple(arg.data_ptr() for arg in args if isinstance(arg, torch.Tensor))
        launched.append(pointers)
        recorders.get(threading.get_ident(), []).append((prepared, pointers))

    for name in ("bwd", "join"):
        monkeypatch.setattr(linear_gelu.KERNELS[name], "launch", launch)
    monkeypatch.setattr(linear_gelu, "_BACKWARD", Repeats())

    def run(M=256, bias=True, dy_dtype=torch.float32):
        dy, z = torch.randn(M, 32).to(dy_dtype), torch.randn(M, 32)
        kept.append((dy, z, *linear_gelu.launch_dz(dy, z, "none", torch.float32 if bias else None)))
        return len(launched), len(on_a_device)

    kept = []
    assert run() == (2, 2)
    assert run() == (2, 4)  # launched again, on these pointers
    dy, z, dz, _, sums = kept[-1]
    partial, total = on_a_device[-1]
    assert on_a_device[-2] == (dy.data_ptr(), z.data_ptr(), dz.data_ptr(), partial)
    assert total == sums.data_ptr()
    assert run(bias=False) == (3, 5)
    assert run(M=512) == (5, 7)
    assert run(dy_dtype=torch.bfloat16) == (7, 9)
    codes = entered(run)
    assert len(codes) <= 9, [code.co_name for code in codes]


def test_an_elementwise_launch_is_repeated_only_for_what_differs_in_its_pointers_alone(on_a_device):
    def kept(x, **options):
        ops.gelu(x, **options)
        return len(gelu.forward_kernel.known)

    x = torch.randn(64, 8)
    assert kept(x) == kept(x.clone()) == kept(x.t()) == kept(x.view(-1)) == 1
    assert kept(x, approximate="tanh") == 2
    assert kept(x[:4]) == 3
    assert kept(x.bfloat16()) == 4
    assert kept(torch.randn(65, 8).view(-1)[3:-5].view(64, 8)) == 4  # another alignment
    assert len(on_a_device) == 8
    gelu.forward_kernel.plan.forget()
    assert not gelu.forward_kernel.known


def test_a_launch_is_repeated_only_for_what_differs_in_its_pointers_alone(on_a_device):
    weight, bias = torch.randn(8), torch.randn(8)

    def kept(x, **options):
        ops.layer_norm(x, weight, bias, **options)
        return len(norm._LAUNCHES)

    x = torch.randn(64, 8)
    assert kept(x) == kept(x.clone()) == 1
    assert kept(x, eps=1e-3) == 2
    assert kept(x[:4]) == 3
    assert kept(torch.randn(65, 8).view(-1)[3:-5].view(64, 8)) == 4  # another alignment
    assert kept(torch.randn(64, 16)[:, :8]) == 5
    assert kept(x.t().contiguous().t()) == 5  # copied, so that its pointer is another in each call
    norm.TUNED["fwd", True, False].forget()
    assert not norm._LAUNCHES


@pytest.mark.parametrize(
    "x",
    [torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(8, 4).t(), torch.randn(4, 8)],
    ids=["bfloat16", "strided", "fast path"],
)
def test_layer_norm_on_a_cpu_crosses_few_calls_and_files(x, uninterpreted):
    weight = torch.randn(8, dtype=x.dtype)
    check(lambda: ops.layer_norm(x, weight, weight))
