import asyncio
import logging
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from accelerant import config
from accelerant.config import Settings, load, override, settings
from accelerant.errors import ConfigError
from processes import in_threads
from refusals import assert_raises


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


def test_policies_are_understood_as_switches_and_in_any_case():
    for value, policy in {"true": "allow", "False": "forbid", "0": "forbid", "on": "allow", "WARN": "warn"}.items():
        assert load({"ACCELERANT_FALLBACK": value, "ACCELERANT_LOG": "ERROR"}).fallback == policy
    with override(fallback=False):
        assert settings().fallback == "forbid"


def test_every_variable_is_read():
    environ = {
        "ACCELERANT_BACKEND": "cpu",
        "ACCELERANT_FALLBACK": "forbid",
        "ACCELERANT_CACHE_DIR": "/somewhere",
        "ACCELERANT_MEMORY_FRACTION": "0.25",
        "ACCELERANT_LOG": "debug",
        "ACCELERANT_RACE": "first_use",
        "ACCELERANT_TUNE": "first_use",
        "ACCELERANT_DETERMINISTIC": "1",
        "ACCELERANT_IMPLEMENTATION": "gelu_fwd=torch, attention_fwd = triton,",
        "ACCELERANT_DEBUG": "yes",
    }
    forced = (("attention_fwd", "triton"), ("gelu_fwd", "torch"))
    assert load(environ) == Settings(
        "cpu", "forbid", Path("/somewhere"), 0.25, "debug", "first_use", "first_use", True, forced, True
    )


