"""Arguments of the public ops: what is not a tensor is refused by a sentence that names it; torch's names, NumPy's."""

import inspect
import re

import pytest
import torch
from torch.nn import functional

from accelerant import ops
from accelerant.errors import AccelerantError, ConfigError, ShapeError, UnsupportedCase
from accelerant.ops.registry import public_ops
from refusals import assert_raises

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


@pytest.mark.parametrize(("op", "name"), [
    ("matmul", "b"), ("linear", "weight"), ("linear_gelu", "weight"), ("conv2d", "weight"), ("mse_loss", "target"),
    ("l1_loss", "target"), ("binary_cross_entropy", "target"), ("binary_cross_entropy_with_logits", "target"),
    ("add_layer_norm", "residual"), ("add_rms_norm", "residual"),
])  # fmt: skip
def test_none_for_a_tensor_that_is_needed_is_named(op, name):
    with pytest.raises(TypeError, match=f"{op} takes torch tensors; {name} is a NoneType"):
        getattr(ops, op)(torch.rand(1, 2, 4, 4), None)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
def test_none_for_the_first_tensor_is_named(op):
    with pytest.raises(TypeError, match=f"{op} takes torch tensors; x is a NoneType"):
        getattr(ops, op)(None, torch.rand(4))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("calls", [0, 1, 6])  # the first calls of a kind take the general path, later ones the fast one
def test_nested_and_sparse_tensors_are_named(calls):
    dense, (x, y) = torch.rand(3, 4), (torch.rand(3, 4), torch.rand(2, 4))
    for _ in range(calls):
        ops.mse_loss(dense, x)
    for odd, kind in ((torch.nested.nested_tensor([x, y]), "nested"), (dense.to_sparse(), "sparse_coo")):
        for given in ((odd, x), (dense, odd)):
            with pytest.raises(UnsupportedCase, match=f"an argument of mse_loss is a {kind} tensor; wanted a dense"):
                ops.mse_loss(*given)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("op", "count"), [("layer_norm", 3), ("add_layer_norm", 4)])
def test_a_nested_tensor_among_others_is_named(op, count):
    dense = [torch.rand(3, 4)] * (count - 2) + [torch.rand(4)] * 2
    for _ in range(6):
        getattr(ops, op)(*dense)
    for place in range(1, count):
        given = [*dense[:place], torch.nested.nested_tensor([torch.rand(4)]), *dense[place + 1 :]]
        with pytest.raises(UnsupportedCase, match=f"an argument of {op} is a nested tensor"):
            getattr(ops, op)(*given)


def test_a_subclass_that_knows_few_attributes_is_served_after_dense_tensors():
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function == torch.Tensor.is_nested.__get__:
                return NotImplemented
            return super().__torch_function__(function, types, args, kwargs or {})

    x = torch.rand(3, 4)
    expected = [ops.softmax(x) for _ in range(6)][-1]
    assert torch.equal(ops.softmax(x.as_subclass(Own)).as_subclass(torch.Tensor), expected)


@pytest.mark.parametrize("shape", [(2, 3, 0), (0,), (0, 2, 0)])
def test_rows_without_elements(shape):
    x, weight, targets = torch.rand(shape), torch.rand(5, 0), torch.zeros(shape[:-1], dtype=torch.int64)
    bias = torch.rand(5)
    torch.testing.assert_close(ops.linear_gelu(x, weight, bias), functional.gelu(functional.linear(x, weight, bias)))
    y = ops.linear_int8(x, weight.to(torch.int8), torch.ones(5), bias)
    torch.testing.assert_close(y, functional.linear(x, weight, bias))
    losses = ops.linear_cross_entropy(x, weight, targets, reduction="none")
    torch.testing.assert_close(losses, torch.full(shape[:-1], 5.0).log())


@pytest.mark.parametrize("op", [ops.softmax, ops.log_softmax, ops.quantize_int8])
def test_axis_is_another_name_of_dim(op):
    x = torch.randn(3, 4)
    for _ in range(6):  # the first calls of a kind take the general path, later ones the fast path
        for axis in (0, 1, -1, -2):
            torch.testing.assert_close(op(x, axis=axis), op(x, dim=axis), rtol=0, atol=0)
    torch.testing.assert_close(op(x, dim=1, axis=1), op(x))
    assert_raises(ConfigError, "axis is another name of dim; got dim=0 and axis=1", op, x, dim=0, axis=1)
    assert_raises(ConfigError, "dim must be an integer, got tuple", op, x, axis=(0, 1))


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


