"""The pages of --help: usage, description, arguments, options and commands by group, and one example a line.

Nothing is cut: where the terminal is narrow, an option's text is below its name. A command's `epilog` has its examples,
and `rich_help_panel` names the group of an option or command. Kinds, defaults and bounds are read from the parameters
of a command's function: how typer represents and writes them differs between its versions.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, field, fields
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from accelerant.cli.terminal import columns, console, is_live, wrapped
from accelerant.config import flag_of
from accelerant.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

_MOST_COLUMNS = 100
_NAME_COLUMNS = 30  # longer names have their text below them
_NARROW = 64  # columns below which panels have no borders, and all texts are below the names

_KINDS = {str: "TEXT", int: "N", float: "X", Path: "PATH"}

_MAY_BE_EMPTY = ("prompt", "arguments")
"""Parameters of which the empty text is a value: the prompt of a sample, and the arguments of a profiled script."""

_FREE_TEXTS = frozenset({"case", "data", "define", "entry", "include", "nvrtc", "only", "paths", "ptxas", "serves"})
"""Repeated parameters whose values may have commas; all others are names or numbers, one each."""

ALIASES = {
    "--device": "--backend", "--learning-rate": "--lr", "--noise-multiplier": "--sigma", "--sample-rate": "--q",
    "--tokens": "--max-tokens",
}  # fmt: skip
"""Option -> the other spelling that each command with this option takes."""

RENAMED = {
    "--budget-s": "--budget-seconds", "--cases": "--case", "--dtypes": "--dtype", "--jobs": "--workers",
    "--limit": "--max-rows", "--limit-s": "--max-seconds", "--micro-batch": "--microbatch",
    "--no-self-verify": "--no-verify", "--ops": "--op", "--self-verify": "--verify", "--sizes": "--size",
    "--table": "--out", "--verify": "--check",
}  # fmt: skip
"""Earlier spelling -> option of today; an unknown option of such a name is an error that says so."""

OPTIONS_ELSEWHERE = {
    "--bf16": "--precision", "--dataset": "--data", "--epsilon": "--target-epsilon", "--fp16": "--precision",
    "--gradient-accumulation-steps": "--microbatch", "--max-new-tokens": "--tokens", "--max-steps": "--steps",
    "--model": "--init-from", "--num-train-epochs": "--epochs", "--output": "--out", "--output-dir": "--out",
    "--per-device-train-batch-size": "--batch-size", "--resume-from-checkpoint": "--resume",
}  # fmt: skip
"""Option of transformers and others -> the option here."""

COMMANDS_ELSEWHERE = {
    **dict.fromkeys(("groth16", "snarkjs", "zkey", "wtns", "r1cs"), "accelerant zk --help"),
    **dict.fromkeys(("generate", "chat"), "accelerant sample"),
    **dict.fromkeys(("fullprove", "fullProve"), "accelerant zk prove, with the witness of circom's program"),
    "benchmark": "accelerant bench --help",
    "help": "accelerant --help",
    "info": "accelerant doctor",
    "nvidia-smi": "accelerant top",
    "version": "accelerant --version",
}
"""Command of other programs -> what to write here."""

_UsageError: Any = typer.BadParameter.__base__  # click's class, or that of typer's copy of click


class _Page:
    """The part of a command that prints its page."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the page."""
        _print_page(self, ctx)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage after the command's name."""
        command: Any = self
        shown = [one for one in command.get_params(ctx) if one.param_type_name == "argument" and not one.hidden]
        words = [_argument(one) for one in shown]
        words = [word if one.required else f"[{word}]" for one, word in zip(shown, words, strict=True)]
        return ["[OPTIONS]", *words, *["COMMAND [ARGS]..."] * isinstance(self, TyperGroup)]


