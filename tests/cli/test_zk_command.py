import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from accelerant.algebra.curve.parameters import family_of
from accelerant.cli import zk_prove
from accelerant.errors import OutOfMemory
from accelerant.zk.formats import R1cs, Witness, Zkey, write_wtns
from accelerant.zk.groth16 import Proof, VerificationKey, verify

VECTORS = Path(__file__).parents[1] / "vectors"
RANGE = VECTORS / "groth16" / "range"
PRODUCT = VECTORS / "formats" / "bn254"
R, Q = family_of("bn254").r, family_of("bn254").q


@pytest.fixture
def run(command_line):
    return functools.partial(command_line, "zk")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of its own, where the command runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_prove_and_verify(run, folder):
    status, output, _ = run("prove", RANGE / "circuit.zkey", RANGE / "witness.wtns", "p.json", "q.json")
    assert status == 0
    for stage in ("key: points", "quotient", "sum B2", "verification", "all"):
        assert stage in output
    assert output.endswith("p.json and q.json: verified, 18 public inputs, bn254\n")
    assert sorted(path.name for path in folder.iterdir()) == ["p.json", "q.json"]
    assert (folder / "q.json").read_text() == (RANGE / "public.json").read_text()
    assert run("verify", RANGE / "verification_key.json", "q.json", "p.json") == (0, "valid\n", "")


def test_prove_names_its_files_as_snarkjs_does(run, folder):
    status, output, _ = run("prove", PRODUCT / "product.zkey", PRODUCT / "product.wtns", "--json")
    assert status == 0
    facts = json.loads(output)
    assert (facts["proof"], facts["public"], facts["public_inputs"], facts["verified"]) == (
        "proof.json", "public.json", 2, True,
    )  # fmt: skip
    assert set(facts["seconds"]) > {"witness", "quotient", "proof", "verification"}
    proof = Proof.from_json((folder / "proof.json").read_text(), (folder / "public.json").read_text())
    assert verify(VerificationKey.from_zkey(PRODUCT / "product.zkey"), proof.public, proof)


def wrong_witness(folder):
    with Witness.open(PRODUCT / "product.wtns") as witness:
        values = witness.values.copy()
    values[-1, 0] += 1
    write_wtns(folder / "wrong.wtns", "bn254", values)
    return folder / "wrong.wtns"


def test_a_wrong_witness_writes_nothing(run, folder):
    wrong = wrong_witness(folder)
    (folder / "q.json").write_text("before")
    status, output, error = run("prove", PRODUCT / "product.zkey", wrong, "p.json", "q.json")
    assert (status, output) == (2, "")
    assert "does not verify and is not returned" in error
    assert sorted(path.name for path in folder.iterdir()) == ["q.json", "wrong.wtns"]
    assert (folder / "q.json").read_text() == "before"
    assert run("prove", PRODUCT / "product.zkey", wrong, "p.json", "q.json", "--no-verify")[0] == 0
    key = PRODUCT / "verification_key.json"
    assert run("verify", key, "q.json", "p.json")[0] == 1


