"""The Helm chart: linted, rendered over sets of values, and each object checked against Kubernetes' own schemas."""

import dataclasses
import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from accelerant import __version__
from accelerant.service.settings import ServiceSettings, load
from requirements import require, require_module

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "accelerant"
HELM = Path(__file__).parent / "node_modules" / ".bin" / "helm"
CUSTOM = {"ServiceMonitor", "PrometheusRule"}
"""Kinds of the Prometheus operator, of which Kubernetes has no schema."""

URL = "postgresql://accelerant:secret@db/accelerant"
ON = {
    "replicas": 3,
    "postgresql": True,
    "image": {"pullSecrets": [{"name": "registry"}]},
    "gpu": {"vendor": "nvidia", "count": 2, "resource": "nvidia.com/mig-1g.10gb", "runtimeClassName": "nvidia"},
    "settings": {
        "lease_s": 60.5, "queue_jobs": 2_000_000_000, "short_s": 0.25, "devices": ["cuda:0"],
        "models": {"tiny": "/srv/tiny"},
    },
    "secret": {"keys": "{}", "stateUrl": URL},
    "persistence": {"storageClass": "fast", "keepAfterScaleDown": True},
    "sharedPersistence": {"storageClass": "nfs"},
    "autoscaling": {"enabled": True},
    "monitoring": {"enabled": True, "keySecret": {"name": "key"}, "labels": {"release": "prometheus"}},
    "networkPolicy": {"egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]},
    "serviceAccount": {"name": "own"},
    "podAnnotations": {"example.com/a": "b"},
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "tolerations": [{"key": "batch", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "env": [{"name": "ACCELERANT_LOG", "value": "info"}],
    "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
    "volumeMounts": [{"name": "models", "mountPath": "/srv", "readOnly": True}],
}  # fmt: skip
OFF = {
    "secret": {"existing": "own"}, "persistence": {"enabled": False}, "podDisruptionBudget": {"enabled": False},
    "networkPolicy": {"enabled": False},
}  # fmt: skip
TLS = {
    "secret": {"existing": "own"},
    "settings": {"tls_certificate": "/etc/tls/tls.crt", "tls_key": "/etc/tls/tls.key"},
    "image": {"digest": "sha256:" + "0123456789abcdef" * 4},
    "priorityClassName": "batch",
    "service": {"annotations": {"example.com/a": "b"}},
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "annotations": {"example.com/protocol": "HTTPS"},
        "hosts": [{"host": "gpu.example.org"}, {"host": "*.b.org", "paths": [{"path": "/v2", "pathType": "Exact"}]}],
        "tls": [{"secretName": "gpu", "hosts": ["gpu.example.org"]}],
    },
    "monitoring": {
        "enabled": True,
        "keySecret": {"name": "key"},
        "from": [{"podSelector": {"matchLabels": {"a": "b"}}}],
    },
    "volumes": [{"name": "tls", "secret": {"secretName": "tls"}}],
    "volumeMounts": [{"name": "tls", "mountPath": "/etc/tls"}],
}
VALUES = {
    "tls": TLS,
    "cpu": {"secret": {"existing": "own"}},
    "nvidia": {"secret": {"existing": "own"}, "gpu": {"vendor": "nvidia"}},
    "amd": {"secret": {"existing": "own"}, "gpu": {"vendor": "amd", "count": 8}},
    "on": ON,
    "off": OFF,
}
every_set = pytest.mark.parametrize("name", VALUES)


class UniqueKeys(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """YAML in which a key that stands twice is an error, as it is for kubectl."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key stands twice: {sorted(keys)}"
        return super().construct_mapping(node, deep)


def helm(tmp_path, command, values, *arguments):
    require("" if HELM.exists() else "Helm is not here: scripts/ci-setup installs it")
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    return subprocess.run(
        [HELM, *command, CHART, "--values", file, *arguments],
        capture_output=True, text=True, env={"HOME": str(tmp_path)}, check=False,
    )  # fmt: skip


def rendered(tmp_path, values):
    done = helm(tmp_path, ["template", "release"], values, "--kube-version", "1.33.0", "--namespace", "here")
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return [item for item in yaml.load_all(done.stdout, UniqueKeys) if item]


def named(objects, kind):
    return [item for item in objects if item["kind"] == kind]


def pod_of(objects):
    return named(objects, "StatefulSet")[0]["spec"]["template"]["spec"]


@every_set
def test_lint_has_no_warning(tmp_path, name):
    done = helm(tmp_path, ["lint", "--strict"], VALUES[name])
    assert done.returncode == 0, done.stdout
    assert "WARN" not in done.stdout + done.stderr


@every_set
def test_objects_follow_the_schemas_of_kubernetes(tmp_path, name):
    require_module("kubernetes_validate")
    import kubernetes_validate

    objects = rendered(tmp_path, VALUES[name])
    for item in objects:
        for version in () if item["kind"] in CUSTOM else ("1.27", "1.37"):
            kubernetes_validate.validate(item, version, strict=True)
    names = [(item["kind"], item["metadata"]["name"]) for item in objects]
    assert len(names) == len(set(names))


def test_a_misspelt_field_would_be_found(tmp_path):
    require_module("kubernetes_validate")
    import kubernetes_validate

    stateful = named(rendered(tmp_path, VALUES["cpu"]), "StatefulSet")[0]
    stateful["spec"]["template"]["spec"]["terminationGracePeriod"] = 3
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(stateful, "1.37", strict=True)


@every_set
def test_pods_have_no_privilege(tmp_path, name):
    objects = rendered(tmp_path, VALUES[name])
    pod = pod_of(objects)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
    assert "secret@" not in yaml.safe_dump(named(objects, "StatefulSet") + named(objects, "ConfigMap"))


@pytest.mark.parametrize(("name", "resource", "count", "variant"), [
    ("cpu", None, None, "cpu"), ("nvidia", "nvidia.com/gpu", 1, "cuda"), ("amd", "amd.com/gpu", 8, "rocm"),
    ("on", "nvidia.com/mig-1g.10gb", 2, "cuda"),
])  # fmt: skip
def test_the_vendor_chooses_resource_image_and_toleration(tmp_path, name, resource, count, variant):
    pod = pod_of(rendered(tmp_path, VALUES[name]))
    limits = pod["containers"][0]["resources"]["limits"]
    assert {key: limits[key] for key in limits if "/" in key} == ({resource: count} if resource else {})
    assert pod["containers"][0]["image"] == f"accelerant:{__version__}-{variant}"
    assert [item["key"] for item in pod.get("tolerations", []) if "/" in item["key"]] == (
        [resource] if resource else []
    )


@every_set
def test_probes_and_the_time_to_drain(tmp_path, name):
    objects = rendered(tmp_path, VALUES[name])
    pod = pod_of(objects)
    container = pod["containers"][0]
    paths = {
        probe: container[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    schemes = {container[probe]["httpGet"]["scheme"] for probe in paths}
    assert schemes == {"HTTPS" if name == "tls" else "HTTP"}
    live, ready = "/v2/health/live", "/v2/health/ready"
    assert paths == {"startupProbe": live, "livenessProbe": live, "readinessProbe": ready}
    settings = tomllib.loads(named(objects, "ConfigMap")[0]["data"]["service.toml"])
    waits = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > settings["drain_s"] + waits + settings.get("lease_s", 10)


@every_set
def test_every_volume_is_mounted_and_every_mount_has_its_volume(tmp_path, name):
    objects = rendered(tmp_path, VALUES[name])
    pod, claims = pod_of(objects), named(objects, "StatefulSet")[0]["spec"].get("volumeClaimTemplates", [])
    volumes = [volume["name"] for volume in pod["volumes"]] + [claim["metadata"]["name"] for claim in claims]
    assert sorted(volumes) == sorted(mount["name"] for mount in pod["containers"][0]["volumeMounts"])
    assert any(mount["mountPath"] == "/tmp" for mount in pod["containers"][0]["volumeMounts"])


@every_set
def test_the_service_reads_the_settings_of_the_chart(tmp_path, name):
    objects = rendered(tmp_path, VALUES[name])
    file = tmp_path / "service.toml"
    file.write_text(named(objects, "ConfigMap")[0]["data"]["service.toml"])
    env = {item["name"]: item.get("value", URL) for item in pod_of(objects)["containers"][0]["env"]}
    settings = load(file, env)
    for key, value in VALUES[name].get("settings", {}).items():
        found = getattr(settings, key)
        if isinstance(value, dict):
            found = {name: str(folder) for name, folder in found.items()}
        assert (list(found) if isinstance(value, list) else found) == value
    assert settings.keys_file == "/etc/accelerant/secret/keys.json"


def test_prometheus_has_a_key_and_the_scheme_and_is_admitted(tmp_path):
    for values, scheme in ((ON, "http"), (TLS, "https")):
        objects = rendered(tmp_path, values)
        (endpoint,) = named(objects, "ServiceMonitor")[0]["spec"]["endpoints"]
        assert endpoint["authorization"]["credentials"] == {"name": "key", "key": "metrics_key"}
        assert endpoint["scheme"] == scheme
        assert endpoint.get("tlsConfig") == ({"serverName": "release-accelerant.here.svc"} if values is TLS else None)
        sources = [rule["from"] for rule in named(objects, "NetworkPolicy")[0]["spec"]["ingress"]]
        assert sources == [[{"podSelector": {}}], *([TLS["monitoring"]["from"]] if values is TLS else [])]


def test_ingress_priority_annotations_and_digest(tmp_path):
    objects = rendered(tmp_path, TLS)
    service = named(objects, "Service")[0]
    assert service["metadata"]["annotations"] == {"example.com/a": "b"}
    (ingress,) = named(objects, "Ingress")
    backend = {"service": {"name": service["metadata"]["name"], "port": {"name": "http"}}}
    paths = [
        {"path": "/", "pathType": "Prefix", "backend": backend},
        {"path": "/v2", "pathType": "Exact", "backend": backend},
    ]
    assert [rule["http"]["paths"][0] for rule in ingress["spec"]["rules"]] == paths
    pod = pod_of(objects)
    assert pod["priorityClassName"] == "batch"
    assert pod["containers"][0]["image"].endswith("@" + TLS["image"]["digest"])


def test_the_schema_has_the_settings_of_the_service():
    known = json.loads((CHART / "values.schema.json").read_text())["properties"]["settings"]["properties"]
    of_the_chart = {"host", "port", "directory", "state_url", "keys_file", "drain_s"}
    assert {*known} == {field.name for field in dataclasses.fields(ServiceSettings)} - of_the_chart


def test_optional_objects(tmp_path):
    kinds = {name: {item["kind"] for item in rendered(tmp_path, values)} for name, values in VALUES.items()}
    optional = {"PodDisruptionBudget", "NetworkPolicy", "HorizontalPodAutoscaler", "Secret", *CUSTOM}
    assert kinds["on"] >= optional
    assert not kinds["off"] & optional


def test_replicas_share_the_arrays_of_jobs(tmp_path):
    objects = rendered(tmp_path, ON)
    claim = named(objects, "PersistentVolumeClaim")[0]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    pod = pod_of(objects)
    volume = next(volume for volume in pod["volumes"] if volume["name"] == "jobs")
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    mount = next(mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "jobs")
    env = {item["name"]: item for item in pod["containers"][0]["env"]}
    assert env["ACCELERANT_SERVE_DIRECTORY"]["value"].startswith(mount["mountPath"] + "/")
    assert env["ACCELERANT_SERVE_STATE_URL"]["valueFrom"]["secretKeyRef"]["key"] == "state_url"
    assert "replicas" not in named(objects, "StatefulSet")[0]["spec"]  # the autoscaler's


def test_selectors_name_labels_of_the_pods(tmp_path):
    objects = rendered(tmp_path, ON)
    stateful = named(objects, "StatefulSet")[0]
    labels = stateful["spec"]["template"]["metadata"]["labels"].items()
    selectors = [stateful["spec"]["selector"]["matchLabels"]]
    selectors += [item["spec"]["selector"] for item in named(objects, "Service")]
    selectors += [item["spec"]["selector"]["matchLabels"] for item in named(objects, "PodDisruptionBudget")]
    selectors += [item["spec"]["podSelector"]["matchLabels"] for item in named(objects, "NetworkPolicy")]
    assert len(selectors) == 5
    for selector in selectors:
        assert selector.items() <= labels
    (monitor,) = named(objects, "ServiceMonitor")
    ports = [
        port["name"] for service in named(objects, "Service")
        if monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        for port in service["spec"]["ports"]
    ]  # fmt: skip
    assert ports.count(monitor["spec"]["endpoints"][0]["port"]) == 1
    (scaler,) = named(objects, "HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"]["name"] == stateful["metadata"]["name"]


@pytest.mark.parametrize(("values", "reason"), [
    ({}, "set secret.existing, or secret.keys"),
    (VALUES["cpu"] | {"replicas": 2}, "need postgresql: true"),
    (VALUES["cpu"] | {"autoscaling": {"enabled": True}}, "need postgresql: true"),
    ({"secret": {"keys": "{}"}, "postgresql": True}, "needs secret.stateUrl"),
    ({"secret": {"keys": "{}", "stateUrl": "mysql://x"}}, "stateUrl"),
    (VALUES["cpu"] | {"gpu": {"vendor": "intel"}}, "gpu.vendor"),
    (VALUES["cpu"] | {"gpu": {"count": 0}}, "gpu.count"),
    (VALUES["cpu"] | {"replica": 2}, "replica is not allowed"),
    (VALUES["cpu"] | {"monitoring": {"enabled": True}}, "networkPolicy.from"),
    (VALUES["cpu"] | {"monitoring": {"enabled": True}}, "monitoring.keySecret"),
    (VALUES["cpu"] | {"ingress": {"enabled": True}}, "ingress.hosts"),
    (VALUES["cpu"] | {"autoscaling": {"minReplicas": 5, "maxReplicas": 2}}, "minReplicas is 5, above"),
    *(
        (VALUES["cpu"] | {"settings": {name: value}}, name)
        for name, value in (
            ("nonsense", 3), ("queue_jobs", 0), ("queue_jobs", "many"), ("queue_jobs", 1.5), ("lease_s", -1),
            ("log", "xml"), ("devices", "cuda:0"), ("models", {"a b": "/x"}),
        )
    ),
    (VALUES["cpu"] | {"settings": {"tls_certificate": "/cert.pem"}}, "dependency on tls_key"),
    (VALUES["cpu"] | {"nodeSelector": {"gpu": True}}, "nodeSelector.gpu"),
    (VALUES["cpu"] | {"podAnnotations": {"a": 1}}, "podAnnotations.a"),
    (VALUES["cpu"] | {"image": {"digest": "sha256:12"}}, "image.digest"),
    (VALUES["cpu"] | {"env": [{"name": "A", "value": 1}]}, "env.0.value"),
    (VALUES["cpu"] | {"env": [{"name": "ACCELERANT_SERVE_NONSENSE", "value": "1"}]}, "env.0.name"),
    (VALUES["cpu"] | {"tolerations": [{"operator": "Any"}]}, "tolerations.0.operator"),
    (VALUES["cpu"] | {"secret": {"keys": "acl_abc"}}, "secret.keys"),
    (VALUES["cpu"] | {"settings": {"host": "::"}}, "settings"),
    (VALUES["cpu"] | {"settings": {"a\nhost": "::"}}, "settings"),
    (VALUES["cpu"] | {"persistence": {"size": "20 GB"}}, "persistence.size"),
    (VALUES["cpu"] | {"priorityClassName": "High"}, "priorityClassName"),
    (VALUES["cpu"] | {"secret": {"existing": "our_keys"}}, "secret.existing"),
    (VALUES["cpu"] | {"image": {"tag": "a b"}}, "image.tag"),
])  # fmt: skip
def test_wrong_values_are_refused(tmp_path, values, reason):
    done = helm(tmp_path, ["template", "release"], values, "--kube-version", "1.33.0")
    assert done.returncode != 0
    assert reason in done.stderr


def test_versions_are_the_packages():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == __version__
    for file in ("compose.yml", "training/indexed-job.yaml", "training/trainjob.yaml"):
        images = re.findall(r"image: accelerant:(\S+)-(?:cpu|cuda)\n", (ROOT / "deploy" / file).read_text())
        assert images
        assert set(images) == {__version__}
