"""Proofs of inference: the integer semantics, honest proofs of any shape, and the verifier without NumPy."""

import contextlib
import hashlib
import importlib.util
import itertools
import math
import re
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import specification
from integer_networks import (
    RELU,
    by_channel,
    evaluated,
    random_convolutions,
    random_input,
    random_network,
    with_extremes,
)

import accelerant
from accelerant.algebra.field.llvm_kernels import FORMS
from accelerant.algebra.field.memory_space import HOST
from accelerant.errors import (
    CompileError,
    ConfigError,
    FormatError,
    OutOfMemory,
    ShapeError,
    UnsupportedDtype,
)
from accelerant.runtime.compilation.cuda import compile_cuda
from accelerant.runtime.compilation.host_c import c_compiler
from accelerant.runtime.ledger import launch
from accelerant.zk.inference import (
    IntegerNetwork,
    Layer,
    ModelCommitment,
    Network,
    Prover,
    check,
    commit,
    commitment_memory_bytes,
    proof_memory_bytes,
    proofs,
    verifier,
    verify,
)
from accelerant.zk.inference import extension as ext
from accelerant.zk.inference.prover import hashed_by_kernel, sha256_source
from accelerant.zk.inference.verifier import IDENTITY, LOG_RATE, QUERIES, P, WitnessLayout
from refusals import assert_raises
from requirements import require_backend

# --- arithmetic ------------------------------------------------------------------------------------------------------
EDGES = [0, 1, 2, P - 1, P - 2, 2**32, 2**32 - 1]


def test_extension_arithmetic_is_that_of_python(generator):
    pairs = [(a, b) for a in EDGES for b in EDGES] + [
        tuple(map(int, generator.integers(0, P, 2, np.uint64))) for _ in range(50)
    ]
    x = np.array(pairs, np.uint64).T
    y = np.roll(x, 7, axis=1)
    ys = ext.elements(y)
    for ours, theirs in ((ext.add, verifier.add), (ext.sub, verifier.sub), (ext.mul, verifier.mul)):
        assert ext.elements(ours(x, y)) == [theirs(a, b) for a, b in zip(pairs, ys, strict=True)]
    units = x[:, x.any(axis=0)]
    assert ext.elements(ext.mul(units, ext.inverse(units))) == [(1, 0)] * units.shape[1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [1, 7, 8, 9, 1000])
def test_the_kernel_of_products_writes_no_further_than_its_arrays(generator, form, n):
    x, y = (
        generator.choice([*EDGES, *generator.integers(0, P, 50, np.uint64)], (2, n)).astype(np.uint64) for _ in "xy"
    )
    z = np.full(2 * n + 16, 5, np.uint64)
    launch(HOST, ext.product_source(form), "extension_mul", n, 1, (x, y, z), n)
    pairs = zip(ext.elements(x), ext.elements(y), strict=True)
    assert ext.elements(z[: 2 * n].reshape(2, n)) == [verifier.mul(*pair) for pair in pairs]
    assert (z[2 * n :] == 5).all()


