"""The record of what patch did to a model: the user's report, and what unpatch needs to restore the model.

A bound method in a module's `__dict__` hides its class's forward. Deep copies are patched, too. A patched model of
torch.nn's layers can be pickled; one of transformers cannot: some of its forwards are made at run time.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from torch import nn

from accelerant.errors import ConfigError
from accelerant.nn.layers import GLOBAL_HOOKS
from accelerant.runtime.html_page import table, text_table

ATTENTION_NAME = "accelerant"  # the attention implementation that a patched model's config names instead of "sdpa"
MARK = "_accelerant"  # attribute of a changed module: its Mark
RECORD = "_accelerant_patch"  # attribute of a patched model: its PatchRecord
PARTS = "_accelerant_parts"
"""Attribute of an output with lazy logits: the function that makes it, and the tensors that it takes as one tree."""

Forward = Callable[..., Any]


# --- the report ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Changed:
    """A module that patch put on our ops.

    Attributes:
        name: its path in the model; "" for the model itself.
        module: its class.
        kind: "attention", "rope", "norm", "activation", "mlp", "residual", "block", "embedding", "softmax", "dropout"
            or "loss".
        now: the op it calls.
    """

    name: str
    module: str
    kind: str
    now: str


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """A module that patch did not change: its path in the model, its class, and the reason."""

    name: str
    module: str
    reason: str


@dataclass(slots=True)
class PatchReport:
    """A report of the modules that patch changed or left alone, with reasons; printable.

    Attributes:
        model: the model's class.
        changed: modules that run on our ops, in the model's order; one entry for each kind of change to a module.
        left: modules that were not changed.
        notes: facts that a user of the model must know, such as when logits are computed.
        fallbacks: number of later attention calls that torch served, by reason; updated while the model runs. Calls
            inside graphs of torch.compile are not counted.
        graphs: number of calls by outcome: "replayed" from a CUDA graph, or "eager: " and the reason; and that
            of captures. Empty with patch(graph=False), and where this process can capture none.
        choices: kinds of calls, and whether they run on our ops or as the model was, with the measured difference.
    """

    model: str
    changed: list[Changed] = field(default_factory=list)
    left: list[LeftAlone] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fallbacks: Counter[str] = field(default_factory=Counter)
    graphs: Counter[str] = field(default_factory=Counter)
    choices: dict[str, str] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """The number of changes of each kind."""
        return dict(Counter(change.kind for change in self.changed))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "model": self.model, "counts": self.counts, "changed": [asdict(change) for change in self.changed],
            "left": [asdict(module) for module in self.left], "notes": list(self.notes),
            "fallbacks": dict(self.fallbacks), "graphs": dict(self.graphs),
            "choices": dict(self.choices),
        }  # fmt: skip

    def __str__(self) -> str:
        """Describe the report, modules of one class with the same outcome in one line."""
        total = ", ".join(f"{count} {kind}" for kind, count in self.counts.items()) or "nothing"
        changed, left = self._rows()
        lines = [f"{self.model}: {total} on Accelerant's ops"]
        lines += text_table(changed, indent=2)
        if left:
            lines.append("left alone:")
            lines += text_table(left, indent=2)
        return "\n".join(lines + self._facts())

    __repr__ = __str__

    def _rows(self) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        """Return what changed and what did not, modules of one class with the same outcome in one row."""
        changed = Counter((change.module, change.kind, change.now) for change in self.changed)
        left = Counter((module.module, module.reason) for module in self.left)
        return (
            [(f"{n} x {module}", kind, now) for (module, kind, now), n in changed.items()],
            [(f"{n} x {module}", reason) for (module, reason), n in left.items()],
        )

    def _facts(self) -> list[str]:
        """Return the notes, and what has been counted and decided so far, a line each."""
        lines = [f"note: {note}" for note in self.notes]
        lines += [f"attention by torch, {count} times: {reason}" for reason, count in self.fallbacks.most_common()]
        lines += [f"CUDA graphs, calls {outcome}: {count}" for outcome, count in self.graphs.most_common()]
        return lines + [f"chosen for {kind}: {choice}" for kind, choice in self.choices.items()]

    def _repr_html_(self) -> str:
        changed, left = self._rows()
        rows = [[("", cell) for cell in row] for row in (*changed, *((name, "left alone", why) for name, why in left))]
        notes = "".join(f"<p>{escape(text)}</p>" for text in self._facts())
        return f"<h4>{escape(self.model)}</h4>{table(('modules', 'kind', 'now'), rows)}{notes}"


# --- the record ------------------------------------------------------------------------------------------------------
class _Bound:
    """A replaced forward in the state of a module of torch.nn: pickle and deepcopy make the method again from it."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def __call__(self, *args: Any, **options: Any) -> Any:  # of a module made by copy.copy
        return self._method(*args, **options)

    def __reduce__(self) -> Any:
        return _bind, (getattr(self._method, _REPLACES, self._method.__func__), self._method.__self__)


