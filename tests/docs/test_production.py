"""The commands of docs/production.md that begin with "$" run."""

import json
import re
import shlex
from pathlib import Path

import pytest

from processes import printed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "production.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ accelerant (.*)$", PAGE, re.MULTILINE)

RUNS = """
import json, os, sys
from accelerant.cli.app import main

os.environ["ACCELERANT_CACHE_DIR"] = sys.argv[2]

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
    assert "gelu_fwd" in printed(RUNS, json.dumps([shlex.split(line) for line in COMMANDS]), str(tmp_path))
