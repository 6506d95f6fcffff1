"""Names that changed name the new one."""

import functools
import importlib
import re
from pathlib import Path

import pytest

import accelerant
from accelerant import _renamed
from accelerant._renamed import missing_arguments, missing_names, renamed_arguments, renamed_names, understood_arguments
from refusals import assert_raises

PAGE = Path(__file__).parents[1] / "docs" / "migration.md"


@functools.cache
def registered():
    """What the modules of the package register: (owner, old argument) and (module, old name) -> new."""
    root = Path(accelerant.__file__).parent
    for path in root.rglob("*.py"):
        if path.name != "_renamed.py" and re.search("renamed_|@INSECURE", path.read_text(encoding="utf-8")):
            parts = path.relative_to(root.parent).with_suffix("").parts
            importlib.import_module(".".join(parts).removesuffix(".__init__"))
    return dict(_renamed.ARGUMENTS), dict(_renamed.NAMES)


def rows():
    """The two cells of each row of the page, but for those of the command line and of numbers by position."""
    cells = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()[6:]]
    return [(old, new) for old, new in cells if not old.startswith("command line") and "by position" not in old]


def test_every_old_spelling_is_on_the_page():
    arguments, names = registered()
    assert len(arguments) > 40
    assert len(names) > 10
    page = rows()
    for (owner, old), new in arguments.items():
        named = rf"\b{owner.rpartition('.')[2]}\b"
        found = [row for row in page if re.search(rf"\b{old}=", row[0]) and re.search(named, row[0])]
        assert any(new.partition("=")[0].partition(",")[0] in row[1] for row in found), f"{owner}({old}=) is {new}"
    for (module, old), new in names.items():
        found = [row for row in page if re.search(rf"\b{old}\b", row[0])]
        assert any(new.rpartition(".")[2] in row[1] for row in found), f"{module}.{old} is {new}"


def test_every_spelling_on_the_page_is_refused():
    """In the left column each name, and each argument of one, is registered; `x=[...]` is a value, not a name."""
    arguments, names = registered()
    old_names = {old for _, old in names} | {"draws"}  # an attribute, which raises by itself
    old_arguments = {old for _, old in arguments}
    owners = {owner.rpartition(".")[2] for owner, _ in arguments}
    for left, _ in rows():
        for spelling in re.findall(r"`([^`]+)`", left):
            if spelling.startswith("--"):
                continue
            name, _, given = spelling.partition("(")
            last = name.rpartition(".")[2]
            if "=" in name:
                assert name.partition("=")[0] in old_arguments, spelling
            elif last not in old_names and "=[" not in given:
                assert not last or last in owners, spelling
                assert set(re.findall(r"(\w+)=", given)) <= old_arguments, spelling


@pytest.fixture
def registry_of_its_own(monkeypatch):
    monkeypatch.setattr(_renamed, "ARGUMENTS", {})
    monkeypatch.setattr(_renamed, "NAMES", {})


@pytest.mark.usefixtures("registry_of_its_own")
def test_an_old_argument_of_a_function_or_class_names_the_new_one():
    @renamed_arguments(lr="learning_rate")
    def train(learning_rate=1.0):
        return learning_rate

    @renamed_arguments(clip="max_grad_norm")
    class Config:
        def __init__(self, max_grad_norm=1.0):
            self.max_grad_norm = max_grad_norm

    assert train(0.5) == train(learning_rate=0.5) == 0.5
    assert Config(max_grad_norm=2.0).max_grad_norm == 2.0
    assert_raises(TypeError, r"train\(\) has no argument lr= any more: it is learning_rate= now", train, lr=1)
    assert_raises(TypeError, r"Config\(\) has no argument clip= any more: it is max_grad_norm= now", Config, clip=1)


def test_another_usual_name_of_an_argument_is_understood():
    @understood_arguments(lr="learning_rate")
    class Config:
        def __init__(self, learning_rate=1.0):
            self.learning_rate = learning_rate

    assert Config(lr=2.0).learning_rate == Config(2.0).learning_rate == 2.0
    with pytest.raises(TypeError, match=r"Config\(\) got learning_rate= and lr=, which are the same: give one"):
        Config(lr=1.0, learning_rate=1.0)


