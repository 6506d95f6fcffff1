"""DeviceTensor: moves, views, autograd, copies of objects, and operations that run on the host."""

import copy
import io

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import accelerant as acl
from accelerant import errors
from accelerant.config import override
from accelerant.tensors import DeviceTensor
from refusals import assert_raises
from requirements import require_backend


@pytest.fixture(scope="module")
def device():
    return require_backend("webgpu")


def host_calls():
    return [row for row in acl.ledger().to_dict()["ops"] if row["implementation"] == "host"]


def test_a_tensor_as_text_list_number_and_array(device):
    x = acl.to(torch.tensor([[1.0, 2.5]]), device)
    assert repr(x) == f"tensor([[1.0000, 2.5000]], device='{device}:0')"
    assert x.tolist() == [[1.0, 2.5]]
    assert np.array_equal(np.asarray(x), [[1.0, 2.5]])
    assert (float(x[0, 1]), f"{x[0, 1]:.1f}", bool(x[0, 0] < 2)) == (2.5, "2.5", True)


def test_views_share_memory(device):
    host = torch.arange(24.0).reshape(2, 3, 4)
    moved = acl.to(host.clone(), device)
    for x in (host, moved):
        x.transpose(0, 2)[1:, :, 0].mul_(-1)
        x[:, 1].fill_(7)
        x.view(-1)[::5].add_(100)
    assert torch.equal(moved.cpu(), host)
    assert moved.transpose(0, 2).buffer is moved.buffer
    assert moved[1:].storage_offset() == 12
    assert [part.buffer is moved.buffer for part in moved.unbind(1)] == [True] * 3


def test_gradients_flow_through_moves_and_host_operands(device):
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2)
    (acl.to(x, device) @ w).square().sum().cpu().backward()
    expected = 2 * (x.detach() @ w) @ w.t()
    torch.testing.assert_close(x.grad, expected)
    assert not isinstance(x.grad, DeviceTensor)


def test_a_module_keeps_its_parameters_objects_and_shared_weights(device):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    parameters = [*model.parameters()]
    assert acl.to(model, device) is model
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert isinstance(model[0].weight, DeviceTensor)
    assert isinstance(model[0].weight, nn.Parameter)
    assert model[2].weight is model[0].weight
    assert isinstance(model[1].running_mean, DeviceTensor)
    acl.to(model, "cpu")
    assert type(model[0].weight) is nn.Parameter


