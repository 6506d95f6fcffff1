"""Norms and sums of contributions against the gradients they represent, formed in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerant.privacy.dp.clipping import launch
from accelerant.privacy.dp.clipping.backward_pass import Dense, Lookup, Rows, cross, merged, prefers_ghost
from accelerant.privacy.dp.clipping.layers import Convolution, Windows

quick = settings(max_examples=15, deadline=None, derandomize=True)
few = st.integers(1, 6)
seeds = st.integers(0, 100)


def rows(B, T, N, K, dtype=torch.float64):
    return Rows(torch.randn(B, T, K, dtype=dtype), torch.randn(B, T, N, dtype=dtype))


def lookup(B, T, V, D, dtype=torch.float64):
    return Lookup(torch.randint(V, (B, T)), torch.randn(B, T, D, dtype=dtype), V)


def exact(piece):
    """(B, ...) in float64."""
    if isinstance(piece, Dense):
        return piece.each.double() * (1.0 if piece.factor is None else piece.factor.double())
    if isinstance(piece, Rows):
        return piece.g.double().mT @ piece.a.double()
    found = torch.zeros(piece.g.shape[0], piece.V, piece.g.shape[2], dtype=torch.float64)
    for each, tokens, g in zip(found, piece.tokens, piece.g.double(), strict=True):
        each.index_add_(0, tokens, g)
    return found


def assert_stands_for(piece, expected, tolerance=1e-12):
    torch.testing.assert_close(piece.bound().double(), expected.square().flatten(1).sum(1), rtol=tolerance, atol=1e-12)
    weights = torch.rand(expected.shape[0], dtype=launch.wide(expected.dtype))
    total = (expected * weights.view(-1, 1, 1)).sum(0)
    for drop in (None, torch.zeros(expected.shape[0], dtype=torch.bool)):
        found = piece.total(weights, drop, total.shape)
        torch.testing.assert_close(found.double(), total, rtol=max(tolerance, 1e-12), atol=1e-12)
        grad = torch.ones_like(found)
        piece.add_to(grad, weights, drop)
        torch.testing.assert_close(grad.double(), total + 1, rtol=max(tolerance, 1e-12), atol=1e-12)


@given(B=few, T=few, N=few, K=few, seed=seeds)
@quick
def test_rows(B, T, N, K, seed):
    torch.manual_seed(seed)
    piece = rows(B, T, N, K)
    assert_stands_for(piece, exact(piece))
    assert_stands_for(piece.dense(), exact(piece))


@given(B=few, T=few, V=few, D=few, seed=seeds)
@quick
def test_lookups(B, T, V, D, seed):
    torch.manual_seed(seed)
    piece = lookup(B, T, V, D)
    compact = piece.compact()
    assert compact.formed
    torch.testing.assert_close(exact(compact), exact(piece))
    for each in (piece, compact, piece.dense()):
        assert_stands_for(each, exact(piece))


@given(B=few, T=few, S=few, V=few, D=few, seed=seeds)
@quick
def test_the_cross_term_of_a_tied_table(B, T, S, V, D, seed):
    torch.manual_seed(seed)
    a, b = lookup(B, T, V, D), rows(B, S, V, D)
    expected = (exact(a) * exact(b)).flatten(1).sum(1)
    torch.testing.assert_close(cross(a, b), expected, rtol=1e-11, atol=1e-12)


@given(kinds=st.lists(st.sampled_from("rldf"), min_size=1, max_size=5), seed=seeds)
@quick
def test_merged_pieces_stand_for_the_sum(kinds, seed):
    torch.manual_seed(seed)
    made = {
        "r": lambda: rows(3, 2, 5, 4),
        "l": lambda: lookup(3, 4, 5, 4),
        "d": lambda: Dense(torch.randn(3, 5, 4).double()),
        "f": lambda: Dense(torch.randn(3, 5, 4).double(), factor=torch.tensor(-0.3)),
    }
    pieces = [made[kind]() for kind in kinds]
    expected = sum(exact(piece).clone() for piece in pieces)  # merging may write where they are
    found = merged(list(pieces))
    assert len(found) == len({type(piece) for piece in found})
    assert len(found) == 1 or not any(isinstance(piece, Dense) for piece in found)
    torch.testing.assert_close(sum(exact(piece) for piece in found), expected)


def test_chunks_of_examples_change_nothing(monkeypatch):
    torch.manual_seed(0)
    a, b = lookup(7, 4, 5, 3), rows(7, 4, 5, 3)
    expected = [a.bound(), b.bound(), cross(a, b)]
    monkeypatch.setattr(launch, "_CHUNK_BYTES", 200)
    assert len(list(launch.chunks(7, 32))) > 1
    for found, whole in zip([a.bound(), b.bound(), cross(a, b)], expected, strict=True):
        torch.testing.assert_close(found, whole)


@pytest.mark.parametrize("known", [False, True])
def test_a_factor_multiplies_sums_and_norms(known):
    """Of 0.3, which bfloat16 has not: nothing is rounded by it."""
    torch.manual_seed(0)
    each, factor, weights = torch.randn(4, 6, 5).bfloat16(), torch.tensor(0.3), torch.rand(4)
    piece = Dense(each, launch.torch_squares(each)[:, None] if known else None, factor)
    whole = each.double() * factor.double()
    torch.testing.assert_close(piece.bound().double(), whole.square().sum((1, 2)), rtol=1e-6, atol=0)
    expected = (whole * weights.double().view(-1, 1, 1)).sum(0)
    grad = torch.ones(6, 5)
    piece.add_to(grad, weights, None)
    torch.testing.assert_close(grad.double(), expected + 1, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(piece.total(weights, None, expected.shape).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_adds_in_float32(dtype):
    torch.manual_seed(0)
    piece = rows(4, 16, 24, 40, dtype)
    expected = exact(piece)
    torch.testing.assert_close(piece.bound().double(), expected.square().sum((1, 2)), rtol=1e-5, atol=0)
    formed = piece.dense()
    assert formed.each.dtype == dtype
    torch.testing.assert_close(formed.bound().double(), exact(formed).square().sum((1, 2)), rtol=1e-6, atol=0)
    weights = torch.rand(4)
    total = (exact(formed) * weights.double().view(-1, 1, 1)).sum(0)
    torch.testing.assert_close(formed.total(weights, None, total.shape).double(), total, rtol=1e-5, atol=1e-5)
    one = lookup(4, 6, 3, 8, dtype)
    torch.testing.assert_close(one.bound().double(), exact(one).square().sum((1, 2)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("T", [1, 2, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bound_is_just_above_the_norm(T, dtype):
    """By T roundings of the sum over T positions, and those of large Gram products in float32."""
    torch.manual_seed(0)
    piece = rows(3, T, 96, 128, dtype)
    ratio = (piece.bound().double() / exact(piece).square().sum((1, 2))).sqrt()
    assert (ratio >= 1).all()
    gram = (96 + 128 + 64) * T / 2 if T * T * (96 + 128) > launch._EXACT else 0
    assert (ratio <= 1 + 1.5 * 2.0**-24 * ((T + 1) * T**0.5 + gram)).all()


def test_the_bound_of_rows_that_cancel_is_a_part_of_the_mass():
    a, g = torch.randn(2, 1, 8).expand(2, 6, 8), torch.randn(2, 1, 5) * torch.tensor([1.0, -1.0] * 3)[:, None]
    mass = 6 * a[:, 0].norm(dim=1) * g[:, 0].norm(dim=1)
    torch.testing.assert_close(Rows(a, g).bound().sqrt().float(), mass / 64)
    low = Rows(a.bfloat16(), g.bfloat16())
    assert float(low.total(torch.ones(2), None, torch.Size((5, 8))).norm()) < 1e-5  # the sum is of float32 products


def test_norms_in_float32_are_exact_to_1e_6():
    torch.manual_seed(0)
    each = torch.randn(3, 300, 400)
    expected = each.double().square().sum((1, 2))
    torch.testing.assert_close(launch.torch_squares(each).double(), expected, rtol=1e-6, atol=0)
    piece = rows(3, 64, 96, 128, torch.float32)
    expected = exact(piece).square().sum((1, 2))
    found = launch.ghost_terms(piece.a, piece.g)[0].sum(1)
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=0)
    torch.testing.assert_close(piece.dense().bound().double(), expected, rtol=2e-6, atol=0)


def test_the_choice():
    """PRIVACY.md's: of 768 x 768 on a GPU the ghost norm for 128 positions, not for 1024; of one position always."""
    assert prefers_ghost(64, 128, 768, 768, 2, "cuda")
    assert not prefers_ghost(64, 1024, 768, 768, 2, "cuda")
    for device in ("cpu", "cuda", "other"):
        assert prefers_ghost(8, 1, 10, 10, 4, device)
        assert not prefers_ghost(8, 4096, 64, 64, 4, device)


