"""What is told from ordinary memory does not depend on where the first call was made."""

import contextlib

import pytest
import torch
from op_checks import counted
from torch._subclasses.fake_tensor import FakeTensorMode

from accelerant import ops
from accelerant.ops import _library


@pytest.fixture(autouse=True)
def _unasked():
    """As in a process that has called no op yet."""
    known = dict(_library.ordinary_keys)
    _library.ordinary_keys.clear()
    yield
    _library.ordinary_keys.update(known)


@pytest.mark.parametrize(
    "first", [contextlib.nullcontext, torch.no_grad, torch.inference_mode, FakeTensorMode], ids=lambda f: f.__name__
)
def test_a_tensor_is_ordinary_wherever_the_first_was_seen(first):
    x = torch.nn.Parameter(torch.ones(3))
    with first():
        _library.is_ordinary(x)
    assert _library.is_plain(x)


@pytest.mark.parametrize("made", [torch.no_grad, torch.inference_mode])
def test_inference_mode_sees_ordinary_tensors(made):
    with made():
        x = torch.ones(3)
    with torch.inference_mode():
        assert _library.is_plain(x)
    assert _library.is_plain(x)


def test_dropout_after_an_inference_is_ours():
    """Torch's own stood in for it from then on, past the ledger."""
    x = torch.ones(8, requires_grad=True)
    with torch.inference_mode():
        ops.dropout(x)
    before = {row["op"]: row["calls"] for row in counted()}
    ops.dropout(x)
    after = {row["op"]: row["calls"] for row in counted()}
    assert before
    assert sum(after.values()) == sum(before.values()) + 1
