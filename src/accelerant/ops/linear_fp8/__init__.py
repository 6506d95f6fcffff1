"""Linear layers with products in 8-bit floating point, and the activations between them in an MLP."""
