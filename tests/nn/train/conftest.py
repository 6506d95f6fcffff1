import os
import signal

import pytest
import torch

from accelerant.nn.train import run_training
from micro_run import MICRO

TEXT = "".join(f"the {n}th line of some text, for learning\n" for n in range(100))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def run(text):
    return MICRO.replaced(data=(str(text),), seed=3)


@pytest.fixture
def cpu():
    return torch.device("cpu")


class Watcher:
    """Records what it is told, and may act on a step."""

    def __init__(self, at_step=None, action=None):
        self.told = []
        self.notes = []
        self.steps = []
        self.shares = []
        self._at_step = at_step
        self._action = action

    def phase(self, text):
        self.told.append(text)

    def note(self, text):
        self.notes.append(text)

    def advance(self, share, text=""):
        self.shares.append((share, text))

    def begin(self, *, done, total, device, predicted_bytes):
        self.told.append((done, total, device))

    def records(self, records):
        self.steps += [record.step for record in records]
        if self._at_step in self.steps and self._action:
            action, self._action = self._action, None
            action()

    def end(self):
        self.told.append("end")


@pytest.fixture
def watcher():
    return Watcher


@pytest.fixture(scope="session")
def straight(tmp_path_factory):
    """The folder of the uninterrupted run, which no test changes."""
    return _trained(tmp_path_factory.mktemp("straight"), Watcher())


@pytest.fixture(scope="session")
def interrupted_once(tmp_path_factory):
    """The folder of a run that was interrupted at step 5, which tests copy."""
    watch = Watcher(5, lambda: os.kill(os.getpid(), signal.SIGINT))
    return _trained(tmp_path_factory.mktemp("interrupted"), watch)


@pytest.fixture(scope="session")
def of_words(tmp_path_factory):
    """The folder of a run whose tokens are a BPE's, which no test changes."""
    text = "".join(f"le {n}\u1d49 café, süß und groß\n" for n in range(200))
    folder = tmp_path_factory.mktemp("words")
    return _trained(folder, Watcher(), text, tokenizer="bpe", vocab_size=300, steps=2)


def _trained(folder, watch, text=TEXT, **changes):
    path = folder / "text.txt"
    path.write_text(text)
    run = MICRO.replaced(data=(str(path),), seed=3, **changes)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as in each test: the sums' order follows
    run_training(run, folder / "run", torch.device("cpu"), progress=watch)
    torch.set_num_threads(before)
    return folder / "run"
