"""Names that changed, or that other libraries have: an error says what to write here.

For a version the old name of what changed raises an error that says the new one; docs/migration.md lists them.
"""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

__all__ = [
    "checked_arguments", "missing_arguments", "missing_names", "renamed_arguments", "renamed_names",
    "understood_arguments",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])
ARGUMENTS: dict[tuple[str, str], str] = {}
"""(qualified name of a function or class, old argument) -> its argument today."""
NAMES: dict[tuple[str, str], str] = {}
"""(module, old name) -> what to write today."""


def renamed_arguments(**renamed: str) -> Callable[[F], F]:
    """Decorate a function or class whose keyword arguments changed: old name = the argument, or the words, of today."""

    def refuse(target: Any, kwargs: dict[str, Any]) -> None:
        for old in renamed.keys() & kwargs.keys():
            new = renamed[old] + "=" * renamed[old].isidentifier()
            raise TypeError(f"{target.__name__}() has no argument {old}= any more: it is {new} now")

    def decorate(target: F) -> F:
        owner = f"{target.__module__}.{target.__qualname__}"
        ARGUMENTS.update({(owner, old): new for old, new in renamed.items()})
        return checked_arguments(target, refuse)

    return decorate


def missing_arguments(**words: str) -> Callable[[F], F]:
    """Decorate a function or class that lacks keyword arguments of other libraries: their name = what to write here."""

    def refuse(target: Any, kwargs: dict[str, Any]) -> None:
        for missing in words.keys() & kwargs.keys():
            raise TypeError(f"{target.__name__}() has no argument {missing}=: write {words[missing]}")

    return lambda target: checked_arguments(target, refuse)


def understood_arguments(**names: str) -> Callable[[F], F]:
    """Decorate a function or class whose keyword arguments have other usual names: usual name = the argument."""

    def translate(target: Any, kwargs: dict[str, Any]) -> None:
        for usual in [usual for usual in kwargs if usual in names]:
            if names[usual] in kwargs:
                raise TypeError(f"{target.__name__}() got {names[usual]}= and {usual}=, which are the same: give one")
            kwargs[names[usual]] = kwargs.pop(usual)

    return lambda target: checked_arguments(target, translate)


def checked_arguments(target: F, check: Callable[[F, dict[str, Any]], None]) -> F:
    """Return a function, or a class with its constructor, whose keyword arguments `check` sees first and may change."""
    function: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            check(target, kwargs)
        return function(*args, **kwargs)

    if isinstance(target, type):
        target.__init__ = checked  # type: ignore[misc]
        return target
    return checked  # type: ignore[return-value]


def renamed_names(
    module: str, renamed: Mapping[str, str], get: Callable[[str], Any] | None = None
) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module some of whose names changed; `get` is the one that it has already."""
    NAMES.update({(module, old): new for old, new in renamed.items()})

    def name(old: str) -> Any:
        if old in renamed:
            raise AttributeError(f"{module}.{old} is {renamed[old]} now")
        if get is not None:
            return get(old)
        raise AttributeError(f"module {module!r} has no attribute {old!r}")

    return name


def missing_names(
    module: str, words: Mapping[str, str], get: Callable[[str], Any] | None = None, packages: Sequence[str] = ()
) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module whose error for a name that it lacks says what to write.

    `words` has names of other libraries with what to write here, `get` is the module's present `__getattr__`, and
    `packages` are modules of it whose `__all__` is searched for other names, imported only for the error.
    """

    def name(missing: str) -> Any:
        try:
            if get is not None:
                return get(missing)
            raise AttributeError(f"module {module!r} has no attribute {missing!r}")
        except AttributeError as error:
            if missing.startswith("_") or f"{missing!r}" not in str(error):
                raise
            paths = (f"{module}.{package}" for package in packages)
            found = words.get(missing) or next(
                (f"{path}.{missing}" for path in paths if missing in importlib.import_module(path).__all__), None
            )
            if found is None:
                raise
            raise AttributeError(f"{error}: write {found}") from None

    return name
