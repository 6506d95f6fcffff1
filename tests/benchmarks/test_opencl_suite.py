"""The comparison of OpenCL with CUDA, on a small product and PoCL."""

import pytest

from accelerant.errors import FormatError
from accelerant.tensors.tensor import DeviceTensor
from benchmarks import opencl
from requirements import require_backend


def test_products_are_checked_and_timed(capsys, monkeypatch):
    require_backend("opencl")
    opencl.main(["--products", "40", "--sums", "--steps", "0"])
    assert "40: " in capsys.readouterr().out
    product = DeviceTensor.__matmul__
    monkeypatch.setattr(DeviceTensor, "__matmul__", lambda x, y: product(x, y) + 1)
    with pytest.raises(FormatError, match="a product of 40 on opencl:0 is 1 from the exact one"):
        opencl.main(["--products", "40", "--sums", "--steps", "0"])
