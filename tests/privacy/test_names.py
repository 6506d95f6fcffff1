import subprocess
import sys

import pytest

import accelerant
from accelerant.privacy import dp, federated, he, mpc


@pytest.mark.parametrize("package", [dp, federated, he, mpc])
def test_every_name_is_there(package):
    assert sorted(package.__all__) == dir(package)
    for name in package.__all__:
        found = getattr(package, name)
        assert package is not dp or found.__name__.endswith(name)
    assert getattr(accelerant.privacy, package.__name__.rpartition(".")[2]) is package
    for where in (package, accelerant.privacy):
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            where.nothing  # noqa: B018  the look-up is the test


@pytest.mark.slow
def test_the_package_loads_nothing_by_itself():
    code = (
        "import sys, accelerant.privacy.dp as dp; "
        "assert not [m for m in sys.modules if m.startswith(('dp_accounting', 'scipy', 'accelerant.privacy.dp.'))]; "
        "dp.make_private; assert 'dp_accounting' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
