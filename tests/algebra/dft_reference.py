"""The number-theoretic transform by its definition."""

from accelerant.algebra.field.parameters import field_of


def ntt_dft_reference(x, *, field, inverse=False, coset=1):
    """Transform by the definition, n^2 products, in natural order.

    forward  y_j = sum_i x_i (g w^j)^i              inverse  y_i = g^-i / n sum_j x_j w^(-i j)

    with w = field.root_of_unity(n) and g = coset.
    """
    row, n = field_of(field), len(x)
    p, w = row.modulus, row.root_of_unity(n)
    if not inverse:
        points = [coset * pow(w, j, p) % p for j in range(n)]
        return [sum(value * pow(point, i, p) for i, value in enumerate(x)) % p for point in points]
    sums = [sum(value * pow(w, -i * j % n, p) for j, value in enumerate(x)) for i in range(n)]
    return [value * pow(coset, -i, p) * pow(n, -1, p) % p for i, value in enumerate(sums)]