@pytest.mark.parametrize(("call", "words"), [
    (lambda x: ops.rms_norm(x, x[0], x[1]), "rms_norm: eps must be a number, got Tensor"),
    (lambda x: ops.layer_norm(x, x[0], (4,)), "layer_norm takes torch tensors; bias is a tuple"),
    (lambda x: ops.attention(*[x.view(1, 1, 3, 4)] * 3, x @ x.T), "causal must be True or False, got Tensor"),
    (lambda x: ops.attention(*[x.view(1, 1, 3, 4)] * 3, 0.125), "causal must be True or False, got float"),
])  # fmt: skip
def test_an_argument_at_anothers_position_is_refused(call, words):
    x = torch.randn(3, 4)
    for _ in range(6):
        assert_raises((TypeError, ConfigError), words, call, x)


# --- torch's names ---------------------------------------------------------------------------------------------------
def torch_parameters(op):
    """Return torch's parameters of an op by name, with their defaults in the words of Python; None if it has none."""
    name = {"attention": "scaled_dot_product_attention"}.get(op, op)
    function = {"max_pool2d": functional.max_pool2d_with_indices}.get(op)
    function = function or getattr(functional, name, None) or getattr(torch, name, None)
    if function is None:
        return None
    try:
        signature = inspect.signature(function).parameters.values()
        found = {each.name: None if each.default is each.empty else repr(each.default) for each in signature}
        if found.keys() - {"input"}:
            return found
    except ValueError:
        pass
    head = re.search(r"\(([^()]*)\)", function.__doc__.replace("\n", " "))[1]
    parts = [each.partition("=") for each in head.replace("*,", "").split(",")]
    return {name.strip(): default.strip() or None for name, _, default in parts}


TORCHS = {op: names for op in OPS if (names := torch_parameters(op)) is not None}


