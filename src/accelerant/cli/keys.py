"""`accelerant keys`: the API keys of the service."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelerant.cli.help import Application
from accelerant.errors import MissingDependency

if TYPE_CHECKING:
    from accelerant.service.keys import KeyStore

_Config = Annotated[Path | None, typer.Option(help="The service's TOML file.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Days = Annotated[float | None, typer.Option(min=0, max=36500, help="Days until the secret expires. Default: never.")]
_DAY_S = 86400.0
_LAST_S = 32503680000.0  # the year 3000, after which time.localtime may overflow


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = Application(name="keys", help="API keys of the service.", no_args_is_help=True)
    examples: dict[Callable[..., None], str] = {
        create: "create --name ci --scope field --scope zk --rate 50",
        list_keys: "list --json",
        revoke: "revoke 3f2a9c0d1e4b",
        rotate: "rotate 3f2a9c0d1e4b --grace-days 2",
    }
    for command, example in examples.items():
        name = command.__name__.removesuffix("_keys")
        group.command(name, epilog=f"accelerant keys {example}")(command)
    app.add_typer(group, rich_help_panel="Service")


def create(
    name: Annotated[str, typer.Option(help="For people, such as the key's user.")],
    scope: Annotated[list[str], typer.Option(help="What it allows; may be repeated. admin allows everything.")],
    rate: Annotated[float | None, typer.Option(help="Requests a second on average. Default: no limit.")] = None,
    burst: Annotated[int | None, typer.Option(help="Requests at once. Default: those of two seconds.")] = None,
    days: _Days = None,
    config: _Config = None,
    json_output: _Json = False,
) -> None:
    """Create a key and print it, once: only its hash is kept."""
    lifetime_s = None if days is None else days * _DAY_S
    key, token = _store(config).create(name, scope, rate=rate, burst=burst, lifetime_s=lifetime_s)
    print(json.dumps(key.public() | {"token": token}) if json_output else token)


def list_keys(config: _Config = None, json_output: _Json = False) -> None:
    """List the keys, without their secrets."""
    keys = [key.public() for key in _store(config).read()]
    if json_output:
        print(json.dumps(keys))
        return
    for key in keys:
        end = key["until"]
        until = "" if end is None else f"  until {time.strftime('%Y-%m-%d %H:%M', time.localtime(min(end, _LAST_S)))}"
        rate = "" if key["rate"] is None else f"  {key['rate']:g} requests/s"
        print(f"{key['id']}  {key['name']}  {','.join(key['scopes'])}{rate}{until}")


def revoke(id: Annotated[str, typer.Argument(help="Id of the key.")], config: _Config = None) -> None:
    """Remove a key. A running service refuses it within a second."""
    _store(config).revoke(id)


def rotate(
    id: Annotated[str, typer.Argument(help="Id of the key.")],
    grace_days: Annotated[float, typer.Option(min=0, max=36500, help="Days that the old secret stays valid.")] = 1.0,
    days: _Days = None,
    config: _Config = None,
    json_output: _Json = False,
) -> None:
    """Give a key a new secret and print it; its id and its jobs stay."""
    lifetime_s = None if days is None else days * _DAY_S
    key, token = _store(config).rotate(id, grace_s=grace_days * _DAY_S, lifetime_s=lifetime_s)
    print(json.dumps(key.public() | {"token": token}) if json_output else token)


def _store(config: Path | None) -> KeyStore:
    from accelerant.service.settings import load

    settings = load(config)
    try:
        from accelerant.service.keys import KeyStore
    except ImportError as error:
        raise MissingDependency(error.name or "a package", "service", "the service") from None
    return KeyStore(settings.keys_file)
