"""From training to proof: a LeNet and a ResNet-8 on synthetic digits."""

import numpy as np
import pytest
import torch
from integer_networks import (
    by_channel,
    evaluated,
    random_convolutions,
    random_input,
    random_network,
    with_extremes,
)
from torch import nn

import accelerant as acl
from accelerant.errors import UnsupportedDtype
from accelerant.nn.exact import ExactLayer, ExactNetwork
from accelerant.nn.train import TrainConfig, fit
from benchmarks.inference_block import gpt2_block
from residual_network import ResNet


def digits(count):
    """Return noisy images of ten patterns, (count, 1, 16, 16), and their classes."""
    patterns = torch.randn(10, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(10, (count,))
    return patterns[labels] + 0.5 * torch.randn(count, 1, 16, 16), labels


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 3), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(16 * 3 * 3, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("make", [lenet, lambda: ResNet([8, 16, 16], 10, pool=2)], ids=["lenet", "resnet8"])
def test_from_training_to_proof(make):
    torch.manual_seed(0)
    model = make()
    (x, labels), (test, expected) = digits(1000), digits(500)
    fit(model, x, labels, TrainConfig(epochs=6, batch_size=50, learning_rate=3e-3, device="cpu"))
    network = acl.nn.quantize(model.eval(), mode="exact", examples=x[:200]).model
    right = (model(test).argmax(1) == expected).float().mean()
    kept = (network(test).argmax(1) == expected).float().mean()
    assert right > 0.95
    assert kept > right - 0.01
    prover = acl.zk.inference.Prover(network)
    images = network.quantize_input(test[:1]).numpy()
    y, proof = prover.prove(images)
    acl.zk.inference.check(prover.commitment, images, y, proof)
    assert (y.argmax(1) == expected[:1].numpy()).all()
    assert not acl.zk.inference.verify(prover.commitment, images, np.roll(y, 1, axis=1), proof)


def test_a_block_of_gpt2_without_softmax(generator):
    """Products of two activations are of squares by tables; the integers are close to the block in real numbers."""
    network, x, expected = gpt2_block(generator, width=16, heads=2, examples=200)
    y = network(x)
    assert np.array_equal(y, torch_network(network)(torch.from_numpy(x)).numpy())
    error = y * network.network.output_scale - expected
    assert np.square(error).mean() < 0.02 * np.square(expected).mean()
    prover = acl.zk.inference.Prover(network)
    y, proof = prover.prove(x[:1])
    acl.zk.inference.check(prover.commitment, x[:1], y, proof)
    assert not acl.zk.inference.verify(prover.commitment, x[1:2], y, proof)


def test_a_report_in_place_of_its_model_is_named():
    report = acl.nn.quantize(nn.Sequential(nn.Linear(3, 2)), mode="exact", examples=torch.ones(1, 3))
    with pytest.raises(UnsupportedDtype, match=r"got QuantizationReport: its \.model"):
        acl.zk.inference.Prover(report)


def torch_network(network):
    """Return the modules of an IntegerNetwork."""
    layers = []
    for layer, weight, bias in zip(network.network.layers, network.weights, network.biases, strict=True):
        table = torch.frombuffer(bytearray(layer.table), dtype=torch.int8)
        tensors = torch.from_numpy(weight), torch.from_numpy(bias).int(), table
        geometry = layer.image, layer.stride, layer.padding
        layers.append(
            ExactLayer(
                *tensors, torch.as_tensor(layer.multiplier), *geometry, layer.source, layer.skip, layer.skip_multiplier
            )
        )
    return ExactNetwork(layers, network.network.layers[0].input_shape, 1.0, 1.0)


def assert_equal_everywhere(generator, device, networks, inputs):
    """Random networks and inputs: torch on a device, NumPy of the prover, and Python's integers for a few inputs."""
    for i in range(networks):
        widths = [int(generator.integers(1, 200)) for _ in range(3)]
        network = random_network(generator, widths) if i % 4 == 0 else random_convolutions(generator, 4)
        network = (by_channel, with_extremes)[i // 4 % 2](generator, network)
        x = random_input(generator, network, inputs)
        y = network(x)
        theirs = torch_network(network).to(device)(torch.from_numpy(x).to(device)).cpu().numpy()
        assert np.array_equal(y.reshape(inputs, -1), theirs.reshape(inputs, -1))
        if i % 4:
            assert np.array_equal(y[:2].reshape(2, -1), evaluated(network, x[:2]).reshape(2, -1))


@pytest.mark.search(1)
def test_torch_numpy_and_integers_agree(generator, record_property):
    assert_equal_everywhere(generator, "cpu", 40, 2500)
    record_property("examples", 100_000)


@pytest.mark.gpu
def test_a_gpu_agrees_on_100_000_inputs(generator):
    assert_equal_everywhere(generator, "cuda", 40, 2500)
