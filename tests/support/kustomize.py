"""As much of kustomize as deploy/kubernetes uses, so that its manifests can be tested where no kubectl is.
What it does not know it refuses; a test compares it with kubectl's where there is one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
KNOWN = {
    "apiVersion", "kind", "namespace", "labels", "resources", "components", "configMapGenerator", "images",
    "replicas", "patches",
}  # fmt: skip
CLUSTER_WIDE = {"Namespace"}


def build(folder: Path) -> list[Manifest]:
    """The manifests of a folder; generated names are left without their hash."""
    return _apply(folder, [])


def _apply(folder: Path, found: list[Manifest]) -> list[Manifest]:
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text("utf-8"))
    unknown = kustomization.keys() - KNOWN
    if unknown:
        raise NotImplementedError(f"{folder}: {', '.join(sorted(unknown))}")
    for name in kustomization.get("resources", []):
        found = found + _resource(folder / name)
    for generator in kustomization.get("configMapGenerator", []):
        found = _generate(folder, generator, found)
    for name in kustomization.get("components", []):
        found = _apply(folder / name, found)
    found = copy.deepcopy(found)
    for patch in kustomization.get("patches", []):
        chosen = [manifest for manifest in found if _matches(manifest, patch["target"])]
        if not chosen:
            raise LookupError(f"{folder}: a patch has no target")
        for manifest in chosen:
            for operation in yaml.safe_load(patch["patch"]):
                _operate(manifest, **operation)
    for manifest in found:
        _rest(manifest, kustomization)
    return found


def _resource(path: Path) -> list[Manifest]:
    return build(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text("utf-8")))


def _generate(folder: Path, generator: dict[str, Any], found: list[Manifest]) -> list[Manifest]:
    data = {name: (folder / name).read_text("utf-8") for name in generator["files"]}
    name = generator["name"]
    if generator.get("behavior") == "replace":
        return [one | {"data": data} if _named(one) == ("ConfigMap", name) else one for one in found]
    return [*found, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}]


def _named(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _matches(manifest: Manifest, target: dict[str, str]) -> bool:
    label, _, value = target.get("labelSelector", "").partition("=")
    return (
        target.get("kind", manifest["kind"]) == manifest["kind"]
        and target.get("name", manifest["metadata"]["name"]) == manifest["metadata"]["name"]
        and (not label or manifest["metadata"].get("labels", {}).get(label) == value)
    )


def _operate(manifest: Manifest, op: str, path: str, value: Any = None) -> None:
    """One operation of a JSON patch (RFC 6902)."""
    *parents, last = path.strip("/").split("/")
    place: Any = manifest
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place[part]
    if op == "add" and last == "-":
        place.append(value)
    elif op == "add":
        place[last] = value
    elif op == "replace":
        place[last]
        place[last] = value
    elif op == "remove":
        del place[last]
    else:
        raise NotImplementedError(op)


def _rest(manifest: Manifest, kustomization: dict[str, Any]) -> None:
    metadata = manifest["metadata"]
    if "namespace" in kustomization and manifest["kind"] not in CLUSTER_WIDE:
        metadata["namespace"] = kustomization["namespace"]
    for labels in kustomization.get("labels", []):
        metadata.setdefault("labels", {}).update(labels["pairs"])
    for replicas in kustomization.get("replicas", []):
        if metadata["name"] == replicas["name"] and "replicas" in manifest.get("spec", {}):
            manifest["spec"]["replicas"] = replicas["count"]
    for image in kustomization.get("images", []):
        for container in containers(manifest):
            if container["image"].rpartition(":")[0] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"


def containers(manifest: Manifest) -> list[dict[str, Any]]:
    """Of a workload; none of anything else."""
    found = manifest.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])
    assert isinstance(found, list)
    return found
