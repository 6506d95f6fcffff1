"""Points that many sums share: checked once, and kept where and as the kernels take them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field.memory_space import HOST, MemorySpace, space_at
from accelerant.runtime.provider import ComputeDevice
from accelerant.zk.elliptic_curve import curve as curve_named
from accelerant.zk.msm.cpu import Bases, shared_plan
from accelerant.zk.msm.op import points_words, scalars_words, summed, sums_outward
from accelerant.zk.operands import point_operand

__all__ = ["FixedBase"]


class FixedBase:
    """The points of sums of multiples, on a device: a prover's key, say.

    >>> key = FixedBase("bn254_g1", points)
    >>> key.msm(scalars)                                 # as msm(scalars, points), without what was done already

    Attributes:
        curve: the name of the points' curve.
        n: how many.
        place: where they are.
    """

    def __init__(
        self,
        curve: str,
        points: Any,
        device: str | ComputeDevice | None = None,
        *,
        check: bool = True,
        multiples: bool | None = None,
    ) -> None:
        """Check the points and bring them to the device in the kernels' form.

        Args:
            curve: its name.
            points: (n, *shape), as msm takes them.
            device: where sums are to be computed; where the points are, if not given.
            check: as msm.
            multiples: keep the points' multiples by 2^(c j) too, if they have room, so that all windows of the scalars
                share one set of buckets: some 20 times the points' memory. If not given: on devices yes, on the CPU no.
                There a sum of 2^12 to 2^16 points comes a tenth sooner for it, and the multiples take 20 us a point.

        Raises:
            As msm; BackendUnavailable: the device is not there.
        """
        self._group = curve_named(curve)
        operand = point_operand(self._group.parameters, points, "points")
        self.curve = curve
        self.place: MemorySpace = operand.place if device is None else space_at(device)
        words = points_words(self._group, operand, self.place, check)
        self.n = int(words.shape[0])
        self._bases = _kept(self.place, self._group.parameters, words, multiples)
        self._kind = replace(operand, words=None, tensor=None if operand.tensor is None else operand.tensor[:0])

    def __repr__(self) -> str:
        return f"FixedBase({self.curve!r}, {self.n} points, {self.place.label})"

    def __len__(self) -> int:
        return self.n

    def msm(self, scalars: Any) -> Any:
        """The sum of scalars[i] times point i, for each row of scalars.

        Args:
            scalars: (n, 4) or (b, n, 4), as msm takes them.

        Returns:
            One point, or (b, ...) of them, canonical, in the library and on the device of the points given first.

        Raises:
            As msm.
        """
        rows, leading, check = scalars_words(self._group, scalars, self.place, self.n)
        run = self._bases.msm if self.place is HOST else self._bases.start
        total = summed(self.place, self._group.parameters, rows, run, check)
        return sums_outward(self._group.parameters, total, self.place, leading, self._kind)

    def explain(self) -> str:
        """How sums are made here, in words."""
        return f"{self.n} points of {self.curve} on {self.place.label}, in Montgomery form; {self._bases.explain()}"


def _kept(place: MemorySpace, curve: Curve[Any], words: Any, multiples: bool | None) -> Any:
    """What has msm(scalars) and explain()."""
    if place is HOST:
        return Bases(curve, words, shared=shared_plan(curve, int(words.shape[0])) if multiples else None)
    from accelerant.zk.msm.device import DeviceBases

    return DeviceBases(place, curve, words, free_bytes=0 if multiples is False else None)