def test_all_of_torchs_functions_were_found():
    own = {"add_layer_norm", "add_rms_norm", "attention_decode", "attention_paged", "attention_varlen", "linear_gelu"}
    assert OPS.keys() - TORCHS.keys() == own | {"linear_int4", "linear_int8", "quantize_int8", "rope", "swiglu"}


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("op", TORCHS)
def test_arguments_by_torchs_names(op, compiles):
    """Every tensor and option of the sample, and torch's defaults of what only torch has."""
    tensors, options = sample_of(op)
    function, parameters = OPS[op].function, inspect.signature(OPS[op].function).parameters
    theirs = [name for name in TORCHS[op] if name != "normalized_shape"]
    if op == "attention":  # whose mask is a keyword
        tensors = tensors[:3]
    named = dict(zip(theirs, tensors, strict=False))
    if "normalized_shape" in TORCHS[op]:
        named["normalized_shape"] = list(tensors[0].shape[-1:])
    plain = {"None": None, "False": False, "True": True, "1": 1, "2.0": 2.0, "3": 3}
    for name, default in TORCHS[op].items():
        if name not in {**parameters, **named} and default in plain:
            named[name] = plain[default]
    options = {"seed": 3, **options} if op == "dropout" else options
    torch.compiler.reset()
    call = torch.compile(function, backend="eager", fullgraph=True) if compiles else function
    expected = function(*tensors, **options)
    for _ in range(2 if compiles else 6):
        torch.testing.assert_close(call(**named, **options), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", TORCHS)
def test_an_argument_by_both_names_is_refused(op):
    tensors, options = sample_of(op)
    own = list(inspect.signature(OPS[op].function).parameters)[: len(tensors)]
    for mine, theirs, x in zip(own, (name for name in TORCHS[op] if name != "normalized_shape"), tensors, strict=False):
        if x is not None and mine != theirs:
            given = {**dict(zip(own, tensors, strict=True)), **options}
            words = rf"{op}\(\) got {mine}= also by torch's name"
            for order in ({**given, theirs: x}, {theirs: x, **given}):
                assert_raises(TypeError, words, OPS[op].function, **order)
            with pytest.raises(TypeError, match=r"multiple values|positional"):
                OPS[op].function(*tensors, **{theirs: x}, **options)


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("op", sorted(OPS.keys() - TORCHS.keys()))
def test_ops_that_torch_lacks_understand_its_names_too(op):
    tensors, options = sample_of(op)
    own = list(inspect.signature(OPS[op].function).parameters)
    theirs = {
        "q": "query", "k": "key", "v": "value", "k_cache": "key", "v_cache": "value", "gate": "input", "x": "input",
    }  # fmt: skip
    named = {theirs.get(name, name): x for name, x in zip(own, tensors, strict=False)}
    if "causal" in own:
        options = {**options, "causal": True}
        named["is_causal"] = True
    expected = OPS[op].function(*tensors, **options)
    options = {name: value for name, value in options.items() if name != "causal"}
    for _ in range(6):
        torch.testing.assert_close(OPS[op].function(**named, **options), expected, rtol=0, atol=0)
    with pytest.raises(TypeError, match=f"got {own[0]}= also by torch's name|multiple values"):
        OPS[op].function(*tensors, **{theirs[own[0]]: tensors[0]}, **options)


def test_options_by_torchs_names():
    q, mask = torch.randn(1, 2, 5, 8), torch.rand(5, 5) > 0.5
    for _ in range(6):
        same = torch.equal(ops.attention(q, q, q, is_causal=True), ops.attention(q, q, q, causal=True))
        assert same
        assert torch.equal(ops.attention(q, q, q, attn_mask=mask, enable_gqa=True), ops.attention(q, q, q, mask=mask))
        with pytest.raises(TypeError, match=r"attention\(\) got causal= also by torch's name"):
            ops.attention(q, q, q, causal=True, is_causal=True)
        with pytest.raises(TypeError, match=r"attention\(\) got mask= also by torch's name"):
            ops.attention(q, q, q, mask=mask, attn_mask=mask)


@pytest.mark.parametrize(("call", "words"), [
    (lambda x: ops.relu(x, inplace=True),
     "relu: got an unexpected keyword argument 'inplace': torch's .* must be False"),
    (lambda x: ops.softmax(x, 1, dtype=torch.float64),
     "argument 'dtype': torch's function has it, here it must be None"),
    (lambda x: ops.cross_entropy(x, x.argmax(1), weight=x[0]),
     "cross_entropy: got an unexpected keyword argument 'weight'"),
    (lambda x: ops.add(x, x, alpha=2), "argument 'alpha': .* must be 1"),
])  # fmt: skip
def test_what_only_torchs_function_has_is_refused(call, words):
    assert_raises(TypeError, words, call, torch.randn(3, 4))


def test_normalized_shape_is_the_last_dimension():
    x = torch.randn(2, 3, 4)
    for shape in (4, [4], (4,), x.shape[-1:]):
        assert torch.equal(ops.rms_norm(x, normalized_shape=shape), ops.rms_norm(x))
        assert torch.equal(ops.rms_norm(normalized_shape=shape, input=x), ops.rms_norm(x))
    for shape in (3, (3, 4), ()):
        assert_raises(ShapeError, r"normalized_shape must be \(4,\), got", ops.layer_norm, x, normalized_shape=shape)


def test_normalized_shape_may_come_second_as_in_torch():
    x, weight, bias = torch.randn(3, 4), torch.randn(4), torch.randn(4)
    for shape in (4, (4,), [4], x.shape[-1:]):
        assert torch.equal(ops.layer_norm(x, shape, weight, bias, 1e-3), ops.layer_norm(x, weight, bias, 1e-3))
        assert torch.equal(ops.rms_norm(x, shape, weight, 1e-3), ops.rms_norm(x, weight, 1e-3))
        assert torch.equal(ops.layer_norm(x, shape, bias=bias), ops.layer_norm(x, bias=bias))
    compiled = torch.compile(lambda x: ops.layer_norm(x, (4,), weight), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), ops.layer_norm(x, weight))
    other = x.as_subclass(type("Subclass", (torch.Tensor,), {}))
    assert torch.equal(ops.layer_norm(other, (4,), weight), ops.layer_norm(x, weight))
    assert_raises(ShapeError, r"normalized_shape must be \(4,\), got", ops.layer_norm, x, (3, 4), weight)
    assert_raises(TypeError, "multiple values for argument 'weight'", ops.layer_norm, x, (4,), weight, weight=weight)


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=["plain", "autocast"])
@pytest.mark.parametrize(
    "shapes", [((3, 4), (5, 4)), ((2, 3, 4), (5, 4)), ((4,), (5, 4)), ((3, 4), (4,)), ((0, 4), (5, 4))]
)
def test_linear_is_torchs(shapes, low):
    x, weight = (torch.randn(shape, requires_grad=True) for shape in shapes)
    bias = torch.randn(weight.shape[:-1], requires_grad=True)
    for given in ((x, weight), (x, weight, bias))[: weight.dim()]:
        with torch.autocast("cpu", low, enabled=low is not None):
            y, expected = ops.linear(*given), functional.linear(*given)
        assert y.dtype == expected.dtype
        torch.testing.assert_close(y, expected)
        dy = torch.randn_like(y)
        torch.testing.assert_close(torch.autograd.grad(y, given, dy), torch.autograd.grad(expected, given, dy))
    by_name = {"input": x, "weight": weight, "bias": bias if weight.dim() == 2 else None}
    torch.testing.assert_close(ops.linear(**by_name), functional.linear(**by_name))
    compiled = torch.compile(ops.linear, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**by_name), functional.linear(**by_name))


