import pytest

from accelerant.runtime import registry
from accelerant.testing import fake_provider
from requirements import require_backend


def pytest_addoption(parser):
    parser.addoption("--backend", help="run the conformance suite on this backend only; fail if it is absent")


def pytest_generate_tests(metafunc):
    if "provider" in metafunc.fixturenames:
        wanted = metafunc.config.getoption("--backend", None)
        own = [
            name for name in registry.PROVIDERS if name in registry.BACKENDS and registry._provider_class(name).dialects
        ]
        names = [wanted] if wanted else [*own, "fake"]
        marks = {"cuda": [pytest.mark.gpu]}
        metafunc.parametrize(
            "provider", [pytest.param(name, marks=marks.get(name, [])) for name in names], indirect=True
        )


@pytest.fixture
def provider(request):
    """Each backend that is present, and the fake one; an absent one skips with its reason."""
    if request.param == "fake":
        with fake_provider() as fake:
            yield fake
        return
    reason = registry.reason_absent(request.param)
    if reason and (request.param == "cpu" or request.config.getoption("--backend", None)):
        pytest.fail(f"{request.param} is absent: {reason}")
    yield registry.create(require_backend(request.param))
