"""The kernels and torch's updates against the reference, in float64; the optimizers are tested in tests/nn."""

import numpy as np
import pytest
import torch
from op_checks import counted, ran

from accelerant import errors
from accelerant.errors import AccelerantError, ConfigError, ShapeError
from accelerant.ops import multi_tensor
from accelerant.ops.multi_tensor import (
    Tensors,
    Workspace,
    adamw_reference,
    adamw_step,
    case_of,
    cases,
    clip_step,
    global_norm,
    sgd_step,
)
from accelerant.ops.registry import draw
from refusals import assert_raises


def sgd_reference(p, g, b, *, lr, momentum, dampening, weight_decay, nesterov, maximize=False):
    """Return the parameter and its momentum buffer after a step; the buffer is None before the first step.

    Source: Sutskever, Martens, Dahl and Hinton 2013, "On the importance of initialization and momentum in deep
    learning", equations 1 to 4, in the form of torch.optim.SGD: lr multiplies the buffer, and the first buffer is the
    gradient.
    """
    g = -g if maximize else g
    g = g + weight_decay * p
    if momentum == 0:
        return p - lr * g, None
    b = g if b is None else momentum * b + (1 - dampening) * g
    return p - lr * (g + momentum * b if nesterov else b), b


def global_norm_reference(tensors):
    """Return the Euclidean norm of all elements of all tensors."""
    if not tensors:
        return torch.zeros(())
    return torch.stack([x.square().sum() for x in tensors]).sum().sqrt()


def clip_reference(tensors, max_norm):
    """Return the tensors scaled so that their norm is at most max_norm.

    Source: Pascanu, Mikolov and Bengio 2013, arXiv:1211.5063, algorithm 1, with torch's 1e-6.
    """
    scale = (max_norm / (global_norm_reference(tensors) + 1e-6)).clamp(max=1.0)
    return [x * scale for x in tensors]