def test_seven_has_no_square_root():
    assert pow(7, (P - 1) // 2, P) == P - 1  # so that u^2 - 7 is irreducible


@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_multilinear_extensions(generator, k):
    z = [tuple(map(int, generator.integers(0, P, 2, np.uint64))) for _ in range(k)]
    table = verifier.eq_table(z)
    assert ext.elements(ext.eq_table(z)) == table
    assert [verifier.eq(z, verifier.bits(i, k)) for i in range(1 << k)] == table
    for count in range(1, (1 << k) + 1):
        sums = tuple(sum(parts) % P for parts in zip(*table[:count], strict=True))
        assert verifier.eq_below(z, count) == sums


@pytest.mark.parametrize(("kernel", "outputs", "stride"), [(1, 1, 1), (3, 5, 1), (3, 5, 2), (4, 3, 7), (1, 6, 3)])
def test_weights_of_pixels(generator, kernel, outputs, stride):
    z, j = (
        [tuple(map(int, generator.integers(0, P, 2, np.uint64))) for _ in range(verifier.log2_ceil(size))]
        for size in (outputs, kernel)
    )
    expected = [(0, 0)] * ((outputs - 1) * stride + kernel)
    for p, d in itertools.product(range(outputs), range(kernel)):
        product = verifier.mul(verifier.eq(z, verifier.bits(p, len(z))), verifier.eq(j, verifier.bits(d, len(j))))
        expected[p * stride + d] = verifier.add(expected[p * stride + d], product)
    layer = Layer(1, 1, 1, IDENTITY, stride=stride)
    assert verifier.pixel_weights(z, j, (kernel, outputs), layer) == expected


def test_a_wide_kernel_costs_the_verifier_no_product_for_each_pair(monkeypatch):
    """All entries of 2^64 - 2^32, the largest; a verifier pays for sizes, whatever network a stranger commits to."""
    largest, calls, true = (P - 1, P - 1), itertools.count(), verifier.mul
    assert verifier.convolved([largest] * 1024, [largest] * 1000)[1010] == (8 * 1000, 2 * 1000)
    monkeypatch.setattr(verifier, "mul", lambda x, y: (next(calls), true(x, y))[1])
    verifier.pixel_weights([largest] * 10, [largest] * 10, (1000, 1024), Layer(1, 1, 1, IDENTITY))
    assert next(calls) < 4 * 2024


def test_a_fold_of_the_code_is_the_code_of_the_folded_message(generator):
    message = generator.integers(0, P, (2, 64), np.uint64)
    challenges = [tuple(map(int, generator.integers(0, P, 2, np.uint64))) for _ in range(3)]
    folded = message
    for z in challenges:
        low, high = folded[:, 0::2], folded[:, 1::2]
        folded = ext.add(low, ext.mul(ext.sub(high, low), ext.constant(z, 1)))
    code, after = ext.elements(ext.encode(message)), ext.elements(ext.encode(folded))
    root, eighth = verifier.root_of_unity(8), verifier.root_of_unity(3)
    for i in range(32):
        values = [code[i + 32 * j] for j in range(8)]
        assert verifier.fold(values, pow(root, -i, P), pow(eighth, -1, P), challenges) == after[i]


@pytest.mark.parametrize("size", [4, 8, 36, 48, 52, 56, 60, 64, 116, 120, 528])
def test_the_kernel_of_sha256_is_hashlibs(generator, size):
    try:
        c_compiler()
    except CompileError as error:
        pytest.skip(str(error))
    rows = generator.integers(0, 256, (300, size), np.uint8)
    found = hashed_by_kernel(rows, b"leaf", HOST)
    assert [each.tobytes() for each in found] == [hashlib.sha256(b"leaf" + row.tobytes()).digest() for row in rows]


@pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="no NVRTC on this system")
def test_the_kernel_of_sha256_keeps_its_words_in_registers():
    (used,) = compile_cuda(sha256_source(), "sm_90").resources.values()
    assert used.spill_bytes == used.stack_bytes == 0


