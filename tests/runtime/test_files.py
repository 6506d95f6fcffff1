"""Atomic writes leave the old file or the new one; JSON reads as json.loads reads it, but for texts nested too deep."""

import errno
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerant.runtime import files
from accelerant.runtime.files import _FRESH_S, MAX_DEPTH, clipped, decode_json, open_regular, plain, typed, write_atomic
from refusals import assert_raises

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
)


@pytest.mark.slow
@settings(max_examples=50)
@given(_VALUES)
def test_values_are_those_of_json(value):
    text = json.dumps(value)
    assert decode_json(text) == decode_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_depth_is_bounded(opening, closing):
    deepest = opening * MAX_DEPTH + "1" + closing * MAX_DEPTH
    assert decode_json(deepest) == json.loads(deepest)
    assert_raises(ValueError, f"more than {MAX_DEPTH} levels", decode_json, f"{opening}{deepest}{closing}")


def test_brackets_side_by_side_and_in_strings_are_not_depth():
    value = [[] for _ in range(1000)] + ['[{"' * 1000, "\\" * 7 + '"[' * 500]
    assert decode_json(json.dumps(value)) == value


@pytest.mark.parametrize("text", ["", " \n", "[", '"' + "[" * 200, b"\xff[", "]" * 200 + "[" * 50])
def test_what_is_no_json_is_a_value_error(text):
    assert_raises(ValueError, r"empty|Expecting|Unterminated|can't decode", decode_json, text)


def test_a_hostile_text_is_read_in_linear_time():
    start = time.process_time()
    for text in ('"' + '\\"' * 500_000 + "[" * 200, "[" * 1_000_000, '"' * 999_999 + "[" * 200):
        assert_raises(ValueError, r".", decode_json, text)
    assert time.process_time() - start < 5  # quadratic: minutes


def test_a_deep_text_ends_no_process_whose_recursion_limit_was_raised():
    code = (
        "import sys; sys.setrecursionlimit(10**6)\n"
        "from accelerant.runtime.files import decode_json\n"
        "try:\n    decode_json('[' * 10**6)\n"
        "except ValueError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("more than"), (done.returncode, done.stderr)


# --- values of a type ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Shape:
    sides: tuple[int, ...]
    unit: Literal["mm", "cm"]
    weight: float | None = None
    named: dict[str, list[bool]] = field(default_factory=dict)


def test_values_of_a_type_come_back():
    given = {"sides": [1, 2], "unit": "mm", "weight": 3, "named": {"a": [True]}}
    found = typed(Shape, given)
    assert found == Shape((1, 2), "mm", 3.0, {"a": [True]})
    assert isinstance(found.weight, float)
    assert typed(tuple[int, str], [1, "a"]) == (1, "a")
    assert typed(Shape, {"sides": [], "unit": "cm", "weight": None}) == Shape((), "cm")
    assert typed(Any, [1]) == [1]


@pytest.mark.parametrize(("changes", "message"), [
    ({"sides": None}, "sides must be a list, got None"),
    ({"sides": {"0": 1}}, "sides must be a list"),
    ({"sides": [1, True]}, r"sides\[1\] must be a whole number of at most 63 bits, got True"),
    ({"sides": [1 << 63]}, r"sides\[0\] must be a whole number"),
    ({"sides": [1.0]}, r"sides\[0\] must be a whole number"),
    ({"unit": "m"}, "unit must be 'mm' or 'cm', got 'm'"),
    ({"unit": ["mm"]}, "unit must be 'mm' or 'cm'"),
    ({"weight": "3"}, "weight must be a number or null, got '3'"),
    ({"weight": 10**400}, "weight must be a number or null, got 0xda763fc8cb9ff9e5"),
    ({"named": []}, r"named must be an object, got \[\]"),
    ({"named": {"a" * 500: [1]}}, r"named\['a+'\.\.\.\]\[0\] must be true or false, got 1"),
    ({"color": 1}, "the shape has an unknown field 'color'"),
])  # fmt: skip
def test_values_of_another_type_are_refused_by_name(changes, message):
    raised = assert_raises(ValueError, f"^{message}", typed, Shape, {"sides": [], "unit": "mm", **changes}, "the shape")
    assert len(str(raised)) < 250


def test_a_value_that_is_no_record_and_a_missing_field_are_refused():
    assert_raises(ValueError, r"^the shape must be an object, got \[\]", typed, Shape, [], "the shape")
    assert_raises(ValueError, r"^the shape lacks the field 'sides'", typed, Shape, {"unit": "mm"}, "the shape")


@given(st.floats(1e-12, 1e12), st.integers(1, 9))
def test_a_bound_is_printed_rounded_up(value, digits):
    printed = float(plain(value, digits, up=True).replace(",", ""))
    assert value <= printed <= value * (1 + 10.0 ** (1 - digits))


def test_untrusted_text_is_one_line_without_control_characters():
    hostile = "a\x1b]0;title\x07\r\nb\u202ec\ud800\x9b2J\u2028"
    assert files.escaped(hostile) == r"a\x1b]0;title\x07\r\nb\u202ec\ud800\x9b2J\u2028"
    assert files.escaped("naïve 文 'x'") == "naïve 文 'x'"
    assert len(clipped("x" * 10**6)) < 100


# --- regular files ---------------------------------------------------------------------------------------------------
def test_pipes_devices_folders_and_impossible_names_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to-pipe").symlink_to("pipe")
    for path in (tmp_path / "pipe", tmp_path / "to-pipe", "/dev/zero", "/dev/null", "/dev/tty", tmp_path):
        for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):
            with pytest.raises(OSError, match=r"regular file|symlink|directory|No such device|Permission") as raised:
                open_regular(path, flags)
            assert raised.value.filename == str(path)
    for name in ("a\0b", "\ud800"):
        assert_raises(OSError, "no name of a file", files.read_regular, name)


