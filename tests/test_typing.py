"""A type checker knows the public names, which are imported on first use."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PROGRAM = """\
import accelerant as acl
import torch
reveal_type(acl.ops.gelu(torch.ones(2)))
reveal_type(acl.zk.groth16.Prover)
reveal_type(acl.privacy.dp.make_private)
acl.nn.GPT, acl.ledger(), acl.Accelerator("CUDA").relu([1.0]), acl.privacy.dp.PrivacyLedger
acl.ops.no_op, acl.no_name, acl.Accelerator().no_method, acl.zk.no_zk, acl.privacy.no_part, acl.privacy.dp.no_dp
"""


@pytest.mark.slow
def test_mypy_knows_the_public_names_and_reports_others(tmp_path):
    (tmp_path / "user.py").write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "mypy",
        str(tmp_path / "user.py"),
    ]  # with the settings and the cache of `make lint`
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    revealed = [line.partition("Revealed type is ")[2] for line in ran.stdout.splitlines() if "Revealed" in line]
    assert revealed[0] == '"torch._tensor.Tensor"', ran.stdout + ran.stderr
    assert "-> accelerant.zk.groth16.prover.Prover" in revealed[1]
    assert "-> accelerant.privacy.dp.training.private.PrivateTraining" in revealed[2]
    errors = [line for line in ran.stdout.splitlines() if "error:" in line]
    assert len(errors) == 6, ran.stdout
    assert all("user.py:7:" in line and "no_" in line for line in errors), ran.stdout