def _bind(function: Forward, module: Any, plain: bool = True) -> Any:
    kind: Any = type(module)
    return types.MethodType(function if function is _state else _signed(function, kind, plain), module)


def _state(self: Any) -> dict[str, Any]:
    """Return the state of a module, in which replaced methods can be pickled: by default they are looked up by name.

    Its forward is on our ops.
    """
    kind: Any = type(self)
    state: dict[str, Any] = kind.__getstate__(self)
    if state["forward"].__func__ is kind.forward and (forward := state[MARK].forward) is not None:
        state = state | {"forward": _bind(forward, self)}
    return state | {name: _Bound(state[name]) for name in ("forward", "__getstate__")}


class _Picklable:
    """Base of objects that can be deep-copied, and pickled if they are of torch.nn's layers alone."""

    plain: bool

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.plain:
            return super().__reduce_ex__(protocol)
        raise ConfigError(
            "a patched model cannot be pickled: save its state_dict() or use save_pretrained(), whose keys and files "
            "are those of the unpatched model; or call accelerant.nn.unpatch(model) first"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ = deepcopy(self.__dict__, memo)
        return copied


@dataclass(eq=False)
class Mark(_Picklable):
    """Settings that the replaced methods of a module read, its forward, and the report, where fallbacks are counted.

    `loss` says that the module computes a loss.
    """

    report: PatchReport
    attention: bool = False
    loss: bool = False
    forward: Forward | None = None
    options: dict[str, Any] = field(default_factory=dict)
    plain: bool = False


@dataclass(eq=False)
class PatchRecord(_Picklable):
    """All changes to a model.

    They are modules with marks, the functions in place of forwards and losses, configs that named "sdpa", graphs, and
    the choice that runs the model. `ours` says whether losses are in place, `body` whether all else is; `places` are
    those that switch() changes: an object, an attribute, its values as it was and on our ops, and whether it is of the
    body. `plain` says that the model contains no model of transformers.
    """

    report: PatchReport
    marked: list[nn.Module] = field(default_factory=list)
    forwards: list[tuple[nn.Module, Forward]] = field(default_factory=list)
    losses: list[tuple[Any, Forward, Forward]] = field(default_factory=list)
    configs: list[Any] = field(default_factory=list)
    places: list[tuple[Any, str, tuple[Any, Any], bool]] = field(default_factory=list)
    ours: bool = True
    body: bool = True
    plain: bool = False
    graphs: Any = None
    choice: Any = None

    def __getstate__(self) -> dict[str, Any]:  # a pickled model is on our ops
        return self.__dict__ | {"places": [], "ours": True, "body": True}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)
        if self.plain:  # whose modules make their forwards again
            copied.__dict__ = copied.__getstate__()
        return copied

    def apply(self, module: nn.Module, plan: Any) -> None:
        """Change a module as its Replacement says."""
        mark: Mark | None = module.__dict__.get(MARK)
        if mark is None:
            mark = module.__dict__[MARK] = Mark(self.report, forward=plan.forward, plain=self.plain)
            self.marked.append(module)
        mark.attention = mark.attention or plan.attention
        mark.loss = mark.loss or any(kind == "loss" for kind, _ in plan.changes)
        mark.options |= plan.options
        if plan.forward is not None:
            self.replace_forward(module, plan.forward)
        if plan.loss_function is not None:  # as an assignment to loss_function does
            before: Any = module.loss_function
            self.losses.append((module, plan.loss_function, before))
            module.__dict__["_loss_function"] = plan.loss_function
        config: Any = module.config if plan.attention else None
        if plan.attention and not any(config is known for known in self.configs):
            self.configs.append(config)
            config._attn_implementation_internal = ATTENTION_NAME

    def replace_forward(self, module: nn.Module, forward: Forward) -> None:
        """Replace a module's forward by a function that takes the module as its first argument."""
        module.__dict__["forward"] = _bind(forward, module, self.plain)
        if self.plain:
            module.__dict__["__getstate__"] = _bind(_state, module)
        self.forwards.append((module, forward))

    def check(self) -> None:
        """Raise ConfigError if a forward was replaced or wrapped after patch."""
        for module, forward in self.forwards:
            kind: Any = type(module)  # whose own accelerate puts back when it unwraps one of torch.nn's layers
            if not runs_forward(module, forward) and not runs_forward(module, kind.forward):
                raise ConfigError(
                    f"the forward of a {type(module).__name__} was replaced after patch; undo that first "
                    "(accelerate: accelerator.unwrap_model(model, keep_fp32_wrapper=False))"
                )

    def switch(self, *, ours: bool, body: bool | None = None) -> None:
        """Put all replacements in place, or what the model had before; what others replaced since stays.

        `body` is as `ours` by default; False leaves all but losses as it was.
        """
        body = ours if body is None else body
        if not self.places:
            for module, forward in self.forwards:
                kind: Any = type(module)
                mark: Mark | None = module.__dict__.get(MARK)
                current: Any = module.__dict__.get("forward")
                bare = runs_forward(module, forward) and current.__func__.__code__ is getattr(forward, "__code__", None)
                if bare and mark is not None and mark.forward is forward:  # not what runs the model
                    sides = types.MethodType(kind.forward, module), current
                    self.places.append((module, "forward", sides, not mark.loss))
            self.places += [(module, "_loss_function", (before, after), False) for module, after, before in self.losses]
            names = ("sdpa", ATTENTION_NAME)
            self.places += [(config, "_attn_implementation_internal", names, True) for config in self.configs]
        for owner, name, values, of_body in self.places:
            before, after = (self.body, body) if of_body else (self.ours, ours)
            if before is not after and owner.__dict__.get(name) is values[before]:
                owner.__dict__[name] = values[after]
        self.ours, self.body = ours, body

    @property
    def has_loss(self) -> bool:
        """Whether a module computes a loss on our ops."""
        return any(module.__dict__[MARK].loss for module in self.marked)

    def undo(self) -> None:
        """Restore everything."""
        if not (self.ours and self.body):
            self.switch(ours=True)
        for module, _ in self.forwards:
            del module.__dict__["forward"]
            module.__dict__.pop("__getstate__", None)
        for model, function, _ in self.losses:
            if model.__dict__.get("_loss_function") is function:  # otherwise another was chosen since
                del model.__dict__["_loss_function"]
        for module in self.marked:
            del module.__dict__[MARK]
        for config in self.configs:
            if config._attn_implementation == ATTENTION_NAME:  # otherwise another was chosen since
                config._attn_implementation_internal = "sdpa"


