"""Multi-scalar multiplication: sums of multiples of points."""
