"""Recurrent layers by torch and by our kernels, against the mathematics written out."""

import pytest
import torch
from op_checks import counted

from accelerant.ops.recurrent import layer_reference, recurrent
from accelerant.runtime.dispatch import force
from accelerant.runtime.ledger import ledger

OPTIONS = {"bias": True, "layers": 1, "dropout": 0.0, "training": True, "bidirectional": False}
OP = {"lstm": "lstm_fwd", "gru": "gru_fwd", "tanh": "rnn_fwd", "relu": "rnn_fwd"}
GATES = {"lstm": 4, "gru": 3, "tanh": 1, "relu": 1}
DATA_CENTRE = ((8, 0), (9, 0), (10, 0))
cells = pytest.mark.parametrize("cell", OP)


def arguments(cell, B=3, T=4, K=5, H=32, dtype=torch.float64, bias=True, device="cpu", seed=0):
    """x, the states, and the weights of a layer, all with gradients."""
    generator = torch.Generator().manual_seed(seed)
    G = GATES[cell]
    shapes = [(B, T, K), *[(1, B, H)] * (2 if cell == "lstm" else 1), (G * H, K), (G * H, H), *[(G * H,)] * 2 * bias]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    scaled = [one / H**0.5 if at > (cell == "lstm") + 1 else one for at, one in enumerate(made)]
    tensors = [one.to(device, dtype).requires_grad_() for one in scaled]
    states = 2 if cell == "lstm" else 1
    return tensors[0], tensors[1 : 1 + states], tensors[1 + states :]


def run(cell, x, states, weights, implementation, **options):
    with force(**{OP[cell]: implementation}):
        return recurrent(cell, x, states, weights, **{**OPTIONS, "bias": len(weights) == 4, **options})


def expected(cell, x, states, weights):
    h, c = (*(state[0] for state in states), None)[:2]
    y, *last = layer_reference(cell, x, h, c, *weights, *(() if len(weights) == 4 else (None, None)))
    return [y, *(one[None] for one in last)]


def gradients(results, inputs):
    """Of a sum to which each element of each result contributes differently."""
    total = sum(
        (one.sin() * torch.linspace(0.5, 1.5, one.numel(), dtype=one.dtype, device=one.device).view(one.shape)).sum()
        for one in results
    )
    return torch.autograd.grad(total, inputs)


def errors(cell, implementation, dtype, device="cpu", **sizes):
    """Errors of the results and of the gradients, by the reference in float64 on the same numbers."""
    x, states, weights = arguments(cell, dtype=dtype, device=device, **sizes)
    wide = [[one.detach().double().requires_grad_() for one in part] for part in ([x], states, weights)]
    found = run(cell, x, states, weights, implementation)
    wanted = expected(cell, *wide[0], *wide[1:])
    pairs = [*zip(found, wanted, strict=True)]
    pairs += zip(
        gradients(found, [x, *states, *weights]), gradients(wanted, [*wide[0], *wide[1], *wide[2]]), strict=True
    )
    with torch.no_grad():
        return [float((one.double() - other).norm() / (other.norm() + 1e-30)) for one, other in pairs]


def check(cell, implementation, dtype, tolerance, device="cpu", **sizes):
    assert max(errors(cell, implementation, dtype, device, **sizes)) <= tolerance


@pytest.mark.sample(3, 1)
@cells
@pytest.mark.parametrize("sizes", [{}, {"B": 1, "T": 1}, {"B": 7, "T": 3, "H": 64, "bias": False}], ids=str)
def test_llvm_matches_the_reference_with_its_gradients(cell, sizes):
    check(cell, "llvm", torch.float64, 1e-13, **sizes)
    check(cell, "llvm", torch.float32, 2e-6, **sizes)


@cells
def test_torch_matches_the_reference_with_its_gradients(cell):
    check(cell, "torch", torch.float64, 1e-13)


@pytest.mark.sample(3, 1)
@cells
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)], ids=str
)
def test_triton_matches_the_reference_with_its_gradients(interpreted, cell, dtype, tolerance):
    check(cell, "triton", dtype, tolerance, B=17 if dtype == torch.float32 else 2, T=3, H=20, bias=cell != "relu")


@cells
def test_llvm_agrees_with_torch_on_layers_of_both_directions(cell):
    hidden, layers, B = 32, 2, 5
    make = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(cell, torch.nn.RNN)
    more = {"nonlinearity": cell} if make is torch.nn.RNN else {}
    module = make(3, hidden, layers, bidirectional=True, batch_first=True, **more)
    x, states = torch.randn(B, 4, 3), [torch.randn(4, B, hidden) for _ in range(2 if cell == "lstm" else 1)]
    options = {"layers": layers, "bidirectional": True}
    found = run(cell, x, states, module._flat_weights, "llvm", **options, bias=True)
    wanted = run(cell, x, states, module._flat_weights, "torch", **options, bias=True)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@cells
def test_llvm_has_second_derivatives(cell):
    x, states, weights = arguments(cell, B=2, T=2, K=2, H=16)
    torch.nn.init.constant_(x, 0.3)
    inputs = [x, *states, *weights]

    def penalty(results):
        first = torch.autograd.grad(sum(one.sum() for one in results), inputs, create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), inputs, allow_unused=True)

    pairs = zip(
        penalty(run(cell, x, states, weights, "llvm")), penalty(expected(cell, x, states, weights)), strict=True
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other)


