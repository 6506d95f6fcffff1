import importlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerant import ops
from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.ops.rope import Llama3Scaling, rope_reference, rope_tables
from refusals import assert_raises

launch = importlib.import_module("accelerant.ops.rope")

PAIRS = pytest.mark.parametrize("interleaved", [False, True])


def close(actual, expected):
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=1e-5, atol=1e-5)


@PAIRS
def test_position_0_changes_nothing(interpreted, interleaved):
    x = torch.randn(2, 3, 1, 8)
    assert torch.equal(ops.rope(x, *rope_tables(1, 8), interleaved=interleaved), x)


@PAIRS
def test_scores_depend_on_the_distance_alone(interpreted, interleaved):
    """The property that rope is for: q at s and k at t meet as q at s + 5 and k at t + 5."""
    q, k = torch.randn(1, 1, 1, 32).expand(1, 1, 12, 32), torch.randn(1, 1, 1, 32).expand(1, 1, 12, 32)
    tables = rope_tables(12, 32)
    q, k = (ops.rope(each, *tables, interleaved=interleaved)[0, 0] for each in (q, k))
    scores = q @ k.t()
    close(scores[5:, 5:], scores[:-5, :-5])


def test_halves_are_hugging_faces(interpreted):
    """x cos + rotate_half(x) sin, with both tables repeated over the halves, as transformers' Llama has it."""
    x, (cos, sin) = torch.randn(2, 3, 9, 16), rope_tables(9, 16)
    rotated = torch.cat((-x[..., 8:], x[..., :8]), -1)
    close(ops.rope(x, cos, sin), x * torch.cat((cos, cos), -1) + rotated * torch.cat((sin, sin), -1))


def test_interleaved_is_a_complex_product(interpreted):
    """As Meta's Llama has it."""
    x, (cos, sin) = torch.randn(2, 3, 9, 16), rope_tables(9, 16)
    product = torch.view_as_complex(x.reshape(2, 3, 9, 8, 2)) * torch.complex(cos, sin)
    close(ops.rope(x, cos, sin, interleaved=True), torch.view_as_real(product).flatten(-2))


@PAIRS
def test_backward_turns_back(interpreted, interleaved):
    x = torch.randn(2, 3, 9, 64, requires_grad=True)
    tables = rope_tables(9, 64)
    y = ops.rope(x, *tables, interleaved=interleaved)
    y.backward(y.detach())
    close(x.grad, x.detach())


def test_keeps_x_only_for_tables_that_learn():
    x, (cos, sin) = torch.randn(1, 2, 3, 4, requires_grad=True), rope_tables(3, 4)
    kept = []
    for learns in (False, True):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
            ops.rope(x, cos.clone().requires_grad_(learns), sin)
    assert kept == [cos.shape, sin.shape, x.shape, cos.shape, sin.shape]


LAYOUTS = {
    "heads inside tokens": lambda: torch.randn(2, 9, 3, 16).transpose(1, 2),
    "queries of a packed projection": lambda: torch.randn(2, 9, 3, 3, 16)[:, :, 1].transpose(1, 2),
    "features outside": lambda: torch.randn(2, 3, 16, 9).transpose(2, 3),
    "every second": lambda: torch.randn(2, 3, 9, 32)[..., ::2],
    "expanded": lambda: torch.randn(1, 1, 9, 16).expand(2, 3, 9, 16),
    "offset by one": lambda: torch.randn(2 * 3 * 9 * 16 + 1)[1:].view(2, 3, 9, 16),
}


@pytest.mark.sample(3)
@PAIRS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout, interleaved, interpreted):
    x, tables = LAYOUTS[layout](), rope_tables(9, 16)
    leaf, exact = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    y = ops.rope(leaf, *tables, interleaved=interleaved)
    assert y.stride() == torch.empty_like(x).stride()
    expected = rope_reference(exact, *(each.double() for each in tables), interleaved=interleaved)
    close(y, expected)
    dy = LAYOUTS[layout]()
    y.backward(dy)
    expected.backward(dy.double())
    close(leaf.grad, exact.grad)


