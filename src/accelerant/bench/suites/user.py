"""The cost of plain calls to a user: wall time, host included, of public names with default arguments.

Nothing is raced, captured or converted before a call; only a first call, which compiles and loads, precedes the timed
ones and has a column of its own. Results are compared with torch's, float64 references or integers before anything is
timed. Three kinds of time are taken, as the rows say: of a call from an idle device to an idle device; on the host
alone, of calls back to back; and of training steps back to back.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from accelerant import nn as own_nn
from accelerant import ops
from accelerant.bench.record import COMPILED, GRAPH, STEP, Row, failure_note
from accelerant.bench.subjects import OPS
from accelerant.bench.suite import Suite, SuiteCase, SuiteRun, check_names, option
from accelerant.bench.suites import algebra
from accelerant.bench.suites.neural import compiling
from accelerant.bench.suites.neural_cases import OpCase, Oracle, as_tuple, call_of, leaves_of
from accelerant.bench.timer import back_to_back_ms, first_ms, host_time_us, time_ms, wall_ms
from accelerant.errors import AccelerantError, ConfigError, MissingDependency
from accelerant.nn.optim import AdamW
from accelerant.nn.train.step import TrainStep
from accelerant.ops._cases import Benchmark, Indices, Sample
from accelerant.runtime.host import python_child
from accelerant.runtime.provider import ComputeDevice

__all__ = ["MODELS", "ModelShape", "UserSuite", "built_model"]

_OURS = "accelerant"
_PEERS = {"torch": "torch", "compile": "torch.compile", "liger": "liger"}
"""Runners by their names in --against."""

_MSM_MS, _FIRST_MS, _HOST_MS, _RATE = 10.0, 10.0, 0.03, 0.8
"""Targets on an H200: of a sum and of its first call in a process; the host's part of a transform; the share of the
kernel's rate that an addition of many words reaches.
"""


@dataclass(frozen=True)
class UserSuite(Suite):
    """Measure what plain calls cost a user, host included: ops, Hugging Face models in a loop, zk. Losses first."""

    name = "user"
    examples: ClassVar[tuple[str, ...]] = (
        "", "--op gelu --op attention", "--op gpt2 --against torch,compile", '--case "bert 8x128"', "--list",
        "--out user.json --compare before.json",
    )  # fmt: skip

    op: tuple[str, ...] = option((), "Only this op or model, as --list names them first; may be repeated.")
    case: tuple[str, ...] = option((), "Only cases with this text in their names; may be repeated.", metavar="TEXT")
    against: tuple[str, ...] | None = option(
        None, "torch, compile, liger, or none; by default all, on a CPU torch.", metavar="LIST", comma=True, same=True
    )
    budget_s: float = option(0.3, "Seconds of calls behind each figure.", min=0.0, same=True)

    def resolve(self, device: ComputeDevice) -> Self:
        """Return the suite with the device's peers; ConfigError for an unknown peer, op or text."""
        check_names("--against", "peer", self.against or (), tuple(_PEERS))
        gpu = device.torch_device.startswith("cuda")
        keys = [(op, key) for op, key, _ in _cases(gpu)]
        check_names("--op", "op", self.op, tuple(dict.fromkeys(op for op, _ in keys)))
        for text in self.case:
            if not any(text.lower() in key.lower() for _, key in keys):
                raise ConfigError(f"--case: no case has {text!r}; there are {', '.join(key for _, key in keys)}")
        against = self.against if self.against is not None else tuple(_PEERS) if gpu else ("torch",)
        return replace(self, against=against)

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return the chosen cases."""
        texts = [text.lower() for text in self.case]
        return [
            SuiteCase(key, functools.partial(self._measure, op, measure))
            for op, key, measure in _cases(run.gpu)
            if (not self.op or op in self.op) and (not texts or any(text in key.lower() for text in texts))
        ]

    def covers(self, row: Row) -> bool:
        """Return whether a baseline's row is of a chosen op; texts of cases choose among all rows."""
        texts = [text.lower() for text in self.case]
        key = f"{row.op} {row.case}".lower()
        return row.suite == self.name and (not self.op or row.op in self.op) and (
            not texts or any(text in key for text in texts)
        )  # fmt: skip

    def _measure(self, op: str, measure: Measure, run: SuiteRun) -> None:
        with compiling():
            measure(_UserRun(self, op, run))


@dataclass(frozen=True, slots=True)
class _UserRun:
    """A case being measured."""

    suite: UserSuite
    op: str
    run: SuiteRun

    @property
    def where(self) -> torch.device:
        return self.run.torch_device

    @property
    def place(self) -> str:
        """The device as functions of fields and curves name it."""
        return str(self.where)

    def row(self, case: str, runner: str = _OURS, **values: Any) -> Row:
        """Return a row without times; its target in milliseconds holds on an H200 alone."""
        if not self.run.is_model("H200"):
            values.pop("target", None)
        self.run.progress(f"{self.op} {case}: {runner}")
        return Row("user", self.op, case, runner, runner, **values)

    def add_call(self, row: Row, call: Callable[[], object]) -> None:
        """Time a call from an idle device to an idle one and back to back; on a GPU also by the device's events."""
        budget_s = self.suite.budget_s
        row = row.timed(wall_ms(call, self.where, budget_s=budget_s))
        apart = ""
        if self.run.gpu:
            kernel = time_ms(call, self.where, budget_s=budget_s)
            apart = f"{kernel.p50_ms:.4g} ms of it on the device"
            row = replace(row, back_to_back_ms=kernel.back_to_back_ms)
        self.run.add(replace(row, timing="wall", note="; ".join(filter(None, (apart, row.note)))))

    def peers(self, *names: str) -> list[str]:
        """Return the requested peers of those named."""
        return [name for name in names if name in (self.suite.against or ())]


Measure = Callable[[_UserRun], None]


def _cases(gpu: bool) -> Iterator[tuple[str, str, Measure]]:
    """Yield op, key and measurement of each case."""
    for call in _OP_CALLS:
        shape = (call.gpu if gpu else call.cpu).shapes[0] or ()
        yield call.op, f"{call.op} {'x'.join(map(str, shape))} {call.kind}", functools.partial(_measure_op, call)
    for name, model in MODELS.items():
        for batch, tokens in model.sizes if gpu else ((2, 16),):
            text = f"{name} {batch}x{tokens}"
            yield name, text, functools.partial(_measure_model, model, batch, tokens, f"{batch}x{tokens}")
    log_n = 20 if gpu else 10
    yield "msm", f"msm bls12_381_g1 2^{log_n}", functools.partial(_measure_msm, log_n)
    for field in ("goldilocks", "bn254_fr", "babybear"):
        yield "ntt", f"ntt {field} 2^{log_n}", functools.partial(_measure_ntt, field, log_n)
    for n in (1 << 20, 1 << 25) if gpu else (1 << 14,):
        yield "field_add", f"field_add goldilocks {n:,}", functools.partial(_measure_add, n)
    yield "first call", "first call msm", _measure_first


# --- ops -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _OpCall:
    """An op's call, smaller on a CPU; `host` measures the host's time of forward and backward in bfloat16."""

    op: str
    gpu: Sample
    cpu: Sample
    host: bool = True

    @property
    def kind(self) -> str:
        return "forward + backward, host time" if self.host else "float32"


def _small(op: str, *arguments: Any, **options: Any) -> _OpCall:
    sample = Sample("small", arguments, options)
    return _OpCall(op, sample, sample)


def _attention(*shape: int, causal: bool) -> _OpCall:
    options = {"causal": causal}
    gpu, cpu = (Sample("", (each,) * 3, options) for each in (shape, (1, 2, 128, shape[3])))
    return _OpCall("attention", gpu, cpu, host=False)


_ROWS, _WIDTH = 64, 1024
_X, _W = (_ROWS, _WIDTH), (_WIDTH,)