class HelpCommand(_Page, TyperCommand):
    """A command with such a page, whose options have their ALIASES.

    A number that has bounds is not NaN, which no bound refuses. No argument is empty, as an unset shell variable is: as
    a path it would be the current folder, as an option the same as without it. A repeated option has one
    name each time.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for param in self.params:
            if param.param_type_name == "option" and (alias := ALIASES.get(param.opts[0])):
                param.opts.append(alias)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments."""
        try:
            given, *_ = self.make_parser(ctx).parse_args(list(args))  # converted, an empty path is "."
        except _UsageError as error:
            self._refuse_renamed(getattr(error, "option_name", None))
            raise
        for param, kind, _, info in _declared(self, ctx):
            value = given.get(param.name)
            if kind is float and info.min is not None and str(value).lower().endswith("nan"):
                raise typer.BadParameter("nan is no number", ctx=ctx, param=param)
            if param.param_type_name == "argument":  # of a command that leaves unknown options to a script
                self._refuse_renamed(value)
        words = {word.partition("=")[0] for word in args}
        rest = super().parse_args(ctx, args)
        for param in self.get_params(ctx):
            _check_given(param, given.get(param.name))
            if (alias := ALIASES.get(param.opts[0])) and {alias, param.opts[0]} <= words and not param.multiple:
                raise ConfigError(f"{param.opts[0]} and {alias} are the same: give one")
        return rest

    def _refuse_renamed(self, option: object) -> None:
        spelled = option.replace("_", "-") if isinstance(option, str) else ""
        taken = {option for param in self.params for option in (*param.opts, *param.secondary_opts)}
        if (new := RENAMED.get(spelled)) in taken:
            raise ConfigError(f"{option} is {new} now")
        if (new := OPTIONS_ELSEWHERE.get(spelled)) in taken:
            raise ConfigError(f"no option {option}: write {new}")


def _check_given(param: Any, value: Any) -> None:
    """Raise ConfigError for an empty value, and for several names in one."""
    values = value if isinstance(value, (list, tuple)) else [value]
    if "" in values and param.name not in _MAY_BE_EMPTY:
        name = _argument(param).rstrip(".") if param.param_type_name == "argument" else param.opts[0]
        raise ConfigError(f"{name} must not be empty")
    if param.param_type_name == "option" and param.multiple and param.name not in _FREE_TEXTS:
        for text in values:
            parts = [part.strip() for part in text.split(",") if part.strip()] if isinstance(text, str) else []
            if parts and "," in text:
                each = " ".join(f"{param.opts[0]} {part}" for part in parts)
                raise ConfigError(f"{param.opts[0]} takes one value at a time, got {text!r}: write {each}")


class HelpGroup(_Page, TyperGroup):
    """A group of commands with such a page."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of the arguments."""
        if args[0] not in self.commands and (known := COMMANDS_ELSEWHERE.get(args[0])):
            raise ConfigError(f"no command {args[0]}: write {known}")
        try:
            return super().resolve_command(ctx, args)
        except _UsageError as error:
            if hasattr(error, "possibilities"):  # click says what is meant, and typer says it again
                error.possibilities = None
            raise


class Application(typer.Typer):
    """A typer application, or a group of commands of one."""

    def __init__(self, **options: Any) -> None:
        settings = {"help_option_names": ["-h", "--help"]}
        fixed = {"add_completion": False, "pretty_exceptions_enable": False, "context_settings": settings}
        super().__init__(**{"cls": HelpGroup, **fixed, **options})

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        """Return a decorator that adds a command."""
        return super().command(name, **{"cls": HelpCommand, **options})


JsonOutput = Annotated[bool, typer.Option("--json", help="Print JSON.")]


_Command = TypeVar("_Command", bound=Callable[..., Any])


def examples(text: str, **options: Any) -> Callable[[_Command], _Command]:
    """Return a decorator that gives a command, a function or dataclass with `run`, examples and typer's options."""

    def decorate(command: _Command) -> _Command:
        command.options = {"epilog": text, **options}  # type: ignore[attr-defined]
        return command

    return decorate


class Group:
    """A group of commands: each has examples, of which the first begins with its word; a group has its word alone."""

    def __init__(self, title: str, commands: Mapping[Any, str], **options: Any) -> None:
        self.title, self.commands, self.options = title, commands, options


