"""Forgeries: provers that are changed in one place, proofs that are changed in one byte; the verifier refuses each."""

import itertools
import struct

import numpy as np
import pytest
import specification
from integer_networks import RELU, random_input, random_network

from accelerant.errors import FormatError, ShapeError, UnsupportedDtype
from accelerant.zk.inference import (
    IntegerNetwork,
    Layer,
    ModelCommitment,
    Network,
    Prover,
    RejectedProofError,
    check,
    proofs,
    prover,
    verifier,
    verify,
)
from accelerant.zk.inference import extension as ext
from accelerant.zk.inference.proofs import InferenceProof
from accelerant.zk.inference.verifier import COMMITMENT_HEADER, IDENTITY, PROOF_HEADER, P, shape_bits
from refusals import assert_raises

WIDTHS = [4, 4, 4, 2]


@pytest.fixture(scope="module")
def honest():
    """A network with unsaturated outputs, whose second layer's channels have multipliers; and a proof."""
    generator = np.random.default_rng(7)
    network = random_network(generator, WIDTHS, tables=(RELU,), biases=100)
    common = network.network.layers[1].multiplier
    network = changed_network(network, layer=1, multiplier=(common, common // 2, 1000, common - 1))
    x = random_input(generator, network)
    committed = Prover(network)
    return committed, x, *committed.prove(x)


def changed_network(network, *, layer=0, **changes):
    """Return the network with other public parameters, or with other weights or biases."""
    layers = list(network.network.layers)
    weights, biases = changes.pop("weights", network.weights), changes.pop("biases", network.biases)
    layers[layer] = layers[layer]._replace(**changes)
    return IntegerNetwork(network.network._replace(layers=tuple(layers)), weights, biases)


def changed_arrays(arrays, layer, index, by):
    changed = [array.copy() for array in arrays]
    changed[layer][index] += by
    return changed


def assert_refused(commitment, x, y, proof, reason=None, *, specified=True):
    """The package's verifier refuses, and says why; and so does the other one."""
    assert not verify(commitment, x, y, proof)
    assert_raises(RejectedProofError, reason, check, commitment, x, y, proof)
    if specified:
        with pytest.raises(specification.RejectedError):
            specification.check(commitment.to_bytes(), len(x), x.tobytes(), y.tobytes(), proof)


def speaker_of(committed, x, y):
    """Return the transcript of a prover who claims that the committed network maps x to y."""
    root, batch = committed.commitment.checked.root, len(x).to_bytes(8, "little")
    public = committed.network.network.encode()
    return prover.Speaker(PROOF_HEADER, PROOF_HEADER, public, root, batch, x.tobytes(), y.tobytes())


# --- another statement -----------------------------------------------------------------------------------------------
def test_the_honest_proof_is_accepted(honest):
    committed, x, y, proof = honest
    assert (y == committed.network(x)).all()
    assert (np.abs(y) < 127).all()
    check(committed.commitment, x, y, proof)


@pytest.mark.parametrize("by", [1, 64, -128])
def test_another_input_or_output(honest, by):
    committed, x, y, proof = honest
    for i in range(x.size):
        other = x.copy()
        other[0, i] ^= by
        assert_refused(committed.commitment, other, y, proof)
    for i in range(y.size):
        other = y.copy()
        other[0, i] ^= by
        assert_refused(committed.commitment, x, other, proof, "another output")


def test_another_batch(honest):
    committed, x, y, proof = honest
    assert_refused(committed.commitment, np.repeat(x, 2, 0), np.repeat(y, 2, 0), proof)
    both, together = committed.prove(np.concatenate((x, -x)))
    assert_refused(committed.commitment, x, both[:1], together)
    assert_refused(committed.commitment, np.concatenate((-x, x)), both[::-1], together)
    assert_raises(ShapeError, r"x must be \(batch, 4\)", lambda: check(committed.commitment, x[:, :3], y, proof))
    many = np.zeros((1 << 12, 4), np.int8)
    with pytest.raises(ShapeError, match="x has 4096 inputs: the batch is too large for this network: divide it"):
        committed.prove(many)
    assert_refused(committed.commitment, many, np.zeros((1 << 12, 2), np.int8), proof, "the batch is too large")
    assert_raises(UnsupportedDtype, "the proof must be bytes, got int", check, committed.commitment, x, y, 10**10)
    with pytest.raises(ShapeError, match="x and y must have one batch size, got 1 and 2"):
        check(committed.commitment, x, np.repeat(y, 2, 0), proof)
    assert_raises(ShapeError, r"y must be \(batch, 2\)", lambda: check(committed.commitment, x, y[:, :1], proof))


def other_networks(network):
    yield "weight", changed_network(network, weights=changed_arrays(network.weights, 1, (0, 0), 1))
    yield "bias", changed_network(network, biases=changed_arrays(network.biases, 2, 1, 1))
    yield "multiplier", changed_network(network, layer=2, multiplier=network.network.layers[2].multiplier - 1)
    first, *others = network.network.layers[1].multiplier
    yield "a channel's multiplier", changed_network(network, layer=1, multiplier=(first - 1, *others))
    yield "multipliers permuted", changed_network(network, layer=1, multiplier=(*others, first))
    yield "channels' multipliers", changed_network(network, layer=0, multiplier=(9000, 9001, 9000, 9000))
    yield "one multiplier for all channels", changed_network(network, layer=1, multiplier=first)
    yield "table", changed_network(network, layer=0, table=bytes(255) + b"\x7f")
    exchanged = [[each[1], each[0], each[2]] for each in (network.network.layers, network.weights, network.biases)]
    yield "layers exchanged", IntegerNetwork(Network(tuple(exchanged[0])), *exchanged[1:])
    yield "scale", IntegerNetwork(network.network._replace(input_scale=2.0), network.weights, network.biases)


def test_a_proof_of_another_commitment(honest):
    committed, x, y, proof = honest
    seen = {committed.commitment.digest}
    for what, network in other_networks(committed.network):
        other = Prover(network)
        assert other.commitment.digest not in seen, what
        seen.add(other.commitment.digest)
        assert_refused(other.commitment, x, y, proof)
        their_y, their_proof = other.prove(x)
        assert_refused(committed.commitment, x, their_y, their_proof)


def test_constants_are_bound_to_the_commitment(honest, monkeypatch):
    """A prover who computes with another multiplier, table or bias, but names the committed network."""
    committed, x, _, _ = honest
    public = committed.network.network.encode()
    for what, network in other_networks(committed.network):
        if what in ("layers exchanged", "scale"):
            continue
        other = Prover(network)
        other.commitment = committed.commitment
        with monkeypatch.context() as patch:
            patch.setattr(Network, "encode", lambda self: public)
            run = InferenceProof(other, x)
        assert_refused(committed.commitment, x, *run.run())


# --- every byte ------------------------------------------------------------------------------------------------------
@pytest.mark.soak
@pytest.mark.parametrize("what", ["proof", "commitment"])
def test_every_byte(honest, what, rng, monkeypatch):
    """A bit of each byte: of what a tree reads, whose reading alone is repeated, and of all messages before."""
    committed, x, y, proof = honest
    data = proof if what == "proof" else committed.commitment.to_bytes()
    call = (lambda data: check(committed.commitment, x, y, data)) if what == "proof" else ModelCommitment
    tried = []

    def changed(part, at):
        return part[:at] + bytes([part[at] ^ 1 << rng.randrange(8)]) + part[at + 1 :]

    def reading(true):
        def read(self, channel, *arguments):
            whole, begin = channel.proof, channel.at
            result = true(self, channel, *arguments)
            part = whole[begin : channel.at]
            for at in range(len(part)):
                channel.proof, channel.at = changed(part, at), 0
                assert_raises(RejectedProofError, "Merkle tree", true, self, channel, *arguments)
            channel.proof, channel.at = whole, begin + len(part)
            tried.append(len(part))
            return result

        return read

    opened = verifier.Tree.open
    again = reading(lambda self, channel, index: opened(self, index))
    with monkeypatch.context() as patch:
        patch.setattr(verifier.Tree, "__init__", reading(verifier.Tree.__init__))
        patch.setattr(verifier.Tree, "open", lambda self, index: again(self, self.channel, index))
        call(data)
    for at in range(len(data) - sum(tried)):
        assert_raises((RejectedProofError, FormatError), None, call, changed(data, at))


@pytest.mark.slow
@pytest.mark.search(2)
def test_no_byte_of_a_proof_can_be_changed(honest, rng, record_property):
    committed, x, y, proof = honest
    head = range(0, len(PROOF_HEADER) + 300, 13)
    for i, at in enumerate(flips := [*head, *sorted(rng.sample(range(len(proof)), 30)), len(proof) - 1]):
        changed = bytearray(proof)
        changed[at] ^= 1 << rng.randrange(8)
        assert_refused(committed.commitment, x, y, bytes(changed), specified=i % 8 == 0)
    record_property("examples", len(flips))


@pytest.mark.search(1)
def test_no_byte_of_a_commitment_can_be_changed(honest, rng, record_property):
    """A change of the public part or of the root is another commitment, which the range proof refuses."""
    data = honest[0].commitment.to_bytes()
    multipliers = data.index(struct.pack("<4I", *honest[0].network.network.layers[1].by_channel))
    head = [*range(0, len(COMMITMENT_HEADER) + 340, 11), *range(multipliers, multipliers + 16)]
    for i, at in enumerate(flips := [*head, *sorted(rng.sample(range(len(data)), 40)), len(data) - 1]):
        changed = bytearray(data)
        changed[at] ^= 1 << rng.randrange(8)
        assert_raises(FormatError, "model commitment", ModelCommitment, bytes(changed))
        if i % 6 == 0:
            assert_raises(specification.RejectedError, None, specification.check_commitment, bytes(changed))
    record_property("examples", len(flips))


def test_lengths_that_lie(honest):
    committed, x, y, proof = honest
    for length in (0, 1, len(PROOF_HEADER), len(PROOF_HEADER) + 5, len(proof) // 2, len(proof) - 1):
        assert_refused(committed.commitment, x, y, proof[:length])
    assert_refused(committed.commitment, x, y, proof + b"\0", "1 bytes follow")
    assert_refused(committed.commitment, x, y, committed.commitment.to_bytes(), "no proof of inference")
    data = committed.commitment.to_bytes()
    at = len(COMMITMENT_HEADER)
    wide = (1 << 16).to_bytes(4, "little")
    announced = {
        "layers, more than 256": data[:at] + b"\xff" * 4 + data[at + 4 :],
        r"takes an input of \(4, 1, 1\), and \(65536, 1, 1\) comes": data[: at + 24] + wide + data[at + 28 :],
        r"a table of 2\^33 entries": data[:at] + b"\1" + data[at + 1 : at + 20] + wide * 2 + data[at + 28 :],
        "is cut off": data[: at + 20],
    }
    for message, lie in announced.items():
        assert_raises(FormatError, message, ModelCommitment, lie)
        assert_raises(specification.RejectedError, None, specification.check_commitment, lie)


def test_the_verifier_itself_checks_lengths(honest):
    """Who calls it without arrays has no shapes that were compared before."""
    committed, x, y, proof = honest
    checked, x, y = committed.commitment.checked, x.tobytes(), y.tobytes()
    verifier.check_inference(checked, 1, x, y, proof)
    for batch, one, other in ((0, b"", b""), (1, x + b"\0", y), (1, x[:-1], y), (1, x, y + b"\0"), (2, x, y)):
        with pytest.raises(RejectedProofError, match=r"the batch must be at least 1|bytes, not"):
            verifier.check_inference(checked, batch, one, other, proof)


def test_types_that_are_no_bytes_and_no_commitment(honest):
    committed, x, y, proof = honest
    data = committed.commitment.to_bytes()
    for copy in (bytearray, memoryview):
        check(ModelCommitment(copy(data)), x, y, copy(proof))
        assert hash(ModelCommitment(copy(data))) == hash(committed.commitment)
        assert IntegerNetwork.from_bytes(copy(committed.network.to_bytes())).network == committed.network.network
    for read in (ModelCommitment, IntegerNetwork.from_bytes):
        assert_raises(UnsupportedDtype, "must be bytes, got str", read, "text")
    for other in (data, committed.commitment.checked, committed, None):
        assert_raises(UnsupportedDtype, "must be a ModelCommitment, got", check, other, x, y, proof)


# --- images ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def convolutions():
    """Three convolutions of 3x5x4 pixels, of which the last adds the output of the first; and a proof."""
    generator = np.random.default_rng(3)
    first = Layer(3, 3, 20_000, RELU, image=(5, 4), kernel=(3, 3), padding=1)
    layers = [first, first, Layer(3, 3, (40_000, 39_999, 900), IDENTITY, image=(5, 4), skip=2, skip_multiplier=1 << 22)]
    weights = [generator.integers(-128, 128, (3, 3, *each.kernel)).astype(np.int8) for each in layers]
    network = IntegerNetwork(Network(tuple(layers)), weights, generator.integers(-9000, 9000, (3, 3)))
    committed, x = Prover(network), random_input(generator, network)
    return committed, x, *committed.prove(x)


def test_another_pixel(convolutions):
    committed, x, y, proof = convolutions
    check(committed.commitment, x, y, proof)
    for at in range(0, x.size, 11):
        for array in (other_x := x.copy(), other_y := y.copy()):
            array.reshape(-1)[at] ^= 1
        assert_refused(committed.commitment, other_x, y, proof)
        assert_refused(committed.commitment, x, other_y, proof)
    for other in (x[:, ::-1], x[:, :, ::-1], x[..., ::-1]):
        assert_refused(committed.commitment, other, y, proof)


@pytest.mark.parametrize("axes", [(-1,), (-2,), (-2, -1)])
def test_another_geometry(convolutions, axes, monkeypatch):
    """A prover whose convolutions flip the image, in the witness, or in the witness and in the sumchecks."""
    committed, x, y, _ = convolutions
    windows, products = proofs.windows, proofs._products
    monkeypatch.setattr(proofs, "_products", lambda image, *layer: products(np.flip(image, axes), *layer))
    other, proof = committed.prove(x)
    assert (other != y).any()
    assert_refused(committed.commitment, x, other, proof, "the product of layer 0")
    monkeypatch.setattr(proofs, "_products", products)
    monkeypatch.setattr(proofs, "windows", lambda image, layer: windows(np.flip(image, axes), layer))
    other, proof = committed.prove(x)
    assert_refused(committed.commitment, x, other, proof, "the image of layer 0")


@pytest.mark.parametrize("changes", [{"skip_multiplier": 1 << 21}, {"skip": 1}, {"skip": 0}, {"source": 2}], ids=str)
def test_another_graph(convolutions, changes, monkeypatch):
    """A prover whose last layer is another, under the name of the committed network."""
    committed, x, y, _ = convolutions
    public = committed.network.network.encode()
    other = Prover(changed_network(committed.network, layer=2, **changes))
    other.commitment = committed.commitment
    monkeypatch.setattr(Network, "encode", lambda self: public)
    wrong, proof = other.prove(x)
    assert (wrong != y).any()
    monkeypatch.undo()
    assert_refused(committed.commitment, x, wrong, proof)


# --- provers that lie ------------------------------------------------------------------------------------------------
class LyingProof(InferenceProof):
    """A run with other columns of activations; multiplicities are those of the honest ones."""

    def __init__(self, committed, x, lie, row=None):
        self.lie = lie
        super().__init__(committed, x)
        self.row = self.layout.rows[-1] if row is None else row

    def columns(self):
        self.true_columns = super().columns()
        lies = self.true_columns.copy()
        self.lie(lies, self.row)
        output = lies[7, self.layout.rows[-1] :][: self.padded_output.size]
        self.padded_output = output.astype(np.int8).reshape(self.padded_output.shape)
        return lies

    def table_indices(self, columns):
        return super().table_indices(self.true_columns)


def another_output(columns, row):
    columns[7, row] += 1


def another_rounding(columns, row):
    columns[6:, row] -= 1  # u and y one below, and the remainder 2^24 above
    columns[2, row] += 256


def remainder_below_zero(columns, row):
    columns[6:, row] += 1
    columns[2, row] -= 256


def overflow_without_saturation(columns, row):
    columns[3, row] = -5
    columns[6:, row] += 5


def saturation_of_the_other_sign(columns, row):
    columns[3, row] = columns[6, row] - 255
    columns[6:, row] = (255, 127)


def wrapped_modulo_p(columns, row):
    """The accumulator plus p saturates: a quotient of 2^40, whose top digit is no byte."""
    value = P + int(columns[:3, row] @ [1, 1 << 8, 1 << 16]) + ((int(columns[6, row]) - 128) << 24)
    q, r = value >> 24, value & 0xFFFFFF
    columns[:3, row] = [r >> 8 * i & 255 for i in range(3)]
    columns[3:6, row] = [(q - 127) & 255, (q - 127) >> 8 & 255, (q - 127) >> 16]
    columns[6:, row] = (255, 127)


def remainder_takes_all(columns, row):
    columns[0, row] += (int(columns[6, row]) - 128 - 99) << 24
    columns[6:, row] = (128 + 99, 99)


LIES = [
    another_output, another_rounding, remainder_below_zero, overflow_without_saturation, saturation_of_the_other_sign,
    wrapped_modulo_p, remainder_takes_all,
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_values_out_of_their_tables(honest, lie):
    """All lies satisfy equation (1), modulo p, but the first."""
    committed, x, y, _ = honest
    run = LyingProof(committed, x, lie)
    _, proof = run.run()
    forged = run.padded_output[:, : y.shape[1]]
    assert (forged != y).any()
    statement = forged.copy()  # also said in the transcript
    run = LyingProof(committed, x, lie)
    run.y, run.speaker = statement, speaker_of(committed, x, statement)
    assert_refused(committed.commitment, x, statement, run.run()[1], "a lookup is not in its table")
    assert_refused(committed.commitment, x, statement, proof)


def test_a_lie_in_a_table_that_is_in_the_table(honest):
    """Columns that are in all tables but break equation (1): the product is another."""
    committed, x, _, _ = honest

    def lie(columns, row):
        columns[0, row] ^= 1

    run = LyingProof(committed, x, lie, row=0)
    run.table_indices = lambda columns: InferenceProof.table_indices(run, columns)
    assert_refused(committed.commitment, x, *run.run(), "the product of layer")


def test_errors_of_channels_that_cancel(honest):
    """Remainders of two channels that are off by 1 and -1, or by their multipliers: it is no sum that is shown."""
    committed, x, _, _ = honest
    multipliers = committed.network.network.layers[1].by_channel
    for layer, (one, other) in itertools.product((1, 2), ((1, -1), (multipliers[1], -multipliers[0]), multipliers[:2])):

        def lie(columns, row, one=one, other=other):
            columns[:3, row] = of_digits(columns[:3, row], one)
            columns[:3, row + 1] = of_digits(columns[:3, row + 1], other)

        run = LyingProof(committed, x, lie, row=0)
        run.row = run.layout.rows[layer]
        run.table_indices = lambda columns, run=run: InferenceProof.table_indices(run, columns)
        assert_refused(committed.commitment, x, *run.run(), f"the product of layer {layer}")


@pytest.mark.parametrize("off", [0, 1])
@pytest.mark.parametrize("lie", ["multipliers", "zeros", "sum", "point", "factor"])
def test_lies_in_the_sum_over_channels(honest, lie, off, monkeypatch):
    """A true witness, or one with the remainder of a channel off by 1; and a prover who says other than the sum."""
    committed, x, _, _ = honest

    def columns_off(columns, row):
        columns[:3, row] = of_digits(columns[:3, row], off)

    run = LyingProof(committed, x, columns_off, row=0)
    run.row = run.layout.rows[1]
    run.table_indices = lambda columns: InferenceProof.table_indices(run, columns)
    layers, send, true = run.layers, run.speaker.send, run.show_channels
    first = itertools.count()

    def said(data):
        if lie == "zeros":
            return send(bytes(len(data)))
        return send(
            data if next(first) else ((int.from_bytes(data[:8], "little") + 1) % P).to_bytes(8, "little") + data[8:]
        )

    def show_channels(index, z):
        run.speaker.send = said if lie in ("zeros", "sum") else send
        if lie == "multipliers":
            run.layers = (layers[0], layers[1]._replace(multiplier=layers[1].by_channel[::-1]), layers[2])
        point, factor = true(index, z)
        run.layers, run.speaker.send = layers, send
        if lie == "point":
            return z[shape_bits(layers[1].output_shape[1:]) :][: len(point)], factor
        return point, ext.mul(factor, factor) if lie == "factor" else factor

    run.show_channels = show_channels
    assert_refused(committed.commitment, x, *run.run(), None if lie == "point" else "the product of layer 1")


def of_digits(digits, by):
    """Return the digits of a remainder with an amount added, modulo 2^24."""
    return [(int(digits @ [1, 1 << 8, 1 << 16]) + by) % (1 << 24) >> 8 * i & 255 for i in range(3)]


@pytest.mark.search(2)
def test_no_entry_of_the_witness_can_be_changed(convolutions, rng, record_property):
    """Random entries of random columns, in rows of activations, by random amounts."""
    committed, x, _, _ = convolutions
    for i in range(examples := 12):
        column, amount = rng.randrange(8), rng.choice([1, -1, 256, rng.randrange(1, 1 << 62)])

        def lie(columns, row, column=column, amount=amount):
            columns[column, row] += amount

        run = LyingProof(committed, x, lie)
        run.row = rng.choice(run.layout.rows) + rng.randrange(1 << run.layout.logs[0])
        assert_refused(committed.commitment, x, *run.run(), specified=i % 3 == 0)
    record_property("examples", examples)


@pytest.mark.search(2)
def test_a_prover_that_changes_what_it_says_or_commits_to_is_refused(convolutions, rng, record_property):
    """One element of a message, or an entry of a committed table, by a random amount; the prover goes on with it."""
    committed, x, _, _ = convolutions
    count = messages(committed, x)
    for i in range(examples := 12):
        run, calls, amount = (
            InferenceProof(committed, x),
            itertools.count(),
            rng.choice([1, P - 1, rng.randrange(1, P)]),
        )
        if rng.randrange(2):
            wrong, send = rng.randrange(count), run.speaker.send

            def said(data, calls=calls, wrong=wrong, send=send, amount=amount):
                if next(calls) != wrong:
                    return send(data)
                at = 8 * rng.randrange(len(data) // 8)
                word = int.from_bytes(data[at : at + 8], "little")
                word = (word + amount) % P if len(data) % 16 == 0 and len(data) != 32 else word ^ amount
                return send(data[:at] + word.to_bytes(8, "little") + data[at + 8 :])

            run.speaker.send = said
            assert_refused(committed.commitment, x, *run.run(), specified=i % 3 == 0)
            continue
        wrong = rng.randrange(2)  # the witness or the table of h

        def table(values, log_rows, parts, space, calls=calls, wrong=wrong, amount=amount):
            if next(calls) == wrong:
                start, size = rng.choice(parts)
                at = start + rng.randrange(size)
                values[at] = (int(values[at]) + amount) % P
            return prover.CommittedTable(values, log_rows, parts, space)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(proofs, "CommittedTable", table)
            forged = run.run()
        assert_refused(committed.commitment, x, *forged, specified=i % 3 == 0)
    record_property("examples", examples)


@pytest.mark.parametrize("entry", [-1, 1, 300])
def test_weights_that_are_no_bytes(honest, entry, monkeypatch):
    """A committed weight of 128 or more, or of -129 or less: the range proof refuses."""
    network = honest[0].network
    true = Prover._byte_table

    def table(self):
        values = true(self).astype(np.int64)
        values[0] = entry if entry < 0 else 255 + entry
        return ext.words(values)

    monkeypatch.setattr(Prover, "_byte_table", table)
    monkeypatch.setattr(np, "bincount", lambda values, minlength: np.histogram(values, range(minlength + 1))[0])
    assert_raises(FormatError, "a lookup is not in its table", Prover, network)


@pytest.mark.parametrize("count", [0, 1])
def test_other_multiplicities(honest, count, monkeypatch):
    committed, x, _, _ = honest
    monkeypatch.setattr(proofs.np, "bincount", lambda values, minlength: np.full(minlength, count))
    assert_refused(committed.commitment, x, *committed.prove(x), "a lookup is not in its table")


def messages(committed, x):
    """Return the number of messages in a proof."""
    run = InferenceProof(committed, x)
    counts = itertools.count()
    absorb = run.speaker.absorb
    run.speaker.absorb = lambda data: (next(counts), absorb(data))
    run.run()
    return next(counts)


@pytest.mark.sample(4)
@pytest.mark.parametrize("first", range(4))
def test_each_message_is_absorbed(honest, first):
    """A prover whose transcript leaves out one message, whichever, is refused; among them are all claims."""
    committed, x, _, _ = honest
    network = committed.network
    committed = Prover(IntegerNetwork(Network(network.network.layers[:2]), network.weights[:2], network.biases[:2]))
    count = messages(committed, x)
    for left_out in range(first, count, 4):
        run = InferenceProof(committed, x)
        counts, absorb = itertools.count(), run.speaker.absorb
        run.speaker.absorb = lambda data, c=counts, a=absorb, k=left_out: None if next(c) == k else a(data)
        assert_refused(committed.commitment, x, *run.run(), specified=left_out % 16 == first)
    assert count > 40


@pytest.mark.parametrize("part", range(6))
def test_each_part_of_the_statement_is_absorbed(honest, part):
    """A prover whose transcript has another version, network, root, batch size, input or output."""
    committed, x, _, _ = honest
    run = InferenceProof(committed, x)
    statement = [PROOF_HEADER, committed.network.network.encode(), committed.commitment.checked.root,
                 (1).to_bytes(8, "little"), x.tobytes(), run.y.tobytes()]  # fmt: skip
    same = prover.Speaker(PROOF_HEADER, *statement)
    assert same.state == run.speaker.state
    statement[part] = statement[part][:-1] + bytes([statement[part][-1] ^ 1])
    run.speaker = prover.Speaker(PROOF_HEADER, *statement)
    assert_refused(committed.commitment, x, *run.run())


@pytest.mark.parametrize(
    ("rounds", "reason"),
    [(0, "a fold of the code"), (1, "the last fold of the code"), (None, "the claims on committed tables do not hold")],
)
def test_a_false_claim_on_a_committed_table(honest, rounds, reason, monkeypatch):
    """Another output, under which the witness is true: the claim that both are equal is off by eq(z, 0)."""
    committed, x, _, _ = honest
    run = InferenceProof(committed, x)
    run.padded_output = run.padded_output + np.eye(1, run.padded_output.size, dtype=np.int8).reshape(
        run.padded_output.shape
    )
    run.y = committed.network.outward(run.padded_output)
    run.speaker = speaker_of(committed, x, run.y)
    challenge, bind, one_round, drawn, error = run.speaker.challenge, prover.bind_columns, prover.sumcheck_round, [], []

    def corrected(tables):
        changed, row = tables.copy(), tables[:, 1].any(axis=0).argmax()
        off = ext.mul(np.array(error[-1], np.uint64)[:, None], ext.inverse(tables[:, 1, row : row + 1]))
        changed[:, 0, row : row + 1] = ext.add(tables[:, 0, row : row + 1], off)
        return changed

    def after(value, challenges):
        for z in challenges:  # z (2 - z) is the polynomial of degree 2 that is 1 at 1, and 0 at 0 and 2
            value = verifier.mul(value, verifier.mul(z, verifier.sub((2, 0), z)))
        return value

    def recorded_bind(speaker, stack, tables, claims):
        drawn.clear()
        left = bind(speaker, stack, tables, claims)
        off = verifier.eq(claims[-1].point, [verifier.ZERO] * len(claims[-1].point))
        for _ in claims[1:]:
            off = verifier.mul(off, drawn[0])
        error.append(after(off, drawn[1:]))
        return corrected(left) if rounds == 0 else left

    def recorded_round(speaker, tables, degree, combine):
        z, tables = one_round(speaker, tables, degree, combine)
        if error:
            error.append(after(error[-1], [z]))
        return z, corrected(tables) if rounds and len(error) == rounds + 1 else tables

    run.speaker.challenge = lambda: (drawn.append(challenge()), drawn[-1])[1]
    monkeypatch.setattr(prover, "bind_columns", recorded_bind)
    monkeypatch.setattr(prover, "sumcheck_round", recorded_round)
    assert_refused(committed.commitment, x, *run.run(), reason)


def test_weights_in_the_padding_do_not_count(generator, monkeypatch):
    """Four channels committed as three, whose tables are as large: only the mask of the channels refuses the fourth."""
    five = bytes([5]) * 256
    layers = Layer(3, 3, 1000, five), Layer(3, 2, 1 << 17, IDENTITY)
    public, wide = Network(layers), Network((layers[0]._replace(outputs=4), layers[1]._replace(inputs=4)))
    weights = [np.zeros((4, 3), np.int8), np.array([[1, 2, 3, 90], [4, 5, 6, 0]], np.int8)]
    x, named, true, calls = np.ones((1, 3), np.int8), public.encode(), proofs.sumcheck, itertools.count()

    def without_mask(speaker, tables, degree, combine):
        if next(calls) % 2 == 0:  # the sums over channels, the others are over pixels
            ones = np.zeros_like(tables[:, :1])
            ones[0] = 1
            tables, degree = np.concatenate((tables[:, :2], ones), axis=1), 3
        return true(speaker, tables, degree, combine)

    with monkeypatch.context() as patch:
        patch.setattr(Network, "encode", lambda self: named)
        patch.setattr(proofs, "sumcheck", without_mask)
        other = Prover(IntegerNetwork(wide, weights, [[0] * 4, [0] * 2]))
        y, proof = other.prove(x)
    assert other.commitment.network == public
    narrow = IntegerNetwork(public, [weights[0][:3], weights[1][:, :3]], [[0] * 3, [0] * 2])
    assert (y != narrow(x)).any()
    assert_refused(other.commitment, x, y, proof, "the product of layer")
    monkeypatch.setattr(verifier, "eq_below", lambda point, count: verifier.ONE)
    check(other.commitment, x, y, proof)


# --- other encodings, trees, degrees and shapes ----------------------------------------------------------------------
@pytest.mark.parametrize("where", ["messages", "leaves"])
def test_zeros_that_are_written_as_p(honest, where, monkeypatch):
    """Overflows are zeros here: their claims, and their words in leaves, which the tree then contains so."""
    committed, x, _, _ = honest
    run, zero, changed = InferenceProof(committed, x), bytes(8), []
    send, leaves = run.speaker.send, prover.CommittedTable._leaves

    def said(data):
        if len(data) % 16 == 0 and len(data) > 32:  # elements
            changed.append(zero in (words := [data[i : i + 8] for i in range(0, len(data), 8)]))
            data = b"".join(P.to_bytes(8, "little") if word == zero else word for word in words)
        send(data)

    def with_p(table, coset):
        words = leaves(table, coset)
        changed.append((words == 0).any())
        return np.where(words == 0, np.uint64(P), words)

    if where == "messages":
        run.speaker.send = said
    else:
        monkeypatch.setattr(prover.CommittedTable, "_leaves", with_p)
    assert_refused(committed.commitment, x, *run.run(), "not below the modulus")
    assert any(changed)


@pytest.mark.parametrize("prefix", [b"leaf", b"node"])
def test_leaves_are_no_nodes(honest, prefix, monkeypatch):
    """Trees that hash leaves as nodes, or nodes as leaves, so that one could be taken for the other."""
    committed, x, _, _ = honest
    monkeypatch.setattr(prover, "hashed", lambda rows, _, space, true=prover.hashed: true(rows, prefix, space))
    assert_refused(committed.commitment, x, *committed.prove(x), "an opening does not match its Merkle tree")


@pytest.mark.parametrize("table", [0, 1])
def test_columns_in_another_order(honest, table, monkeypatch):
    """A tree of the witness or of h that has its columns exchanged, under claims that are true."""
    committed, x, _, _ = honest
    numbers, leaves = itertools.count(), prover.CommittedTable._leaves
    monkeypatch.setattr(
        prover.CommittedTable, "_leaves",
        lambda self, coset: leaves(self, coset)[:, ::-1] if next(numbers) // 4 == table else leaves(self, coset),
    )  # fmt: skip
    assert_refused(committed.commitment, x, *committed.prove(x), "a fold of the code is wrong")


def test_activations_of_two_layers_exchanged(honest):
    committed, x, _, _ = honest
    run = InferenceProof(committed, x)
    run.layout.rows[:2] = reversed(run.layout.rows[:2])
    assert_refused(committed.commitment, x, *run.run(), "the claims on committed tables do not hold")


@pytest.mark.search(1)
def test_round_polynomials_of_a_higher_degree(honest, rng, record_property):
    """A round of a sumcheck with one more value, which a verifier who read lengths would interpolate."""
    committed, x, _, _ = honest
    for i in range(examples := 6):
        calls, wrong, true = itertools.count(), rng.randrange(37), prover.sumcheck_round

        def one_round(speaker, tables, degree, combine, calls=calls, wrong=wrong, true=true):
            return true(speaker, tables, degree + (next(calls) == wrong), combine)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prover, "sumcheck_round", one_round)
            forged = committed.prove(x)
        assert next(calls) >= 37
        assert_refused(committed.commitment, x, *forged, specified=i % 3 == 0)
    record_property("examples", examples)


@pytest.mark.parametrize("changes", [{"QUERIES": 8}, {"LOG_FINAL": 7}, {"LOG_ARITY": 2}, {"LOG_CAP": 2}], ids=str)
def test_other_parameters(honest, changes, monkeypatch):
    """A prover with fewer queries, a longer last message, other folds or a lower cap."""
    committed, x, _, _ = honest
    for name, value in changes.items():
        for module in (verifier, prover):
            monkeypatch.setattr(module, name, value, raising=False)
    forged = InferenceProof(committed, x).run()
    monkeypatch.undo()
    assert_refused(committed.commitment, x, *forged)


def test_the_padding_of_a_batch(honest):
    """Three inputs have the tables of four: the fourth is of zeros, and is no part of a statement."""
    committed, x, _, _ = honest
    four = np.concatenate((x, -x, x // 2, x * 0))
    for fourth, reason in ((x * 0, None), (x, "the image of layer 0 is wrong")):
        four[3:] = fourth
        run = InferenceProof(committed, four)
        run.y = run.y[:3]
        run.speaker = speaker_of(committed, four[:3], run.y)
        y, proof = run.run()
        if reason is None:
            check(committed.commitment, four[:3], y, proof)
            assert_refused(committed.commitment, four, committed.network(four), proof)
        else:
            assert_refused(committed.commitment, four[:3], y, proof, reason)


def test_proofs_of_parts_of_a_network(honest):
    """Proofs of the first layer and of the others, apart or joined, are none of the network; nor is its of them."""
    committed, x, y, proof = honest
    network = committed.network
    parts = [slice(1), slice(1, 3)]
    provers = [
        Prover(IntegerNetwork(Network(network.network.layers[each]), network.weights[each], network.biases[each]))
        for each in parts
    ]
    between, first = provers[0].prove(x)
    last, second = provers[1].prove(between)
    assert (last == y).all()
    for joined in (first, second, first + second[len(PROOF_HEADER) :], first[:-1000] + second[-1000:]):
        assert_refused(committed.commitment, x, y, joined)
    assert_refused(provers[1].commitment, between, y, proof)
    at = len(PROOF_HEADER) + (1 << shape_bits((2, 1, 1)))
    for size in (32, 64, 2000):  # the witness of one, the arguments of the other
        assert_refused(provers[1].commitment, between, y, second[:at] + proof[at:][:size] + second[at + size :])


def test_multiplicities_of_equal_rows_only_can_be_exchanged(honest, monkeypatch):
    """Rows of padding are equal to the first row: their counts may be anywhere, and add up modulo p."""
    committed, x, y, _ = honest
    run = InferenceProof(committed, x)
    tables, size = run.layout.tables, run.layout.log_table
    rows = list(zip(*verifier.table_rows(tables, size), strict=True))
    true, last = np.bincount, len(rows) - 1
    assert rows[last] == rows[0] != rows[5]
    for other, reason in ((last, None), (5, "a lookup is not in its table")):

        def counts(values, minlength, other=other):
            found = true(values, minlength=minlength).astype(object)
            found[0], found[other] = (found[0] + 7) % P, (found[other] - 7) % P  # one of them is p - 7
            return found

        with monkeypatch.context() as patch:
            patch.setattr(proofs.np, "bincount", counts)
            forged = InferenceProof(committed, x).run()
        if reason is None:
            check(committed.commitment, x, *forged)
            specification.check(committed.commitment.to_bytes(), 1, x.tobytes(), y.tobytes(), forged[1])
        else:
            assert_refused(committed.commitment, x, *forged, reason)


@pytest.mark.search(2)
def test_no_value_that_a_prover_computes_can_be_changed(convolutions, rng, record_property):
    """An entry of the result of one operation on arrays, by a random amount: the proof is the same, or refused."""
    committed, x, y, proof = convolutions
    operations = ("mul", "dot", "total", "inverse", "byte_products", "eq_table")

    def with_fault(wrong, amount):
        calls = itertools.count()

        def faulty(true):
            def operation(*arguments):
                result = true(*arguments)
                if next(calls) == wrong and result.size:
                    result = result.copy()
                    at = rng.randrange(result.size)
                    result.reshape(-1)[at] = (int(result.reshape(-1)[at]) + amount) % P
                return result

            return operation

        with pytest.MonkeyPatch.context() as patch:
            for name in operations:
                patch.setattr(ext, name, faulty(getattr(ext, name)))
            return committed.prove(x), next(calls)

    _, count = with_fault(None, 0)
    refused = 0
    for i in range(examples := 12):
        (same, forged), _ = with_fault(rng.randrange(count), rng.choice([1, P - 1, rng.randrange(1, P)]))
        assert (same == y).all()
        if forged != proof:
            assert_refused(committed.commitment, x, y, forged, specified=i % 4 == 0)
            refused += 1
    assert refused
    record_property("examples", examples)


def test_elements_have_one_encoding():
    assert verifier.unpack((P - 1).to_bytes(8, "little")) == (P - 1,)
    for value in (P, P + 1, 2**64 - 1):
        with pytest.raises(RejectedProofError, match="not below the modulus"):
            verifier.unpack(bytes(8) + value.to_bytes(8, "little"))


def test_replays(honest):
    """A proof is for one input and one commitment; an equal output does not make it another's."""
    committed, x, _, _ = honest
    zero = IntegerNetwork(
        committed.network.network, [w * 0 for w in committed.network.weights], [b * 0 for b in committed.network.biases]
    )
    prover_of_zero = Prover(zero)
    y, proof = prover_of_zero.prove(x)
    again, second = prover_of_zero.prove(-x)
    assert (y == again).all()
    assert proof != second
    assert_refused(prover_of_zero.commitment, -x, y, proof)
    assert_refused(committed.commitment, x, y, proof)
    check(prover_of_zero.commitment, x, y, proof)