def test_both_files_or_none(run, folder, monkeypatch):
    """The second cannot be written: the first is as it was."""
    (folder / "p.json").write_text("before")
    real = os.open

    def fails(path, *args, **options):
        if Path(path).name.startswith(".q.json"):
            raise OSError(28, "No space left on device", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", fails)
    status, _, error = run("prove", PRODUCT / "product.zkey", PRODUCT / "product.wtns", "p.json", "q.json")
    assert (status, error) == (2, f"accelerant: [Errno 28] No space left on device: '{folder / 'q.json'}'\n")
    assert (folder / "p.json").read_text() == "before"
    assert [path.name for path in folder.iterdir()] == ["p.json"]


@pytest.mark.parametrize(("targets", "match"), [
    (("p.json", "p.json"), "another name"), (("w.wtns", "q.json"), "also to be read"),
    (("./sub/../k.zkey", "q.json"), "also to be read"), (("nowhere/p.json", "q.json"), "does not exist"),
    (("sub", "q.json"), "is a directory"),
])  # fmt: skip
def test_targets_are_looked_at_first(run, folder, targets, match):
    shutil.copy(PRODUCT / "product.zkey", folder / "k.zkey")
    shutil.copy(PRODUCT / "product.wtns", folder / "w.wtns")
    (folder / "sub").mkdir()
    before = {path.name: path.stat().st_size for path in folder.iterdir()}
    status, _, error = run("prove", "k.zkey", "w.wtns", *targets)
    assert status == 2
    assert match in error
    assert {path.name: path.stat().st_size for path in folder.iterdir()} == before


def every_command(target):
    """Commands that write `target`, and what else they need."""
    key, witness = PRODUCT / "product.zkey", PRODUCT / "product.wtns"
    return [
        ("prove", key, witness, target, "q.json"),
        ("prove", key, witness, "p.json", target),
        ("export-vk", key, target),
        ("setup", PRODUCT / "product.r1cs", target, "--insecure-known-tau"),
    ]


def refused_as_it_is(run, folder, target, match):
    def files():  # without the time of access, which a look at a symlink may change
        stats = {path.name: path.lstat() for path in folder.iterdir()}
        return {name: (stat.st_ino, stat.st_mode, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}

    before = files()
    for command in every_command(target):
        status, output, error = run(*command)
        assert (status, output) == (2, ""), command
        assert match in error
        assert files() == before


def test_what_is_no_regular_file_is_never_replaced(run, folder):
    """As root `zk prove ... /dev/null` would make /dev/null a file for everyone."""
    os.mkfifo(folder / "pipe")
    refused_as_it_is(run, folder, "pipe", "pipe is a device, a pipe or a socket")
    (folder / "link").symlink_to("pipe")
    refused_as_it_is(run, folder, "link", "link is a device, a pipe or a socket")


def test_names_that_no_file_can_have_are_found_first(run, folder):
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    refused_as_it_is(run, folder, "a", "a is a loop of symlinks")
    refused_as_it_is(run, folder, "x" * 300, "cannot be written: File name too long")


def test_the_longest_name_is_written(run, folder):
    name = "\u00e9" * 127
    assert run("export-vk", PRODUCT / "product.zkey", name)[0] == 0
    assert [path.name for path in folder.iterdir()] == [name]


def test_symlinks_to_files_stay(run, folder):
    (folder / "kept").mkdir()
    (folder / "kept" / "real.json").write_text("before")
    (folder / "p.json").symlink_to("kept/real.json")
    (folder / "q.json").symlink_to("kept/new.json")
    assert run("prove", PRODUCT / "product.zkey", PRODUCT / "product.wtns", "p.json", "q.json")[0] == 0
    assert (folder / "p.json").is_symlink()
    assert (folder / "q.json").is_symlink()
    assert sorted(path.name for path in (folder / "kept").iterdir()) == ["new.json", "real.json"]
    assert run("verify", PRODUCT / "verification_key.json", "q.json", "p.json")[0] == 0
    (folder / "z.zkey").symlink_to("kept/z.zkey")
    assert run("setup", PRODUCT / "product.r1cs", "z.zkey", "--insecure-known-tau")[0] == 0
    assert (folder / "z.zkey").is_symlink()


def test_names_that_no_terminal_can_print(run, folder):
    name = os.fsdecode(b"\xff\x1b[2J.json")
    status, output, _ = run("export-vk", PRODUCT / "product.zkey", name)
    assert (status, output) == (0, r"\udcff\x1b[2J.json: 2 public inputs, bn254" + "\n")


# --- verify ----------------------------------------------------------------------------------------------------------
def mutate(change):
    texts = {name: json.loads((RANGE / f"{name}.json").read_text()) for name in ("verification_key", "public", "proof")}
    change(texts)
    return texts


def changed_text(texts, folder):
    paths = []
    for name, value in texts.items():
        paths.append(folder / f"{name}.json")
        paths[-1].write_text(json.dumps(value))
    return paths


def on_the_twist():
    """A point of G2's curve that is out of the subgroup."""
    curve = family_of("bn254").g2
    for c0 in range(1, 50):
        y = curve.coordinates.sqrt(curve.right_side((c0, 1)))
        if y is not None:
            return [[str(c0), "1"], [str(part) for part in y], ["1", "0"]]
    raise AssertionError("no such point among fifty")


def set_item(name, *path):
    def setter(new):
        def change(texts):
            place = texts[name]
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = new(place[path[-1]])

        return change

    return setter


MUTATIONS = {
    "public + 1": set_item("public", 3)(lambda old: str((int(old) + 1) % R)),
    "public + r": set_item("public", 3)(lambda old: str(int(old) + R)),
    "one public less": lambda texts: texts["public"].pop(),
    "pi_a negated": set_item("proof", "pi_a", 1)(lambda old: str(Q - int(old))),
    "pi_a + q": set_item("proof", "pi_a", 0)(lambda old: str(int(old) + Q)),
    "pi_a off the curve": set_item("proof", "pi_a", 0)(lambda old: str(int(old) ^ 1)),
    "pi_b off the curve": set_item("proof", "pi_b", 0, 1)(lambda old: str(int(old) ^ 1)),
    "pi_b out of the subgroup": set_item("proof", "pi_b")(lambda _: on_the_twist()),
    "pi_c exchanged": lambda texts: texts["proof"].update(pi_c=texts["proof"]["pi_a"]),
    "another curve": set_item("proof", "curve")(lambda _: "bls12381"),
    "no proof": lambda texts: texts["proof"].clear(),
    "the key's alpha negated": set_item("verification_key", "vk_alpha_1", 1)(lambda old: str(Q - int(old))),
    "the key's IC off the curve": set_item("verification_key", "IC", 2, 0)(lambda old: str(int(old) ^ 1)),
    "the key's IC exchanged": lambda texts: texts["verification_key"]["IC"].reverse(),
    "no key": lambda texts: texts["verification_key"].clear(),
    "the key's gamma at infinity": set_item("verification_key", "vk_gamma_2")(
        lambda _: [["0", "0"], ["1", "0"], ["0", "0"]]
    ),
}
MALFORMED = {
    "public + r": "public.json[3] is ", "one public less": "public.json has 17 inputs; the verification key is for 18",
    "pi_a + q": "proof.json: pi_a[0] is ", "pi_a off the curve": "proof.json: pi_a, ",
    "pi_b off the curve": "proof.json: pi_b, ", "pi_b out of the subgroup": "is on bn254_g2 but not in its subgroup",
    "another curve": "is not on bls12_381_g1",
    "no proof": 'proof.json: "protocol" must be ', "no key": 'verification_key.json: "protocol" must be ',
    "the key's IC off the curve": "verification_key.json: IC[2], ",
    "the key's gamma at infinity": "verification_key.json: vk_gamma_2 is infinity",
}  # fmt: skip
"""Mutants that are no key, input or proof, and what the error names."""


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_changed_is_not_valid(run, folder, name):
    paths = changed_text(mutate(MUTATIONS[name]), folder)
    status, output, error = run("verify", *paths)
    if name in MALFORMED:
        assert (status, output) == (2, "")
        assert MALFORMED[name] in error
        assert run("verify", *paths, "--json") == (2, "", error)
        return
    reason = "the equation of the pairings does not hold"
    assert (status, output, error) == (1, f"invalid: {reason}\n", "")
    assert run("verify", *paths, "--json") == (
        1, f'{{"valid": false, "reason": "{reason}", "forgeable": null}}\n', "",
    )  # fmt: skip


def test_what_is_not_changed_is_valid(run, folder):
    assert run("verify", *changed_text(mutate(lambda _: None), folder), "--json") == (
        0,
        '{"valid": true, "reason": "", "forgeable": null}\n',
        "",
    )


def test_files_that_are_not_there(run, folder):
    status, _, error = run("verify", RANGE / "verification_key.json", "none.json", RANGE / "proof.json")
    assert (status, error) == (2, "accelerant: none.json cannot be read: No such file or directory\n")
    assert run("verify", folder, folder, folder)[0] == 2
    assert run("prove", "none.zkey", "none.wtns")[0] == 2
    assert run("verify", RANGE / "verification_key.json")[0] == 2


def test_texts_that_have_no_end(run, folder, monkeypatch):
    """A pipe that nobody writes to, a device, and a file that is larger than any of these."""
    os.mkfifo(folder / "pipe")
    key, public, proof = (RANGE / f"{name}.json" for name in ("verification_key", "public", "proof"))
    for endless in ("pipe", "/dev/zero"):
        for command in (
            ("verify", endless, public, proof),
            ("verify", key, endless, proof),
            ("verify", key, public, endless),
            ("calldata", endless, proof),
            ("calldata", public, endless),
        ):
            status, _, error = run(*command)
            assert (status, error) == (2, f"accelerant: {endless} cannot be read: it is not a regular file\n")
    with (folder / "large.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    status, _, error = run("verify", key, public, "large.json")
    assert status == 2
    assert "large.json cannot be read: it has 67,108,865 bytes, more than 67,108,864" in error


VERIFY = ["verify", *(RANGE / f"{name}.json" for name in ("verification_key", "public", "proof"))]
PROVE = ["prove", PRODUCT / "product.zkey", PRODUCT / "product.wtns", "p.json", "q.json"]


def process(arguments, *, before="", environment=None, **streams):
    """Run the command line in a process, after some statements; return its status and errors."""
    code = f"{before}\nimport accelerant.cli\naccelerant.cli.main()"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | (environment or {})
    command = [sys.executable, "-c", code, "zk", *map(str, arguments)]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE} | streams
    done = subprocess.run(command, env=variables, text=True, timeout=120, check=False, **streams)
    return done.returncode, done.stderr


@pytest.mark.parametrize(("arguments", "unbuffered"), [
    (VERIFY, ""),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in ((PROVE, "1"), ([*VERIFY, "--json"], ""))),
])  # fmt: skip
def test_a_full_standard_output_says_nothing_of_the_proof(folder, arguments, unbuffered):
    with open("/dev/full", "w", encoding="utf-8") as full:
        status, error = process(arguments, stdout=full, environment={"PYTHONUNBUFFERED": unbuffered})
    assert (status, error) == (2, "accelerant: [Errno 28] No space left on device: 'standard output'\n")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [PROVE, VERIFY, ["verify", "-h"]])
