"""Choice among the implementations of an op, with reasons: cases, plans, races, tuned launches, explanations."""

from typing import TYPE_CHECKING

from accelerant._renamed import renamed_names
from accelerant.runtime.dispatch.operation import Operation, force, operations
from accelerant.runtime.dispatch.plan import (
    Case,
    Cost,
    Decision,
    DispatchEntry,
    Explanation,
    Implementation,
    case_of,
    explain,
    explain_quietly,
    saved_by,
)
from accelerant.runtime.dispatch.race import choices, tune

__all__ = [
    "Case", "Cost", "Decision", "DispatchEntry", "Explanation", "Implementation", "Operation", "case_of", "choices",
    "explain", "explain_quietly", "force", "operations", "saved_by", "tune",
]  # fmt: skip

if not TYPE_CHECKING:  # a type checker reports the names that are not there
    __getattr__ = renamed_names(__name__, {"DispatchPlan": "accelerant.runtime.dispatch.DispatchEntry"})
