"""The CPU fast path: which calls go to torch's function and autograd, that results do not differ, and the count."""

import contextlib
import gc
import importlib
import sys
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from op_checks import Calls, compiled_into, counted, ran
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from accelerant import ops
from accelerant.config import override
from accelerant.errors import ConfigError, IndexOutOfRange, ShapeError, UnsupportedCase
from accelerant.ops import _differentiable
from accelerant.ops._differentiable import CpuFastPath
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation, case_of, force
from accelerant.runtime.dispatch import operation as dispatch
from accelerant.runtime.dispatch.plan import explain_quietly, observers
from accelerant.runtime.ledger import RARELY, SAMPLE_EVERY, ledger
from accelerant.runtime.streams import graphs
from processes import in_threads
from refusals import assert_raises


@pytest.fixture(autouse=True)
def _uninterpreted(uninterpreted):
    """Triton's interpreter would serve CPU tensors too."""


# --- the decorator, by an op of its own ------------------------------------------------------------------------------
class Probe:
    """An op that doubles, and what each call of it ran: "function" or "torch"."""

    def __init__(self, **options):
        run = Implementation("torch", lambda x: x * 2, differentiable=True)
        self.operation = Operation("fast_path_probe", (run,), cost=lambda case: Cost(bytes=1, flops=1))
        self.ran = []
        self.fails = None
        self.path = CpuFastPath(self.torchs, **options)
        self.call = self.path(self.function)

    def torchs(self, x, scale=1):
        self.ran.append("torch")
        if self.fails is not None:
            raise self.fails
        return x * 2

    def function(self, x, scale=1):
        self.ran.append("function")
        if self.fails is not None:
            raise ShapeError("in the op's words")
        return self.path.run(self.operation, case_of((x.device, x.dtype, tuple(x.shape), ())), (x,))

    def by(self, *args, **options):
        """What a call runs."""
        self.ran.clear()
        self.call(*args, **options)
        return self.ran

    def learn(self, *args, **options):
        """Past the first calls, which are timed."""
        for _ in range(4):
            self.call(*args, **options)
        assert self.by(*args, **options) == ["torch"]


@pytest.fixture(params=[True, False], ids=["guards", "no guards"])
def probes(request, monkeypatch):
    if request.param:
        assert _differentiable._guards is not None
    else:
        monkeypatch.setattr(_differentiable, "_guards", None)  # as a torch that has moved them
    yield Probe
    dispatch._operations.pop("fast_path_probe", None)


@pytest.fixture
def probe(probes):
    return probes()


def tally(op):
    """Calls and failures."""
    rows = counted(op)
    return sum(row["calls"] for row in rows), sum(row["failures"] for row in rows)


X = torch.ones(3, 4)


def test_a_known_kind_takes_the_fast_path_unless_it_is_to_be_timed(probe):
    for _ in range(2 * SAMPLE_EVERY + 1):
        probe.call(X)
    usual = [number for number, ran in enumerate(probe.ran, 1) if ran == "function"]
    assert usual == [1, 2, 3, 4, SAMPLE_EVERY, 2 * SAMPLE_EVERY]
    assert tally("fast_path_probe") == (2 * SAMPLE_EVERY + 1, 0)


def test_calls_that_record_a_gradient_are_timed_less_often_once_many_were_counted(monkeypatch):
    x = torch.randn(3, 41, requires_grad=True)
    timed = []
    ops.gelu(x)
    (record,) = [each for each in ledger()._records.values() if each.op == "gelu_fwd" and "3x41" in each.case]
    monkeypatch.setattr(dispatch, "observe_backward", lambda *_: timed.append(record.calls))
    for _ in range(4 * RARELY):
        ops.gelu(x)
    often = [*range(SAMPLE_EVERY, RARELY + 1, SAMPLE_EVERY)]
    rarely = [count * RARELY for count in (2, 3, 4)]
    assert timed == [2, 3, 4, *often, *rarely]
    assert record.calls == 4 * RARELY + 1


@pytest.mark.parametrize("call", [
    lambda by: by(torch.ones(4, 3)), lambda by: by(X.double()), lambda by: by(X, 2), lambda by: by(X, scale=2),
], ids=["shape", "dtype", "option", "named option"])  # fmt: skip
def test_another_kind_is_checked_first(call, probe):
    probe.learn(X)
    assert call(probe.by) == ["function"]


def test_a_gradient_to_come_is_part_of_the_kind(probe):
    probe.learn(X)
    wants = X.clone().requires_grad_()
    assert probe.by(wants) == ["function"]
    with torch.no_grad():
        assert probe.by(X) == ["torch"]  # in both modes, as it needs no gradient
        assert probe.by(wants) == ["function"]


class Subclass(torch.Tensor):
    """A tensor that somebody may watch."""


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def explained():
    observers.append(told := [].append)
    try:
        yield
    finally:
        observers.remove(told)


@pytest.mark.parametrize("around", [
    lambda: override(race="first_use"), lambda: force(gelu_fwd="torch"), deterministic, explained,
    lambda: torch.autocast("cpu", torch.bfloat16), Calls, torch.autograd.forward_ad.dual_level,
], ids=["race", "force", "deterministic", "explained", "autocast", "mode", "forward mode"])  # fmt: skip
def test_who_is_to_be_asked_is_asked(around, probe):
    probe.learn(X)
    with around():
        assert probe.by(X) == ["function"]
    assert probe.by(X) == ["torch"]


def test_a_transform_sees_the_function(probe):
    probe.learn(X)
    probe.ran.clear()
    torch.func.vmap(probe.call)(torch.ones(2, 3, 4))
    torch.func.jvp(probe.call, (X,), (X,))
    assert probe.ran == ["function", "function"]


