import math

import pytest
import torch

from accelerant import ops
from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.ops.decode import op
from accelerant.ops.decode.op import attention_decode_reference


def tensors(B=2, Hq=4, Hkv=2, Sq=1, T=70, D=16, lengths=(70, 33)):
    q, caches = torch.randn(B, Hq, Sq, D), [torch.randn(B, Hkv, T, D) for _ in range(2)]
    return q, *caches, torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.parametrize("Sq", [1, 3])
@pytest.mark.sample(2)
def test_is_the_end_of_full_attention(Sq, way):
    q, k, v, lengths = tensors(Sq=Sq)
    o = ops.attention_decode(q, k, v, lengths)
    for b, length in enumerate(lengths.tolist()):
        whole = torch.randn(1, 4, length, 16)
        whole[:, :, length - Sq :] = q[b]
        expected = ops.attention(whole, k[b : b + 1, :, :length], v[b : b + 1, :, :length], causal=True)
        torch.testing.assert_close(o[b], expected[0, :, length - Sq :])


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8])
@pytest.mark.sample(3)
def test_any_number_of_parts_gives_the_same(splits, interpreted):
    q, k, v, lengths = tensors(B=3, Sq=2, T=90, lengths=(90, 17, 1))
    expected = attention_decode_reference(q.double(), k.double(), v.double(), lengths, scale=0.3)
    o = op.launch_forward(q, k, v, lengths, 0.3, splits)
    torch.testing.assert_close(o.double(), expected, rtol=1e-5, atol=1e-5)


def test_what_lies_behind_the_length_is_not_read(way):
    q, k, v, lengths = tensors()
    expected = ops.attention_decode(q, k, v, lengths)
    for cache in (k, v):
        cache[1, :, 33:] = math.nan
    assert torch.equal(ops.attention_decode(q, k, v, lengths), expected)


def test_a_query_without_keys_gives_zeros(way):
    o = ops.attention_decode(*tensors(Sq=3, lengths=(0, 2)))
    assert (o[0] == 0).all()
    assert (o[1, :, 0] == 0).all()
    assert (o[1, :, 1:] != 0).any(-1).all()


def test_lengths_of_either_kind_and_any_layout(way):
    q, k, v, lengths = tensors()
    expected = ops.attention_decode(q, k, v, lengths)
    assert torch.equal(ops.attention_decode(q, k, v, lengths.long()), expected)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    q = q.transpose(2, 3).contiguous().transpose(2, 3)
    torch.testing.assert_close(ops.attention_decode(q, k, v, lengths), expected)


@pytest.mark.slow
def test_has_no_gradient(interpreted):
    q, k, v, lengths = tensors()
    assert not ops.attention_decode(q.requires_grad_(), k, v, lengths).requires_grad
    compiled = torch.compile(ops.attention_decode, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, lengths), ops.attention_decode(q, k, v, lengths))


def test_inside_a_transform():
    q, k, v, lengths = tensors()
    k[1, :, 33:] = math.nan
    o = torch.func.vmap(ops.attention_decode, in_dims=(0, None, None, None))(q[None], k, v, lengths)
    torch.testing.assert_close(o[0], ops.attention_decode(q, k, v, lengths))


@pytest.mark.slow
def test_is_registered_as_torch_wants(interpreted):
    assert set(torch.library.opcheck(torch.ops.accelerant.attention_decode.default, (*tensors(), 0.25)).values()) == {
        "SUCCESS"
    }


def test_keeps_busy_what_there_is(monkeypatch):
    monkeypatch.setattr(op, "multiprocessors", lambda _: 132)
    device = torch.device("cpu")
    assert op.splits_for(8, 100_000, 64, device) == 33
    assert op.splits_for(1, 100_000, 64, device) == op.MAX_SPLITS
    assert op.splits_for(8, 8192, 64, device) == 16  # one a multiprocessor, 512 keys each
    assert op.splits_for(8, 300, 64, device) == 5
    assert op.splits_for(1000, 100_000, 64, device) == 1


@pytest.mark.parametrize(("change", "error", "words"), [
    ({0: torch.zeros(2, 4, 16)}, ShapeError, r"takes q \(B, Hq, Sq, D\)"),
    ({0: torch.zeros(3, 4, 1, 16)}, ShapeError, r"same B and D, got \(3, 4, 1, 16\)"),
    ({0: torch.zeros(2, 3, 1, 16)}, ShapeError, "must divide those of q, got 2 and 3"),
    ({2: torch.zeros(2, 2, 71, 16)}, ShapeError, r"v must be \(2, 2, 70, 16\)"),
    ({3: torch.zeros(3, dtype=torch.int32)}, ShapeError, r"lengths must be \(2,\) .* got \(3,\)"),
    ({3: torch.zeros(2)}, UnsupportedDtype, "int32 or int64, got float32"),
    ({3: torch.zeros(2, dtype=torch.int32, device="meta")}, ShapeError, "on cpu, where q is; it is on meta"),
])  # fmt: skip
def test_refuses(change, error, words):
    args = [change.get(at, x) for at, x in enumerate(tensors())]
    with pytest.raises(error, match=words):
        ops.attention_decode(*args)
