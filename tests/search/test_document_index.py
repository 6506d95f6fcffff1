"""Indexes of documents: chunks, what is embedded again, faults, and the commands `rag` and `search`."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from accelerant.errors import ConfigError, FormatError, MissingFile
from accelerant.nn import Llama, LlamaConfig
from accelerant.nn.train.tokens import train_bpe_on
from accelerant.search import DocumentIndex
from nn.test_encoder import encoder_folder
from refusals import assert_raises

pytest.importorskip("qdrant_edge", reason="needs qdrant-edge-py, of the extra search")


@pytest.fixture
def encoder(tmp_path):
    folder = tmp_path / "encoder"
    folder.mkdir()
    encoder_folder(folder)
    return folder


@pytest.fixture
def library(tmp_path):
    """A folder of documents of words that the encoder knows."""
    folder = tmp_path / "library"
    (folder / "below").mkdir(parents=True)
    for name, first in (("a.txt", 0), ("b.md", 20), ("below/c.txt", 40)):
        lines = [" ".join(f"w{first + (3 * line + i) % 20}" for i in range(6)) for line in range(40)]
        (folder / name).write_text("\n".join(lines))
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0")
    return folder


@pytest.fixture
def index(tmp_path, encoder):
    with DocumentIndex(tmp_path / "index", encoder=encoder, tokens=20, overlap=5) as made:
        yield made


def test_sources_have_the_path_line_and_text_of_their_chunk(index, library):
    done = index.add(library)
    assert (done.documents, done.embedded, done.unchanged, done.removed) == (3, 3, 0, 0)
    assert [note.split("; ")[1] for note in done.skipped] == ["left out picture.png (an image)"]
    for path in ("a.txt", "b.md", "below/c.txt"):
        text = (library / path).read_text()
        for question in (text[30:80], text.splitlines()[25]):
            for source in index.sources(question, 3):
                whole = (library / source.path).read_text()
                begins = [at for at in range(len(whole)) if whole.startswith(source.text, at)]
                assert source.line in {1 + whole.count("\n", 0, at) for at in begins}
                assert -1.001 <= source.score <= 1.001


@pytest.mark.parametrize(("tokens", "overlap"), [(1, 0), (7, 6), (20, 5), (38, 0)])
def test_chunks_cover_the_text_and_overlap(tmp_path, encoder, tokens, overlap):
    words = [f"q{i:03}" for i in range(500)]
    texts = ["w1", "w1 w2\n\nw3", "  w1  ", " ".join(words), "x" * 300, "".join(f"{word}é日本\t\n" for word in words)]
    with DocumentIndex(tmp_path / "index", encoder=encoder, tokens=tokens, overlap=overlap) as index:
        for text in texts:
            at, counts = 0, []
            for line, chunk in index._chunks(text):
                found = text.index(chunk)
                assert not text[at:found].strip(), "no word is left out"
                assert line == 1 + text.count("\n", 0, found)
                at = max(at, found + len(chunk))
                counts.append(len(index.encoder.spans(chunk)))
            assert not text[at:].strip()
            assert max(counts) <= tokens


def test_only_what_changed_is_embedded_again(index, library, monkeypatch):
    index.add(library)
    embedded = []
    encode = index.encoder.encode
    monkeypatch.setattr(index.encoder, "encode", lambda texts: embedded.extend(texts) or encode(texts))
    assert index.add(library).unchanged == 3
    assert embedded == []
    (library / "b.md").write_text("w1 w2 w3")
    (library / "a.txt").unlink()
    (library / "new.txt").write_text("w7 w8 w9")
    done = index.add(library)
    assert (done.documents, done.embedded, done.unchanged, done.removed) == (3, 2, 1, 1)
    assert sorted(embedded) == ["w1 w2 w3", "w7 w8 w9"]
    assert index.sources("w1 w2 w3", 1)[0].path == "b.md"
    assert {source.path for source in index.sources("w1", 100)} == {"b.md", "new.txt", "below/c.txt"}


def test_an_index_is_of_one_encoder_and_one_size(tmp_path, index, library, encoder):
    index.add(library)
    index.close()
    with DocumentIndex(tmp_path / "index") as again:
        assert again.add(library).unchanged == 3
    assert_raises(ConfigError, "another tokens", DocumentIndex, tmp_path / "index", tokens=21)
    moved = encoder.rename(tmp_path / "moved")
    with DocumentIndex(tmp_path / "index", encoder=moved) as again:
        assert again.add(library).unchanged == 3
    encoder = moved
    other = tmp_path / "other"
    other.mkdir()
    encoder_folder(other, "roberta")
    assert_raises(ConfigError, "another encoder:", DocumentIndex, tmp_path / "index", encoder=other)
    assert_raises(FormatError, "no index of documents", DocumentIndex, library, encoder=encoder)
    for text in ("{", "[]", '{"format": 2, "encoder": "", "fingerprint": "", "tokens": 3, "overlap": 1}'):
        (tmp_path / "index" / "documents.json").write_text(text)
        assert_raises(FormatError, None, DocumentIndex, tmp_path / "index", encoder=encoder)


@pytest.mark.parametrize(("tokens", "overlap"), [(39, 0), (5, 5), (5, -1)])
def test_sizes_of_chunks_out_of_range_are_refused(tmp_path, encoder, tokens, overlap):
    with pytest.raises(ConfigError, match="chunks have 1 to 38 tokens"):
        DocumentIndex(tmp_path / "index", encoder=encoder, tokens=tokens, overlap=overlap)
    assert not (tmp_path / "index").exists()


def test_questions_and_paths_that_are_none(index, tmp_path):
    assert_raises(ConfigError, "a question is a text", index.sources, " ")
    assert_raises(MissingFile, None, index.add, tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert_raises(ConfigError, "no text", index.add, tmp_path / "empty")
    assert index.sources("w1") == []


def command(*arguments):
    done = subprocess.run([sys.executable, "-m", "accelerant", *map(str, arguments)], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


_INDEXER = """
import sys
from accelerant.search import DocumentIndex
with DocumentIndex(sys.argv[1], encoder=sys.argv[2], tokens=10) as index:
    print(flush=True)
    index.add(sys.argv[3], lambda share: print(share, flush=True) if share < float(sys.argv[4]) else sys.stdin.read())
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_an_indexing_that_is_killed_goes_on(tmp_path, encoder, library):
    for number in range(30):
        (library / f"more{number}.txt").write_text(f"w{number} " * 300 + f"w{number}")
    arguments = ["rag", "index", library, "--index", tmp_path / "index", "--encoder", encoder, "--tokens", 10]
    for written, most in ((0, "0.3"), (2, "0.9")):  # of the text, where it waits for its end
        command_line = [sys.executable, "-c", _INDEXER, tmp_path / "index", encoder, library, most]
        with subprocess.Popen(command_line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            for _ in range(1 + written):
                assert process.stdout.readline()
            time.sleep(0.05)
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL, "it had ended"
    status, output, errors = command(*arguments, "--json")
    assert status == 0, errors
    done = json.loads(output)
    assert (done["documents"], done["embedded"] + done["unchanged"]) == (33, 33)
    with DocumentIndex(tmp_path / "fresh", encoder=encoder, tokens=10) as fresh:
        assert fresh.add(library).chunks == done["chunks"]


@pytest.fixture
def model(tmp_path):
    """A folder of a tiny Llama, whose context has room for a few sources."""
    folder = tmp_path / "model"
    tokenizer = train_bpe_on(iter(["some words w1 w2 w3 for a tokenizer, and some more"] * 20), 290)
    sizes = {"context": 600, "layers": 1, "heads": 2, "kv_heads": 1, "width": 16, "hidden": 24}
    Llama(LlamaConfig(vocab_size=tokenizer.vocab_size, **sizes)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    return folder


def test_an_answer_of_a_model_comes_with_its_sources(command_line, tmp_path, encoder, library, model):
    place = ("--index", tmp_path / "index", "--device", "cpu")
    command_line("rag", "index", library, "--encoder", encoder, "--tokens", 20, *place)
    asked = ("rag", "ask", "w1 w2 w3", *place, "--model", model, "--max-tokens", 8)
    status, output, errors = command_line(*asked, "--results", 30, "--json")
    found = json.loads(output)
    assert (status, errors, len(found["sources"])) == (0, "", 30)
    assert isinstance(found["answer"], str)
    assert command_line(*asked, "--results", 30, "--json")[1] == output, "the likeliest tokens"
    status, output, _ = command_line(*asked, "--results", 2)
    assert (status, output.count("Sources:"), "[2] " in output) == (0, 1, True)
    status, _, errors = command_line("rag", "ask", "w1", *place, "--model", tmp_path / "none")
    assert (status, errors.count("\n")) == (2, 1), errors


def test_the_commands_index_and_ask(command_line, tmp_path, encoder, library):
    place = ("--index", tmp_path / "index", "--device", "cpu")
    status, output, errors = command_line("rag", "index", library, "--encoder", encoder, "--tokens", 20, *place)
    assert (status, "3 documents" in output, "picture.png" in errors) == (0, True, True), errors
    status, output, _ = command_line("rag", "index", library, *place, "--json")
    assert (status, json.loads(output)["unchanged"]) == (0, 3)
    line = (library / "b.md").read_text().splitlines()[0]
    status, output, _ = command_line("rag", "ask", line, *place, "--results", 2, "--json")
    found = json.loads(output)
    assert (status, found["answer"], len(found["sources"])) == (0, None, 2)
    status, output, _ = command_line("rag", "ask", line, *place, "--results", 1)
    assert output.startswith(f"[1] {found['sources'][0]['path']}:{found['sources'][0]['line']}")
    assert command_line("rag", "ask", line, "--index", tmp_path / "absent")[0] == 2


def test_the_command_makes_lists_that_questions_read(command_line, tmp_path, encoder):
    text = " ".join(f"w{(i * i + i // 7) % 60}" for i in range(2300))
    (tmp_path / "a.txt").write_text(text)
    place = ("--index", tmp_path / "index", "--device", "cpu")
    arguments = ("--encoder", encoder, "--tokens", 2, "--overlap", 0, "--kind", "ivf")
    status, output, errors = command_line("rag", "index", tmp_path / "a.txt", *arguments, *place, "--json")
    assert (status, json.loads(output)["chunks"] >= 1024) == (0, True), errors
    with DocumentIndex(tmp_path / "index", device="cpu") as index:
        assert (index._collection.kind, index._collection._mirror.lists is None) == ("ivf", False)
        chunk = " ".join(text.split()[:2])
        assert [source.text for source in index.sources(chunk, 1)] == [chunk]
    wrong = ("--encoder", encoder, "--index", tmp_path / "none", "--kind", "hnsw")
    status, _, errors = command_line("rag", "index", tmp_path / "a.txt", *wrong)
    assert (status, errors.count("\n"), (tmp_path / "none").exists()) == (2, 1, False), errors


def test_the_commands_search_vectors_of_files(command_line, tmp_path):
    rows = np.random.default_rng(0).standard_normal((100, 8)).astype(np.float32)
    np.save(tmp_path / "rows.npy", rows)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"n": i}) + "\n" for i in range(100)))
    place = ("--index", tmp_path / "papers")
    status, output, errors = command_line(
        "search", "index", tmp_path / "rows.npy", *place, "--payload", tmp_path / "rows.jsonl", "--json"
    )
    assert (status, json.loads(output)["first_id"]) == (0, 0), errors
    status, output, _ = command_line("search", "index", tmp_path / "rows.npy", *place, "--json")
    assert json.loads(output)["points"] == 200
    np.save(tmp_path / "queries.npy", rows[[17, 42]])
    condition = json.dumps({"must": [{"key": "n", "range": {"gte": 20}}]})
    status, output, _ = command_line(
        "search", "query", tmp_path / "queries.npy", *place, "--filter", condition, "--results", 1, "--json"
    )
    found = json.loads(output)
    assert (status, found["ids"][1], found["selected"]) == (0, [42], 80)
    assert "17 (1.0000)" in command_line("search", "query", tmp_path / "queries.npy", *place)[1]
    for arguments in (
        ("index", tmp_path / "rows.jsonl", *place), ("query", tmp_path / "queries.npy", "--index", tmp_path / "none"),
        ("query", tmp_path / "queries.npy", *place, "--filter", "{"), ("index", tmp_path / "none.npy", *place),
        ("query", "/dev/zero", *place), ("index", tmp_path / "rows.npy", *place, "--payload", "/dev/zero"),
    ):  # fmt: skip
        status, _, errors = command_line("search", *arguments)
        assert (status, errors.count("\n"), "pickle" in errors) == (2, 1, False), errors
    np.save(tmp_path / "flat.npy", rows[0])
    assert command_line("search", "index", tmp_path / "flat.npy", *place)[0] == 2
    np.save(tmp_path / "many.npy", many := np.random.default_rng(1).standard_normal((2000, 8)))
    place = ("--index", tmp_path / "lists")
    assert command_line("search", "index", tmp_path / "many.npy", *place, "--kind", "ivf")[0] == 0
    np.save(tmp_path / "one.npy", many[[77]])
    for options, exactly in ((("--nprobe", 1), False), (("--filter", '{"must_not": []}'), True)):
        found = json.loads(command_line("search", "query", tmp_path / "one.npy", *place, *options, "--json")[1])
        assert (found["ids"][0][0], found["exact"]) == (77, exactly)
    place = ("--index", tmp_path / "papers")
    for wrong, named in ((np.ones((2, 5)), ""), (np.ones((1, 0)), ""), (np.full((2, 8), np.nan), "NaN")):
        np.save(tmp_path / "wrong.npy", wrong)
        for command in ("index", "query"):
            status, _, errors = command_line("search", command, tmp_path / "wrong.npy", *place)
            assert (status, named in errors) == (2, True), errors
    (tmp_path / "link").symlink_to("named")
    assert command_line("search", "index", tmp_path / "rows.npy", "--index", tmp_path / "link")[0] == 0
    assert {"named", "papers"} <= {path.name for path in tmp_path.iterdir() if not path.is_symlink()}
    assert not list(tmp_path.glob(".*"))


@pytest.mark.skipif(os.name != "posix", reason="names of files that are no text")
def test_an_index_below_its_documents_and_names_that_are_no_text(tmp_path, encoder):
    (folder := tmp_path / "texts").mkdir()
    (folder / "a.txt").write_text("a sloop has one mast")
    (folder / os.fsdecode(b"\xff.txt")).write_text("a ketch has two masts")
    (folder / "blank.txt").write_text(" \n\n")
    for embedded in (2, 0):
        with DocumentIndex(folder / "index", encoder=encoder) as index:
            done = index.add(folder)
            assert (done.documents, done.embedded, done.skipped) == (3, embedded, [])
            assert {each.path for each in index.sources("masts")} == {"a.txt", "\\udcff.txt"}
