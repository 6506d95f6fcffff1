"""Events of devices, from samples to callbacks, counts and metrics."""

import threading
import time
from dataclasses import replace
from unittest.mock import Mock

import pynvml
import pytest

import accelerant as acl
from accelerant.errors import ConfigError, DeviceLost
from accelerant.runtime import registry
from accelerant.runtime.monitoring import monitor
from accelerant.runtime.monitoring.monitor import events_between, subscribe, to_prometheus, watch_devices
from accelerant.runtime.monitoring.readers import TableReader
from accelerant.runtime.providers.cuda_launch import cuda_error

QUIET = monitor.Sample("cuda:0", "H200", 0.0, slow_down=(), ecc_corrected=2, ecc_uncorrected=0)


@pytest.fixture(autouse=True)
def no_events(monkeypatch):
    monkeypatch.setattr(monitor, "_counts", type(monitor._counts)())


@pytest.mark.parametrize(("now", "expected"), [
    (QUIET, []),
    (replace(QUIET, slow_down=("thermal", "power")), [("slow_down", "power, thermal")]),
    (replace(QUIET, ecc_corrected=5, ecc_uncorrected=1), [("ecc_corrected", "3 new"), ("ecc_uncorrected", "1 new")]),
    (replace(QUIET, ecc_corrected=0), []),  # the driver was loaded again
    (replace(QUIET, slow_down=None, ecc_corrected=None, reasons={"slow_down": "Not Supported"}), []),
])  # fmt: skip
def test_what_happened_between_two_samples(now, expected):
    assert events_between(QUIET, now) == expected


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED])
def test_a_device_is_lost_when_nvml_first_says_so(code):
    now = replace(QUIET, reasons={"power_w": str(pynvml.NVMLError(code))})
    assert [kind for kind, _ in events_between(QUIET, now)] == ["lost"]
    assert events_between(now, now) == []


def test_a_state_that_lasts_is_one_event():
    slow = replace(QUIET, slow_down=("power",))
    hot = replace(QUIET, slow_down=("power", "thermal"))
    assert events_between(slow, slow) == []
    assert events_between(slow, hot) == [("slow_down", "thermal")]


def test_a_watch_calls_back_and_counts(monkeypatch):
    device = registry.find_device("cpu")
    state = {"ecc": 7, "slow": ()}
    figures = {"ecc_uncorrected": lambda: state["ecc"], "slow_down": lambda: state["slow"]}
    monkeypatch.setattr(monitor, "_readers", {("cpu", 0): TableReader(figures, "not here")})
    seen, arrived = [], threading.Event()

    def listener(event):
        seen.append((event.device, event.kind, event.detail))
        arrived.set()

    samples = []
    with watch_devices(listener, [device], interval_s=0.01, samples=samples.append):
        assert [item.ecc_uncorrected for item in samples[:1]] == [7]
        state["ecc"] = 9
        assert arrived.wait(30)
        state["slow"] = ("thermal",)  # the last reading is made when the block ends
    assert seen == [("cpu:0", "ecc_uncorrected", "2 new"), ("cpu:0", "slow_down", "thermal")]
    assert monitor.event_counts() == {("cpu:0", "ecc_uncorrected"): 1, ("cpu:0", "slow_down"): 1}
    assert samples[-1].slow_down == ("thermal",)
    assert all(item.processes is None for item in samples)
    state["ecc"] = 11
    time.sleep(0.03)
    assert len(seen) == 2
    text = to_prometheus([monitor.sample(device)])
    assert text == to_prometheus([device])
    assert 'accelerant_device_events_total{device="cpu:0",kind="ecc_uncorrected"} 1' in text
    assert f'accelerant_device_ecc_uncorrected_total{{device="cpu:0",name="{device.name}"}} 11' in text
    assert f'accelerant_device_slow_down{{device="cpu:0",name="{device.name}",reason="thermal"}} 1' in text


def test_a_listener_that_fails_takes_nothing_down(caplog):
    seen = []

    with subscribe(Mock(side_effect=ValueError("the listener's"))), subscribe(seen.append):
        monitor.publish("cuda:0", "ecc_corrected", "1 new")
    assert str(seen[0]) == "cuda:0 ecc_corrected: 1 new"
    assert seen[0].to_dict()["kind"] == "ecc_corrected"
    assert "the listener's" in caplog.text


def test_a_lost_device_is_an_event_without_a_watch_and_once():
    seen = []
    with subscribe(seen.append):
        for _ in range(2):
            assert isinstance(
                cuda_error("CUDA error: an illegal memory access was encountered", "kernel k"), DeviceLost
            )
        cuda_error("CUDA error: invalid argument", "kernel k")
    assert [(event.device, event.kind) for event in seen] == [("cuda", "lost")]
    assert "illegal memory access" in seen[0].detail


@pytest.mark.parametrize("interval_s", [0.0, -1.0, float("nan"), 3601.0])
def test_an_interval_out_of_range_is_refused(interval_s):
    with pytest.raises(ConfigError, match="interval_s"), acl.watch_devices(interval_s=interval_s):
        pass


@pytest.mark.gpu
def test_nvml_reports_the_figures_of_events():
    now = monitor.sample(registry.find_device("cuda"))
    assert isinstance(now.slow_down, tuple)
    assert now.ecc_corrected is not None or "Not Supported" in now.reasons["ecc_corrected"]
    with watch_devices(devices=[registry.find_device("cuda")], interval_s=0.05):
        time.sleep(0.2)
