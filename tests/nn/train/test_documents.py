"""Which files are text, in which encoding, and what is said of the others."""

import gzip
import io
import json
import os
import pickle
import random
import struct
import zipfile
import zlib

import pytest

from accelerant.errors import ConfigError
from accelerant.nn.train.corpus import NotTextError, Reading, encoding_of, load_corpus
from refusals import assert_raises

ENGLISH = "The quick brown fox jumps over the lazy dog.\n" * 5
GERMAN = "Über den Wäldern flögen süße Käuzchen, groß und klein.\n" * 5
CHINESE = "我能吞下玻璃而不伤身体。\n" * 9
RUSSIAN = "Съешь же ещё этих мягких французских булок.\n" * 5


@pytest.mark.parametrize("text", [ENGLISH, GERMAN, CHINESE, RUSSIAN, ENGLISH + "\N{GRINNING FACE}\n"], ids=len)
@pytest.mark.parametrize(
    "codec", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]
)
@pytest.mark.parametrize("read", [1 << 16, 1 << 22])
def test_unicode_is_read_in_every_encoding_with_and_without_a_mark(text, codec, read):
    data = (text * (1 if read > 1 << 16 else 400)).encode(codec)
    found, remark = encoding_of(data[start : start + read] for start in range(0, len(data), read))
    assert data.decode(found).removeprefix("\ufeff").startswith(text)
    assert bool(remark) == (codec != "utf-8")


@pytest.mark.parametrize("codec", ["latin-1", "cp1252"])
def test_western_european_text_is_windows_1252(codec):
    assert encoding_of([GERMAN.encode(codec)]) == ("cp1252", "as Windows-1252")


@pytest.mark.parametrize(("text", "codec"), [
    (RUSSIAN, "koi8-r"), (RUSSIAN, "cp1251"), (CHINESE, "gbk"), (CHINESE, "big5"),
    ("日本語、です。\n" * 9, "shift-jis"),
])  # fmt: skip
def test_an_encoding_that_is_not_recognised_is_named(text, codec):
    with pytest.raises(NotTextError, match="in an encoding that is not recognized: convert it to UTF-8"):
        encoding_of([text.encode(codec, "ignore")])


def test_damaged_text_is_read_and_its_damage_counted():
    data = GERMAN.encode()
    assert encoding_of([data[:60] + b"\xff\xfe" + data[60:], data])[1] == (
        "with 2 replaced characters: they are not UTF-8"
    )
    assert encoding_of([data + "ü".encode()[:1]])[1].startswith("with 1 replaced")
    whole = "\ufffd a character of its own\n".encode() * 9  # is no damage, on the border of two parts either
    assert encoding_of([whole[:29], whole[29:]]) == ("utf-8", "")
    for damaged in (GERMAN.encode("utf-16")[:-1], GERMAN.encode("utf-16") + b"\x00\xd8"):
        assert_raises(NotTextError, "damaged UTF-16", encoding_of, [damaged])


def png():
    head = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(b"\0\xff\0\0")), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )


def zipped():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", ENGLISH)
    return file.getvalue()


BINARY = {
    "pdf": (b"%PDF-1.4\n1 0 obj << /Type /Catalog >> endobj\n" * 20, "PDF"),
    "gz": (gzip.compress(ENGLISH.encode()), "gzip"),
    "docx": (zipped(), "ZIP, which docx"),
    "png": (png(), "an image"),
    "parquet": (b"PAR1\x15\x04\x15\x10\x15\x14L\x15\x02\x15\x00\x12" * 40, "Parquet"),
    "pyc": (compile("x = 1", "x", "exec").co_code + b"\0" * 9, "binary"),
    "pickle": (pickle.dumps({"text": ENGLISH}, 4), "binary"),
    "ints": (struct.pack("<500h", *range(500)), "binary"),
    "floats": (struct.pack("<50d", *(1 / (k + 1) for k in range(50))), "binary"),
    "noise": (bytes(random.Random(0).choices(range(1, 256), k=3000)), "binary"),
    "program after a script": (b"#!/bin/sh\n" * 9000 + b"\x7fELF\0\0\1", "binary"),
    "zeros": (b"\0" * 100, "binary"),
    "text and a zero": (ENGLISH.encode() + b"\0" + ENGLISH.encode(), "binary"),
    "lines with a zero": (b"text with a nul \0 inside it and more text\n" * 20, "binary"),
    "empty": (b"", "empty"),
    "mark alone": ("".encode("utf-16"), "empty"),
}


