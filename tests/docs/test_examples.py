"""The programs and notebooks of examples/ run, and show what they promise."""

import importlib.util
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from requirements import require_module

EXAMPLES = Path(__file__).parents[2] / "examples"
SHOWN = {
    "neural_op": ["the sum is there too: True; gradient: True", "add_rms_norm_fwd", "linear_cross_entropy_fwd"],
    "patch_hugging_face": ["ops.rms_norm", "first loss 6.2"],
    "private_training": ["Unit of privacy: example", "accuracy on 1,000 other rows: 9"],
    "groth16_proof": ["valid: True", "valid for another public value: False", "both at once: True", "reading: True"],
    "own_kernel": ["equal to NumPy: True", "sm_75: ", "sm_120: "],
    "private_inference": [
        "2 parties, any 2: same classes: True, below one unit in the last place: True",
        "3 parties, any 2: same classes: True, below one unit in the last place: True",
    ],
    "ray_served_model": ["replicas: 2", "the same seed, the same tokens: True"],
    "train_from_python": ["tokens", "training loss", "def "],
}
NEEDS = {"patch_hugging_face": "transformers", "private_training": "dp_accounting", "ray_served_model": "ray"}
NOTEBOOKS = sorted(path.name for path in EXAMPLES.glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_a_program_shows_what_it_promises(name, monkeypatch, capsys):
    if name in NEEDS:
        require_module(NEEDS[name])
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    shown = capsys.readouterr().out
    for text in SHOWN[name]:
        assert text in shown
    if name == "patch_hugging_face":
        first, last = re.search(r"first loss (\S+) and patched \1; last (\S+) and \2$", shown, re.MULTILINE).groups()
        assert float(last) < 0.5 * float(first)


@pytest.fixture
def notebooks():
    spec = importlib.util.spec_from_file_location("notebooks", EXAMPLES.parent / "scripts" / "notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_and_has_its_outputs(name, notebooks, monkeypatch):
    require_module("transformers")
    monkeypatch.chdir(EXAMPLES.parent)
    stored = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))
    done = notebooks.run(stored)
    kinds = [[output["output_type"] for output in cell.get("outputs", ())] for cell in stored["cells"]]
    assert [[output["output_type"] for output in cell.get("outputs", ())] for cell in done["cells"]] == kinds
    assert any(kinds)


def test_a_cell_shows_what_it_prints_and_its_last_value(notebooks):
    names = {}
    assert notebooks.run_cell("x = 2\nprint(x)", names) == [
        {"output_type": "stream", "name": "stdout", "text": ["2\n"]},
    ]
    assert notebooks.run_cell("x + 1", names)[0]["data"] == {"text/plain": ["3"]}
    assert notebooks.run_cell("None", names) == []
    with pytest.raises(NameError):
        notebooks.run_cell("absent", names)


def test_every_example_is_tested_and_listed():
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    programs = {path.stem for path in EXAMPLES.glob("*.py")}
    assert programs == set(SHOWN) | {"private_digits", "private_text"}  # tested in test_privacy_pages.py
    assert len(NOTEBOOKS) == 2
    for path in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")):
        assert f"]({path.name})" in listed, path.name