_OP_CALLS = (
    _attention(8, 12, 2048, 64, causal=False),
    _attention(2, 8, 4096, 128, causal=True),
    _small("gelu", _X),
    _small("layer_norm", _X, _W, _W),
    _small("rms_norm", _X, _W),
    _small("attention", *[(2, 4, 128, 64)] * 3, causal=True),
    _small("cross_entropy", _X, Indices((_ROWS,), _WIDTH)),
    _small("linear_gelu", _X, (_WIDTH, _WIDTH), _W),
)


def _measure_op(one: _OpCall, this: _UserRun) -> None:
    """Measure our op and torch's function, eager and compiled, checked against the float64 reference."""
    gpu = this.run.gpu
    dtype = torch.bfloat16 if gpu and one.host else torch.float32
    sample = one.gpu if gpu else one.cpu
    case = OpCase.of(one.op, Benchmark(sample, dtype), this.run.device, dtype, whole=True)
    oracle, theirs = Oracle(case), OPS[one.op].theirs
    makers: dict[str, Callable[[], Callable[..., Any]]] = {_OURS: lambda: getattr(ops, one.op)}
    makers |= {_PEERS[peer]: lambda: theirs for peer in this.peers("torch")}
    makers |= {_PEERS[peer]: lambda: torch.compile(theirs, dynamic=False) for peer in this.peers("compile")}
    for runner, make in makers.items():
        for direction in ("forward + backward",) if one.host else ("forward", "backward"):
            label = f"{case.label} {direction}" + ", host time" * one.host
            row = this.row(label, runner, target_x=1.0 if runner == _OURS else None, unit="us" if one.host else "ms")
            try:
                fn = make()
                call = _both(fn, case) if one.host else call_of(fn, case, direction)
                row = replace(row, cold_ms=first_ms(call, this.where))
                checks = [oracle.wrong(fn, part) for part in (("forward", "backward") if one.host else (direction,))]
                row = replace(row, error=max(error or 0.0 for error, _ in checks))
                if wrong := next((text for _, text in checks if text), ""):
                    raise AccelerantError(f"{row.op} {row.case}: {wrong}")
                if one.host:
                    this.run.add(replace(row.timed(host_time_us(call)), timing="host, back to back"))
                else:
                    this.add_call(row, call)
            except Exception as error:
                if runner == _OURS:
                    raise
                this.run.add(replace(row, note=failure_note(error)))


def _both(fn: Callable[..., Any], case: OpCase) -> Callable[[], object]:
    """Return a forward and a backward pass, as a training step makes them."""
    args = leaves_of(case.name, case.inputs)
    leaves = [x for x in args if x is not None and x.requires_grad]
    dy = torch.ones_like(as_tuple(fn(*args, **case.options))[0])
    return lambda: torch.autograd.grad(as_tuple(fn(*args, **case.options))[0], leaves, dy)


# --- models of Hugging Face ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model of transformers: class, arguments of its config, batches x tokens; and a tiny config for a CPU."""

    kind: str
    config: Mapping[str, Any]
    sizes: tuple[tuple[int, int], ...]
    tiny: Mapping[str, Any]

    @property
    def family(self) -> str:
        """The model's type, as Liger names it."""
        return self.kind.partition("For")[0].removesuffix("LMHeadModel").lower()


def _decoder(vocab: int, width: int, inner: int, layers: int, heads: int, shared: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocab, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": shared, "max_position_embeddings": 4096,
        "tie_word_embeddings": True, **more,
    }  # fmt: skip


_TINY = _decoder(512, 64, 128, 1, 4, 2, head_dim=16)
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

MODELS: dict[str, ModelShape] = {
    "gpt2": ModelShape(
        "GPT2LMHeadModel", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, ((4, 512),),
        {"vocab_size": 512, "n_embd": 64, "n_layer": 1, "n_head": 4},
    ),
    "qwen3": ModelShape(
        "Qwen3ForCausalLM", _decoder(151936, 1024, 3072, 12, 16, 8, head_dim=128), ((1, 512), (4, 1024)), _TINY
    ),
    "llama": ModelShape("LlamaForCausalLM", _decoder(128256, 2048, 8192, 8, 32, 8), ((2, 512),), _TINY),
    "bert": ModelShape(
        "BertForMaskedLM", _NO_DROPOUT, ((8, 128),),
        {name: _TINY[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                        "num_attention_heads")},
    ),
}  # fmt: skip
"""GPT-2 124M, Qwen3 0.6B with 12 layers, Llama 1B with 8, and BERT base; without dropout, so that losses compare."""

