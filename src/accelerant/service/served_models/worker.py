"""The process of a model: it reads requests from its server's socket, admits them to the engine, and sends events.

Of its threads one reads the socket, two turn prompts into tokens, one admits requests whose blocks are free, the
engine's runs the steps, and one sends: what a step gave to all requests is one frame.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from accelerant.errors import AccelerantError, DeviceLost
from accelerant.nn.encoder import LAYOUTS, Encoder
from accelerant.nn.models.hugging_face import read_object
from accelerant.nn.models.llama import load_model
from accelerant.nn.serving import Engine, Finished, PromptLogprobs, Sampling, Token
from accelerant.nn.serving.engine import Event
from accelerant.runtime.host import fork_safe
from accelerant.runtime.ledger import ledger
from accelerant.service.jobs.wire import ChildEnd, child_arguments
from accelerant.service.served_models import split
from accelerant.service.served_models.admission import FairQueue

_METRICS_S = 1.0
_SWITCH_S = 0.0005
"""How long the engine's thread may keep the others, of which the one that sends needs several turns a step, waiting."""
_WARM_TOKENS = (1, 2, 16, 17, 64, 65, 128, 129, 256, 257)
"""New tokens of the steps that a server on a GPU computes first: kernels differ by their number, and by whether it is a
multiple of 16.
"""
_POLL_S = 0.005
"""Pause after which free blocks are looked for again while requests wait."""
_RETRY_S = (1.0, 60.0)
"""Bounds of what a refused client is told to wait."""
_MOST_SCORES = 1 << 20
"""Log-probabilities of prompts in an answer."""
_OF_REQUEST = ("seed", "stop", "n", "logprobs", "ignore_eos", "salt", "account")
"""Options of a request that are those of `Engine.submit`."""


@dataclass(eq=False, slots=True)
class Waiting:
    """A request that is not finished.

    Attributes:
        blocks: that its prompts need at once.
        echoes: the prompts' texts, if the answers begin with them.
        answers: those that the engine has, one for each prompt.
        began: whether it has an event; until then the blocks are counted as taken.
    """

    id: int
    key: str
    prompts: list[list[int]]
    options: dict[str, Any]
    blocks: int = 0
    echoes: list[str] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    unfinished: int = 0
    began: bool = False
    cancelled: bool = False


class _Events:
    """The receiver of one prompt's events, whose choices are numbered from `first` on."""

    def __init__(self, worker: ModelWorker, request: Waiting, first: int) -> None:
        self._worker, self._request, self._first = worker, request, first

    def put(self, event: Event) -> None:
        """Take an event, on the engine's thread."""
        if isinstance(event, PromptLogprobs):
            self._worker.note_prompt(self._request, self._first, event)
        else:
            self._worker.note(self._request, self._first + event.index, event)