@pytest.mark.parametrize(
    "x",
    [X.t().contiguous().t(), torch.ones(1, 4).expand(3, 4), X.as_subclass(Subclass), X.to("meta"), X.to_sparse_csr()],
    ids=["transposed", "expanded", "subclass", "meta", "sparse"],
)
def test_a_tensor_that_is_not_plain_takes_the_usual_way(x, probe):
    probe.learn(X)
    with contextlib.suppress(RuntimeError):  # no kernel for a device without data is the function's own error
        assert probe.by(x) == ["function"]
    assert probe.ran[0] == "function"


@pytest.mark.parametrize("option", [[2], (1, [2]), {2}, 1 + 0j], ids=["list", "list in a tuple", "set", "complex"])
def test_an_option_that_says_nothing_by_its_value_takes_the_usual_way(option, probe):
    probe.learn(X)
    for _ in range(3):
        assert probe.by(X, option) == ["function"]


def test_strides_are_part_of_the_kind_where_any_are_taken(probes):
    probe = probes(any_layout=True)
    probe.learn(X)
    assert probe.by(X.t().contiguous().t()) == ["function"]
    probe.learn(X.t().contiguous().t())


def test_what_torch_does_not_serve_is_never_learnt(probes):
    probe = probes(serves=lambda x, scale=1: scale == 1)
    probe.learn(X)
    for _ in range(6):
        assert probe.by(X, 2) == ["function"]


def test_another_op_that_ran_is_not_taken_for_this_one(probe):
    other = CpuFastPath(probe.torchs)(probe.function)
    for _ in range(6):
        other(X)
    assert set(probe.ran) == {"function"}


def test_plans_that_are_dropped_take_what_was_learnt_along(probe):
    probe.learn(X)
    probe.operation.forget()
    assert probe.by(X) == ["function"]


def test_kinds_are_kept_up_to_a_limit(probe, monkeypatch):
    monkeypatch.setattr(_differentiable, "_CALLS_LIMIT", 3)
    probe.learn(X)
    for size in range(1, 5):
        probe.learn(torch.ones(size))
    assert probe.by(X) == ["function"]


def test_an_error_is_in_the_words_of_the_op_and_counted_once(probe):
    probe.learn(X)
    before = tally("fast_path_probe")
    for error in (RuntimeError(), TypeError(), ValueError(), IndexError(), OverflowError()):
        probe.fails = error
        raised = assert_raises(ShapeError, "in the op's words", probe.call, X)
        assert raised.__context__ is None
    assert tally("fast_path_probe") == before  # the function raised before anything ran


def test_an_error_that_is_not_torchs_goes_through(probe):
    class OtherError(Exception):
        pass

    probe.learn(X)
    calls, failures = tally("fast_path_probe")
    probe.fails = OtherError()
    assert_raises(OtherError, None, probe.call, X)
    assert probe.ran[-1] == "torch"
    assert tally("fast_path_probe") == (calls + 1, failures + 1)


def test_the_count_is_exact_whoever_calls(probe):
    def run():
        for _ in range(500):
            probe.call(X)

    in_threads([run] * 4)
    assert tally("fast_path_probe") == (2000, 0)
    assert "torch" in probe.ran


# --- the ops ---------------------------------------------------------------------------------------------------------
DRAW = torch.Generator().manual_seed(3)


def drawn(*shape, grad=True):
    return torch.randn(shape, generator=DRAW).requires_grad_(grad)


