"""The engine: many requests through one model, in steps that mix prompts and single tokens.

A thread runs the steps: it plans (accelerant.nn.serving.scheduler), copies one buffer with everything that the step
reads to the device, computes, draws every row's token (accelerant.nn.serving.sampling), and hands out the results. By
default a request's tokens and log-probabilities do not depend on what else is in a step, on the sizes of its chunks, on
preemption or on shared prefixes, bit by bit: products are those of accelerant.ops._invariant, attention sums keys in
fixed tiles, and what is drawn follows from the request's seed and the token's position.
"""

from __future__ import annotations

import functools
import hashlib
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from accelerant.errors import AccelerantError, ConfigError, DeviceLost, ShapeError, UnsupportedCase
from accelerant.nn.layers import modes_kept
from accelerant.nn.models.language_model import LanguageModel, Sampling
from accelerant.nn.serving import scheduler
from accelerant.nn.serving.sampling import Drawn, draw_tokens, score_tokens, uniform
from accelerant.nn.serving.scheduler import BlockPool, PagedCache, Row, Scheduler, StepShape
from accelerant.runtime.files import clipped
from accelerant.runtime.host import fork_safe
from accelerant.runtime.ledger import FallbackRecord, ledger
from accelerant.runtime.streams.graphs import Graph


class Decoder(Protocol):
    """The result of a tokenizer's `stream()`: text for tokens, where a character may need several of them."""

    def push(self, token: int) -> str:
        """Return the text that a token completes; "" while a character is unfinished."""

    def flush(self) -> str:
        """Return the text of what stayed unfinished."""


class StoppingText:
    """The text of one answer, which ends before the first stop string; what may begin one is held back."""

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self._decoder, self._stops = decoder, tuple(stops)
        self._held = ""

    def push(self, token: int) -> tuple[str, bool]:
        """Return the text that a token makes certain, and whether a stop string ends it."""
        return self._certain(self._decoder.push(token))

    def finish(self) -> tuple[str, bool]:
        """Return the text held back so far, and whether a stop string ends it."""
        text, stopped = self._certain(self._decoder.flush())
        text, self._held = text + ("" if stopped else self._held), ""
        return text, stopped

    def _certain(self, new: str) -> tuple[str, bool]:
        text = self._held + new
        found = [at for at in map(text.find, self._stops) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        held = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)


_MAX_TOP = 20
"""Alternatives that a request may ask for at each token."""

