"""Choice among the implementations of an op, with reasons: cases, plans, races, tuned launches, explanations."""

from accelerant.runtime.dispatch.case import Case, Cost, Implementation, case_of, saved_by
from accelerant.runtime.dispatch.decisions import Decision, Explanation, explain, explain_quietly
from accelerant.runtime.dispatch.operation import Operation, force, operations, taken_by_torch

__all__ = [
    "Case",
    "Cost",
    "Decision",
    "Explanation",
    "Implementation",
    "Operation",
    "case_of",
    "explain",
    "explain_quietly",
    "force",
    "operations",
    "saved_by",
    "taken_by_torch",
]
