"""SecureSource and FastSource: what they do to tensors, what they refuse, and that no two draw the same."""

import copy
import dataclasses
import math
import os
import pickle
from fractions import Fraction

import noise_reference
import numpy as np
import pytest
import torch
from noise_reference import gaussian_reference

from accelerant.errors import ConfigError, UnsupportedDtype
from accelerant.ops.dropout import philox_reference
from accelerant.privacy.dp import noise
from accelerant.privacy.dp.noise import RANGE, FastSource, SecureSource, add_steps, fused_source
from accelerant.privacy.dp.noise.discrete import GROUP, UNIT_BLOCKS, convolution_of, groups_of
from accelerant.privacy.random import SecureStream, chacha20_words, key_words
from accelerant.runtime.ledger import ledger
from refusals import assert_raises

KEY = bytes(range(32))
GRID = 2.0**-20
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def secure():
    return SecureSource(SecureStream(KEY))


def some(dtype=torch.float32):
    """Tensors of odd sizes, one with gaps, one empty, one without dimensions."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 5), (), (0, 4), (1000,), (40, 7), (17,)]
    found = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    found[4] = found[4].t()
    return found


def drawn(key, plan, sizes, first=0):
    """Noise of tensors one after another, as int64."""
    found = []
    for n in sizes:
        found.append(torch.from_numpy(gaussian_reference(key, 0, first, plan, n)))
        first += groups_of(n, plan.terms) * GROUP * UNIT_BLOCKS
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_tensor_gets_rounding_noise_and_scale(dtype):
    tensors, scale = some(dtype), 1 / 3
    sizes = [x.numel() for x in tensors]
    together = dtype == torch.float32  # small ones are drawn at once
    noise = drawn(key_words(KEY), convolution_of(Fraction(2**20)), [sum(sizes)] if together else sizes)
    noise = noise[0].split(sizes) if together else noise
    wanted = []
    for x, z in zip(tensors, noise, strict=True):
        real = torch.float64 if dtype == torch.float64 else torch.float32
        steps = (x.to(real) / GRID).round().to(torch.int64) + z.view(x.shape)
        wanted.append((steps.to(real) * (GRID * scale)).to(dtype))
    secure().add_gaussian_(tensors, 1.0, grid=GRID, scale=scale)
    assert all(torch.equal(x, y) for x, y in zip(tensors, wanted, strict=True))


@pytest.mark.parametrize("source", [secure, lambda: FastSource(1)], ids=["secure", "fast"])
def test_shared_elements_get_noise_each_time(source):
    """A tensor listed twice, with a part of it and its transpose; parts that share no element are still one group."""
    x, y = torch.zeros(64, 64), torch.zeros(64)
    source().add_gaussian_([x, y, x, x[:8], x.t()], 1.0, grid=GRID)
    assert x[:8].square().mean() == pytest.approx(4.0, rel=0.3)
    assert x[8:].square().mean() == pytest.approx(3.0, rel=0.15)
    assert y.square().mean() == pytest.approx(1.0, rel=0.6)
    assert len(noise._by_kind([*x, *x.flip(0), x[0, :0]])) == 1
    assert len(noise._by_kind([*reversed([*x]), x[3:5]])) == 2


def test_parameters_that_want_gradients_are_taken():
    x = torch.zeros(10, requires_grad=True)
    secure().add_gaussian_([x], 1.0, grid=GRID)
    FastSource(1).add_gaussian_([x], 1.0)
    assert x.requires_grad
    assert x.abs().sum() > 0


def test_a_result_is_a_multiple_of_the_grid():
    x = torch.randn(2000, dtype=torch.float64)
    secure().add_gaussian_([x], 3.0, grid=2.0**-8)
    assert torch.equal(x * 2**8, (x * 2**8).round())


@pytest.mark.parametrize("source", [secure(), FastSource(3)])
@pytest.mark.parametrize("add", ["add_gaussian_", "add_laplace_"])
def test_without_noise_the_scale_alone_is_left(source, add):
    x = torch.tensor([0.25, -1.5, 3.0])
    getattr(source, add)([x], 0.0, grid=0.25, scale=2.0)
    assert x.tolist() == [0.5, -3.0, 6.0]


def test_halves_go_to_the_even_step():
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5])
    secure().add_gaussian_([x], 0.0, grid=1.0)
    assert x.tolist() == [0.0, 2.0, 2.0, 0.0, -2.0]


def test_float64_gets_its_noise_at_any_magnitude():
    """The result is the exact sum of the value on the grid and the noise, rounded once."""
    held = [2.0**47 + 0.75, -(2.0**52) - 1.0, 2.0**60, 1e300, 0.1, math.nan]
    x, noise = torch.tensor(held, dtype=torch.float64), torch.tensor([3, -5, 2**20 + 1, 7, -1, 9])
    add_steps(x, noise, 0.5, 1.0)
    on_grid = [round(Fraction(each) * 2) / Fraction(2) for each in held[:5]] + [Fraction(0)]
    assert x.tolist() == [float(each + Fraction(z, 2)) for each, z in zip(on_grid, noise.tolist(), strict=True)]


def test_what_is_out_of_range_saturates_and_nothing_wraps():
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e30, -1e30, 2.0**70])
    secure().add_gaussian_([x], 1000.0, grid=1.0)
    steps = torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0, 1.0]) * RANGE
    assert (x - steps).abs().max() < 20_000 + RANGE * torch.finfo(torch.float32).eps
    y = x.clone()
    y[:] = math.inf
    add_steps(y, torch.full((6,), 2**31, dtype=torch.int64), 1.0, 1.0)
    assert (y > 0).all()


@pytest.mark.parametrize(("arguments", "message"), [
    ({"std": 1.0, "grid": 0.3}, "power of two"),
    ({"std": -1.0, "grid": 0.5}, "at least 0"),
    ({"std": 1.0, "grid": 2.0**-40}, "grid steps wide"),
    ({"std": 1.0, "grid": 0.5, "scale": math.nan}, "scale must be finite"),
])  # fmt: skip
def test_what_has_no_meaning_is_refused_before_anything_is_changed(arguments, message):
    x = torch.ones(5)
    assert_raises(ConfigError, message, lambda: secure().add_gaussian_([x], **arguments))
    assert (x == 1).all()


@pytest.mark.parametrize("source", [secure(), FastSource(3)])
def test_other_dtypes_and_devices_are_refused_before_anything_is_changed(source):
    x = torch.ones(5)
    assert_raises(UnsupportedDtype, "int32", source.add_gaussian_, [x, torch.ones(2, dtype=torch.int32)], 1.0, grid=0.5)
    with pytest.raises(ConfigError, match="cpu and cuda, not on meta"):
        source.add_gaussian_([x, torch.ones(2, device="meta")], 1.0, grid=0.5)
    assert_raises(ConfigError, "take a coarser grid", lambda: secure().add_laplace_([x], 1.0, grid=2.0**-30))
    assert (x == 1).all()


def test_names_say_what_is_secure():
    assert SecureSource.secure
    assert SecureSource.name == "chacha20 discrete gaussian"
    assert not FastSource.secure
    assert FastSource.name == "philox gaussian"


# --- nothing repeats -------------------------------------------------------------------------------------------------
def first_draws(source):
    x = torch.zeros(6)
    source.add_gaussian_([x], 1.0, grid=GRID)
    return tuple(x.tolist())


SOURCES = {"secure": secure, "fast": lambda: FastSource(7)}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_calls_and_tensors_draw_anew(make):
    source = make()
    x, y = torch.zeros(100), torch.zeros(100)
    source.add_gaussian_([x, y], 1.0, grid=GRID)
    z = torch.zeros(100)
    source.add_gaussian_([z], 1.0, grid=GRID)
    assert len({tuple(each.tolist()) for each in (x, y, z)}) == 3


@pytest.mark.parametrize("make", [SecureSource, FastSource])
def test_torchs_seed_changes_nothing(make):
    torch.manual_seed(0)
    first = first_draws(make())
    torch.manual_seed(0)
    assert first_draws(make()) != first


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_drawing_leaves_torchs_generator_alone(make):
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    first_draws(make())
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("renew", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_draw_something_else(make, renew):
    source = make()
    other, third = renew(source), renew(source)
    assert type(other) is type(source)
    assert len({first_draws(source), first_draws(other), first_draws(third)}) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_forked_processes_draw_something_else(make):
    source, told = make(), []
    for _ in range(2):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.write(writing, repr(first_draws(source)).encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            told.append(pipe.read())
        os.waitpid(child, 0)
    assert len({*told, repr(first_draws(source))}) == 3
    assert all(len(each) > 20 for each in told)


def test_no_checkpoint_holds_a_key():
    source = secure()
    words = key_words(KEY)
    assert KEY not in pickle.dumps(source)
    assert repr(source) == "SecureSource()"
    assert str(int(words[0])) not in repr(vars(source))


# --- FastSource ------------------------------------------------------------------------------------------------------
def philox_normals(seed, stream, first, n):
    """By the reference's words, in float64."""
    counter = np.arange(first, first + -(-n // 4)).astype(np.uint64)
    zero = np.zeros_like(counter)
    words = philox_reference([counter, zero, zero + np.uint64(stream), zero], (seed & 0xFFFFFFFF, seed >> 32))
    z = np.empty((len(counter), 4))
    for j in (0, 2):
        radius = np.sqrt(-2 * np.log((words[j].astype(float) + 1) / 2**32))
        angle = ((words[j + 1] >> np.uint64(9)).astype(float) / 2**23 - 0.5) * 2 * np.pi
        z[:, j], z[:, j + 1] = radius * np.cos(angle), radius * np.sin(angle)
    return z.reshape(-1)[:n]


SEED = 2**40 + 5


@pytest.mark.parametrize("n", [1, 63, 64, 65, 5000])
def test_fast_noise_is_box_muller_of_philox(n):
    x, y, source = torch.zeros(n), torch.zeros(100), FastSource(SEED)
    for each in (x, y):
        source.add_gaussian_([each], 2.0, scale=0.5)
    assert np.abs(x.numpy() - philox_normals(SEED, 0, 0, n)).max() < 2e-6
    assert np.abs(y.numpy() - philox_normals(SEED, 0, -(-n // 1024) * 256, 100)).max() < 2e-6


def test_fast_laplace_is_a_logarithm_of_philox():
    x = torch.zeros(5000)
    FastSource(SEED).add_laplace_([x], 1.0)
    counter = np.arange(1250).astype(np.uint64)
    zero = np.zeros_like(counter)
    words = philox_reference([counter, zero, zero, zero], (SEED & 0xFFFFFFFF, SEED >> 32))
    word = np.stack(words, 1).reshape(-1)
    size = -np.log(((word << np.uint64(1) & np.uint64(0xFFFFFFFF)).astype(float) + 1) / 2**32)
    wanted = np.where(word >> np.uint64(31), -size, size)
    assert np.abs(x.numpy() - wanted).max() < 4e-6


@pytest.mark.gpu
@pytest.mark.parametrize("aligned", [True, False])
def test_fast_noise_on_a_gpu_is_box_muller_of_philox(aligned):
    x, y = torch.zeros(5001, device="cuda")[0 if aligned else 1 :], torch.zeros(1030, device="cuda")
    FastSource(SEED).add_gaussian_([x, y], 2.0, scale=0.5)
    stream = torch.cuda.current_device() + 1
    assert np.abs(x.cpu().numpy() - philox_normals(SEED, stream, 0, x.numel())).max() < 1e-4  # of quick functions
    assert np.abs(y.cpu().numpy() - philox_normals(SEED, stream, 5 * 256, 1030)).max() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_fast_noise_is_added_then_scaled(dtype):
    x = torch.full((100_000,), 8.0, dtype=dtype)
    FastSource(5).add_gaussian_([x], 0.5, scale=0.5)
    y = x.double() - 4
    assert abs(float(y.mean())) < 0.005
    assert abs(float(y.std()) - 0.25) < 0.005
    z = torch.zeros(100_000, dtype=dtype)
    FastSource(5).add_laplace_([z], 2.0)
    assert abs(float(z.double().abs().mean()) - 2) < 0.03
    assert abs(float(z.double().mean())) < 0.05


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fast_fills_forget_what_was_there(device):
    x, y = torch.full((5000,), math.nan, device=device), torch.zeros(5000, device=device)
    FastSource(SEED).fill_gaussian_([x], 2.0)
    FastSource(SEED).add_gaussian_([y], 2.0)
    assert torch.equal(x, y)


def test_launches_are_in_the_runtimes_ledger():
    secure().add_gaussian_([torch.zeros(77)], 1.0, grid=GRID)
    secure().add_laplace_([torch.zeros(77)], 1.0, grid=GRID)
    FastSource(1).add_gaussian_([torch.zeros(77)], 1.0)
    found = {(record.op, record.case, record.own) for record in ledger().records()}
    wanted = {("gaussian_noise", "77 float32", True), ("laplace_noise", "77 int64", True)}
    assert found >= wanted | {("philox_noise", "77 float32", True)}


def test_fast_integers_are_rounded_draws():
    z = FastSource(9).integers((50_000,), 10.0)
    assert z.dtype == torch.int64
    assert abs(float(z.double().std()) - 10) < 0.15


@pytest.mark.parametrize("default", [torch.float64, torch.float16])
def test_torchs_default_dtype_changes_no_noise(default):
    """The kernel writes float32: into tensors of another width it would write other numbers, or past their end."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            x = torch.zeros(50_000, dtype=dtype)
            FastSource(1).add_gaussian_([x], 2.0)
            assert abs(float(x.double().std()) - 2) < 0.03
        assert abs(float(FastSource(9).integers((50_000,), 10.0).double().std()) - 10) < 0.15
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_out_of_range_are_refused(seed):
    assert_raises(ConfigError, "seed must be in", FastSource, seed)


# --- a GPU -----------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
def test_triggers_on_a_gpu_take_the_remainder_from_the_pool(monkeypatch):
    """Of 2^-22 no small test would see one: they are made as frequent as 1/64, there and in the reference."""
    often = 0x003F0000
    usual = fused_source(4, "int64")
    program = usual.dialects["cuda"]
    text = f"#define TRIGGER {often:#x}u\n{program.text}"
    source = dataclasses.replace(usual, name="often", dialects={"cuda": dataclasses.replace(program, text=text)})
    monkeypatch.setattr(noise, "fused_source", lambda *_: source)
    key, plan = chacha20_words(key_words(KEY), 0, 1)[:8, 0], convolution_of(Fraction(2**20))
    (plain,) = drawn(key, plan, [20_000])
    monkeypatch.setattr(noise_reference, "TRIGGER", often)
    (wanted,) = drawn(key, plan, [20_000])
    assert not torch.equal(plain, wanted)
    assert torch.equal(secure().integers((20_000,), 2.0**20, "cuda").cpu(), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_launch_for_a_list_equals_the_cpu(dtype):
    source = secure()
    key = chacha20_words(key_words(KEY), 0, 1)[:8, 0]
    plan = convolution_of(Fraction(2**20))
    wanted = some(dtype)
    filled = [x for x in wanted if x.numel()]
    for x, z in zip(filled, drawn(key, plan, [x.numel() for x in filled]), strict=True):
        add_steps(x, z.view(x.shape), GRID, 0.3)
    tensors = [x.cuda() for x in some(dtype)]
    source.add_gaussian_(tensors, 1.0, grid=GRID, scale=0.3)
    assert all(torch.equal(x.cpu(), y) for x, y in zip(tensors, wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_a_captured_graph_draws_anew_at_each_replay(make):
    source, x = make(), torch.zeros(10_000, device="cuda")
    source.add_gaussian_([x], 1.0, grid=GRID)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.zero_()
        source.add_gaussian_([x], 1.0, grid=GRID)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(x.clone())
    x.zero_()
    source.add_gaussian_([x], 1.0, grid=GRID)
    seen.append(x)
    for i, a in enumerate(seen):
        assert abs(float(a.std()) - 1) < 0.05
        assert all(abs(float((a * b).mean())) < 0.06 for b in seen[:i])


@pytest.mark.gpu
@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_a_capture_before_the_first_draw_is_refused(make):
    source, x = make(), torch.zeros(100, device="cuda")
    make().add_gaussian_([x], 1.0, grid=GRID)
    with pytest.raises(ConfigError, match="run a step before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        source.add_gaussian_([x], 1.0, grid=GRID)


@pytest.mark.gpu
def test_streams_at_the_same_time_draw_different_noise():
    source = secure()
    x = torch.zeros(8, 200_000, device="cuda")
    source.add_gaussian_([x[0]], 1.0, grid=GRID)
    x.zero_()
    torch.cuda.synchronize()
    for row in x:
        with torch.cuda.stream(torch.cuda.Stream()):
            source.add_gaussian_([row], 1.0, grid=GRID)
    torch.cuda.synchronize()
    correlation = torch.corrcoef(x).fill_diagonal_(0)
    assert correlation.abs().max() < 0.02
    assert np.isclose(float(x.std()), 1, atol=0.01)
