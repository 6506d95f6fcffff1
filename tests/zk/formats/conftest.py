"""What tests of one kind of file share: a module says which by KIND and FILE. It also puts parts.py on the path."""

from pathlib import Path

import pytest
from parts import FAMILIES, VECTORS

from accelerant.algebra.curve.parameters import family_of


@pytest.fixture
def altered(tmp_path, request):
    """Opens bytes as a file of the module's kind."""

    def call(data):
        path = (tmp_path / "altered").with_suffix(Path(request.module.FILE).suffix)
        path.write_bytes(data)
        return request.module.KIND.open(path)

    return call


@pytest.fixture(params=FAMILIES)
def family(request):
    return family_of(request.param)


@pytest.fixture
def data(family, request):
    """The bytes of the module's file, of each family."""
    return (VECTORS / family.name / request.module.FILE).read_bytes()