F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
SAMPLES = pytest.mark.parametrize("sample", cases.SAMPLES, ids=lambda sample: sample.name)
EACH = pytest.mark.parametrize("implementation", ["triton", "torch"])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks a tensor, and several blocks a chunk, in tensors that the interpreter can afford."""
    if not torch.cuda.is_available():
        for name in multi_tensor.PLANS:
            monkeypatch.setitem(multi_tensor.PLANS, name, multi_tensor.ChunkTile(64, 32, 4))
        monkeypatch.setitem(multi_tensor.SMALL, "BLOCK_T", 64)
        monkeypatch.setitem(multi_tensor.SMALL, "BLOCK_P", 64)


def drawn(shapes, dtype, seed):
    return [draw(shape, dtype, seed=seed * 1000 + i) for i, shape in enumerate(shapes)]


def close(actual, expected, dtype):
    tolerance = cases.TOLERANCES[dtype]
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance.relative, atol=tolerance.absolute)


GROUPS = (
    {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "maximize": False},
    {"lr": 1e-2, "beta1": 0.0, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.0, "maximize": True},
)


def adamw_inputs(shapes, param, grad, state, *, master=False):
    params = drawn(shapes, param, 1)
    count = len(params)
    return Tensors(
        params,
        drawn(shapes, grad, 2),
        [torch.zeros(shape, dtype=state) for shape in shapes],
        [torch.zeros(shape, dtype=state) for shape in shapes],
        [each.float() for each in params] if master else [],
        [torch.zeros(()) for _ in params],
        [i % 2 for i in range(count)],
    )


def take_adamw(tensors, workspace, groups=GROUPS, **options):
    table = workspace.table(tensors)
    update = multi_tensor.Update(
        tensors, [multi_tensor.AdamWGroup(**group) for group in groups], workspace, table, **options
    )
    adamw_step(case_of(table, workspace.device), update)


@pytest.mark.sample(5, 3)
@SAMPLES
@EACH
@pytest.mark.parametrize(("param", "grad", "state"), [
    (F32, F32, F32),
    (BF16, BF16, F32),
    *(
        pytest.param(*dtypes, marks=pytest.mark.slow)
        for dtypes in ((F64,) * 3, (F16,) * 3, (F32, BF16, F32), (BF16, F32, BF16))
    ),
], ids=str)  # fmt: skip
def test_adamw(sample, implementation, param, grad, state, request):
    own = implementation == "triton" and param != F64
    request.getfixturevalue("interpreted" if own else "uninterpreted")
    tensors = adamw_inputs(sample.shapes, param, grad, state)
    exact = [[each.double() for each in some] for some in tensors[:4]]
    workspace = Workspace(torch.device("cpu"))
    for step in (1, 2, 3):
        for i, place in enumerate(tensors.groups):
            p, g, m, v = (some[i] for some in exact)
            found = adamw_reference(p, g, m, v, step, **GROUPS[place])
            exact[0][i], exact[2][i], exact[3][i] = found
        take_adamw(tensors, workspace)
        loosest = max((param, state), key=lambda dtype: cases.TOLERANCES[dtype].relative)
        close(tensors.params, exact[0], loosest)
        close(tensors.first, exact[2], state)
        close(tensors.second, exact[3], state)
        exact[0] = [each.double() for each in tensors.params]  # errors of one step, not of three
        exact[2], exact[3] = ([each.double() for each in some] for some in tensors[2:4])
    assert all(counter == 3 for counter in tensors.counters)
    assert ran("adamw_step") == {"triton" if own else "torch"}


def test_bias_correction_does_not_cancel(way):
    """1 - 0.9999 in float32 is wrong in the fourth place."""
    tensors = Tensors([torch.zeros(3)], [torch.ones(3)], [torch.zeros(3)], [torch.zeros(3)], [], [torch.zeros(())], [0])
    group = {**GROUPS[0], "beta1": 0.999, "beta2": 0.9999, "lr": 1.0, "weight_decay": 0.0, "eps": 0.0}
    take_adamw(tensors, Workspace(torch.device("cpu")), [group])
    torch.testing.assert_close(tensors.params[0], -torch.ones(3), rtol=3e-7, atol=0)


def test_master_weights(way):
    """A thousandth of bfloat16's step, eight times: the copy has gone on, and the parameter is its rounding."""
    group = {**GROUPS[0], "lr": 1e-5, "weight_decay": 0.0}
    tensors = Tensors(
        [torch.ones(40, dtype=BF16), torch.ones(5)],
        [torch.ones(40, dtype=BF16), torch.ones(5)],
        [torch.zeros(40), torch.zeros(5)],
        [torch.zeros(40), torch.zeros(5)],
        [torch.ones(40), None],
        [torch.zeros(()), torch.zeros(())],
        [0, 0],
    )
    workspace = Workspace(torch.device("cpu"))
    for _ in range(8):
        take_adamw(tensors, workspace, [group])
    torch.testing.assert_close(tensors.masters[0], torch.full((40,), 1 - 8e-5))
    torch.testing.assert_close(tensors.params[1], torch.full((5,), 1 - 8e-5))
    assert tensors.params[0].eq(1).all() or way == "triton"  # the interpreter cuts instead of rounding
    assert ran("adamw_step") == {way}


SGD_GROUPS = (
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "nesterov": False, "weight_decay": 0.1, "maximize": False},
    {"lr": 0.2, "momentum": 0.8, "dampening": 0.0, "nesterov": True, "weight_decay": 0.0, "maximize": True},
    {"lr": 0.3, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.2, "maximize": False},
)


def take_sgd(tensors, workspace, groups=SGD_GROUPS, **options):
    table = workspace.table(tensors)
    update = multi_tensor.Update(
        tensors, [multi_tensor.SGDGroup(**group) for group in groups], workspace, table, **options
    )
    sgd_step(case_of(table, workspace.device, "sgd"), update)


