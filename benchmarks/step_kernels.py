"""The kernels of one training step on a GPU, by torch.profiler: a captured step of ours, or of benchmarks.loops.

    python -m benchmarks.step_kernels --batch 32 --precision fp8
    python -m benchmarks.step_kernels --private 64x1024
    python -m benchmarks.step_kernels --model gpt2 --loop bf16-weights --runner patched-compiled

Prints the kernels that take most, and the sums of matrix products, attention, our other kernels, and the rest; of a
model also what its host does, and a step's time by the clock: where that is above the sum, the device waits.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from accelerant.bench.timer import back_to_back_ms
from accelerant.cli.app import exit_status
from accelerant.errors import AccelerantError, ConfigError
from accelerant.nn import GPT, GPTConfig
from accelerant.runtime import registry
from accelerant.runtime.provider import ComputeDevice
from benchmarks.dp_steps import PrivateKind, parse_case, private_step
from benchmarks.gpt_steps import WARM_UP, TokenBatches, own_step
from benchmarks.loop_cells import FAMILIES, LOOPS, RUNNERS, Cell, running
from benchmarks.training import GPT2

__all__ = [
    "KINDS",
    "KernelShare",
    "kernel_shares",
    "kernel_table",
    "main",
    "model_step_shares",
    "private_step_shares",
    "step_shares",
]

KINDS = ("matmul", "attention", "own", "other")
"""Products (ours with an epilogue among them), attention, our other kernels, the rest."""

_MATMUL = re.compile(r"gemm|nvjet|cutlass|splitK|cublas|linear_gelu$|linear_gelu\b|transformer_dz", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|flash|fmha", re.IGNORECASE)
_OWN = re.compile(
    r"^(norm|transformer|multi_tensor|cross_entropy|embedding|gelu|linear_gelu|linear_fp8|elementwise|softmax|swiglu|"
    r"rope)_"
)


@dataclass(frozen=True, slots=True)
class KernelShare:
    """A kernel's part of a step: its name in the profiler, its kind of KINDS, and its time and calls in one step.

    What the host does has the kind "host", a step's time by the clock "clock".
    """

    name: str
    kind: str
    ms: float
    calls: int


def step_shares(
    device: ComputeDevice, batch: int, config: GPTConfig = GPT2, *, float8: bool = False
) -> list[KernelShare]:
    """Return the kernels of a step in bfloat16 or fp8."""
    where = torch.device(device.torch_device)
    torch.manual_seed(0)
    step = own_step(GPT(config).to(where), precision=torch.float8_e4m3fn if float8 else torch.bfloat16)
    data = TokenBatches.drawn(config, batch, where)
    for i in range(WARM_UP):
        step(*data.batch(i))
    return kernel_shares(lambda: step(*data.batch(0)))


def private_step_shares(device: ComputeDevice, case: str) -> list[KernelShare]:
    """Return the kernels of a private step with secure noise; `case` as dp_steps.parse_case takes it."""
    where, parsed = torch.device(device.torch_device), parse_case(case)
    with private_step(parsed, PrivateKind(secure=True, part=parsed.part), where) as (step, _):
        data = TokenBatches.drawn(parsed.config, parsed.batch, where, contiguous=True)
        for i in range(WARM_UP):
            step(*data.batch(i))
        return kernel_shares(lambda: step(*data.batch(0)))


def model_step_shares(device: ComputeDevice, cell: Cell, runner: str) -> list[KernelShare]:
    """Return the time by the clock of a step of benchmarks.loops, its kernels, and the host's part of it."""
    where = torch.device(device.torch_device)
    step = functools.partial(next, cell.how.steps(running(cell, runner, where, cell.batches(WARM_UP))))
    for _ in range(WARM_UP):
        step()
    by_clock = KernelShare("a step, back to back", "clock", back_to_back_ms(step, where).p50_ms, 1)
    return [by_clock, *kernel_shares(step, host=True)]


def kernel_shares(step: Callable[[], object], *, host: bool = False) -> list[KernelShare]:
    """Return the kernels of one call on a CUDA device, the longest first; with `host` then what the host does.

    The profiler adds to the host's times.

    Raises:
        AccelerantError: the profiler saw no kernel.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, *[ProfilerActivity.CPU] * host]) as profiled:
        step()
        torch.cuda.synchronize()
    events = profiled.key_averages()
    shares = [
        KernelShare(event.key, _kind(event.key), event.self_device_time_total / 1e3, event.count)
        for event in events
        if str(event.device_type).endswith("CUDA") and event.self_device_time_total > 0
    ]
    if not shares:
        raise AccelerantError("torch.profiler saw no kernel: see its warnings; CUPTI may be missing or lack memory")
    calls = [
        KernelShare(event.key, "host", event.self_cpu_time_total / 1e3, event.count)
        for event in events
        if str(event.device_type).endswith("CPU") and host
    ]
    return [share for part in (shares, calls) for share in sorted(part, key=lambda share: -share.ms)]


def _kind(name: str) -> str:
    if _ATTENTION.search(name):
        return "attention"
    if _OWN.match(name):
        return "matmul" if name.startswith("transformer_dz") else "own"
    return "matmul" if _MATMUL.search(name) else "other"


def kernel_table(shares: Sequence[KernelShare]) -> str:
    """Return a table of the longest kernels, the sums by kind, and our share of what is not product or attention.

    The clock's time and what the host does most precede it.
    """
    before, shares = ([share for share in shares if (share.kind in KINDS) is kernel] for kernel in (False, True))
    total = sum(share.ms for share in shares)
    longest = [*before[:20], *shares[:40]]
    lines = [f"{share.ms:8.3f} ms {share.calls:5d} x  {share.kind:9s}  {share.name[:90]}" for share in longest]
    by_kind = {kind: sum(share.ms for share in shares if share.kind == kind) for kind in KINDS}
    lines += [f"{ms:8.3f} ms {100 * ms / total:5.1f} %  {kind}" for kind, ms in by_kind.items()]
    rest = by_kind["own"] + by_kind["other"]
    lines.append(f"{total:8.3f} ms in all; of {rest:.3f} ms besides products and attention")
    lines[-1] += f" {by_kind['own'] / rest:.1%} are ours"
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32, help="sequences in a step")
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--private", metavar="CASE", help="a private step instead: BATCHxLENGTH or BATCHxLENGTH/PART")
    parser.add_argument("--model", metavar="FAMILY", help=f"a model of transformers instead: {', '.join(FAMILIES)}")
    parser.add_argument("--loop", default="fixed", help=f"the loop that it is in: {', '.join(LOOPS)}")
    parser.add_argument("--runner", default="patched", help=f"how it is run: {', '.join(RUNNERS)}")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with exit_status():
        for flag, value, known in (
            ("model", options.model, FAMILIES), ("loop", options.loop, LOOPS), ("runner", options.runner, RUNNERS),
        ):  # fmt: skip
            if value is not None and value not in known:
                raise ConfigError(f"--{flag}: {value!r} is none of {', '.join(known)}")
        device = registry.find_device(options.device)
        if not device.torch_device.startswith("cuda"):
            raise ConfigError("--device: the profiler's times are a GPU's; take --device cuda")
        if options.model is not None:
            cell = Cell(options.model, options.loop, gpu=True)
            shares = model_step_shares(device, cell, RUNNERS[options.runner])
        elif options.private is not None:
            shares = private_step_shares(device, options.private)
        else:
            shares = step_shares(device, options.batch, float8=options.precision == "fp8")
        print(json.dumps([asdict(share) for share in shares], indent=1) if options.json else kernel_table(shares))


if __name__ == "__main__":
    main()
