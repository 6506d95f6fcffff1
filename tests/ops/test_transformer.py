"""The pieces of a transformer block against their reference; the block itself through autograd."""

import pytest
import torch
from op_checks import counted, ran
from torch.nn import functional

from accelerant.config import override
from accelerant.ops import transformer
from accelerant.ops.registry import draw
from accelerant.ops.transformer import cases
from accelerant.ops.transformer.block import (
    Attention,
    Block,
    BlockSpec,
    ColumnSums,
    Embed,
    FusedLinear,
    FusedMLP,
    TiedLoss,
    block_reference,
)
from accelerant.runtime.dispatch import Case, force

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
SPEC = BlockSpec(2, (1e-5, 2e-5))


def dgelu_reference(dy, z):
    """Return the gradient of z through the tanh-approximated GELU, gelu(z), and the gradient's column sums."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        a = functional.gelu(z, approximate="tanh")
        (dz,) = torch.autograd.grad(a, z, dy)
    return dz, a.detach(), dz.sum(0)


def embed_reference(tokens, table, positions):
    """Return the rows of the table that tokens (B, T) select, plus the first T rows of positions."""
    return table[tokens] + positions[: tokens.shape[1]]


def close(actual, expected, dtype):
    tolerance = cases.TOLERANCES[dtype]
    largest = float(expected.abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(
        actual.double(), expected, rtol=tolerance.relative, atol=tolerance.absolute * max(1.0, largest)
    )


# --- pieces ----------------------------------------------------------------------------------------------------------
@pytest.mark.sample(5, 3)
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("shape", cases.MATRICES, ids=str)
def test_column_sums(shape, dtype, way):
    x = draw(shape, dtype)
    close(transformer.column_sums(x, F32), x.double().sum(0), dtype)
    assert ran("column_sums") == {way}


def test_column_sums_of_a_matrix_with_gaps(interpreted):
    x = draw((40, 30), F32)
    close(transformer.column_sums(x[:, 3:20], F32), x[:, 3:20].double().sum(0), F32)
    close(transformer.column_sums(x.t(), F32), x.t().double().sum(0), F32)


EACH = pytest.mark.parametrize(("examples", "T", "N"), [(1, 1, 5), (3, 7, 24), (2, 260, 130), (4, 33, 768), (0, 3, 8)])


@pytest.mark.sample(5, 3)
@EACH
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_column_sums_of_each_example(examples, T, N, dtype, way):
    x = draw((examples * T, N), dtype)
    close(transformer.column_sums_each(x, examples), x.double().view(examples, T, N).sum(1), dtype)
    assert ran("column_sums_each") == {way}


@pytest.mark.sample(7, 3)
@EACH
@pytest.mark.parametrize(("residual", "wanted"), [
    (True, (True, True, True)), (False, (True, False, False)), (True, (False, False, True)),
    (False, (True, True, True)),
])  # fmt: skip
def test_norm_backward_of_each_example(examples, T, N, residual, wanted, way):
    s, dy, ds = (draw((examples, T, N), F32, seed=seed) for seed in range(3))
    ds = ds if residual else None
    weight = draw((N,), F32, seed=3)
    rows = s.view(-1, N).double()
    mean, rstd = rows.mean(1), (rows.var(1, correction=0) + 1e-5).rsqrt()
    statistics = torch.stack([mean, rstd], 1).float()
    g, *sums = transformer.norm_backward_each(dy, ds, s, weight, statistics, 1e-5, examples, wanted)
    expected = transformer.norm_backward(dy, ds, s, weight, None, statistics, 1e-5, (True, False, False), None)[0]
    close(g, expected.double(), F32)
    h = ((rows - mean[:, None]) * rstd[:, None]).view(s.shape)
    for found, want, full in zip(sums, wanted, (h * dy, dy.double(), expected.double()), strict=True):
        if want:
            close(found, full.double().sum(1), F32)
        else:
            assert found is None
    assert ran("block_norm_bwd_each") == {way if examples else "torch"}


@pytest.mark.parametrize(("examples", "T"), [(2, 32), (3, 7)])
def test_dz_sums_of_each_example(examples, T, way):
    dy, weight, z = draw((examples * T, 24), F32), draw((24, 40), F32, seed=1), draw((examples * T, 40), F32, seed=2)
    whole = transformer.linear_dz(dy, weight, z, F32)
    found = transformer.linear_dz(dy, weight, z, F32, examples)
    assert torch.equal(found[0], whole[0])
    close(found[2], whole[0].double().view(examples, T, 40).sum(1), F32)


def test_many_partial_sums_take_narrow_strips(interpreted):
    from accelerant.ops.linear_gelu import launch_join

    x = draw((300, 37), F32)
    close(launch_join(x, F32), x.double().sum(0), F32)


@pytest.mark.sample(5, 3)
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("shape", cases.MATRICES, ids=str)
def test_dgelu(shape, dtype, way):
    dy, z = draw(shape, dtype), 2 * draw(shape, dtype, seed=1)
    found = transformer.dgelu(dy, z, "tanh", F32)
    for each, expected in zip(found, dgelu_reference(dy.double(), z.double()), strict=True):
        close(each, expected, dtype)
    assert transformer.dgelu(dy, z, "tanh", None)[2] is None
    assert ran("dgelu") == {way}


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_embed(dtype, way):
    table, places, tokens = draw((11, 24), F32), draw((9, 24), F32, seed=1), torch.randint(0, 11, (3, 7))
    close(
        transformer.embed(tokens, table, places, dtype), embed_reference(tokens, table.double(), places.double()), dtype
    )
    assert transformer.embed(tokens[:0], table, places, dtype).shape == (0, 7, 24)
    assert ran("embed_fwd") == {way}


def test_a_token_that_is_none_gives_a_row_of_nan(interpreted):
    y = transformer.embed(torch.tensor([[0, 5, -1]]), draw((5, 8), F32), draw((3, 8), F32), F32)
    assert y.isnan().all(-1).tolist() == [[False, True, True]]


@pytest.mark.parametrize(
    ("way", "deterministic", "name"),
    [("triton", False, "triton-atomic"), ("triton", True, "triton"), ("torch", False, "torch")],
    indirect=["way"],
)
def test_rows_are_added_where_the_other_gradient_lies(way, deterministic, name):
    dy, tokens, before = draw((3, 7, 24), F32), torch.randint(0, 4, (3, 7)), draw((11, 24), F32, seed=1)
    dtable = before.clone()
    with override(deterministic=deterministic):
        transformer.embed_backward(dy, tokens, dtable)
    expected = before.double().index_add(0, tokens.view(-1), dy.view(-1, 24).double())
    close(dtable, expected, F32)
    assert ran("embed_bwd") == {name}


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, False)])
def test_tied_loss_leaves_rows_that_are_no_classes_alone(needs, way):
    hidden, table, targets = draw((6, 16), F32), draw((64, 16), F32, seed=1), torch.randint(0, 50, (6,))
    targets[2] = -100
    loss, dhidden, dtable = transformer.tied_loss(hidden, table, targets, 50, -100, needs)
    h, t = hidden.double().requires_grad_(), table.double().requires_grad_()
    expected = functional.cross_entropy(h @ t[:50].t(), targets)
    expected.backward()
    close(loss, expected.detach(), F32)
    assert (dhidden is not None, dtable is not None) == needs
    if needs[0]:
        close(dhidden, h.grad, F32)
    if needs[1]:
        close(dtable, t.grad, F32)
        assert not dtable[50:].any()


def test_hopper_serves_what_it_says():
    case = Case(torch.device("cpu"), BF16, (128, 3072, 768), ("tanh",))
    assert transformer.refuses_dz(case) == "is for sm_90"


@pytest.mark.slow
def test_hopper_kernel_compiles_without_spills():
    (resources,) = transformer.dz_program().build("sm_90a").resources.values()
    assert resources.spill_bytes == resources.stack_bytes == 0
    assert transformer.dz_program().shared_bytes <= 227 * 1024


# --- the autograd functions ------------------------------------------------------------------------------------------
def parameters(width, dtype, *, bias=True):
    """Weight and bias of norm_1, qkv, projection, norm_2, up and down."""
    shapes = ((width,), (3 * width, width), (width, width), (width,), (4 * width, width), (width, 4 * width))
    found = []
    for seed, shape in enumerate(shapes):
        found += [draw(shape, dtype, seed=2 * seed) * 0.5, draw(shape[:1], dtype, seed=2 * seed + 1) if bias else None]
    return [None if each is None else each.requires_grad_() for each in found]


def lows(params, dtype):
    linear = [param for i, param in enumerate(params) if i not in (0, 1, 6, 7)]
    return [None if param is None else param.detach().to(dtype) for param in linear]


def gradients(outputs, inputs):
    total = sum((y.double() * draw(y.shape, F64, seed=seed)).sum() for seed, y in enumerate(outputs))
    return torch.autograd.grad(total, [each for each in inputs if each is not None])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_block_is_the_reference(first, bias, uninterpreted):
    params = parameters(8, F64, bias=bias)
    x = draw((2, 5, 8), F64).requires_grad_()
    residual = None if first else draw((2, 5, 8), F64, seed=3).requires_grad_()
    found = Block.apply(x, residual, SPEC, None, None, *params, *lows(params, F64))
    expected = block_reference(x if residual is None else x + residual, SPEC, params)
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other)
    inputs = [x, residual, *params]
    for each, other in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(each, other)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("spec", [
    SPEC._replace(joined=True),
    SPEC._replace(joined=True, causal=False, approximate="none", scale=0.7),
    SPEC._replace(post_norm=True, causal=False, approximate="none"),
    SPEC._replace(post_norm=True, window=2),
], ids=["GPT-2", "ViT", "BERT", "window"])  # fmt: skip
def test_block_of_each_kind_is_the_reference(spec, transposed, uninterpreted):
    """With parameters in the dtype of x, which are not passed twice; transposed as those of transformers' Conv1D."""
    params = parameters(8, F64)
    if transposed:
        params = [p if p.dim() == 1 else p.detach().t().contiguous().t().requires_grad_() for p in params]
    x = draw((2, 5, 8), F64).requires_grad_()
    found, residual = Block.apply(x, None, spec, None, None, *params)
    expected, _ = block_reference(x, spec, params)
    assert residual is None
    torch.testing.assert_close(found, expected)
    dfound = gradients([found], [x, *params])
    for each, other, param in zip(dfound, gradients([expected], [x, *params]), [x, *params], strict=True):
        torch.testing.assert_close(each, other)
        assert each.stride() == param.stride()