SLOW_PAIRS = [pytest.param(dtype, dtype, marks=pytest.mark.slow) for dtype in (F64, F16)]


@pytest.mark.sample(5, 3)
@SAMPLES
@EACH
@pytest.mark.parametrize(("param", "state"), [(F32, F32), (BF16, F32), *SLOW_PAIRS], ids=str)
def test_sgd(sample, implementation, param, state, request):
    own = implementation == "triton" and param != F64
    request.getfixturevalue("interpreted" if own else "uninterpreted")
    params, grads = drawn(sample.shapes, param, 1), drawn(sample.shapes, param, 2)
    places = [i % 3 for i in range(len(params))]
    buffers = [
        torch.zeros(each.shape, dtype=state) if SGD_GROUPS[place]["momentum"] else None
        for each, place in zip(params, places, strict=True)
    ]
    exact = [None] * len(params)
    workspace = Workspace(torch.device("cpu"))
    for step in range(3):
        new = tuple(i for i, buffer in enumerate(buffers) if buffer is not None and step == 0)
        tensors = Tensors(params, grads, buffers, [], [], [], places, new)
        expected = [
            sgd_reference(p.double(), g.double(), b, **SGD_GROUPS[place])
            for p, g, b, place in zip(params, grads, exact, places, strict=True)
        ]
        take_sgd(tensors, workspace)
        close(params, [p for p, _ in expected], max((param, state), key=lambda each: cases.TOLERANCES[each].relative))
        exact = [None if buffer is None else buffer.double() for buffer in buffers]
        held = [(buffer, b) for buffer, (_, b) in zip(buffers, expected, strict=True) if buffer is not None]
        close([buffer for buffer, _ in held], [b for _, b in held], state)
    assert ran("sgd_step") == {"triton" if own else "torch"}


# --- the norm --------------------------------------------------------------------------------------------------------
def norm_and_clip(grads, max_norm):
    workspace = Workspace(grads[0].device)
    table = workspace.table(Tensors([], grads, [], [], [], [], []))
    case = case_of(table, workspace.device)
    norm, scale = global_norm(case, grads, table, max_norm)
    clip_step(case, grads, table, scale)
    return norm


@pytest.mark.sample(5, 3)
@SAMPLES
@EACH
@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16], ids=str)
@pytest.mark.parametrize("max_norm", [0.5, 1e4])
def test_norm_and_clip(sample, implementation, dtype, max_norm, request):
    own = implementation == "triton" and dtype != F64
    request.getfixturevalue("interpreted" if own else "uninterpreted")
    grads = drawn(sample.shapes, dtype, 3)
    exact = [each.to(F64, copy=True) for each in grads]
    norm = norm_and_clip(grads, max_norm)
    tolerance = {F64: 1e-12, F32: 1e-6}.get(dtype, 1e-6 if own else 1e-2)
    torch.testing.assert_close(norm.double(), global_norm_reference(exact), rtol=tolerance, atol=1e-12)
    close(grads, clip_reference(exact, max_norm), dtype)
    assert ran("global_norm") == ran("clip_step") == {"triton" if own else "torch"}


