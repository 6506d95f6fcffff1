"""Operations of a test's own, for the tests of dispatch."""

import torch

from accelerant.runtime.dispatch import Case, Cost, Operation

CPU = torch.device("cpu")
CASE = Case(CPU, torch.float32, (4, 8))


def operation(*implementations, name="probe", **options):
    return Operation(name, implementations, cost=lambda case: Cost(bytes=100, flops=7), **options)


def failing(error):
    """Return an implementation's function that raises an error."""

    def run(*_, **__):
        raise error

    return run


def ran(book):
    """Return the calls of each implementation that ran."""
    return {(row["op"], row["implementation"]): row["calls"] for row in book.to_dict()["ops"]}
