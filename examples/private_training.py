"""Train with differential privacy: an ordinary loop, a target epsilon, and a statement for readers.

    python examples/private_training.py

The unit of privacy is one row. Needs accelerant[privacy]. private_digits.py and private_text.py are larger examples.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from accelerant.privacy import dp

ROWS, STEPS = 4000, 60


def main() -> None:
    """Print the accuracy on fresh rows, the spent epsilon and the statement."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS + 1000, 20, generator=generator)
    y = (x[:, :3].sum(dim=1) > 0).long()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with dp.make_private(
        model, optimizer, target_epsilon=2.0, delta=1e-5, steps=STEPS, max_grad_norm=1.0, sample_rate=400 / ROWS
    ) as private:
        for batch in private.batches((x[:ROWS], y[:ROWS]), microbatch=256):  # each row is drawn independently
            inputs, targets = batch.tensors
            cross_entropy(private.model(inputs), targets).backward()
            private.optimizer.step()
            private.optimizer.zero_grad()
        with torch.no_grad():
            accuracy = (model(x[ROWS:]).argmax(dim=1) == y[ROWS:]).float().mean()
        print(f"accuracy on 1,000 other rows: {accuracy:.1%}")
        print(f"epsilon {private.epsilon():.3f} at delta 1e-5, noise multiplier {private.noise_multiplier:.2f}")
        print(private.ledger.statement())


if __name__ == "__main__":
    main()
