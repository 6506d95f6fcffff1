"""Noise and draws never repeat: after a fork, in another process, after a resumption, whatever the seeds of torch "
"are."""

import itertools
import json
import os

import pytest
import torch
from loops import classify, mlp, points, private

from accelerant.privacy import dp
from processes import results


def drawn(training):
    """Noise of a release and rows of a draw, as lists."""
    noise = training.optimizer._release.source.integers((16,), 1e4).tolist()
    batch = next(iter(training.batches((torch.arange(512),), steps=1)))
    return [noise, batch.tensors[0].tolist()]


def make(secure):
    torch.manual_seed(0)
    return private(mlp(), 0.5, noise_multiplier=1.0, secure=secure)


def differ(*found):
    noises, rows = zip(*found, strict=True)
    assert len({tuple(each) for each in noises}) == len(found)
    assert len({tuple(each) for each in rows}) == len(found)


@pytest.mark.parametrize("secure", [True, False])
def test_seeds_of_torch_do_not_repeat_it(secure):
    differ(*[drawn(make(secure)) for _ in range(2)])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("secure", [True, False])
def test_a_forked_child_draws_other_noise(secure):
    training = make(secure)
    drawn(training)  # the stream is in use
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, json.dumps(drawn(training)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        theirs = json.loads(pipe.read())
    os.waitpid(child, 0)
    differ(theirs, drawn(training))


def draw_both():
    return [drawn(make(secure)) for secure in (True, False)]


@pytest.mark.slow
def test_another_process_draws_other_noise():
    differ(*itertools.chain(*results(draw_both, (), ()), draw_both()))


def test_a_resumed_training_draws_other_noise():
    """The same state twice: were a key in it, the two would take the same step."""
    data, model = points(), mlp()
    with private(model, 0.5, noise_multiplier=1.0) as training:
        for batch in training.batches(data, steps=1):
            classify(model, *batch.tensors).backward()
            training.optimizer.step()
        state, weights = training.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    found = []
    for _ in range(2):
        again = mlp()
        again.load_state_dict(weights)
        torch.manual_seed(0)
        with private(again, 0.5, noise_multiplier=1.0) as training:
            training.load_state_dict(state)
            found.append(drawn(training))
    differ(*found)


def test_privatizers_and_mechanisms_draw_anew():
    def one():
        torch.manual_seed(0)
        make = dp.Privatizer(noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1.0)
        return [make(torch.zeros(1, 8)), dp.gaussian_noise_(torch.zeros(8), 1.0)]

    (a, b), (c, d) = one(), one()
    assert not torch.equal(a, c)
    assert not torch.equal(b, d)
    assert not torch.equal(a, b)
