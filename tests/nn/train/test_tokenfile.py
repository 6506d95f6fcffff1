import hashlib
import json
import os
import resource
import signal
import struct
import tracemalloc

import numpy as np
import pytest
import torch

from accelerant.errors import ConfigError, FormatError
from accelerant.nn import GPT, GPTConfig
from accelerant.nn.train import TokenFile, TrainConfig, Trainer, fit, prepare_tokens
from accelerant.nn.train.corpus import tokenizer_path
from accelerant.nn.train.tokens import BYTES, TokenWriter, is_token_file, load_bpe, token_dtype
from refusals import assert_raises

TEXT = "".join(f"the {n}th line of some text, for learning\n" for n in range(400))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def write(path, tokens, vocab_size=1000):
    with TokenWriter(path, vocab_size=vocab_size, tokenizer=BYTES, source=["here"]) as writer:
        for part in np.array_split(np.asarray(tokens), 3):
            writer.append(part)
        return writer.finish(documents=2, text_bytes=17)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, np.uint16), (1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_tokens_come_back_with_their_description(tmp_path, vocab_size, dtype):
    tokens = np.random.default_rng(0).integers(0, vocab_size, 5000)
    tokens[7] = vocab_size - 1
    info = write(tmp_path / "a.tokens", tokens, vocab_size)
    file = TokenFile(tmp_path / "a.tokens")
    assert file.info == info
    assert (len(file), info.count, info.documents, info.text_bytes, info.source) == (5000, 5000, 2, 17, "here")
    assert file.tokens.dtype == dtype
    assert token_dtype(vocab_size) == np.dtype(dtype).name
    assert np.array_equal(file.tokens, tokens)
    file.verify()
    assert [path.name for path in tmp_path.iterdir()] == ["a.tokens"]


def test_the_layout_is_the_documented_one(tmp_path):
    path = tmp_path / "a.tokens"
    write(path, [1, 2, 300])
    data = path.read_bytes()
    magic, version, length, digest = struct.unpack_from("<8sII32s", data)
    assert (magic, version) == (b"ACLTOKEN", 1)
    assert hashlib.sha256(data[48 : 48 + length]).digest() == digest
    assert json.loads(data[48 : 48 + length])["count"] == 3
    assert data[4096:] == bytes([1, 0, 2, 0, 44, 1])


def test_a_long_source_fits_the_header(tmp_path):
    with TokenWriter(tmp_path / "a", vocab_size=9, tokenizer=BYTES, source=["\x01" * 900]) as writer:
        writer.append(np.array([1]))
        writer.finish(documents=1, text_bytes=1)
    assert TokenFile(tmp_path / "a").info.source == ""


def test_the_map_reads_what_is_asked_and_keeps_no_copy(tmp_path):
    write(tmp_path / "a.tokens", np.arange(100_000) % 1000)
    tokens = TokenFile(tmp_path / "a.tokens").tokens
    assert isinstance(tokens.base, np.memmap)
    assert not tokens.flags.writeable


def changed(path, at, value):
    data = bytearray(path.read_bytes())
    data[at] = value
    path.write_bytes(bytes(data))


def test_torn_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "a.tokens"
    write(path, np.arange(500))
    whole = path.read_bytes()
    assert_raises(FormatError, r"no token file .*absent", TokenFile, tmp_path / "absent")
    for size, message in ((4999, r"torn: 4,999 bytes, 500 tokens need 5,096"), (100, "torn: 100 bytes, the header")):
        path.write_bytes(whole[:size])
        assert_raises(FormatError, message, TokenFile, path)
    path.write_bytes(whole + b"more")
    assert_raises(FormatError, "torn: 5,100 bytes, 500 tokens need 5,096", TokenFile, path)
    path.write_bytes(whole)
    changed(path, 8, 2)
    assert_raises(FormatError, "of version 2, this program reads version 1", TokenFile, path)
    path.write_bytes(whole)
    changed(path, 60, ord("!"))
    assert_raises(FormatError, "its header does not match its checksum", TokenFile, path)
    path.write_bytes(b"PK" + whole[2:])
    assert_raises(FormatError, "is no token file: make one with accelerant data prepare", TokenFile, path)
    assert not is_token_file(path)
    assert not is_token_file(tmp_path)


def describe(path, **changes):
    """Rewrite a token file's header with other fields, checksum included; None removes a field."""
    data = path.read_bytes()
    length = struct.unpack_from("<I", data, 12)[0]
    fields = {**json.loads(data[48 : 48 + length]), **changes}
    text = json.dumps({name: value for name, value in fields.items() if value is not None}).encode()
    header = struct.pack("<8sII32s", b"ACLTOKEN", 1, len(text), hashlib.sha256(text).digest()) + text
    path.write_bytes(header.ljust(4096, b"\0") + data[4096:])


CRAFTED = [
    *({"dtype": kind} for kind in ("object", "O", "V8", "<U1", "int64", "float16", "u2", "datetime64[s]", "", [1], 7)),
    *({"count": value} for value in (0, -250, "500", 500.0, True, [500], 10**30, 1 << 63, float("nan"))),
    *({"vocab_size": value} for value in (0, -1, (1 << 32) + 1, "256", 256.0, {}, False)),
    *({"documents": -1}, {"text_bytes": "17"}, {"source": ["here"]}, {"tokenizer": 3}, {"sha256": {"a": 1}}),
    *({"dtype": "object", "count": 125}, {"dtype": "float64", "count": 125}),
    *({"sha256": None}, {"dtype": None}, {"further": 1}),
]  # fmt: skip


@pytest.mark.parametrize("changes", CRAFTED, ids=str)
def test_a_crafted_header_is_refused_before_anything_is_mapped(tmp_path, changes):
    path = tmp_path / "a.tokens"
    write(path, np.arange(500))
    describe(path)
    TokenFile(path)  # the helper itself leaves a good file
    describe(path, **changes)
    raised = assert_raises(FormatError, rf"token file .*({next(iter(changes))}|torn|digits)", TokenFile, path)
    assert len(str(raised)) < 500


def test_tokens_beyond_the_vocabulary_are_refused_where_they_are_used(tmp_path):
    path = tmp_path / "a.tokens"
    write(path, np.full(500, 999))
    describe(path, vocab_size=256)
    file = TokenFile(path)
    assert_raises(FormatError, r"a\.tokens is damaged: token 999 is not below its vocabulary's size, 256", file.verify)
    config = TrainConfig(steps=2, batch_size=2, context=16, device="cpu", predict_memory=False)
    for data, validation in ((path, None), (np.zeros((4, 16), np.int64), path)):
        with pytest.raises(FormatError, match="is damaged: token 999"):
            fit(small_gpt(256), data, None if data is path else data, config, validation=validation)


def test_an_altered_token_is_found_when_all_is_read(tmp_path):
    path = tmp_path / "a.tokens"
    write(path, np.arange(500))
    changed(path, 4096 + 77, 9)
    assert_raises(FormatError, "is damaged: its tokens do not match their checksum", lambda: TokenFile(path).verify())


def test_a_writer_that_does_not_finish_leaves_nothing_new(tmp_path):
    path = tmp_path / "a.tokens"
    write(path, [1, 2, 3])
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="token 700 is not below the vocabulary's size, 5"):
        write(path, [1, 2, 3, 700], vocab_size=5)
    assert_raises(ConfigError, "no text in here: nothing to write", write, path, np.zeros(0, np.int64))
    assert [each.name for each in tmp_path.iterdir()] == ["a.tokens"]
    assert path.read_bytes() == before


