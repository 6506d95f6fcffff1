"""Operations for tests of the job service; the workers of those tests import this module, too."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pydantic

from accelerant.errors import DeviceLost, RangeError


@dataclass(frozen=True)
class Operation:
    run: Callable
    parameters: type
    elementwise: bool = False
    resumable: bool = False
    placed: tuple = ()


class Parameters(pydantic.BaseModel, extra="forbid"):
    seconds: float = 0.0
    steps: int = 1
    until: str = ""  # a file for which the operation waits, so that a test decides when it ends
    once: str = ""  # a file: what is to happen once happens if it is not there yet
    log: str = ""  # a file to which each run adds a line
    how: str = ""


def _first(parameters):
    try:
        os.close(os.open(parameters.once, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def wait(parameters, context, progress):
    while parameters.until and not os.path.exists(parameters.until):
        context.progress(progress)
        time.sleep(0.01)


def double(arrays, parameters, context):
    if parameters.log:
        with open(parameters.log, "a") as file:
            file.write(f"{len(arrays['x'])}\n")
    if (arrays["x"] == 13).any():
        raise RangeError("13 cannot be doubled")
    wait(parameters, context, 0.0)
    time.sleep(parameters.seconds)
    return {"y": arrays["x"] * 2}


def work(arrays, parameters, context):
    """Take `steps` steps; after half of them misbehave as `how` says, the first time only where `once` is a file."""
    if parameters.log:
        with open(parameters.log, "a") as file:
            file.write(f"{context.device} {arrays['x'].sum()}\n")
    for step in range(parameters.steps):
        context.progress(step / parameters.steps, f"step {step}")
        time.sleep(parameters.seconds / parameters.steps)
        if step == parameters.steps // 2:
            wait(parameters, context, step / parameters.steps)
        if step == parameters.steps // 2 and parameters.how and (not parameters.once or _first(parameters)):
            misbehave(parameters.how)
    return {"y": arrays["x"] + 1}


def misbehave(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "lost":
        raise DeviceLost("illegal memory access")
    if how == "hang":
        time.sleep(1000)
    if how == "raise":
        raise ZeroDivisionError("a secret")
    raise RangeError("7 is out of range")


def train(arrays, parameters, context):
    """Count to `steps`, and keep the count in a file."""
    state = Path(context.directory, "count")
    count = int(state.read_text()) if state.exists() else 0
    first = count
    while count < parameters.steps:
        context.progress(count / parameters.steps, f"step {count}")
        time.sleep(parameters.seconds / parameters.steps)
        count += 1
        state.with_suffix(".new").write_text(str(count))
        state.with_suffix(".new").replace(state)
        if count == parameters.steps // 2:
            wait(parameters, context, count / parameters.steps)
    return {"count": np.array([count]), "first": np.array([first])}


def fit(arrays, parameters, context):
    """Train as the service does, with frequent checkpoints."""
    from accelerant.service import operations

    operations._CHECKPOINT_S = 0.1
    context.placed = {"path": None}
    return operations.OPERATIONS["train"].run(arrays, operations.TrainParameters(steps=parameters.steps), context)


OPERATIONS = {
    "fit": Operation(fit, Parameters, resumable=True),
    "double": Operation(double, Parameters, elementwise=True),
    "work": Operation(work, Parameters),
    "train": Operation(train, Parameters, resumable=True),
}
