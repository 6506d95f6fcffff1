import pytest

from accelerant.runtime.dispatch import operation
from accelerant.runtime.ledger import Ledger


@pytest.fixture
def book(monkeypatch):
    """A ledger of the test's own, which operations write to."""
    own = Ledger()
    monkeypatch.setattr(operation, "_ledger", own)
    return own
