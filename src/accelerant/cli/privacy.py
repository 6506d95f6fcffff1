"""`accelerant privacy`: epsilon of a run, the noise for an epsilon, and a ledger's statement."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelerant.cli.help import Group, JsonOutput, option
from accelerant.errors import ConfigError
from accelerant.runtime.files import escaped, exact, plain

if TYPE_CHECKING:
    from accelerant.privacy.dp.ledger.accounting import Spent

_MOST_STEPS = 10**9

_Rate = Annotated[float, typer.Option(help="Probability of each record to be in a step; 1: all.")]
_Steps = Annotated[int, typer.Option(help="Number of steps.")]
_Delta = Annotated[float, typer.Option(help="Delta of (epsilon, delta); well below one over the number of records.")]
_Method = Annotated[str, typer.Option(help="pld (privacy loss distributions) or rdp (Renyi divergence; looser).")]


def epsilon(
    noise_multiplier: Annotated[float, typer.Option(help="Standard deviation of the noise over the clipping norm.")],
    sample_rate: _Rate,
    steps: _Steps,
    delta: _Delta,
    method: _Method = "pld",
    json_output: JsonOutput = False,
) -> None:
    """Compute epsilon of steps of DP-SGD: Poisson sampling, Gaussian noise, one record added or removed.

    Without noise, or with too little for delta, it is infinite, and the reason is printed.
    """
    _check(0 <= noise_multiplier < math.inf, "--noise-multiplier must be 0 or more, and finite", noise_multiplier)
    _check_run(sample_rate, steps, delta, method)
    costs = _costs(noise_multiplier, sample_rate, steps, delta)
    chosen, other = costs[method], "rdp" if method == "pld" else "pld"
    if json_output:
        facts = {"epsilon": _number(chosen.epsilon), "delta": delta, "method": method}
        facts |= {f"epsilon_{other}": _number(costs[other].epsilon), "reason": chosen.reason}
        facts |= {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate, "steps": steps}
        print(json.dumps(facts | {"sampling": "poisson", "neighbouring": "add-or-remove-one"}))
        return
    why = f": {chosen.reason}" if chosen.reason else ""
    print(f"epsilon {_number(chosen.epsilon, 6)} at delta {exact(delta)} ({method.upper()}){why}")
    print(f"cross-check by {other.upper()}: {_number(costs[other].epsilon, 6)}")
    print("for Poisson sampling, one record added or removed; shuffled batches are not covered")


def calibrate(
    target_epsilon: Annotated[float, typer.Option(help="Epsilon that the steps together must stay within.")],
    delta: _Delta,
    sample_rate: _Rate,
    steps: _Steps,
    method: _Method = "pld",
    json_output: JsonOutput = False,
) -> None:
    """Find the least noise multiplier for an epsilon: never too small, and at most 0.1 per cent too large."""
    _check(0 < target_epsilon < math.inf, "--target-epsilon must be above 0, and finite", target_epsilon)
    _check_run(sample_rate, steps, delta, method)
    from accelerant.privacy.dp.ledger.accounting import calibrate as least_noise

    sigma = least_noise(target_epsilon=target_epsilon, delta=delta, sample_rate=sample_rate, steps=steps, method=method)
    costs = {way: cost.epsilon for way, cost in _costs(sigma, sample_rate, steps, delta).items()}
    if json_output:
        facts = {"noise_multiplier": sigma, "target_epsilon": target_epsilon, "epsilon": costs[method]}
        facts |= {f"epsilon_{way}": cost for way, cost in costs.items() if way != method}
        facts |= {"delta": delta, "sample_rate": sample_rate, "steps": steps}
        print(json.dumps(facts | {"method": method}))
        return
    scale = 10 ** (5 - math.floor(math.log10(sigma)))
    print(
        f"noise multiplier {math.ceil(sigma * scale) / scale:.6g}"
    )  # rounded up: the printed digits are enough noise as well
    listed = ", ".join(f"{_number(cost, 6)} ({way.upper()})" for way, cost in costs.items())
    print(f"epsilon at delta {exact(delta)} is then {listed}, for Poisson sampling, one record added or removed")


def statement(
    ledger: Annotated[Path, typer.Argument(metavar="LEDGER", help="The ledger's file.")],
    delta: float | None = option("Delta of (epsilon, delta). Default: of the last budget, or 1e-5."),
    json_output: JsonOutput = False,
    markdown: bool = option("Print a section for a report.", default=False),
) -> None:
    """Print what a reviewer needs of a ledger: unit of privacy, epsilon at delta, events, and the assumptions.

    Exit status 2 where the file was cut or edited. A ledger that is being written can be read.
    """
    if json_output and markdown:
        raise ConfigError("--json and --markdown: give one of them")
    if delta is not None:
        _check(0 < delta < 1, "--delta must be in (0, 1)", delta)
    from accelerant.privacy.dp.ledger import PrivacyLedger

    report = PrivacyLedger.read(ledger).statement(delta)
    if json_output:
        print(report.to_json())
    else:
        text = report.to_markdown() if markdown else str(report)
        print("\n".join(escaped(line) for line in text.splitlines()))


def _costs(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> dict[str, Spent]:
    from accelerant.privacy.dp.ledger.accounting import PrivacyEvent, spent

    events = [PrivacyEvent("gaussian", noise_multiplier, "poisson", sample_rate, steps)]
    return {method: spent(events, delta, method=method) for method in ("pld", "rdp")}


def _check_run(sample_rate: float, steps: int, delta: float, method: str) -> None:
    _check(0 < sample_rate <= 1, "--sample-rate must be in (0, 1]", sample_rate)
    _check(1 <= steps <= _MOST_STEPS, f"--steps must be from 1 to {_MOST_STEPS}", steps)
    _check(0 < delta < 1, "--delta must be in (0, 1)", delta)
    _check(method in ("pld", "rdp"), "--method must be pld or rdp", method)


def _check(holds: bool, rule: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"{rule}, got {value!r}")


def _number(value: float, digits: int = 0) -> float | str:
    """Format for JSON, which has no infinity; with digits, for people, rounded up."""
    if math.isinf(value):
        return "infinite" if digits else "inf"
    return plain(value, digits, up=True) if digits else value


privacy = Group(
    "Differential privacy: epsilon, noise and the ledger.",
    {
        epsilon: "epsilon --noise-multiplier 1.1 --sample-rate 0.00426667 --steps 14062 --delta 1e-5",
        calibrate: "calibrate --target-epsilon 3 --delta 1e-5 --sample-rate 0.00426667 --steps 14062",
        statement: "statement privacy.jsonl --delta 1e-5 --markdown",
    },
)