def test_files_of_the_system_are_empty_and_large_ones_are_refused(tmp_path):
    assert files.read_regular("/proc/self/environ") == b""
    assert files.is_virtual("/proc/self/environ")
    assert not files.is_virtual(tmp_path)
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match=r"it has 1,099,511,627,776 bytes, more than 67,108,864"):
        files.read_regular(tmp_path / "sparse")


def test_a_symlink_is_read_but_not_written_through(path):
    link = path.with_name("link")
    for target in ("kept.txt", "absent.txt"):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        for flags in (os.O_RDWR, os.O_WRONLY | os.O_CREAT, os.O_RDWR | os.O_CREAT | os.O_APPEND):
            assert_raises(OSError, "it is a symlink, which is not written through", open_regular, link, flags)
    assert not path.with_name("absent.txt").exists()
    link.unlink()
    link.symlink_to("kept.txt")
    assert files.read_regular(link) == b"before"


# --- atomic writes ---------------------------------------------------------------------------------------------------
@pytest.fixture
def path(tmp_path):
    path = tmp_path / "kept.txt"
    path.write_bytes(b"before")
    return path


def test_a_write_replaces_the_file_and_leaves_no_other(path):
    write_atomic(path, b"after")
    assert path.read_bytes() == b"after"
    assert list(path.parent.iterdir()) == [path]


def test_a_device_a_pipe_a_folder_and_standard_output_are_not_replaced(path, tmp_path):
    """Root would put a file where all users expect /dev/null."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/null")
    (tmp_path / "output").symlink_to("/proc/self/fd/1")  # as /dev/stdout is
    for name in ("pipe", "folder", "device", "output"):
        assert_raises(OSError, f"it is not a regular file: '.*/{name}'", files.AtomicFile, tmp_path / name)
    (tmp_path / "link").symlink_to("kept.txt")
    for name in ("link", "absent"):
        write_atomic(tmp_path / name, b"after")
    assert path.read_bytes() == b"before"


def test_readers_see_the_old_file_until_the_commit(path):
    with files.AtomicFile(path) as file:
        file.write(b"af")
        assert path.read_bytes() == b"before"
        file.write(b"ter")
    assert path.read_bytes() == b"after"


def test_a_failed_write_leaves_the_old_file_and_no_other(path):
    def fails(temporary):
        temporary.write_bytes(b"half")
        raise OSError("disk full")

    assert_raises(OSError, "disk full", write_atomic, path, fails)
    assert path.read_bytes() == b"before"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_an_error_of_the_system_names_the_file_and_not_the_temporary_one(path, monkeypatch, failing):
    monkeypatch.setattr(os, failing, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device", "another name")))
    assert_raises(OSError, r"No space left on device: '.*/kept.txt'", write_atomic, path, b"after")
    assert path.read_bytes() == b"before"
    assert list(path.parent.iterdir()) == [path]


def test_a_function_that_writes_a_file_of_another_mode_leaves_the_users_mode(path):
    def private(temporary):
        temporary.unlink()
        temporary.touch(mode=0o600)
        temporary.write_bytes(b"after")

    mode = path.stat().st_mode
    write_atomic(path, private)
    assert (path.read_bytes(), path.stat().st_mode) == (b"after", mode)


def test_long_names_and_missing_folders(tmp_path):
    write_atomic(tmp_path / ("n" * 250), b"")
    assert_raises(FileNotFoundError, r"none/file'", write_atomic, tmp_path / "none" / "file", b"")


# --- leftovers of killed writers -------------------------------------------------------------------------------------
WRITES_HALF = """
import sys
from pathlib import Path
from accelerant.runtime.files import AtomicFile, write_atomic
def half(path):
    path.unlink()
    path.write_bytes(b"half")  # as safetensors does: another file of the same name
    print("written", flush=True)
    sys.stdin.read()
