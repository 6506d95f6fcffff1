"""What patch did to a model, module by module."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Changed", "LeftAlone", "PatchReport"]


@dataclass(frozen=True, slots=True)
class Changed:
    """A module that runs on our ops now.

    Attributes:
        name: its path in the model; "" for the model itself.
        module: its class.
        kind: "attention", "norm", "activation", "mlp", "residual", "embedding" or "loss".
        now: what it calls.
    """

    name: str
    module: str
    kind: str
    now: str


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """A module that runs as before.

    Attributes:
        name: its path in the model.
        module: its class.
        reason: why.
    """

    name: str
    module: str
    reason: str


@dataclass(slots=True)
class PatchReport:
    """What patch changed, what it left alone and why; print it, or take to_dict().

    Attributes:
        model: the model's class.
        changed: modules that run on our ops, in the model's order. A module may stand here twice, once for each kind.
        left: modules that run as before.
        notes: what a user of the model must know, such as where logits are.
        fallbacks: calls that went back to torch's attention since, by reason; it keeps counting while the model runs.
            Calls inside torch.compile's graphs are not counted.
    """

    model: str
    changed: list[Changed] = field(default_factory=list)
    left: list[LeftAlone] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fallbacks: Counter[str] = field(default_factory=Counter)

    @property
    def counts(self) -> dict[str, int]:
        """How many modules of each kind changed."""
        return dict(Counter(each.kind for each in self.changed))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": self.model,
            "counts": self.counts,
            "changed": [asdict(each) for each in self.changed],
            "left": [asdict(each) for each in self.left],
            "notes": list(self.notes),
            "fallbacks": dict(self.fallbacks),
        }

    def __str__(self) -> str:
        """Modules of one class with one fate in one line."""
        total = ", ".join(f"{count} {kind}" for kind, count in self.counts.items()) or "nothing"
        changed = Counter((each.module, each.kind, each.now) for each in self.changed)
        left = Counter((each.module, each.reason) for each in self.left)
        lines = [f"{self.model}: {total} on Accelerant's ops"]
        lines += _table([(f"{n} x {module}", kind, now) for (module, kind, now), n in changed.items()])
        if left:
            lines.append("left alone:")
            lines += _table([(f"{n} x {module}", reason) for (module, reason), n in left.items()])
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"attention by torch, {count} times: {reason}" for reason, count in self.fallbacks.most_common()]
        return "\n".join(lines)


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
