"""Rules of CONTRIBUTING.md that a program can check: docstring openings, lengths, generic class names."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

import accelerant

PACKAGE = Path(accelerant.__file__).parent


def modules(having):
    """Yield (path, tree) of each module whose text matches: to parse them all takes seconds."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if re.search(having, text := path.read_text(encoding="utf-8")):
            yield path, ast.parse(text)


MAX_LINES = 900
MAX_FUNCTION_LINES = 80
QUESTION = re.compile(r"(What|Of|Who|Whose|Where|Which|Whether|How)\b")
"""Openings that no docstring has: a function's begins with a verb, a class's says what it represents."""


def named(path, node=None):
    return f"{path.relative_to(PACKAGE)}{f':{node.lineno}' if node else ''}"


def is_property(node):
    return any("property" in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ()))


def test_docstrings_begin_with_a_verb_or_a_noun():
    wrong = [
        f"{named(path, node)} {node.name}: {text.splitlines()[0]}"
        for path, tree in modules(rf'"""\s*{QUESTION.pattern}')
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node))
        and (opening := QUESTION.match(text))
        and not (opening[0] == "Whether" and is_property(node))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_is_too_long():
    lengths = {named(path): len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


@pytest.mark.slow
def test_no_function_is_too_long():
    """A Triton kernel may be: what it calls is compiled into it, and splitting one changes its code."""
    lengths = {
        f"{named(path, node)} {node.name}": node.end_lineno - node.lineno + 1
        for path, tree in modules(r"(?m)^ *(async )?def ")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and path.name != "triton_kernels.py"
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


GENERIC = ("Case", "Entry", "Plan", "Progress", "Step", "Work")
"""Names that say nothing alone: at most one class has each, others are qualified (NttPlan, MsmPlan)."""


def test_generic_names_are_qualified():
    classes = defaultdict(list)
    for path, tree in modules(rf"class _*({'|'.join(GENERIC)})\b"):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name.lstrip("_") in GENERIC:
                classes[node.name.lstrip("_")].append(named(path, node))
    assert {name: paths for name, paths in classes.items() if len(paths) > 1} == {}
