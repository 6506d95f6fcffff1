"""Sources of kernels: dialects written on demand, and keys that change with the code."""

import pytest

from accelerant.errors import CompileError
from accelerant.runtime.compilation import kernel as kernel_module
from accelerant.runtime.compilation.kernel import KernelSource, LazyDialects, sources_hash


def test_a_dialect_is_written_when_it_is_asked_for_and_once():
    written = []

    def maker(name):
        def write():
            written.append(name)
            return f"text of {name}"

        return write

    dialects = LazyDialects(cuda=maker("cuda"), portable=maker("portable"))
    source = KernelSource(name="some", dialects=dialects, entries={"some": ("i64",)})
    assert list(dialects) == ["cuda", "portable"]
    assert len(dialects) == 2
    assert written == []
    assert source.pick(("llvm", "portable")) == ("portable", "text of portable")
    assert source.pick(("portable",))[1] == "text of portable"
    assert written == ["portable"]
    with pytest.raises(CompileError, match="has no dialect of llvm; it has cuda, portable"):
        source.pick(("llvm",))
    assert written == ["portable"]


def test_the_hash_is_of_names_and_contents(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_module, "_PACKAGE", tmp_path)

    def now():
        sources_hash.cache_clear()
        return sources_hash("a", "b")

    for folder in ("a", "b/deep"):
        (tmp_path / folder).mkdir(parents=True)
    seen = {now()}
    (tmp_path / "a/one.py").write_text("x = 1\n")
    seen.add(now())
    (tmp_path / "a/one.py").write_text("x = 2\n")
    seen.add(now())
    (tmp_path / "b/deep/one.py").write_text("x = 2\n")
    seen.add(now())
    (tmp_path / "b/deep/one.py").rename(tmp_path / "b/deep/two.py")
    seen.add(now())
    assert len(seen) == 5
    (tmp_path / "b/deep/notes.txt").write_text("not code")
    assert now() in seen
    sources_hash.cache_clear()
