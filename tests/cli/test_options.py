"""The options of all commands: one vocabulary, spelled in words; wrong names exit 2; other and earlier spellings."""

import re
from pathlib import Path

import pytest
import typer

from accelerant.cli.app import build_app
from accelerant.cli.help import ALIASES, RENAMED
from commands import status

ROOT = Path(__file__).parents[2]

VOCABULARY = """
address against arch batch-size block budget-seconds burst ceilings certify chat check compare compiled config context
cpu csv data days define delta deterministic device directory dtype encoder engine entry epochs export fast-math
federated field filter fmad ftz gpus grace-days heads host include index init-from insecure-known-tau insecure-noise
int8 interval json key-file launches layers learning-rate ledger list log margin markdown max-grad-norm max-restarts
max-rows max-seconds method metric microbatch model name noise-multiplier nvrtc odd op optimize out overlap overwrite
payload port prec-div prec-sqrt precision preset private profile prompt ptx ptxas quick rate ray recompute
reduce-dtype replicas report results resume sample-rate scope seed serves shared size state state-url steps stop suite
sweep sweep-to tables target-epsilon temperature template threads tls-certificate tls-key tokenizer tokens top-k top-p
trace url verify vocab-size width workers write yes
"""
"""Every option; a new one is added here once no word of the list says the same."""


def commands():
    def below(words, command):
        for name in command.list_commands(typer.Context(command)) if hasattr(command, "list_commands") else ():
            yield from below([*words, name], command.get_command(typer.Context(command), name))
        if not hasattr(command, "list_commands"):
            yield words, command

    return list(below([], typer.main.get_command(build_app())))


def options(command):
    return [one for one in command.params if one.param_type_name == "option"]


def run(capsys, *arguments):
    return status(*arguments), capsys.readouterr().err


def test_every_option_is_a_word_of_the_vocabulary():
    found = {option.opts[0][2:] for _, command in commands() for option in options(command)}
    known = set(VOCABULARY.split())
    assert not known - found


def test_no_concept_has_two_spellings():
    for words, command in commands():
        for option in options(command):
            first, *others = [name for name in option.opts if name.startswith("--")]
            assert first.startswith("--"), words
            assert others == ([ALIASES[first]] if first in ALIASES else []), words
            assert not re.search(r"_|-s$|^--(lr|q|sigma|path|folder|output|limit|backend|ops)$", first), (words, first)
            assert first not in RENAMED or first == "--verify", words
            assert all(name == "--no-" + first[2:] for name in option.secondary_opts), words


def test_each_earlier_spelling_has_its_row_in_the_page_of_names_that_changed():
    page = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| command line: ")]
    for old, new in RENAMED.items():
        assert any(f"`{old}`" in before and f"`{new}`" in now for _, before, now, _ in rows), old


def test_a_close_name_of_a_command_is_said_once(capsys):
    status, errors = run(capsys, "traim")
    assert (status, errors.count("'train'")) == (2, 1)


def test_an_unknown_option_exits_2(capsys):
    for words, _ in commands():
        status, errors = run(capsys, *words, "--nope")
        assert (status, "nope" in errors) == (2, True), words


def test_an_unknown_choice_exits_2(capsys, tmp_path, monkeypatch):
    """The values of options that name something: a device, an op, a dtype, a state, and so on."""
    names = {"--device", "--op", "--dtype", "--suite", "--state", "--method", "--engine", "--preset", "--precision"}
    names |= {"--reduce-dtype", "--log", "--template", "--arch", "--scope", "--against", "--tokenizer"}
    monkeypatch.chdir(tmp_path)
    product = [str(ROOT / f"tests/vectors/formats/bn254/product.{kind}") for kind in ("zkey", "wtns")]
    given = {  # what else a command needs to look at the option
        "bench check": [str(ROOT / "benchmarks/floors.toml")],
        "compile": [],
        "data prepare": [str(ROOT / "docs/zk.md"), "--out", "out.tokens"],
        "generate": ["none", "a"],
        "keys create": ["--name", "x"],
        "privacy calibrate": ["--target-epsilon", "3", "--delta", "1e-5", "--sample-rate", "0.1", "--steps", "9"],
        "privacy epsilon": ["--noise-multiplier", "1", "--delta", "1e-5", "--sample-rate", "0.1", "--steps", "9"],
        "doctor": ["--certify"],
        "rag ask": ["why"],
        "rag index": [str(ROOT / "docs")],
        "sample": ["runs/none"],
        "search query": ["none.npy", "--index", "none"],
        "tune": ["--list"],
        "zk prove": product,
        "zk prove-many": product,
    }
    tried = 0
    for words, command in commands():
        for option in options(command):
            if option.opts[0] in names and not (words[0] == "compile" and option.opts[0] == "--arch"):
                extra = given.get(" ".join(words), [])
                status, errors = run(capsys, *words, *extra, option.opts[0], "nope")
                assert status == 2, (words, option.opts[0], errors)
                assert "nope" in errors, (words, option.opts[0], errors)
                tried += 1
    assert tried > 20