def test_a_closed_standard_output_says_nothing_of_the_proof(folder, arguments):
    reading, writing = os.pipe()
    os.close(reading)
    assert process(arguments, stdout=writing) == (2, "")
    os.close(writing)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["numpy", "typer", "llvmlite"])
def test_a_missing_library_says_nothing_of_the_proof(folder, library):
    status, error = process(VERIFY, before=f"import sys; sys.modules[{library!r}] = None")
    assert status == 2
    assert library in error


@pytest.mark.slow
def test_full_error_stream(folder):
    with open("/dev/full", "w", encoding="utf-8") as full:
        assert process(["verify", "none.json", "none.json", "none.json"], stderr=full)[0] == 2
        assert process(["inspect", PRODUCT / "product.wtns"], stderr=full)[0] == 0


@pytest.mark.parametrize(
    "error", [ImportError("no module"), MemoryError(), OSError("disk"), RecursionError(), OutOfMemory("no")]
)
def test_only_a_verdict_ends_verify_with_1(run, monkeypatch, error):
    monkeypatch.setattr("accelerant.zk.groth16.verify", Mock(side_effect=error))
    status, output, errors = run(*VERIFY)
    assert (status, output) == (2, "")
    assert str(error) in errors


@pytest.mark.slow
def test_a_full_disk_leaves_nothing_and_is_named(folder):
    """A limit of the process stands for the disk's."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))"
    for arguments, name in (
        (PROVE, f"{folder}/p.json"),
        (["export-vk", PROVE[1], "k.json"], f"{folder}/k.json"),
        (["setup", PRODUCT / "product.r1cs", "c.zkey", "--insecure-known-tau"], "c.zkey"),
    ):
        status, error = process(arguments, before=limit)
        last = error.splitlines()[-1]  # the limit may also keep kernels out of the disk cache, which is a warning
        assert (status, last) == (2, f"accelerant: [Errno 27] File too large: '{name}'")
        assert not list(folder.iterdir())


def test_a_key_that_anyone_can_forge_for_is_told(run, folder):
    """snarkjs writes such keys too: before the first contribution delta2 is gamma2."""
    data = (PRODUCT / "product.zkey").read_bytes()
    with Zkey.open(PRODUCT / "product.zkey") as zkey:
        delta2, gamma2 = (words.astype("<u8").tobytes() for words in (zkey.delta2, zkey.gamma2))
    (folder / "fresh.zkey").write_bytes(data.replace(delta2, gamma2))
    warning = "accelerant: warning: {}: gamma2 equals delta2: nobody has contributed"
    status, _, error = run("export-vk", "fresh.zkey", "vk.json")
    assert (status, error.startswith(warning.format("fresh.zkey"))) == (0, True)
    command = ("prove", "fresh.zkey", PRODUCT / "product.wtns", "p.json", "q.json", "--no-verify")
    status, _, error = run(*command)
    assert (status, error.startswith(warning.format("fresh.zkey"))) == (0, True)
    status, _, error = run("verify", "vk.json", "q.json", "p.json")
    assert error.startswith(warning.format("vk.json"))
    for each in (
        ("export-vk", "fresh.zkey", "vk.json"),
        command,
        ("verify", "vk.json", "q.json", "p.json"),
        ("inspect", "fresh.zkey"),
    ):
        _, output, error = run(*each, "--json")
        assert error == ""
        assert json.loads(output)["forgeable"].startswith("gamma2 equals delta2")
    assert "forgeable          gamma2 equals delta2: nobody" in run("inspect", "fresh.zkey")[1]
    assert "forgeable          no\n" in run("inspect", PRODUCT / "product.zkey")[1]


# --- the others ------------------------------------------------------------------------------------------------------
def test_export_vk(run, folder):
    assert run("export-vk", RANGE / "circuit.zkey", "vk.json")[:2] == (0, "vk.json: 18 public inputs, bn254\n")
    assert (folder / "vk.json").read_text() == (RANGE / "verification_key.json").read_text()
    assert json.loads(run("export-vk", RANGE / "circuit.zkey", "vk.json", "--json")[1]) == {
        "key": "vk.json", "curve": "bn254", "public_inputs": 18, "forgeable": None,
    }  # fmt: skip


def test_calldata(run):
    status, output, _ = run("calldata", RANGE / "public.json", RANGE / "proof.json")
    a, b, c, public = json.loads(f"[{output}]")
    proof = json.loads((RANGE / "proof.json").read_text())
    assert status == 0
    assert [int(value, 16) for value in a] == [int(value) for value in proof["pi_a"][:2]]
    assert [[int(value, 16) for value in pair] for pair in b] == [
        [int(pair[1]), int(pair[0])] for pair in proof["pi_b"][:2]
    ]
    assert [int(value, 16) for value in c] == [int(value) for value in proof["pi_c"][:2]]
    assert [int(value, 16) for value in public] == [
        int(value) for value in json.loads((RANGE / "public.json").read_text())
    ]
    assert json.loads(run("calldata", RANGE / "public.json", RANGE / "proof.json", "--json")[1]) == {
        "calldata": [a, b, c, public]
    }


def test_setup(run, folder):
    status, _, error = run("setup", PRODUCT / "product.r1cs", "c.zkey")
    assert status == 2
    assert "say --insecure-known-tau" in error
    assert not list(folder.iterdir())
    status, output, _ = run("setup", PRODUCT / "product.r1cs", "c.zkey", "--insecure-known-tau")
    with R1cs.open(PRODUCT / "product.r1cs") as r1cs:
        sizes = f"{r1cs.n_constraints} constraints, {r1cs.n_wires} signals"
    assert (status, output) == (0, f"c.zkey: {sizes}. For tests only\n")
    assert run("prove", "c.zkey", PRODUCT / "product.wtns", "p.json", "q.json")[0] == 0
    assert run("export-vk", "c.zkey", "vk.json")[0] == 0
    assert run("verify", "vk.json", "q.json", "p.json")[0] == 0
    assert run("verify", PRODUCT / "verification_key.json", "q.json", "p.json")[0] == 1


@pytest.mark.slow
def test_proving_imports_no_torch(folder):
    """The command line whole, in a process of its own."""
    code = (
        "import sys, accelerant.cli\n"
        "try:\n"
        "    accelerant.cli.main(sys.argv[1:])\n"
        "except SystemExit as ended:\n"
        "    assert not ended.code, ended.code\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'triton', 'cuda'}))\n"
    )
    for arguments in (
        ["prove", PRODUCT / "product.zkey", PRODUCT / "product.wtns", "p.json", "q.json"],
        ["verify", PRODUCT / "verification_key.json", "q.json", "p.json"],
    ):
        command = [sys.executable, "-c", code, "zk", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "[]"


def test_plain_arguments_need_no_parser(folder):
    """What proves without typer, whose start costs as much as the proof."""
    code = (
        "import sys, accelerant.cli\n"
        "try:\n"
        "    accelerant.cli.main(sys.argv[1:])\n"
        "except SystemExit as ended:\n"
        "    assert not ended.code, ended.code\n"
        "print(sorted({'typer', 'pydantic', 'torch'} & set(sys.modules)))\n"
    )
    files = [PRODUCT / "product.zkey", PRODUCT / "product.wtns", "p.json", "q.json"]
    done = subprocess.run(
        [sys.executable, "-c", code, "zk", "prove", *map(str, files), "--json"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts, modules = done.stdout.splitlines()
    assert json.loads(facts)["proof"] == "p.json"
    assert modules == "[]"


@pytest.mark.parametrize(("arguments", "wanted"), [
    (["k", "w"], ("k", "w", "proof.json", "public.json", {})),
    (["k", "w", "p"], ("k", "w", "p", "public.json", {})),
    (["--json", "k", "w", "--no-verify", "p", "q"],
     ("k", "w", "p", "q", {"json_output": True, "verify": False})),
    (["k", "w", "p", "--no-verify", "--verify"], ("k", "w", "p", "public.json", {"verify": True})),
    ([], None),
    (["k"], None),
    (["k", "w", "p", "q", "more"], None),
    (["k", "w", "--help"], None),
    (["k", "w", "--device", "cpu"], None),
    (["k", "w", "--"], None),
    (["k", "w", "-h"], None),
])  # fmt: skip
def test_which_arguments_are_plain(arguments, wanted):
    found = zk_prove.plain(arguments)
    if wanted is None:
        assert found is None
    else:
        *paths, flags = wanted
        assert found.args == tuple(map(Path, paths))
        assert found.keywords == flags


@pytest.mark.slow
@pytest.mark.parametrize("option", [(), ("--device", "cpu")])
def test_what_typer_does_is_done_without_it(folder, option):
    """A reader who has enough, and output that is closed: no words, and the same status."""
    files = [PRODUCT / "product.zkey", PRODUCT / "product.wtns"]
    prove = [sys.executable, "-u", "-m", "accelerant", "zk", "prove", *map(str, files), *option]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(prove, stdout=writing, stderr=subprocess.PIPE, timeout=120, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (2, b"")
    (folder / "proof.json").unlink()
    closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *prove]
    assert subprocess.run(closed, timeout=120, check=False).returncode == 0
    assert (folder / "proof.json").is_file()


def test_several_devices_are_documented(run):
    assert "cuda:1" in run("prove", "--help")[1]