class ChildOfModel(ChildEnd):
    """A process of a model of either kind: requests that wait their turn, and refusals."""

    def __init__(self, connection: Any, most_waiting: int) -> None:
        super().__init__(connection)
        self._changed = fork_safe(threading.Condition())
        self._queue: FairQueue[Waiting] = FairQueue(most_waiting)
        self._coming: dict[int, bool] = {}  # those that are prepared, and whether they were cancelled meanwhile
        self._open: dict[int, Waiting] = {}
        self._preparing = ThreadPoolExecutor(2, "prepare")
        self._accounting = ThreadPoolExecutor(1, "account")  # of requests the first of which hashes the weights
        self._loops: tuple[Callable[[], NoReturn], ...] = ()
        self._pace_s = 1.0  # between two requests that ended
        self.folder = ""  # whose path is not for clients
        self._ended = time.monotonic()

    def run(self, ready: dict[str, Any]) -> NoReturn:
        """Read the socket until it ends."""
        self.send({"kind": "ready", **ready})
        for loop in (*self._loops, self._send_metrics):
            threading.Thread(target=loop, daemon=True).start()
        while True:
            head, _ = self.receive()
            if head["kind"] == "cancel":
                self._cancel(head["id"])
            else:
                self._coming[head["id"]] = False
                accounts = head.get("options", {}).get("account")
                (self._accounting if accounts else self._preparing).submit(self._guarded, head)

    def _guarded(self, head: dict[str, Any]) -> None:
        try:
            request = self._prepared(head)
            with self._changed:
                if self._coming.pop(request.id):
                    return
                if not self._queue.has_room(request.key):
                    least, most = _RETRY_S
                    wait_s = min(most, max(least, self._pace_s * len(self._queue)))
                    text = f"{len(self._queue)} requests wait for this model"
                    self._refuse(request.id, 429, "QueueFull", text, retry_after_s=wait_s)
                    return
                self._open[request.id] = request
                self._queue.add(request.key, request)
                self._changed.notify()
        except _Wrong as wrong:
            self._refuse(head["id"], 400, wrong.kind, str(wrong), param=wrong.param)
        except AccelerantError as error:
            self._refuse(head["id"], 400, type(error).__name__, str(error), param=head["param"])
        except BaseException as error:  # noqa: BLE001 - whatever a tokenizer raises, panics too
            self._refuse(head["id"], 500, "InternalError", f"the prompt failed: {type(error).__name__}")
        finally:
            self._coming.pop(head["id"], None)

    def _prepared(self, head: dict[str, Any]) -> Waiting:
        raise NotImplementedError

    def _cancel(self, identity: int) -> None:
        with self._changed:
            if identity in self._coming:
                self._coming[identity] = True
            request = self._open.get(identity)
            if request is None:
                return
            request.cancelled = True
            if self._queue.remove(request):
                del self._open[identity]
            for answer in request.answers:
                answer.close()

    def _refuse(self, identity: int, status: int, kind: str, message: str, **more: Any) -> None:
        if self.folder:
            message = message.replace(self.folder + os.sep, "").replace(self.folder, "the model's folder")
        self.send({"kind": "refused", "id": identity, "status": status, "error": kind, "message": message, **more})

    def _send_metrics(self) -> NoReturn:
        """Send what `_figures` has once a second, and the ledger when it has changed."""
        sent = b""
        while True:
            text = json.dumps(ledger().to_dict(), separators=(",", ":")).encode()
            arrays = {} if text == sent else {"ledger": np.frombuffer(text, np.uint8)}
            self.send({"kind": "metrics", **self._figures()}, arrays)
            sent = text
            time.sleep(_METRICS_S)

    def _figures(self) -> dict[str, int]:
        return {"queued": len(self._queue)}

    def _paced(self) -> None:
        """Note the end of a request, from which waiting times are estimated."""
        now = time.monotonic()
        self._pace_s += 0.2 * (min(now - self._ended, 10.0) - self._pace_s)
        self._ended = now


class _Wrong(Exception):  # noqa: N818 - the client's error
    def __init__(self, kind: str, message: str, param: str | None) -> None:
        self.kind, self.param = kind, param
        super().__init__(message)


