"""DeviceTensor: moves, views, autograd, copies of objects, and operations that run on the host."""

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn

import accelerant as acl
from accelerant import errors
from accelerant.config import override
from accelerant.ops.aten import DeviceTensor
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


def test_a_view_of_another_dtype_is_refused(device):
    with pytest.raises(errors.UnsupportedCase, match=r"no view of torch\.float32 as torch\.int32"):
        acl.to(torch.ones(2), device).view(torch.int32)


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
    with pytest.raises(RuntimeError, match="only leaf tensors"):
        copy.deepcopy(model.weight * 2)


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
    with pytest.raises(errors.ConfigError, match="unknown backend 'openc1'"):
        acl.to(torch.ones(1), "openc1")


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