A, B, ROW, CUBE, SCALAR = drawn(5, 6), drawn(5, 6), drawn(6), drawn(2, 5, 6), drawn()
IMAGES, IMAGE, WEIGHT = drawn(2, 3, 8, 8), drawn(3, 8, 8), drawn(4, 3, 3, 3)
HEADS, TABLES = drawn(1, 2, 6, 8), (drawn(6, 4, grad=False), drawn(6, 4, grad=False))
TARGETS = torch.tensor([1, 4, -100, 0, 2])
Q = drawn(2, 3, 4, 8, grad=False)
TURNED = Q.transpose(1, 2).contiguous().transpose(1, 2)
CALLS = {
    "add": (ops.add, (A, B), {}),
    "add row": (ops.add, (CUBE, ROW), {}),
    "add number": (ops.add, (A, 2), {}),
    "mul": (ops.mul, (A, B), {}),
    "mul row": (ops.mul, (CUBE, ROW), {}),
    "relu": (ops.relu, (A,), {}),
    "sigmoid": (ops.sigmoid, (A,), {}),
    "tanh": (ops.tanh, (A,), {}),
    "silu": (ops.silu, (A,), {}),
    "gelu": (ops.gelu, (A, "tanh"), {}),
    "swiglu": (ops.swiglu, (A, B), {}),
    "swiglu packed": (ops.swiglu, (A,), {}),
    "softmax": (ops.softmax, (A,), {}),
    "softmax of a scalar": (ops.softmax, (SCALAR, 0), {}),
    "log_softmax": (ops.log_softmax, (A,), {"dim": 0}),
    "layer_norm": (ops.layer_norm, (CUBE, ROW, ROW), {"eps": 1e-3}),
    "rms_norm": (ops.rms_norm, (CUBE, ROW), {}),
    "add_layer_norm": (ops.add_layer_norm, (A, B, ROW), {}),
    "add_rms_norm": (ops.add_rms_norm, (A, B, ROW), {}),
    "linear_gelu": (ops.linear_gelu, (A, B), {}),
    "linear_gelu of rows of rows": (ops.linear_gelu, (CUBE, B), {}),
    "matmul": (ops.matmul, (A, drawn(6, 3)), {}),
    "matmul of rows of rows": (ops.matmul, (CUBE, drawn(6, 3)), {}),
    "matmul with a vector": (ops.matmul, (CUBE, ROW), {}),
    "matmul of vectors": (ops.matmul, (ROW, ROW), {}),
    "embedding": (ops.embedding, (TARGETS.clamp(0), A), {"padding_idx": -1}),
    "cross_entropy": (ops.cross_entropy, (A, TARGETS), {"label_smoothing": 0.1}),
    "linear_cross_entropy": (ops.linear_cross_entropy, (A, B, TARGETS), {"reduction": "none"}),
    "conv2d": (ops.conv2d, (IMAGES, WEIGHT, drawn(4)), {"padding": 1}),
    "conv2d same": (ops.conv2d, (IMAGES, WEIGHT), {"padding": "same"}),
    "conv2d of one image": (ops.conv2d, (IMAGE, WEIGHT), {"stride": (2, 1)}),
    "max_pool2d": (ops.max_pool2d, (IMAGES, 2), {"return_indices": True}),
    "avg_pool2d": (ops.avg_pool2d, (IMAGES, 3, 2), {}),
    "rope": (ops.rope, (HEADS, *TABLES), {}),
    "rope interleaved": (ops.rope, (HEADS, *TABLES), {"interleaved": True}),
    "attention": (ops.attention, (Q, Q, Q), {"causal": True}),
    "attention turned": (ops.attention, (TURNED, TURNED, TURNED), {"scale": 0.5}),
    "attention of one query": (ops.attention, (Q[:, :, :1].contiguous(), TURNED, TURNED), {}),
    "attention of one head": (ops.attention, (Q[:, :1].contiguous(),) * 3, {}),
}
USUAL = {  # what torch's function does in another way, or with a warning
    "conv2d same, one side more": (ops.conv2d, (IMAGES, drawn(4, 3, 2, 3)), {"padding": "same"}),
    "max_pool2d of one image": (ops.max_pool2d, (IMAGE, 2), {}),
    "avg_pool2d of one image": (ops.avg_pool2d, (IMAGE, 2), {}),
    "attention with a gradient to come": (ops.attention, (HEADS, HEADS, HEADS), {}),
    "attention of later queries": (ops.attention, (Q[:, :, :2].contiguous(), Q, Q), {"causal": True}),
}


def calls():
    """How many the ledger counts, of all ops, without the backward passes of torch's autograd."""
    return sum(row["calls"] for row in counted() if not row["op"].endswith("_bwd"))


@pytest.fixture
def entered(monkeypatch):
    """The Operations that are called, the usual way."""
    names = []
    usual = Operation.execute

    def execute(self, case, plan, args):
        names.append(self.name)
        return usual(self, case, plan, args)

    monkeypatch.setattr(Operation, "execute", execute)
    return names


def differentiated(function, args, options):
    """Results, and gradients of what asks for them."""
    ys = function(*args, **options)
    ys = ys if isinstance(ys, tuple) else (ys,)
    wanted = list({id(x): x for x in args if isinstance(x, torch.Tensor) and x.requires_grad}.values())
    loss = sum(y.float().square().sum() for y in ys if y.requires_grad)
    return [*ys, *(torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ())]


@pytest.mark.sample(5)
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_no_tensor_of_a_call_is_kept(name, elsewhere, monkeypatch):
    """Neither on a CPU nor on a GPU, whose tensors are of a CPU here."""
    for path in [each for each in gc.get_objects() if issubclass(type(each), CpuFastPath)]:
        path._known.clear()
        path._usual = path._last = _differentiable._NO_KIND
    if elsewhere:
        monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda _: False), raising=False)
    function, args, options = CALLS[name]
    own = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in args]
    for _ in range(6):
        differentiated(function, own, options)
    refs = [weakref.ref(x) for x in own if isinstance(x, torch.Tensor)]
    gc.disable()
    try:
        del own
        assert [ref() for ref in refs] == [None] * len(refs)
    finally:
        gc.enable()


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", CALLS)
def test_a_fast_call_gives_what_the_function_gives(name, entered):
    function, args, options = CALLS[name]
    usual = differentiated(function.__wrapped__, args, options)
    for _ in range(5):
        function(*args, **options)
    entered.clear()
    before = calls()
    found = differentiated(function, args, options)
    assert not entered
    assert calls() == before + 1
    for one, other in zip(usual, found, strict=True):
        assert (one.dtype, one.stride(), one.requires_grad) == (other.dtype, other.stride(), other.requires_grad)
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", USUAL)
def test_what_torch_does_in_another_way_is_not_its(name, entered):
    function, args, options = USUAL[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            entered.clear()
            function(*args, **options)
            assert entered


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("attention")])
def test_a_checkpoint_may_run_the_fast_path_once_and_once_not(name):
    """It ends the second run by an error of its own, and compares what the two keep."""
    function, args, options = CALLS[name]
    for _ in range(5):
        function(*args, **options)
    ledger().reset()  # so that the first calls are timed again
    function(*args, **options)

    def run(x):
        y = function(*args, **options)
        return (y[0] if isinstance(y, tuple) else y) * x

    for _ in range(3):
        checkpoint(run, SCALAR, use_reentrant=False).sum().backward()
    assert calls() == 7


def test_dropout_draws_the_same():
    def drawn_from(function):
        torch.manual_seed(5)
        return differentiated(function, (A, 0.25), {})

    usual = drawn_from(ops.dropout.__wrapped__)
    for _ in range(6):
        found = drawn_from(ops.dropout)
        assert all(torch.equal(one, other) for one, other in zip(usual, found, strict=True))


