import itertools
import math

import numpy as np
import pytest

from accelerant.errors import ConfigError, MissingFile
from accelerant.nn.train.config import TrainConfig
from accelerant.nn.train.corpus import _blocks_held_out, load_corpus, ngram_baselines
from accelerant.nn.train.data import random_windows
from accelerant.nn.train.tokens import Document
from refusals import assert_raises


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "texts"
    for number in range(60):
        path = root / f"part{number % 3}" / f"{number:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"file {number} " * (20 + number % 7))
    return root


def test_the_split_is_disjoint_complete_and_the_same_each_time(folder):
    first, second = load_corpus([str(folder)]), load_corpus([str(folder)])
    assert first == second
    train, held_out = ({document.name for document in part} for part in (first.train, first.held_out))
    assert train.isdisjoint(held_out)  # each file is shorter than a block
    assert len(train | held_out) == 60
    share = first.held_out_bytes / (first.held_out_bytes + first.train_bytes)
    assert 0.05 <= share <= 0.15
    assert load_corpus([str(folder)], seed=1).held_out != first.held_out


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize("sizes", [(9000,), (300_000,), (40, 700_000, 3), (2_000_000, 90_000), (70,) * 50], ids=str)
@pytest.mark.parametrize("window", [65, 5125])
def test_held_out_blocks_are_drawn_from_every_part_and_from_no_training_text(tmp_path, sizes, window):
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}.txt").write_text(
            "".join(chr(0x4E00 + k % 20_000) for k in range(number, number + size // 3))
        )
    for seed in range(3):
        corpus = load_corpus([str(tmp_path)], seed=seed, window_bytes=window)
        total = corpus.train_bytes + corpus.held_out_bytes
        assert total - sum(size // 3 * 3 for size in sizes) in (0, len(sizes) - 1)
        share = corpus.held_out_bytes / total
        assert (0.02 < share < 0.2) or corpus.held_out_bytes < 3 * window
        assert corpus.held_out_bytes >= min(window, total // 3)
        if len(sizes) > 1 and total < 8 * window:  # too little for blocks of each: of all together
            assert {document.name for document in (*corpus.train, *corpus.held_out)} == {"text"}
            continue
        for number in range(len(sizes)):
            name, parts = f"{number}.txt", []
            for kind in (corpus.train, corpus.held_out):
                parts += [document.data for document in kind if document.name == name]
            text = (tmp_path / name).read_bytes()
            assert sorted(b"".join(parts)) == sorted(text)
            assert all(part in text and part.decode() for part in parts)  # cut between characters
        if total > 20 * window and max(sizes) > total / 2:
            largest = max(range(len(sizes)), key=lambda k: sizes[k])
            assert {f"{largest}.txt"} <= {d.name for d in corpus.held_out} & {d.name for d in corpus.train}


@pytest.mark.parametrize("size", [130, 131, 195, 259, 390, 1040])
@pytest.mark.parametrize("files", [1, 2, 7])
def test_a_text_of_two_windows_gives_one_to_each_part(tmp_path, size, files):
    text = bytes(range(97, 123)) * 40
    ends = [size * k * k // files**2 for k in range(files + 1)]  # of different lengths
    for number, (start, end) in enumerate(itertools.pairwise(ends)):
        (tmp_path / f"{number}.txt").write_bytes(text[start:end])
    for seed in range(5):
        corpus = load_corpus([str(tmp_path)], seed=seed, window_bytes=65)
        assert min(corpus.train_bytes, corpus.held_out_bytes) >= 65


def test_the_sizes_alone_decide_what_a_private_training_holds_out(tmp_path):
    for name, text in (("a.txt", "\u00e9" * 999), ("b.txt", "e" * 1998), ("c.txt", "e" * 1998)):
        (tmp_path / name).write_text(text)
    corpus = load_corpus([str(tmp_path)], window_bytes=65, fixed=True)
    (tmp_path / "a.txt").write_text("e" * 1998)
    again = load_corpus([str(tmp_path)], window_bytes=65, fixed=True)
    for part in ("train", "held_out"):
        sizes = [[(d.name, len(d.data)) for d in getattr(each, part)] for each in (corpus, again)]
        assert sizes[0] == sizes[1]
    assert len(again.reading.read) == 3  # three times the same


def test_one_changed_byte_changes_the_digest(folder):
    before = load_corpus([str(folder)]).sha256
    path = folder / "part0" / "00.txt"
    path.write_bytes(path.read_bytes() + b"x")
    assert load_corpus([str(folder)]).sha256 != before


def test_the_order_is_by_name(folder):
    names = [document.name for document in load_corpus([str(folder)]).train]
    assert names == sorted(names)
    assert names[0].startswith("part0/")
    assert corpus_names(folder) == sorted(corpus_names(folder))


def corpus_names(folder):
    return [name for name, _ in load_corpus([str(folder)]).reading.read]


def test_a_folder_leaves_out_hidden_and_binary_files(folder):
    (folder / ".hidden").write_text("secret")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("secret")
    (folder / "image.bin").write_bytes(b"\x89\0\0\0")
    corpus = load_corpus([str(folder)])
    names = [document.name for document in (*corpus.train, *corpus.held_out)]
    assert len(names) == 60


def test_stdlib_is_python_source_without_installed_packages():
    corpus = load_corpus(["stdlib"])
    names = [document.name for document in (*corpus.train, *corpus.held_out)]
    assert "json/decoder.py" in names
    assert all(name.endswith(".py") for name in names)
    assert not [name for name in names if "site-packages" in name]
    assert corpus.held_out_bytes > 100_000


@pytest.mark.parametrize("content", [None, b""])
def test_no_text_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "empty.txt").write_bytes(content)
    assert_raises(ConfigError, f"no text in {tmp_path}", load_corpus, [str(tmp_path)])


def test_a_missing_path_is_named(tmp_path):
    for paths in (str(tmp_path / "nowhere"), tmp_path / "nowhere", [tmp_path / "nowhere"]):
        assert_raises(MissingFile, r"no file or folder .*nowhere", load_corpus, paths)


def test_baselines_are_the_counted_probabilities():
    seen, unseen = [Document("a", b"abab")], [Document("b", b"ab")]
    unigram, bigram = ngram_baselines(seen, unseen)
    p = 3 / 260  # (2 + 1) / (4 + 256), of a and of b
    assert unigram == pytest.approx(-math.log(p))
    assert bigram == pytest.approx(-math.log((2 + p) / 3))  # ab twice, a twice before something


def test_a_file_named_twice_is_read_once(tmp_path, folder):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {n}\n" for n in range(300)))
    (tmp_path / "link.txt").symlink_to(path)
    (tmp_path / "copy.txt").write_bytes(path.read_bytes())
    once = load_corpus([str(path)])
    twice = load_corpus(
        [str(path), str(tmp_path / "texts" / ".." / "a.txt"), str(tmp_path / "link.txt"), str(tmp_path / "copy.txt")]
    )
    assert twice.reading.skipped == [("copy.txt", "the same text as a.txt")]
    assert (twice.train, twice.held_out, twice.sha256) == (once.train, once.held_out, once.sha256)
    both = load_corpus([str(folder), str(folder / "part0" / "00.txt")])
    assert both.sha256 == load_corpus([str(folder)]).sha256


def test_an_empty_path_is_refused():
    assert_raises(ConfigError, "empty path", load_corpus, [""])


@pytest.mark.parametrize(("count", "context"), [(500, 16), (20_000, 64), (70_001, 1024)])
def test_blocks_of_a_token_file_are_held_out_and_no_training_window_touches_them(count, context):
    tokens = np.arange(count, dtype=np.uint32)
    train, held_out = _blocks_held_out(tokens, TrainConfig(context=context, seed=3))
    assert np.array_equal(np.sort(np.concatenate([train[:], held_out])), tokens)
    assert np.array_equal(train[:], np.sort(train[:]))
    assert 0 < len(held_out) < max(0.07 * count, 2 * context + 3)
    assert not np.intersect1d(random_windows(train, seed=3, step=0, count=50, context=context), held_out).size
    assert not np.array_equal(held_out, _blocks_held_out(tokens, TrainConfig(context=context, seed=4))[1])
