"""Call fused ops on tensors, compare with torch, and see which implementation ran.

    python examples/neural_op.py

On a CPU torch's functions run behind the same names; on an NVIDIA GPU Accelerant's kernels do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import accelerant as acl


def main() -> None:
    """Print errors against torch, the choice for one call, and the ledger."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x = torch.randn(256, 768, device=device, requires_grad=True)
    residual = torch.randn(256, 768, device=device)
    weight = torch.ones(768, device=device)

    # The residual's addition and the norm read memory once: y = rms_norm(x + residual), and the sum for the next block.
    y, total = acl.ops.add_rms_norm(x, residual, weight)
    y.square().mean().backward()

    expected = F.rms_norm(x.detach() + residual, (768,), weight, 1e-6)
    print(f"largest difference from torch: {(y.detach() - expected).abs().max():.1e}")
    print(f"the sum is there too: {torch.equal(total.detach(), x.detach() + residual)}; gradient: {x.grad is not None}")

    # The loss of a language model, whose logits (256 x 32,000 here) are never stored.
    hidden, head = torch.randn(256, 64, device=device), torch.randn(32_000, 64, device=device)
    targets = torch.randint(32_000, (256,), device=device)
    loss = acl.ops.linear_cross_entropy(hidden, head, targets)
    print(f"loss {loss:.4f}, torch's {F.cross_entropy(hidden @ head.T, targets):.4f}")

    acl.explain(acl.ops.softmax, x)
    print(acl.ledger())


if __name__ == "__main__":
    main()
