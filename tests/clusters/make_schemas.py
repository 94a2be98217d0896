"""Write schemas.json: the parts of Kubernetes' JSON schemas that the manifests in configs/clusters/kubernetes use.

    pip install kubernetes-validate && python tests/clusters/make_schemas.py

The package has the complete schemas (23 MB) of all versions. A manifest with a field that schemas.json does not have
fails its test until this script, which checks the manifests against the complete schema, has written the file again.
The RayCluster's own fields are in raycluster.json, written by hand after KubeRay's reference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
MANIFESTS = HERE.parents[1] / "configs/clusters/kubernetes"
VERSION = "1.33"
KEPT = ("type", "enum", "format", "pattern", "required", "const")  # besides the structure
Schema = dict[str, Any]


def main() -> None:
    """Check the manifests against the complete schemas and write schemas.json."""
    import kubernetes_validate

    root = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    [folder] = [path for path in root.iterdir() if path.name.startswith(f"v{VERSION}") and path.name.endswith("strict")]
    definitions = json.loads((folder / "_definitions.json").read_text())["$defs"]
    by_kind: dict[str, list[Any]] = {}
    pods = []
    for document in documents():
        if document["kind"] == "RayCluster":
            groups = [document["spec"]["headGroupSpec"], *document["spec"]["workerGroupSpecs"]]
            pods += [group["template"] for group in groups]
        else:
            kubernetes_validate.validate(document, VERSION, strict=True)
            by_kind.setdefault(f"{document['kind']} {document['apiVersion']}", []).append(document)
    schemas = {}
    for name, instances in sorted(by_kind.items()):
        kind, version = name.split()
        file = folder / f"{kind.lower()}-{version.replace('.k8s.io', '').replace('/', '-')}.json"
        schemas[name] = prune(json.loads(file.read_text()), instances, definitions)
    schemas["PodTemplateSpec"] = prune(definitions["io.k8s.api.core.v1.PodTemplateSpec"], pods, definitions)
    lines = [f"{json.dumps(name)}: {json.dumps(schema, sort_keys=True)}" for name, schema in schemas.items()]
    (HERE / "schemas.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def documents() -> list[dict[str, Any]]:
    """Return the manifests, without the kustomization."""
    paths = [path for path in sorted(MANIFESTS.glob("*.yaml")) if path.name != "kustomization.yaml"]
    return [document for path in paths for document in yaml.safe_load_all(path.read_text())]


def prune(schema: Schema, instances: list[Any], definitions: dict[str, Schema]) -> Schema:
    """Return `schema` with the properties that occur in `instances` only, and without references and prose."""
    while "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    kept = {key: schema[key] for key in KEPT if key in schema}
    if "oneOf" in schema:  # integers or strings: quantities and ports
        kept["oneOf"] = [prune(each, [], definitions) for each in schema["oneOf"]]
    if "properties" in schema:
        used = {key for instance in instances for key in instance}
        kept["additionalProperties"] = False
        kept["properties"] = {
            key: prune(schema["properties"][key], [each[key] for each in instances if key in each], definitions)
            for key in sorted(used)
        }
    elif isinstance(schema.get("additionalProperties"), dict):
        values = [value for instance in instances for value in instance.values()]
        kept["additionalProperties"] = prune(schema["additionalProperties"], values, definitions)
    if "items" in schema:
        kept["items"] = prune(schema["items"], [item for instance in instances for item in instance], definitions)
    return kept


if __name__ == "__main__":
    main()