@pytest.mark.parametrize(("line", "said"), [
    ("tune --op nope --list", "--op: no op 'nope'; there are add, "),
    ("tune --op gelu,softmax --list",
     "--op takes one value at a time, got 'gelu,softmax': write --op gelu --op softmax"),
    ("doctor --certify --op matmul,msm", "write --op matmul --op msm"),
    ("bench neural --dtype bf16,fp32", "write --dtype bf16 --dtype fp32"),
    ("bench bandwidth --size 1MiB,4MiB", "write --size 1MiB --size 4MiB"),
    ("bench all --against torch,compile", "write --against torch --against compile"),
    ("zk prove a b --device cuda:0,cuda:1", "write --device cuda:0 --device cuda:1"),
    ("train --lr 1 --learning-rate=2", "--learning-rate and --lr are the same: give one"),
    ("sample runs/x --device cpu --backend cpu", "--device and --backend are the same: give one"),
    ("tune --limit-s 3", "--limit-s is --max-seconds now"),
    ("tune --jobs 3", "--jobs is --workers now"),
    ("tune --table t.json", "--table is --out now"),
    ("bench gelu --budget-s 3", "--budget-s is --budget-seconds now"),
    ("bench gelu --dtypes bf16", "--dtypes is --dtype now"),
    ("bench bandwidth --sizes=1MiB", "--sizes is --size now"),
    ("doctor --certify --ops matmul", "--ops is --op now"),
    ("doctor --verify x.json", "--verify is --check now"),
    ("data info x.tokens --verify", "--verify is --check now"),
    ("zk prove a b --no-self-verify", "--no-self-verify is --no-verify now"),
    ("jobs list --limit 3", "--limit is --max-rows now"),
    ("profile --limit 3 x.py", "--limit is --max-rows now"),
    ("cache warm --limit-s 3", "No such option"),
    ("train --output_dir x", "no option --output_dir: write --out"),
    ("train --max-steps 3", "no option --max-steps: write --steps"),
    ("sample runs/x --max_new_tokens=3", "no option --max_new_tokens: write --tokens"),
    ("privacy calibrate --epsilon 3", "no option --epsilon: write --target-epsilon"),
    ("devices --epsilon 3", "No such option"),
    ("version", "no command version: write accelerant --version"),
    ("groth16 prove a b", "no command groth16: write accelerant zk --help"),
    ("zk fullprove a b", "no command fullprove: write accelerant zk prove"),
    ("bench gelo", "no suite or op 'gelo': close are gelu"),
    ("bench xyzzy", "no suite or op 'xyzzy'; there are neural, "),
])  # fmt: skip
def test_a_list_with_commas_and_an_earlier_spelling_name_the_form_of_today(capsys, line, said):
    status, errors = run(capsys, *line.split())
    assert status == 2
    assert said in " ".join(errors.split())


def test_free_texts_may_have_commas(capsys, tmp_path):
    (tmp_path / "k.cu").write_text("template <typename T, int n> __global__ void scale(T* x) { *x *= n; }")
    status, errors = run(capsys, "compile", str(tmp_path / "k.cu"), "--arch", "sm_90", "--entry", "scale<float, 4>")
    assert "one value at a time" not in errors
    assert status in (0, 1)  # without NVRTC


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "fp16", "half", "fp32", "float32"])
def test_dtypes_are_understood_by_their_short_names(capsys, name):
    assert run(capsys, "tune", "--list", "--backend", "cpu", "--dtype", name)[0] == 0