@pytest.mark.usefixtures("interpreted")
def test_norm_of_half_precision_does_not_overflow():
    grads = [torch.full((200,), 60000.0, dtype=F16)]
    norm = norm_and_clip(grads, 1.0)
    torch.testing.assert_close(norm, torch.tensor(60000.0 * 200**0.5))
    torch.testing.assert_close(grads[0].float(), torch.full((200,), 200**-0.5), rtol=1e-3, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_norm_that_is_not_finite(way, bad):
    """As torch.nn.utils.clip_grad_norm_."""
    grads = [torch.ones(100), torch.tensor([1.0, bad, 2.0])]
    other = [torch.nn.Parameter(torch.zeros(each.shape)) for each in grads]
    for parameter, grad in zip(other, grads, strict=True):
        parameter.grad = grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(other, 1.0)
    torch.testing.assert_close(norm_and_clip(grads, 1.0), expected, equal_nan=True)
    for parameter, grad in zip(other, grads, strict=True):
        torch.testing.assert_close(grad, parameter.grad, equal_nan=True)


def test_clipping_inside_the_update_is_clipping_before_it(way):
    shapes = cases.SAMPLES[2].shapes
    inside, before = (adamw_inputs(shapes, F32, F32, F32) for _ in range(2))
    kept = [each.clone() for each in inside.grads]
    workspace = Workspace(torch.device("cpu"))
    take_adamw(inside, workspace, max_norm=0.7)
    norm = norm_and_clip(before.grads, 0.7)
    take_adamw(before, Workspace(torch.device("cpu")))
    assert torch.equal(workspace.norm, norm)
    for one, other in zip(inside.params, before.params, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert all(map(torch.equal, inside.grads, kept))


# --- scaling of gradients --------------------------------------------------------------------------------------------
def test_grad_scale_and_found_inf(way):
    shapes = cases.SAMPLES[2].shapes
    scaled, plain = (adamw_inputs(shapes, F32, F32, F32) for _ in range(2))
    for grad in scaled.grads:
        grad *= 1024
    workspace = Workspace(torch.device("cpu"))
    for found in (0.0, 1.0):
        found_inf, grad_scale = torch.tensor(found), torch.tensor(1024.0)
        take_adamw(scaled, workspace, grad_scale=grad_scale, found_inf=found_inf, max_norm=0.7)
    torch.testing.assert_close(workspace.norm, global_norm_reference(plain.grads), rtol=1e-5, atol=0)
    take_adamw(plain, Workspace(torch.device("cpu")), max_norm=0.7)
    for one, other in zip(scaled.params, plain.params, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert all(counter == 1 for counter in scaled.counters)


@pytest.mark.sample(3)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_scaled_step_whose_norm_is_not_finite_changes_nothing(way, bad):
    for take in (take_adamw, take_sgd):
        tensors = adamw_inputs(cases.SAMPLES[2].shapes, F32, F32, F32)
        if take is take_sgd:
            tensors = tensors._replace(second=[], counters=[])
        before = [each.clone() for each in (*tensors.params, *tensors.first, *tensors.counters)]
        good = tensors.grads[0].clone()
        tensors.grads[0][..., 0] = bad
        workspace = Workspace(torch.device("cpu"))
        take(tensors, workspace, grad_scale=torch.tensor(4.0), max_norm=float("inf"))
        assert not workspace.norm.isfinite()
        after = (*tensors.params, *tensors.first, *tensors.counters)
        assert all(map(torch.equal, before, after))
        tensors.grads[0].copy_(good)
        take(tensors, workspace, grad_scale=torch.tensor(4.0), max_norm=float("inf"))
        assert not torch.equal(before[0], tensors.params[0])


# --- layouts ----------------------------------------------------------------------------------------------------------
def layouts(tensors):
    return {bucket.layout for bucket in Workspace(torch.device("cpu")).table(tensors).buckets}


@pytest.mark.usefixtures("interpreted")
def test_unaligned_views():
    memory = torch.randn(4, 1000)
    lists = [[row[1:500], row[502:777]] for row in memory]
    tensors = Tensors(
        *lists[:2],
        *([each.abs() for each in some] for some in lists[2:]),
        [],
        [torch.zeros(()), torch.zeros(())],
        [0, 1],
    )
    assert layouts(tensors) <= {"unaligned"}
    exact = [[each.double() for each in some] for some in tensors[:4]]
    guard = memory.clone()
    take_adamw(tensors, Workspace(torch.device("cpu")))
    for i in range(2):
        p, m, v = adamw_reference(*(some[i] for some in exact), 1, **GROUPS[i])
        close([tensors.params[i], tensors.first[i], tensors.second[i]], [p, m, v], F32)
    for start, end in ((0, 1), (500, 502), (777, 1000)):
        assert torch.equal(memory[:, start:end], guard[:, start:end])
    assert ran("adamw_step") == {"triton"}


def strided_inputs(kind):
    if kind == "gaps":
        make = lambda: torch.randn(6, 8)[:, ::2]  # noqa: E731
    elif kind == "transposed":
        make = lambda: torch.randn(8, 6).T  # noqa: E731
    else:
        make = lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)  # noqa: E731
    return Tensors([make()], [make()], [make()], [make().abs()], [], [torch.zeros(())], [0])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("kind", "implementation"), [("gaps", "torch"), ("transposed", "triton"), ("channels last", "triton")]
)
def test_strided_parameters(kind, implementation):
    tensors = strided_inputs(kind)
    exact = [some[0].double() for some in tensors[:4]]
    take_adamw(tensors, Workspace(torch.device("cpu")))
    close([some[0] for some in (tensors.params, *tensors[2:4])], adamw_reference(*exact, 1, **GROUPS[0]), F32)
    assert ran("adamw_step") == {implementation}


@pytest.mark.usefixtures("interpreted")
def test_gradient_that_lies_otherwise():
    tensors = strided_inputs("transposed")
    tensors.grads[0] = tensors.grads[0].contiguous()
    exact = [some[0].double() for some in tensors[:4]]
    take_adamw(tensors, Workspace(torch.device("cpu")))
    close([some[0] for some in (tensors.params, *tensors[2:4])], adamw_reference(*exact, 1, **GROUPS[0]), F32)
    assert ran("adamw_step") == {"torch"}
    (row,) = counted("adamw_step")
    assert "layout differs" in str(row["refused"])


# --- tables -----------------------------------------------------------------------------------------------------------
def test_table_is_found_again_until_something_moves():
    tensors = adamw_inputs(((5,), (70,)), F32, F32, F32)
    workspace = Workspace(torch.device("cpu"))
    table = workspace.table(tensors)
    assert workspace.table(tensors) is table
    moved = tensors._replace(grads=[each.clone() for each in tensors.grads])
    assert workspace.table(moved) is not table
    assert workspace.table(tensors) is table
    assert workspace.table(tensors._replace(new=(1,))) is not table


def test_tables_hold_no_tensors():
    import gc
    import weakref

    tensors = adamw_inputs(((5,),), F32, F32, F32)
    workspace = Workspace(torch.device("cpu"))
    workspace.table(tensors)
    gradient = weakref.ref(tensors.grads[0])
    tensors.grads.clear()
    gc.collect()
    assert gradient() is None


def test_rows_and_chunks_of_a_table():
    tensors = adamw_inputs(((5,), (0,), (70,)), F32, F32, F32)
    table = Workspace(torch.device("cpu")).table(tensors)
    rows = table.rows().view(3, 8)
    for column, some in enumerate(tensors[:4]):
        assert rows[:, column].tolist() == [each.data_ptr() for each in some]
    assert rows[:, 5].tolist() == [each.data_ptr() for each in tensors.counters]
    assert rows[:, 6].tolist() == [5, 0, 70]
    assert rows[:, 7].tolist() == [0, 1, 0]
    chunks = sorted(
        (where >> 32, where & 0xFFFFFFFF) for i in range(len(table.buckets)) for where in table.chunks(i, 32).tolist()
    )
    assert chunks == [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2)]


