"""JSON that strangers may have written. Python's own reader recurses once a level: a deep text can end the process."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_DEPTH = 100
"""Levels of arrays and objects that `decode_json` reads. No file of this program, or of those it reads, has ten."""

_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)  # a string without an end takes what is left, once


def decode_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    json.loads stops at the interpreter's recursion limit, which other packages raise past what the C stack bears; here
    the depth is counted first.

    Args:
        text: JSON; bytes in UTF-8.

    Raises:
        ValueError: it is no JSON, or more than `MAX_DEPTH` levels deep.
    """
    decoded = text.decode("utf-8") if isinstance(text, bytes) else text
    if decoded.count("[") + decoded.count("{") > MAX_DEPTH:
        _check_depth(decoded)
    return json.loads(decoded)


def _check_depth(text: str) -> None:
    depth = 0
    for token in _TOKEN.finditer(text):
        first = token[0][0]
        if first in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"more than {MAX_DEPTH} levels of arrays and objects")
        elif first in "]}":
            depth -= 1
