"""JSON of strangers: what json.loads answers, but for texts too deep to be read without harm."""

import json
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerant.runtime.json_text import MAX_DEPTH, decode_json

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
)


@given(_VALUES)
def test_values_are_those_of_json(value):
    text = json.dumps(value)
    assert decode_json(text) == decode_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_depth_is_bounded(opening, closing):
    deepest = opening * MAX_DEPTH + "1" + closing * MAX_DEPTH
    assert decode_json(deepest) == json.loads(deepest)
    with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} levels"):
        decode_json(f"{opening}{deepest}{closing}")


def test_brackets_side_by_side_and_in_strings_are_not_depth():
    value = [[] for _ in range(1000)] + ['[{"' * 1000, "\\" * 7 + '"[' * 500]
    assert decode_json(json.dumps(value)) == value


@pytest.mark.parametrize("text", ["", "[", '"' + "[" * 200, b"\xff[", "]" * 200 + "[" * 50])
def test_what_is_no_json_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"Expecting|Unterminated|can't decode"):
        decode_json(text)


def test_a_hostile_text_is_read_in_linear_time():
    start = time.process_time()
    for text in ('"' + '\\"' * 500_000 + "[" * 200, "[" * 1_000_000, '"' * 999_999 + "[" * 200):
        with pytest.raises(ValueError, match=r"."):
            decode_json(text)
    assert time.process_time() - start < 5  # quadratic: minutes


def test_a_deep_text_ends_no_process_whose_recursion_limit_was_raised():
    code = (
        "import sys; sys.setrecursionlimit(10**6)\n"
        "from accelerant.runtime.json_text import decode_json\n"
        "try:\n    decode_json('[' * 10**6)\n"
        "except ValueError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("more than"), (done.returncode, done.stderr)