@pytest.mark.parametrize("device", ["opencl", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_device_makes_the_same_files(generator, device):
    network = by_channel(generator, random_network(generator, [300, 130, 5] if device == "cuda" else [30, 13, 5]))
    x = random_input(generator, network, 3)
    ours, theirs = Prover(network), Prover(network, device=require_backend(device))
    assert theirs.commitment.to_bytes() == ours.commitment.to_bytes()
    assert theirs.prove(x)[1] == ours.prove(x)[1]


# --- honest proofs ---------------------------------------------------------------------------------------------------
@pytest.mark.search(1)
def test_any_network_is_proven_as_defined(generator, record_property):
    """Widths, batches, tables, multipliers and biases at random; the output is that of Python's integers."""
    for example in range(examples := 8):
        widths = [int(generator.integers(1, 20)) for _ in range(int(generator.integers(2, 5)))]
        tables = [generator.bytes(256) for _ in range(2)] + [RELU, IDENTITY]
        multipliers = None if example % 2 else [1, 2, 3, 12_345, 1 << 16, 1 << 17]
        bound = int(generator.choice([1, 1000, 1 << 23]))
        network = random_network(generator, widths, tables=tables, multipliers=multipliers, biases=bound)
        network = (lambda _, same: same, with_extremes, by_channel, by_channel)[example % 4](generator, network)
        x = random_input(generator, network, int(generator.integers(1, 6)))
        prover = Prover(network)
        y, proof = prover.prove(x)
        assert (y.reshape(-1) == evaluated(network, x).reshape(-1)).all()
        assert (y == network(x)).all()
        check(ModelCommitment(prover.commitment.to_bytes()), x, y, proof)
        if example % 3 == 0:
            specification.check(prover.commitment.to_bytes(), len(x), x.tobytes(), y.tobytes(), proof)
    record_property("examples", examples)


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize(("batch", "widths"), [(1, [300, 130, 5]), (12, [9, 33, 2]), (33, [200, 200])])
def test_tables_of_many_columns(generator, batch, widths):
    """Parts of tables that are no power of two: columns without queries, within a chunk of a sumcheck and beyond it."""
    network = random_network(generator, widths)
    x, prover = random_input(generator, network, batch), Prover(network)
    layout = WitnessLayout(network.network, batch, prover.layout)
    helpers = [each.helpers for each in (prover.layout, layout)]
    assert any(len(each.queries) < 1 << each.log_queries - each.log_height for each in helpers)
    y, proof = prover.prove(x)
    assert (y == network(x)).all()
    check(ModelCommitment(prover.commitment.to_bytes()), x, y, proof)
    specification.check(prover.commitment.to_bytes(), len(x), x.tobytes(), y.tobytes(), proof)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(("batch", "widths"), [(1, [400, 300, 10]), (48, [300, 100, 100])])
def test_memory_is_predicted(generator, batch, widths):
    network = random_network(generator, widths)
    x = random_input(generator, network, batch)
    Prover(network).prove(x)  # tables of transforms are made once
    tracemalloc.start()
    try:
        prover = Prover(network)
        peaks = [tracemalloc.get_traced_memory()[1]]
        tracemalloc.reset_peak()
        prover.prove(x)
        peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    predicted = commitment_memory_bytes(network.network), proof_memory_bytes(network.network, batch)
    for peak, size in zip(peaks, predicted, strict=True):
        assert 0 <= size - peak < 0.34 * peak + (32 << 20)


def test_more_memory_than_the_limit_is_refused_before_anything_is_computed(generator, monkeypatch):
    network = random_network(generator, [3, 2])
    x = random_input(generator, network)
    limited = Prover(network)
    monkeypatch.setattr(proofs, "CommittedTable", None)
    monkeypatch.setattr(network, "trace", None)
    with pytest.raises(
        OutOfMemory, match="a commitment to this network takes about 24 MiB of memory, and 9 MiB is the"
    ):
        Prover(network, memory_limit_bytes=9 << 20)
    limited.memory_limit_bytes = 1 << 20
    with pytest.raises(OutOfMemory, match="a proof of 1 inputs takes about 24 MiB of memory, and 1 MiB is the limit"):
        limited.prove(x)
    limited.memory_limit_bytes = None
    monkeypatch.setattr(proofs, "host_memory", lambda: {"MemAvailable": 5 << 20})
    assert_raises(OutOfMemory, "5 MiB are free", limited.prove, x)


@pytest.mark.search(1)
def test_any_convolutions_are_proven_as_defined(generator, record_property):
    """Images, kernels, strides, padding, sources and added outputs at random."""
    added = 0
    for example in range(examples := 8):
        network = random_convolutions(generator, int(generator.integers(1, 5)))
        network = (by_channel, with_extremes)[example % 2](generator, network)
        x = random_input(generator, network, int(generator.integers(1, 4)))
        prover = Prover(network)
        y, proof = prover.prove(x)
        assert (y.reshape(-1) == evaluated(network, x).reshape(-1)).all()
        check(prover.commitment, x, y, proof)
        size = proofs.prediction(network.network, len(x))[1]
        assert len(proof) + len(prover.commitment.to_bytes()) + y.nbytes <= size <= 1 << 20
        if example % 3 == 0:
            specification.check(prover.commitment.to_bytes(), len(x), x.tobytes(), y.tobytes(), proof)
        added += sum(layer.skip > 0 for layer in network.network.layers)
    assert added
    record_property("examples", examples)


def test_extremes_do_not_wrap():
    """The largest accumulators, multiplier and biases, of both signs, and halves on the boundary of rounding."""
    weights = np.full((4, 1024), -128, np.int8)
    weights[1] = 127
    weights[2:] = 0
    network = IntegerNetwork(Network((Layer(1024, 4, 1 << 17, IDENTITY),)), [weights], [[2**23 - 1, -(2**23), 64, -64]])
    x = np.full((2, 1024), -128, np.int8)
    x[1] = 127
    y, proof = Prover(network).prove(x)
    assert y.tolist() == [[127, -128, 1, 0], [-128, 127, 1, 0]]  # +-1/2 is rounded up
    assert verify(commit(network), x, y, proof)


def test_proofs_and_commitments_are_deterministic(generator):
    network = random_network(generator, [3, 4, 2])
    x = random_input(generator, network)
    first, second = Prover(network), Prover(IntegerNetwork.from_bytes(network.to_bytes()))
    assert first.commitment == second.commitment
    assert first.commitment.to_bytes() == second.commitment.to_bytes()
    assert first.prove(x)[1] == second.prove(x)[1]


@pytest.mark.parametrize(("multiplier", "answer", "hashes"), [
    (
        79482,
        [-47, -31, -8],
        [
            "9d7bc4d8c90971187ceb6d412e99cd6a0d3f7e08cab75e7b24d9106644d9691d",
            "29834c518078aaad613e7591dbfa46f153f29f692efa15519eca6da5ee454392",
        ],
    ),
    (
        (79482, 40000, 1000),
        [-47, -16, 0],
        [
            "ff8540e9f7e6e3142cc62852725d678666f0e8cf64002f309f7e522c50c347a7",
            "581b19c29c3e2094ea1a753bd372e51fa787631fcb32bb648734a4defcae71b3",
        ],
    ),
], ids=["layer", "channels"])  # fmt: skip
def test_known_answer(multiplier, answer, hashes):
    """The bytes of version 2: whoever changes them changes the version in the headers. The network has version 1."""
    folder = Path(__file__).parents[2] / "vectors" / "inference"
    loaded, x = IntegerNetwork.load(folder / "network"), np.load(folder / "input.npy")
    first, last = loaded.network.layers
    assert last.multiplier == 79_482
    public = loaded.network._replace(layers=(first, last._replace(multiplier=multiplier)))
    prover = Prover(IntegerNetwork(public, loaded.weights, loaded.biases))
    y, proof = prover.prove(x)
    assert y.tolist() == [answer]
    assert [hashlib.sha256(data).hexdigest() for data in (prover.commitment.to_bytes(), proof)] == hashes


def test_the_numbers_of_the_soundness_table(generator):
    """The page's column of the MLP 64-128-64-10: base-2 logarithms, rounded up."""
    prover = Prover(random_network(generator, [64, 128, 64, 10]))
    weights = prover.layout
    layout = WitnessLayout(prover.network.network, 1, weights)
    field, queries, rows = P**2, 8 << layout.log_rows, 1 << layout.log_table
    claims = len(layout.columns) + 5 + 12 * len(layout.rows)  # the first layer has none on its input, the output one
    errors = {
        "proximity": 0.625**QUERIES,
        "fold": ((1 << weights.log_rows + LOG_RATE) + 2) / field,
        "batching": claims / field,
        "fingerprints": 2 * (queries + rows) / field,
        "z and delta": (layout.log_rows + 3 + 1) / field,
        "degree 3": 3 / field,
        "layer": max(layout.logs) / field,
    }
    page = (Path(__file__).parents[3] / "docs" / "proof-of-inference.md").read_text()
    stated = [float(each) for each in re.findall(r"\| 2\^(-[\d.]+) \|", page)]
    assert stated == [math.ceil(10 * math.log2(error)) / 10 for error in errors.values()]
    assert sum(errors.values()) < 2**-100


def test_the_largest_errors_of_any_network():
    """Lookups of the most weights and of the most rows, each of the most tables, and folds of the longest code."""
    tables = 1 << verifier.log2_ceil(1022 + 256 * (verifier.MAX_LAYERS + 1))
    queries = max(1 << verifier.MAX_LOG_WEIGHTS, 8 << verifier.MAX_LOG_ROWS)
    for numerator in (2 * (queries + tables), (1 << 20) + 2, 12 * verifier.MAX_LAYERS + 13, 1 << 7):
        assert numerator / P**2 < 2**-100.3 > 0.625**QUERIES


@pytest.mark.slow
def test_the_example_of_ezkl(generator):
    network = random_network(generator, [64, 128, 64, 10])
    x = random_input(generator, network)
    prover = Prover(network)
    y, proof = prover.prove(x)
    check(prover.commitment, x, y, proof)
    assert len(proof) < 500_000


WITHOUT_NUMPY = """
import sys, types
for name in ("numpy", "torch", "llvmlite"):
    sys.modules[name] = None
for name, path in zip(("accelerant", "accelerant.zk", "accelerant.zk.inference"), sys.argv[1:4]):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [path]
from accelerant.zk.inference.verifier import check_commitment, check_inference
commitment, x, y, proof = (open(f"{sys.argv[4]}/{name}", "rb").read() for name in ("commitment", "x", "y", "proof"))
check_inference(check_commitment(commitment), 2, x, y, proof)
print("valid")
"""


def test_the_verifier_needs_no_numpy(generator, tmp_path):
    network = random_network(generator, [5, 3, 2])
    prover, x = Prover(network), random_input(generator, network, 2)
    y, proof = prover.prove(x)
    files = {"commitment": prover.commitment.to_bytes(), "x": x.tobytes(), "y": y.tobytes(), "proof": proof}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    root = Path(accelerant.__file__).parent
    arguments = [str(root), str(root / "zk"), str(root / "zk" / "inference"), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMPY, *arguments], capture_output=True, text=True, timeout=400
    )
    assert done.stdout == "valid\n", done.stderr


def test_the_specification_is_short_and_shares_no_code():
    lines = Path(specification.__file__).read_text().splitlines()
    assert len([line for line in lines if line]) <= 300
    found = {line.split()[1] for line in lines if line.startswith(("import ", "from "))}
    assert found == {"functools", "hashlib", "itertools", "math", "struct", "types"}


# --- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"multiplier": 0}, ConfigError, "layer 0 has multiplier 0"),
    ({"multiplier": (1 << 17) + 1}, ConfigError, "layer 0 has multiplier 131073"),
    ({"multiplier": (1, 2, 3)}, ConfigError, "layer 0 has 3 multipliers for 2 outputs"),
    ({"multiplier": np.array([5, 6])}, ConfigError, r"layer 0 has multiplier \[5 6\]"),
    ({"multiplier": (5, 6.5)}, ConfigError, r"layer 0 has multiplier 6\.5"),
    ({"multiplier": ()}, ConfigError, "layer 0 has 0 multipliers for 2 outputs"),
    ({"multiplier": (5, 0)}, ConfigError, "layer 0 has multiplier 0"),
    ({"multiplier": (5, (1 << 17) + 1)}, ConfigError, "layer 0 has multiplier 131073"),
    ({"table": b"short"}, ConfigError, "table of 5 entries"),
    ({"inputs": 1 << 17}, ConfigError, "layer 0 has a size of 131072"),
    ({"inputs": 4}, ShapeError, r"takes \(2, 4\)"),
    ({"kernel": (2, 1)}, ConfigError, r"kernel of \(2, 1\), larger than its image"),
    ({"padding": 1}, ConfigError, "layer 0 has padding 1, not below its kernel"),
    ({"stride": 0}, ConfigError, "layer 0 has a size of 0"),
    ({"image": (1 << 13, 1 << 12)}, ConfigError, r"100663296 pixels, more than 2\^20"),
    ({"image": (300, 300), "kernel": (256, 256)}, ConfigError, "sums of 196608 products, which could pass int32"),
    ({"image": (1, 1 << 16), "kernel": (1, 1 << 10)}, ConfigError, r"sees \d+ pixels in a direction"),
    ({"source": 2}, ConfigError, "layer 0 takes its input from 2 layers before"),
    ({"skip": 1}, ConfigError, "layer 0 adds the output of 1 layers before"),
    ({"skip_multiplier": 1 << 26}, ConfigError, "layer 0 has skip multiplier 67108864"),
])  # fmt: skip
def test_layers_out_of_range_are_refused(changes, error, message):
    layer = Layer(3, 2, 1000, IDENTITY)._replace(**changes)
    assert_raises(error, message, lambda: IntegerNetwork(Network((layer,)), [np.zeros((2, 3), np.int8)], [[0, 0]]))


