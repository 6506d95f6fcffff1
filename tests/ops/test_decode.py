"""A decoder layer's steps for one new token, against the mathematics in float64."""

import pytest
import torch
from op_checks import ran

from accelerant import ops
from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.ops.decode import steps as launch
from accelerant.ops.decode.steps import DecodeTile, append, decode_linear, linear
from accelerant.ops.linear_int8.op import TO_PLANES
from accelerant.ops.rope import rope_tables
from accelerant.runtime.dispatch import Case, force

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def linear_reference(x, weight, scale=None, *, norm=None, eps=1e-6, residual=None, gated=False):
    """Return the result of accelerant.ops.decode.steps.linear."""
    h = x if norm is None else x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * norm
    z = h @ weight.to(h.dtype).T
    if scale is not None:
        z = z * scale
    if gated:
        gate, up = z.chunk(2, -1)
        z = torch.nn.functional.silu(gate) * up
    return z if residual is None else z + residual


def rope_reference(qkv, cos, sin, positions, k_cache, v_cache):
    """Return the rotated queries, and copies of the caches with the new token."""
    B, kv_heads, T, D = k_cache.shape
    x = qkv.view(B, -1, D)
    heads = x.shape[1] - 2 * kv_heads
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    rotated = x.clone()
    for b, position in enumerate(positions.tolist()):
        if position >= T:
            continue
        c, s = cos[position].to(x.dtype), sin[position].to(x.dtype)
        x1, x2 = x[b].chunk(2, -1)
        rotated[b] = torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1)
        k_cache[b, :, position] = rotated[b, heads : heads + kv_heads]
        v_cache[b, :, position] = x[b, heads + kv_heads :]
    return rotated[:, :heads, None], k_cache, v_cache


def tensors(M, N, K, dtype=torch.float32, *, integers=False, norm=False, residual=False, gated=False):
    lines = 2 * N if gated else N
    x = torch.randn(M, K).to(dtype)
    if integers:
        weight, scale = torch.randint(-128, 128, (lines, K), dtype=torch.int8), torch.rand(lines) / 50
    else:
        weight, scale = torch.randn(lines, K).to(dtype), None
    options = {"eps": 1e-3, "gated": gated}
    options |= {"norm": torch.randn(K).to(dtype)} if norm else {}
    options |= {"residual": torch.randn(M, N).to(dtype)} if residual else {}
    return (x, weight, scale), options


def wide(args, options):
    x, weight, scale = args
    return linear_reference(
        x.double(), weight, scale, **{k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    )


def close(found, expected, tolerance):
    assert found.shape == expected.shape
    torch.testing.assert_close(
        found.double(), expected, rtol=tolerance, atol=tolerance * max(1.0, float(expected.abs().max()))
    )


KINDS = pytest.mark.parametrize("kind", [
    {}, {"norm": True}, {"residual": True}, {"gated": True}, {"norm": True, "gated": True},
    {"norm": True, "residual": True, "gated": True},
], ids=lambda kind: "+".join(kind) or "plain")  # fmt: skip


# --- linear ----------------------------------------------------------------------------------------------------------
@pytest.mark.sample(5, 3)
@KINDS
@pytest.mark.parametrize("integers", [False, True], ids=["floats", "integers"])
@pytest.mark.parametrize(("N", "K"), [(1, 1), (9, 37), (16, 48)])
def test_one_row_matches_the_reference(N, K, integers, kind, way):
    args, options = tensors(1, N, K, integers=integers, **kind)
    close(linear(*args, **options), wide(args, options), 2e-5)
    assert ran() == {way}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("integers", [False, True], ids=["floats", "integers"])
def test_low_precision_is_rounded_at_the_end(dtype, integers, interpreted):
    args, options = tensors(1, 24, 96, dtype, integers=integers, norm=True, residual=True)
    y = linear(*args, **options)
    assert y.dtype == dtype
    close(y, wide(args, options), TOLERANCES[dtype])


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "plan",
    [DecodeTile(1, 1, 16, 1, 4), DecodeTile(2, 2, 8, 1, 1), DecodeTile(4, 1, 32, 1, 2), DecodeTile(4, 2, 16, 1, 1)],
)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("N", "K"), [(7, 50), (16, 64)])
def test_any_plan_gives_the_same(plan, gated, N, K, interpreted):
    if gated and plan.sets == 1:
        pytest.skip("gates and what they gate are at least two lines")
    args, options = tensors(1, N, K, integers=True, norm=True, residual=True, gated=gated)
    x, weight, scale = args
    y = launch.launch_linear(x, weight, scale, options["norm"], 1e-3, options["residual"], gated, plan)
    close(y, wide(args, options), 2e-5)


@KINDS
@pytest.mark.parametrize("integers", [False, True], ids=["floats", "integers"])
def test_several_rows_are_made_of_other_ops(integers, kind):
    args, options = tensors(3, 16, 32, integers=integers, **kind)
    close(linear(*args, **options), wide(args, options), 2e-5)


def test_float64_is_torchs(interpreted):
    args, options = tensors(1, 5, 6, torch.float64, norm=True)
    torch.testing.assert_close(linear(*args, **options), wide(args, options))