class ModelWorker(ChildOfModel):
    """A language model behind the engine."""

    def __init__(self, connection: Any, engine: Engine, tokenizer: Any, most_waiting: int) -> None:
        super().__init__(connection, most_waiting)
        self.engine, self.tokenizer = engine, tokenizer
        self._total = engine.metrics()["blocks_total"]
        self.context = min(engine.model.config.context, self._total * engine.block_size)
        self._texts: dict[int, str] = {}
        self._outbox: list[dict[str, Any]] = []
        self._sendable = fork_safe(threading.Condition())
        self._loops = (self._admit, self._send_events)

    def _prepared(self, head: dict[str, Any]) -> Waiting:
        """Return a request with the tokens of its prompts; _Wrong for those that do not fit."""
        if "messages" in head:
            prompts = [self.tokenizer.apply_chat(head["messages"])]
        else:
            prompts = [self.tokenizer.encode(one) if isinstance(one, str) else one for one in head["prompts"]]
        options, vocabulary, param = head["options"], self.engine.model.config.vocab_size, head["param"]
        texts = head.get("prompts", ()) if options["echo"] else ()
        echoes = [one if isinstance(one, str) else self.tokenizer.decode(one) for one in texts]
        count = 0
        for ids in prompts:
            if not ids:
                raise _Wrong("EmptyPrompt", "the prompt has no tokens", param)
            if max(ids) >= vocabulary:
                text = f"tokens are 0 to {vocabulary - 1:,}, got {max(ids):,}"
                raise _Wrong("TokenOutOfRange", text, param)
            room = self.context - len(ids)
            tokens = options["max_tokens"] if options["max_tokens"] is not None else max(1, room)
            if tokens > room:
                raise _Wrong(
                    "ContextLengthExceeded",
                    f"the context has {self.context:,} tokens; the prompt has {len(ids):,}, and {tokens:,} more are "
                    "asked for",
                    param if room < 1 else "max_tokens",
                )  # fmt: skip
            count += options["n"] * -(-(len(ids) + 1) // self.engine.block_size)
        if options["echo"] and options["logprobs"] is not None:
            entries = sum(map(len, prompts)) * options["n"] * (1 + options["logprobs"])
            if entries > _MOST_SCORES:
                text = f"with echo, tokens times n times (1 + logprobs) are at most {_MOST_SCORES:,}, got {entries:,}"
                raise _Wrong("TooManyLogprobs", text, "echo")
        if options["account"]:
            if self.engine.is_split:
                raise _Wrong("UnsupportedParameter", "the weights of a split model are not hashed", "ledger")
            _ = self.engine.weights_sha256  # found once
        request = Waiting(head["id"], head["key"], prompts, options, count, echoes)
        request.unfinished = len(prompts) * options["n"]
        return request

    # --- from the queue to the engine --------------------------------------------------------------------------------
    def _admit(self) -> NoReturn:
        """Submit the requests that wait, in the keys' turns, as blocks are free."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._queue))
                if self._fits(self._queue.first()):
                    self._submit(self._queue.pop())
                    continue
            time.sleep(_POLL_S)

    def _fits(self, request: Waiting) -> bool:
        """Return whether the blocks of a request are free, and the engine has a turn for it in each step."""
        now = self.engine.metrics()
        busy = now["running"] + now["waiting"]
        if not busy:
            return True
        promised = sum(one.blocks for one in list(self._open.values()) if one.answers and not one.began)
        free = self._total - now["blocks_used"] - promised
        return free >= request.blocks and busy + request.unfinished <= self.engine.max_batch_tokens

    def _submit(self, request: Waiting) -> None:
        options = request.options
        try:
            sampling = Sampling(**options["sampling"])
            scored = options["logprobs"] if options["echo"] else None
            for index in range(len(request.echoes) * options["n"]):
                told = {"id": request.id, "index": index, "echo": request.echoes[index // options["n"]]}
                if scored is not None:
                    first = request.prompts[index // options["n"]][0]
                    told["prompt"] = [{"token": self._text(first), "logprob": None, "top": None}]
                self._tell(told)
            for number, ids in enumerate(request.prompts):
                most = self.context - len(ids) if options["max_tokens"] is None else options["max_tokens"]
                events = _Events(self, request, number * options["n"])
                request.answers.append(self.engine.submit(
                    ids, sampling, max_tokens=most, prompt_logprobs=scored, events=events,
                    **{name: options[name] for name in _OF_REQUEST},
                ))  # fmt: skip
        except Exception as error:  # noqa: BLE001 - the thread goes on with the next request
            request.cancelled = True
            for answer in request.answers:
                answer.close()
            self._open.pop(request.id, None)
            status, kind = (400, type(error).__name__) if isinstance(error, AccelerantError) else (500, "InternalError")
            self._refuse(request.id, status, kind, str(error))

    # --- from the engine to the server -------------------------------------------------------------------------------
    def note(self, request: Waiting, choice: int, event: Token | Finished) -> None:
        """Queue an event for sending, unless the engine has failed: then the process ends, and its streams with it."""
        if self.engine.closed:
            return
        request.began = True
        told: dict[str, Any] = {"id": request.id, "index": choice}
        if isinstance(event, Token):
            hidden = not (request.options["ignore_eos"] or request.options["echo"])
            told["text"] = event.text_delta or ""
            if event.logprob is not None and not (hidden and event.id in self.tokenizer.eos_ids):
                told |= self._entry(event.id, event.logprob, event.top)
        else:
            usage = event.usage
            told |= {"reason": event.reason, "error": event.error}
            told["usage"] = [usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens]
            told |= {} if event.ledger is None else {"ledger": event.ledger}
            request.unfinished -= 1
            if not request.unfinished:
                self._open.pop(request.id, None)
                self._paced()
        if not request.cancelled:
            self._tell(told)

    def note_prompt(self, request: Waiting, first: int, event: PromptLogprobs) -> None:
        """Queue the scores of a prompt's tokens for each of its choices, which are numbered from `first` on."""
        request.began = True
        ids = request.prompts[first // request.options["n"]][event.begin : event.begin + len(event.logprobs)]
        entries = list(map(self._entry, ids, event.logprobs, event.top))
        for index in range(first, first + request.options["n"]):
            self._tell({"id": request.id, "index": index, "prompt": entries})

    def _entry(self, token: int, logprob: float, top: list[tuple[int, float]]) -> dict[str, Any]:
        most = [[self._text(each), _finite(value)] for each, value in top]
        return {"token": self._text(token), "logprob": _finite(logprob), "top": most}

    def _tell(self, event: dict[str, Any]) -> None:
        with self._sendable:
            self._outbox.append(event)
            self._sendable.notify()

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self.tokenizer.token_text(token)
        return self._texts[token]

    def _send_events(self) -> NoReturn:
        while True:
            with self._sendable:
                self._sendable.wait_for(lambda: self._outbox)
                events, self._outbox = self._outbox, []
            self.send({"kind": "events", "events": events})

    def _figures(self) -> dict[str, int]:
        return {"queued": len(self._queue), **self.engine.metrics()}


def _finite(value: float) -> float:
    """Return a logarithm that JSON has."""
    return value if math.isfinite(value) else -9999.0


class EncoderWorker(ChildOfModel):
    """A sentence encoder; requests that wait are encoded together."""

    def __init__(self, connection: Any, encoder: Encoder, most_waiting: int) -> None:
        super().__init__(connection, most_waiting)
        self.encoder = encoder
        self._loops = (self._encode,)

    def _prepared(self, head: dict[str, Any]) -> Waiting:
        inputs = head["inputs"]
        ids = self.encoder.tokens(inputs, truncate=False) if isinstance(inputs[0], str) else inputs
        self.encoder.require_ids(ids)
        return Waiting(head["id"], head["key"], ids, {})

    def _encode(self) -> NoReturn:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._queue))
                requests, rows = [self._queue.pop()], 0
                while len(self._queue) and (rows := rows + len(requests[-1].prompts)) < 256:
                    requests.append(self._queue.pop())
            try:
                vectors = self.encoder.encode_ids([ids for one in requests for ids in one.prompts]).cpu().numpy()
            except Exception as error:
                for one in requests:
                    self._open.pop(one.id, None)
                    self._refuse(one.id, 500, "InternalError", f"encoding failed: {type(error).__name__}: {error}")
                if isinstance(error, (DeviceLost, torch.AcceleratorError)):
                    raise
                continue
            first = 0
            for one in requests:
                self._open.pop(one.id, None)
                part = np.ascontiguousarray(vectors[first : first + len(one.prompts)])
                first += len(one.prompts)
                tokens = sum(map(len, one.prompts))
                self.send({"kind": "vectors", "id": one.id, "tokens": tokens}, {"vectors": part})
                self._paced()


