"""`accelerant privacy`: numbers, JSON, and exit statuses."""

import functools
import json
import re

import pytest

import commands
from accelerant.privacy.dp.ledger import PrivacyLedger
from accelerant.privacy.dp.ledger.accounting import PrivacyEvent, spent

MNIST = ("--sample-rate", str(256 / 60000), "--steps", "14062", "--delta", "1e-5")


status = functools.partial(commands.status, "privacy")


@pytest.mark.slow
def test_epsilon(capsys):
    assert status("epsilon", "--noise-multiplier", "1.1", *MNIST) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "epsilon 2.38169 at delta 1e-05 (PLD)"
    assert lines[1] == "cross-check by RDP: 2.59656"
    assert "Poisson sampling, one record added or removed" in lines[2]


def test_epsilon_as_json(capsys):
    assert status("epsilon", "--noise-multiplier", "1.1", *MNIST, "--method", "rdp", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (round(found["epsilon"], 4), round(found["epsilon_pld"], 4)) == (2.5966, 2.3817)
    assert (found["method"], found["sampling"], found["neighbouring"]) == ("rdp", "poisson", "add-or-remove-one")
    assert status("epsilon", "--sigma", "1.1", "--q", MNIST[1], *MNIST[2:], "--method", "rdp", "--json") == 0
    assert json.loads(capsys.readouterr().out) == found  # the short names


def test_no_noise_is_infinite_and_says_why(capsys):
    assert status("epsilon", "--noise-multiplier", "0", *MNIST) == 0
    assert "epsilon infinite at delta 1e-05 (PLD): 14062 releases (gaussian) have no noise" in capsys.readouterr().out
    assert status("epsilon", "--noise-multiplier", "0", *MNIST, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] == found["epsilon_rdp"] == "inf"
    assert "no noise" in found["reason"]


@pytest.mark.slow
def test_calibrate_shows_digits_that_are_enough(capsys):
    run = ("--sample-rate", "1", "--steps", "3", "--delta", "1e-5")
    assert status("calibrate", "--target-epsilon", "2", *run) == 0
    shown = float(capsys.readouterr().out.splitlines()[0].removeprefix("noise multiplier "))
    assert spent([PrivacyEvent("gaussian", shown, count=3)], 1e-5).epsilon <= 2
    assert status("calibrate", "--target-epsilon", "2", *run, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["noise_multiplier"] <= shown <= 1.00002 * found["noise_multiplier"]
    assert found["epsilon"] <= 2 < found["epsilon_rdp"]


def test_a_target_out_of_reach_fails(capsys):
    assert status("calibrate", "--target-epsilon", "1e9", "--sample-rate", "1", "--steps", "1", "--delta", "1e-5") == 1
    assert "it is no limit" in capsys.readouterr().err


@pytest.fixture
def ledger(tmp_path):
    path = tmp_path / "privacy.jsonl"
    with PrivacyLedger(path, unit="user") as found:
        found.record(PrivacyEvent("gaussian", 1.0, secure=True))
    return path


def test_statement(ledger, capsys):
    assert status("statement", str(ledger)) == 0
    text = capsys.readouterr().out
    assert "Unit of privacy: user" in text
    assert "Epsilon: 4.37718 at delta 1e-05" in text
    assert status("statement", str(ledger), "--delta", "1e-6", "--json") == 0
    assert json.loads(capsys.readouterr().out)["delta"] == 1e-6
    assert status("statement", str(ledger), "--markdown") == 0
    assert capsys.readouterr().out.startswith("# Privacy statement\n")


def test_a_delta_is_not_rounded_to_another(capsys):
    arguments = ("--noise-multiplier", "1", "--sample-rate", "1", "--steps", "1", "--delta", "1.23456749e-5")
    assert status("epsilon", *arguments) == 0
    assert "at delta 1.23456749e-05 (PLD)" in capsys.readouterr().out


def test_the_statement_is_at_the_delta_that_was_chosen(ledger, capsys):
    with PrivacyLedger(ledger, unit="user") as found:
        found.describe(delta=1e-7)
    assert status("statement", str(ledger)) == 0
    assert "at delta 1e-07" in capsys.readouterr().out
    assert status("statement", str(ledger), "--json") == 0
    stated = json.loads(capsys.readouterr().out)
    assert (stated["delta"], stated["epsilon"]) == (1e-7, found.epsilon(1e-7))


def test_what_is_no_ledger_exits_2(ledger, tmp_path, capsys):
    ledger.write_bytes(ledger.read_bytes().replace(b"user", b"unit"))
    assert status("statement", str(ledger)) == 2
    assert "line 1: its checksum does not follow" in capsys.readouterr().err
    assert status("statement", str(tmp_path / "nothing")) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert status("statement", str(tmp_path)) == 2


@pytest.mark.parametrize(("changed", "message"), [
    ({"--noise-multiplier": "-1"}, "--noise-multiplier must be 0 or more.* got -1.0"),
    ({"--noise-multiplier": "nan"}, "got nan"),
    ({"--sample-rate": "0"}, r"--sample-rate must be in \(0, 1\], got 0.0"),
    ({"--steps": "0"}, "--steps must be from 1 to .*, got 0"),
    ({"--delta": "1"}, r"--delta must be in \(0, 1\), got 1.0"),
    ({"--method": "clt"}, "pld or rdp, got 'clt'"),
    ({"--noise-multiplier": "one"}, "--noise-multiplier"),
    ({"--noise-multiplier": None}, "--noise-multiplier"),
])  # fmt: skip
def test_wrong_usage_exits_2(capsys, changed, message):
    given = {"--noise-multiplier": "1", "--sample-rate": "0.1", "--steps": "1", "--delta": "1e-5"} | changed
    words = [word for pair in given.items() if pair[1] is not None for word in pair]
    assert status("epsilon", *words) == 2
    assert re.search(message, capsys.readouterr().err)


def test_more_wrong_usage(ledger, capsys):
    run = ("--sample-rate", "0.1", "--steps", "1", "--delta", "1e-5")
    assert status("calibrate", "--target-epsilon", "0", *run) == 2
    assert "--target-epsilon must be above 0, and finite, got 0.0" in capsys.readouterr().err
    assert status("statement", str(ledger), "--json", "--markdown") == 2
    assert status("statement", str(ledger), "--delta", "7") == 2
    assert "--delta must be in (0, 1), got 7.0" in capsys.readouterr().err
