"""What the tests of the kernels for Hopper share: dtypes, and what attention's kernels take and refuse."""

import torch

from accelerant.runtime.dispatch import Case

HALF = (torch.bfloat16, torch.float16)
IDS = {"ids": lambda value: str(value).removeprefix("torch.")}
ACROSS = [(1, 4, 2, 100, 333, 64), (2, 2, 2, 5, 1000, 64), (2, 2, 1, 1000, 1, 64)]
REFUSED = [  # shape, causal, why
    ((2, 4, 4, 128, 128, 256), True, "up to 128 wide, not 256"),
    ((2, 4, 4, 128, 128, 60), True, "multiple of 8 up to 128 wide, not 60"),
    ((2, 4, 4, 100, 128, 64), True, "not 100 and 128"),
    ((0, 4, 4, 128, 128, 64), True, "empty"),
    ((2, 4, 4, 100, 0, 64), False, "empty"),
]
TAKEN = [  # shape, causal, None
    ((2, 4, 4, 100, 128, 64), False, None),
    ((1, 1, 1, 1, 1, 8), True, None),
    ((2, 8, 2, 4096, 4096, 128), True, None),
]


def each_shape(long, across):
    """Return (shape, causal) for shapes (B, Hq, Hkv, S, Skv, D); the longest of either kind differ by kernel."""
    square = [
        (1, 1, 1, 1, 1, 64), (1, 2, 2, 64, 64, 64), (2, 3, 3, 65, 65, 64), (2, 12, 12, 1024, 1024, 64),
        (1, 4, 2, 777, 777, 64), (2, 8, 1, 300, 300, 128), (1, 2, 2, long, long, 128), (3, 2, 2, 130, 130, 32),
        (1, 5, 5, 513, 513, 96), (1, 2, 2, 9, 9, 8),
    ]  # fmt: skip
    return [(shape, causal) for shape in square for causal in (False, True)] + [
        (shape, False) for shape in (*ACROSS, across)
    ]


def check_refusal(refuses, shape, causal, why, monkeypatch):
    """Check what a kernel says of a case on a Hopper GPU: the reason, or None where it takes the case."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    said = refuses(Case(torch.device("cuda", 0), torch.bfloat16, shape, ("causal",) if causal else ()))
    assert said is None if why is None else why in said