def test_what_no_proof_can_have_is_refused_before_the_commitment():
    """A file of 80 KB with 2^28 activations took a commitment gigabytes, and then had no proof."""
    layer = Layer(1, 1, 1, IDENTITY, image=(1024, 1024))
    Network((layer,) * 8).check()
    for layers in ((layer,) * 9, (layer,) * 100, [Layer(1, 1, 1, bytes([i]) * 256) for i in range(256)]):
        with pytest.raises(verifier.RejectedProofError, match=r"2\^\d+ activations of one input, or the tables, are"):
            Network(tuple(layers)).check()


def test_layers_that_would_cost_the_verifier_minutes_are_refused():
    """A commitment of 40 KB with 128 images of 2^16 pixels in a row cost 30 s for each proof."""
    layer = Layer(1, 1, 1, IDENTITY, image=(1, 1 << 16), kernel=(1, 1))
    Network((layer,) * 3).check()
    with pytest.raises(verifier.RejectedProofError, match=r"numbers of multipliers, sum to 524304, more than 2\^19"):
        Network((layer,) * 4).check()
    wide = Layer(1, 1 << 16, (7,) * (1 << 16), IDENTITY)
    narrow = Layer(1 << 16, 1, 7, IDENTITY)
    Network((wide, narrow) * 7).check()
    with pytest.raises(verifier.RejectedProofError, match=r"numbers of multipliers, sum to 524384, more than 2\^19"):
        Network((wide, narrow) * 8).check()
    Network((Layer(8, 8, 1, IDENTITY, image=(224, 224), kernel=(3, 3), padding=1),) * 3).check()


