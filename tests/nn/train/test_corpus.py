import math

import pytest

from accelerant.errors import ConfigError
from accelerant.nn.train.corpus import Document, load_corpus, ngram_baselines


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
    assert train.isdisjoint(held_out)
    assert len(train | held_out) == 60
    share = first.held_out_bytes / (first.held_out_bytes + first.train_bytes)
    assert 0.025 <= share <= 0.05


def test_one_changed_byte_changes_the_digest(folder):
    before = load_corpus([str(folder)]).sha256
    path = folder / "part0" / "00.txt"
    path.write_bytes(path.read_bytes() + b"x")
    assert load_corpus([str(folder)]).sha256 != before


def test_the_order_is_by_name(folder):
    names = [document.name for document in load_corpus([str(folder)]).train]
    assert names == sorted(names)
    assert names[0].startswith("part0/")


def test_a_single_file_is_cut_near_its_end_between_characters(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("é" * 1001)
    corpus = load_corpus([str(path)])
    (train,), (held_out,) = corpus.train, corpus.held_out
    assert train.data + held_out.data == path.read_bytes()
    assert len(held_out.data) / 2002 == pytest.approx(0.1, abs=0.002)
    held_out.data.decode()


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
    with pytest.raises(ConfigError, match=f"no text in {tmp_path}"):
        load_corpus([str(tmp_path)])


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no file or folder .*nowhere"):
        load_corpus([str(tmp_path / "nowhere")])


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
    once = load_corpus([str(path)])
    twice = load_corpus([str(path), str(tmp_path / "texts" / ".." / "a.txt"), str(tmp_path / "link.txt")])
    assert (twice.train, twice.held_out, twice.sha256) == (once.train, once.held_out, once.sha256)
    both = load_corpus([str(folder), str(folder / "part0" / "00.txt")])
    assert both.sha256 == load_corpus([str(folder)]).sha256


def test_a_binary_file_left_out_of_its_folder_is_read_where_it_is_named(folder):
    (folder / "image.bin").write_bytes(b"\x89\0" * 10)
    corpus = load_corpus([str(folder), str(folder / "image.bin")])
    assert len(corpus.train) + len(corpus.held_out) == 61


def test_an_empty_path_is_refused():
    with pytest.raises(ConfigError, match="empty path"):
        load_corpus([""])
