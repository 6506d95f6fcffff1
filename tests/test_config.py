from __future__ import annotations

from pathlib import Path

import pytest

from accelerant.config import Settings, load, override, settings
from accelerant.errors import ConfigError


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('fallback = "warn"\nmemory_fraction = 0.5\n')
    return path


def test_defaults_file_environment_and_arguments_in_rising_order(file):
    assert load({"ACCELERANT_CONFIG": str(file)}).fallback == "warn"
    both = load({"ACCELERANT_CONFIG": str(file), "ACCELERANT_FALLBACK": "forbid"})
    assert (both.fallback, both.memory_fraction, both.backend) == ("forbid", 0.5, "auto")
    with override(fallback="allow"):
        assert settings().fallback == "allow"


def test_every_variable_is_read():
    environ = {
        "ACCELERANT_BACKEND": "cpu",
        "ACCELERANT_FALLBACK": "forbid",
        "ACCELERANT_CACHE_DIR": "/somewhere",
        "ACCELERANT_MEMORY_FRACTION": "0.25",
        "ACCELERANT_LOG": "debug",
    }
    assert load(environ) == Settings("cpu", "forbid", Path("/somewhere"), 0.25, "debug")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"ACCELERANT_FALLBACK": "perhaps"}, r"setting fallback: wanted allow \| warn \| forbid, got 'perhaps'"),
        ({"ACCELERANT_MEMORY_FRACTION": "much"}, "memory_fraction cannot be 'much'"),
        ({"ACCELERANT_MEMORY_FRACTION": "0"}, "memory_fraction"),
        ({"ACCELERANT_MEMORY_FRACTION": "nan"}, "memory_fraction"),
        ({"ACCELERANT_LOG": "loud"}, "log"),
        ({"ACCELERANT_CONFIG": "/nowhere/config.toml"}, "/nowhere/config.toml"),
    ],
)
def test_values_without_meaning_are_refused(environ, message):
    with pytest.raises(ConfigError, match=message):
        load(environ)


@pytest.mark.parametrize(("text", "message"), [("colour = 1", "unknown setting 'colour'"), ("a = [", "not TOML")])
def test_bad_files_are_refused(file, text, message):
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load({"ACCELERANT_CONFIG": str(file)})


def test_override_is_undone_and_refuses_unknown_names():
    before = settings()
    with pytest.raises(ConfigError, match="unknown setting 'speed'"), override(speed=11):
        pass
    with pytest.raises(ConfigError, match="log"), override(log="loud"):
        pass
    assert settings() is before