def test_an_input_that_the_verifier_would_read_for_each_of_many_layers_is_refused():
    """A network of 256 layers that all take an input of 2^20 entries has a commitment in 0.3 s; a proof took 110 s."""
    layers = [Layer(1024, 1, 1, IDENTITY, image=(32, 32), stride=32, source=i + 1) for i in range(5)]
    Network(tuple(layers[:4])).check()
    with pytest.raises(verifier.RejectedProofError, match=r"take 5242880 entries of the network's input, more than"):
        Network(tuple(layers)).check()


def test_codewords_of_any_network_have_at_most_2_to_the_20_positions():
    heights = []
    for of_weights, of_rows, of_tables in itertools.product(range(27), range(32), range(11, 18)):
        sizes = [of_weights] + [verifier.blocks([k] * n + [of_tables] * m)[1]
                                for k, n, m in ((of_rows, 8, 1), (of_rows + 3, 2, 2))]  # fmt: skip
        with contextlib.suppress(verifier.RejectedProofError):
            tables = [[(0, 1 << size)] for size in sizes]
            heights.append(verifier.Stack(verifier.column_height(1 << of_weights, of_rows), tables).log_domain)
    assert max(heights) == 20


def test_any_weights_that_are_accepted_have_a_commitment():
    """More than 2^25 weights were committed to, for minutes, and then had too many columns for a range proof."""
    for log_size, part, log_rows in itertools.product(range(4, 27), (1, 1.01, 1.3, 1.7, 2), range(0, 24, 3)):
        end = min(int(2 ** (log_size - 1) * part) + 1, 1 << log_size)
        height = verifier.column_height(end, log_rows)
        helpers = verifier.HelperLayout(height, log_size, [(0, end)], 8)
        verifier.Stack(height, [[(0, end)], [(0, 256)], helpers.parts])