@pytest.mark.parametrize(("call", "match", "began"), [
    (lambda at: ops.embedding(torch.tensor([0, at]), A), r"indices must be in \[0, 5\), got 9", 1),
    (lambda at: ops.cross_entropy(A[:2], torch.tensor([0, at])), r"targets must be in \[0, 6\)", 1),
    (lambda at: ops.linear_cross_entropy(A[:2], B, torch.tensor([0, at])), r"targets must be in \[0, 5\)", 1),
    (lambda at: ops.max_pool2d(IMAGES, 2.0 if at else 2), "kernel_size must be one or two integers", 0),
    (lambda at: ops.conv2d(IMAGES, WEIGHT, None, 1.0 if at else 1), "stride must be one or two integers", 0),
], ids=["embedding", "cross_entropy", "linear_cross_entropy", "max_pool2d", "conv2d"])  # fmt: skip
def test_what_a_kind_does_not_say_is_refused_in_the_words_of_the_op(call, match, began):
    for _ in range(6):
        call(0)
    before = calls()
    for count in (1, 2):
        assert_raises(ConfigError, match, call, 9)
        assert calls() == before + count * began


def test_a_number_of_any_size():
    for b in (1, 2**70, 2**70):
        for _ in range(6):
            assert torch.equal(ops.add(A, b), A + float(b))


def test_attention_is_in_the_layout_of_q_whatever_backend_torch_is_to_choose():
    for _ in range(5):
        usual = ops.attention(TURNED, TURNED, TURNED)
    with sdpa_kernel(SDPBackend.MATH):
        found = ops.attention(TURNED, TURNED, TURNED)
    assert found.stride() == TURNED.stride()
    assert torch.equal(found, usual)