@pytest.mark.slow
def test_block_on_our_kernels(interpreted):
    """In float32 through the interpreter; which attention that is, is another test's matter."""
    params = parameters(16, F32)
    x, residual = draw((2, 6, 16), F32).requires_grad_(), draw((2, 6, 16), F32, seed=3).requires_grad_()
    found = Block.apply(x, residual, SPEC, None, None, *params, *lows(params, F32))
    wide = [each.detach().double().requires_grad_() for each in (x, residual, *params)]
    expected = block_reference(wide[0] + wide[1], SPEC, wide[2:])
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each.double(), other, rtol=1e-4, atol=1e-4)
    for each, other in zip(gradients(found, (x, residual, *params)), gradients(expected, wide), strict=True):
        torch.testing.assert_close(each.double(), other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))
    assert ran("dgelu") == ran("column_sums") == ran("block_norm_bwd") == {"triton"}


@pytest.mark.parametrize("changed", [False, True])
def test_sums_go_with_a_gradient_to_the_block_before(changed, uninterpreted):
    """The last bias of a block belongs to sums that the next block's first norm made; unless the gradient changed."""
    one, two = parameters(8, F64), [each.detach().clone().requires_grad_() for each in parameters(8, F64)]
    x = draw((2, 5, 8), F64).requires_grad_()

    def run(block):
        branch, residual = block(x, None, one)
        if changed:
            branch.register_hook(lambda gradient: gradient.mul_(2.0))
        return block(branch, residual, two)

    between = ColumnSums(one[-1])
    sums = {id(one): (None, between), id(two): (between, None)}
    found = gradients(
        run(lambda x, s, params: Block.apply(x, s, SPEC, *sums[id(params)], *params, *lows(params, F64))),
        (x, *one, *two),
    )
    summed = sum(row["calls"] for row in counted("column_sums"))
    assert summed == (4 if changed else 3)  # qkv of both, down of the second one
    expected = gradients(
        run(lambda x, s, params: block_reference(x if s is None else x + s, SPEC, params)), (x, *one, *two)
    )
    if not changed:  # a hook that writes over a gradient writes over the residual's, too: only the count is of interest
        for each, other in zip(found, expected, strict=True):
            torch.testing.assert_close(each, other)