def test_arrays_out_of_range_are_refused(generator):
    layer, weight = Layer(3, 2, 1000, IDENTITY), np.zeros((2, 3), np.int8)
    for bias in ([0, 2**23], [-(2**23) - 1, 0]):
        with pytest.raises(ConfigError, match=r"bias -?83886\d\d, which is not from"):
            IntegerNetwork(Network((layer,)), [weight], [bias])
    with pytest.raises(UnsupportedDtype, match="int8 weights and integer biases, got float64"):
        IntegerNetwork(Network((layer,)), [weight.astype(float)], [[0, 0]])
    with pytest.raises(ConfigError, match=r"layer 1 takes an input of \(4, 1, 1\), and \(2, 1, 1\) comes"):
        IntegerNetwork(Network((layer, Layer(4, 1, 1, IDENTITY))), [weight] * 2, [[0, 0]] * 2)
    with pytest.raises(ConfigError, match="scales must be positive"):
        IntegerNetwork(Network((layer,), input_scale=float("nan")), [weight], [[0, 0]])
    prover = Prover(IntegerNetwork(Network((layer,)), [weight], [[0, 0]]))
    assert_raises(UnsupportedDtype, "x must be int8, got float32", prover.prove, np.zeros((1, 3), np.float32))
    with pytest.raises(UnsupportedDtype, match="x is a masked array"):
        prover.prove(np.ma.masked_array(np.zeros((1, 3), np.int8), [[True, False, False]]))
    for shape in ((3,), (1, 4), (0, 3)):
        assert_raises(ShapeError, r"x must be \(batch, 3\)", prover.prove, np.zeros(shape, np.int8))
    assert_raises(UnsupportedDtype, "expected an IntegerNetwork", commit, "a model")
    x = np.zeros((1, 3), np.int8)
    y, proof = prover.prove(x)
    with pytest.raises(UnsupportedDtype, match="must be a ModelCommitment, got bytes"):
        check(prover.commitment.to_bytes(), x, y, proof)


