import pytest

try:
    from accelerant.nn.patching import choice
except ImportError:  # without torch
    choice = None


@pytest.fixture(autouse=True)
def _quick(one_thread):
    pass


@pytest.fixture(autouse=True)
def _on_our_ops(request, monkeypatch):
    """Patched models stay on our ops, which the tests are of, but for those that are about the choice."""
    if not request.node.get_closest_marker("measured"):
        monkeypatch.setattr(choice, "is_fixed", lambda: True)