def test_gradients_of_weights_have_the_parameters_dtype(uninterpreted):
    params = parameters(8, F32)
    x = draw((2, 5, 8), BF16).requires_grad_()
    branch, residual = Block.apply(x, None, SPEC, None, None, *params, *lows(params, BF16))
    assert branch.dtype == residual.dtype == BF16
    (branch.float().sum() + residual.float().sum()).backward()
    assert {param.grad.dtype for param in params} == {F32}
    assert x.grad.dtype == BF16


def test_frozen_parameters_cost_nothing(uninterpreted):
    params = parameters(8, F32)
    for param in params[:-2]:
        param.requires_grad_(False)
    branch, _ = Block.apply(draw((1, 3, 8), BF16), None, SPEC, None, None, *params, *lows(params, BF16))
    branch.sum().backward()
    assert [param.grad is None for param in params] == [True] * 10 + [False] * 2
    assert sum(row["calls"] for row in counted("linear_dw")) == 1


def functions():
    """Name -> a function of its differentiable arguments, and these."""
    params = parameters(4, F64)
    linear = params[2:4]
    mlp = params[8:]
    x = draw((1, 3, 4), F64).requires_grad_()
    qkv = draw((1, 3, 3, 2, 4), F64).requires_grad_()
    table, places = draw((5, 4), F64).requires_grad_(), draw((3, 4), F64, seed=1).requires_grad_()
    tokens = torch.tensor([[1, 4, 1]])

    def low(given):
        return [each.detach() for each in given]

    def block(x, *given):
        return Block.apply(x, None, SPEC, None, None, *given, *lows(given, F64))

    def post_norm(x, *given):
        return Block.apply(x, None, SPEC._replace(post_norm=True), None, None, *given)[0]

    return {
        "linear": (lambda x, *given: FusedLinear.apply(x, *given, *low(given)), (x, *linear)),
        "mlp": (lambda x, *given: FusedMLP.apply(x, *given, *low(given)), (x, *mlp)),
        "attention": (Attention.apply, (qkv,)),
        "block": (block, (x, *params)),
        "post-norm block": (post_norm, (x, *params)),
        "embed": (lambda *given: Embed.apply(tokens, *given, F64), (table, places)),
        "tied loss": (
            lambda h, t: TiedLoss.apply(h[0], t, t.detach(), torch.tensor([0, 3, -100]), 5, -100),
            (x, table),
        ),
    }


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", list(functions()))
def test_gradcheck(name, uninterpreted):
    run, inputs = functions()[name]
    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "mlp", "attention", "block", "post-norm block"])