@pytest.mark.parametrize("cut", [0, 10, 40, 60, 300, -1])
def test_malformed_networks_are_refused(generator, cut):
    data = random_network(generator, [3, 2]).to_bytes()
    assert_raises(FormatError, "integer network", lambda: IntegerNetwork.from_bytes(data[:cut]))
    assert_raises(FormatError, "1 bytes follow", lambda: IntegerNetwork.from_bytes(data + b"x"))


# --- docs/formats.md -------------------------------------------------------------------------------------------------
def documented():
    """Return the tables of the section on proofs of inference in docs/formats.md: rows of cells, without the heads."""
    text = (Path(__file__).parents[3] / "docs" / "formats.md").read_text().split("\n## Proofs of inference\n")[1]
    tables = re.findall(r"(?m)(?:^\|.*\|\n)+", text)
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in each.splitlines()[2:]] for each in tables]


def read_by(rows, data):
    """Read a network's public part by the documented fields; return the layers' fields and what follows."""
    values = {}

    def take(kind, count=1):
        nonlocal data
        letters = {"u32": "I", "f64": "d", "256s": "256s"}[kind] * count
        found, data = struct.unpack_from(f"<{letters}", data), data[struct.calcsize(f"<{letters}") :]
        return found

    head, of_layers = rows[:3], rows[3:]
    for kind, name, _ in head:
        (values[name],) = take(kind.strip("`"))
    layers = []
    for _ in range(values["layers"]):
        layers.append(layer := {})
        for kind, name, _ in of_layers:
            if kind != "`u32` for each output channel":
                (layer[name],) = take(kind.strip("`"))
            elif not layer["multiplier"]:
                layer[name] = take("u32", layer["output channels"])
    return values | {"of layers": layers}, data


