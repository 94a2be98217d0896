"""The Kubernetes manifests: valid against the schemas, and names, ports, secrets and volumes fit together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import kubernetes_validate
import pytest
import yaml

HERE = Path(__file__).parent
MANIFESTS = HERE.parents[1] / "configs/clusters/kubernetes"
VERSION = "1.33"
RAY_CLUSTER = json.loads((HERE / "raycluster.json").read_text())  # written by hand after KubeRay's reference
DOCUMENTS = [
    document
    for path in sorted(MANIFESTS.glob("*.yaml"))
    if path.name != "kustomization.yaml"
    for document in yaml.safe_load_all(path.read_text())
]
# Secrets that are not in the manifests: the first is made by hand (docs/kubernetes.md), the second by KubeRay.
SECRETS = {
    "penstock-secrets": {"PREFECT_API_AUTH_STRING", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"},
    "penstock": {"auth_token"},
}


def ray_groups(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [document["spec"]["headGroupSpec"], *document["spec"]["workerGroupSpecs"]]


def pods() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield name, pod template and claims of the StatefulSet for every kind of pod."""
    for document in DOCUMENTS:
        spec = document.get("spec", {})
        if document["kind"] == "RayCluster":
            for group in ray_groups(document):
                yield group.get("groupName", "head"), group["template"], {}
        elif "template" in spec:
            yield document["metadata"]["name"], spec["template"], spec


def named(kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in DOCUMENTS if each["kind"] == kind}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_manifest_is_valid(document: dict[str, Any]) -> None:
    if document["kind"] == "RayCluster":
        jsonschema.validate(document, RAY_CLUSTER)
        for group in ray_groups(document):
            check_schema({"apiVersion": "v1", "kind": "PodTemplate", "template": group["template"]})
    else:
        check_schema(document)


def check_schema(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, VERSION, strict=True)


def test_schemas_refuse_unknown_fields_and_wrong_types() -> None:
    service = named("Service")["mlflow"]
    for field, value in (("porst", []), ("ports", "5000")):
        with pytest.raises(kubernetes_validate.ValidationError):
            check_schema({**service, "spec": {**service["spec"], field: value}})
    [cluster] = named("RayCluster").values()
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**cluster, "spec": {**cluster["spec"], "headGroup": {}}}, RAY_CLUSTER)


def test_kustomization_lists_every_manifest() -> None:
    kustomization = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())
    assert sorted([*kustomization["resources"], "kustomization.yaml"]) == sorted(
        path.name for path in MANIFESTS.iterdir()
    )
    assert kustomization["namespace"] == "penstock" and "penstock" in named("Namespace")


def test_every_referenced_secret_configuration_and_volume_exists() -> None:
    for name, template, spec in pods():
        claims = {each["metadata"]["name"] for each in spec.get("volumeClaimTemplates", [])}
        volumes = {volume["name"]: volume for volume in template["spec"].get("volumes", [])}
        for volume in volumes.values():
            claim = volume.get("persistentVolumeClaim")
            assert claim is None or claim["claimName"] in named("PersistentVolumeClaim"), name
        for container in template["spec"]["containers"]:
            for mount in container.get("volumeMounts", []):
                assert mount["name"] in volumes | dict.fromkeys(claims), name
            for variable in container.get("env", []):
                if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                    assert reference["key"] in SECRETS[reference["name"]], name
            for source in container.get("envFrom", []):
                assert source.get("secretRef", {"name": "penstock"})["name"] in SECRETS
                assert source.get("configMapRef", {"name": "services"})["name"] in named("ConfigMap")


def test_services_select_pods_with_their_ports_and_are_the_configured_addresses() -> None:
    ports = {"penstock-head-svc": {6379, 8265}}  # made by KubeRay
    for name, service in named("Service").items():
        [template] = [each for _, each, _ in pods() if each["metadata"]["labels"] == service["spec"]["selector"]]
        names = {port["name"] for each in template["spec"]["containers"] for port in each["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
        ports[name] = {port["port"] for port in service["spec"]["ports"]}
    addresses = [urlsplit(value) for value in named("ConfigMap")["services"]["data"].values() if "://" in value]
    assert len(addresses) == 3 and all(each.port in ports[str(each.hostname)] for each in addresses)
    worker = named("Deployment")["prefect-worker"]["spec"]["template"]["spec"]["containers"][0]["args"][0]
    assert "--address=penstock-head-svc:6379" in worker and "penstock" in named("RayCluster")


def test_pods_run_without_rights_and_without_a_token_of_kubernetes() -> None:
    for name, template, _ in pods():
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False and spec["securityContext"]["runAsNonRoot"], name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), name
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "memory" in container["resources"]["limits"], name
    text = "".join(path.read_text() for path in MANIFESTS.iterdir())
    assert "LoadBalancer" not in text and "NodePort" not in text and "kind: Ingress" not in text
    assert named("NetworkPolicy")["this-namespace-only"]["spec"]["podSelector"] == {}


def test_ray_nodes_have_a_token_and_shared_memory_and_the_installed_version() -> None:
    [cluster] = named("RayCluster").values()
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    lock = (MANIFESTS.parents[1] / "environment/lock/cuda-py3.12.txt").read_text().splitlines()
    assert f"ray=={cluster['spec']['rayVersion']}" in lock
    for name, template, _ in pods():
        if name in ("head", "gpu", "prefect-worker"):
            mounts = {each["name"]: each["mountPath"] for each in template["spec"]["containers"][0]["volumeMounts"]}
            assert mounts == {"models": "/models", "shared-memory": "/dev/shm"}
    worker = named("Deployment")["prefect-worker"]["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "RAY_AUTH_MODE", "value": "token"} in worker["env"]
