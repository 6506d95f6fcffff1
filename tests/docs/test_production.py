"""The commands of docs/production.md that begin with "$" run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "production.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ accelerant (.*)$", PAGE, re.MULTILINE)

RUNS = """
import json, sys
from accelerant.cli.app import main

for command in json.loads(sys.argv[1]):
    try:
        main(command)
    except SystemExit as ended:
        assert not ended.code, (command, ended.code)
"""


def test_the_page_has_commands():
    assert len(COMMANDS) >= 5


@pytest.mark.slow
def test_its_commands_run_one_after_the_other(tmp_path):
    """In a process of its own: the tests may have made Triton an interpreter here."""
    environment = {**os.environ, "ACCELERANT_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", RUNS, json.dumps([shlex.split(line) for line in COMMANDS])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gelu_fwd" in done.stdout