def add_command(app: typer.Typer, name: str, panel: str, command: Any, above: str = "") -> None:
    """Add a command or a group to an application, or to the group of the words `above`."""
    if not isinstance(command, Group):
        app.command(name, rich_help_panel=panel, **command.options)(command_of(command))
        return
    group = Application(name=name, help=command.title, no_args_is_help=True, **command.options)
    for function, text in command.commands.items():
        if isinstance(function, Group):
            add_command(group, text, "Commands", function, f"{above}{name} ")
            continue
        group.command(text.split()[0], epilog=f"accelerant {above}{name} {text}")(command_of(function))
    app.add_typer(group, rich_help_panel=panel)


def option(text: str, *flags: str, default: Any = None, panel: str | None = None, **more: Any) -> Any:
    """Declare an option as the default of a command's parameter, or of a field of its dataclass.

    Without flags, they are made of the name; the negative one, `--no-...`, exists unless the default is False.
    """
    declared = {"flags": flags, "help": text, "rich_help_panel": panel, **more}
    return field(default=default, metadata={"option": declared})


def command_of(command: Any) -> Callable[..., None]:
    """Return the command of a function, or of a dataclass, whose fields are its parameters and `run` its work."""

    def call(**values: Any) -> None:
        found = command(**values)
        if isinstance(command, type):
            found.run()

    return with_parameters(call, parameters_of(command), inspect.getdoc(command) or "")


def parameters_of(command: Any) -> list[inspect.Parameter]:
    """Return the parameters of a command, or the fields of its or a suite's dataclass, for typer.

    A tuple is a repeated option.
    """
    hints, parameters = get_type_hints(command, include_extras=True), []
    declarations = {one.name: one for one in fields(command)} if isinstance(command, type) else {}
    for name, given in inspect.signature(command).parameters.items():
        default: Any = given.default
        hint, flag = hints[name], flag_of(name)
        one = default if isinstance(default, Field) else declarations.get(name)
        if one is not None and "option" in one.metadata:
            declared, default = dict(one.metadata["option"]), one.default
            if _kind(hint) is bool and default is not False:
                flag += f"/--no-{flag[2:]}"
            info = typer.Option(*(declared.pop("flags", ()) or (flag,)), **declared)
            if tuples := [each for each in (hint, *get_args(hint)) if get_origin(each) is tuple]:
                hint, default = GenericAlias(list, get_args(tuples[0])[:1]) | None, list(default or ()) or None
            hint = Annotated[hint, info]
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint))
    return parameters


def with_parameters(
    call: Callable[..., None], parameters: Iterable[inspect.Parameter], text: str
) -> Callable[..., None]:
    """Return a function of keywords with parameters and a docstring for typer, which reads both declarations."""
    signature = inspect.Signature(list(parameters))
    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__annotations__ = {name: one.annotation for name, one in signature.parameters.items()}
    call.__doc__ = text
    return call


def _print_page(command: Any, ctx: Any) -> None:
    from rich.text import Text

    shown = console()
    width = min(columns(sys.stdout) or _MOST_COLUMNS, _MOST_COLUMNS)
    usage = wrapped(f"Usage: {ctx.command_path} {' '.join(command.collect_usage_pieces(ctx))}", width)
    shown.print(Text("\n".join(usage), style="bold"), soft_wrap=True)
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        shown.print(Text("\n" + textwrap.fill(paragraph, width, break_long_words=False)), soft_wrap=True)
    panels: dict[str, list[tuple[str, str]]] = {}
    parameters = [one for one in _declared(command, ctx) if not getattr(one[0], "hidden", False)]
    for param, *declared in sorted(parameters, key=lambda one: one[0].param_type_name == "option"):
        default = "Arguments" if param.param_type_name == "argument" else "Options"
        panels.setdefault(getattr(param, "rich_help_panel", None) or default, []).append(_entry(param, *declared))
    for name in command.list_commands(ctx) if isinstance(command, TyperGroup) else ():
        if (one := command.get_command(ctx, name)) is not None and not one.hidden:
            text = " ".join(inspect.cleandoc(one.help or "").split("\n\n")[0].split())
            panels.setdefault(getattr(one, "rich_help_panel", None) or "Commands", []).append((name, text))
    for title, entries in panels.items():
        _print_panel(shown, title, entries, width)
    if command.epilog:
        shown.print(Text("\nExamples:", style="bold"))
        for line in command.epilog.splitlines():
            shown.print(Text(f"  {line}"), soft_wrap=True)


