"""The search for false refusals of private training, with small models on the CPU."""

import sys

import pytest

from benchmarks import private_separation


@pytest.mark.slow
def test_all_parts_run(monkeypatch, capsys):
    arguments = ["--device", "cpu", "--budget-seconds", "0", "--least", "56", "--seeds", "1", "--steps", "11"]
    monkeypatch.setattr(sys, "argv", ["private_separation", *arguments])
    private_separation.main()  # its status counts times, which mean nothing here
    said = capsys.readouterr().out
    assert "ordinary models: 0 of 56 refused or not checked" in said
    assert "mixtures: 0 of 26 missed" in said