@cells
def test_a_row_has_the_same_bits_alone_and_with_any_threads(cell):
    x, states, weights = arguments(cell, B=8, dtype=torch.float32)
    whole = run(cell, x, states, weights, "llvm")[0]
    for row in (0, 5):
        alone = run(cell, x[row : row + 1], [state[:, row : row + 1] for state in states], weights, "llvm")[0]
        assert torch.equal(alone[0], whole[row])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert torch.equal(run(cell, x, states, weights, "llvm")[0], whole)
    finally:
        torch.set_num_threads(threads)


def test_large_and_undefined_numbers():
    """Gates saturate without an overflow, small ones keep their relative error, and a NaN stays in its row."""
    x, states, weights = arguments("lstm", B=4, T=2, dtype=torch.float32, bias=False)
    with torch.no_grad():
        x[0], x[1], x[2], x[3, 1] = 1e4, -1e4, 1e-20, torch.nan
        for state in states:
            state[:, 2] = 1e-20
        y = run("lstm", x, states, weights, "llvm")[0]
        wanted = expected("lstm", x, states, weights)[0]
        torch.testing.assert_close(y[:3], wanted[:3], rtol=1e-5, atol=1e-37)  # exp is bounded
        assert y[3, 0].isfinite().all()
        assert y[3, 1].isnan().all()


def test_strides_and_dtypes_of_the_weights():
    x, states, weights = arguments("gru", T=16, dtype=torch.float32)
    strided = [weights[0], weights[1].detach().t().contiguous().t(), *weights[2:]]
    assert torch.equal(run("gru", x, states, strided, "llvm")[0], run("gru", x, states, weights, "llvm")[0])
    with pytest.raises((RuntimeError, ValueError), match=r"dtype|type"):  # torch's own error, before memory is read
        recurrent("gru", x, states, [weights[0], weights[1].double(), *weights[2:]], **OPTIONS)


def test_no_rows():
    x, states, weights = arguments("gru", B=0)
    y, last = run("gru", x, states, weights, "llvm")
    assert (y.shape, last.shape) == ((0, 4, 32), (1, 0, 32))


def test_the_ledger_counts_them():
    x, states, weights = arguments("gru", B=2, T=3, K=5, H=4, dtype=torch.float32)
    recurrent("gru", x, states, weights, **OPTIONS)
    (row,) = counted("gru_fwd")
    assert row["calls"] == 1
    assert row["implementation"] == "torch"
    assert row["flops"] == 2 * 2 * 3 * (12 * 5 + 12 * 4 + 24)
    assert "multiple of 32, got 4" in str(row["refused"])


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def chosen(cell, **sizes):
    x, states, weights = arguments(cell, dtype=torch.float32, **sizes)
    ledger().reset()
    recurrent(cell, x, states, weights, **OPTIONS)
    (row,) = counted()
    return row["implementation"], str(row["refused"])


def test_what_torch_computes_faster_is_left_to_it(threads):
    threads(2)
    assert "by several threads" in chosen("lstm", T=16)[1]
    threads(1)
    assert chosen("gru", T=16)[0] == chosen("lstm", T=16)[0] == "llvm"
    assert "15 steps do not repay" in chosen("gru", T=15)[1]
    with torch.no_grad():
        assert chosen("gru", B=1, T=16)[0] == "llvm"
        assert "oneDNN's LSTM is as fast without a gradient" in chosen("lstm", T=16)[1]
    assert "more than 2048 states; these are 2080" in chosen("lstm", B=65, T=16)[1]


@pytest.mark.parametrize(("capability", "implementation"), [("AVX2", "llvm"), ("AVX512", "torch")])
def test_wider_vectors_than_ours_are_torchs(capability, implementation, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert chosen("gru", B=65, T=16)[0] == implementation
    assert chosen("gru", B=64, T=16)[0] == "llvm"


@pytest.mark.gpu
@cells
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [{"B": 33, "T": 9, "K": 5, "H": 64}, {"B": 16, "T": 5, "K": 5, "H": 128}], ids=str)
def test_triton_is_as_accurate_as_cudnn(cell, dtype, sizes):
    """float32 too, which cuDNN computes in TF32 by default, and we in three products of it."""
    if sizes["H"] == 128 and (dtype == torch.float32 or torch.cuda.get_device_capability() not in DATA_CENTRE):
        pytest.skip("the weights do not fit shared memory")
    seeds = [
        [torch.tensor(errors(cell, name, dtype, "cuda", seed=seed, **sizes)) for seed in range(8)]
        for name in ("triton", "torch")
    ]
    ours, cudnn = (torch.stack(each).square().mean(0).sqrt().tolist() for each in seeds)
    compared = 2 if cell == "relu" and dtype != torch.float32 else len(ours)
    within = [one <= 1.5 * other + torch.finfo(dtype).eps for one, other in zip(ours, cudnn, strict=True)]
    assert all(within[:compared]), (ours, cudnn)


@pytest.mark.gpu
@cells
def test_triton_without_tf32(cell, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    check(cell, "triton", torch.float32, 1e-5, device="cuda", B=33, T=9, K=5, H=64)


@pytest.mark.gpu
def test_cudnn_is_preferred_until_a_race_says_otherwise():
    x, states, weights = arguments("lstm", dtype=torch.bfloat16, device="cuda")
    recurrent("lstm", x, states, weights, **OPTIONS)
    (row,) = counted("lstm_fwd")
    assert row["implementation"] == "torch"