@pytest.fixture
def _bfloat16_products():
    settings = torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv
    before = [each.fp32_precision for each in settings]
    yield [setattr(each, "fp32_precision", "bf16") for each in settings]
    for each, value in zip(settings, before, strict=True):
        each.fp32_precision = value


def pieces_of_products():
    torch.manual_seed(0)
    windows = Windows((1,), (0,), (1,), 1)
    return [rows(2, 1, 4, 3, torch.float32), rows(2, 5, 4, 3, torch.float32),
            Convolution(torch.randn(2, 3, 6), torch.randn(2, 4, 5), torch.randn(4, 3, 2), windows)]  # fmt: skip


BOUNDS = [piece.bound().sqrt() for piece in pieces_of_products()]


@pytest.mark.usefixtures("_bfloat16_products")
def test_bounds_cover_products_of_a_cpu_in_bfloat16():
    """Gradients, formed or not, are summed by a product of matrices, whose factors that setting rounds."""
    for piece, before in zip(pieces_of_products(), BOUNDS, strict=True):
        assert (piece.bound().sqrt() >= before * (1 + 2.0**-8)).all()
    assert launch.margin(torch.float32, torch.device("cpu")) > 2.0**-8
    assert launch.margin(torch.float64, torch.device("cpu")) < 2.0**-49


