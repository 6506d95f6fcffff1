import importlib

import pytest
import torch
from op_checks import compiled_into, counted

from accelerant import ops
from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.runtime.dispatch import Case

op = importlib.import_module("accelerant.ops.matmul")


@pytest.mark.parametrize(("a", "b", "size_bytes", "flops"), [
    ((8, 16), (16, 32), 4 * (8 * 16 + 16 * 32 + 8 * 32), 2 * 8 * 16 * 32),
    ((2, 4, 16), (16, 32), 4 * (8 * 16 + 16 * 32 + 8 * 32), 2 * 8 * 16 * 32),  # one product of eight rows
    ((3, 8, 16), (3, 16, 32), 3 * 4 * (8 * 16 + 16 * 32 + 8 * 32), 3 * 2 * 8 * 16 * 32),
    ((1, 8, 16), (3, 16, 32), 4 * (8 * 16 + 3 * 16 * 32 + 3 * 8 * 32), 3 * 2 * 8 * 16 * 32),
], ids=str)  # fmt: skip
def test_cost_in_the_ledger(a, b, size_bytes, flops):
    ops.matmul(torch.randn(a), torch.randn(b))
    (row,) = counted("matmul")
    assert (row["calls"], row["bytes"], row["flops"], row["own"]) == (1, size_bytes, flops, False)


