import json
import signal
import socket
import time

import pytest
from serving import Server

from accelerant.cli import main
from accelerant.config import load as library_settings
from accelerant.errors import ConfigError
from accelerant.service.settings import ServiceSettings, load
from commands import status


def test_file_environment_and_arguments_in_rising_order(tmp_path):
    file = tmp_path / "service.toml"
    file.write_text('port = 1\nshort_s = 2\nlog = "text"\ndevices = ["cpu", "cuda:0"]\n[models]\ntiny = "/srv/tiny"\n')
    environ = {"ACCELERANT_SERVE_PORT": "2", "ACCELERANT_SERVE_QUEUE_JOBS": "7", "ACCELERANT_SERVE_DEVICES": "cpu, cpu"}
    found = load(file, environ, port=3, host=None)
    assert (found.port, found.queue_jobs, found.short_s, found.log) == (3, 7, 2.0, "text")
    assert found.devices == ("cpu", "cpu")
    assert str(found.models["tiny"]) == "/srv/tiny"
    assert load(file, {}).devices == ("cpu", "cuda:0")
    assert load(None, {"ACCELERANT_SERVE_PORT": "tcp://10.0.0.1:80"}).port == 8080  # of Kubernetes
    assert library_settings({"ACCELERANT_SERVE_PORT": "2", "HOME": str(tmp_path)}).backend == "auto"


@pytest.mark.parametrize(("text", "why"), [
    ("prt = 1", "did you mean 'port'"),
    ("port = 1.5", "port must be int"),
    ("port = true", "port must be int"),
    ("port = 70000", "0 to 65535"),
    ("queue_jobs = 0", "above 0"),
    ('log = "xml"', "json or text"),
    ('tls_key = "key.pem"', "belong together"),
    ('models = "tiny"', "models must be"),
    ('devices = ["cpu", "cudaa:1"]', "unknown backend 'cudaa' .did you mean 'cuda'"),
    ('devices = ["cuda:0", "cuda:1"]\ngpus = 4', "gpus: 4 devices are wanted, and 2 given"),
    ('gpus = 2\nquantize = "int4"', "gpus: weights in 4-bit integers are not split"),
    ("port = ", "not TOML"),
])  # fmt: skip
def test_bad_files_are_refused(tmp_path, text, why):
    file = tmp_path / "service.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=why):
        load(file, {})


def test_a_device_is_no_file_of_settings():
    with pytest.raises(ConfigError, match="cannot read /dev/zero: it is not a regular file"):
        load("/dev/zero", {})


def test_an_empty_job_store_is_not_sqlite():
    with pytest.raises(ConfigError, match="ACCELERANT_SERVE_STATE_URL must not be empty"):
        load(None, {"ACCELERANT_SERVE_STATE_URL": ""})


def test_addresses_and_secrets():
    assert all(ServiceSettings(host=host).is_loopback for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9"))
    assert not any(ServiceSettings(host=host).is_loopback for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"))
    assert "secret" not in repr(ServiceSettings(state_url="postgresql://user:secret@host/name"))


@pytest.mark.parametrize(("option", "value", "status", "why"), [
    ("--state-url", "foo://x", 2, "accelerant: state_url must be of sqlite or postgresql, got 'foo'"),
    ("--state-url", "sqlite:////absent/x.db", 1, "cannot use sqlite:////absent/x.db: unable to open"),
    ("--directory", "empty", 2, "empty cannot be made: File exists"),
    ("--device", "toaster", 2, "accelerant: unknown backend 'toaster'"),
    ("--device", "cpu:9", 1, "worker of cpu:9: "),
    ("--tls-certificate", "absent", 2, "tls_certificate absent and tls_key empty must be the PEM files"),
    ("--tls-certificate", "empty", 2, "tls_certificate empty and tls_key empty must be the PEM files"),
])  # fmt: skip
def test_a_start_that_fails_says_why_without_a_traceback(tmp_path, monkeypatch, capfd, option, value, status, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    other = ("--tls-key", "empty") if option == "--tls-certificate" else ()
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--port", "0", "--directory", str(tmp_path / "state"), option, value, *other])
    errors = capfd.readouterr().err + (ended.value.code if isinstance(ended.value.code, str) else "")
    assert (1 if isinstance(ended.value.code, str) else ended.value.code) == status
    assert why in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_no_traceback_in_the_log(tmp_path):
    server = Server(tmp_path / "state", "--device", "cpu")
    for _ in range(2):
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    assert server.process.wait(timeout=120) == 130
    server.reader.join(timeout=120)
    entries = [json.loads(line) for line in server.lines if line.startswith("{")]
    assert "stopping on signal 2" in [entry["message"] for entry in entries]
    assert not [entry for entry in entries if entry["level"] == "error"]


def test_an_address_in_use_is_refused_before_anything_is_made(tmp_path, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert status("serve", "--port", port, "--directory", tmp_path / "state") == 2
    assert f"cannot listen on host 127.0.0.1, port {port}: Address already in use" in capfd.readouterr().err
    assert not (tmp_path / "state").exists()
