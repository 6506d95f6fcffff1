"""Several suites in one record: what one of them fails at, or Ctrl-C, costs no row that was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from accelerant.bench.record import Environment, Record, Row
from accelerant.runtime.provider import ComputeDevice

__all__ = ["Collected", "Part", "collect"]

Part = tuple[str, Callable[[Record], None]]
"""A suite's name, and what measures it into a record."""


@dataclass(slots=True)
class Collected:
    """What `collect` came to.

    Attributes:
        record: the rows that were measured, concluded.
        failures: suite -> its error.
        interrupted: whether Ctrl-C ended it.
    """

    record: Record
    failures: dict[str, Exception] = field(default_factory=dict)
    interrupted: bool = False


def collect(device: ComputeDevice, parts: Sequence[Part]) -> Collected:
    """Measure suite after suite.

    A suite that raises leaves its rows so far, and one more that says why it went no further; the next suite goes on.

    Args:
        device: where.
        parts: the suites.
    """
    found = Collected(Record(Environment.of(device)))
    record = found.record
    for i, (name, measure) in enumerate(parts):
        try:
            measure(record)
        except KeyboardInterrupt:
            found.interrupted = True
            later = "".join(f", {other}" for other, _ in parts[i + 1 :])
            record.notes.append(f"interrupted: these suites are not complete: {name}{later}")
            break
        except Exception as error:  # noqa: BLE001 - the other suites' figures are worth having
            found.failures[name] = error
            text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            record.rows.append(Row(name, f"{name} suite", "after the rows above", "accelerant", "", note=text))
            record.notes.append(f"the {name} suite failed: {text}")
    record.conclude()
    return found