_NOT_FINITE = "the model's logits are not finite"


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an answer.

    Attributes:
        index: which of the request's `n` answers.
        id: the token.
        text_delta: text that became certain with it; None without a tokenizer.
        logprob: natural logarithm of its probability under the model at temperature 1; None unless asked for.
        top: the most likely tokens with theirs, the most likely first.
    """

    index: int
    id: int
    text_delta: str | None = None
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of some of a prompt's tokens, each after those before it; they come before the first Token.

    Attributes:
        begin: where the first of these tokens stands in the prompt; the prompt's first one, 0, has none.
        logprobs: of each token, as Token's.
        top: for each token the most likely ones in its place with theirs, the most likely first.
    """

    begin: int
    logprobs: list[float]
    top: list[list[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of an answer: of the prompt, of which so many were found in the cache, and generated ones."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer.

    Attributes:
        index: which of the request's `n` answers.
        reason: "stop" (a stop token or string), "length", "error" or "cancelled".
        usage: its tokens.
        error: what went wrong, for the reason "error".
        ledger: where it was asked for: `weights_sha256`, `invariant`, and of the steps since the request came, those of
            other requests included, `ops` (calls by op, implementation and device) and `fallbacks`.
    """

    index: int
    reason: str
    usage: Usage
    error: str | None = None
    ledger: dict[str, Any] | None = None


Event = PromptLogprobs | Token | Finished
Calls = Counter[tuple[str, str, str] | FallbackRecord]


class Sink(Protocol):
    """A receiver of a request's events."""

    def put(self, event: Event, /) -> None:
        """Take an event; on the engine's thread, which waits for it."""


@dataclass(eq=False, slots=True)
class Request:
    """A submitted prompt with its options, and the queue of its events."""

    max_tokens: int
    stop_ids: frozenset[int]
    logprobs: int | None
    prompt_logprobs: int | None
    seed: int
    prefix_cache: bool
    salt: bytes
    events: Any
    sequences: list[scheduler.Sequence] = field(default_factory=list)
    cancelled: bool = False
    before: Calls | None = None


class Answer(Iterator[Event]):
    """The events of a request, as they come; `close` cancels it."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine, self._request = engine, request
        self._open = len(request.sequences) if isinstance(request.events, queue.SimpleQueue) else 0

    def __next__(self) -> Event:
        """Wait for the next event; StopIteration after the last answer's Finished."""
        return self.get()

    def get(self, timeout: float | None = None) -> Event:
        """Return the next event.

        Args:
            timeout: seconds to wait for it; None: as long as it takes.

        Raises:
            StopIteration: every answer has finished.
            queue.Empty: none came in this time.
        """
        if not self._open:
            raise StopIteration
        event: Event = self._request.events.get(timeout=timeout)
        if isinstance(event, Finished):
            self._open -= 1
        return event

    def close(self) -> None:
        """Cancel what has not finished; the blocks are free after the current step."""
        self._engine._cancel(self._request)

    def __repr__(self) -> str:
        sequences = self._request.sequences
        return f"<Answer to {sequences[0].prompt} tokens, {self._open} of {len(sequences)} unfinished>"

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._open:
            self.close()


class Engine:
    """Serve many requests by one model, with a cache of blocks.

    Args:
        model: with `forward_paged`, such as accelerant.nn.Llama; on its device, in eval mode while the engine works.
        blocks: of the cache; one holds block_size tokens.
        max_batch_tokens: most tokens that a step computes; longer prompts are split. On a CPU a step that single tokens
            take part in computes fewer of prompts, so that the others' next tokens come in about twice the time.
        block_size: tokens of a block.
        fast: True lets the kernels choose their order of summation by the batch: a request's tokens may then differ
            from run to run.
        speculate: most tokens that are proposed from the text so far and checked in one step; 0 turns it off. Proposals
            change no token, only how many steps they take.
        tokenizer: with `stream()` and `eos_ids`, for the texts and stop strings of answers; None: tokens alone.
        start: False leaves the steps to `step`, which the caller runs.
        share: receives each step's inputs before it is computed, of a model that is split over processes
            (accelerant.distributed.tensor_parallel): to take them to `follow` of the engines in the others, which have
            the same arguments and start=False.

    Raises:
        ConfigError: a number below 1.
        UnsupportedCase: the model cannot read a paged cache, or has layers whose rows depend on each other, without
            `fast`.
    """

    def __init__(
        self, model: LanguageModel, blocks: int, max_batch_tokens: int = 512, *, block_size: int = 16,
        fast: bool = False, speculate: int = 0, tokenizer: Any = None, start: bool = True,
        share: Callable[[StepShape, np.ndarray], None] | None = None,
    ) -> None:  # fmt: skip
        for name, value in (("blocks", blocks), ("max_batch_tokens", max_batch_tokens), ("block_size", block_size)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if speculate < 0:
            raise ConfigError(f"speculate must be 0 or more, got {speculate}")
        if not hasattr(model, "forward_paged") or not model.can_cache():
            raise UnsupportedCase(f"{type(model).__name__} has no forward_paged, or has layers that it does not know")
        self.model, self.block_size, self.tokenizer, self.fast = model, block_size, tokenizer, fast
        self.max_batch_tokens, self._share = max_batch_tokens, share
        self._device = next(model.parameters()).device
        self._captures = self._device.type == "cuda"
        self._ahead = (
            self._captures and not speculate and share is None
        )  # whether a step is queued before the last one's tokens are read
        self._vocabulary: int = model.config.vocab_size
        size = self._vocabulary + max_batch_tokens if self._ahead else 0
        self._tokens = torch.arange(size, device=self._device)  # each is itself; then those that the last step drew
        self._tokens[self._vocabulary :] = 0
        self._unread: tuple[list[Row], Drawn] | None = None
        self._graphs: dict[StepShape, tuple[Tensor, Graph, Tensor]] = {}
        self._cache = PagedCache.empty(model, blocks + 1, block_size)
        pace = scheduler.Pace() if start and self._device.type == "cpu" else None
        self._scheduler = Scheduler(BlockPool(blocks), block_size, max_batch_tokens, speculate, pace)
        self.warm((1,))  # raises for layers that cannot serve
        self._lock = fork_safe(threading.RLock())  # an Answer that is collected cancels, on any thread
        self._wake = fork_safe(threading.Condition(self._lock))
        self._new: list[Request] = []
        self._events: list[tuple[Request, Event]] = []  # to hand out when the lock is free
        self._closed = False
        self._counts = {"steps": 0, "tokens_computed": 0, "tokens_generated": 0, "drafts": 0, "drafts_accepted": 0}
        self._thread: threading.Thread | None = None
        if start:
            self._thread = threading.Thread(target=self.run, name="accelerant-engine", daemon=True)
            self._thread.start()

    # --- requests ----------------------------------------------------------------------------------------------------

    def submit(
        self, ids: Sequence[int], sampling: Sampling | None = None, *, max_tokens: int = 16, seed: int | None = None,
        stop: str | int | Sequence[str | int] = (), logprobs: int | None = None, prompt_logprobs: int | None = None,
        n: int = 1, prefix_cache: bool = True, salt: str = "", ignore_eos: bool = False, account: bool = False,
        events: Sink | None = None,
    ) -> Answer:  # fmt: skip
        """Queue a prompt; return the iterator of its events.

        Args:
            ids: tokens of the prompt, at least one.
            sampling: how tokens are drawn; None: Sampling().
            max_tokens: most tokens of an answer; 0 reads the prompt alone.
            seed: any 64-bit number; with it the answer is the same each time. None draws one.
            stop: strings, which are not part of the text, and tokens that end an answer; besides the tokenizer's.
            logprobs: alternatives listed with each token, 0 for its own log-probability alone; None for neither.
            prompt_logprobs: the same for the tokens of the prompt, all of which are then computed: as PromptLogprobs.
            n: answers to the same prompt, each drawn by itself.
            prefix_cache: whether to use blocks that others computed, and let others use these.
            salt: requests share blocks only with those of the same salt.
            ignore_eos: whether the tokenizer's end tokens end no answer.
            account: whether the ends of the answers say what computed them; hashes the weights the first time.
            events: gets the events, by `put` on the engine's thread, in place of the iterator.

        Raises:
            ConfigError: a number out of range, or a prompt that can never fit: the message has the numbers.
            UnsupportedCase: stop strings without a tokenizer.
        """
        stops = (stop,) if isinstance(stop, (str, int)) else tuple(stop)
        sampling = sampling or Sampling()
        prompt = self._checked(ids, max_tokens, n, (logprobs, prompt_logprobs), stops)
        strings = [each for each in stops if isinstance(each, str)]
        ends = {each for each in stops if isinstance(each, int)}
        ends |= set() if self.tokenizer is None or ignore_eos else set(self.tokenizer.eos_ids)
        seed = secrets.randbits(63) if seed is None else (seed + 2**63) % 2**64 - 2**63
        taker = queue.SimpleQueue() if events is None else events
        before = self._calls() if account and self.weights_sha256 else None
        key = hashlib.blake2b(salt.encode("utf-8", "surrogatepass")).digest()
        request = Request(
            max_tokens, frozenset(ends), logprobs, prompt_logprobs, seed, prefix_cache, key, taker, before=before
        )
        for index in range(n):
            tokens = np.zeros(len(prompt) + max(1, max_tokens), dtype=np.int64)
            tokens[: len(prompt)] = prompt
            text = None if self.tokenizer is None else StoppingText(self.tokenizer.stream(), strings)
            size = len(prompt)
            scored = size if index or prompt_logprobs is None else 1
            sequence = scheduler.Sequence(request, index, tokens, size, sampling, size, scored, text=text)
            sequence.most_drafts = self._scheduler.speculate
            request.sequences.append(sequence)
        with self._wake:
            if self._closed:
                raise AccelerantError("the engine is closed")
            self._new.append(request)
            self._wake.notify()
        return Answer(self, request)

    def _checked(
        self, ids: Sequence[int], max_tokens: int, n: int, logprobs: tuple[int | None, int | None],
        stops: Sequence[str | int],
    ) -> np.ndarray:  # fmt: skip
        """Return the prompt's tokens after all checks of a submission."""
        prompt = np.asarray(ids)
        config, pool = self.model.config, self._scheduler.pool
        if prompt.ndim != 1 or not len(prompt):
            raise ShapeError(f"a prompt is a list of at least one token, got the shape {prompt.shape}")
        if prompt.dtype.kind not in "iu":  # objects are integers of more than 64 bits
            raise ConfigError(f"tokens must be integers from 0 to {config.vocab_size - 1}, got {clipped(ids)}")
        if prompt.min() < 0 or prompt.max() >= config.vocab_size:
            wrong = int(prompt[(prompt < 0) | (prompt >= config.vocab_size)][0])
            raise ConfigError(f"tokens must be from 0 to {config.vocab_size - 1}, got {wrong}")
        prompt = prompt.astype(np.int64)
        for name, value, least in (("max_tokens", max_tokens, 0), ("n", n, 1)):
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        for name, top in zip(("logprobs", "prompt_logprobs"), logprobs, strict=True):
            if top is not None and not 0 <= top <= _MAX_TOP:
                raise ConfigError(f"{name} must be from 0 to {_MAX_TOP}, got {top}")
        if self.tokenizer is None and any(isinstance(each, str) for each in stops):
            raise UnsupportedCase("stop strings need an engine with a tokenizer; without one, stop takes tokens")
        if "" in stops:
            raise ConfigError("a stop string must have at least one character")
        length = len(prompt) + max_tokens
        if length > config.context:
            raise ConfigError(
                f"{len(prompt)} tokens and {max_tokens} more do not fit the context of {config.context} tokens"
            )
        needed = self._scheduler.blocks_of(length)
        if needed > pool.total:
            raise ConfigError(
                f"{len(prompt)} tokens and {max_tokens} more need {needed} blocks of {self.block_size} tokens; "
                f"the engine has {pool.total}"
            )
        return prompt

    @property
    def is_split(self) -> bool:
        """Whether other processes hold parts of the model."""
        return self._share is not None

    @property
    def closed(self) -> bool:
        """Whether it takes no more requests: after `close`, or a failure."""
        return self._closed

    def _cancel(self, request: Request) -> None:
        with self._wake:
            request.cancelled = True
            self._wake.notify()

    def metrics(self) -> dict[str, int]:
        """Return counts since the start and the current use: requests waiting and running, blocks, prefix hits."""
        with self._lock:
            plan, pool = self._scheduler, self._scheduler.pool
            waiting = len(plan.waiting) + sum(len(request.sequences) for request in self._new)
            return {
                "waiting": waiting, "running": len(plan.running), "blocks_total": pool.total,
                "blocks_used": pool.total - pool.available, "prefix_hit_tokens": plan.hits,
                "prefix_lookup_tokens": plan.looked_up, "preemptions": plan.preemptions, **self._counts,
            }  # fmt: skip

    def close(self) -> None:
        """Stop after the current step; every unfinished answer ends with an error."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._end_all("the engine was closed")

    def __repr__(self) -> str:
        return f"<Engine of a {type(self.model).__name__}: {self.metrics()}>"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- steps -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run steps while there is work, until `close`; what the engine's own thread does."""
        why = "the engine was closed"
        try:
            with modes_kept(self.model), self._device_context():
                self.model.eval()
                while True:
                    with self._wake:
                        self._wake.wait_for(lambda: self._closed or self._has_work())
                        if self._closed:
                            return
                    self.step()
        except BaseException as error:
            why = f"the engine failed: {type(error).__name__}: {error}"
            raise
        finally:
            self._closed = True
            self._end_all(why)

    def _device_context(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    @torch.inference_mode()
    def warm(self, tokens: Iterable[int]) -> None:
        """Compute steps of so many tokens of padding, for one answer and for two: kernels that they need are compiled.

        A server calls it before its first request, which otherwise waits for the compiler at each new size.
        """
        for count in tokens:
            for rows in {1, min(2, count)}:
                shape = StepShape(rows, count, -(-count // self.block_size), rows, rows == count)
                host = torch.empty(shape.words, dtype=torch.int32, device="cpu")
                shape.fill(host.numpy(), [], self.block_size)
                with self._device_context():
                    self._logits(shape, host.to(self._device))

    def _has_work(self) -> bool:
        return bool(self._new or self._unread or self._scheduler.waiting or self._scheduler.running)

    @torch.inference_mode()
    def step(self) -> bool:
        """Compute one step; return whether there was anything to compute or to hand out.

        On a GPU its tokens are handed out by the next call, which first queues its own step: the device does not wait
        for the host. An error ends the requests whose rows a step had.
        """
        before, self._unread = self._unread, None
        if before is not None and not self._runs_ahead():
            self._settle(*before)
            before = None
        with self._lock:
            self._take_requests()
            rows = self._scheduler.plan()
        began = time.perf_counter()
        try:
            drawn = self._compute(rows) if rows else None
        except Exception as error:  # noqa: BLE001  the engine goes on with the others
            self._fail(rows, error)
        else:
            if drawn is not None:
                if self._scheduler.pace is not None:
                    self._scheduler.pace.note(rows, time.perf_counter() - began)
                self._advance(rows)
                self._unread = rows, drawn
        if before is not None:
            self._settle(*before)
        if self._unread is not None and not self._runs_ahead():
            (rows, drawn), self._unread = self._unread, None
            self._settle(rows, drawn)
        self._hand_out()
        return bool(rows) or before is not None

    def _runs_ahead(self) -> bool:
        """Return whether no row's next token depends on what the host knows of its text."""
        return self._ahead and not any(each.sampling.penalizes for each in self._scheduler.running)

    def _advance(self, rows: list[Row]) -> None:
        """Note what a step computes, and where its tokens will be."""
        at = 0
        with self._lock:
            for row in rows:
                sequence = row.sequence
                if not sequence.drafts:
                    sequence.computed = row.begin + row.count
                    if row.samples:
                        sequence.drawn, sequence.length = self._vocabulary + at, sequence.length + 1
                    self._scheduler.name_blocks(sequence)
                at += row.samples

    def _settle(self, rows: list[Row], drawn: Drawn) -> None:
        """Read the tokens of a step, and add them to their sequences."""
        try:
            _ = drawn.ids
        except Exception as error:  # noqa: BLE001  of the device
            self._fail(rows, error)
            return
        with self._lock:
            self._accept_all(rows, drawn)

    def _fail(self, rows: list[Row], error: Exception) -> None:
        """End the answers that a step was to continue; raise the error if no further step can be computed."""
        if self._share is not None or isinstance(error, (DeviceLost, torch.AcceleratorError)):
            raise error
        with self._lock:
            for row in rows:
                if row.sequence.state != "ended":
                    self._end(row.sequence, "error", f"{type(error).__name__}: {error}", forget=True)

    @torch.inference_mode()
    def follow(self, steps: Iterable[tuple[StepShape, np.ndarray]]) -> None:
        """Compute the steps that the engine of another process shares, with this process's part of the model."""
        with modes_kept(self.model), self._device_context():
            self.model.eval()
            for shape, host in steps:
                self._run(shape, torch.from_numpy(host))

    def _hand_out(self) -> None:
        """Give events to their receivers, which may call the engine, on other threads too."""
        with self._lock:
            events, self._events = self._events, []
        for request, event in events:
            try:
                request.events.put(event)
            except Exception:  # noqa: BLE001  of a caller's own receiver: the others go on
                request.cancelled = True

    def _take_requests(self) -> None:
        """Queue what was submitted and end what was cancelled."""
        for request in self._new:
            for sequence in request.sequences:
                self._scheduler.add(sequence)
        self._new.clear()
        plan = self._scheduler
        for sequence in [each for each in (*plan.running, *plan.waiting) if each.request.cancelled]:
            self._end(sequence, "cancelled")

    def _compute(self, rows: list[Row]) -> Drawn:
        """Return the tokens drawn for the rows' samples."""
        shape = StepShape.of(rows, padded=self._captures)
        host = torch.empty(shape.words, dtype=torch.int32, device="cpu", pin_memory=self._device.type == "cuda")
        shape.fill(host.numpy(), rows, self.block_size)
        if self._share is not None:
            self._share(shape, host.numpy())
        logits = self._run(shape, host)
        if any(row.known for row in rows):
            logits = self._score_prompts(rows, logits)
        samples = [(row.sequence, row.first + at) for row in rows for at in range(row.samples)]
        if not samples:
            return Drawn(self._tokens[:0])
        wanted = [sequence.request.logprobs for sequence, _ in samples if sequence.request.logprobs is not None]
        drawn = draw_tokens(
            logits[: len(samples)],
            [sequence.sampling for sequence, _ in samples],
            [
                uniform(each.request.seed, each.index, position) if each.sampling.temperature else 0.0
                for each, position in samples
            ],
            [(sequence.tokens[:position], sequence.prompt) for sequence, position in samples],
            max(wanted, default=None),
        )  # fmt: skip
        if self._ahead:
            torch.clamp(drawn.on_device, min=0, out=self._tokens[self._vocabulary :][: len(samples)])
        return drawn

    @staticmethod
    def _score_prompts(rows: list[Row], logits: Tensor) -> Tensor:
        """Give the rows the scores of their known tokens; return the logits of the samples."""
        samples: list[int] = []
        at = 0
        for row in rows:
            last, sequence = at + row.known, row.sequence
            if row.known:
                begin = max(sequence.scored, row.begin + 1)
                sequence.scored = begin + row.known
                tokens, top = sequence.tokens[begin : sequence.scored], sequence.request.prompt_logprobs
                found = score_tokens(logits[at:last], tokens, top)
                row.scores = None if found is None else PromptLogprobs(begin, *found)
            at = last + row.samples
            samples += range(last, at)
        return logits[samples]

    def _run(self, shape: StepShape, host: Tensor) -> Tensor:
        if self._captures and shape.single:
            return self._replayed(shape, host)
        return self._logits(shape, host.to(self._device, non_blocking=True))

    def _logits(self, shape: StepShape, buffer: Tensor) -> Tensor:
        """Return the logits of the scored tokens of a step whose inputs are on the device."""
        model: Any = self.model
        ids, positions, batch, scored = shape.views(buffer, invariant=not self.fast)
        if self._ahead:
            ids = self._tokens[ids]
        hidden = model.forward_paged(ids, positions, self._cache, batch)
        hidden = hidden if shape.single else hidden.index_select(0, scored)
        logits: Tensor = model.score(hidden, invariant=not self.fast)
        return logits

    def _replayed(self, shape: StepShape, host: Tensor) -> Tensor:
        """Return the logits of a step of single tokens, by a CUDA graph for each shape."""
        if shape not in self._graphs:
            buffer = host.to(self._device)
            pool = next((graph.pool for _, graph, _ in self._graphs.values()), None)
            graph = Graph("serve")
            # A warm-up writes the keys and values that the step itself writes again.
            logits = graph.capture(self._logits, shape, buffer, warm_up=2, pool=pool, quick=True)
            self._graphs[shape] = buffer, graph, logits
        buffer, graph, logits = self._graphs[shape]
        buffer.copy_(host, non_blocking=True)
        graph.replay()
        return logits

    # --- results -----------------------------------------------------------------------------------------------------

    def _accept_all(self, rows: list[Row], drawn: Drawn) -> None:
        if rows:
            self._counts["steps"] += 1
        at = 0
        for row in rows:
            self._counts["tokens_computed"] += row.count
            try:
                if row.sequence.state != "ended":
                    self._accept(row, drawn, at)
            except Exception as error:  # noqa: BLE001  of its tokenizer: the others go on
                self._end(row.sequence, "error", f"{type(error).__name__}: {error}")
            at += row.samples

    def _accept(self, row: Row, drawn: Drawn, at: int) -> None:
        """Add the tokens that a row's samples gave to its sequence, as far as its drafts were right."""
        sequence = row.sequence
        if row.known and row.scores is None:
            self._end(sequence, "error", _NOT_FINITE, forget=True)
            return
        if row.known:
            self._events.append((sequence.request, row.scores))
        if not row.samples:
            return
        drafts, sequence.drafts = sequence.drafts, 0
        if not drafts and sequence.length == row.first + 1:  # else another step has drawn a further one since
            sequence.drawn = None
        for k in range(row.samples):
            token, position = drawn.ids[at + k], row.first + k
            if token < 0:
                self._end(sequence, "error", _NOT_FINITE, forget=True)
                return
            if not sequence.request.max_tokens:  # this token is nobody's
                self._end(sequence, "length")
                return
            right = k < drafts and int(sequence.tokens[position]) == token
            sequence.tokens[position] = token
            sequence.length = max(sequence.length, position + 1)
            if self._deliver(sequence, token, drawn, at + k):
                return
            if not right:
                break
        if drafts:
            sequence.computed = sequence.length - 1
            accepted = sequence.length - row.first - 1
            self._counts["drafts"] += drafts
            self._counts["drafts_accepted"] += accepted
            most = self._scheduler.speculate
            sequence.most_drafts = min(most, 2 * drafts) if accepted == drafts else max(1, accepted)
        self._scheduler.name_blocks(sequence)

    def _deliver(self, sequence: scheduler.Sequence, token: int, drawn: Drawn, at: int) -> bool:
        """Hand out a token; return whether it ends the answer, which is ended then."""
        request = sequence.request
        ended = token in request.stop_ids
        reason = "stop" if ended else "length" if sequence.certain == len(sequence.tokens) else None
        delta: str | None = None
        if sequence.text is not None:
            delta, stopped = ("", False) if ended else sequence.text.push(token)
            if reason is not None and not stopped:
                rest, stopped = sequence.text.finish()
                delta += rest
            reason = "stop" if stopped else reason
        logprob, top = None, []
        if request.logprobs is not None and drawn.logprobs is not None and drawn.top is not None:
            logprob, top = drawn.logprobs[at], drawn.top[at][: request.logprobs]
        self._counts["tokens_generated"] += 1
        self._events.append((request, Token(sequence.index, token, delta, logprob, top)))
        if reason is not None:
            self._end(sequence, reason)
        return reason is not None

    def _end(
        self, sequence: scheduler.Sequence, reason: str, error: str | None = None, *, forget: bool = False
    ) -> None:
        """End an answer and free its blocks. forget: what they hold is not to be trusted."""
        self._scheduler.remove(sequence, forget=forget)
        request = sequence.request
        generated = min(sequence.certain - sequence.prompt, request.max_tokens)
        usage = Usage(sequence.prompt, generated, sequence.cached)
        found = None if request.before is None else self._ledger_since(request.before)
        self._events.append((request, Finished(sequence.index, reason, usage, error, found)))

    def _end_all(self, error: str) -> None:
        """End every answer with an error."""
        with self._lock:
            self._take_requests()
            for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
                self._end(sequence, "error", error)
        self._hand_out()

    # --- what computed an answer -------------------------------------------------------------------------------------

    @functools.cached_property
    def weights_sha256(self) -> str:
        """SHA-256 of the model's parameters and buffers, with names, dtypes and shapes, in the order of the names."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()

    def _calls(self) -> Calls:
        """Return the counts of the process's ledger, by op, implementation and device, and of fallbacks."""
        counted: Calls = Counter()
        for record in ledger().records():
            counted[record.op, record.implementation, record.device] += record.calls
        for entry, count in ledger().fallbacks().items():
            counted[entry] = count
        return counted

    def _ledger_since(self, before: Calls) -> dict[str, Any]:
        new = self._calls() - before
        names = ("op", "implementation", "device", "calls")
        return {
            "weights_sha256": self.weights_sha256,
            "invariant": not self.fast,
            "ops": [dict(zip(names, (*key, count), strict=True)) for key, count in new.items() if type(key) is tuple],
            "fallbacks": [
                {**asdict(key), "count": count} for key, count in new.items() if isinstance(key, FallbackRecord)
            ],
        }
