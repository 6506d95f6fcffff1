"""Arguments of the public ops: what is not a tensor is refused by a sentence that names it; torch's names, NumPy's."""

import inspect
import re

import pytest
import torch

from accelerant import ops
from accelerant.errors import AccelerantError, ConfigError
from accelerant.ops._registry import public_ops

OPS = {name: op for name, op in public_ops().items() if op.package.startswith("accelerant.")}


def sample_of(op):
    """Return the tensors and options of the op's sample with the most tensors."""
    samples = [each for each in OPS[op].cases.SAMPLES if all(shape is None or 0 not in shape for shape in each.shapes)]
    sample = max(samples, key=lambda each: sum(shape is not None for shape in each.shapes))
    return sample.tensors(torch.float32), sample.options


@pytest.mark.sample(5, 3)
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("convert", [lambda x: x.numpy(), lambda x: x.tolist()], ids=["numpy", "list"])
@pytest.mark.parametrize("op", OPS)
def test_an_argument_that_is_not_a_tensor_is_named_with_its_type(op, convert, autocast):
    tensors, options = sample_of(op)
    names = list(inspect.signature(OPS[op].function).parameters)
    for i, name in enumerate(names[: len(tensors)]):
        if tensors[i] is None:
            continue
        wrong = [*tensors[:i], convert(tensors[i].contiguous()), *tensors[i + 1 :]]
        kind = type(wrong[i]).__name__
        words = (
            rf"{op} takes torch tensors; {name} is a (numpy\.)?{re.escape(kind)}|{name} must be a tensor or .* {kind}"
        )
        refused = pytest.raises((TypeError, AccelerantError), match=words)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), refused:
            OPS[op].function(*wrong, **options)


@pytest.mark.parametrize("op", [ops.softmax, ops.log_softmax, ops.quantize_int8])
def test_axis_is_another_name_of_dim(op):
    x = torch.randn(3, 4)
    for _ in range(6):  # the first calls of a kind take the general path, later ones the fast path
        for axis in (0, 1, -1, -2):
            torch.testing.assert_close(op(x, axis=axis), op(x, dim=axis), rtol=0, atol=0)
    torch.testing.assert_close(op(x, dim=1, axis=1), op(x))
    with pytest.raises(ConfigError, match="axis is another name of dim; got dim=0 and axis=1"):
        op(x, dim=0, axis=1)
    with pytest.raises(ConfigError, match="dim must be an integer, got tuple"):
        op(x, axis=(0, 1))


def test_arguments_may_be_positional_where_torch_has_them_so():
    x, weight, bias = torch.randn(3, 4), torch.randn(4), torch.randn(4)
    q = torch.randn(1, 2, 5, 8)
    pairs = (
        (lambda: ops.layer_norm(x, weight, bias, 0.1), lambda: ops.layer_norm(x, weight, bias, eps=0.1)),
        (lambda: ops.rms_norm(x, weight, 0.1), lambda: ops.rms_norm(x, weight, eps=0.1)),
        (lambda: ops.add_layer_norm(x, x, weight, bias, 0.1), lambda: ops.add_layer_norm(x, x, weight, bias, eps=0.1)),
        (lambda: ops.add_rms_norm(x, x, weight, 0.1), lambda: ops.add_rms_norm(x, x, weight, eps=0.1)),
        (lambda: ops.attention(q, q, q, True, 0.3), lambda: ops.attention(q, q, q, causal=True, scale=0.3)),
        (lambda: ops.dropout(x, 0.5, False), lambda: x),
        (lambda: ops.embedding(torch.tensor([1, 2]), x, 1), lambda: x[1:]),
    )
    for positional, by_name in pairs:
        for _ in range(6):
            torch.testing.assert_close(positional(), by_name(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: ops.rms_norm(x, x[0], x[1]), "rms_norm: eps must be a number, got Tensor"),
        (lambda x: ops.layer_norm(x, (4,), x[0], x[0]), "layer_norm takes torch tensors; weight is a tuple"),
        (lambda x: ops.attention(*[x.view(1, 1, 3, 4)] * 3, x @ x.T), "causal must be True or False, got Tensor"),
        (lambda x: ops.attention(*[x.view(1, 1, 3, 4)] * 3, 0.125), "causal must be True or False, got float"),
    ],
)
def test_an_argument_at_anothers_position_is_refused(call, words):
    x = torch.randn(3, 4)
    for _ in range(6):
        with pytest.raises((TypeError, ConfigError), match=words):
            call(x)