@functools.cache
def _signed(forward: Forward, kind: Any, plain: bool) -> Forward:
    """Return a copy of `forward` that presents itself as the class's own.

    generate() and Trainer inspect its signature. torch.jit.script, which compiles no model of transformers, compiles
    the source of what it wraps, the class's own, in which all names must be known. accelerate unwraps it, too.
    """
    assert isinstance(forward, types.FunctionType)  # for the type checker: a function of this package
    original, names = kind.forward, forward.__globals__
    needed = original.__globals__.keys() & set(original.__code__.co_names)
    if plain and not needed <= names.keys():
        names = {**original.__globals__, **names}
        del names["__name__"]  # by which torch.compile would look all of them up in our module
    copied = types.FunctionType(forward.__code__, names, original.__name__, forward.__defaults__, forward.__closure__)
    functools.update_wrapper(copied, original)
    if not plain:
        del copied.__dict__["__wrapped__"]
    copied.__module__, copied.__kwdefaults__ = forward.__module__, forward.__kwdefaults__
    copied.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    copied.__dict__[_REPLACES] = forward
    return copied


_REPLACES = "_accelerant_forward"  # attribute of a function that _signed() returns: the one that it was made of


def runs_forward(module: nn.Module, forward: Forward) -> bool:
    """Return whether a module's forward is `forward`, unwrapped."""
    found = getattr(module.__dict__.get("forward"), "__func__", None)
    return getattr(found, "__dict__", {}).get(_REPLACES, found) is forward


def has_hooks(module: nn.Module, *, ignore_captures: bool = False) -> bool:
    """Return whether calling a module calls hooks, its own or torch's global ones.

    `ignore_captures` leaves out two hooks of transformers: those on layers and attention since hidden states were
    requested, which read attention weights, and those on embeddings under gradient checkpointing.
    """
    own = module._forward_hooks
    return bool(
        (own and not (ignore_captures and all(map(_is_capture, own.values()))))
        or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks or any(GLOBAL_HOOKS)
    )  # fmt: skip


def _is_capture(hook: Any) -> bool:
    return (getattr(hook, "__module__", None), getattr(hook, "__name__", None)) in (
        ("transformers.utils.output_capturing", "output_capturing_hook"),
        ("transformers.modeling_utils", "make_inputs_require_grads"),
    )


def is_bare(module: nn.Module, kind: type[nn.Module], forward: Forward | None = None) -> bool:
    """Return whether a module may be bypassed by using its weights directly.

    It may not if it has hooks (FSDP, offloading), another class (LoRA, quantized, parametrized) or a forward other than
    `forward` (None: its class's).
    """
    if type(module) is not kind or has_hooks(module):
        return False
    return "forward" not in module.__dict__ if forward is None else runs_forward(module, forward)
