"""The privacy ledger: events recorded before they happen, and their cost by dp-accounting."""

from __future__ import annotations

from accelerant.privacy.dp.ledger.accounting import Budget
from accelerant.privacy.dp.ledger.events import PrivacyEvent
from accelerant.privacy.dp.ledger.ledger import PrivacyLedger, PrivacyStatement

__all__ = ["Budget", "PrivacyEvent", "PrivacyLedger", "PrivacyStatement"]

Ledger = PrivacyLedger
