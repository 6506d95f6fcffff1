"""One call of an Accelerator shared by several devices: the plan, equal results, failures, and two GPUs."""

import threading
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from accelerant import Accelerator, AcceleratorConfig, ledger, zk
from accelerant.accelerator import facade
from accelerant.accelerator.batch import devices_worth_using, run_on_devices, split_along_rows, work_s
from accelerant.accelerator.methods import METHODS
from accelerant.config import settings
from accelerant.errors import ConfigError, FallbackWarning, LaunchError, ShapeError
from accelerant.runtime import registry
from accelerant.runtime.provider import ComputeDevice
from refusals import assert_raises

CPUS = [torch.device("cpu")] * 3


@pytest.fixture
def acc(monkeypatch):
    """An Accelerator whose calls, of any size, are shared by three devices, which are the CPU."""
    monkeypatch.setattr(facade, "devices_worth_using", lambda seconds, size, rows, most, on_host: min(rows, most))
    with Accelerator("cpu") as acc:
        acc._devices = CPUS
        yield acc


def _multiples(count):
    group = zk.curve("bn254_g1")
    return group.mul(group.generator, list(range(1, count + 1)))


CALLS = {
    "gelu": lambda: (torch.randn(7, 8),),
    "softmax": lambda: (np.random.default_rng(0).standard_normal((7, 8)),),
    "layer_norm": lambda: (torch.randn(7, 8), torch.randn(8)),
    "quantize_int8": lambda: (torch.randn(7, 8),),
    "add_rms_norm": lambda: (torch.randn(7, 8), torch.randn(7, 8)),
    "attention": lambda: torch.randn(3, 2, 5, 6, 8).unbind(),
    "conv2d": lambda: (torch.randn(4, 2, 5, 5), torch.randn(3, 2, 3, 3)),
    "ntt": lambda: (np.arange(40, dtype=np.uint64).reshape(5, 8),),
    "field_mul": lambda: ([1, 2, 3], [5, 6, 7]),
    "msm": lambda: ([5, 6, 7, 8], _multiples(4)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_shared_call_gives_what_one_device_gives(acc, name, monkeypatch):
    arrays, run, threads = CALLS[name](), METHODS[name].run, set()

    def recorded(*tensors, **options):
        threads.add(threading.get_ident())
        assert settings().fallback == acc._policy
        assert not torch.is_grad_enabled()
        return run(*tensors, **options)

    with Accelerator("cpu") as alone:
        wanted = getattr(alone, name)(*arrays)
    monkeypatch.setitem(METHODS, name, replace(METHODS[name], run=recorded))
    answer = getattr(acc, name)(*arrays)
    assert threading.get_ident() not in threads
    for y, z in zip(*(v if isinstance(v, tuple) else (v,) for v in (answer, wanted)), strict=True):
        assert type(y) is type(z)
        torch.testing.assert_close(torch.as_tensor(y), torch.as_tensor(z))
    assert acc.metrics()[name]["calls"] == 1


def test_calls_that_cannot_be_divided_run_on_one_device(acc):
    x = torch.randn(4, 4)
    torch.testing.assert_close(acc.softmax(x, 0), x.softmax(0))
    torch.testing.assert_close(acc.matmul(x, x), x @ x)
    assert_raises(ShapeError, None, lambda: acc.layer_norm(x, x[:, 0, None]))


@pytest.mark.parametrize("policy", ["warn", "forbid"])
def test_a_failure_on_another_device_falls_back_to_one(acc, policy, monkeypatch):
    run = METHODS["gelu"].run

    def failing(x, **options):
        if threading.current_thread().name.startswith("accelerant-split"):
            raise LaunchError("refused")
        return run(x, **options)

    monkeypatch.setitem(METHODS, "gelu", replace(METHODS["gelu"], run=failing))
    acc._policy = policy
    x = torch.randn(6, 2)
    if policy == "forbid":
        assert_raises(LaunchError, "refused", acc.gelu, x)
    else:
        with pytest.warns(FallbackWarning, match="gelu: 3 devices is not used, cpu:0 is. LaunchError: refused"):
            torch.testing.assert_close(acc.gelu(x), torch.nn.functional.gelu(x))


def test_the_plan_weighs_work_against_copies():
    plan = devices_worth_using
    assert plan(1.0, 1 << 20, 64, 8, on_host=False) == 8
    assert plan(1.0, 1 << 20, 3, 8, on_host=False) == 3
    assert plan(1e-5, 1 << 20, 64, 8, on_host=False) == 1  # not worth a thread
    assert plan(1e-2, 1 << 33, 64, 8, on_host=False) == 1  # copies between GPUs take longer than the work
    assert plan(1e-2, 1 << 33, 64, 4, on_host=True) == 4  # each device has its own link to the host
    assert plan(1.0, 0, 0, 4, on_host=True) == 1
    q = torch.empty(8, 16, 8192, 128, device="meta", dtype=torch.bfloat16)
    assert plan(work_s("attention", (q, q, q), {}), 4 * q.nbytes, 128, 2, on_host=False) == 2
    x = torch.empty(1 << 15, 1 << 15, device="meta")
    assert plan(work_s("gelu", (x,), {}), 2 * x.nbytes, 1 << 15, 2, on_host=False) == 1
    assert plan(work_s("gelu", (x,), {}), 2 * x.nbytes, 1 << 15, 2, on_host=True) == 2


def test_uneven_parts_are_joined_in_order():
    x = torch.arange(10.0).reshape(10, 1)
    cut = split_along_rows("relu", (x,), {})
    assert torch.equal(run_on_devices("relu", cut, {}, CPUS), x)
    assert cut.rows == 10


def test_devices_are_checked():
    for value in (0, -1, True, 1.5, "some", []):
        with pytest.raises(ConfigError, match="devices must be a whole number of at least 1, or 'all'"):
            AcceleratorConfig(devices=value)
    with pytest.raises(ConfigError, match="devices must be at most 1 here, got 2"):
        Accelerator("cpu", config=AcceleratorConfig(devices=2))
    with pytest.raises(ConfigError, match=r"devices must be cpu:0 and other GPUs of its kind, got \('opencl',\)"):
        Accelerator("cpu", config=AcceleratorConfig(devices=["opencl"]))
    assert Accelerator("cpu", config=AcceleratorConfig(devices=["cpu:0", None])).config.devices == ("cpu:0", None)
    with Accelerator("cpu", config=AcceleratorConfig(devices="all")) as acc:
        assert acc._devices == [torch.device("cpu")]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            acc.relu([1.0])


def test_devices_are_a_number_or_named(monkeypatch):
    gpus = [ComputeDevice("cuda", i, "", torch_type="cuda") for i in range(3)]
    monkeypatch.setattr(registry, "devices", lambda: gpus)
    monkeypatch.setattr(registry, "find_devices", lambda names: [gpus[int(name[-1])] for name in names])

    def shared(devices):
        config = AcceleratorConfig(devices=devices)
        own = SimpleNamespace(config=config, device=gpus[1], _torch_device=torch.device("cuda:1"))
        return [device.index for device in Accelerator._shared_devices(own)]

    assert shared(None) == shared(1) == shared(["cuda:1"]) == [1]
    assert shared("all") == shared(3) == shared(("cuda:0", "cuda:1", "cuda:2", "cuda:2")) == [1, 0, 2]
    assert shared(["cuda:2", "cuda:1"]) == [1, 2]
    assert_raises(ConfigError, "devices must be cuda:1 and other GPUs of its kind", shared, ["cuda:0", "cuda:2"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["attention", "gelu", "ntt", "msm"])
def test_two_gpus_share_a_call(name):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    arrays = {
        "attention": torch.randn(3, 2, 16, 16384, 128, device="cuda", dtype=torch.bfloat16).unbind(),
        "gelu": (np.random.default_rng(0).standard_normal((1 << 14, 1 << 14)).astype(np.float32),),
        "ntt": (torch.arange(64 << 18, device="cuda").view(torch.uint64).reshape(64, -1),),
        "msm": (list(range(1 << 15)), _multiples(1 << 15)),
    }[name]
    with Accelerator("cuda") as alone:
        wanted = getattr(alone, name)(*arrays)
    with Accelerator("cuda", config=AcceleratorConfig(devices=2, fallback="forbid")) as acc:
        answer = getattr(acc, name)(*arrays)
    torch.testing.assert_close(torch.as_tensor(answer), torch.as_tensor(wanted))
    if name in ("attention", "gelu"):
        devices = {row["device"] for row in ledger().to_dict()["ops"] if row["op"].startswith(name)}
        assert {"cuda:0", "cuda:1"} <= devices