_CLIP, _LEARNING_RATE, _LOSS_TOLERANCE = 1.0, 1e-5, 5e-3
_STEPS, _LEAST_SAMPLES = 10, 5
"""Steps between two synchronizations, and samples of so many at least."""

Step = Callable[[], Tensor]


def _measure_model(model: ModelShape, batch: int, tokens: int, size: str, this: _UserRun) -> None:
    """Measure a training step of each runner from the same weights on the same batch; the first losses must agree.

    Raises:
        MissingDependency: transformers is not installed.
        AccelerantError: a patched model computes another loss.
    """
    if importlib.util.find_spec("transformers") is None:
        raise MissingDependency("transformers", "huggingface", "bench user")
    case = f"{size} bf16 autocast, AdamW, clipping"
    graph = "graph" in inspect.signature(own_nn.patch).parameters
    ours = [_OURS, *([COMPILED] if this.peers("compile") else []), *([GRAPH] if graph else []), STEP]
    expected: float | None = None
    for runner in ("torch", *(_PEERS[one] for one in this.peers("compile", "liger")), *ours):
        row = this.row(case, runner, target_x=1.0 if runner in ours else None)
        try:
            with _step(model, runner, batch, tokens, this.where) as step:
                losses: list[Tensor] = []
                row = replace(row, cold_ms=first_ms(functools.partial(_kept, step, losses), this.where))
                loss = float(losses[0])
                expected = loss if expected is None else expected
                if not abs(loss - expected) <= _LOSS_TOLERANCE * abs(expected):
                    raise AccelerantError(f"the loss is {loss:.5g}, that of the model as it was {expected:.5g}")
                alone = wall_ms(step, this.where, budget_s=this.suite.budget_s, least=_LEAST_SAMPLES)
                paced = back_to_back_ms(step, this.where, calls=_STEPS, budget_s=this.suite.budget_s)
                row = replace(row.timed(paced), wall_ms=alone.p50_ms, back_to_back_ms=paced.p50_ms)
            rate = 1e3 * batch * tokens / (row.p50 or math.nan)
            row = replace(row, timing="steps back to back", note=f"{rate:,.0f} tokens/s, first loss {loss:.5f}")
        except Exception as error:
            if runner in ("torch", _OURS):
                raise AccelerantError(f"{this.op} {size}, {runner}: {failure_note(error)}") from error
            row = replace(row, note=failure_note(error))
        this.run.add(row)
        gc.collect()
        if this.run.gpu:
            torch.cuda.empty_cache()


def _kept(step: Step, losses: list[Tensor]) -> None:
    losses.append(step())


@contextlib.contextmanager
def built_model(kind: str, config: Mapping[str, Any], where: torch.device) -> Iterator[nn.Module]:
    """Yield a model of transformers with random weights, the same each time, in training mode; then restore its module.

    Liger replaces classes of the module that the model's class is in.
    """
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    model_class = getattr(transformers, kind)
    module_of = sys.modules[model_class.__module__]
    before = dict(vars(module_of))
    torch.manual_seed(0)
    with torch.device(where):
        model = model_class(model_class.config_class(**config))
    model = model.to(where).train()
    model.config.use_cache = False
    try:
        yield model
    finally:
        vars(module_of).update(before)


