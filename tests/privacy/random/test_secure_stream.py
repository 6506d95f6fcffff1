"""SecureStream: blocks are used once, keys are nobody else's, and nothing shows them."""

import copy
import os
import pickle

import numpy as np
import pytest
import torch

from accelerant.errors import ConfigError
from accelerant.privacy.random import SecureStream, chacha20_words, key_words
from processes import in_threads
from refusals import assert_raises

KEY = bytes(range(32))


def words_of(stream, n=8):
    return tuple(stream.words(n).tolist())


def in_child(make):
    """What a function gives in a forked process."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, repr(make()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return told


def test_words_are_the_keystream_in_order():
    stream = SecureStream(KEY)
    found = [stream.words(n).numpy().view(np.uint32) for n in (1, 16, 17, 0, 5)]
    blocks = chacha20_words(key_words(KEY), 0, 5).T  # a call begins with a new block
    wanted = [blocks[0, :1], blocks[1], np.concatenate([blocks[2], blocks[3, :1]]), blocks[0, :0], blocks[4, :5]]
    assert all(np.array_equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_keys_are_32_bytes_of_the_systems_entropy(monkeypatch):
    drawn, real = [], os.urandom
    monkeypatch.setattr(os, "urandom", lambda size: drawn.append(real(size)) or drawn[-1])
    streams = SecureStream(), SecureStream()
    assert [len(key) for key in drawn] == [32, 32]
    for stream, key in zip(streams, drawn, strict=True):
        assert words_of(stream, 16) == words_of(SecureStream(key), 16)


def test_the_storage_of_words_has_no_later_ones():
    """A kernel writes whole vectors of blocks; a saved tensor takes its storage along."""
    stream = SecureStream()
    first = stream.words(3)
    stored = torch.empty(0, dtype=torch.int32).set_(first.untyped_storage())
    assert len(stored) > 3
    assert not set(stored[16:].tolist()) & set(stream.words(1000).tolist()) - {0}
    assert not stored[3:].any()


def test_uniform_has_53_bits_in_range():
    x = SecureStream(KEY).uniform(20_000)
    assert x.dtype == torch.float64
    assert x.shape == (20_000,)
    assert x.min() >= 0
    assert x.max() < 1
    assert torch.equal(x * 2**53, (x * 2**53).round())
    assert ((x * 2**53).to(torch.int64) & 1).double().mean().sub(0.5).abs() < 0.02
    assert x.mean().sub(0.5).abs() < 0.01
    counts = torch.histc(x, 20, 0, 1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 50  # chi-square of 19: 43.8 has probability 0.001; the key is fixed


def test_counters_are_never_given_twice_to_threads():
    stream, taken = SecureStream(KEY), []

    def take():
        for _ in range(200):
            taken.append(stream.reserve(3)[1])

    in_threads([take] * 4)
    assert sorted(taken) == list(range(0, 2400, 3))


def test_the_end_of_the_counters_is_refused():
    stream = SecureStream(KEY)
    stream.reserve(2**64 - 2)
    assert_raises(ConfigError, "2\\^64 blocks", stream.reserve, 3)
    assert stream.reserve(2)[1] == 2**64 - 2


@pytest.mark.parametrize("size", [0, 16, 31, 33])
def test_keys_of_another_length_are_refused(size):
    assert_raises(ConfigError, f"32 bytes, got {size}", SecureStream, bytes(size))


def test_streams_differ_and_torchs_seed_changes_nothing():
    torch.manual_seed(1)
    first = words_of(SecureStream())
    torch.manual_seed(1)
    assert words_of(SecureStream()) != first
    fixed = words_of(SecureStream(KEY))
    torch.manual_seed(2)
    assert words_of(SecureStream(KEY)) == fixed


@pytest.mark.parametrize("renew", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_have_keys_of_their_own(renew):
    stream = SecureStream(KEY)
    other, third = renew(stream), renew(stream)
    seen = {words_of(stream), words_of(other), words_of(third), words_of(SecureStream(KEY))}
    assert len(seen) == 3  # the last is the stream's own first
    assert KEY not in pickle.dumps(stream)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_processes_have_keys_of_their_own():
    stream = SecureStream(KEY)
    children = [in_child(lambda: words_of(stream)) for _ in range(2)]
    mine = repr(words_of(stream))
    assert len({mine, *children}) == 3
    assert mine == repr(words_of(SecureStream(KEY)))  # the parent goes on as it was


def test_nothing_shows_the_key():
    stream = SecureStream(KEY)
    assert repr(stream) == str(stream) == "SecureStream()"
    from accelerant.privacy.random import take

    assert repr(take(stream, 1, torch.device("cpu"))) == "Taken()"
    raised = assert_raises(ConfigError, None, stream.reserve, 2**65)
    assert "0x" not in str(raised)
    assert str(key_words(KEY)[0]) not in str(raised)


@pytest.mark.gpu
def test_keystream_on_a_gpu_equals_numpys():
    stream = SecureStream(KEY)
    device_key = chacha20_words(key_words(KEY), 0, 1)[:8, 0]
    found = [stream.words(n, "cuda").cpu().numpy().view(np.uint32) for n in (1000, 16)]
    assert np.array_equal(found[0], chacha20_words(device_key, 0, 63).T.reshape(-1)[:1000])
    assert np.array_equal(found[1], chacha20_words(device_key, 63, 1)[:, 0])