def test_a_backward_pass_can_be_differentiated(name, uninterpreted):
    run, inputs = functions()[name]

    def first(*given):
        y = run(*given)
        return y[0].sin() if isinstance(y, tuple) else y.sin()

    assert torch.autograd.gradgradcheck(first, inputs, atol=1e-4)


def test_a_block_with_a_residual_apart_is_differentiated_once(uninterpreted):
    params = parameters(4, F64)
    x = draw((1, 3, 4), F64).requires_grad_()
    branch, _ = Block.apply(x, x.sin(), SPEC, None, None, *params, *lows(params, F64))
    with pytest.raises(RuntimeError, match="only their sum is saved"):
        torch.autograd.grad(branch.sum(), x, create_graph=True)


def test_a_second_backward_pass_of_the_loss_makes_its_gradients_again(uninterpreted):
    run, inputs = functions()["tied loss"]
    loss = run(*inputs)
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    for each, again in zip(first, torch.autograd.grad(2 * loss, inputs), strict=True):
        torch.testing.assert_close(again, 2 * each)


def test_both_gradients_of_a_tied_table_meet(uninterpreted):
    table, places = draw((6, 4), F64).requires_grad_(), draw((3, 4), F64, seed=1).requires_grad_()
    tokens, targets = torch.tensor([[1, 4, 1]]), torch.tensor([4, 0, 2])
    x, tied = Embed.apply(tokens, table, places, F64)
    TiedLoss.apply(x.view(3, 4), tied, table.detach(), targets, 6, -100).backward()
    found = table.grad.clone()
    table.grad = None
    plain = embed_reference(tokens, table, places)
    functional.cross_entropy(plain.view(3, 4) @ table.t(), targets).backward()
    torch.testing.assert_close(found, table.grad)


# --- on a GPU --------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 3072, 768), (200, 136, 72), (129, 256, 128), (1, 8, 8)], ids=str)
def test_product_with_gelus_gradient(shape):
    M, N, K = shape
    dy, weight, z = draw((M, K), BF16, "cuda"), draw((K, N), BF16, "cuda", 1) * K**-0.5, draw((M, N), BF16, "cuda", 2)
    case = Case(dy.device, BF16, shape, ("tanh",))
    if transformer.refuses_dz(case):
        pytest.skip(f"the kernel {transformer.refuses_dz(case)}")
    with force(linear_dz="hopper"):
        dz, a, sums = transformer.linear_dz(dy, weight.to(BF16), z, F32)
    da = dy.double() @ weight.to(BF16).double()
    for each, expected in zip((dz, a, sums), dgelu_reference(da, z.double()), strict=True):
        close(each, expected, BF16)


@pytest.mark.gpu
def test_gradients_of_a_packed_product_are_written_in_place():
    qkv = draw((2, 256, 3, 4, 64), BF16, "cuda")
    o, lse = transformer.attend(qkv)
    do = draw((2, 4, 256, 64), BF16, "cuda", 1)
    found = transformer.attend_backward(do, qkv, o, lse)
    with force(attention_packed_bwd="copied"):
        copied = transformer.attend_backward(do, qkv, o, lse)
    close(found, copied.double(), BF16)