if sys.argv[2] == "function":
    write_atomic(Path(sys.argv[1]), half)
else:
    with AtomicFile(Path(sys.argv[1])) as file:
        file.write(b"half")
        file.flush()
        print("written", flush=True)
        sys.stdin.read()
"""


@pytest.fixture
def half_written(path, request):
    """A process that is writing `path`, and waits until its input is closed."""
    arguments = [sys.executable, "-c", WRITES_HALF, str(path), getattr(request, "param", "")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"written\n"
        time.sleep(2 * _FRESH_S)
        yield process
        process.kill()


@pytest.mark.parametrize("half_written", ["", "function"], indirect=True)
def test_the_temporary_file_of_a_killed_writer_is_removed_by_the_next_one(path, half_written):
    half_written.kill()
    half_written.wait()
    assert len(list(path.parent.iterdir())) == 2
    write_atomic(path, b"after")
    assert list(path.parent.iterdir()) == [path]
    assert path.read_bytes() == b"after"


def test_the_temporary_file_of_a_living_writer_stays(path, half_written):
    with files.AtomicFile(path) as slow:
        slow.write(b"slow")
        slow.flush()
        time.sleep(2 * _FRESH_S)
        write_atomic(path, b"after")
        assert path.read_bytes() == b"after"
    assert path.read_bytes() == b"slow"
    half_written.stdin.close()
    assert half_written.wait() == 0
    assert path.read_bytes() == b"half"
    assert list(path.parent.iterdir()) == [path]


def test_the_temporary_file_is_locked_until_it_has_its_name(path, monkeypatch):
    sync = os.fsync

    def sync_beside_another_writer(descriptor):
        monkeypatch.setattr(os, "fsync", sync)
        time.sleep(2 * _FRESH_S)
        write_atomic(path, b"another")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync_beside_another_writer)
    write_atomic(path, b"after")
    assert path.read_bytes() == b"after"
    assert list(path.parent.iterdir()) == [path]


def test_only_temporary_files_of_this_name_are_removed(path):
    others = [
        ".kept.txt.tmp", ".kept.txt.12.tmp", ".kept.txt.12.0123abcd.tmp2", ".kept.txt.12.0123ABCD.tmp",
        ".kept.12.0123abcd.tmp", ".kept.txt.old.12.0123abcd.tmp", "kept.txt.12.0123abcd.tmp",
    ]  # fmt: skip
    for name in others:
        (path.parent / name).touch()
    (path.parent / ".kept.txt.1.0123abcd.tmp").mkdir()
    (path.parent / ".kept.txt.2.0123abcd.tmp").symlink_to("kept.txt")
    (path.parent / ".kept.txt.3.0123abcd.tmp").touch()
    time.sleep(2 * _FRESH_S)
    before = set(path.parent.iterdir())
    write_atomic(path, b"after")
    assert before - set(path.parent.iterdir()) == {path.parent / ".kept.txt.3.0123abcd.tmp"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_temporary_folder_goes_with_the_process_that_made_it(tmp_path):
    folder, maker = tmp_path / "folder", os.getpid()
    folder.mkdir()
    (folder / "file").touch()
    child = os.fork()  # which has what its parent has registered with atexit
    if child == 0:
        files.remove_folder_of(maker, str(folder))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (folder / "file").exists()
    files.remove_folder_of(maker, str(folder))
    assert not folder.exists()
    files.remove_folder_of(maker, str(folder))  # gone already: no error
