import json
import math
import os
import ssl
import time
import types
from functools import partial

import pytest
from serving import Server

from accelerant.cli import main
from accelerant.errors import ConfigError, FormatError
from accelerant.service.app import require_keys
from accelerant.service.keys import KeyStore
from accelerant.service.settings import ServiceSettings
from refusals import assert_raises


@pytest.fixture
def clock(monkeypatch):
    """The clock of keys, which a test sets ahead."""
    moved = types.SimpleNamespace(ahead_s=0.0)
    moved.time, moved.monotonic = (lambda: time.time() + moved.ahead_s), (lambda: time.monotonic() + moved.ahead_s)
    monkeypatch.setattr("accelerant.service.keys.time", moved)
    return moved


@pytest.fixture
def store(tmp_path):
    return KeyStore(tmp_path / "keys.json")


def test_a_key_is_valid_until_it_is_revoked_and_its_secret_is_not_stored(store):
    key, token = store.create("ci", ["field"])
    assert store.verify(token) == key
    assert KeyStore(store.path).verify(token) == key
    assert token.split("_", 2)[2] not in store.path.read_text()  # the secret, which may have a "_"
    assert store.path.stat().st_mode & 0o777 == 0o600
    assert token not in repr(key)
    for wrong in (token[:-1], token + "x", token.replace("acl", "abc"), f"acl_{'0' * 12}_{'A' * 43}", "", "é"):
        assert store.verify(wrong) is None
    changed = token[:-2] + ("A" if token[-2] != "A" else "B") + token[-1]
    assert store.verify(changed) is None
    store.revoke(key.id)
    assert store.verify(token) is None


def test_rotation_keeps_the_id_and_the_old_secret_for_a_time(store, clock):
    key, old = store.create("ci", ["field"])
    rotated, new = store.rotate(key.id, grace_s=60.0)
    assert rotated.id == key.id
    assert store.verify(old) is not None
    assert store.verify(new) is not None
    clock.ahead_s = 61.0
    assert store.verify(old) is None
    assert store.verify(new) is not None
    assert len(store.rotate(key.id, grace_s=0)[0].secrets) == 1


def test_a_lifetime_ends(store, clock):
    _, token = store.create("ci", ["field"], lifetime_s=60.0)
    assert store.verify(token) is not None
    clock.ahead_s = 61.0
    assert store.verify(token) is None


def test_rates_are_bounded(store, clock):
    key, _ = store.create("ci", ["field"], rate=0.01, burst=3)
    assert [store.wait_s(key) for _ in range(3)] == [0, 0, 0]
    assert 0 < store.wait_s(key) <= 100
    clock.ahead_s = 101.0
    assert store.wait_s(key) == 0


def test_bad_arguments_and_files_are_refused(store):
    for arguments in (("", ["field"]), ("a\n", ["field"]), ("a", []), ("a", ["fields"])):
        assert_raises(ConfigError, None, store.create, *arguments)
    assert_raises(ConfigError, "rate must be above 0", store.create, "a", ["field"], rate=0)
    for name in ("rate", "burst"):  # which the file could not hold
        with pytest.raises(ConfigError, match=f"{name} must be at most 1,000,000,000, got 1"):
            store.create("a", ["field"], **{name: 10**19})
    assert_raises(ConfigError, "no key '1'", store.revoke, "1")
    key, token = store.create("ci", ["field"])
    for lifetime_s in (0.0, -1.0, math.nan, math.inf):  # none of them is a key that never expires
        for change in (partial(store.create, "a", ["field"]), partial(store.rotate, key.id)):
            assert_raises(ConfigError, f"lifetime must be above 0, got {lifetime_s}", change, lifetime_s=lifetime_s)
    assert_raises(ConfigError, "got nan", store.rotate, key.id, grace_s=math.nan)
    assert store.read() == [key]
    assert store.verify(token) == key
    for text in ("", "[]", '{"keys": 3}', '{"keys": [{"id": 5}]}'):
        store.path.write_text(text)
        assert_raises(FormatError, "no file of API keys", lambda: KeyStore(store.path).read())


def test_an_outage_of_the_file_is_a_line_and_its_end_another(store, caplog):
    _, token = store.create("ci", ["field"])
    whole = store.path.read_text()
    with caplog.at_level("INFO", "accelerant.service"):
        for text in ("{", "{", "{", whole, whole):
            store.path.write_text(text)
            store._looked = -10.0
            assert store.verify(token)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2, lines
    assert "not read again" in lines[0]
    assert "read again" in lines[1]