def test_bytes_of_a_case():
    tensors = adamw_inputs(((100,),), F32, F32, F32)
    table = Workspace(torch.device("cpu")).table(tensors)
    case = case_of(table, torch.device("cpu"))
    assert adamw_step._cost(case).bytes == 2800
    assert adamw_step._cost(case_of(table, torch.device("cpu"), "clipped")).bytes == 3200
    assert "100 (param float32, grad float32, state float32, aligned)" in str(case)


def test_same_bits_each_time(way):
    found = []
    for _ in range(2):
        tensors = adamw_inputs(cases.SAMPLES[3].shapes, F32, F32, F32)
        workspace = Workspace(torch.device("cpu"))
        take_adamw(tensors, workspace, max_norm=0.3)
        found.append([workspace.norm, *tensors.params, *tensors.first, *tensors.second])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.usefixtures("interpreted")
def test_learning_rate_on_the_device():
    shapes = ((40,), (70,))
    number, tensor = (adamw_inputs(shapes, F32, F32, F32) for _ in range(2))
    rate = torch.tensor(3e-3)
    workspaces = [Workspace(torch.device("cpu")) for _ in range(2)]
    for lr in (3e-3, 5e-4):
        rate.fill_(lr)
        take_adamw(number, workspaces[0], [{**GROUPS[0], "lr": np.float32(lr).item()}, GROUPS[1]])
        take_adamw(tensor, workspaces[1], [{**GROUPS[0], "lr": rate}, GROUPS[1]])
    assert all(map(torch.equal, number.params, tensor.params))
    assert ran("adamw_step") == {"triton"}