def test_nothing_to_compute(interpreted):
    assert linear(torch.zeros(1, 4), torch.zeros(0, 4)).shape == (1, 0)
    assert linear(torch.zeros(0, 4), torch.zeros(3, 4)).shape == (0, 3)


@pytest.mark.parametrize(("args", "options", "error", "words"), [
    ((torch.zeros(1, 3), torch.zeros(2, 4)), {}, ShapeError, r"got \(1, 3\) and \(2, 4\)"),
    ((torch.zeros(3), torch.zeros(2, 3)), {}, ShapeError, r"x must be \(M, K\)"),
    ((torch.zeros(1, 3), torch.zeros(2, 3).double()), {}, UnsupportedDtype, "float64 for x of float32"),
    ((torch.zeros(1, 3), torch.zeros(2, 3).char()), {}, ShapeError, "take a scale, others none"),
    ((torch.zeros(1, 3), torch.zeros(2, 3), torch.zeros(2)), {}, ShapeError, "take a scale, others none"),
    ((torch.zeros(1, 3), torch.zeros(3, 3)), {"gated": True}, ShapeError, "even number of rows, got 3"),
    ((torch.zeros(1, 3), torch.zeros(2, 3)), {"norm": torch.zeros(2)}, ShapeError, r"norm must be \(3,\)"),
    ((torch.zeros(1, 3), torch.zeros(2, 3)), {"residual": torch.zeros(1, 3)}, ShapeError, r"residual must be \(1, 2\)"),
])  # fmt: skip
def test_linear_refuses(args, options, error, words):
    with pytest.raises(error, match=words):
        linear(*args, **options)


# --- a weight of bytes by words --------------------------------------------------------------------------------------
@pytest.mark.sample(7, 3)
@KINDS
@pytest.mark.parametrize(("N", "K"), [(1, 16), (9, 48), (16, 32)])
def test_words_match_the_reference(N, K, kind, interpreted):
    args, options = tensors(1, N, K, integers=True, **kind)
    x, weight, scale = args
    y = launch.launch_words(
        x, weight, scale, options.get("norm"), 1e-3, options.get("residual"), kind.get("gated", False)
    )
    close(y, wide(args, options), 1e-5)


def test_numbers_of_24_bits_hold_what_they_stand_for(interpreted):
    """Within half a unit of the largest, which itself must not overflow: it once did, for one draw in ten."""
    for _ in range(60):
        x = torch.randn(1, 32)
        planes, units = torch.empty(1, 3, 32, dtype=torch.int8), torch.empty(1)
        TO_PLANES.launch((1,), (x, None, planes, units, 32, 0.0), {"BLOCK": 32, "EARLY": False})
        high, middle, low = planes[0].double()
        found = (high * 65536 + middle * 256 + low) * units.double()
        torch.testing.assert_close(found, x[0].double(), rtol=0, atol=2.5e-7 * float(x.abs().max()))


def test_large_weights_of_bytes_go_by_words(interpreted):
    def chosen(dtype, weight, lines, K):
        case = Case(torch.device("cpu"), dtype, (1, lines, K), (weight,))
        return next(each.name for each in decode_linear.implementations if not (each.refuses and each.refuses(case)))

    assert chosen(torch.bfloat16, torch.int8, 28672, 4096) == "triton-words"
    assert chosen(torch.bfloat16, torch.bfloat16, 28672, 4096) == "triton"
    assert chosen(torch.float32, torch.int8, 28672, 4096) == "triton"
    assert chosen(torch.bfloat16, torch.int8, 4096, 4096) == "triton"
    assert chosen(torch.bfloat16, torch.int8, 28672, 4100) == "triton"
    assert chosen(torch.float64, torch.int8, 28672, 4096) == "torch"


def test_a_row_of_zeros_stays_one(interpreted):
    weight = torch.randint(-128, 128, (4, 16), dtype=torch.int8)
    assert torch.equal(
        launch.launch_words(torch.zeros(1, 16), weight, torch.ones(4), None, 0.0, None, False), torch.zeros(1, 4)
    )


# --- the cache -------------------------------------------------------------------------------------------------------
def cached(B=2, heads=4, kv_heads=2, T=7, D=6, dtype=torch.float32):
    qkv = torch.randn(B, (heads + 2 * kv_heads) * D).to(dtype)
    caches = [torch.randn(B, kv_heads, T, D).to(dtype) for _ in range(2)]
    return qkv, caches, rope_tables(T, D)


