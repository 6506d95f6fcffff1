import subprocess
import sys

import pytest

import accelerant
from accelerant.privacy import dp, federated, mpc


def test_every_name_is_there():
    assert sorted(dp.__all__) == dir(dp)
    for name in dp.__all__:
        assert getattr(dp, name).__name__.endswith(name)
    assert accelerant.privacy.dp is dp
    assert sorted(mpc.__all__) == dir(mpc)
    assert all(getattr(mpc, name) for name in mpc.__all__)
    assert sorted(federated.__all__) == dir(federated)
    assert all(getattr(federated, name) for name in federated.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dp.nothing  # noqa: B018  the look-up is the test
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        accelerant.privacy.nothing  # noqa: B018  as above


@pytest.mark.slow
def test_the_package_loads_nothing_by_itself():
    code = (
        "import sys, accelerant.privacy.dp as dp; "
        "assert not [m for m in sys.modules if m.startswith(('dp_accounting', 'scipy', 'accelerant.privacy.dp.'))]; "
        "dp.make_private; assert 'dp_accounting' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