def test_linear_refuses():
    x = torch.randn(3, 4)
    with pytest.raises(ShapeError, match=r"linear takes input \(\.\.\., K\) and weight .* got \(3, 4\) and \(4, 3\)"):
        ops.linear(x, x.T)
    assert_raises(ShapeError, r"bias must be \(N,\) .* got \(4,\) for \(3, 4\)", ops.linear, x, x, x[0])
    assert_raises(TypeError, "linear takes torch tensors; weight is a list", lambda: ops.linear(x, x.tolist()))


HEADS = [
    ((2, 2, 5, 8), (2, 2, 5, 8)), ((1, 4, 5, 8), (1, 2, 7, 8)), ((2, 7, 8), (2, 5, 8)),
    ((2, 1, 2, 5, 8), (2, 1, 2, 6, 8)), ((2, 2, 5, 8), (1, 2, 5, 8)), ((5, 8), (6, 8)),
]  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("mask", [None, "causal", "bool", "float"])
@pytest.mark.parametrize(("q", "kv"), HEADS)
def test_scaled_dot_product_attention_is_torchs(q, kv, mask, scale):
    if len(q) == 2 and mask == "causal":
        pytest.skip("torch has no kernel for it")
    tensors = [torch.randn(shape, requires_grad=True) for shape in (q, kv, kv)]
    options = {"scale": scale, "enable_gqa": len(q) > 2 and q[-3] != kv[-3]}
    if mask == "causal":
        options["is_causal"] = True
    elif mask is not None:
        seen = torch.rand(*q[:-1], kv[-2]) > 0.3
        seen[..., 0] = True
        options["attn_mask"] = seen if mask == "bool" else torch.randn(seen.shape)
    o = ops.scaled_dot_product_attention(*tensors, **options)
    expected = functional.scaled_dot_product_attention(*tensors, **options)
    torch.testing.assert_close(o, expected)
    do = torch.randn_like(o)
    torch.testing.assert_close(torch.autograd.grad(o, tensors, do), torch.autograd.grad(expected, tensors, do))


def test_scaled_dot_product_attention_has_torchs_order_and_dropout():
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 6, 8)
    mask = torch.rand(5, 6) > 0.3
    ours, theirs = ops.scaled_dot_product_attention, functional.scaled_dot_product_attention
    torch.testing.assert_close(ours(q, k, k, mask, 0.0, False), theirs(q, k, k, mask, 0.0, False))
    wide = torch.randn(2, 4, 6, 16)
    torch.testing.assert_close(ours(q, k, wide), theirs(q, k, wide))
    torch.manual_seed(0)
    dropped = ours(q, k, k, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(dropped, theirs(q, k, k, dropout_p=0.5))
    assert_raises(ConfigError, "attn_mask or is_causal, not both", ours, q, k, k, mask, is_causal=True)
    assert_raises(ShapeError, "query has 4 heads, key 2: pass enable_gqa=True", lambda: ours(q, k[:, :2], k[:, :2]))
