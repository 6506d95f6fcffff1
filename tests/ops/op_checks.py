"""What the tests of ops share: the op folders, and the comparison with a reference."""

import importlib
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import accelerant.ops
from accelerant.ops.registry import draw, public_op, register
from accelerant.runtime.ledger import ledger

FOLDER = Path(accelerant.ops.__file__).parent
ADDED = "leaky_relu"
"""A package outside accelerant.ops, in this folder, that is tested as the package's own are."""

register(ADDED)
FOLDERS = sorted(
    (*(path.name for path in FOLDER.iterdir() if (path / "cases.py").is_file() and path.name[0] != "_"), ADDED)
)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def cases_of(folder):
    """A folder's cases.py.

    It has SAMPLES and the rest for the op of the folder's name, or FAMILY, which has them for each op of a family.
    KIND: "differentiable" (the default); "plain", no gradients; "mutating", no functions of a public name either.
    ELEMENT_LOADS: words of the specializations' names that cannot read 16 bytes at a time.
    RUNS: what the ledger may show beside our kernel, for an op that leaves a part of its work to a library.
    """
    return importlib.import_module(f"{ADDED if folder == ADDED else f'accelerant.ops.{folder}'}.cases")


def path_of(folder):
    """A folder of ops."""
    return Path(__file__).parent / ADDED if folder == ADDED else FOLDER / folder


def kind_of(folder):
    """See cases_of."""
    return getattr(cases_of(folder), "KIND", "differentiable")


def _ops():
    """Op -> folder."""
    found = {}
    for folder in FOLDERS:
        if kind_of(folder) != "mutating":
            found |= dict.fromkeys(getattr(cases_of(folder), "FAMILY", (folder,)), folder)
    return dict(sorted(found.items()))


FOLDER_OF = _ops()
OPS = list(FOLDER_OF)
DIFFERENTIABLE = [op for op in OPS if kind_of(FOLDER_OF[op]) == "differentiable"]


def parts(op):
    """An op's function, reference and cases."""
    folder = FOLDER_OF[op]
    cases = cases_of(folder)
    return SimpleNamespace(
        name=op,
        folder=folder,
        call=public_op(op).function,
        reference=public_op(op).reference,
        cases=public_op(op).cases,
        runs=set(getattr(cases, "RUNS", ())),
    )


def each_sample(*, of="SAMPLES", ops=OPS):
    """(op, sample) with a readable identifier, for parametrize."""
    return [pytest.param(op, sample, id=f"{op}-{sample.name}") for op in ops for sample in getattr(parts(op).cases, of)]


def small_samples(limit):
    """Samples that finite differences can afford."""
    return [param for param in each_sample(ops=DIFFERENTIABLE) if max(map(_numel, param.values[1].shapes)) <= limit]


def _numel(shape):
    return 0 if shape is None else torch.Size(shape).numel()


def results(y):
    """The results of an op as a tuple."""
    return y if isinstance(y, tuple) else (y,)


def wants_gradient(tensor):
    """Whether an argument can have a gradient."""
    return tensor is not None and tensor.is_floating_point()


def differentiable(sample, dtype, device="cpu"):
    """A sample's tensors, asking for a gradient where they can have one."""
    tensors = sample.tensors(dtype, device)
    return [tensor.requires_grad_() if wants_gradient(tensor) else tensor for tensor in tensors]


def close(actual, expected, tolerance):
    """Fail unless within the tolerance, its absolute part times the largest element if that is above 1."""
    assert actual.shape == expected.shape
    if actual.dtype == torch.float16:  # a number beyond its range is an infinity in it
        limit = torch.finfo(torch.float16).max
        finite = expected.isfinite()
        actual = torch.where(finite, actual.double().clamp(-limit, limit), actual.double())
        expected = torch.where(finite, expected.clamp(-limit, limit), expected)
    largest = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(
        actual.to(torch.float64),
        expected,
        rtol=tolerance.relative,
        atol=tolerance.absolute * max(1.0, largest),
    )