def test_files_are_as_documented(generator):
    """First lines, the fields of the public part, and the sizes of all messages of a proof."""
    network = by_channel(np.random.default_rng(1), random_network(generator, [3, 4, 6, 2]))
    x, prover = random_input(generator, network, 3), Prover(network)
    _, proof = prover.prove(x)
    files, fields, messages = documented()
    lines = {name: (int(version), line.strip("`").encode() + b"\n") for name, version, line, _ in files}
    data = {"network": network.to_bytes(), "commitment": prover.commitment.to_bytes(), "proof": proof}
    assert set(lines) == set(data)
    for name, (version, line) in lines.items():
        assert data[name].startswith(line)
        assert f" {version}".encode() in line
    found, rest = read_by(fields, data["commitment"][len(lines["commitment"][1]) :])
    assert rest.startswith(prover.commitment.checked.root)
    assert read_by(fields, data["network"][len(lines["network"][1]) :])[0] == found
    assert len(found["of layers"]) == len(network.network.layers)
    for layer, true in zip(found["of layers"], network.network.layers, strict=True):
        assert (layer["input channels"], layer["output channels"], layer["table"]) == (
            true.inputs,
            true.outputs,
            true.table,
        )
        assert layer.get("multipliers", layer["multiplier"]) == true.multiplier
    assert {len(layer) for layer in found["of layers"]} == {13, 14}

    layout, weights = WitnessLayout(network.network, 3, prover.layout), prover.layout
    k_in, k_out = ([verifier.log2_ceil(n) for n in sizes] for sizes in ([3, 4, 6], [4, 6, 2]))
    leaves = [*(8 * len(each) for each in layout.stack.columns), *[128] * len(range(weights.log_rows, 4, -3))]
    logs = [weights.log_rows + 2] * 3 + [height - 1 for height in range(weights.log_rows, 4, -3)]
    last = 1 << weights.log_rows - 3 * (len(logs) - 3)
    opened = sum(leaf + 32 * max(0, log - 6) for leaf, log in zip(leaves, logs, strict=True))
    expected = [
        1 << layout.logs[-1], 32, 32, 16, 48 * (layout.log_rows + 3) + 160, 48 * layout.log_table + 48,
        sum(48 * k for k, each in zip(k_out, network.network.layers, strict=True) if each.by_channel),
        160 * 3, sum((32 if n in (1, 2, 4) else 48) * k + 32 for n, k in zip([3, 4, 6], k_in, strict=True)), 16 * 2,
        32 * layout.stack.log_columns, 128 * (len(logs) - 3), 16 * last,
        sum(32 << min(6, log) for log in logs), QUERIES * opened,
    ]  # fmt: skip
    assert len(messages) == len(expected)
    assert len(proof) == len(lines["proof"][1]) + sum(expected)
    assert [size for _, size, _ in messages[1:6]] == ["32", "32", "16", "48 n + 32 + 128", "48 n + 32 + 16"]
