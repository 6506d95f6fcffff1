"""Files from strangers: whatever they say, a command succeeds or prints one line, soon, and never a traceback."""

import copy
import hashlib
import json
import os
import random
import shutil
import signal
import struct
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from accelerant.cli import main
from accelerant.errors import AccelerantError
from accelerant.nn import GPT, GPTConfig, Llama, LlamaConfig
from accelerant.nn.train import load_checkpoint, run_training, save_checkpoint
from accelerant.nn.train.config import PRESETS, preset
from accelerant.nn.train.corpus import tokenizer_path
from accelerant.privacy.dp.ledger import PrivacyLedger
from accelerant.privacy.dp.ledger.accounting import PrivacyEvent

RECORD = Path(__file__).parents[2] / "benchmarks/results/dp-cpu.json"
CPU_LIMIT_S, LIMIT_S = 10, 100  # most take well below a second, of a ledger two; alone on the machine or not
RUN = preset("tiny").replaced(
    name="micro", context=16, layers=1, heads=2, width=16, batch_size=4, microbatch=2, steps=6, validations=1,
    validation_tokens=64, sample_tokens=4,
)  # fmt: skip


def deep(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


HOSTILE = (
    None, True, False, -1, 0, 1, 3, 1 << 31, 1 << 63, -(1 << 63), 10**30, 1e308, 1.5, float("nan"), float("inf"), "",
    "0", "x" * 3000, "\x1b]0;owned\x07\x1b[31m\n\r", "\ud800", "a\0b", "/dev/zero", "../../../etc/passwd", [], [[]], {},
    {"": {}}, [1, "a"], deep(60), deep(150), [None] * 1000, {str(n): n for n in range(300)},
)  # fmt: skip


def places(value, path=()):
    """Yield the path of each part of a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def mutated(value, draw):
    """Return a copy of a JSON value with one part or two replaced, removed, added or wrapped."""
    holder = {"all": copy.deepcopy(value)}
    for _ in range(draw.choice((1, 1, 2))):
        path = draw.choice([path for path in places(holder) if path][:2000])
        parent = holder
        for key in path[:-1]:
            parent = parent[key]
        kind = draw.randrange(8)
        if kind == 0:
            del parent[path[-1]]
        elif kind == 1:
            parent[path[-1]] = [parent[path[-1]]]
        elif kind == 2 and isinstance(parent, dict):
            parent[draw.choice(("further", "__class__", "step", ""))] = copy.deepcopy(draw.choice(HOSTILE))
        elif kind == 3 and isinstance(parent[path[-1]], int):
            parent[path[-1]] = str(parent[path[-1]])
        else:
            parent[path[-1]] = copy.deepcopy(draw.choice(HOSTILE))
        if "all" not in holder:
            return None
    return holder["all"]


def mutated_tensors(tensors, draw):
    tensors = dict(tensors)
    name = draw.choice(sorted(tensors))
    x = tensors[name]
    kinds = (
        lambda: x[:0] if x.dim() else x.reshape(1, 1), lambda: torch.zeros(()), lambda: x.reshape(-1),
        lambda: x.to(torch.int64), lambda: x.bool(), lambda: x.double(), lambda: x.to(torch.complex64),
        lambda: torch.full_like(x, 127), lambda: x.to(torch.float8_e4m3fn) if x.is_floating_point() else -x,
        lambda: torch.randint(0, 255, x.shape, dtype=torch.uint8), lambda: torch.cat([x.reshape(-1)] * 2),
        lambda: -torch.ones_like(x, dtype=torch.int64) << 40,
    )  # fmt: skip
    kind = draw.randrange(len(kinds) + 3)
    if kind < len(kinds):
        tensors[name] = kinds[kind]()
    elif kind == len(kinds):
        del tensors[name]
    elif kind == len(kinds) + 1:
        tensors[f"{name}.more"] = x
    else:
        tensors[draw.choice(sorted(tensors))] = x
    return tensors


# --- good files ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with one good file of each kind."""
    folder = tmp_path_factory.mktemp("good")
    text = folder / "text.txt"
    text.write_text("".join(f"the {n}th line of some text, for learning\n" for n in range(200)))

    class Stop:
        def __getattr__(self, name):
            return lambda *_, **__: None

        def records(self, records):
            if records[-1].step == 3:
                os.kill(os.getpid(), signal.SIGINT)

    cpu = torch.device("cpu")
    run = RUN.replaced(data=(str(text),))
    run_training(run, folder / "run", cpu, progress=Stop())
    shutil.copytree(folder / "run", folder / "finished")
    Stop.records = lambda *_: None
    run_training(run, folder / "finished", cpu, progress=Stop())
    with pytest.raises(SystemExit):
        main(["data", "prepare", str(text), "--out", str(folder / "bytes.tokens"), "--tokenizer", "bytes"])
    with pytest.raises(SystemExit):
        main(["data", "prepare", str(text), "--out", str(folder / "bpe.tokens"), "--vocab-size", "270"])
    GPT(GPTConfig(vocab_size=64, context=16, layers=1, heads=2, width=16)).save_pretrained(folder / "gpt")
    with PrivacyLedger(folder / "ledger.jsonl", unit="record") as ledger:
        ledger.record(PrivacyEvent("gaussian", 1.0, sample_rate=0.1, sampling="poisson", count=3))
        ledger.record(PrivacyEvent("laplace", 2.0, note="some"))
        ledger.describe(delta=1e-6, units=100)
    shutil.copy(RECORD, folder / "record.json")
    small = {"vocab_size": 64, "context": 16, "layers": 1, "heads": 2, "kv_heads": 1, "width": 16, "hidden": 32}
    Llama(LlamaConfig(**small)).save_pretrained(folder / "llama", max_shard_bytes=4000)
    return folder


def change_json(path, draw):
    path.write_text(json.dumps(mutated(json.loads(path.read_text()), draw)))


def resume(folder, draw, which):
    run = folder / ("finished" if which == "summary.json" else "run")
    if which == "tensors":
        tensors, document = load_checkpoint(run / "checkpoint.safetensors")
        save_checkpoint(run / "checkpoint.safetensors", mutated_tensors(tensors, draw), document)
    elif which == "document":
        tensors, document = load_checkpoint(run / "checkpoint.safetensors")
        save_checkpoint(run / "checkpoint.safetensors", tensors, mutated(document, draw))
    elif which == "metrics.jsonl":
        lines = (run / which).read_text().splitlines()
        lines[0] = json.dumps(mutated(json.loads(lines[0]), draw))
        (run / which).write_text("\n".join(lines))
    else:
        change_json(run / which, draw)
    return ["train", "--resume", str(run), "--json"] if draw.random() < 0.7 else ["train", "--resume", str(run)]


def token_file(folder, draw, command):
    path = folder / draw.choice(("bytes.tokens", "bpe.tokens"))
    data = path.read_bytes()
    length = struct.unpack_from("<I", data, 12)[0]
    text = json.dumps(mutated(json.loads(data[48 : 48 + length]), draw)).encode()
    header = struct.pack("<8sII32s", b"ACLTOKEN", 1, len(text), hashlib.sha256(text).digest()) + text
    path.write_bytes(header[:4096].ljust(4096, b"\0") + data[4096:])
    if command == "train":
        options = ["--steps", "1", "--device", "cpu", "--json", "--batch-size", "1", "--out", str(folder / "out")]
        return ["train", "--data", str(path), *options]
    return ["data", "info", str(path), *draw.choice(([], ["--check"], ["--json"]))]


def tokens(folder, draw):
    path = folder / "bytes.tokens"
    data = bytearray(path.read_bytes())
    for _ in range(2000):
        data[draw.randrange(4096, len(data))] = draw.randrange(256)
    path.write_bytes(data)
    return ["train", "--data", str(path), "--steps", "1", "--device", "cpu", "--json", "--out", str(folder / "out")]


def tokenizer(folder, draw):
    path = tokenizer_path(folder / "bpe.tokens")
    content = json.loads(path.read_text())
    path.write_text(json.dumps(mutated(content, draw)))
    return ["data", "prepare", str(folder / "text.txt"), "--out", str(folder / "o.tokens"), "--tokenizer", str(path)]


def model_config(folder, draw, kind):
    names = ("config.json", "model.safetensors.index.json")[: 1 + (kind == "llama")]
    change_json(folder / kind / draw.choice(names), draw)
    return (GPT if kind == "gpt" else Llama, folder / kind)


def model_tensors(folder, draw):
    path = folder / "gpt" / "model.safetensors"
    save_file({k: v.contiguous().clone() for k, v in mutated_tensors(load_file(path), draw).items()}, path)
    return (GPT, folder / "gpt")


def raw_header(folder, draw, name):
    """Change the header of a safetensors file itself: offsets, shapes, dtypes."""
    path = folder / name
    data = path.read_bytes()
    length = struct.unpack_from("<Q", data)[0]
    text = json.dumps(mutated(json.loads(data[8 : 8 + length]), draw)).encode()
    size = draw.choice((len(text), len(text), len(text), 0, 1 << 40, (1 << 64) - 1))
    path.write_bytes(struct.pack("<Q", size) + text + data[8 + length :])
    return (GPT, folder / "gpt") if name.startswith("gpt") else ["train", "--resume", str(folder / "run"), "--json"]


def ledger(folder, draw):
    """Change a record of a privacy ledger, and chain the lines again."""
    path, chain, lines = folder / "ledger.jsonl", "0" * 64, []
    records = [json.loads(line)["record"] for line in path.read_text().splitlines()]
    records[draw.randrange(len(records))] = mutated(draw.choice(records), draw)
    for record in records:
        canonical = json.dumps(record, sort_keys=True, separators=(",", ":"))
        chain = hashlib.sha256(f"{chain}{canonical}".encode()).hexdigest()
        lines.append(json.dumps({"record": record, "chain": chain}, separators=(",", ":")))
    path.write_text("\n".join(lines) + "\n")
    (folder / "ledger.jsonl.head").unlink(missing_ok=True)
    return ["privacy", "statement", str(path), *draw.choice(([], ["--json"], ["--markdown"]))]


def sample(folder, draw):
    """Change what a model is read from: of a run, or of Hugging Face's format."""
    path = folder / draw.choice(("run", "finished", "gpt", "llama"))
    names = ["config.json"] + (["tokenizer.json"] if path.name in ("gpt", "llama") else [])
    if "tokenizer.json" in names:
        shutil.copy(tokenizer_path(folder / "bpe.tokens"), path / "tokenizer.json")
    change_json(path / draw.choice(names), draw)
    options = draw.choice(([], ["--json"], ["--prompt", "the"]))
    return ["sample", str(path), "--tokens", "4", "--device", "cpu", *options]


def record(folder, draw):
    content = json.loads((folder / "record.json").read_text())
    content["rows"] = content["rows"][:3]
    (folder / "old.json").write_text(json.dumps(content))
    (folder / "record.json").write_text(json.dumps(mutated(content, draw)))
    return ["bench", "compare", *(str(folder / name) for name in ("old.json", "record.json"))]


CASES = {
    "ledger": ledger,
    "record": record,
    "config.json": lambda folder, draw: resume(folder, draw, "config.json"),
    "document": lambda folder, draw: resume(folder, draw, "document"),
    "tensors": lambda folder, draw: resume(folder, draw, "tensors"),
    "summary.json": lambda folder, draw: resume(folder, draw, "summary.json"),
    "metrics.jsonl": lambda folder, draw: resume(folder, draw, "metrics.jsonl"),
    "sample": sample,
    "token info": lambda folder, draw: token_file(folder, draw, "info"),
    "token train": lambda folder, draw: token_file(folder, draw, "train"),
    "tokens": tokens,
    "tokenizer.json": tokenizer,
    "gpt config": lambda folder, draw: model_config(folder, draw, "gpt"),
    "llama config": lambda folder, draw: model_config(folder, draw, "llama"),
    "model tensors": model_tensors,
    "model header": lambda folder, draw: raw_header(folder, draw, "gpt/model.safetensors"),
    "checkpoint header": lambda folder, draw: raw_header(folder, draw, "run/checkpoint.safetensors"),
}  # fmt: skip


class TooSlow(BaseException):
    pass


def outcome(start, capfd, tmp_path, monkeypatch):
    """Run a command, or load a model, and return what is wrong with the way it ended; "" if nothing is."""
    monkeypatch.chdir(tmp_path)

    monkeypatch.setitem(PRESETS, "tiny", PRESETS["tiny"].replaced(validation_tokens=1024, sample_tokens=8))
    timers = [(signal.ITIMER_REAL, signal.SIGALRM, LIMIT_S), (signal.ITIMER_PROF, signal.SIGPROF, CPU_LIMIT_S)]
    before = [signal.signal(number, Mock(side_effect=TooSlow)) for _, number, _ in timers]
    for timer, _, limit in timers:
        signal.setitimer(timer, limit)
    capfd.readouterr()
    status = 0
    try:
        if isinstance(start, tuple):
            start[0].from_pretrained(start[1])
        else:
            main(start)
    except SystemExit as ended:
        status = ended.code or 0
    except AccelerantError as error:
        return "" if isinstance(start, tuple) and len(str(error)) < 2000 else f"not caught: {error!r}"
    except TooSlow:
        return "hangs"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:500]
    finally:
        for (timer, number, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
    output, errors = capfd.readouterr()
    wrong = [char for char in output + errors if not char.isprintable() and char != "\n"]
    last = [line for line in errors.splitlines() if line.startswith("accelerant: ")]
    known = "not finite" in errors or "out of memory" in errors or "must be" in errors  # the last: an unsupported model
    failed = {2: True, 1: known}.get(status)
    differs = status == 1 and output and not errors  # of `bench compare`: another record, and a row that is missing
    if status == 0 or differs:
        return f"control characters {wrong}" if wrong else ""
    if not failed or len(last) < 1 or not errors.splitlines()[-1].startswith("accelerant: "):
        return f"status {status}: {errors[-400:]!r}"
    if wrong or "Traceback" in errors or len(errors) > 4000:
        return f"error stream: {errors[:400]!r}"
    return ""


def attack(kind, seeds, good, capfd, tmp_path, monkeypatch):
    found = []
    for seed in seeds:
        folder = tmp_path / f"{seed}"
        shutil.copytree(good, folder)
        draw = random.Random(f"{kind} {seed}")
        wrong = outcome(CASES[kind](folder, draw), capfd, tmp_path, monkeypatch)
        if wrong:
            found.append(f"seed {seed}: {wrong}")
        shutil.rmtree(folder)
    assert not found, "\n".join(found)


@pytest.mark.sample(9, 2)
@pytest.mark.parametrize("kind", CASES)
def test_crafted_files_end_in_one_line(kind, good, capfd, tmp_path, monkeypatch):
    attack(kind, range(2), good, capfd, tmp_path, monkeypatch)


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.search(20)
@pytest.mark.parametrize("kind", CASES)
def test_many_crafted_files_end_in_one_line(kind, good, capfd, tmp_path, monkeypatch, rng, record_property):
    attack(kind, [rng.randrange(2**32) for _ in range(10)], good, capfd, tmp_path, monkeypatch)
    record_property("files", 10)
