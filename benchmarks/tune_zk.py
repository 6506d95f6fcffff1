"""Times of transforms and of sums of points for many divisions of the work: what the constants of zk come from.

    python benchmarks/tune_zk.py cuda                     # all, about two minutes on an H200
    python benchmarks/tune_zk.py cuda --only ntt --json   # lines for a machine
    python benchmarks/tune_zk.py opencl --smallest        # sizes that tell nothing, to see that it runs

Every answer is compared with the CPU's before it is timed. The best divisions belong in algebra/ntt/launch.py
(division_of) and algebra/msm/device_plan.py; nothing is written here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from accelerant.algebra.curve.launch import to_montgomery
from accelerant.algebra.curve.parameters import curve_of
from accelerant.algebra.field.memory_space import HOST, MemorySpace, space_at
from accelerant.algebra.field.parameters import Field, field_of
from accelerant.algebra.field.words import random
from accelerant.algebra.msm.device import DeviceBases, start_msm
from accelerant.algebra.ntt.launch import CpuNttPlan, DeviceNttPlan, Division, division_of, run
from accelerant.errors import AccelerantError
from accelerant.zk.elliptic_curve import curve as curve_named
from benchmarks.zk_inputs import msm_answer, msm_points, msm_scalars

_ORDER = "natural_to_bit_reversed"
_CALLS = 20

# Log2 of the points; then tile, radix, table and resident of a Division.
_TRANSFORMS: dict[str, tuple[tuple[int, ...], tuple[tuple[int, int, int, int], ...]]] = {
    "bn254_fr": (
        (20, 24),
        ((9, 2, 24, 5), (10, 2, 24, 0), (10, 3, 24, 0), (9, 3, 24, 0), (9, 2, 16, 0)),
    ),
    "bls12_381_fr": ((20,), ((10, 2, 24, 0), (9, 3, 24, 0), (9, 2, 16, 0))),
    "goldilocks": (
        (20, 24),
        ((12, 4, 24, 3), (12, 4, 16, 0), (11, 4, 24, 0), (12, 3, 24, 0), (11, 3, 24, 0), (10, 2, 24, 0)),
    ),
    "babybear": ((20, 23), ((12, 4, 23, 4), (12, 4, 23, 0), (12, 3, 16, 0), (11, 3, 16, 0), (13, 4, 16, 4))),
}
_SUMS = {"bn254_g1": (16, 18, 20, 22), "bls12_381_g1": (20, 22)}


def _timed(place: MemorySpace, call: Callable[[], Any]) -> tuple[float, float]:
    """Median and least milliseconds of a call, host and device."""
    times = []
    for _ in range(_CALLS):
        place.provider.synchronize(place.index)
        began = time.perf_counter()
        call()
        place.provider.synchronize(place.index)
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times), min(times)


def _transforms(place: MemorySpace, smallest: bool) -> Iterator[dict[str, Any]]:
    for name, (sizes, tried) in _TRANSFORMS.items():
        field = field_of(name)
        divisions = [division_of(field), *(Division(8, *each) for each in tried)]
        for log_n in (10,) if smallest else sizes:
            x = random(field, (1 << log_n,))
            want = np.empty_like(x)
            run(CpuNttPlan(field, log_n, 1, inverse=False, coset=1, order=_ORDER), HOST, x, want, 1 << log_n)
            words, out = place.load(x), place.empty(x.shape, x.dtype)
            for division in divisions[:1] if smallest else dict.fromkeys(divisions):
                row: dict[str, Any] = {"case": f"ntt {name} 2^{log_n}", "division": str(division)}
                try:
                    yield row | _one_transform(place, field, log_n, division, words, out, want)
                except AccelerantError as error:
                    yield row | {"error": str(error).splitlines()[0]}


def _one_transform(
    place: MemorySpace, field: Field, log_n: int, division: Division, words: Any, out: Any, want: Any
) -> dict[str, Any]:
    plan = DeviceNttPlan(place, field, log_n, inverse=False, coset=1, order=_ORDER, division=division)

    def call() -> None:
        run(plan, place, words, out, 1 << log_n)

    call()
    right = bool((place.store(out) == want).all())
    median, least = _timed(place, call)
    return {"right": right, "median_ms": median, "least_ms": least}


def _sums(place: MemorySpace, smallest: bool) -> Iterator[dict[str, Any]]:
    for name, sizes in _SUMS.items():
        curve, group = curve_of(name), curve_named(name)
        for log_n in (8,) if smallest else sizes:
            n = 1 << log_n
            scalars = msm_scalars(curve.scalars, n)
            want = group.encode([msm_answer(group, scalars)])
            points = to_montgomery(HOST, curve, msm_points(group, n, None)).reshape(n, -1)
            there, factors = place.load(points), place.load(scalars)
            for options in [{}] if smallest else _choices(log_n):
                for kept in (False, True):
                    row: dict[str, Any] = {"case": f"msm {name} 2^{log_n}" + " multiples" * kept, **options}
                    try:
                        yield row | _one_sum(place, curve, there, factors, want, options, kept)
                    except AccelerantError as error:
                        yield row | {"error": str(error).splitlines()[0]}


def _choices(log_n: int) -> Iterator[dict[str, Any]]:
    yield {}
    usual = max(8, log_n - 5)
    for window, segment in itertools.product(range(usual - 1, usual + 3), (16, 32, 64)):
        yield {"window": window, "segment": segment}
    for per_thread in (2, 4, 8, 16):
        yield {"per_thread": per_thread}
    for resident in (256, 384, 512, 640):
        yield {"resident": resident}
    yield {"fold_inlined": True}


def _one_sum(
    place: MemorySpace, curve: Any, points: Any, scalars: Any, want: Any, options: dict[str, Any], kept: bool
) -> dict[str, Any]:
    if kept:
        bases = DeviceBases(place, curve, points, **options)

        def call() -> Any:
            return bases.msm(scalars)

    else:

        def call() -> Any:
            return start_msm(place, curve, scalars, points, **options).finish()

    found = call().reshape(1, -1)
    right = bool((found == to_montgomery(HOST, curve, want).reshape(1, -1)).all())
    median, least = _timed(place, call)
    return {"right": right, "median_ms": median, "least_ms": least}


def main() -> None:
    """See the module's docstring."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("device", help="cuda, cuda:1, opencl")
    arguments.add_argument("--only", choices=("ntt", "msm"))
    arguments.add_argument("--smallest", action="store_true")
    arguments.add_argument("--json", action="store_true")
    asked = arguments.parse_args()
    place = space_at(asked.device)
    parts = {"ntt": _transforms, "msm": _sums}
    for name in (asked.only,) if asked.only else parts:
        for row in parts[name](place, asked.smallest):
            if asked.json:
                print(json.dumps(row), flush=True)
            else:
                times = (
                    f"{row['median_ms']:9.4f} {row['least_ms']:9.4f} ms" if "median_ms" in row else row.get("error", "")
                )
                rest = {k: v for k, v in row.items() if k not in ("case", "median_ms", "least_ms", "right", "error")}
                print(f"{row['case']:32} {times} {'' if row.get('right', True) else 'WRONG '}{rest}", flush=True)


if __name__ == "__main__":
    main()