@pytest.mark.parametrize("kind", BINARY)
def test_binary_content_is_named_and_never_read(tmp_path, kind):
    data, reason = BINARY[kind]
    with pytest.raises(NotTextError, match=reason):
        encoding_of(data[start : start + 1000] for start in range(0, len(data), 1000))
    path = tmp_path / "file.txt"
    path.write_bytes(data)
    for paths in ([str(path)], [str(tmp_path)]):
        with pytest.raises(
            ConfigError, match=rf"no text in .*: file.txt \({reason}.*\); give a file or folder with text"
        ):
            load_corpus(paths)
    (tmp_path / "good.txt").write_text(ENGLISH * 9)
    corpus = load_corpus([str(path), str(tmp_path / "good.txt")])
    assert corpus.train_bytes + corpus.held_out_bytes == 9 * len(ENGLISH)
    assert corpus.reading.notes()[0].startswith(f"read 1 file, 2.0 KiB; left out file.txt ({reason}")


def test_logs_with_colors_and_form_feeds_are_text():
    assert encoding_of([b"\x1b[31merror\x1b[0m: \x0c\x08\x07 done\r\n" * 99]) == ("utf-8", "")
    assert encoding_of([b"a text of DOS\r\n\x1a"]) == ("utf-8", "")


def test_a_folder_says_what_it_leaves_out_and_what_outweighs_the_rest(tmp_path):
    root = tmp_path / "notes"
    (root / ".git").mkdir(parents=True)
    (root / ".git" / "config").write_text("secret")
    (root / "lib" / "site-packages").mkdir(parents=True)
    (root / "lib" / "site-packages" / "m.py").write_text("secret")
    (root / "run").mkdir()
    (root / "run" / "config.json").write_text(json.dumps({"format": "accelerant-train-1"}))
    (root / "run" / "metrics.jsonl").write_text('{"loss": 1}\n')
    (root / "loop").symlink_to(root)
    (root / "gone.txt").symlink_to(root / "nowhere")
    (root / "self.txt").symlink_to(root / "self.txt")
    os.mkfifo(root / "pipe")
    (root / "a.txt").write_text(ENGLISH)
    (root / "b.txt").write_text(ENGLISH)
    (root / "data.json").write_text(json.dumps(list(range(9000))))
    (root / "win.txt").write_text(GERMAN, encoding="utf-16")
    (root / "paper.pdf").write_bytes(BINARY["pdf"][0])
    os.makedirs(os.fsencode(root) + b"/sub")
    with open(os.fsencode(root) + b"/sub/\xff.txt", "w") as file:
        file.write("a name that is not UTF-8\n")
    corpus = load_corpus([str(root)])
    assert [name for name, _ in corpus.reading.read] == ["a.txt", "data.json", "win.txt", "sub/\udcff.txt"]
    assert dict(corpus.reading.skipped) == {
        ".git": "hidden", "lib/site-packages": "installed packages", "run": "a run of accelerant train",
        "loop": "a link to a folder", "gone.txt": "a broken link", "self.txt": "a broken link",
        "pipe": "no regular file", "b.txt": "the same text as a.txt", "paper.pdf": "PDF",
    }  # fmt: skip
    left_out, converted, dominant = corpus.reading.notes()
    assert "paper.pdf (PDF)" in left_out
    assert converted == "read win.txt (as UTF-16)"
    assert dominant.startswith("the file data.json is 99% of the text: ")
    assert corpus.reading.notes(trains=False) == [left_out, converted]
    described = json.dumps(corpus.reading.to_dict())
    assert ".json: 1, 99%" in described
    assert "secret" not in described + b"".join(d.data for d in corpus.train).decode()


def test_the_results_of_a_run_in_the_folder_of_its_text_are_no_text(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"format": "accelerant-train-1"}))
    for name in ("metrics.jsonl", "sample.txt", "report.html", "privacy-ledger.jsonl"):
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "a.txt").write_text(ENGLISH * 9)
    assert [name for name, _ in load_corpus([str(tmp_path)]).reading.read] == ["a.txt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_file_is_left_out_of_a_folder_and_refused_where_it_is_named(tmp_path):
    (tmp_path / "a.txt").write_text(ENGLISH * 9)
    (tmp_path / "b.txt").write_text(ENGLISH)
    (tmp_path / "b.txt").chmod(0)
    (tmp_path / "c").mkdir(mode=0)
    assert dict(load_corpus([str(tmp_path)]).reading.skipped) == dict.fromkeys(("c", "b.txt"), "Permission denied")
    assert_raises(ConfigError, r"cannot read .*b\.txt: Permission denied", load_corpus, [str(tmp_path / "b.txt")])


def test_notes_and_the_description_of_many_files_stay_short():
    reading = Reading([(f"{n}.x{n}", 9) for n in range(5000)], [(f"{n}\n.bin", "binary") for n in range(99_999)])
    shown = ", ".join(rf"{n}\n.bin" for n in range(5))
    assert reading.notes() == [f"read 5,000 files, 43.9 KiB; left out {shown} and 99,994 more (binary)"]
    assert len(json.dumps(reading.to_dict())) < 3000