def _declared(command: Any, ctx: Any) -> list[tuple[Any, Any, Any, Any]]:
    """Return a command's parameters with type, default and declaration; typer's own flags have no `Annotated`."""
    declared = inspect.signature(command.callback, eval_str=True).parameters if command.callback else {}
    found = []
    for param in command.get_params(ctx):
        one = declared.get(param.name)
        if one is not None and get_origin(one.annotation) is Annotated:
            found.append((param, _kind(one.annotation), one.default, one.annotation.__metadata__[0]))
        else:
            found.append((param, bool, None, param))
    return found


def _entry(param: Any, kind: Any, default: Any, info: Any) -> tuple[str, str]:
    """Return a parameter's name, with the kind of its value, and its text."""
    name = ", ".join(sorted(param.opts, key=lambda option: option.startswith("--")))
    if param.secondary_opts:
        name = name.replace("--", "--[no-]", 1)
    if kind is not bool:
        name += f" {param.metavar or _KINDS[kind]}"
    elif default is not None:
        default = (param.opts if default else param.secondary_opts)[0].lstrip("-") if param.secondary_opts else None
    notes = ["required"] * param.required
    if kind is not bool and info.min is not None:
        notes.insert(0, f"at least {info.min}" if info.max is None else f"{info.min} to {info.max}")
    if isinstance(default, list):
        default = " and ".join(map(str, default))
    if default not in (None, "") and not param.required:
        notes.insert(0, f"default: {default}")
    name = _argument(param) if param.param_type_name == "argument" else name
    # The help of an argument is lost between typer 0.20 and click 8.5, that of the declaration is not.
    return name, " ".join(filter(None, (info.help, f"[{'; '.join(notes)}]" * bool(notes))))


def _kind(hint: Any) -> Any:
    """Return the type of a value of X, X | None, list[X] or Annotated[X, ...]."""
    inner = [one for one in get_args(hint) if one is not type(None)]
    return _kind(inner[0]) if inner else hint


def _argument(param: Any) -> str:
    name = (param.metavar or param.name.upper()).strip("[]").replace("]...", "...")
    return str(name if param.nargs == 1 or name.endswith("...") else f"{name}...")


def _print_panel(shown: Console, title: str, entries: Sequence[tuple[str, str]], width: int) -> None:
    """Print a group: in a border on a terminal, elsewhere under its title."""
    from rich.console import Group as Lines
    from rich.panel import Panel
    from rich.text import Text

    bordered = is_live(sys.stdout) and width >= _NARROW
    inner = width - 4 if bordered else width - 2
    column = 4 if width < _NARROW else min(_NAME_COLUMNS, 2 + max(len(name) for name, _ in entries))
    lines = []
    for name, text in entries:
        parts = textwrap.wrap(text, inner - column, break_long_words=False, break_on_hyphens=False)
        beside = width >= _NARROW and len(name) + 2 <= column
        first = parts.pop(0) if parts and beside else ""
        lines.append(Text.assemble((name, "bold cyan"), " " * (column - len(name)), first))
        lines += [Text(" " * column + part) for part in parts]
    if bordered:
        shown.print(Panel(Lines(*lines), title=title, title_align="left", border_style="dim", width=width))
        return
    shown.print(Text(f"\n{title}:", style="bold"))
    for line in lines:
        line.rstrip()
        shown.print(Text.assemble("  ", line), soft_wrap=True)
