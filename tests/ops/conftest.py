"""The tests of ops run their Triton kernels: compiled on a GPU, interpreted on CPU tensors where there is none."""

import contextlib
import importlib.util

import pytest
import torch

from accelerant.runtime.dispatch import operations
from accelerant.runtime.ledger import ledger
from accelerant.runtime.streams.graphs import ahead_of_capture


def pytest_collection_modifyitems(items):
    # The interpreter is NumPy, which speaks of what a GPU does in silence: -inf - -inf in masked rows, exp of a large
    # argument in a sigmoid.
    for item in items:
        item.add_marker(
            pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encount:RuntimeWarning")
        )


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    """Interpret for the length of a test, with choices made afresh, an empty ledger and a fixed seed."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    _forget()
    ledger().reset()
    torch.manual_seed(0)
    with ahead_of_capture() if torch.cuda.is_available() else contextlib.nullcontext():
        yield
    _forget()


def _forget():
    for operation in operations().values():
        operation.forget()


@pytest.fixture
def interpreted():
    """For a test that must see the kernels run on CPU tensors."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: its tests run the kernels compiled")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton has no wheel for this system")


@pytest.fixture
def uninterpreted(monkeypatch):
    """For a test that must see what runs on CPU tensors without Triton."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture(params=["triton", "torch"])
def way(request):
    """Run a test twice: with the kernels interpreted on CPU tensors, and by torch alone."""
    request.getfixturevalue("interpreted" if request.param == "triton" else "uninterpreted")
    return request.param
