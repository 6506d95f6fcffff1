"""What a fused function reads besides its arrays. A recorded run is used again while that has not changed.

A function's code names its globals, the cells of its closure, and their attributes. Numbers, strings, dtypes, lists and
dicts of them, attributes of plain objects, functions of torch and NumPy, and functions of Python that read nothing else
are compared at each call. For anything else (arrays, properties, random numbers) the code does not show what it will
read: such a function runs at each call, and its kernel is compiled again only where its record differs.
"""

from __future__ import annotations

import builtins
import dis
import functools
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

Reads: TypeAlias = list[tuple[Callable[[Any, Any], Any], Any, Any, Any]]
"""Function that reads, its two arguments, and what it returned."""

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, np.generic)
_FUNCTIONS = (BuiltinFunctionType, FunctionType, np.ufunc, type(np.sum))
_LIBRARIES = ("torch", "numpy", "math")
_PURE = (abs, len, min, max, sum, range, zip, enumerate, isinstance, tuple, list, dict, str, bool, int, float, round)
_WRITES = ("IMPORT_", "STORE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "DELETE_", "LOAD_CLASS", "LOAD_BUILD")
"""Instructions of code whose next run may differ, or that is not followed."""

_MOST = 256  # values that are compared at a call, at most


class _UnknownError(Exception):
    """The function reads something whose change cannot be seen."""


class _Name(NamedTuple):
    """A variable that code reads, and the attributes that follow; `space` is "" for what is not followed."""

    space: str
    name: str
    attributes: tuple[str, ...]


def reads_of(
    function: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any], names: frozenset[str]
) -> Reads | None:
    """Return what a call reads, None where unknown; functions of `names` depend on their arguments alone."""
    reads: Reads = []
    try:
        if type(function) is FunctionType:
            known = function.__code__.co_varnames[: function.__code__.co_argcount]
            _read_function(function, {**dict(zip(known, args, strict=False)), **options}, reads, names)
            for each in args[len(known) :]:
                _read(each, reads, names)
        else:
            for each in (function, *args, *options.values()):
                _read(each, reads, names)
    except (_UnknownError, RecursionError):
        return None
    return reads


def unchanged(reads: Reads | None) -> bool:
    """Return whether nothing that a call read has changed."""
    if reads is None:
        return False
    try:
        for read, space, name, value in reads:
            if read(space, name) is not value:
                return False
    except (AttributeError, ValueError):  # it is no longer there
        return False
    return True


def _contents(cell: Any, _: None) -> Any:
    return cell.cell_contents


def _items(x: Any, before: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the items of a list or dict; the same object as before where they are the same."""
    items = (*x, *x.values()) if type(x) is dict else tuple(x)
    return before if len(items) == len(before) and all(map(_is, items, before)) else None


def _is(x: Any, y: Any) -> bool:
    return x is y


def _read(x: Any, reads: Reads, names: frozenset[str]) -> None:
    """Add what is read of a value."""
    kind = type(x)
    if len(reads) > _MOST:
        raise _UnknownError
    if kind in (tuple, list, dict):
        items = (*x, *x.values()) if kind is dict else tuple(x)
        if len(items) > _MOST:
            raise _UnknownError
        if kind is not tuple:
            reads.append((_items, x, items, items))
        for each in items:
            _read(each, reads, names)
    elif kind is FunctionType and x.__module__.partition(".")[0] not in _LIBRARIES:
        _read_function(x, {}, reads, names)
    elif not (
        isinstance(x, _CONSTANTS)
        or (isinstance(x, _FUNCTIONS) and (x.__name__ in names or x.__module__ == "math"))
        or any(x is each for each in _PURE)
        or (isinstance(x, type) and issubclass(x, np.generic))
    ):
        raise _UnknownError


def _read_function(function: FunctionType, given: Mapping[str, Any], reads: Reads, names: frozenset[str]) -> None:
    code = function.__code__
    if any(space is function for _, space, _, _ in reads):  # it calls itself
        return
    reads += [(getattr, function, name, getattr(function, name)) for name in ("__code__", "__defaults__")]
    _read(function.__defaults__, reads, names)
    _read(function.__kwdefaults__, reads, names)
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    for space, name, attributes in _names(code):
        if space == "global":
            value = function.__globals__.get(name)
            reads.append((dict.get, function.__globals__, name, value))
            if name not in function.__globals__:
                value = getattr(builtins, name, builtins)
        elif space == "cell" and name in cells:
            value = _contents(cells[name], None)
            reads.append((_contents, cells[name], None, value))
        elif space == "argument":
            value = given.get(name)  # the caller's key has the value itself
        elif space:
            continue
        else:
            raise _UnknownError
        for attribute in attributes:
            if isinstance(value, _CONSTANTS):
                break
            if type(value) is not ModuleType and not _is_plain(value, attribute):
                break
            space_of, value = value, getattr(value, attribute)
            reads.append((getattr, space_of, attribute, value))
        _read(value, reads, names)


def _is_plain(x: Any, attribute: str) -> bool:
    """Return whether an object's attribute is what its dictionary, or a class's, has."""
    kind = type(x)
    if any("__getattribute__" in vars(base) or "__getattr__" in vars(base) for base in kind.__mro__[:-1]):
        return False
    found = next((vars(base)[attribute] for base in kind.__mro__ if attribute in vars(base)), None)
    return not hasattr(type(found), "__get__") and hasattr(x, attribute)


@functools.lru_cache(maxsize=1024)
def _names(code: CodeType) -> tuple[_Name, ...]:
    """Return the variables that code reads."""
    return tuple(dict.fromkeys(_each_name(code)))


def _each_name(code: CodeType) -> Iterator[_Name]:
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PUSH_NULL", "EXTENDED_ARG")]
    for at, (op, value) in enumerate((step.opname, step.argval) for step in steps):
        end = at + 1
        while end < len(steps) and steps[end].opname in ("LOAD_ATTR", "LOAD_METHOD"):
            end += 1
        attributes = tuple(each.argval for each in steps[at + 1 : end])
        if op in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield _Name("global", value, attributes)
        elif op in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
            yield _Name("cell", value, attributes)
        elif op.startswith("LOAD_FAST"):
            several = (value,) if isinstance(value, str) else value
            for each in several:
                if each in arguments:
                    yield _Name("argument", each, attributes if each is several[-1] else ())
        elif op.startswith(_WRITES) or (op == "STORE_DEREF" and value in code.co_freevars):
            yield _Name("", "", ())
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from (name for name in _each_name(each) if name.space != "argument")