@contextlib.contextmanager
def _step(shape: ModelShape, runner: str, batch: int, tokens: int, where: torch.device) -> Iterator[Step]:
    """Yield a runner's training step, as a user writes it; it returns the loss."""
    config = shape.config if where.type == "cuda" else {**shape.config, **shape.tiny}
    if runner == "liger":  # before the model is built, as its documentation shows
        liger = importlib.import_module("liger_kernel.transformers")
    with built_model(shape.kind, config, where) as model:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(getattr(model.config, "vocab_size", 2), (batch, tokens), generator=generator).to(where)
        if runner == "liger":
            getattr(liger, f"apply_liger_kernel_to_{shape.family}")(model=model)
        elif runner.startswith(_OURS):
            options: dict[str, Any] = {"graph": True} if runner == GRAPH else {}
            own_nn.patch(model, **options)
        parameters = list(model.parameters())

        def loss_of(ids: Tensor, labels: Tensor) -> Tensor:
            loss: Tensor = model(input_ids=ids, labels=labels).loss
            return loss

        if runner == STEP:
            captured = TrainStep(
                model, AdamW(parameters, lr=_LEARNING_RATE), loss_of, max_grad_norm=_CLIP, precision=torch.bfloat16
            )
            yield lambda: captured([(ids, ids)], _LEARNING_RATE).loss
            return
        called: nn.Module = model
        if runner in ("torch.compile", COMPILED):
            torch.compiler.reset()
            called = torch.compile(model)  # type: ignore[assignment]  # a module, by its documentation
        optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE, fused=True)

        def step() -> Tensor:
            with torch.autocast(where.type, torch.bfloat16):
                loss: Tensor = called(input_ids=ids, labels=ids).loss
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, _CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        yield step


# --- exact arithmetic ------------------------------------------------------------------------------------------------


def _words(modulus: int, limbs: int, n: int, dtype: Any) -> Any:
    """Return n random elements below a modulus, (n, limbs) or (n,) canonical words."""
    rng = np.random.default_rng(5)
    bits = 8 * np.dtype(dtype).itemsize
    words = rng.integers(0, 1 << bits, (n, limbs), dtype=dtype, endpoint=False) if limbs > 1 else None
    if words is None:
        return rng.integers(0, modulus, n, dtype=dtype)
    words[:, -1] = rng.integers(0, modulus >> bits * (limbs - 1), n, dtype=dtype)
    return words