def bound(op, sample, dtype, device="cpu"):
    """A call as a function of the tensors that can have a gradient, for us and for the reference."""
    it = parts(op)
    whole = sample.tensors(dtype, device)
    places = [at for at, tensor in enumerate(whole) if wants_gradient(tensor)]

    def function(of):
        def call(*tensors):
            args = list(whole)
            for at, tensor in zip(places, tensors, strict=True):
                args[at] = tensor
            args = [arg.to(tensors[0].device) if isinstance(arg, torch.Tensor) else arg for arg in args]
            ys = results(of(*args, **sample.options))
            return ys[0] if len(ys) == 1 else torch.cat([y.flatten() for y in ys])

        return call

    return SimpleNamespace(
        tensors=[whole[at] for at in places], call=function(it.call), reference=function(it.reference)
    )


def check_sample(op, sample, dtype, device="cpu", tolerances=None):
    """Forward and, for a differentiable op, backward against the reference in float64."""
    it = parts(op)
    tolerance = (tolerances or it.cases.TOLERANCES)[dtype]
    learns = op in DIFFERENTIABLE
    tensors = sample.tensors(dtype, device)
    exact = [each.double() if wants_gradient(each) else each for each in tensors]
    for tensor in [*tensors, *exact]:
        if learns and wants_gradient(tensor):
            tensor.requires_grad_()
    ys = results(it.call(*tensors, **sample.options))
    expected = results(it.reference(*exact, **sample.options))
    floating = next(tensor for tensor in tensors if wants_gradient(tensor))
    assert ys[0].dtype == dtype or not learns
    assert len(ys) == len(expected)
    for y, reference in zip(ys, expected, strict=True):
        assert y.device == floating.device
        close(y.detach(), reference.detach(), tolerance)
    if not learns:
        return
    # Drawn apart from x, or the sums below grow with the rows.
    pairs = [
        (y, ref, draw(y.shape, y.dtype, device, 99 + i)) for i, (y, ref) in enumerate(zip(ys, expected, strict=True))
    ]
    pairs = [pair for pair in pairs if pair[0].requires_grad]
    torch.autograd.backward([y for y, _, _ in pairs], [dy for _, _, dy in pairs])
    torch.autograd.backward([ref for _, ref, _ in pairs], [dy.double() for _, _, dy in pairs])
    for tensor, reference in zip(tensors, exact, strict=True):
        if wants_gradient(tensor):
            assert tensor.grad.dtype == dtype
            close(tensor.grad, reference.grad, tolerance)


def check_beside(ours, theirs, *tensors, near=(1e-5, 1e-6), slopes=(1e-5, 1e-5), dy=None):
    """Fail unless two functions have the same values, NaN for NaN, and gradients for all tensors; return the values."""
    mine, others = ([each.detach().requires_grad_() for each in tensors] for _ in range(2))
    y, expected = ours(*mine), theirs(*others)
    torch.testing.assert_close(y, expected, rtol=near[0], atol=near[1], equal_nan=True)
    dy = torch.randn_like(expected) if dy is None else dy
    y.backward(dy)
    expected.backward(dy)
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=slopes[0], atol=slopes[1], equal_nan=True)
    return y, expected


def counted(op=None):
    """The ledger's rows, of one op if it is named."""
    return [row for row in ledger().to_dict()["ops"] if op in (None, row["op"])]


def ran(op=None):
    """The implementations that ran, of one op if it is named."""
    return {row["implementation"] for row in counted(op)}


LAYOUTS = {
    "row of a wider matrix": lambda: torch.randn(6, 50)[:, 7:40],
    "transposed": lambda: torch.randn(33, 6).t(),
    "permuted batch": lambda: torch.randn(4, 3, 33).transpose(0, 1),
    "every second": lambda: torch.randn(6, 66)[:, ::2],
    "expanded": lambda: torch.randn(1, 33).expand(6, 33),
}
"""Tensors of rows of 33 elements that are not contiguous."""


class Calls(TorchDispatchMode):
    """Sees the calls of our ops, with their arguments."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "accelerant":
            self.seen.append((func, args))
        return func(*args, **(kwargs or {}))


def compiled_into(function, *args):
    """The functions that torch.compile finds in a call."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    torch.compile(function, fullgraph=True, backend=keep)(*args)
    return [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]


def disassembled(code):
    """The instructions of a cubin, as text."""
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run([str(tool), "-sass", file.name], capture_output=True, text=True, check=True).stdout
