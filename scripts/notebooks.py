"""Run notebooks and keep what their cells print, without Jupyter.

usage: scripts/notebooks.py [NOTEBOOK ...]        by default those of examples/

A cell's output is what it prints, and the value of its last expression. An error ends the run; nothing is written then.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def run_cell(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell in a namespace; return its outputs in the notebook format."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    value = None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    return outputs


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return a notebook with the outputs of its cells, run in order in one namespace."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell = {**cell, "execution_count": None, "outputs": run_cell("".join(cell["source"]), names)}
        cells.append(cell)
    return {**notebook, "cells": cells}


def main() -> None:
    """Run the notebooks from the repository's root, and write their outputs."""
    paths = [Path(name).resolve() for name in sys.argv[1:]] or sorted((ROOT / "examples").glob("*.ipynb"))
    os.chdir(ROOT)
    for path in paths:
        text = json.dumps(run(json.loads(path.read_text(encoding="utf-8"))), indent=1, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
