"""The disk cache runs code: it loads what it wrote and nothing else."""

import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from accelerant.runtime.compilation.cache import KernelCache, kernel_key
from accelerant.runtime.compilation.kernel import Binary, Resources

KEY = kernel_key(name="k")
BINARY = Binary(b"\x90code", {"k": "k_1"}, {"k": Resources(registers=3)}, {"threads": 32}, "log")


@pytest.fixture
def cache(tmp_path):
    made = KernelCache(tmp_path / "cache" / "kernels")
    assert made.get_or_build(KEY, lambda: BINARY, name="k", target="t", compiler="c") == (BINARY, False)
    return made


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "accelerant.cache"]


def test_an_entry_heals_from_a_flipped_bit_of_any_byte(cache):
    """The checksum once covered the code alone: a flip in a symbol's name was an error in every later process."""
    for name in ("code", "report.json"):
        path = cache.root / KEY / name
        sound = path.read_bytes()
        for position in range(len(sound)):
            spoiled = bytearray(sound)
            spoiled[position] ^= 1 << position % 8
            path.write_bytes(spoiled)
            for _ in range(2):
                binary, found = cache.get_or_build(KEY, lambda: BINARY, name="k", target="t", compiler="c")
                assert binary == BINARY, (name, position)
            assert found, (name, position)


def test_an_entry_under_another_key_is_not_loaded(cache):
    other = kernel_key(name="other")
    shutil.copytree(cache.root / KEY, cache.root / other)
    assert cache.get_or_build(other, lambda: Binary(b"other", {}, {})) == (Binary(b"other", {}, {}), False)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_folders_and_files_are_for_their_user_alone(tmp_path, umask):
    before = os.umask(umask)
    try:
        cache = KernelCache(tmp_path / "cache" / "kernels")
        cache.get_or_build(KEY, lambda: BINARY)
    finally:
        os.umask(before)
    paths = [cache.root.parent, cache.root, cache.root / KEY]
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o700] * 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths[-1].iterdir()} == {0o600}
    assert cache.get_or_build(KEY, pytest.fail) == (BINARY, True)


@pytest.mark.skipif(not hasattr(os, "fork") or os.geteuid() != 0, reason="only root becomes another user")
def test_what_root_wrote_into_an_image_serves_other_users():
    """As in a container that is built by root and run by another user, on a read-only file system or not."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is closed to others
        cache = KernelCache(Path(folder) / "kernels")
        cache.get_or_build(KEY, lambda: BINARY)
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        child = os.fork()
        if not child:
            os.seteuid(12345)
            found = cache.get_or_build(KEY, lambda: Binary(b"fresh", {}, {}))
            os._exit(0 if found == (BINARY, True) else 1)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("part", ["root", "entry", "code", "report.json"])
@pytest.mark.parametrize("fault", ["group", "world", "symlink", "owner"])
def test_what_others_could_have_written_is_neither_run_nor_replaced(cache, tmp_path, caplog, part, fault):
    path = {"root": cache.root, "entry": cache.root / KEY}.get(part, cache.root / KEY / part)
    if fault == "owner":
        if os.geteuid() != 0:
            pytest.skip("only root gives a file to another user")
        os.chown(path, 12345, -1, follow_symlinks=False)
    elif fault == "symlink":
        path.rename(tmp_path / "moved")
        path.symlink_to(tmp_path / "moved")
    else:
        path.chmod(path.stat().st_mode | (0o020 if fault == "group" else 0o002))
    before = path.lstat()[:4]
    reason = {"symlink": "is a symlink", "owner": "belongs to another user, 12345"}.get(fault, "may be written by")
    for _ in range(2):
        with caplog.at_level(logging.WARNING):
            assert cache.get_or_build(KEY, lambda: Binary(b"fresh", {}, {})) == (Binary(b"fresh", {}, {}), False)
    (message,) = warnings_of(caplog)
    assert str(cache.root) in message
    assert reason in message
    assert path.lstat()[:4] == before
    assert not cache.has(KEY)
    if part == "root":
        assert reason in cache.refusal()
    else:
        (entry,) = cache.entries()
        assert (entry.trusted, reason in entry.damage) == (False, True)
