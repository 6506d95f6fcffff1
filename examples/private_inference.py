"""A linear layer on an input that nobody sees, by two and by three parties who share input and weights.

A client shares its rows, a model's owner its weights and bias. The parties compute shares of x W^T + b with a trusted
dealer's matrix triple and truncation; the client combines the result. Two parties must both help (2 of 2); of three any
two suffice, and a third one's wrong message is seen (2 of 3).
"""

import torch
from torch import Tensor

from accelerant.privacy.mpc import beaver, shamir

FIELD, BITS = "bn254_fr", 16


def linear(x: Tensor, weight: Tensor, bias: Tensor, *, threshold: int, count: int) -> list[shamir.Share]:
    """Return the shares of a linear layer's output, one for each party."""

    def share(tensor: Tensor) -> list[shamir.Share]:
        return shamir.split(tensor, threshold, count, field=FIELD, fraction_bits=BITS)

    xs, weights, biases = share(x), share(weight.T), share(bias.expand(len(x), -1))

    # Each list below has one entry for each party, which computes it from what it holds and what all have sent.
    triples = beaver.deal_triples(xs[0].sharing, weights[0].sharing, matrix=True)
    sent = [beaver.mask(*held) for held in zip(xs, weights, triples, strict=True)]
    products = [beaver.multiply(triple, sent) for triple in triples]

    masks = beaver.deal_truncations(products[0].sharing, bits=BITS)
    opened = [beaver.mask_truncation(*held) for held in zip(products, masks, strict=True)]
    outputs = [beaver.truncate(*held, opened) for held in zip(products, masks, strict=True)]
    return [output + own for output, own in zip(outputs, biases, strict=True)]


def main() -> None:
    """Compare the result with the exact one of the rounded numbers."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 10), torch.randn(8, 64)
    weight, bias = layer.weight.detach(), layer.bias.detach()

    def rounded(tensor: Tensor) -> Tensor:
        return (tensor.double() * 2**BITS).round() / 2**BITS

    exact = rounded(x) @ rounded(weight).T + rounded(bias)  # of 32 fraction bits: no rounding in float64
    for threshold, count in ((2, 2), (2, 3)):
        shares = linear(x, weight, bias, threshold=threshold, count=count)
        y = shamir.combine(shares[-threshold:])
        error = (y.double() - exact).abs().max().item() * 2**BITS
        same = torch.equal(y.argmax(dim=1), layer(x).argmax(dim=1))
        print(f"{count} parties, any {threshold}: same classes: {same}, below one unit in the last place: {error < 1}")


if __name__ == "__main__":
    main()