@pytest.mark.parametrize("places", [(3, 6), (0, 7), (9, 1)])
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_append_matches_the_reference(places, integer, way):
    qkv, (k, v), (cos, sin) = cached()
    positions = torch.tensor(places, dtype=integer)
    expected = rope_reference(qkv.double(), cos, sin, positions, k.double(), v.double())
    q = append(qkv, positions, k, v, cos, sin)
    inside = [b for b, place in enumerate(places) if place < 7]
    torch.testing.assert_close(q[inside].double(), expected[0][inside], rtol=1e-5, atol=1e-5)
    for found, wanted in zip((k, v), expected[1:], strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("D", [6, 5, 16])
def test_append_without_angles_only_stores(D, way):
    qkv, (k, v), _ = cached(D=16)
    qkv, k, v = qkv.view(2, 8, 16)[..., :D].reshape(2, -1), k[..., :D].contiguous(), v[..., :D].contiguous()
    before = k.clone()
    q = append(qkv, torch.tensor([2, 5]), k, v)
    heads = qkv.view(2, 8, D)
    assert torch.equal(q[:, :, 0], heads[:, :4])
    for b, place in ((0, 2), (1, 5)):
        assert torch.equal(k[b, :, place], heads[b, 4:6])
        assert torch.equal(v[b, :, place], heads[b, 6:])
        before[b, :, place] = heads[b, 4:6]
    assert torch.equal(k, before)


def test_append_is_rope_at_a_position(way):
    qkv, (k, v), (cos, sin) = cached()
    q = append(qkv, torch.tensor([4, 4]), k, v, cos, sin)
    heads = qkv.view(2, 8, 1, 6)
    torch.testing.assert_close(q, ops.rope(heads[:, :4].contiguous(), cos[4:5], sin[4:5]))
    torch.testing.assert_close(k[:, :, 4:5], ops.rope(heads[:, 4:6].contiguous(), cos[4:5], sin[4:5]))


@pytest.mark.parametrize("turned", [False, True])
def test_append_to_blocks_is_append_at_slots(turned, way):
    """Block 2 of 4 tokens has no place for the last token, which is padding."""
    qkv, (k, v), tables = cached(B=3, T=9)
    cos, sin = tables if turned else (None, None)
    positions, slots = torch.tensor([1, 8, 3]), torch.tensor([9, 2, -1])
    expected = append(qkv, positions, k, v, cos, sin)
    blocks = [torch.randn(3, 4, 2, 6) for _ in range(2)]
    before = [each.clone() for each in blocks]
    q = append(qkv, positions, *blocks, cos, sin, slots)
    assert torch.equal(q, expected)
    for found, old, dense in zip(blocks, before, (k, v), strict=True):
        old.view(12, 2, 6)[slots[:2]] = dense[torch.arange(2), :, positions[:2]]
        assert torch.equal(found, old)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("D", [2, 40, 64])
def test_append_on_a_cpu_has_the_bits_of_torch(D, dtype):
    """Vectors and what is left of them; positions beyond the tables, NaN and infinity in values, many threads."""
    for tokens in (1, 5, 2000):
        qkv, _, tables = cached(B=tokens, T=9, D=D, dtype=dtype)
        qkv[0, -1], qkv[0, -2] = torch.nan, torch.inf
        slots, positions = torch.randperm(4 * tokens)[:tokens], torch.randint(0, 12, (tokens,))
        slots[1::3] = -1
        found = []
        for way in ("llvm", "torch"):
            blocks = [torch.zeros(tokens, 4, 2, D, dtype=dtype) for _ in range(2)]
            with force(decode_rope=way):
                found.append((append(qkv, positions, *blocks, *tables, slots), *blocks))
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))


def test_append_refuses():
    qkv, (k, v), (cos, sin) = cached()
    places = torch.tensor([1, 2])
    with pytest.raises(ShapeError, match=r"qkv must be \(2, \(heads \+ 4\) \* 6\), got \(2, 47\)"):
        append(qkv[:, :47], places, k, v)
    with pytest.raises(ShapeError, match="v_cache must be contiguous"):
        append(qkv, places, k, v.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ShapeError, match=r"cos must be \(at least 7, 6 / 2\), got \(6, 3\)"):
        append(qkv, places, k, v, cos[:6], sin)


# --- on a GPU --------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("plan_of", ["usual", "every"])
@pytest.mark.parametrize("integers", [False, True], ids=["floats", "integers"])
@pytest.mark.parametrize(("N", "K", "kind"), [
    (6144, 4096, {"norm": True}), (4096, 4096, {"residual": True}), (14336, 4096, {"norm": True, "gated": True}),
    (4096, 14336, {"residual": True}), (1001, 4112, {"norm": True, "residual": True}),
])  # fmt: skip
def test_a_large_layer_on_a_gpu(N, K, kind, integers, plan_of):
    args, options = tensors(1, N, K, torch.bfloat16, integers=integers, **kind)
    args = tuple(None if each is None else each.cuda() for each in args)
    options = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    expected = wide(args, options)
    gated = kind.get("gated", False)
    if plan_of == "usual":
        close(linear(*args, **options), expected, 1e-2)
        return
    for plan in launch.PLANS[1 if integers else 2]:
        if plan.sets > 1 or not gated:
            y = launch.launch_linear(*args, options.get("norm"), 1e-3, options.get("residual"), gated, plan)
            close(y, expected, 1e-2)
    for plan in launch.WORDS_PLANS if integers else ():
        y = launch.launch_words(*args, options.get("norm"), 1e-3, options.get("residual"), gated, plan)
        close(y, expected, 1e-2)
