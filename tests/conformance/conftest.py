from __future__ import annotations

import os

import pytest

from accelerant.runtime import registry

ALWAYS_THERE = ("cpu",)
REQUIRED_IN_CI = ("opencl",)
"""Absent, these fail where the environment has CI=true; scripts/ci-setup installs what they need."""


def pytest_addoption(parser):
    parser.addoption("--backend", help="run the conformance suite on this backend only; fail if it is absent")


def pytest_generate_tests(metafunc):
    if "provider" in metafunc.fixturenames:
        wanted = metafunc.config.getoption("--backend", None)
        names = [wanted] if wanted else [name for name in registry.PROVIDERS if registry._provider_class(name).dialects]
        marks = {"cuda": [pytest.mark.gpu]}
        metafunc.parametrize(
            "provider", [pytest.param(name, marks=marks.get(name, [])) for name in names], indirect=True
        )


@pytest.fixture
def provider(request):
    """Each backend that is present; an absent one skips with its reason."""
    reason = registry.reason_absent(request.param)
    if reason:
        required = ALWAYS_THERE + (REQUIRED_IN_CI if os.environ.get("CI") == "true" else ())
        if request.config.getoption("--backend", None) or request.param in required:
            pytest.fail(f"{request.param} is absent: {reason}")
        pytest.skip(f"{request.param}: {reason}")
    return registry.create(request.param)