# --- preparing -------------------------------------------------------------------------------------------------------
def test_bytes_of_text_files_in_order_with_a_line_between(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first ünd")
    (tmp_path / "c.bin").write_bytes(b"\0\1\2")
    out = tmp_path / "out" / "all.tokens"
    info = prepare_tokens(str(tmp_path), out, tokenizer="bytes")
    assert TokenFile(out).tokens.astype(np.uint8).tobytes() == "first ünd\nsecond\n".encode()
    assert (info.documents, info.text_bytes, info.vocab_size, info.tokenizer) == (2, 16, 256, "bytes")
    assert [path.name for path in out.parent.iterdir()] == ["all.tokens"]


def test_texts_in_other_encodings_become_utf8_and_what_is_no_text_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes("caf\u00e9 na\u00efve\n".encode("latin-1") * 40)
    (tmp_path / "b.txt").write_text("sch\u00f6n\n" * 3, encoding="utf-16")
    (tmp_path / "c.jsonl").write_text('{"text": "tw\u00f6"}\n{"text": "d\u2028ei"}\n', encoding="utf-16")
    (tmp_path / "d.txt").write_bytes(bytes(range(1, 256)))
    notes = []
    info = prepare_tokens([tmp_path], tmp_path / "a.tokens", tokenizer="bytes", note=notes.append)
    expected = "caf\u00e9 na\u00efve\n" * 40 + "\n" + "sch\u00f6n\n" * 3 + "\ntw\u00f6\nd\u2028ei\n"
    assert TokenFile(tmp_path / "a.tokens").tokens.astype(np.uint8).tobytes() == expected.encode()
    assert info.text_bytes == len(expected.encode()) - 4  # without the line ends between documents
    assert notes[0].endswith("left out d.txt (binary)")
    assert notes[1] == "read a.txt (as Windows-1252); b.txt, c.jsonl (as UTF-16)"


def test_json_lines_are_a_document_each(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "tw\\u00f6\\ud800", "id": 3}\n')
    info = prepare_tokens([path], tmp_path / "a.tokens", tokenizer="bytes")
    assert TokenFile(tmp_path / "a.tokens").tokens.astype(np.uint8).tobytes() == "one\ntwö?\n".encode()
    assert info.documents == 2
    path.write_text('{"body": "one"}\n')
    prepare_tokens([path], tmp_path / "b.tokens", tokenizer="bytes", text_field="body")
    for line, message in (("{", "JSONDecodeError"), ('{"a": 1}', "KeyError"), ("[1]", "TypeError"), ("7", "TypeError")):
        path.write_text('{"text": "one"}\n' + line + "\n")
        with pytest.raises(FormatError, match=rf"a.jsonl, line 2: no JSON object with 'text' \({message}\)"):
            prepare_tokens([path], tmp_path / "c.tokens", tokenizer="bytes")
    path.write_text('{"text": 5}\n')
    with pytest.raises(FormatError, match="line 1: 'text' is no text but int"):
        prepare_tokens([path], tmp_path / "c.tokens", tokenizer="bytes")
    assert not (tmp_path / "c.tokens").exists()


def test_a_trained_bpe_stands_beside_its_tokens_and_gives_the_text_back(tmp_path, text):
    out = tmp_path / "text.tokens"
    info = prepare_tokens([text], out, vocab_size=400)
    tokenizer = load_bpe(tokenizer_path(out))
    assert 257 < info.vocab_size == tokenizer.vocab_size <= 400
    assert info.count < len(TEXT) / 2
    assert tokenizer.decode(TokenFile(out).tokens.tolist()) == TEXT + "<|endoftext|>"
    again = prepare_tokens([text], tmp_path / "again.tokens", tokenizer=str(tokenizer_path(out)))
    assert (again.sha256, again.tokenizer) == (info.sha256, info.tokenizer)


def test_pieces_of_a_large_file_give_the_tokens_of_the_whole(tmp_path, text, monkeypatch):
    prepare_tokens([text], tmp_path / "whole.tokens", vocab_size=300)
    bpe = str(tokenizer_path(tmp_path / "whole.tokens"))
    monkeypatch.setattr("accelerant.nn.train.corpus._READ", 100)  # less than three lines
    told = []
    info = prepare_tokens([text], tmp_path / "cut.tokens", tokenizer=bpe, watch=lambda *each: told.append(each))
    assert np.array_equal(TokenFile(tmp_path / "cut.tokens").tokens, TokenFile(tmp_path / "whole.tokens").tokens)
    assert info.documents == 1
    shares = [share for what, share in told if what == "encoding the text"]
    assert len(shares) > 50
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_character_on_the_border_of_two_reads_stays_whole(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("äöü\nx" * 20)
    monkeypatch.setattr("accelerant.nn.train.corpus._READ", 3)
    monkeypatch.setattr("accelerant.nn.train.corpus._LONGEST", 8)  # and where no line ends, it is cut anyway
    prepare_tokens([path], tmp_path / "a.tokens", tokenizer="bytes")
    assert TokenFile(tmp_path / "a.tokens").tokens.astype(np.uint8).tobytes() == path.read_bytes() + b"\n"


def test_unusable_input_leaves_no_file(tmp_path, text):
    (tmp_path / "empty").mkdir()
    (tmp_path / "words.json").write_text("{}")
    out = tmp_path / "new" / "out.tokens"
    for data, options, error, message in (
        ([tmp_path / "absent"], {}, ConfigError, "no file or folder '.*absent'"),
        ([tmp_path / "empty"], {}, ConfigError, "no text in .*empty"),
        ([text], {"vocab_size": 100}, ConfigError, "vocab_size must be 257 .* got 100"),
        ([text], {"vocab_size": 10**20}, ConfigError, "vocab_size must be .* to 2.32, got 10{20}"),
        ([text], {"tokenizer": "absent.json"}, FormatError, "cannot read the tokenizer absent.json"),
        ([text], {"tokenizer": str(tmp_path / "words.json")}, FormatError, "not a tokenizer"),
    ):
        assert_raises(error, message, prepare_tokens, data, out, **options)
    assert_raises(ConfigError, "is a folder: name the token file to write", prepare_tokens, [text], tmp_path / "empty")
    assert not out.parent.exists()


def test_a_text_is_not_overwritten_by_its_tokens(tmp_path, text):
    (tmp_path / "b.txt").write_text("precious")
    for data in ([text, tmp_path / "b.txt"], [tmp_path]):
        with pytest.raises(ConfigError, match=r"b\.txt is one of the texts: name another file to write"):
            prepare_tokens(data, tmp_path / "b.txt", tokenizer="bytes")
    assert (tmp_path / "b.txt").read_text() == "precious"
    prepare_tokens([text], tmp_path / "a.tokens", tokenizer="bytes")
    with pytest.raises(ConfigError, match=r"a\.tokens is a token file already"):
        prepare_tokens([tmp_path / "a.tokens"], tmp_path / "b.tokens", tokenizer="bytes")


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path):
    """The limit is the process's own, so a forked one meets it; 8 KiB: the header fits, and the tokens do not."""
    path, message = tmp_path / "a.tokens", tmp_path.with_suffix(".message")
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            with TokenWriter(path, vocab_size=9, tokenizer="bytes", source=["here"]) as writer:
                for _ in range(99):
                    writer.append(np.ones(99, np.int64))
        except OSError as error:
            message.write_text(str(error))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert message.read_text().endswith(f"File too large: {str(path)!r}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_an_output_inside_the_folder_is_not_its_own_input(tmp_path, text, tokenizer):
    first = prepare_tokens([tmp_path], tmp_path / "out.tokens", tokenizer=tokenizer, vocab_size=400)
    second = prepare_tokens([tmp_path], tmp_path / "out.tokens", tokenizer=tokenizer, vocab_size=400)
    assert first.sha256 == second.sha256


# --- training on it --------------------------------------------------------------------------------------------------
def small_gpt(vocab_size):
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=vocab_size, context=16, layers=1, heads=2, width=16))