@pytest.mark.usefixtures("registry_of_its_own")
def test_an_old_name_of_a_module_names_the_new_one():
    get = renamed_names("accelerant.sums", {"Total": "accelerant.sums.Sum"}, {"other": 1}.__getitem__)
    assert_raises(AttributeError, r"accelerant\.sums\.Total is accelerant\.sums\.Sum now", get, "Total")
    assert get("other") == 1


@pytest.mark.usefixtures("registry_of_its_own")
def test_a_module_without_getattr_keeps_its_error():
    assert_raises(AttributeError, "has no attribute 'other'", lambda: renamed_names("accelerant.sums", {})("other"))


@pytest.mark.parametrize(("path", "words"), [
    ("accelerant.gelu", "write accelerant.ops.gelu"),
    ("accelerant.GPT", "write accelerant.nn.GPT"),
    ("accelerant.optim", "write accelerant.nn.optim"),
    ("accelerant.dp", "write accelerant.privacy.dp"),
    ("accelerant.asarray", "arrays of these libraries are taken as they are"),
    ("accelerant.RawKernel", "write accelerant.kernel"),
    ("accelerant.ops.batch_norm", "write torch.nn.functional.batch_norm"),
    ("accelerant.ops.bmm", "write torch.bmm"),
    ("accelerant.privacy.PrivacyEngine", "write accelerant.privacy.dp.PrivacyEngine"),
    ("accelerant.privacy.dp.BatchMemoryManager", "write microbatch= of dp.make_private"),
    ("accelerant.privacy.dp.get_noise_multiplier", r"write dp.calibrate\(target_epsilon=, delta="),
    ("accelerant.privacy.mpc.split", "write accelerant.privacy.mpc.shamir.split"),
    ("accelerant.privacy.he.generate_keypair", "write he.paillier.keygen"),
    ("accelerant.zk.GF", r"write zk.field\(name\)"),
    ("accelerant.zk.intt", r"write zk.ntt\(x, inverse=True\)"),
    ("accelerant.zk.Prover", "write accelerant.zk.groth16.Prover"),
    ("accelerant.zk.groth16.fullProve", r"write groth16.prove\(key, witness\)"),
])  # fmt: skip
def test_a_name_of_another_library_or_module_says_what_to_write(path, words):
    module, _, name = path.rpartition(".")
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute '{name}'.*{words}"):
        getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("module", ["", ".ops", ".zk", ".zk.groth16", ".privacy", ".privacy.dp", ".privacy.he"])
def test_a_name_of_no_library_keeps_its_error(module):
    for name in ("no_such_name", "_private", "Tensor"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'$"):
            getattr(importlib.import_module(f"accelerant{module}"), name)


@pytest.mark.usefixtures("registry_of_its_own")
def test_missing_names_pass_on_what_is_there():
    assert missing_names("accelerant.sums", {}, {"other": 1}.__getitem__)("other") == 1
    with pytest.raises(AttributeError, match=r"accelerant\.sums\.Total is Sum now$"):
        missing_names("accelerant.sums", {"Total": "sum"}, renamed_names("accelerant.sums", {"Total": "Sum"}))("Total")


def test_an_argument_of_another_library_says_what_to_write():
    @missing_arguments(bf16='precision="bfloat16"')
    def train(precision="float32"):
        return precision

    assert train("fp8") == train(precision="fp8") == "fp8"
    assert_raises(TypeError, r'train\(\) has no argument bf16=: write precision="bfloat16"', train, bf16=True)


def test_a_function_of_numpy_that_an_accelerator_lacks_says_what_to_write():
    with accelerant.Accelerator(device="cpu") as accelerator:
        with pytest.raises(
            AttributeError, match=r"no attribute 'exp': write accelerant\.fuse of a function that calls"
        ):
            accelerator.exp  # noqa: B018
        with pytest.raises(AttributeError, match=r"'Accelerator' object has no attribute 'nope'$"):
            accelerator.nope  # noqa: B018
