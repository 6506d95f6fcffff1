"""The setting `debug`: results that are not finite are errors that name op, implementation, case and input."""

import math

import pytest
import torch

import accelerant as acl
from accelerant.config import override
from accelerant.errors import DivergenceError
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation
from refusals import assert_raises

BAD = torch.tensor([[1.0, 2.0], [math.nan, 3.0]])


@pytest.fixture(autouse=True)
def _debug():
    with override(debug=True):
        yield


def operation(function, *, mutates=False):
    return Operation("debugged", (Implementation("plain", function, mutates=mutates),), cost=lambda case: Cost(0, 0))


def run(function, *args, mutates=False):
    return operation(function, mutates=mutates)(Case(torch.device("cpu"), torch.float32, (2, 2)), *args)


def test_the_error_names_op_implementation_case_and_input():
    known = (
        r"gelu_fwd by torch \(2x2 float32 none on cpu\): result 0 of shape \(2, 2\) has 1 NaN, the first at \(1, 0\)"
    )
    assert_raises(DivergenceError, known + "; already input 0 of shape .* has 1 NaN", acl.ops.gelu, BAD)


def test_an_op_that_makes_it_itself_is_found():
    with pytest.raises(DivergenceError, match=r"has 1 NaN and 2 infinite, the first at .*; every input is finite"):
        run(lambda x: x / torch.tensor([0.0, 1.0]), torch.tensor([[1.0, 2.0], [-1.0, 3.0], [0.0, 1.0]]))


def test_a_backward_pass_is_checked():
    x = torch.ones(3, requires_grad=True)
    y = acl.ops.silu(x)
    with pytest.raises(DivergenceError, match=r"silu_bwd by torch.*already input 0"):
        y.backward(torch.tensor([1.0, math.nan, 1.0]))


def test_infinite_masks_are_no_errors():
    x = torch.tensor([[0.0, -math.inf, 1.0]])
    assert acl.ops.softmax(x)[0, 1] == 0
    assert acl.ops.log_softmax(x)[0, 1] == -math.inf
    run(lambda x: (x, x - math.inf), torch.ones(2))  # a statistic for the backward pass
    assert_raises(DivergenceError, r"result 1 .* has 2 infinite", run, lambda x: (x, x + math.inf), torch.ones(2))


def test_what_an_op_changes_is_its_result():
    with pytest.raises(DivergenceError, match=r"result 0 .* 1 NaN.*every input is finite"):
        run(lambda x: x.sub_(torch.tensor([0.0, math.nan])), torch.ones(2), mutates=True)
    run(lambda x, y: x.add_(1), torch.ones(2), BAD, mutates=True)  # it had the NaN before
    run(lambda x: torch.tensor([1, 2]), torch.ones(2))  # integers have none


def test_without_the_setting_nothing_is_checked(monkeypatch):
    from accelerant.runtime.dispatch import plan

    monkeypatch.setattr(plan, "_flaws", None)
    with override(debug=False):
        assert acl.ops.gelu(BAD).isnan().any()
        acl.explain(acl.ops.gelu, BAD)


def test_fused_functions_are_checked():
    @acl.fuse
    def inverse(x):
        return 1 / x

    with pytest.raises(DivergenceError, match=r"fused_inverse_fwd by portable .* 1 infinite.*every input is finite"):
        inverse(torch.tensor([0.0, 1.0], requires_grad=True))


@pytest.mark.gpu
def test_a_result_on_a_gpu():
    assert_raises(DivergenceError, r"on cuda:0.*already input 0", lambda: acl.ops.gelu(BAD.cuda()))