@pytest.mark.slow
def test_a_model_trains_on_a_token_file_by_path_or_open(tmp_path, text):
    out = tmp_path / "text.tokens"
    prepare_tokens([text], out, tokenizer="bytes")
    config = TrainConfig(steps=30, batch_size=8, context=16, learning_rate=1e-2, device="cpu", predict_memory=False)
    by_path = fit(small_gpt(256), str(out), None, config, validation=out)
    opened = fit(small_gpt(256), TokenFile(out), None, config, validation=TokenFile(out))
    assert by_path.losses == opened.losses
    assert by_path.losses[-1] < by_path.losses[0] - 1
    assert by_path.records[0].tokens_per_s > 0
    assert by_path.evaluations == opened.evaluations
    assert by_path.evaluations[0].rows == (len(TEXT) + 1 - 1) // 16
    assert Trainer(small_gpt(256), config).evaluate(out).rows == by_path.evaluations[0].rows
    assert_raises(FormatError, "is no token file", lambda: fit(small_gpt(256), text, None, config))
    with pytest.raises(
        ConfigError, match=r"not enough data: the .*text.tokens part has 16\d+ tokens, one window needs"
    ):
        fit(small_gpt(256), out, None, TrainConfig(context=100_000, device="cpu"))


def test_training_on_a_map_holds_little_of_it_in_memory(tmp_path):
    """A file of 64 MiB, and a limit of the address space that a copy of it would break."""
    path = tmp_path / "large.tokens"
    part = np.arange(1 << 20) % 256
    with TokenWriter(path, vocab_size=256, tokenizer=BYTES, source=[]) as writer:
        for _ in range(32):
            writer.append(part)
        writer.finish(documents=1, text_bytes=1)
    assert os.path.getsize(path) == 4096 + (64 << 20)
    config = TrainConfig(steps=5, batch_size=4, context=16, device="cpu", predict_memory=False)
    tracemalloc.start()
    try:
        history = fit(small_gpt(256), path, None, config)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert history.steps == 5
    assert peak < 16 << 20
    shares = []
    TokenFile(path).verify(shares.append)
    assert shares == [(n + 1) / 16 for n in range(16)]
