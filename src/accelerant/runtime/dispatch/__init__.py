"""Choice among the implementations of an op, with reasons: cases, plans, races, tuned launches, explanations."""

from accelerant.runtime.dispatch.case import Case, Cost, Implementation, case_of, saved_by
from accelerant.runtime.dispatch.operation import Operation, force, operations
from accelerant.runtime.dispatch.plan import Decision, DispatchPlan, Explanation, explain, explain_quietly

__all__ = [
    "Case", "Cost", "Decision", "DispatchPlan", "Explanation", "Implementation", "Operation", "case_of", "explain",
    "explain_quietly", "force", "operations", "saved_by",
]  # fmt: skip