def _loaded(given: dict[str, Any], connection: Any) -> tuple[ChildOfModel, dict[str, Any]]:
    """Return the worker of a folder, and what it tells the server of itself."""
    folder = Path(given["folder"])
    device, label = split.device_of(given["device"])
    kind = read_object(folder / "config.json").get("model_type") if (folder / "config.json").is_file() else None
    if kind in LAYOUTS:
        encoder = Encoder(folder, device=device)
        described = {"task": "embed", "context": encoder.max_tokens, "dim": encoder.dim}
        one = EncoderWorker(connection, encoder, given["most_waiting"])
        one.folder = given["folder"]
        return one, {"label": label, **described}
    if given["gpus"] > 1:
        followers = split.Followers(given, device)
        engine = split.part_of_engine(given, device, 0, followers.store, followers.send)
        followers.began = True
        tokenizer = engine.tokenizer
    else:
        model, tokenizer = load_model(folder, device=device, quantize=given["quantize"] or None)
        blocks = split.blocks_of_cache(model, device, given["cache_tokens"], given["block_size"])
        engine = Engine(model, blocks, tokenizer=tokenizer, **{name: given[name] for name in split.OF_ENGINE})
        if device.type == "cuda":
            engine.warm(size for size in (*_WARM_TOKENS, engine.max_batch_tokens) if size <= engine.max_batch_tokens)
    worker = ModelWorker(connection, engine, tokenizer, given["most_waiting"])
    worker.folder = given["folder"]
    described = {"task": "generate", "context": worker.context, "chat": tokenizer.has_chat_template}
    return worker, {"label": label, **described}


def _end_process(failed: threading.ExceptHookArgs) -> None:
    """Print what ended a thread, and end the process, which the service starts again: no other thread does its work."""
    threading.__excepthook__(failed)
    os._exit(1)


def main() -> NoReturn:
    """Run the worker on the socket that the server passed."""
    threading.excepthook = _end_process
    sys.setswitchinterval(_SWITCH_S)
    arguments, connection = child_arguments("model")
    given = json.loads(arguments.model)
    if "rank" in given:
        split.follow(given, connection)
    try:
        worker, described = _loaded(given, connection)
    except AccelerantError as error:
        ChildEnd(connection).send({"kind": "failed", "failure": f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from None
    run: Callable[[dict[str, Any]], NoReturn] = worker.run
    run(described)


if __name__ == "__main__":
    main()
