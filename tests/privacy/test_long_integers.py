"""Integers of more digits than Python prints, 4,300: every message that shows a user's number shortens them."""

import numpy as np
import pytest
import torch

import accelerant as acl
from accelerant.errors import AccelerantError
from accelerant.privacy import he, mpc
from accelerant.service.bodies import _from_list

H = 10**5000
SHARED = mpc.shamir.split(torch.tensor([5]), 2, 3)
CONFIG = ("batch_size", "timeout_s", "memory_limit_bytes", "devices", "fallback")
CALLS = {
    "paillier.keygen": he.paillier.keygen,
    "paillier.PublicKey": he.paillier.PublicKey,
    "bfv n": he.bfv.keygen,
    "bfv plain_modulus": lambda x: he.bfv.keygen(4096, x),
    "bfv security": lambda x: he.bfv.keygen(4096, 65537, x),
    "bfv.EncryptionParameters": lambda x: he.bfv.EncryptionParameters(x, x, x),
    "shamir threshold": lambda x: mpc.shamir.split(5, x, 3),
    "shamir count": lambda x: mpc.shamir.split(5, 2, x),
    "shamir field": lambda x: mpc.shamir.split(5, 2, 3, field=x),
    "shamir fraction_bits": lambda x: mpc.shamir.split(5.0, 2, 3, fraction_bits=x),
    "shamir curve": lambda x: mpc.shamir.split(5, 2, 3, verifiable=True, curve=x),
    "shamir secret": lambda x: mpc.shamir.split(x, 2, 3),
    "shamir product": lambda x: SHARED[0] * x,
    "beaver.deal_truncations": lambda x: mpc.beaver.deal_truncations(SHARED[0].sharing, x),
    "secure_aggregate threshold": lambda x: mpc.secure_aggregate([torch.ones(2)] * 3, x),
    "secure_aggregate weights": lambda x: mpc.secure_aggregate([torch.ones(2)] * 3, 2, weights=[x] * 3),
    "Accelerator backend": acl.Accelerator,
    "Accelerator device": lambda x: acl.Accelerator("cpu", device=x),
    "Accelerator number in a name": lambda x: acl.Accelerator("cuda:" + "9" * 5000),
    "to": lambda x: acl.to(torch.ones(2), x),
    "softmax": lambda x: acl.Accelerator("cpu").softmax(np.ones((2, 2), np.float32), x),
    "dropout": lambda x: acl.ops.dropout(torch.ones(2), x),
    "gelu": lambda x: acl.ops.gelu(torch.ones(2), x),
    "dropout seed": lambda x: acl.ops.dropout(torch.ones(2), 0.5, seed=x),
    "attention window": lambda x: acl.ops.attention(*[torch.ones(1, 1, 2, 8)] * 3, window=x),
    "conv2d groups": lambda x: acl.ops.conv2d(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 2, 2), groups=x),
    "conv2d stride": lambda x: acl.ops.conv2d(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 2, 2), stride=x),
    "linear_gelu": lambda x: acl.ops.linear_gelu(torch.ones(2, 2), torch.ones(2, 2), approximate=x),
    "cross_entropy": lambda x: acl.ops.cross_entropy(torch.ones(2, 2), torch.tensor([0, 1]), reduction=x),
    "benchmark": lambda x: acl.Accelerator("cpu").benchmark(x),
    "service": lambda x: _from_list("x", [x], (1,), "INT64"),
} | {f"AcceleratorConfig {name}": lambda x, name=name: acl.AcceleratorConfig(**{name: x}) for name in CONFIG}


def refused(call, x):
    with pytest.raises((AccelerantError, TypeError)) as error:
        call(x)
    assert isinstance(error.value, AccelerantError) or "Exceeds" not in str(error.value)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("name", CALLS)
def test_the_message_is_short(name):
    refused(CALLS[name], -H)


def test_arguments_of_keys():
    public, private = he.paillier.keygen(1024, insecure=True)
    encrypted = public.encrypt([1, 2, 3])
    for call in (
        lambda x: public.encrypt([x]),
        lambda x: public.encrypt([1], exponent=x),
        lambda x: public.encrypt([1.0], limit=x),
        lambda x: public.from_ints([4], exponent=x),
        lambda x: public.from_ints([4], dtype=x),
        lambda x: encrypted + x,
        lambda x: encrypted * x,
        lambda x: encrypted.sum(x),
        lambda x: encrypted.reshape(x),
        lambda x: private.decrypt(encrypted, dtype=x),
    ):
        refused(call, -H)
    assert encrypted.sum(np.int64(0)).shape == ()
