import pytest
from train_workers import small

from accelerant.nn.train.config import PRESETS


@pytest.fixture(autouse=True)
def _quick(one_thread):
    pass


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"the {n}th line of some text, for learning\n" for n in range(200)))
    return path


@pytest.fixture
def accelerant(command_line, tmp_path, monkeypatch):
    """Runs a command line as command_line does, in a folder of its own, with a small preset."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(PRESETS, "tiny", PRESETS["tiny"])
    small()
    return command_line
