"""Counts and histograms of the points of a collection with differential privacy, charged to a ledger.

A unit of the ledger must be one point: where a person has several, make one of them, or multiply epsilon by their
number.
Noise is discrete Laplace of scale sensitivity / epsilon; see `release`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from accelerant.errors import ConfigError
from accelerant.privacy.dp.ledger.ledger import PrivacyLedger
from accelerant.privacy.dp.noise.mechanisms import release
from accelerant.runtime.files import clipped

__all__ = ["Countable", "private_count", "private_histogram"]


class Countable(Protocol):
    """A collection that counts what a filter selects, as accelerant.search.Collection does."""

    def count(self, filter: Mapping[str, Any] | None = None) -> int:
        """Return how many points a filter selects."""


def private_count(
    collection: Countable, filter: Mapping[str, Any] | None = None, *, epsilon: float, ledger: PrivacyLedger
) -> int:
    """Return how many points a filter selects, with noise: one point moves the number by at most one.

    It may be negative. The filter is not secret: it must not be chosen by what the points hold.

    Raises:
        ConfigError: epsilon is not above 0, or what the filter cannot have.
        BudgetExceeded: the ledger's budget does not allow it; nothing was drawn.
    """
    exact = int(collection.count(filter))
    return int(release(exact, mechanism="laplace", sensitivity=1, epsilon=epsilon, ledger=ledger, note="count"))


def private_histogram(
    collection: Countable, key: str, values: Sequence[str | int | bool], *, epsilon: float, ledger: PrivacyLedger,
    filter: Mapping[str, Any] | None = None,
) -> npt.NDArray[np.int64]:  # fmt: skip
    """Return how many points have each value of a payload's field, with noise.

    A point of several of the values counts for the first of them, so that it moves one number by one; two numbers where
    the ledger's neighbours replace a point.

    Args:
        collection: the points.
        key: path of the field.
        values: what is counted; not taken from the points, whose values would tell who is there.
        epsilon: of the whole histogram.
        ledger: it is charged before anything is drawn.
        filter: the points that count.

    Raises:
        ConfigError: epsilon is not above 0; no value, or one twice.
        BudgetExceeded: the ledger's budget does not allow it; nothing was drawn.
    """
    named = list(values)
    if not named or len({(type(x), x) for x in named}) < len(named):
        raise ConfigError(f"a histogram has values, each once; got {clipped(named)}")

    def of(value: str | int | bool) -> dict[str, Any]:
        return {"key": key, "match": {"value": value}}

    exact = [
        collection.count({
            "must": [of(value), *([] if filter is None else [filter])], "must_not": [of(one) for one in named[:i]],
        })
        for i, value in enumerate(named)
    ]  # fmt: skip
    moved = 2 if ledger.neighbouring == "replace-one" else 1
    counts = np.array(exact, np.int64)
    return np.asarray(
        release(counts, mechanism="laplace", sensitivity=moved, epsilon=epsilon, ledger=ledger, note="histogram")
    )
