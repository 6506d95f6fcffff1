"""fp8 on a GPU: a captured step beside bfloat16's, and what the ledger says of it."""

import pytest
import torch

from accelerant.nn import GPT, GPTConfig, optim
from accelerant.nn.train.step import TrainStep
from accelerant.runtime.ledger import ledger

pytestmark = pytest.mark.gpu

CONFIG = GPTConfig(context=256, layers=2)
RATE = 1e-4
"""At 1e-3 the curve itself is ill-conditioned: float32 and bfloat16 part by 0.4 at step 16, and so does bfloat16 from
itself with weights rounded once. At 1e-4 the two stay within 0.003 of one another for 30 steps."""


def losses(precision, steps=30, graph=None):
    torch.manual_seed(0)
    one = GPT(CONFIG).cuda()
    step = TrainStep(
        one,
        optim.AdamW(one.parameters(), weight_decay=0.1),
        one.loss,
        max_grad_norm=1.0,
        precision=precision,
        graph=graph,
    )
    torch.manual_seed(1)
    found = []
    for _ in range(steps):  # new rows each time: of a batch learnt by heart the loss is near 0, where curves part
        rows = torch.randint(0, 500, (4, CONFIG.context + 1)).cuda()
        found.append(step([(rows[:, :-1], rows[:, 1:])], RATE).loss)
    return torch.stack(found), step


def test_a_captured_step_beside_bfloat16():
    ledger().reset()
    fp8, step = losses(torch.float8_e4m3fn)
    assert step.captured
    calls = {row["op"]: row["implementation"] for row in ledger().to_dict()["ops"]}
    assert calls["linear_fp8"] == "cublaslt"
    assert {calls[name] for name in ("fp8_rows", "fp8_gelu", "fp8_dgelu", "fp8_weight")} == {"triton"}
    bf16, _ = losses(torch.bfloat16)
    assert not torch.equal(fp8, bf16)
    assert float(fp8[-1]) < 0.85 * float(fp8[0])
    torch.testing.assert_close(fp8, bf16, rtol=0.03, atol=0.03)


def test_a_captured_step_is_the_eager_one():
    """Within what sums in any order do to a curve."""
    captured, _ = losses(torch.float8_e4m3fn, steps=8)
    eager, step = losses(torch.float8_e4m3fn, steps=8, graph=False)
    assert not step.captured
    torch.testing.assert_close(captured, eager, rtol=2e-3, atol=2e-3)
