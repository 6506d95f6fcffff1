"""Linear layers whose products are of 8-bit floating-point numbers, and what stands between them in an MLP."""