def test_heads_inside_tokens_are_not_copied(interpreted):
    x = torch.randn(2, 9, 3, 16).transpose(1, 2)
    assert ops.rope(x, *rope_tables(9, 16)).transpose(1, 2).is_contiguous()


def test_positions_of_each_sequence(interpreted):
    cos, sin = rope_tables(100, 8)
    positions = torch.tensor([[0, 1, 2], [50, 51, 99]])
    x = torch.randn(2, 4, 3, 8)
    y = ops.rope(x, cos[positions], sin[positions])
    for b in range(2):
        close(y[b], ops.rope(x[b : b + 1], cos[positions[b]], sin[positions[b]])[0])


@pytest.mark.parametrize("table", ["same", "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_once(dtype, table, interpreted):
    x = torch.randn(2, 3, 9, 64).to(dtype)
    cos, sin = rope_tables(9, 64, dtype=dtype if table == "same" else torch.float32)
    y = ops.rope(x, cos, sin)
    assert y.dtype == dtype
    exact = rope_reference(x.double(), cos.double(), sin.double())
    step = 2**-7 if dtype == torch.bfloat16 else 2**-10
    assert ((y.double() - exact).abs() <= exact.abs() * step + 1e-6).all()


@pytest.mark.sample(3)
@pytest.mark.parametrize("plan", [
    launch.RopeTile(1, 1, 8, 1), launch.RopeTile(4, 2, 16, 1), launch.RopeTile(2, 8, 8, 4),
    launch.RopeTile(1, 4, 32, 2),
], ids=str)  # fmt: skip
@PAIRS
def test_any_plan_gives_the_same(plan, interleaved, interpreted):
    x, (cos, sin) = torch.randn(2, 5, 7, 14), torch.randn(2, 2, 7, 7)
    expected = rope_reference(x.double(), cos.double(), sin.double(), interleaved=interleaved)
    close(launch.launch(x, cos, sin, interleaved, plan=plan), expected)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    B=st.integers(0, 3), H=st.integers(1, 9), S=st.integers(0, 9), half=st.integers(1, 20),
    own=st.booleans(), interleaved=st.booleans(),
)  # fmt: skip
def test_any_shape(B, H, S, half, own, interleaved):
    x = torch.randn(B, H, S, 2 * half, requires_grad=True)
    cos, sin = (torch.randn(*([B] if own else []), S, half, requires_grad=True) for _ in range(2))
    exact = [each.detach().double().requires_grad_() for each in (x, cos, sin)]
    y, expected = ops.rope(x, cos, sin, interleaved=interleaved), rope_reference(*exact, interleaved=interleaved)
    close(y, expected)
    dy = torch.randn(y.shape)
    y.backward(dy)
    expected.backward(dy.double())
    for one, other in zip((x, cos, sin), exact, strict=True):
        torch.testing.assert_close(one.grad, other.grad.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_not_a_number_stays_in_its_pair(value, interpreted):
    x = torch.randn(1, 2, 5, 8)
    x[0, 1, 2, 1] = value
    y = ops.rope(x, *rope_tables(5, 8))
    touched = torch.zeros(1, 2, 5, 8, dtype=torch.bool)
    touched[0, 1, 2, [1, 5]] = True
    assert torch.equal(~y.isfinite(), touched)


# --- tables ----------------------------------------------------------------------------------------------------------
def test_tables_are_the_papers():
    cos, sin = rope_tables(7, 6, base=100.0, dtype=torch.float64)
    for s in range(7):
        for i in range(3):
            angle = s * 100.0 ** (-2 * i / 6)
            assert cos[s, i].item() == pytest.approx(math.cos(angle), abs=1e-14)
            assert sin[s, i].item() == pytest.approx(math.sin(angle), abs=1e-14)


def test_tables_are_good_at_far_positions():
    """Angles in float32 would be off by 4e-3 at 10^5."""
    cos, _ = rope_tables(131072, 64)
    assert cos[131071, 0].item() == pytest.approx(math.cos(131071), abs=1e-7)


def test_llama_3_scaling():
    """The three ranges of Meta's apply_scaling, written out."""
    scaling = Llama3Scaling()
    frequencies = 500000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    scaled = scaling.apply(frequencies)
    seen = set()
    for frequency, found in zip(frequencies.tolist(), scaled.tolist(), strict=True):
        length = 2 * math.pi / frequency
        if length < 8192 / 4:
            expected, kind = frequency, "kept"
        elif length > 8192 / 1:
            expected, kind = frequency / 8, "slowed"
        else:
            smooth = (8192 / length - 1) / (4 - 1)
            expected, kind = (1 - smooth) * frequency / 8 + smooth * frequency, "blended"
        seen.add(kind)
        assert found == pytest.approx(expected, rel=1e-12)
    assert seen == {"kept", "slowed", "blended"}
    cos, _ = rope_tables(3, 128, base=500000.0, scaling=scaling, dtype=torch.float64)
    torch.testing.assert_close(cos[2], (2 * scaled).cos())


@pytest.mark.parametrize(("options", "words"), [
    ({"factor": 0.0}, "factor must be above 0, got 0.0"),
    ({"low_freq_factor": 4.0}, "low_freq_factor must be above 0 and below high_freq_factor, got 4.0 and 4.0"),
    ({"original_context": 0}, "original_context must be at least 1 and below 2\\*\\*63, got 0"),
    ({"original_context": 2**63}, "original_context must be .*, got 9223372036854775808"),
])  # fmt: skip
def test_scaling_refuses(options, words):
    assert_raises(ConfigError, words, Llama3Scaling, **options)


def test_tables_refuse():
    assert_raises(ShapeError, "D must be even and at least 2, got 7", rope_tables, 4, 7)
    assert_raises(ShapeError, "S must be at least 0, got -1", rope_tables, -1, 8)
    assert_raises(ConfigError, r"base must be above 0, got 0\.0", rope_tables, 4, 8, base=0.0)


# --- rejections ------------------------------------------------------------------------------------------------------
X, TABLE = torch.ones(2, 3, 5, 8), torch.ones(5, 4)
PAIRS_WANTED = r"x must be \(B, H, S, D\) with an even D of at least 2, got"


@pytest.mark.parametrize(("x", "cos", "sin", "error", "words"), [
    (torch.ones(3, 5, 8), TABLE, TABLE, ShapeError, PAIRS_WANTED),
    (torch.ones(1, 2, 5, 7), TABLE, TABLE, ShapeError, PAIRS_WANTED),
    (torch.ones(1, 2, 5, 0), TABLE, TABLE, ShapeError, PAIRS_WANTED),
    (X, torch.ones(6, 4), torch.ones(6, 4), ShapeError, r"\(5, 4\) or \(2, 5, 4\) for x .*, got \(6, 4\)"),
    (X, TABLE, TABLE.expand(2, 5, 4), ShapeError, r"must have one shape, got \(5, 4\) and \(2, 5, 4\)"),
    (X.long(), TABLE, TABLE, UnsupportedDtype, r"rope takes .*; x is int64"),
    (X, TABLE.bfloat16(), TABLE.bfloat16(), UnsupportedDtype, "cos must be float32.* got bfloat16"),
    (X.bfloat16(), TABLE.half(), TABLE.half(), UnsupportedDtype, "cos must be bfloat16.* got float16"),
    (X.double(), TABLE, TABLE, UnsupportedDtype, "cos must be float64.* got float32"),
    (X, TABLE, TABLE.to("meta"), ShapeError, "sin must be on cpu, where x is; it is on meta"),
])  # fmt: skip
def test_refuses(x, cos, sin, error, words):
    assert_raises(error, words, ops.rope, x, cos, sin)