# --- rejections -------------------------------------------------------------------------------------------------------
def gradients_of(params, grads):
    return Tensors(params, grads, [], [], [], [], [])


@pytest.mark.parametrize(("grad", "error", "match"), [
    (torch.zeros(3), ShapeError, r"gradient 0 must be \(4,\) on cpu, got \(3,\) on cpu"),
    (torch.zeros(4, device="meta"), ShapeError, "on meta"),
    (torch.zeros(4).to_sparse(), ConfigError, "gradient 0 is torch.sparse_coo"),
    (torch.zeros(4, dtype=torch.complex64), errors.UnsupportedDtype, "gradient 0 is complex64"),
])  # fmt: skip
def test_rejects(grad, error, match):
    assert_raises(error, match, lambda: Workspace(torch.device("cpu")).table(gradients_of([torch.zeros(4)], [grad])))


@pytest.mark.usefixtures("interpreted")
def test_failure_after_a_launch_does_not_start_again(monkeypatch):
    """Two parts, the second of which does not compile: the first is changed, so torch may not take over."""
    tensors = adamw_inputs(((5,), (7,)), F32, F32, F32)
    tensors.params[1], tensors.grads[1] = tensors.params[1].to(BF16), tensors.grads[1].to(BF16)
    kernel = multi_tensor.KERNELS["adamw"]
    original, calls = kernel.launch, []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == failing.at:
            raise errors.CompileError("no")
        original(*args, **kwargs)

    monkeypatch.setattr(kernel, "launch", failing)
    failing.at = 2
    with pytest.raises(AccelerantError, match="adamw: 1 of 2 launches ran, then: no"):
        take_adamw(tensors, Workspace(torch.device("cpu")))
    calls.clear()
    failing.at = 1
    tensors = adamw_inputs(((5,), (7,)), F32, F32, F32)
    tensors.params[1], tensors.grads[1] = tensors.params[1].to(F16), tensors.grads[1].to(F16)  # another case
    before = [float(counter) for counter in tensors.counters]
    with pytest.raises(AccelerantError, match="no other implementation followed"):
        take_adamw(tensors, Workspace(torch.device("cpu")))  # a kernel that prepares was launched
    assert [float(counter) for counter in tensors.counters] == before
    take_adamw(tensors, Workspace(torch.device("cpu")))  # by torch
    assert [float(counter) for counter in tensors.counters] == [counter + 1 for counter in before]


def test_capture_needs_memory_that_was_set_aside(monkeypatch):
    """What a capture would meet, without a GPU: no copies that the graph cannot repeat."""
    monkeypatch.setattr(multi_tensor, "capturing", lambda device: True)
    values = multi_tensor.GroupValues(torch.device("cpu"))
    assert_raises(ConfigError, "call refresh", lambda: values.refresh(((0.1,) * 8,)))