def _measure_msm(log_n: int, this: _UserRun) -> None:
    """Measure msm with default arguments on the points (n + i) G, whose sum Python's integers know."""
    from accelerant import zk
    from accelerant.algebra.curve.reference import multiply

    curve, n = zk.curve("bls12_381_g1"), 1 << log_n
    parameters, row_length = curve.parameters, 1 << log_n // 2
    rows, columns = range(0, n, row_length), range(row_length)
    starts = torch.from_numpy(curve.mul(curve.generator, [n + i for i in rows], check=False)).to(this.where)
    table = torch.from_numpy(curve.mul(curve.generator, [int(i) for i in columns], check=False)).to(this.where)
    index = torch.arange(n, device=this.where)
    of_row, of_column = (
        words.view(torch.int64)[at].view(torch.uint64)
        for words, at in ((starts, index // row_length), (table, index % row_length))
    )
    points = curve.add(of_row, of_column, check=False)
    words = _words(parameters.order, 4, n, np.uint64)
    factors = np.arange(n, 2 * n, dtype=np.uint64)[:, None]
    sums = (words.view("<u2").astype(np.uint64) * factors).sum(0)  # below 2^(16 + 21 + 20)
    exact = multiply(parameters, sum(int(s) << 16 * j for j, s in enumerate(sums)) % parameters.order,
                     parameters.generator)  # fmt: skip
    scalars = torch.from_numpy(words).to(this.where)
    row = this.row(f"bls12_381_g1 2^{log_n}, default arguments", target=_MSM_MS)

    def call() -> Any:
        return zk.msm(scalars, points, "bls12_381_g1")

    row = replace(row, cold_ms=first_ms(call, this.where))
    if curve.decode(call()) != exact:
        raise AccelerantError(f"msm 2^{log_n}: another sum than Python's integers")
    this.add_call(row, call)


def _measure_ntt(name: str, log_n: int, this: _UserRun) -> None:
    """Measure ntt of a plain tensor of canonical words in natural order."""
    from accelerant import zk

    field, n = zk.field(name), 1 << log_n
    zero = field.encode([0])
    x = torch.from_numpy(_words(field.modulus, zero.shape[-1] if zero.ndim > 1 else 1, n, zero.dtype)).to(this.where)
    row = this.row(f"{name} 2^{log_n}, plain tensor")

    def call() -> Any:
        return zk.ntt(x, field=name)

    row = replace(row, cold_ms=first_ms(call, this.where))
    y = call()
    back = zk.ntt(y, field=name, inverse=True)
    if field.decode(y[:1])[0] != sum(field.decode(x)) % field.modulus or not torch.equal(back.cpu(), x.cpu()):
        raise AccelerantError(f"ntt {name} 2^{log_n}: the first output is no sum of the inputs, or no way leads back")
    if this.run.is_model("H200"):
        row = replace(row, target=time_ms(call, this.where, budget_s=this.suite.budget_s).p50_ms + _HOST_MS)
    this.add_call(row, call)


def _measure_add(n: int, this: _UserRun) -> None:
    """Measure field_add of plain tensors; the target is a share of its kernel's rate."""
    from accelerant import zk

    x, y = algebra.operands(n)
    a, b = (torch.from_numpy(words).to(this.where) for words in (x, y))
    field, kernel = zk.field("goldilocks"), algebra.kernel_launch(this.run.device, a, b)
    row = this.row(f"goldilocks {n:,} words")

    def call() -> Any:
        return field.add(a, b)

    row = replace(row, cold_ms=first_ms(call, this.where), bytes=24 * n)
    if wrong := algebra.first_wrong(x, y, call()):
        raise AccelerantError(f"field_add {n:,}: {wrong}")
    alone = time_ms(kernel, this.where, budget_s=this.suite.budget_s).p50_ms
    target = alone / _RATE if n > 1 << 20 and this.run.is_model("H200") else None
    this.add_call(replace(row, target=target, note=f"its kernel alone {alone:.4g} ms"), call)


_FIRST_CALL = """
import json, sys, time, numpy as np, torch
from accelerant import zk
curve, n, device = zk.curve("bn254_g1"), 1 << 12, sys.argv[1]
points = np.tile(curve.mul(curve.generator, list(range(1, 65)), check=False), (n // 64, 1, 1))
scalars = np.arange(4 * n, dtype=np.uint64).reshape(n, 4)
points, scalars = (torch.from_numpy(words).to(device) for words in (points, scalars))
wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
wait()
times = []
for _ in range(2):
    began = time.perf_counter()
    zk.msm(scalars, points)
    wait()
    times.append((time.perf_counter() - began) * 1e3)
print(json.dumps(times))
"""
"""A process that has used the device, but not this op: prints the milliseconds of its first two calls."""

_PROCESSES, _PROCESS_S = 3, 300.0


def _measure_first(this: _UserRun) -> None:
    """Measure the first sum of a process, after another process filled the kernel cache.

    Raises:
        AccelerantError: a process failed.
    """
    row = this.row("msm bn254_g1 2^12, warm cache", target=_FIRST_MS)
    times: list[Sequence[float]] = []
    for _ in range(1 + _PROCESSES):
        with python_child(_FIRST_CALL, this.place, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            try:
                output, errors = child.communicate(timeout=_PROCESS_S)
            except subprocess.TimeoutExpired:
                child.kill()
                raise AccelerantError(f"first call: its process took longer than {_PROCESS_S:.0f} s") from None
        if child.returncode:
            raise AccelerantError(f"first call: {(errors.strip().splitlines() or ['its process ended'])[-1]}")
        times.append(json.loads(output))
    low, middle, high = sorted(first for first, _ in times[1:])
    note = f"second call {min(second for _, second in times):.3g} ms"
    timing = f"each in a process of its own, {_PROCESSES} times"
    this.run.add(replace(row, p20=low, p50=middle, p80=high, timing=timing, note=note))
