"""What users learn once holds in all of privacy: names, keyword arguments, ledgers, values, representations."""

import pytest

from accelerant.privacy import dp, he


def test_names_that_changed_say_the_new_one():
    assert dp.Ledger is dp.PrivacyLedger
    for module, old, new in ((dp, "Event", "PrivacyEvent"), (dp, "Statement", "PrivacyStatement"),
                             (he.bfv, "Parameters", "EncryptionParameters")):  # fmt: skip
        with pytest.raises(AttributeError, match=f"{old} is {new} now"):
            getattr(module, old)
        assert getattr(module, new).__name__ == new
