"""The service: the library over HTTP, with durable jobs on one worker process a device; and its clients."""

from typing import TYPE_CHECKING

from accelerant._lazy import lazy

if TYPE_CHECKING:
    from accelerant.service import errors
    from accelerant.service.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client", "errors"]

if not TYPE_CHECKING:  # a type checker has the imports above, and reports a name that is in none
    __getattr__, __dir__ = lazy(__name__, __all__, {"client": ("AsyncClient", "Client")})
