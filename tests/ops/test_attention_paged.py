"""Attention to keys and values in blocks: the reference, the same bits in any company, and what is not read."""

import itertools
import math

import pytest
import torch

from accelerant import ops
from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.ops.decode import paged
from accelerant.ops.decode.op import attention_decode_reference, attention_paged_reference
from refusals import assert_raises

TOLERANCES = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def cache_of(lengths, Hkv=2, D=16, block=4, dtype=torch.float32, spare=3):
    """Blocks with NaN wherever no row's key is, and a table in random order with numbers out of range beyond it."""
    counts = [-(-length // block) for length in lengths]
    order = torch.randperm(sum(counts) + spare)
    table = torch.full((len(lengths), max([*counts, 0]) + 1), 10**6, dtype=torch.int32)
    k, v = (torch.full((len(order), block, Hkv, D), math.nan, dtype=dtype) for _ in range(2))
    at = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[row, :count] = order[at : at + count]
        for blocks in (k, v):
            slots = slots_of(table[row], torch.arange(length), block)
            blocks.view(-1, Hkv, D)[slots] = torch.randn(length, Hkv, D).to(dtype)
        at += count
    return k, v, table


def slots_of(table, positions, block):
    return table[positions // block].long() * block + positions % block


def call_of(lengths, news, Hq=4, Hkv=2, D=16, block=4, dtype=torch.float32):
    cache = cache_of(lengths, Hkv, D, block, dtype)
    starts = torch.tensor([0, *torch.tensor(news).cumsum(0)], dtype=torch.int32)
    q = torch.randn(sum(news), Hq, D).to(dtype)
    return q, *cache, torch.tensor(lengths, dtype=torch.int32), starts


def drawn(rng, rows, most=90):
    """Lengths and new tokens of decoding rows, prompts and parts of prompts."""
    lengths = [rng.randint(1, most) for _ in range(rows)]
    return lengths, [rng.choice([1, length, rng.randint(1, length)]) for length in lengths]


@pytest.mark.search(0.02)
def test_is_the_reference_for_any_mixture(rng, record_property, way):
    count = 12 if way == "torch" else 4
    record_property("examples", count)
    for _ in range(count):
        Hkv = rng.choice([1, 2, 3])
        dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
        sizes = {"Hq": Hkv * rng.choice([1, 2, 4, 7]), "Hkv": Hkv, "D": rng.choice([1, 8, 24, 64])}
        args = call_of(
            *drawn(rng, rng.randint(1, 5), 90 if way == "torch" else 30),
            **sizes,
            block=rng.choice([1, 4, 16, 24]),
            dtype=dtype,
        )
        options = {"window": rng.choice([None, 1, 5, 64]), "scale": rng.choice([None, 0.3])}
        options["softcap"] = rng.choice([None, 2.0])
        wide = [x.double() if x.is_floating_point() else x for x in args]
        expected = attention_paged_reference(*wide, **options)
        assert not expected.isnan().any()
        bound = TOLERANCES[dtype]
        torch.testing.assert_close(ops.attention_paged(*args, **options).double(), expected, rtol=bound, atol=bound)


def check_any_company(rng, dtype=torch.float32, device="cpu"):
    """A row alone, among others, decoded token by token, or as a prompt cut anywhere has the same bits."""
    Hkv = rng.choice([1, 2])
    sizes = {"Hq": Hkv * rng.choice([1, 3, 4]), "Hkv": Hkv, "D": rng.choice([1, 7, 8, 24, 64, 80])}
    sizes |= {"block": rng.choice([1, 4, 16]), "dtype": dtype}
    options = {"window": rng.choice([None, 20]), "softcap": rng.choice([None, 5.0])}
    lengths, _ = drawn(rng, 4, most=rng.choice([70, 330, 700]))
    q, k, v, table, whole, starts = (x.to(device) for x in call_of(lengths, lengths, **sizes))
    expected = ops.attention_paged(q, k, v, table, whole, starts, **options)
    for row, length in enumerate(lengths):
        cuts = sorted({0, length, *(rng.randint(0, length) for _ in range(3)), length - 1})
        for begin, end in itertools.pairwise(cuts):
            order = [row, *(r for r in range(len(lengths)) if rng.random() < 0.5 and r != row)]
            rng.shuffle(order)
            spans = [(begin, end) if r == row else (lengths[r] - 1, lengths[r]) for r in order]
            parts = [q[starts[r] + first : starts[r] + last] for r, (first, last) in zip(order, spans, strict=True)]
            news = [0, *itertools.accumulate(last - first for first, last in spans)]
            ends = torch.tensor([last for _, last in spans], dtype=torch.int32, device=device)
            bounds = torch.tensor(news, dtype=torch.int32, device=device)
            found = ops.attention_paged(torch.cat(parts), k, v, table[order].contiguous(), ends, bounds, **options)
            at = news[order.index(row)]
            same = torch.equal(found[at : at + end - begin], expected[starts[row] + begin : starts[row] + end])
            assert same, (lengths, row, begin, end, sizes, options)


@pytest.mark.search(0.02)
def test_a_row_is_the_same_in_any_company(rng, record_property, uninterpreted):
    """The interpreter multiplies by NumPy, whose products depend on a row's place; a GPU's do not (below)."""
    count = 10
    record_property("examples", count)
    for _ in range(count):
        check_any_company(rng, rng.choice([torch.float32, torch.bfloat16, torch.float16, torch.float64]))


def test_threads_do_not_change_a_row(monkeypatch, uninterpreted):
    args = call_of([70, 9, 33], [20, 9, 1])
    expected = ops.attention_paged(*args)
    monkeypatch.setattr(paged, "_SHARE_PRODUCTS", 0)  # by the launch that divides the indices among threads
    assert torch.equal(ops.attention_paged(*args), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_is_the_same_in_any_company_on_a_gpu(dtype, rng):
    for _ in range(20):
        check_any_company(rng, dtype, "cuda")


def test_one_token_a_row_is_decoding(way):
    q, k, v, table, lengths, _ = call_of([70, 1, 33], [1, 1, 1])
    dense = [x[table.clamp(max=len(x) - 1)].flatten(1, 2).transpose(1, 2).contiguous().nan_to_num() for x in (k, v)]
    expected = attention_decode_reference(q[:, :, None].double(), *(x.double() for x in dense), lengths)
    found = ops.attention_paged(q, k, v, table, lengths)[:, :, None].double()
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def test_a_row_without_keys_or_tokens(way):
    q, k, v, table, lengths, starts = call_of([3, 0, 5], [3, 0, 1])
    o = ops.attention_paged(q, k, v, table, lengths, starts)
    torch.testing.assert_close(o, attention_paged_reference(q, k, v, table, lengths, starts))
    lengths[2] = 0
    assert (ops.attention_paged(q, k, v, table, lengths, starts)[3] == 0).all()
    none = torch.zeros(0, 4, 16)
    assert ops.attention_paged(none, k, v, table[:0], lengths[:0]).shape == (0, 4, 16)


def test_keys_and_values_side_by_side(way):
    """Blocks as vLLM has them, (N, Hkv, block, 2 D): both halves are written and read in place."""
    q, k, v, table, lengths, starts = call_of([9, 4], [1, 4])
    both = torch.full((len(k), 2, 4, 32), math.nan)
    views = both.transpose(1, 2).split(16, -1)
    for row, length in enumerate(lengths.tolist()):
        slots = slots_of(table[row], torch.arange(length), 4)
        ops.append_paged(*(x.view(-1, 2, 16)[slots] for x in (k, v)), *views, slots)
    expected = ops.attention_paged(q, k, v, table, lengths, starts)
    assert torch.equal(ops.attention_paged(q, *views, table, lengths, starts), expected)


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("length", [256, 600])
def test_parts_of_a_row_are_joined(length, interpreted):
    """A row of one token is cut into parts, and joined by the second kernel, with and without a window."""
    for window in (None, 100):
        args = call_of([length, 3], [1, 1], D=8, block=16)
        expected = attention_paged_reference(*args, window=window)
        torch.testing.assert_close(ops.attention_paged(*args, window=window), expected)
        torch.testing.assert_close(ops.attention_paged(*args[:5], window=window), expected)


def test_append_writes_where_the_slots_say(way):
    k, v = torch.randn(2, 5, 3, 8).unbind()
    blocks = torch.zeros(4, 4, 3, 8), torch.zeros(4, 4, 3, 8)
    slots = torch.tensor([7, -1, 0, 15, 4])
    ops.append_paged(k, v, *blocks, slots)
    for new, written in zip((k, v), blocks, strict=True):
        flat = written.view(16, 3, 8)
        assert torch.equal(flat[slots[slots >= 0]], new[slots >= 0])
        assert int((flat != 0).any(-1).any(-1).sum()) == 4
    ops.append_paged(k[:0], v[:0], *blocks, slots[:0])


def test_has_no_gradient_and_compiles(way):
    q, *rest = call_of([9, 4], [1, 4])
    assert not ops.attention_paged(q.requires_grad_(), *rest).requires_grad


@pytest.mark.slow
def test_is_registered_as_torch_wants():
    args = (*call_of([9, 4], [1, 4]), -1, 0.25, 0.0)
    k, v = (x.nan_to_num() for x in args[1:3])
    found = torch.library.opcheck(torch.ops.accelerant.attention_paged.default, (args[0], k, v, *args[3:]))
    assert set(found.values()) == {"SUCCESS"}
    compiled = torch.compile(ops.attention_paged, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(args[0], k, v, *args[3:6]), ops.attention_paged(args[0], k, v, *args[3:6]))


Z = torch.zeros


@pytest.mark.parametrize(("change", "options", "error", "words"), [
    ({0: Z(2, 4)}, {}, ShapeError, r"takes q \(T, Hq, D\)"),
    ({0: Z(2, 4, 8)}, {}, ShapeError, "must have the same D"),
    ({0: Z(2, 3, 16)}, {}, ShapeError, "must divide those of q, got 2 and 3"),
    ({2: Z(2, 4, 2, 17)}, {}, ShapeError, "v must be"),
    ({1: Z(2, 4, 2, 16).double()}, {}, UnsupportedDtype, "one dtype"),
    ({3: Z(2, 9)}, {}, UnsupportedDtype, "block_table must be int32, got float32"),
    ({3: Z(2, dtype=torch.int32)}, {}, ShapeError, "block_table must have 2 dimension"),
    ({4: Z(3, dtype=torch.int32)}, {}, ShapeError, r"lengths must be \(2,\).* got \(3,\)"),
    ({4: Z(2, dtype=torch.int32, device="meta")}, {}, ShapeError, "on cpu, where q is; it is on meta"),
    ({5: Z(2, dtype=torch.int32)}, {}, ShapeError, r"starts must be \(3,\)"),
    ({5: None, 0: Z(3, 4, 16)}, {}, ShapeError, "one token for each of 2 rows, got 3"),
    ({}, {"window": 0}, ConfigError, "window must be at least 1, got 0"),
    ({}, {"softcap": -1.0}, ConfigError, "softcap must be positive"),
])  # fmt: skip
def test_refuses(change, options, error, words):
    args = [change.get(at, x) for at, x in enumerate(call_of([9, 4], [1, 1]))]
    assert_raises(error, words, ops.attention_paged, *args, **options)


@pytest.mark.parametrize(("change", "error", "words"), [
    ({0: Z(5, 2, 8)}, ShapeError, r"takes k \(T, Hkv, D\)"),
    ({1: Z(5, 3, 7)}, ShapeError, r"v must be \(5, 3, 8\)"),
    ({2: Z(4, 4, 8, 3).transpose(2, 3)}, ShapeError, "must be contiguous"),
    ({3: Z(4, 4, 3, 8).half()}, UnsupportedDtype, "one dtype"),
    ({4: Z(5, dtype=torch.int32)}, UnsupportedDtype, "slots must be int64, got int32"),
    ({4: Z(4, dtype=torch.int64)}, ShapeError, r"slots must be \(5,\)"),
])  # fmt: skip
def test_append_refuses(change, error, words):
    args = [Z(5, 3, 8), Z(5, 3, 8), Z(4, 4, 3, 8), Z(4, 4, 3, 8), torch.arange(5)]
    for at, x in change.items():
        args[at] = x
    if 2 in change:
        args[3] = args[2].clone(memory_format=torch.preserve_format)
    assert_raises(error, words, ops.append_paged, *args)
