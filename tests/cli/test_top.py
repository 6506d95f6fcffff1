import functools
import json
import os
import re
import select
import signal
import sys
import time

import pytest

import commands
from accelerant.cli import devices as top
from accelerant.runtime import registry
from accelerant.runtime.monitoring.monitor import ProcessMemory, Sample
from processes import Command

run = functools.partial(commands.run, "top")


def shown(*samples):
    return "".join(f"{line.plain}\n" for line in top._view(list(samples), 160))


def test_json_is_one_sample_of_every_device(capsys):
    status, output, _ = run(capsys, "--json")
    assert status == 0
    report = json.loads(output)
    labels = [f"{device.backend}:{device.index}" for device in registry.devices() if device.available]
    assert [device["device"] for device in report["devices"]] == labels
    assert abs(report["time_s"] - time.time()) < 60
    for device in report["devices"]:
        assert all(device[name] is None for name in device["reasons"])


def test_without_a_terminal_one_table_is_printed(capsys):
    status, output, _ = run(capsys)
    assert status == 0
    assert re.search(r"^device +name +busy +memory +power +temperature +clock +memory clock", output, re.MULTILINE)
    assert re.search(r"^cpu:0 ", output, re.MULTILINE)


def test_every_figure_is_shown():
    text = shown(
        Sample(
            "cuda:0",
            "Some GPU",
            0.0,
            utilisation_percent=50.0,
            memory_used_bytes=3 * 2**30,
            memory_total_bytes=8 * 2**30,
            power_w=321.4,
            temperature_c=61.0,
            clock_mhz=1980.0,
            memory_clock_mhz=2619.0,
            processes=(ProcessMemory(77, "[odd] name\x1b[31m", 5 * 2**20), ProcessMemory(78, None, None)),
        )
    )
    assert "█████·····  50 %  3.0 / 8.0 GiB  321 W        61 °C  1980 MHz      2619 MHz" in text
    assert re.search(r"77 +5 MiB +\[odd\] name\\x1b\[31m", text)  # any user may name a process so
    assert re.search(r"78 +- +\?", text)


def test_processes_are_sorted():
    processes = (ProcessMemory(3, "b", 1), ProcessMemory(1, "C", 9), ProcessMemory(2, None, None))
    item = Sample("cuda:0", "Some GPU", 0.0, processes=processes)
    pids = {sort: [int(line.plain.split()[0]) for line in top._processes(item, sort)] for sort in top._SORTS.values()}
    assert pids == {"memory": [1, 3, 2], "pid": [1, 2, 3], "name": [2, 3, 1]}


def test_absent_figures_have_one_line_a_reason():
    reasons = {"power_w": "no sensor", "temperature_c": "no sensor", "core_percents": "a GPU has none"}
    text = shown(Sample("cuda:0", "Some GPU", 0.0, utilisation_percent=0.0, reasons=reasons))
    assert "cuda:0: no power, temperature: no sensor\n" in text
    assert "a GPU has none" not in text


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "4000"])
def test_a_senseless_interval_is_refused(capsys, interval):
    status, output, errors = run(capsys, "--interval", interval)
    assert (status, output) == (2, "")
    assert errors == f"accelerant: --interval must be 0.1 to 3600 seconds, got {float(interval)}\n"


def on_terminal(name):
    for number in (0, 1):
        os.dup2(os.open(name, os.O_RDWR), number)
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115 - for the rest of the process


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="a pseudo terminal is POSIX's")
@pytest.mark.parametrize("key", [b"", b"q"], ids=["ctrl-c", "q"])
def test_on_a_terminal_it_is_live_until_q_or_ctrl_c(key):
    import pty

    ours, theirs = pty.openpty()
    size = {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    before = functools.partial(on_terminal, os.ttyname(theirs))
    process = Command("top", "--interval", "0.2", environment=size, before=before)
    seen, deadline = b"", time.monotonic() + 120

    def read(found):
        nonlocal seen
        while not found() and time.monotonic() < deadline:
            if select.select([ours], [], [], 0.05)[0]:
                seen += os.read(ours, 1 << 16)

    try:
        read(lambda: seen.count(b"q quit") >= 3)
        os.write(ours, b"n")
        read(lambda: b"n name*" in seen)
        if key:
            os.write(ours, key)
        else:
            process.send_signal(signal.SIGINT)
        read(lambda: process.poll() is not None)
        assert process.poll() == 0, process.communicate(1)[1]
    finally:
        process.send_signal(signal.SIGKILL)
        os.close(ours)
        os.close(theirs)
    assert seen.count(b"q quit") >= 3
    assert b"n name*" in seen
    assert b"cpu:0" in seen


@pytest.mark.gpu
def test_the_gpu_is_among_the_devices(capsys):
    pytest.importorskip("pynvml")
    _, output, _ = run(capsys, "--json")
    gpu = next(device for device in json.loads(output)["devices"] if device["device"] == "cuda:0")
    assert gpu["power_w"] > 0
    assert gpu["temperature_c"] > 0
    assert gpu["memory_total_bytes"] > 0


def test_a_slowed_device_and_failing_memory_are_shown():
    text = shown(Sample("cuda:0", "Some GPU", 0.0, slow_down=("power", "thermal"), ecc_uncorrected=2))
    assert "cuda:0 slowed down: power, thermal" in text
    assert "cuda:0 memory errors: 2" in text
    assert "slowed" not in shown(Sample("cuda:0", "Some GPU", 0.0, slow_down=(), ecc_uncorrected=0))
