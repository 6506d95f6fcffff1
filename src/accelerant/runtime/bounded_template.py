"""Jinja templates of untrusted files, rendered in a child process within limits of time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from datetime import datetime
from typing import Any

from accelerant.errors import ConfigError, FormatError, TimeLimitExceeded
from accelerant.runtime.files import clipped
from accelerant.runtime.host import fork_safe, python_child

LIMIT_S = 1.0  # seconds of a processor that a template may take

_WAIT_S = 30.0 if hasattr(signal, "setitimer") else LIMIT_S  # in which a busy machine gives them
_START_S = 60.0
_MEMORY_BYTES = 1 << 30
_LONGEST_TEXT = 1 << 24
_CHILD = "from accelerant.runtime.bounded_template import serve; serve()"


class BoundedTemplate:
    """A Jinja template with what Hugging Face's chat templates use; threads may share it, one renders at a time."""

    def __init__(self, source: str, origin: str) -> None:
        self._source, self._origin = source, origin
        self._lock = fork_safe(threading.Lock())
        self._child: subprocess.Popen[str] | None = None
        self._owner = 0

    def render(self, **variables: Any) -> str:
        """Return the text for JSON values; ConfigError, FormatError or TimeLimitExceeded (1 s) where there is none."""
        try:
            request = json.dumps([self._source, variables])
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the values of a chat template must be those of JSON: {error}") from None
        with self._lock:
            child = self._running()
            began = time.monotonic()
            reply = _answer(child, request, _WAIT_S)
        spent = hasattr(signal, "SIGPROF") and child.returncode == -signal.SIGPROF
        if reply is None and (spent or time.monotonic() - began >= _WAIT_S):
            raise TimeLimitExceeded(f"{self._origin} did not end within {LIMIT_S:g} s")
        kind, text = ("broken", "it ended the process that rendered it") if reply is None else reply
        if kind == "refused":
            raise ConfigError(f"{self._origin} refuses the messages: {clipped(text, 300)}")
        if kind == "broken":
            raise FormatError(f"{self._origin} cannot be rendered: {text[:300]}")
        return str(text)

    def _running(self) -> subprocess.Popen[str]:
        if self._child is None or self._child.poll() is not None or self._owner != os.getpid():
            pipe = subprocess.PIPE
            child = python_child(_CHILD, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
            weakref.finalize(self, _end, child)
            if _answer(child, None, _START_S) is None:
                raise FormatError(f"{self._origin} cannot be rendered: the process for it did not start")
            self._child, self._owner = child, os.getpid()
        return self._child


def _answer(child: subprocess.Popen[str], request: str | None, limit_s: float) -> list[str] | None:
    """Return a child's reply, which it sends unasked at its start; None if it ended or was killed for its time."""
    assert child.stdin is not None  # for the type checker: they are pipes
    assert child.stdout is not None
    timer = threading.Timer(limit_s, child.kill)
    timer.start()
    try:
        if request is not None:
            child.stdin.write(request + "\n")
            child.stdin.flush()
        line = child.stdout.readline()
    except OSError:
        line = ""
    finally:
        timer.cancel()
    if not line.endswith("\n"):
        _end(child)
        return None
    reply: list[str] = json.loads(line)
    return reply


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        with contextlib.suppress(OSError):
            stream.close()  # type: ignore[union-attr]  # they are pipes


# --- in the child ----------------------------------------------------------------------------------------------------
def serve() -> None:
    """Answer requests of standard input, until it ends."""
    import jinja2

    _limit_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent ends this one
    environment = _environment()
    print(json.dumps(["ready", ""]), flush=True)
    for line in sys.stdin:
        if hasattr(signal, "setitimer"):  # SIGPROF ends the process
            signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        try:
            source, variables = json.loads(line)
            text = environment.from_string(source).render(**variables)
            if len(text) > _LONGEST_TEXT:
                raise MemoryError
            reply = ["text", text]
        except _RefusedError as error:
            reply = ["refused", str(error)]
        except MemoryError:
            reply = ["broken", "its text needs too much memory"]
        except (jinja2.TemplateError, Exception) as error:  # noqa: BLE001  a template can raise whatever Python does
            reply = ["broken", f"{type(error).__name__}: {str(error)[:1000]}"]
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), flush=True)


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


class _RefusedError(Exception):
    """A template called raise_exception."""


def _environment() -> Any:
    """Return a sandbox like that in which transformers renders chat templates."""
    from jinja2 import ext, nodes, sandbox

    class Generation(ext.Extension):
        """{% generation %}, which marks the assistant's words for training: its contents."""

        tags = {"generation"}  # noqa: RUF012  as jinja has it

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return body

    def refuse(message: str) -> None:
        raise _RefusedError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
        sort_keys: bool = False,
    ) -> str:  # fmt: skip
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment
