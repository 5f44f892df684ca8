"""Kueue for a run: its manifests as its own `config/default` would make them, and its process.

There is no kustomize here, and a process outside the cluster needs less: no Deployment, no roles.
What is done by hand is what kustomize does: names, namespace, the conversion webhooks of its CRDs.
"""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import yaml

from tests.testbed.api import Api, ApiError
from tests.testbed.layout import API, KUEUE_PORT, Layout
from tests.testbed.parts import MODULES, program
from tests.testbed.processes import Child, Children

_NAMESPACE = "kueue-system"
_SERVICE = {"name": "kueue-webhook-service", "namespace": _NAMESPACE}
_CERTIFICATE = "kueue-webhook-server-cert"
_FRAMEWORKS = ("batch/job", "ray.io/raycluster", "ray.io/rayjob")
#: What its webhooks are asked about; the others serve frameworks that are off here.
_RESOURCES = {"jobs", "rayclusters", "rayjobs"}


def _load(path: Path) -> list[dict[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster where libyaml is there
    return [one for one in yaml.load_all(path.read_text(), loader) if one]


def manifests(config: Path) -> list[dict[str, Any]]:
    """Everything but the definitions.

    :param config: Kueue's `config/components`.
    """
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": _NAMESPACE}}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": _CERTIFICATE, "namespace": _NAMESPACE},
    }
    # The process is outside the cluster: a Service without selector, and its endpoint by hand.
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _SERVICE,
        "spec": {"ports": [{"port": 443, "targetPort": KUEUE_PORT, "protocol": "TCP"}]},
    }
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {**_SERVICE, "labels": {"kubernetes.io/service-name": _SERVICE["name"]}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [API], "conditions": {"ready": True}}],
        "ports": [{"port": KUEUE_PORT, "protocol": "TCP", "name": ""}],
    }
    webhooks = []
    for one in _load(config / "webhook" / "manifests.yaml"):
        one["metadata"]["name"] = f"kueue-{one['metadata']['name']}"
        one["webhooks"] = [hook for hook in one["webhooks"] if _is_wanted(hook)]
        for hook in one["webhooks"]:
            hook["clientConfig"]["service"] |= _SERVICE
        webhooks.append(one)
    return [namespace, secret, service, endpoints, *webhooks]


def _is_wanted(hook: dict[str, Any]) -> bool:
    return any("kueue.x-k8s.io" in rule["apiGroups"] or _RESOURCES & set(rule["resources"]) for rule in hook["rules"])


def definitions(config: Path) -> list[dict[str, Any]]:
    """Its CRDs, with the conversion webhooks that its kustomization turns on.

    :param config: Kueue's `config/components`.
    """
    folder = config / "crd"
    [kustomization] = _load(folder / "kustomization.yaml")
    conversions = {}
    for patch in kustomization["patches"]:
        [one] = _load(folder / patch["path"])
        one["spec"]["conversion"]["webhook"]["clientConfig"]["service"] |= _SERVICE
        conversions[one["metadata"]["name"]] = one["spec"]["conversion"]
    found = [one for path in kustomization["resources"] for one in _load(folder / path)]
    for one in found:
        if one["metadata"]["name"] in conversions:
            one["spec"]["conversion"] = conversions[one["metadata"]["name"]]
    return found


async def install(layout: Layout, api: Api, children: Children) -> None:
    """Apply it all, start it, and wait until its webhooks answer.

    :param layout: the run.
    :param api: of the cluster.
    :param children: where it is started.
    """
    config = MODULES["kueue"].home() / "config"
    found = definitions(config)
    for one in found:
        await api.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", one)
    await api.apply(*manifests(config))
    await api.established(one["metadata"]["name"] for one in found)
    certificates = layout.work / "kueue"
    certificates.mkdir()
    settings = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": _NAMESPACE,
        "health": {"healthProbeBindAddress": "127.0.0.1:8081"},
        "metrics": {"bindAddress": "127.0.0.1:8443"},
        "webhook": {"port": KUEUE_PORT, "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {
            "enable": True,
            "webhookServiceName": _SERVICE["name"],
            "webhookSecretName": _CERTIFICATE,
        },
        # It would ask for the rights of an aggregated API server.
        "featureGates": {"VisibilityOnDemand": False},
        "integrations": {"frameworks": list(_FRAMEWORKS)},
    }
    path = layout.work / "kueue.json"
    path.write_text(json.dumps(settings))
    environment = {"KUBECONFIG": str(layout.pki / "kueue.conf")}
    children.start(Child("kueue", [program("kueue"), f"--config={path}"], environment))
    await _hand_over_certificate(api, certificates)
    await _webhooks_answer(api)


async def _hand_over_certificate(api: Api, folder: Path) -> None:
    """Kueue makes a certificate, puts it into a Secret, and waits until it is mounted as files."""
    secret = f"/api/v1/namespaces/{_NAMESPACE}/secrets/{_CERTIFICATE}"
    for _ in range(600):
        data = (await api.call("GET", secret)).get("data") or {}
        if "tls.crt" in data and "tls.key" in data:
            for name, content in data.items():
                (folder / name).write_bytes(base64.b64decode(content))
            return
        await asyncio.sleep(0.1)
    raise TimeoutError("Kueue made no certificate in 60 s: see logs/kueue.log")


async def _webhooks_answer(api: Api) -> None:
    """A first manager makes the certificate, and is healthy before the second serves webhooks: so ask these."""
    flavor = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "metadata": {"name": "try"}}
    refused = ""
    for _ in range(600):
        try:
            await api.call("POST", "/apis/kueue.x-k8s.io/v1beta2/resourceflavors?dryRun=All", flavor)
            return
        except ApiError as error:
            refused = str(error)
        await asyncio.sleep(0.2)
    raise TimeoutError(f"Kueue's webhooks do not answer after 120 s: {refused}")
