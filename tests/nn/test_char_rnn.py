"""CharRNN, and the preset rnn."""

import json

import pytest
import torch

from accelerant.errors import ConfigError, ShapeError, UnsupportedCase
from accelerant.nn import CharRNN, CharRNNConfig
from refusals import assert_raises

cells = pytest.mark.parametrize("cell", ["lstm", "gru"])


def made(cell="lstm", **changes):
    torch.manual_seed(0)
    return CharRNN(CharRNNConfig(**{"vocab_size": 11, "context": 8, "layers": 2, "width": 8, "cell": cell, **changes}))


@cells
def test_the_state_is_carried_from_token_to_token(cell):
    model, idx = made(cell), torch.randint(11, (3, 5))
    tokens = model.generate(idx, 12, temperature=0)  # past the context
    assert tokens.shape == (3, 17)
    assert torch.equal(tokens, model.generate(idx, 12, temperature=0, use_cache=False))
    assert torch.equal(tokens[:, 5], model(idx)[:, -1].argmax(-1))


@cells
def test_the_loss_is_the_cross_entropy_of_the_logits(cell):
    model, idx = made(cell), torch.randint(11, (3, 6))
    targets = torch.randint(11, (3, 6))
    targets[0, 2] = -100
    expected = torch.nn.functional.cross_entropy(model(idx).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model.loss(idx, targets), expected)
    assert model.parameter_count() == sum(one.numel() for one in model.parameters())


def test_refuses():
    assert_raises(ConfigError, "cell must be lstm or gru, got 'rnn'", made, "rnn")
    assert_raises(ConfigError, "width must be at least 1, got 0", made, width=0)
    model = made()
    assert_raises(ShapeError, "at most 8 tokens fit the context, got 9", model, torch.zeros(1, 9, dtype=torch.int64))
    for call in (lambda: CharRNN.from_pretrained("x"), lambda: model.save_pretrained("x")):
        assert_raises(UnsupportedCase, "no format of Hugging Face's", call)
    assert json.loads(json.dumps(model.config.to_dict())) == model.config.to_dict()


@pytest.mark.gpu
@cells
def test_on_a_gpu_a_token_is_a_graph_and_a_step_runs_under_autocast(cell):
    model = made(cell, width=64, context=32).cuda().double()
    idx = torch.randint(11, (3, 5), device="cuda")
    assert torch.equal(model.generate(idx, 40, temperature=0), model.generate(idx, 40, temperature=0, use_cache=False))
    model = model.float()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model.loss(idx, idx)
    loss.backward()
    assert all(one.grad.isfinite().all() for one in model.parameters())
