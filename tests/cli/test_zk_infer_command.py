"""`accelerant zk infer`: files in, files out, one sentence, exit statuses 0, 1 and 2."""

import functools
import json

import numpy as np
import pytest

import commands
from accelerant.zk.inference import IntegerNetwork, Layer, Network
from accelerant.zk.inference.verifier import IDENTITY

NETWORK = IntegerNetwork(
    Network((Layer(3, 2, 1 << 17, IDENTITY),)), [np.array([[1, 2, 3], [4, 5, 6]], np.int8)], [[0, 640]]
)


run = functools.partial(commands.run, "zk infer")


@pytest.fixture
def folder(tmp_path, monkeypatch, capsys):
    """A folder with a network, its commitment, an input, the output and the proof."""
    monkeypatch.chdir(tmp_path)
    NETWORK.save("network")
    np.save("input.npy", np.array([[100, -50, 25]], np.int8))
    code, text, _ = run(capsys, "commit", "network", "commitment")
    assert code == 0
    assert text.startswith("commitment: 3-2, digest ")
    code, text, _ = run(capsys, "prove", "network", "input.npy", "output.npy", "proof")
    assert (code, text.partition(":")[0]) == (0, "output.npy and proof")
    return tmp_path


def test_a_valid_proof_is_one_sentence(folder, capsys):
    code, text, _ = run(capsys, "verify", "commitment", "input.npy", "output.npy", "proof")
    assert code == 0
    assert text.startswith("valid: the network 3-2 with digest ")
    assert text.endswith(" maps [100, -50, 25] to [1, 7]\n")
    assert np.load("output.npy").tolist() == [[1, 7]] == NETWORK(np.load("input.npy")).tolist()


def test_json(folder, capsys):
    for arguments in (
        ["commit", "network", "commitment"],
        ["prove", "network", "input.npy", "output.npy", "proof"],
        ["verify", "commitment", "input.npy", "output.npy", "proof"],
    ):
        code, text, _ = run(capsys, *arguments, "--json")
        facts = json.loads(text)
        assert code == 0
        assert facts["network"] == "3-2"
        assert facts["zero_knowledge"] is False
        assert len(facts["digest"]) == 64
    assert facts["valid"] is True
    assert (facts["input"], facts["output"]) == ([[100, -50, 25]], [[1, 7]])


@pytest.mark.parametrize("changed", ["input.npy", "output.npy", "proof"])
def test_a_false_statement_ends_with_1(folder, capsys, changed):
    data = bytearray((folder / changed).read_bytes())
    data[-1] ^= 1
    (folder / changed).write_bytes(data)
    code, text, _ = run(capsys, "verify", "commitment", "input.npy", "output.npy", "proof")
    assert code == 1
    assert text.startswith("invalid: ")
    code, text, _ = run(capsys, "verify", "commitment", "input.npy", "output.npy", "proof", "--json")
    assert code == 1
    assert json.loads(text)["valid"] is False


def test_malformed_files_end_with_2_and_are_named(folder, capsys):
    verify = ["verify", "commitment", "input.npy", "output.npy", "proof"]
    huge = b"\x93NUMPY\x01\x00\x46\x00" + b"{'descr': '|i1', 'fortran_order': False, 'shape': (1, 10000000000)}".ljust(
        70
    )
    wrong = {
        "announces the shape (1, 10000000000), and has 3 numbers": huge + b"abc",
        "input.npy is no .npy file": b"no array",
        "input.npy has float32, not int8": None,
    }
    for message, data in wrong.items():
        if data is None:
            np.save("input.npy", np.ones((1, 3), np.float32))
        else:
            (folder / "input.npy").write_bytes(data)
        for arguments in (verify, ["prove", "network", "input.npy", "other.npy", "other"]):
            code, _, error = run(capsys, *arguments)
            assert code == 2
            assert message in error
    assert not (folder / "other").exists()
    np.save("input.npy", np.ones((1, 4), np.int8))
    for arguments in (verify, ["prove", "network", "input.npy", "other.npy", "other"]):
        code, _, error = run(capsys, *arguments)
        assert code == 2
        assert "input.npy has the shape (1, 4); this network needs (batch, 3), with a batch of at least 1" in error
    code, _, error = run(capsys, "verify", "network", "input.npy", "output.npy", "proof")
    assert code == 2
    assert "network: the model commitment is invalid: this is no model commitment" in error
    code, _, error = run(capsys, "commit", "commitment", "new")
    assert code == 2
    assert "commitment: an integer network begins with" in error
    assert not (folder / "new").exists()
    for arguments in (["verify", "absent", *verify[2:]], ["commit", "absent", "new"]):
        code, _, error = run(capsys, *arguments)
        assert code == 2
        assert error.startswith("accelerant: absent cannot be read")


HEADERS = [
    "{'descr': '|i1', 'fortran_order': False, 'shape': (0x" + "f" * 6000 + ",)}",
    f"{{'descr': '|i1', 'fortran_order': False, 'shape': (0, {1 << 70})}}",
    "{'descr': '|i1', 'fortran_order': False, 'shape': (" + "1, " * 100 + "3)}",
    "{'descr': '|i1', 'fortran_order': False, 'shape': (True, 3)}",
    "{'descr': (), 'fortran_order': False, 'shape': (1, 3)}",
    "(" * 5000,
    "-" * 9000 + "1",
    "1" + "+1j" * 3000,
    "{{}: 1}",
    "{1: 1, 'descr': 2, 'shape': 3}",
]


def test_crafted_headers_end_with_one_line(folder, capsys):
    for header in HEADERS:
        (folder / "input.npy").write_bytes(
            b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header.encode() + b"abc"
        )
        code, text, error = run(capsys, "verify", "commitment", "input.npy", "output.npy", "proof")
        assert (code, text, error.count("\n")) == (2, "", 1)
        assert error.startswith("accelerant: input.npy ")
        assert len(error) < 250


@pytest.mark.parametrize("flat", [False, True])
def test_images(tmp_path, monkeypatch, capsys, flat):
    monkeypatch.chdir(tmp_path)
    layer = Layer(2, 3, 1 << 15, IDENTITY, image=(2, 3), kernel=(2, 2))
    network = IntegerNetwork(Network((layer,)), [np.arange(24, dtype=np.int8).reshape(3, 2, 2, 2)], [[0, 0, 0]])
    network.save("network")
    x = np.arange(24, dtype=np.int8).reshape(2, 2, 2, 3)
    np.save("input.npy", x.reshape(2, -1) if flat else x)
    assert run(capsys, "commit", "network")[0] == 0
    assert run(capsys, "prove", "network", "input.npy")[0] == 0
    assert (np.load("output.npy") == network(x)).all()
    code, text, _ = run(capsys, "verify", "commitment", "input.npy", "output.npy", "proof")
    assert code == 0
    shape = "2x12" if flat else "2x2x2x3"
    assert text.endswith(f", 11, ...] of shape {shape} to [0, 0, 1, 1, 2, 2, ...] of shape 2x3x1x2\n")
    np.save("input.npy", x[:, :, :, :2])
    code, _, error = run(capsys, "verify", "commitment", "input.npy", "output.npy", "proof")
    assert code == 2
    assert "this network needs (batch, 12) or (batch, 2, 2, 3)" in error


def test_no_input_is_overwritten(folder, capsys):
    before = (folder / "network").read_bytes()
    code, _, error = run(capsys, "prove", "network", "input.npy", "output.npy", "network")
    assert code == 2
    assert "network is to be written" in error
    assert (folder / "network").read_bytes() == before
