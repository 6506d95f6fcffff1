"""The setting `debug`: results of ops that are not finite are errors, which name op and input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from accelerant.errors import DivergenceError


def checked(run: Callable[..., Any], named: str, *, mutates: bool) -> Callable[..., Any]:
    """Return an implementation that raises DivergenceError for a result that is not finite; each call waits.

    A NaN is always an error. An infinity is none if an input is not finite either (-inf is the usual mask of softmax),
    nor in later results (attention's log-sum-exp of a row that sees nothing). Nothing is checked in a captured CUDA
    graph.
    """

    def run_checked(*args: Any) -> Any:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return run(*args)
        before = _flaws(args) if mutates else {}
        results = run(*args)
        new = {i: flaw for i, flaw in _flaws(args if mutates else results).items() if before.get(i) != flaw}
        if new:
            known = before if mutates else _flaws(args)
            if any(flaw.nans or (not known and (flaw.infinite_above or i == 0 or mutates)) for i, flaw in new.items()):
                flaws = "; ".join(f"result {i} {flaw}" for i, flaw in new.items())
                already = "; ".join(f"already input {i} {flaw}" for i, flaw in known.items())
                raise DivergenceError(f"{named}: {flaws}; {already or 'every input is finite'}")
        return results

    return run_checked


class _Flaw(NamedTuple):
    """The elements of a tensor that are not finite, and the index of the first."""

    shape: tuple[int, ...]
    nans: int
    infinite: int
    infinite_above: bool
    first: tuple[int, ...]

    def __str__(self) -> str:
        counts = [f"{self.nans} NaN"] * bool(self.nans) + [f"{self.infinite} infinite"] * bool(self.infinite)
        return f"of shape {self.shape} has {' and '.join(counts)}, the first at {self.first}"


def _flaws(values: Any) -> dict[int, _Flaw]:
    """Return the flaws of the tensors that are not finite, by their positions among the tensors."""
    flaws = {}
    for i, x in enumerate(leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)):
        if x.is_floating_point() and x.device.type != "meta":
            wide = (x if x.element_size() > 1 else x.float()).detach()
            finite = wide.isfinite()
            if not bool(finite.all()):
                nans, bad = int(wide.isnan().sum()), (~finite).nonzero()
                flaws[i] = _Flaw(
                    tuple(x.shape), nans, len(bad) - nans, bool((wide == torch.inf).any()), tuple(bad[0].tolist())
                )
    return flaws
