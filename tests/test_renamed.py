"""Names that changed name the new one."""

import pytest

from accelerant import _renamed
from accelerant._renamed import renamed_arguments, renamed_names, understood_arguments


@pytest.fixture(autouse=True)
def _registry_of_its_own(monkeypatch):
    monkeypatch.setattr(_renamed, "ARGUMENTS", {})
    monkeypatch.setattr(_renamed, "NAMES", {})


def test_an_old_argument_of_a_function_or_class_names_the_new_one():
    @renamed_arguments(lr="learning_rate")
    def train(learning_rate=1.0):
        return learning_rate

    @renamed_arguments(clip="max_grad_norm")
    class Config:
        def __init__(self, max_grad_norm=1.0):
            self.max_grad_norm = max_grad_norm

    assert train(0.5) == train(learning_rate=0.5) == 0.5
    assert Config(max_grad_norm=2.0).max_grad_norm == 2.0
    with pytest.raises(TypeError, match=r"train\(\) has no argument lr= any more: it is learning_rate= now"):
        train(lr=1)
    with pytest.raises(TypeError, match=r"Config\(\) has no argument clip= any more: it is max_grad_norm= now"):
        Config(clip=1)


def test_another_usual_name_of_an_argument_is_understood():
    @understood_arguments(lr="learning_rate")
    class Config:
        def __init__(self, learning_rate=1.0):
            self.learning_rate = learning_rate

    assert Config(lr=2.0).learning_rate == Config(2.0).learning_rate == 2.0
    with pytest.raises(TypeError, match=r"Config\(\) got learning_rate= and lr=, which are the same: give one"):
        Config(lr=1.0, learning_rate=1.0)


def test_an_old_name_of_a_module_names_the_new_one():
    get = renamed_names("accelerant.sums", {"Total": "accelerant.sums.Sum"}, {"other": 1}.__getitem__)
    with pytest.raises(AttributeError, match=r"accelerant\.sums\.Total is accelerant\.sums\.Sum now"):
        get("Total")
    assert get("other") == 1


def test_a_module_without_getattr_keeps_its_error():
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        renamed_names("accelerant.sums", {})("other")