def test_on_a_cpu_the_gradient_is_torchs_own():
    a, b = torch.randn(8, 16, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    y = ops.matmul(a, b)
    assert y.grad_fn.name() == "MmBackward0"
    y.sum().backward()
    (row,) = counted("matmul")
    assert row["calls"] == 1
    assert "torch on the CPU: its own autograd" in row["reason"]


def test_backward_is_counted():
    a, b = torch.randn(8, 16, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    ops.matmul(a, b).sum().backward()
    assert [(row["op"], row["calls"]) for row in counted()] == [("matmul", 1), ("matmul_bwd", 1)]


def test_no_product_for_an_unwanted_gradient():
    a, b = torch.randn(8, 16), torch.randn(16, 32, requires_grad=True)
    y = ops.matmul(a, b)
    assert [function is not None for function, _ in y.grad_fn.next_functions] == [False, True]


def test_gradient_of_a_transposed_weight_is_dense():
    weight = torch.randn(32, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(ops.matmul(torch.randn(8, 16), weight.t()).sum(), weight)
    assert gradient.is_contiguous()


def test_autocast_casts_as_torch_does():
    a, b = torch.randn(8, 16, requires_grad=True), torch.randn(16, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = ops.matmul(a, b), torch.matmul(a, b)
        mixed = ops.matmul(a, b.detach().bfloat16())
    assert y.dtype == expected.dtype == mixed.dtype == torch.bfloat16
    assert torch.equal(y, expected)
    y.sum().backward()
    assert a.grad.dtype == b.grad.dtype == torch.float32


def test_meta_tensors_beside_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.matmul(torch.ones(2, 3, 4, device="meta"), torch.ones(4, 5, device="meta"))
    assert (y.device.type, y.shape, y.dtype) == ("meta", (2, 3, 5), torch.float32)


@pytest.mark.parametrize("batch", [(2, 1), (1, 3), ()], ids=str)
def test_broadcast_gradients_are_summed(batch):
    a = torch.randn(*batch, 4, 5, dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, 3, 5, 6, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    actual = torch.autograd.grad(ops.matmul(a, b), (a, b), dy)
    expected = torch.autograd.grad(torch.matmul(a, b), (a, b), dy)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_is_torchs_own_under_compile():
    assert compiled_into(ops.matmul, torch.randn(3, 4), torch.randn(4, 5)) == [torch.matmul]


A, B = torch.ones(3, 4), torch.ones(4, 5)
INNER = "a must have as many columns as b has rows, got "


@pytest.mark.parametrize(("a", "b", "error", "words"), [
    (A, torch.ones(5, 6), ShapeError, INNER),
    (torch.ones(4), torch.ones(5), ShapeError, INNER),
    (torch.ones(2, 3, 4), A, ShapeError, INNER),
    (A, torch.ones(5), ShapeError, INNER),
    (torch.ones(2, 3, 4), torch.ones(3, 4, 5), ShapeError, r"of \(2, 3, 4\) and \(3, 4, 5\) do not broadcast"),
    (torch.tensor(1.0), A, ShapeError, r"got \(\) and \(3, 4\)"),
    (A, B.bfloat16(), UnsupportedDtype, "a and b must have one dtype, got float32 and bfloat16"),
    (A.long(), B.long(), UnsupportedDtype, r"matmul takes .*; a is int64"),
    (A, B.to("meta"), ShapeError, "a and b must be on one device, got cpu and meta"),
])  # fmt: skip
def test_refuses(a, b, error, words):
    with pytest.raises(error, match=words):
        ops.matmul(a, b)


# --- oneDNN on a CPU --------------------------------------------------------------------------------------------------
ONEDNN = pytest.mark.skipif(op._onednn is None, reason="this torch has no oneDNN")


@pytest.fixture
def by_onednn(monkeypatch):
    """Serve float32 by oneDNN from one multiplication on, whatever the processor."""
    monkeypatch.setattr(op, "_refuses_processor", lambda: None)
    monkeypatch.setattr(op, "ONEDNN_LEAST", 1)
    for each in (op.matmul_op, op.linear_op):
        each.forget()
    yield
    for each in (op.matmul_op, op.linear_op):
        each.forget()


def served_by():
    return {row["implementation"] for row in counted() if row["op"] in ("matmul", "linear")}


@ONEDNN
def test_products_by_onednn_are_as_exact_as_torchs(by_onednn, rng):
    for _ in range(20):
        shape = [rng.randint(1, 6) for _ in range(rng.randint(1, 3))]
        K, N = rng.randint(1, 70), rng.randint(1, 70)
        x = torch.randn(*shape, K, requires_grad=True)
        weight, bias = torch.randn(N, K, requires_grad=True), torch.randn(N, requires_grad=True)
        product = rng.choice([ops.linear, lambda x, weight, bias: ops.matmul(x, weight.t()) + bias])
        inner = rng.choice([x, x.transpose(0, -1).contiguous().transpose(0, -1)])
        leaves = (x, weight, bias)
        wide = [each.detach().double().requires_grad_() for each in leaves]
        y, expected = product(inner, weight, bias), torch.nn.functional.linear(*wide)
        dy = torch.randn(y.shape)
        results = (y, *torch.autograd.grad(y, leaves, dy))
        for one, other in zip(results, (expected, *torch.autograd.grad(expected, wide, dy.double())), strict=True):
            torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-5)  # of up to 216 terms of about 1
    assert served_by() == {"onednn"}


@ONEDNN
def test_products_by_onednn_are_differentiable_twice(by_onednn):
    x, weight = torch.randn(5, 6, requires_grad=True), torch.randn(7, 6, requires_grad=True)

    def second(product):
        (dx,) = torch.autograd.grad(product(x, weight).square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), (x, weight))

    for one, other in zip(second(ops.linear), second(torch.nn.functional.linear), strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        assert not ops.linear(x, weight).requires_grad
    assert served_by() == {"onednn"}


def test_onednn_serves_large_float32_products_where_mkl_is_slow(monkeypatch):
    case = Case(torch.device("cpu"), torch.float32, (256, 256, 128))
    for family, capability, reason in (
        (("GenuineIntel", 6), "AVX512", "uses all of this processor's vectors"),
        (("AuthenticAMD", 26), "AVX2", "uses all of this processor's vectors"),
        (("AuthenticAMD", 25), "AVX512", "uses all of this processor's vectors"),
        (("AuthenticAMD", 26), "AVX512", None),
    ):
        op._refuses_processor.cache_clear()
        monkeypatch.setattr(op, "processor_family", lambda family=family: family)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
        found = op._refuses_onednn(case)
        assert found is None if reason is None else reason in found
        assert op.may_use_onednn(torch.float32, op.ONEDNN_LEAST) is (reason is None)
        assert not op.may_use_onednn(torch.float32, op.ONEDNN_LEAST - 1)
    assert "float32" in op._refuses_onednn(case._replace(dtype=torch.bfloat16))
    assert "multiplications" in op._refuses_onednn(case._replace(shape=(256, 256, 127)))
    assert "two matrices" in op._refuses_onednn(case._replace(shape=(2, 128, 128, 128)))
    op._refuses_processor.cache_clear()