def test_copies_and_files(device):
    model = acl.to(nn.Linear(3, 2), device)
    model(torch.ones(1, 3)).sum().backward()
    copied = copy.deepcopy(model)
    assert copied.weight.buffer is not model.weight.buffer
    assert torch.equal(copied.weight.grad.cpu(), model.weight.grad.cpu())
    with torch.no_grad():
        model.weight.zero_()
    assert copied.weight.cpu().abs().sum() > 0
    file = io.BytesIO()
    torch.save(copied.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    assert type(state["weight"]) is torch.Tensor
    model.load_state_dict(state)
    assert torch.equal(model.weight.cpu(), copied.weight.cpu())
    assert_raises(RuntimeError, "only leaf tensors", lambda: copy.deepcopy(model.weight * 2))


def test_the_host_runs_what_the_table_lacks_and_the_ledger_counts_it(device):
    acl.ledger().reset()
    x = acl.to(torch.tensor([[3.0, 1.0], [2.0, 5.0]]), device)
    with pytest.warns(errors.FallbackWarning, match=r"aten\.linalg_inv_ex.*runs it on the host"):
        inverse = torch.linalg.inv_ex(x).inverse
    assert isinstance(inverse, DeviceTensor)
    torch.testing.assert_close((inverse @ x).cpu(), torch.eye(2))
    (row,) = host_calls()
    assert (row["calls"], row["case"], row["bytes"]) == (1, "(2,2)", 16 + 16 + 4)
    assert any(entry["ran"] == "torch on the host" for entry in acl.ledger().to_dict()["fallbacks"])
    with override(fallback="forbid"), pytest.raises(errors.UnsupportedCase, match="no kernel for this call"):
        torch.linalg.inv_ex(x)


def test_an_operation_of_the_host_that_writes_its_argument(device):
    host = torch.tensor([[3.0, 1.0, 2.0]]).t()
    moved = acl.to(torch.tensor([[3.0, 1.0, 2.0]]), device).t()
    for x in (host, moved):
        x.erfinv_()
    torch.testing.assert_close(moved.cpu(), host, equal_nan=True)


def test_an_absent_device_is_named():
    assert_raises(errors.ConfigError, "unknown backend 'openc1'", acl.to, torch.ones(1), "openc1")


def test_explain_names_the_operations_and_those_of_the_host(device, capsys):
    x = acl.to(torch.randn(3, 4), device)
    acl.explain(lambda: torch.linalg.inv_ex((x @ x.t()).exp()))
    printed = capsys.readouterr().out
    assert f"aten.mm.default    on {device}:0" in printed
    assert "chosen   aten table (own kernel)" in printed
    assert f"aten.linalg_inv_ex.default  (3,3)  on {device}:0" in printed
    assert f"refused  aten table: {device}:0 has no kernel for this call" in printed


def test_an_lstm_moves_its_weights_though_they_have_weak_references(device):
    layer = acl.to(nn.LSTM(3, 4), device)
    assert all(isinstance(weight, DeviceTensor) for weight in (*layer.parameters(), *layer._flat_weights))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "foreach"),
    [("SGD", False), ("SGD", True), ("Adam", False), ("AdamW", True), ("RMSprop", False), ("Adagrad", True)],
)
def test_optimizers_of_torch_step_on_the_device(device, name, foreach):
    host = nn.Linear(3, 2)
    moved, x = acl.to(copy.deepcopy(host), device), torch.randn(5, 3)
    kind = getattr(torch.optim, name)
    pairs = [(host, x), (moved, acl.to(x, device))]
    optimizers = [kind(layer.parameters(), lr=0.01, foreach=foreach) for layer, _ in pairs]
    with override(fallback="forbid"):
        for _ in range(3):
            for optimizer, (layer, batch) in zip(optimizers, pairs, strict=True):
                optimizer.zero_grad()
                layer(batch).square().mean().backward()
                optimizer.step()
    torch.testing.assert_close(moved.weight.cpu(), host.weight)


def test_adamw_updates_parameters_by_moments_that_are_not_rounded(device):
    """(1 - beta2) g^2 = 1e-9 is 0 in float16, and the step would be a thousand times too long."""
    dtype = torch.float16
    start = [torch.ones(3, dtype=dtype), torch.full((3,), 2.0**-10, dtype=dtype), *torch.zeros(2, 3, dtype=dtype)]
    p, g, m, v = (acl.to(x, device) for x in start)
    options = {"lr": 0.125, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}
    with override(fallback="forbid"):
        torch._fused_adamw_([p], [g], [m], [v], [], [torch.tensor(1.0)], **options, amsgrad=False, maximize=False)
    torch.testing.assert_close(p.cpu(), torch.full((3,), 0.875, dtype=dtype))
    torch.testing.assert_close(m.cpu().float(), torch.full((3,), 0.1 * 2.0**-10), atol=1e-7, rtol=1e-3)


ADDRESSES = {
    "address": lambda x: x.data_ptr(),
    "storage": lambda x: x.untyped_storage(),
    "typed storage": lambda x: x.storage(),
    "memory that processes share": lambda x: x.share_memory_(),
    "module": lambda x: nn.ParameterList([x]).share_memory(),
    "safetensors": lambda x: safetensors.torch.save({"x": x}),
}


@pytest.mark.parametrize("name", ADDRESSES)
def test_memory_without_an_address_is_refused(device, name):
    with pytest.raises(errors.UnsupportedCase, match=rf"a tensor on {device}:0 has no .*; use x\.cpu\(\), a copy"):
        ADDRESSES[name](acl.to(torch.ones(4), device))


def test_code_in_cplusplus_finds_no_address(device):
    x = acl.to(torch.ones(4), device)
    x.data = x * 2  # whose memory is another
    assert_raises(RuntimeError, "Cannot access data pointer", torch.utils.dlpack.to_dlpack, x)
    host = torch.zeros(4)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        host.data = x
    assert host.tolist() == [0] * 4
    assert not x.is_shared()