def test_a_file_may_force_implementations(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('deterministic = true\n[implementation]\ngelu_fwd = "torch"\n')
    found = load({"ACCELERANT_CONFIG": str(path)})
    assert (found.deterministic, found.implementation) == (True, (("gelu_fwd", "torch"),))


def test_dispatch_is_told_while_what_it_depends_on_is_overridden():
    assert not config.choice_overrides
    with override(fallback="warn"):
        assert not config.choice_overrides
        with override(race="first_use"), override(deterministic="off"):
            assert len(config.choice_overrides) == 2
    assert not config.choice_overrides


@pytest.mark.parametrize(("environ", "message"), [
    ({"ACCELERANT_FALLBACK": "perhaps"}, r"setting fallback: wanted allow \| warn \| forbid, got 'perhaps'"),
    ({"ACCELERANT_MEMORY_FRACTION": "much"}, "memory_fraction cannot be 'much'"),
    ({"ACCELERANT_MEMORY_FRACTION": "0"}, "memory_fraction"),
    ({"ACCELERANT_MEMORY_FRACTION": "nan"}, "memory_fraction"),
    ({"ACCELERANT_LOG": "loud"}, "log"),
    ({"ACCELERANT_CACHE_DIR": "~nobody-of-that-name/x"}, "cache_dir cannot be '~nobody-of-that-name/x'"),
    ({"ACCELERANT_CONFIG": "/nowhere/config.toml"}, "/nowhere/config.toml"),
    ({"ACCELERANT_BAKEND": "cpu"}, r"unknown environment variable 'ACCELERANT_BAKEND' \(did you mean 'ACCELERANT_BACK"),
    ({"ACCELERANT_FUZ": "1"}, "unknown environment variable 'ACCELERANT_FUZ'"),
])  # fmt: skip
def test_values_without_meaning_are_refused(environ, message):
    assert_raises(ConfigError, message, load, environ)


@pytest.mark.parametrize(("text", "message"), [
    ("color = 1", "unknown setting 'color'; known are backend"),
    ("race_ = 1", "did you mean 'race'"),
    ("a = [", "not TOML"),
    (f"a = {'[' * 100_000}", "not TOML: maximum recursion depth"),
    (f"a = {'9' * 5000}", "not TOML: Exceeds the limit"),
    ('cache_dir = "a\\u0000b"', r"cache_dir cannot be 'a\\x00b'"),
])  # fmt: skip
def test_bad_files_are_refused(file, text, message):
    file.write_text(text)
    assert_raises(ConfigError, message, load, {"ACCELERANT_CONFIG": str(file)})


def test_override_is_undone_and_refuses_unknown_names():
    before = settings()
    with pytest.raises(ConfigError, match="unknown setting 'speed'"), override(speed=11):
        pass
    with (
        pytest.raises(ConfigError, match=r"'races' \(did you mean 'race'"),
        override(races=1),
    ):
        pass
    with pytest.raises(ConfigError, match="log"), override(log="loud"):
        pass
    assert settings() is before


def test_variables_of_kubernetes_are_not_ours():
    names = "SERVICE_HOST", "WEB_SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP_ADDR", "WEB_PORT_80_TCP"
    assert load({f"ACCELERANT_{name}": "10.0.0.1" for name in names}) == load({})


def test_there_need_be_no_home_folder(monkeypatch):
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    assert load({}).cache_dir.is_absolute()


def test_the_home_folder_may_be_closed(monkeypatch, tmp_path):
    (tmp_path / "home").mkdir(mode=0)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    if root:  # for whom no folder is closed
        os.seteuid(65534)
    try:
        assert load({}).log == "warning"
    finally:
        if root:
            os.seteuid(0)


def test_the_home_folder_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert load({"ACCELERANT_CACHE_DIR": "~/kernels"}).cache_dir == tmp_path / "kernels"
    with override(cache_dir="~/kernels"):
        assert settings().cache_dir == tmp_path / "kernels"


def test_override_reads_text_as_the_environment_is_read():
    logger = logging.getLogger("accelerant")
    before = settings(), logger.level
    with override(cache_dir="/x", memory_fraction="0.5", log="debug") as changed:
        assert settings() is changed
        assert (changed.cache_dir, changed.memory_fraction) == (Path("/x"), 0.5)
        assert logger.level == logging.DEBUG
        with override(log="error"):
            assert logger.level == logging.ERROR
        assert logger.level == logging.DEBUG
    assert (settings(), logger.level) == before


@pytest.mark.parametrize("change", [
    {"cache_dir": None}, {"cache_dir": ""}, {"cache_dir": 5}, {"memory_fraction": "much"},
    {"memory_fraction": None}, {"memory_fraction": True}, {"memory_fraction": 1.5}, {"fallback": None},
    {"backend": ""}, {"race": "always"}, {"tune": True}, {"deterministic": "perhaps"}, {"deterministic": None},
    {"implementation": "gelu_fwd"}, {"implementation": {"gelu_fwd": ""}}, {"implementation": {"gelu_fwd": 3}},
    {"implementation": 3}, {"implementation": [1, 2]},
], ids=str)  # fmt: skip
def test_override_refuses_values_without_meaning(change):
    (name,) = change
    before = settings()
    with pytest.raises(ConfigError, match=name), override(**change):
        pass
    assert settings() is before


# Below the 60th nested backward pass, autograd's CPU work moves to a thread that torch starts, as on a GPU it always
# does. The process ends by os._exit: torch does not wait for that thread.
BACKWARD = """
import os, threading, torch
from accelerant.config import override, settings

seen = []

class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.depth:
            with torch.enable_grad():
                Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).backward()
        elif threading.get_ident() != started:
            seen.append(settings().fallback)
            with override(fallback="warn"):
                seen.append(settings().fallback)
            seen.append(settings().fallback)
        return gradient, None

def backward():
    Nested.apply(torch.ones(1, requires_grad=True), 70).backward()

started = threading.get_ident()
backward()
with override(fallback="forbid"):
    backward()
backward()
print(*seen, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_override_holds_in_the_threads_of_autograd():
    ran = subprocess.run([sys.executable, "-c", BACKWARD], capture_output=True, text=True, timeout=120)
    assert ran.stdout.split() == ["allow", "warn", "allow", "forbid", "warn", "forbid", "allow", "warn", "allow"], ran


@pytest.mark.gpu
def test_override_holds_in_a_backward_pass_on_the_gpu():
    import torch

    seen = []
    x = torch.ones(3, device="cuda", requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: seen.append((settings().fallback, threading.get_ident())))
    with override(fallback="forbid"):
        y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert [policy for policy, _ in seen] == ["forbid", "allow"]
    assert all(thread != threading.get_ident() for _, thread in seen)


def test_override_does_not_reach_other_threads():
    """As Accelerators do it: each call under its own policy, at the same time from several threads."""
    seen = {}
    together = threading.Barrier(3, timeout=120)

    def work(policy):
        if policy is None:
            together.wait()
            seen[policy] = settings().fallback
            together.wait()
            return
        with override(fallback=policy):
            together.wait()
            seen[policy] = settings().fallback
            together.wait()

    in_threads(partial(work, policy) for policy in (None, "warn", "forbid"))
    assert seen == {None: settings().fallback, "warn": "warn", "forbid": "forbid"}


def test_override_does_not_reach_other_tasks():
    seen = []

    async def changes(policy, entered, others):
        with override(fallback=policy):
            entered.set()
            await others.wait()
            seen.append(settings().fallback)

    async def main():
        one, two = asyncio.Event(), asyncio.Event()
        tasks = [asyncio.create_task(changes("warn", one, two)), asyncio.create_task(changes("forbid", two, one))]
        await one.wait()
        await two.wait()
        seen.append(settings().fallback)
        await asyncio.gather(*tasks)

    before = settings().fallback
    asyncio.run(main())
    assert sorted(seen) == sorted([before, "warn", "forbid"])
    assert settings().fallback == before