def test_a_file_that_is_damaged_later_does_not_open_the_service(store):
    key, token = store.create("ci", ["field"])
    running = KeyStore(store.path)
    assert running.verify(token) == key
    store.path.write_text("{")
    running._looked = -10.0
    assert running.verify(token) == key
    assert running.exists
    store.path.write_text("{")
    started = KeyStore(store.path)  # which has never read it
    assert started.verify(token) is None
    assert started.exists
    store.path.write_text('{"keys": []}')
    running._looked = -10.0
    assert running.verify(token) is None
    assert running.exists


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root writes files of others")
def test_root_leaves_the_file_to_who_runs_the_service(store):
    _, token = store.create("ci", ["field"])
    os.chown(store.path, 12345, 12345)
    store.revoke(token[4:16])
    assert (store.path.stat().st_uid, store.path.stat().st_mode & 0o777) == (12345, 0o600)


def test_days_are_bounded_and_a_stored_key_of_longer_is_listed(store, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERANT_SERVE_KEYS_FILE", str(store.path))
    create, rotate = ["create", "--name", "a", "--scope", "field"], ["rotate", "0"]
    for command, option in ((create, "--days"), (rotate, "--days"), (rotate, "--grace-days")):
        for value in ("1e300", "-1", "nan"):
            assert_raises(SystemExit, "2", main, ["keys", *command, option, value])
            error = capsys.readouterr().err
            assert f"Invalid value for '{option}': " in error
    assert_raises(SystemExit, "2", main, ["keys", *create, "--burst", "2"])
    assert "--burst 2 goes with --rate" in capsys.readouterr().err
    assert not store.path.exists()
    assert_raises(SystemExit, "0", main, ["keys", "list"])
    assert capsys.readouterr().out == "no keys\n"
    store.create("old", ["field"], lifetime_s=1e305)
    assert_raises(SystemExit, "0", main, ["keys", "list"])
    assert "old  field  until " in capsys.readouterr().out


@pytest.mark.slow
def test_the_service_beyond_loopback(tmp_path, certificate, monkeypatch, capsys):
    """Keys by the command, scopes, rates, TLS, revocation while the service runs, and no secret in the log."""
    with pytest.raises(ConfigError, match="has no API keys"):
        require_keys(ServiceSettings(host="0.0.0.0", directory=tmp_path / "state"))
    store = KeyStore(tmp_path / "state/keys.json")
    monkeypatch.setenv("ACCELERANT_SERVE_DIRECTORY", str(tmp_path / "state"))

    def keys(*arguments):
        assert_raises(SystemExit, "0", main, ["keys", *arguments, "--json"])
        return json.loads(capsys.readouterr().out)

    field = keys("create", "--name", "a", "--scope", "field", "--scope", "monitor")
    _, secret = store.create("b", ["admin"], rate=1, burst=2)
    listed = keys("list")
    assert [key["name"] for key in listed] == ["a", "b"]
    assert "token" not in listed[0]
    server = Server(
        tmp_path / "state", "--host", "0.0.0.0", "--device", "cpu", "--tls-certificate", str(certificate[0]),
        "--tls-key", str(certificate[1]),
    )  # fmt: skip
    trusted = ssl.create_default_context(cafile=certificate[0])
    url = server.url.replace("0.0.0.0", "localhost")
    body = {"inputs": [{"name": name, "shape": [1], "datatype": "UINT64", "data": [3]} for name in "xy"]}
    with server.client(verify=trusted) as http:
        assert url.startswith("https://")
        http.base_url = url
        assert http.get("/v2/health/live").status_code == 200
        for path in ("/v2", "/v2/models", "/jobs", "/metrics", "/v2/models/field_mul"):
            answer = http.get(path)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        bearer = {"authorization": f"Bearer {field['token']}"}
        assert http.post("/v2/models/field_mul/infer", json=body, headers=bearer).json()["outputs"][0]["data"] == [9]
        assert (
            http.post("/v2/models/field_mul/infer", json=body, headers={"x-api-key": field["token"]}).status_code == 200
        )
        refused = http.post("/v2/models/privacy_epsilon/infer", json={}, headers=bearer)
        assert (refused.status_code, refused.json()["type"]) == (403, "Forbidden")
        assert http.get("/v2", headers={"authorization": f"Bearer {field['token'][:-3]}abc"}).status_code == 401

        admin = {"authorization": f"Bearer {secret}"}
        job = http.post("/v2/models/field_mul/infer", json=body, headers=bearer | {"prefer": "respond-async"})
        assert job.status_code == 202
        assert http.get(job.headers["location"], headers=admin).status_code == 200
        statuses = [http.get("/v2", headers=admin) for _ in range(4)]
        limited = next(answer for answer in statuses if answer.status_code == 429)
        assert int(limited.headers["retry-after"]) >= 1

        with http.stream("GET", "/events", headers=bearer) as events:
            lines = events.iter_lines()
            assert next(lines) == "event: start"
            store.revoke(field["id"])
            assert "event: state" in list(lines)  # which ends
        assert http.get("/v2", headers=bearer).status_code == 401
    assert server.stop() == 0
    log = "\n".join(server.lines)
    assert field["token"] not in log
    assert secret.split("_", 2)[2] not in log
    assert any(record["key_id"] == field["id"] and record["operation"] == "field_mul" for record in server.records())
