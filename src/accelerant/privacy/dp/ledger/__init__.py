"""The privacy ledger: events recorded before they happen, and their cost by dp-accounting."""

from __future__ import annotations

from accelerant.privacy.dp.ledger.events import Event
from accelerant.privacy.dp.ledger.ledger import Budget, Ledger
from accelerant.privacy.dp.ledger.statement import Statement

__all__ = ["Budget", "Event", "Ledger", "Statement"]