def test_the_bound_of_a_tied_table_has_both_masses():
    """A lookup that cancels the product: the sum's bound is a part of what was rounded, of both."""
    torch.manual_seed(0)
    a, g = torch.randn(2, 1, 4), torch.zeros(2, 1, 5)
    g[:, 0, 3] = 2.0
    table = Lookup(torch.full((2, 1), 3), -2 * a, 5)
    mass = 2 * a[:, 0].norm(dim=1)
    found = launch.bounded([Rows(a, g).terms(table)])[:, 0]
    torch.testing.assert_close(found.sqrt().float(), 2 * mass / 64)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_formed_gradients_are_summed_in_the_wider_dtype(low):
    each = [torch.full((1, 2), 1.0, dtype=low), torch.full((1, 2), 2.0**-12)]
    for parts in (each, each[::-1]):
        (found,) = merged([Dense(part.clone()) for part in parts])
        assert torch.equal(found.each, torch.full((1, 2), 1 + 2.0**-12))
        assert torch.equal(parts[0], each[0] if parts is each else each[1])


@pytest.mark.parametrize("value", [1e-20, 1e-30])
@pytest.mark.parametrize("known", [False, True])
def test_squares_that_are_below_float32_are_not_lost(value, known):
    """A factor's square would be 0; squares of the gradients are in float64 on a CPU."""
    each = torch.full((1, 4), 1.0)
    squares = torch.full((1, 1), 4.0) if known else None
    found = Dense(each, squares, torch.tensor(value)).bound()
    torch.testing.assert_close(
        found, torch.tensor([4 * float(torch.tensor(value)) ** 2], dtype=torch.float64), rtol=1e-6, atol=0
    )
    found = Dense(each * value).bound()
    torch.testing.assert_close(found.sqrt(), torch.tensor([2 * value], dtype=torch.float64), rtol=1e-6, atol=0)
