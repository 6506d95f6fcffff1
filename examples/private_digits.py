"""Train a classifier of digits privately: accuracy at epsilon 1, 3 and 8, and without privacy.

    python examples/private_digits.py                       the table of docs/privacy-accuracy.md; 1 to 2 minutes
    python examples/private_digits.py --epsilons 3 --seeds 1

Data: scikit-learn's digits, 1,797 images of 8 x 8; 1,437 to learn from, 360 to test. The unit of privacy is one image.
Needs accelerant[privacy] and scikit-learn. Initial weights and the split follow the seed; noise and draws are the
system's randomness, so that accuracies move by about a per cent from run to run.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from accelerant.privacy import dp

DELTA = 1e-4  # below 1 / 1,437
STEPS, EXPECTED = 100, 718
NORM, RATE = 1.0, 0.25

Data = tuple[Tensor, Tensor, Tensor, Tensor]


def digits(seed: int) -> Data:
    """Return images and labels for training and for testing; pixels are divided by 16, a constant."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=360, random_state=seed, stratify=labels)
    learn, test = (torch.tensor(part, dtype=torch.float32) / 16 for part in parts[:2])
    return learn, torch.tensor(parts[2]), test, torch.tensor(parts[3])


def network(seed: int) -> nn.Module:
    """Return a net with tanh, which is bounded and keeps gradients near one norm."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of labels that are predicted."""
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def learn_privately(epsilon: float, seed: int, ledger: str | None = None) -> tuple[float, dp.PrivateTraining]:
    """Train to an epsilon; return the accuracy on the test images, and the closed training."""
    images, labels, test_images, test_labels = digits(seed)
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    with dp.make_private(
        model,
        optimizer,
        target_epsilon=epsilon,
        delta=DELTA,
        steps=STEPS,
        max_grad_norm=NORM,
        sample_rate=EXPECTED / len(images),
        ledger=ledger,
    ) as private:
        for batch in private.batches((images, labels)):
            x, y = batch.tensors
            cross_entropy(private.model(x), y).backward()
            private.optimizer.step()
            private.optimizer.zero_grad()
    return accuracy(model, test_images, test_labels), private


def learn_plainly(seed: int) -> float:
    """Return the accuracy of the same loop without privacy."""
    images, labels, test_images, test_labels = digits(seed)
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        drawn = torch.randperm(len(images))[:EXPECTED]
        optimizer.zero_grad()
        cross_entropy(model(images[drawn]), labels[drawn]).backward()
        optimizer.step()
    return accuracy(model, test_images, test_labels)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Accuracy on digits, by epsilon.")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 3.0, 8.0])
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args(arguments)
    print("| epsilon | noise multiplier | accuracy | from | to |")
    print("|---|---|---|---|---|")
    for epsilon in given.epsilons:
        found, noise = [], 0.0
        for seed in range(given.seeds):
            share, private = learn_privately(epsilon, seed)
            found.append(share)
            noise = private.noise_multiplier
        print(_line(f"{epsilon:g}", f"{noise:.2f}", found), flush=True)
    print(_line("none", "-", [learn_plainly(seed) for seed in range(given.seeds)]))


def _line(epsilon: str, noise: str, found: Sequence[float]) -> str:
    low, high = min(found), max(found)
    return f"| {epsilon} | {noise} | {statistics.mean(found):.1%} | {low:.1%} | {high:.1%} |"


if __name__ == "__main__":
    main()