def test_tensors_without_content_stand_in(device):
    x = acl.to(torch.ones(6)[2:], device)
    fake = FakeTensorMode().from_tensor(x)  # as torch.export's
    assert (fake.shape, fake.device.type) == ((4,), "cpu")


def test_collectives_of_torch_are_refused(device, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        x = acl.to(torch.ones(2), device)
        for call in (lambda: torch.distributed.all_reduce(x), lambda: torch.distributed.all_gather([x], x)):
            assert_raises(errors.UnsupportedCase, r"torch\.distributed moves no tensors of .*x\.cpu\(\)", call)
    finally:
        torch.distributed.destroy_process_group()


def test_arrays_of_other_libraries_are_copies(device):
    x = acl.to(torch.arange(6.0)[2:], device)
    expected = [2.0, 3.0, 4.0, 5.0]
    for array in (np.from_dlpack(x), torch.from_dlpack(x), np.array(x), x.numpy()):
        assert array.tolist() == expected
    for refused, error in (
        (lambda: x.__dlpack__(copy=False), BufferError),  # np.from_dlpack takes copy= from NumPy 2.1 on
        (lambda: x.__array__(copy=False), ValueError),
    ):
        assert_raises(error, "copy=False", refused)
    assert_raises(BufferError, "require gradient", lambda: torch.from_dlpack(x.requires_grad_()))


def test_a_kernel_in_c_is_refused_where_the_device_takes_none(device):
    k = acl.kernel("ACL_KERNEL void f(ACL_GLOBAL float *y) { y[0] = 1.0f; }")
    with pytest.raises(errors.CompileError, match=rf"portable C; {device} takes no kernels; .* \(x\.cpu\(\)\)"):
        k(1, 1, acl.to(torch.zeros(4), device))


@pytest.mark.parametrize("x", [
    torch.ones(1, 5)[:, 0],
    torch.arange(5.0)[3:4].as_strided((1, 1), (7, 3)),
    torch.ones(1, 4)[:, ::2],
    torch.ones(2, 3)[:1].t(),
    torch.view_as_complex(torch.ones(1, 2)).conj().imag,  # negative by a bit of the tensor
])  # fmt: skip
def test_strides_of_dimensions_of_one_element_may_be_any(device, x):
    assert torch.equal(acl.to(x, device).cpu(), x)


def test_tensors_that_are_not_dense_and_views_of_another_dtype_are_refused(device):
    with pytest.raises(errors.UnsupportedCase, match=r"no view of torch\.float32 as torch\.int32"):
        acl.to(torch.ones(2), device).view(torch.int32)
    with pytest.raises(errors.UnsupportedCase, match=r"dense tensors alone, not of torch\.sparse_coo; .*to_dense"):
        acl.to(torch.eye(2).to_sparse(), device)


def test_shallow_copies_stay_on_the_device(device):
    x = acl.to(torch.ones(3), device)
    y = copy.copy(x)
    y.add_(1)
    assert (type(y), x.tolist()) == (DeviceTensor, [2.0] * 3)
    layer = acl.to(nn.Linear(2, 2), device)
    weight = copy.copy(layer.weight)
    assert isinstance(weight, nn.Parameter)
    assert weight.buffer is layer.weight.buffer


def test_modules_go_to_the_host_and_to_other_dtypes(device):
    layer = acl.to(nn.BatchNorm1d(2), device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    layer(acl.to(torch.randn(4, 2), device)).sum().backward()
    parameters = [*layer.parameters()]
    assert layer.half().weight.dtype == torch.float16
    assert isinstance(layer.weight, DeviceTensor)
    assert layer.float().cpu() is layer
    assert [*map(type, layer.state_dict().values())] == [torch.Tensor] * 5
    assert all(a is b for a, b in zip(parameters, layer.parameters(), strict=True))
    bias = layer.bias.detach().clone()
    optimizer.step()
    torch.testing.assert_close(layer.bias.detach(), bias - 0.5 * 4)
    layer.weight.data.add_(1)
    moved = acl.to(nn.Linear(2, 2), device)
    moved.weight.data = torch.ones(2, 2)  # made on x.device
    assert isinstance(moved.weight, DeviceTensor)


def test_a_dtype_that_the_device_lacks_is_refused(device):
    layer = acl.to(nn.Linear(2, 2), device)
    for cast in (layer.double, lambda: layer.weight.to(torch.float64), lambda: torch.fft.fft(layer.weight)):
        assert_raises(errors.UnsupportedDtype, r"result is torch\.(float64|complex64), .* x\.cpu\(\)", cast)
    assert isinstance(layer.weight, DeviceTensor)


@pytest.mark.parametrize(
    ("name", "options"),
    [("AdamW", {"fused": True}), ("Adam", {"foreach": True}), ("SGD", {"momentum": 0.9}), ("LBFGS", {"max_iter": 2})],
)
def test_optimizers_go_on_from_a_reloaded_state(device, name, options):
    host = nn.Linear(3, 2)
    moved, x = acl.to(copy.deepcopy(host), device), torch.randn(5, 3)

    def trained(layer, batch, load):
        def made():
            return getattr(torch.optim, name)(layer.parameters(), lr=0.01, **options)

        def loss():
            layer.zero_grad()
            value = layer(batch).square().mean()
            value.backward()
            return value

        optimizer = made()
        for step in range(4):
            optimizer.step(loss)
            if step == 1:
                optimizer, state = made(), optimizer.state_dict()
                optimizer.load_state_dict(load(state))
        return [each for state in optimizer.state.values() for key, each in state.items() if key != "step"]

    def loaded(state):
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, map_location="cpu")

    trained(host, x, lambda state: state)
    acl.ledger().reset()
    states = trained(moved, acl.to(x, device), loaded)
    torch.testing.assert_close(moved.weight.cpu(), host.weight, atol=1e-5, rtol=1e-5)
    assert all(isinstance(each, DeviceTensor) for each in states if isinstance(each, torch.Tensor))
    if name != "LBFGS":
        assert not host_calls()
        acl.to(moved, "cpu")
        trained(moved, x, lambda state: state)


def test_states_follow_a_module_to_the_host(device):
    layer = acl.to(nn.Linear(2, 1), device)
    optimizer = torch.optim.Adam(layer.parameters())
    for place in (device, "cpu", device):
        acl.to(layer, place)
        layer(acl.to(torch.ones(1, 2), place)).sum().backward()
        optimizer.step()
        state = optimizer.state[layer.weight]["exp_avg"]
        assert isinstance(state, DeviceTensor) == (place == device)


def test_results_go_to_out(device):
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    x, y = acl.to(a, device), acl.to(b, device)
    calls = {
        (4, 3): lambda x, y, out: torch.cat((x, y), out=out),
        (2, 2, 3): lambda x, y, out: torch.stack((x, y), out=out),
        (2, 3): lambda x, y, out: torch.add(x, y, alpha=2, out=out),
        (3,): lambda x, y, out: torch.sum(x, 0, out=out),
        (2, 2): lambda x, y, out: torch.mm(x, y.t(), out=out),
    }
    for shape, call in calls.items():
        for out in (acl.to(torch.zeros(shape), device), torch.zeros(shape)):
            assert call(x, y, out) is out
            torch.testing.assert_close(out.cpu(), call(a, b, torch.zeros(shape)))
    values, at = acl.to([torch.zeros(2), torch.zeros(2, dtype=torch.int64)], device)
    torch.max(x, 1, out=(values, at))
    assert at.tolist() == a.argmax(1).tolist()
    with pytest.raises(errors.UnsupportedCase, match=r"aten\.cat\.out: out= has shape \(3,\), the result \(4, 3\)"):
        torch.cat((x, y), out=acl.to(torch.zeros(3), device))
    with pytest.raises(errors.UnsupportedCase, match=r"out= of torch\.int64 cannot hold"):
        torch.cat((x, y), out=acl.to(torch.zeros(4, 3, dtype=torch.int64), device))