@pytest.mark.parametrize("turned", [False, True], ids=["contiguous", "turned"])
def test_the_second_derivative_of_attention_stays_right(turned):
    """Of one tensor as all three, of some of them alone, and where what is saved is packed."""
    x = torch.randn(2, 3, 4, 2, dtype=torch.float64).transpose(1, 2 if turned else 1).requires_grad_()
    k = torch.randn(x.shape, dtype=torch.float64)

    def twice(function, of):
        (first,) = torch.autograd.grad(function(*of(x)).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    def composed(q, k, v):
        return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v

    for of in (lambda x: (x, x, x), lambda x: (x, k, k), lambda x: (k, x.sin(), x)):
        torch.testing.assert_close(twice(ops.attention, of), twice(composed, of))
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
            packed = twice(ops.attention, of)
        torch.testing.assert_close(packed, twice(composed, of))


def test_explain_sees_a_call_of_a_known_kind():
    for _ in range(6):
        ops.gelu(A)
    (decision,) = explain_quietly(ops.gelu, A).decisions
    assert (decision.op, decision.device, decision.implementation) == ("gelu_fwd", "cpu", "torch")
    assert "torch on the CPU: its own autograd" in str(decision)


def test_torch_compile_sees_the_function():
    for _ in range(6):
        ops.relu(A)
    before = calls()
    assert compiled_into(ops.relu, A.detach())
    assert calls() == before


def test_a_case_is_made_of_what_it_was():
    """Fast calls are counted in the same record as the usual calls."""
    for _ in range(10):
        ops.relu(A)
    (row,) = counted()
    assert (row["op"], row["calls"], row["case"]) == ("relu_fwd", 10, str(Case(A.device, A.dtype, A.shape)))


# --- torch's own autograd ---------------------------------------------------------------------------------------------
# Ops that record a gradient of their own; "of" stands before shapes that they come to by a view.
RECORDED = [name for name in CALLS if not name.startswith(("matmul", "attention")) and " of " not in name]


def leaves(args, dtype):
    """The arguments as new leaves; what stands among them twice is one leaf."""
    floats = [x for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()]
    new = {id(x): x.detach().to(dtype).requires_grad_(x.requires_grad) for x in floats}
    return [new.get(id(x), x) for x in args]


def is_ours(y):
    return isinstance(y.grad_fn, torch.autograd.function.BackwardCFunction)


@pytest.mark.parametrize("name", RECORDED)
def test_gradient_is_torchs_and_the_ledger_says_so(name):
    function, args, options = CALLS[name]
    y, *_ = differentiated(function, args, options)
    assert not is_ours(y)
    row, backward = counted()
    assert row["calls"] == backward["calls"] == 1
    assert row["implementation"] == backward["implementation"] == "torch"
    assert "torch on the CPU: its own autograd" in row["reason"]
    assert backward["op"] == f"{row['op'].removesuffix('_fwd')}_bwd"
    assert min(row["ms_first"], backward["ms_first"]) > 0


@pytest.mark.sample(5, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RECORDED)
def test_it_is_what_the_own_way_gives(name, dtype):
    def found():
        function, args, options = CALLS[name]
        return differentiated(function, leaves(args, dtype), options)

    torchs = found()
    with force(dropout_fwd="torch"):  # whatever is forced, calls take the own way
        own = found()
        assert is_ours(own[0])
    for one, other in zip(torchs, own, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        torch.testing.assert_close(one, other, **({} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}))


def test_a_forced_backward_pass_is_not_passed_over():
    with force(gelu_bwd="triton"), pytest.raises(UnsupportedCase, match="gelu_bwd is forced to 'triton'"):
        ops.gelu(A).sum().backward()
    with force(gelu_bwd="torch"):
        torch.autograd.grad(ops.gelu(A).sum(), A)
    assert [(row["op"], row["calls"]) for row in counted()] == [("gelu_fwd", 2), ("gelu_bwd", 1)]


@pytest.mark.parametrize("name", ["embedding", "cross_entropy", "layer_norm"])
def test_the_same_bits_each_time(name):
    def found():
        table = torch.randn(300, 64, generator=torch.Generator().manual_seed(2), requires_grad=True)
        places = torch.arange(4000) % 7  # many sums into few rows
        with override(deterministic=True):
            y = {
                "embedding": lambda: ops.embedding(places, table),
                "cross_entropy": lambda: ops.cross_entropy(table[places], places),
                "layer_norm": lambda: ops.layer_norm(table[places], table[0], table[1]),
            }[name]()
        assert not is_ours(y)
        return torch.autograd.grad(y.square().sum(), table)[0]

    first = found()
    assert all(torch.equal(first, found()) for _ in range(3))


def test_with_a_kernel_that_serves_the_call_is_ours(monkeypatch):
    pytest.importorskip("triton", reason="Triton has no wheel for this system")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert is_ours(ops.gelu(A))


def test_a_trace_is_that_of_the_op_after_fast_calls():
    for _ in range(8):
        ops.softmax(A)
    traced = make_fx(lambda a: ops.softmax(a))(A)
    assert torch.ops.accelerant.softmax.default in [node.target for node in traced.graph.nodes]


def test_a_mode_sees_the_op():
    with Calls() as calls:
        ops.gelu(A)
    assert torch.ops.accelerant.gelu.default in [func for func, _ in calls.seen]


def test_inplace_gradient_of_a_loss_is_still_inplace():
    inside = A * 1.0
    loss = ops.cross_entropy(inside, TARGETS, inplace_backward=True)
    (dx,) = torch.autograd.grad(loss, inside)
    assert dx.data_ptr() == inside.data_ptr()


def test_what_torch_cannot_do_as_well_is_ours():
    weight = torch.randn(5, 6, requires_grad=True)
    assert is_ours(ops.embedding(torch.empty(0, dtype=torch.int64), weight))
    low = torch.randn(300, 64).bfloat16().requires_grad_()
    assert is_ours(ops.embedding(TARGETS.clamp(0), low))  # torch would add in bfloat16


def test_a_loss_without_options_is_the_mean_of_any_call():
    logits, targets = torch.randn(64, 3), torch.randint(3, (64,)).index_fill_(0, torch.arange(9), -100)
    losses = torch.stack([ops.cross_entropy(logits, targets) for _ in range(12)])
    torch.testing.assert_close(losses, F.cross_entropy(logits, targets).expand(12))


def test_calls_that_torch_refuses_record_no_gradient():
    logits, targets = torch.randn(4, 3, requires_grad=True), torch.arange(4)
    ledger().reset()
    for number in range(100):
        if number % 2:
            assert_raises(IndexOutOfRange, None, ops.cross_entropy, logits, targets)
        else:
            ops.cross_entropy(logits, targets % 3).backward()
    found = {row["op"]: (row["calls"], row["failures"]) for row in ledger().to_dict()["ops"] if row["calls"]}
    assert found == {"cross_entropy_fwd": (100, 50), "cross_entropy_bwd": (50, 0)}


@pytest.mark.parametrize(("op", "named"), [
    (ops.matmul, {"a": torch.ones(3, 4), "b": torch.ones(4, 5)}),
    (ops.gelu, {"x": torch.ones(3, 4)}),
    (ops.softmax, {"x": torch.ones(3, 4)}),
])  # fmt: skip
def test_calls_by_keywords_are_torchs_at_once(op, named, monkeypatch):
    expected = op(*named.values())
    monkeypatch.setattr(_differentiable._ledger, "discount", lambda *_: pytest.fail("torch's function refused it"))
    for _ in range(8):
        torch.testing.assert_close(op(**named), expected)


def test_few_rows_of_low_precision_are_added_in_float32():
    table, dy = torch.zeros(3, 64), torch.randn(5000, 64)
    low, places = table.bfloat16().requires_grad_(), torch.arange(5000) % 3
    y = ops.embedding(places, low)
    assert not is_ours(y)
    (found,) = torch.autograd.grad(y, low, dy.bfloat16())
    exact = torch.zeros(3, 64).index_add(0, places, dy.bfloat16().float())
    torch.testing.assert_close(found, exact.bfloat16(), rtol=8e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loss_of_many_logits_makes_its_gradient_itself(dtype):
    few, many = (torch.zeros(rows, 1024, dtype=dtype).requires_grad_() for rows in (255, 256))
    assert not is_ours(ops.cross_entropy(few, torch.zeros(255, dtype=torch.int64)))
    targets = torch.zeros(256, dtype=torch.int64)
    assert is_ours(ops.cross_entropy(many, targets))
    assert is_ours(ops.cross_entropy(many, targets, reduction="none")) == (dtype == torch.bfloat16)
    assert not ops.cross_entropy(many.detach(), targets).requires_grad
    assert ran() == {"torch"}


@pytest.mark.sample(5, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", RECORDED)
def test_under_autocast_as_the_own_way(name, dtype):
    def found():
        function, args, options = CALLS[name]
        with torch.autocast("cpu", torch.bfloat16):
            return differentiated(function, leaves(args, dtype), options)

    torchs = found()
    with force(dropout_fwd="torch"):
        own = found()
    assert [each.dtype for each in torchs] == [each.dtype for each in own]
    for one, other in zip(torchs, own, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def calls_of(run):
    """How many Python functions a call enters."""
    entered = []
    gc.disable()  # callbacks of a collection are none of the call's
    sys.setprofile(lambda frame, event, _: entered.append(frame.f_code) if event == "call" else None)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(entered)


@pytest.mark.parametrize(("call", "most"), [
    (lambda: ops.relu(A), 2), (lambda: ops.gelu(A, "tanh"), 3), (lambda: ops.add(A, A), 4),
    (lambda: ops.softmax(A), 3), (lambda: ops.layer_norm(A, B[0], B[1]), 3),
], ids=["relu", "gelu", "add", "softmax", "layer_norm"])  # fmt: skip
def test_a_small_call_enters_few_functions(call, most):
    """What an eager call costs beside torch's own is what Python does; a call like the one before is recognized."""
    for _ in range(5):
        call()  # the first to fourth calls are timed
    assert calls_of(call) <= most + 1  # the lambda


LOW, LOW_ROW = A.detach().bfloat16(), ROW.detach().bfloat16()


@pytest.mark.parametrize(("call", "most"), [
    (lambda: ops.softmax(A, dim=-1), 2), (lambda: ops.gelu(A, approximate="tanh"), 2),
    (lambda: ops.layer_norm(A, (6,), ROW, B[0]), 5), (lambda: ops.layer_norm(A, ROW, bias=B[0]), 3),
    (lambda: ops.layer_norm(LOW, LOW_ROW, LOW_ROW + 1), 3), (lambda: ops.rms_norm(LOW, (6,), LOW_ROW), 5),
    (lambda: ops.cross_entropy(LOW, TARGETS), 4),
], ids=[
    "softmax", "gelu", "layer_norm, torch's order", "layer_norm", "bfloat16 layer_norm", "bfloat16 rms_norm",
    "bfloat16 cross_entropy",
])  # fmt: skip
@torch.no_grad()
def test_a_small_call_without_a_gradient_enters_few_functions(call, most):
    for _ in range(5):
        expected = call()
    assert calls_of(call) <= most + 1  # the lambda
    with force(dropout_fwd="torch"):  # whatever is forced, calls take the own way
        assert torch.equal(call(), expected)


def test_low_precision_is_torchs_where_no_gradient_is_recorded():
    """torch adds the gradients of weight and bias up in their dtype."""
    x, weight = (each.clone().requires_grad_() for each in (LOW, LOW_ROW))
    for _ in range(6):
        y = ops.layer_norm(x, weight)
        with torch.no_grad():
            torch.testing.assert_close(ops.layer_norm(x, weight), y, rtol=0, atol=0)
    fresh = ops.layer_norm(x.detach(), weight)  # only the weight learns
    (found,) = torch.autograd.grad(fresh.float().sum(), weight)
    exact = torch.autograd.grad(F.layer_norm(x.detach().float(), (6,), (w := weight.float())).sum(), w)[0]
    torch.testing.assert_close(found, exact.bfloat16(), rtol=8e-3, atol=1e-6)


def test_torchs_order_with_another_row_length_is_refused_after_calls_of_the_right_one():
    for _ in range(6):
        ops.layer_norm(A, (6,), ROW)
    assert_raises(ShapeError, r"normalized_shape must be \(6,\), got \(5, 6\)", ops.layer_norm, A, (5, 6), ROW)
    assert_raises(ShapeError, r"must be \(6,\), got \(5,\)", lambda: ops.layer_norm(A, (6,), drawn(5)))


def test_calls_of_alternating_shapes_enter_no_more_functions():
    x, weight = torch.randn(2, 3, 4), torch.randn(5, 4)
    shapes = [x, x[:1], x[0]]
    for each in shapes * 6:
        ops.linear(each, weight)
        ops.gelu(each)
    for each in shapes:
        assert calls_of(lambda each=each: ops.linear(each, weight)) <= 4
        assert calls_of(lambda each=each: ops.gelu(each)) <= 4


# --- few elements on a GPU -------------------------------------------------------------------------------------------
_FEW = {
    "gelu": (lambda x, w: ops.gelu(x), lambda x, w: F.gelu(x)),
    "silu": (lambda x, w: ops.silu(x), lambda x, w: F.silu(x)),
    "softmax": (lambda x, w: ops.softmax(x), lambda x, w: torch.softmax(x, -1)),
    "layer_norm": (lambda x, w: ops.layer_norm(x, w, w), lambda x, w: F.layer_norm(x, w.shape, w, w)),
    "rms_norm": (lambda x, w: ops.rms_norm(x, w), lambda x, w: F.rms_norm(x, w.shape, w, 1e-6)),
    "linear_gelu": (lambda x, w: ops.linear_gelu(x, x, w[:64]), lambda x, w: F.gelu(F.linear(x, x, w[:64]))),
    "add_layer_norm": (lambda x, w: ops.add_layer_norm(x, x, w)[0], lambda x, w: F.layer_norm(x + x, w.shape, w)),
}


@pytest.fixture
def eager(monkeypatch):
    """Calls that are no longer ahead of a capture, as conftest makes them."""
    monkeypatch.setattr(graphs, "_ahead", 0)


def _recorded(call, x, w):
    y = call(x, w)
    return y, *torch.autograd.grad(y, (x, w), torch.ones_like(y), allow_unused=True)


def _served(op):
    rows = [row for row in counted(op) if row["calls"]]
    return {(row["implementation"], "few elements" in row["case"]): row["calls"] for row in rows}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", _FEW)
def test_training_on_few_elements_on_a_gpu_is_torchs(name, dtype, eager):
    x, w = (torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in ((64, 256), (256,)))
    ours, torchs = _FEW[name]
    expected = _recorded(torchs, x, w)
    for _ in range(6):  # past the calls that are timed
        for found, wanted in zip(_recorded(ours, x, w), expected, strict=True):
            assert (found is None and wanted is None) or torch.equal(found, wanted)
    assert _served(f"{name}_fwd") == {("torch", True): 6}
    assert _served(f"{name}_bwd") == {("torch", True): 6}
    (decision,) = explain_quietly(ours, x, w).decisions
    assert set(dict(decision.refused).values()) == {"it costs the host more than torch's whole call"}
    torch.autograd.grad(torch.autograd.grad(ours(x, w).sum(), x, create_graph=True)[0].sum(), x)


_NO_GRADIENT = {
    **_FEW,
    "matmul": (lambda x, w: ops.matmul(x, w), lambda x, w: torch.matmul(x, w.unsqueeze(1)).squeeze(-1)),
    "linear": (lambda x, w: ops.linear(x, x, w[:64]), lambda x, w: F.linear(x, x, w[:64])),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", _NO_GRADIENT)
def test_few_elements_without_a_gradient_on_a_gpu_are_torchs(name, dtype, eager):
    x, w = (torch.randn(shape, device="cuda", dtype=dtype) for shape in ((64, 256), (256,)))
    ours, torchs = _NO_GRADIENT[name]
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert all(torch.equal(ours(x, w), torchs(x, w)) for _ in range(6))
    names = (name, f"{name}_fwd")
    rows = [row for row in counted() if row["op"] in names and row["calls"]]
    assert {row["implementation"] for row in rows} == {"torch"}
    assert sum(row["calls"] for row in rows) == 12


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ["gelu", "silu", "softmax", "layer_norm", "rms_norm", "matmul", "linear"])
def test_few_elements_elsewhere_than_on_a_cpu_are_recognized(name, grad, eager, monkeypatch):
    """With tensors of a CPU that say they are on a GPU: what is learned, and how often a call is counted."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda _: False), raising=False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    x, w = torch.randn(64, 256), torch.randn(256)
    ours, torchs = _NO_GRADIENT[name]
    with torch.set_grad_enabled(grad):
        for _ in range(6):
            assert torch.equal(ours(x, w), torchs(x, w))
        assert calls_of(lambda: ours(x, w)) <= 7
        with graphs.ahead_of_capture():
            assert calls_of(lambda: ours(x, w)) > 12
    names = (name, f"{name}_fwd")
    assert sum(row["calls"] for row in counted() if row["op"] in names) == 8


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize(
    ("name", "most"),
    [("matmul", 7), ("linear", 7), ("a transposed input", 7), ("a transposed matrix", 99), ("gelu", 99)],
)
def test_products_elsewhere_than_on_a_cpu_are_recognized_at_any_size(name, most, eager, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda _: False), raising=False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    x, w = torch.randn(1024, 1100).double().requires_grad_(), torch.randn(1100, 16).double()  # no oneDNN
    ours, torchs = {
        "matmul": (lambda: ops.matmul(x, w), lambda: torch.matmul(x, w)),
        "linear": (lambda: ops.linear(x, w.t().contiguous()), lambda: F.linear(x, w.t())),
        "a transposed input": (lambda: ops.linear(x.t(), w.new_ones(3, 1024)), lambda: x.t() @ w.new_ones(1024, 3)),
        "a transposed matrix": (lambda: ops.matmul(x, w.t().contiguous().t()), lambda: torch.matmul(x, w)),
        "gelu": (lambda: ops.gelu(x), lambda: F.gelu(x)),
    }[name]
    for _ in range(6):
        found, expected = ours(), torchs()
        torch.testing.assert_close(found, expected)
        for one, two in zip(torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x), strict=True):
            torch.testing.assert_close(one, two)
    assert (calls_of(ours) <= 7) == (most == 7)


@pytest.mark.parametrize(("name", "most"), [("attention", 21), ("cross_entropy", 18)])
def test_our_kernels_without_a_gradient_are_recognized(name, most, eager, monkeypatch):
    """Most of the functions are of torch's implementation; others check and sort arguments: 36 and 28 in all."""
    q, classes = torch.randn(2, 3, 4, 8), torch.arange(4)
    k, v, few = torch.randn(2, 3, 6, 8), torch.randn(2, 3, 6, 8), q[0, 0]
    expected = {"attention": F.scaled_dot_product_attention(q, k, v), "cross_entropy": F.cross_entropy(few, classes)}
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda _: False), raising=False)

    def call():
        return ops.attention(q, k, v) if name == "attention" else ops.cross_entropy(few, classes)

    for grad in (True, False):
        monkeypatch.setattr(importlib.import_module(f"accelerant.ops.{name}")._cpu, "_missed", 0)
        with torch.set_grad_enabled(grad):
            for _ in range(9):
                torch.testing.assert_close(call(), expected[name])
            assert calls_of(call) <= most
    rows = [row for row in ledger().to_dict()["ops"] if row["op"] == f"{name}_fwd"]
    assert sum(row["calls"] for row in rows) == 20


@pytest.mark.gpu
def test_everything_else_on_a_gpu_runs_our_kernels(eager):
    many = torch.randn(_differentiable.SMALL, device="cuda").requires_grad_()
    wants = torch.randn(64, 256, device="cuda").requires_grad_()

    def many_under_no_grad():
        with torch.no_grad():
            ops.gelu(many)

    def ahead():
        with graphs.ahead_of_capture():
            ops.gelu(wants)

    def forced():
        with force(gelu_fwd="triton"):
            ops.gelu(wants)

    for call in (
        lambda: ops.gelu(many),
        lambda: ops.gelu(wants.t()),
        many_under_no_grad,
        ahead,
        forced,
    ):
        ledger().reset()
        ops.gelu(wants)
        call()
        assert sorted(_served("gelu_fwd")) == [("torch", True), ("triton", False)]
    for mixed in (torch.ones(256, device="cuda", dtype=torch.float32), torch.ones(3, device="cuda")):
        with contextlib.suppress(ShapeError):
            ops.layer_norm(wants.bfloat16(), mixed)
    assert set(_served("layer_norm_fwd")) == {("triton", False)}


# --- the op's own autograd function ----------------------------------------------------------------------------------
@pytest.fixture
def checks(monkeypatch):
    """A new fast path of attention, which has learned no kind of call; counts the calls whose arguments are checked."""
    op = importlib.import_module("accelerant.ops.attention")

    seen = []
    window = op.checked_window
    monkeypatch.setattr(op, "checked_window", lambda *args: seen.append(args) or window(*args))
    monkeypatch.setattr(op._cpu, "_missed", 0)
    op._cpu._known.clear()
    return seen


def test_a_call_of_the_kind_before_goes_to_the_autograd_function_without_checks(checks):
    q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    found = []
    for x in (q, q, q.detach().requires_grad_()):
        found.append(torch.autograd.grad(ops.attention(x, k, v, causal=True).sum(), (x, k, v)))
    assert len(checks) == 1
    for gradients in found[1:]:
        torch.testing.assert_close(gradients, found[0], rtol=0, atol=0)
    (first,) = torch.autograd.grad(ops.attention(q, k, v, causal=True).sum(), (q,), create_graph=True)
    assert first.requires_grad
    assert len(checks) == 1
    for _ in range(6):  # past the calls that are timed
        y = ops.attention(q, k, v, causal=True)
        strided = torch.autograd.grad(y, (q, k, v), torch.ones(1, 2, 8, 5).mT, retain_graph=True)
        torch.testing.assert_close(strided, found[0])
    with force(attention_bwd="triton"), pytest.raises(UnsupportedCase, match="attention_bwd is forced"):
        torch.autograd.grad(y.sum(), q)


def test_other_calls_are_checked(checks):
    q, k, v, wrong = (torch.randn(1, 2, n, 8, requires_grad=True) for n in (5, 5, 5, 6))
    longer = [torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(3)]
    for call in (
        lambda: ops.attention(q, k, v), lambda: ops.attention(q, k, v, causal=True), lambda: ops.attention(*longer),
        lambda: ops.attention(q, k, v, window=2), lambda: ops.attention(q, k, v, return_lse=True),
        lambda: ops.attention(q, k, v), lambda: ops.attention(q.detach(), k, v),
    ):  # fmt: skip
        before = len(checks)
        call()
        assert len(checks) == before + 1
    ops.attention(q, k, v)  # the eighth, which is learned
    before = len(checks)
    ops.attention(q, k, v)
    assert len(checks) == before
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.attention(q, k, v).dtype == torch.bfloat16
    with torch.no_grad():
        assert not ops.attention(q, k, v).requires_grad
    assert len(checks) == before + 2
    assert_raises(ShapeError, "v must be", ops.attention, q, k, wrong)


def test_keywords_in_another_order_are_not_learned_from_one_tensor(checks):
    q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    for _ in range(4):
        ops.attention(q, v=k, k=k)
    torch.testing.assert_close(ops.attention(q, v=v, k=k), ops.attention(q, k, v), rtol=0, atol=0)


def test_an_option_that_can_change_is_not_learned(monkeypatch):
    op = importlib.import_module("accelerant.ops.cross_entropy")

    monkeypatch.setattr(op._cpu, "_missed", 0)
    op._cpu._known.clear()
    smoothing, targets = np.array(0.0), torch.arange(3)
    columns = torch.randn(5, 3)
    losses = []
    for value in (0.0, 0.5):
        smoothing[()] = value
        logits = columns.t().clone().requires_grad_()
        losses.append(ops.cross_entropy(logits, targets, label_smoothing=smoothing, inplace_backward=True).item())
    assert losses[0] != losses[1]


def test_a_dropout_that_draws_a_seed_is_never_repeated():
    x = torch.ones(100, 1000, requires_grad=True)
    assert not torch.equal(ops.dropout(x, 0.5), ops.dropout(x, 0.5))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bound_launches_give_what_the_first_calls_give(dtype, eager):
    q, k, v, do = (torch.randn(2, 4, 128, 64, device="cuda", dtype=dtype).requires_grad_() for _ in range(4))
    flat = torch.randn(64 * 1000 + 1, device="cuda", dtype=dtype)
    x, shifted = flat[:-1].view(64, 1000).clone().requires_grad_(), flat[1:].view(64, 1000)
    shifted.copy_(x.detach()).requires_grad_()  # like x, but for the alignment
    classes, factor = torch.arange(64, device="cuda"), torch.tensor(3.0, device="cuda", dtype=dtype)

    def found(logits):
        y = ops.attention(q, k, v, causal=True)
        loss = ops.cross_entropy(logits, classes)
        (dx,) = torch.autograd.grad(loss, logits, factor)
        return y, *torch.autograd.grad(y, (q, k, v), do.detach()), loss, dx

    first = found(x)
    for _ in range(12):
        for logits in (x, x.detach().clone().requires_grad_(), shifted):
            torch.testing.assert_close(found(logits), first, rtol=2e-2, atol=2e-3)
    for op in ("attention_fwd", "attention_bwd", "cross_entropy_fwd", "cross_entropy_bwd"):
        assert sum(_served(op).values()) == 37
