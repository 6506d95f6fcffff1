"""Agreement of the processes of torch.distributed; those that really run are in tests/privacy and tests/nn."""

import pytest

from accelerant import errors
from accelerant.errors import BudgetExceeded, ConfigError
from accelerant.runtime.processes import Processes, _raise_again


@pytest.mark.parametrize("other", [{"rate": 0.2, "norm": 1.0}, {"norm": 1.0}, "an error"])
def test_a_disagreement_is_an_error(monkeypatch, other):
    """Of two processes, without the second."""
    processes = Processes()
    processes.size = 2
    answer = [["BudgetExceeded", "no"], {}] if other == "an error" else [None, {k: str(v) for k, v in other.items()}]
    monkeypatch.setattr(processes, "exchange", lambda value: [value, answer])
    expected = BudgetExceeded if other == "an error" else ConfigError
    message = "rank 1: no" if other == "an error" else rf"rate must be .*: 0.1 in rank 0, {other.get('rate')} in rank 1"
    with pytest.raises(expected, match=message), processes.agreed({"norm": 1.0, "rate": 0.1}):
        pass
    with pytest.raises(ValueError, match="here"), processes.agreed({}):
        raise ValueError("here")


@pytest.mark.parametrize("kind", errors.__all__)
def test_every_error_is_raised_again_in_the_other_processes(kind):
    """MissingDependency, for example, is not made of a message alone."""
    with pytest.raises(getattr(errors, kind), match=r"^rank 1: why$"):
        _raise_again([kind, "why"], 1)
