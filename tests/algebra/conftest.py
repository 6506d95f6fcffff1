"""Fixtures of several folders; its presence puts this folder on the path of imports, for vectors.py."""

import pytest


@pytest.fixture
def compile_cuda():
    pytest.importorskip("cuda.core", reason="cuda-core is for Linux and Windows")
    from accelerant.runtime.compilation.cuda import compile_cuda

    return compile_cuda
