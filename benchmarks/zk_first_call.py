"""Program of the suite zk: the time of an op's first call in a process.

python -P zk_first.py OP DEVICE prints {"ms": ..., "ready_ms": ..., "right": ...}. OP is field_mul (1024 elements), ntt
(2^16 points) or msm (2^12 points), over BN254 each. Before the clock starts the arguments are on the
device, and a small kernel of another field has run, whose time is ready_ms: it starts the compiler's library and, on a
GPU, the driver. The call's own time includes compiling or loading its kernels and tables.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from accelerant import zk
from accelerant.algebra.curve.weierstrass import multiply
from accelerant.zk import msm, ntt

Placed = Callable[[Any], Any]
Call = tuple[Callable[[], Any], Callable[[Any], bool]]


def _field_mul(placed: Placed) -> Call:
    field = zk.field("bn254_fr")
    p = field.modulus
    x, y = [pow(3, i + 1, p) for i in range(1024)], [p - 1 - i for i in range(1024)]
    a, b = placed(field.encode(x)), placed(field.encode(y))
    exact = [u * v % p for u, v in zip(x, y, strict=True)]
    return lambda: field.mul(a, b), lambda z: field.decode(z) == exact


def _ntt(placed: Placed) -> Call:
    """Output 0 is the sum of the inputs; output n / 2 the sum at even indices minus that at odd ones."""
    field = zk.field("bn254_fr")
    p, n = field.modulus, 1 << 16
    x = [(i * i + 7) ** 9 % p for i in range(n)]
    a = placed(field.encode(x))

    def right(y: Any) -> bool:
        outputs = field.decode(y)
        return bool(outputs[0] == sum(x) % p and outputs[n // 2] == (sum(x[::2]) - sum(x[1::2])) % p)

    return lambda: ntt(a, field="bn254_fr"), right


def _msm(placed: Placed) -> Call:
    """The points are 64 multiples of the generator, repeated."""
    curve = zk.curve("bn254_g1")
    parameters, n = curve.parameters, 1 << 12
    points = [multiply(parameters, i + 1, parameters.generator) for i in range(64)]
    scalars = [pow(5, i + 1, parameters.order) for i in range(n)]
    exact = multiply(
        parameters, sum(s * (i % 64 + 1) for i, s in enumerate(scalars)) % parameters.order, parameters.generator
    )
    s = placed(curve.scalar_field.encode(scalars))
    p = placed(np.tile(curve.encode(points), (n // 64, 1, 1)))
    return lambda: msm(s, p, "bn254_g1"), lambda total: bool(curve.decode(total) == exact)


_CALLS: dict[str, Callable[[Placed], Call]] = {"field_mul": _field_mul, "ntt": _ntt, "msm": _msm}


def _placed_on(device: str) -> tuple[Placed, Callable[[], None]]:
    """Return a function that copies an array to the device, which is started, and one that waits for the device."""
    if not device.startswith("cuda"):
        return lambda words: words, lambda: None
    import torch

    torch.zeros(1, device=device)
    return lambda words: torch.from_numpy(words).to(device), lambda: torch.cuda.synchronize(device)


def main(op: str, device: str) -> None:
    """Make the call and print its time."""
    began = time.perf_counter()
    placed, wait = _placed_on(device)
    zk.field("babybear").neg(placed(np.ones(1, np.uint32)))
    wait()
    ready = time.perf_counter()
    call, right = _CALLS[op](placed)
    wait()
    called = time.perf_counter()
    result = call()
    wait()
    done = time.perf_counter()
    print(json.dumps({"ms": (done - called) * 1e3, "ready_ms": (ready - began) * 1e3, "right": right(result)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
