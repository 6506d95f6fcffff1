"""OpenCL beside CUDA on one GPU: float32 products, multi-scalar multiplications, and training of the preset tiny.

    OCL_ICD_VENDORS=nvidia.icd python -m benchmarks.opencl > benchmarks/results/opencl-h200.txt

nvidia.icd is a file of one line, libnvidia-opencl.so.1. Where there is no CUDA, its columns are missing. Eight rows of
each product are compared with float64 on the host, and each sum with the exact one.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from accelerant import zk
from accelerant.cli.app import exit_status
from accelerant.errors import FormatError
from accelerant.runtime import registry
from accelerant.runtime.provider import ComputeDevice
from accelerant.tensors.tensor import to
from benchmarks import zk_inputs

__all__ = ["main"]

_CALLS = 10


def _median_ms(call: Callable[[], object], device: ComputeDevice, *, marks: bool) -> float:
    """Return the median of some calls after two: between marks on the device's queue, or by the wall."""
    provider, samples = registry.create(device.backend), []
    for _ in range(_CALLS + 2):
        provider.synchronize(device.index)
        began, first = time.perf_counter(), provider.record_event(device.index)
        call()
        last = provider.record_event(device.index)
        provider.synchronize(device.index)
        wall = (time.perf_counter() - began) * 1e3
        samples.append(first.elapsed_ms(last) if marks and first and last else wall)
    return statistics.median(samples[2:])


def _product_ms(n: int, device: ComputeDevice) -> float:
    """Measure the product of two (n, n) matrices of float32."""
    torch.manual_seed(n)
    a, b = torch.randn(n, n), torch.randn(n, n)
    x, y = to(a, device), to(b, device)
    rows, exact = (x @ y)[:8].cpu().double(), a[:8].double() @ b.double()
    if (error := (rows - exact).abs().max().item()) > 1e-5 * n:
        raise FormatError(f"a product of {n} on {device.label} is {error:.2g} from the exact one")
    return _median_ms(lambda: x @ y, device, marks=True)


def _sum_ms(log_n: int, devices: Sequence[ComputeDevice]) -> list[float]:
    """Measure sums over bn254_g1 on each device, points and scalars on it."""
    curve, n = zk.curve("bn254_g1"), 1 << log_n
    words = zk_inputs.msm_scalars(curve.scalar_field.parameters, n)
    points = zk_inputs.msm_points(curve, n, None)
    exact, found = zk_inputs.msm_answer(curve, words), []
    for device in devices:
        base = curve.precompute(points, check=False, device=device)
        scalars = curve.scalar_field.array(words, device=device)
        if curve.decode(base.msm(scalars)) != exact:
            raise FormatError(f"a sum of 2^{log_n} on {device.label} is wrong")
        found.append(_median_ms(functools.partial(base.msm, scalars), device, marks=False))
    return found


def _training(device: str, steps: int) -> tuple[float, list[float]]:
    """Return tokens a second of `accelerant train --preset tiny`, and the loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = ["train", "--preset", "tiny", "--device", device, "--steps", str(steps), "--out", str(out), "--json"]
        done = subprocess.run([sys.executable, "-m", "accelerant", *command], capture_output=True, text=True)
        if done.returncode:
            raise FormatError(f"accelerant {' '.join(command)} failed: {done.stderr[-500:]}")
        lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return json.loads(done.stdout)["tokens_per_s"], [r["loss"] for r in map(json.loads, lines) if "loss" in r]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--products", type=int, nargs="*", default=[512, 1024, 2048, 4096, 8192], help="sizes")
    parser.add_argument("--sums", type=int, nargs="*", default=[16, 20, 22], help="log2 of the numbers of points")
    parser.add_argument("--steps", type=int, default=200, help="of the training; 0 for none. Default: 200.")
    options = parser.parse_args(arguments)
    device = registry.find_device("opencl")
    cuda = [each for each in registry.devices() if each.available and each.backend == "cuda"][:1]
    print(f"{device.label}: {device.name}, driver {device.properties['driver']}, torch {torch.__version__}", flush=True)
    devices = [*cuda, device]
    print(f"float32 products, medians of {_CALLS} between marks; CUDA's are torch's")
    for n in options.products:
        each = [_product_ms(n, one) for one in devices]
        texts = (
            f"{one.backend} {ms:8.3f} ms {2e-9 * n**3 / ms:6.1f} TFLOP/s" for one, ms in zip(devices, each, strict=True)
        )
        print(f"  {n:6d}: {', '.join(texts)}", flush=True)
    print("sums over bn254_g1, points and scalars on the device, wall time")
    for log_n in options.sums:
        each = _sum_ms(log_n, devices)
        texts = (f"{one.backend} {ms:8.2f} ms" for one, ms in zip(devices, each, strict=True))
        print(f"  2^{log_n}: {', '.join(texts)}, {each[-1] / each[0]:.2f} of the first", flush=True)
    if options.steps:
        print(f"accelerant train --preset tiny --steps {options.steps}")
        (cpu, right), (speed, losses) = (_training(name, options.steps) for name in ("cpu", "opencl"))
        worst = max(abs(a - b) for a, b in zip(right[:20], losses[:20], strict=True))
        share = max(abs(a - b) / a for a, b in zip(right, losses, strict=True))
        print(f"  cpu {cpu:,.0f} tokens/s, opencl {speed:,.0f}")
        print(f"  losses differ by {worst:.2g} in the first 20 steps, by {share:.2g} of the loss in all")


if __name__ == "__main__":
    with exit_status():
        main()
