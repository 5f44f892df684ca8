"""Command lines of the programs that make a cluster, without its nodes.

What each flag is for stands beside it where that is not plain. Not here: starting them (`inside.py`).
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.testbed.layout import (
    API,
    API_PORT,
    POD_CIDR,
    SERVICE_API,
    SERVICE_CIDR,
    SERVICE_DNS,
    Layout,
    Options,
)
from tests.testbed.parts import program
from tests.testbed.pki import Authority, write_key

#: Clients inside the namespace skip the fault proxy: faults are for those who are tested.
INNER = f"https://127.0.0.1:{API_PORT}"
_ETCD = "http://127.0.0.1:2379"
#: What service accounts asked for is recorded, but for the controllers'.
_AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "None"},
    ],
}


def make_identities(layout: Layout, authority: Authority) -> None:
    """Certificates and kubeconfigs of all that runs inside.

    :param layout: the run.
    :param authority: its certificate authority.
    """
    names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost")
    authority.issue("apiserver", "kube-apiserver", hosts=(*names, "127.0.0.1", API, SERVICE_API))
    authority.issue("proxy", "proxy", hosts=("localhost", "127.0.0.1"))
    authority.issue("webhook", "webhook", hosts=("localhost", "127.0.0.1"))
    authority.issue("front-proxy", "front-proxy-client")
    # The group that may call every kubelet, without a binding of its own.
    authority.issue("kubelet-client", "kube-apiserver-kubelet-client", groups=("system:masters",))
    for name, user in (
        ("controller-manager", "system:kube-controller-manager"),
        ("scheduler", "system:kube-scheduler"),
        ("kube-proxy", "system:kube-proxy"),
    ):
        authority.issue(name, user)
    for name in ("operator", "kueue", "coredns", "testbed"):
        authority.issue(name, f"testbed:{name}", groups=("system:masters",))
    for name in ("controller-manager", "scheduler", "kube-proxy", "operator", "kueue", "coredns", "testbed"):
        authority.kubeconfig(layout.pki / f"{name}.conf", INNER, name=name)
    write_key(layout.pki / "accounts.key")


def etcd(layout: Layout) -> list[str]:
    return [
        program("etcd"),
        f"--data-dir={layout.work / 'etcd'}",
        # Nothing here has to outlive a power cut, and fsync is most of what etcd waits for.
        "--unsafe-no-fsync",
        f"--listen-client-urls={_ETCD}",
        f"--advertise-client-urls={_ETCD}",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--log-level=warn",
    ]


def apiserver(layout: Layout) -> list[str]:
    pki = layout.pki
    return [
        program("kube-apiserver"),
        f"--etcd-servers={_ETCD}",
        "--bind-address=0.0.0.0",
        f"--secure-port={API_PORT}",
        f"--advertise-address={API}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--cert-dir={layout.work}",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--token-auth-file={pki / 'tokens.csv'}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--service-cluster-ip-range={SERVICE_CIDR}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-signing-key-file={pki / 'accounts.key'}",
        f"--service-account-key-file={pki / 'accounts.key'}",
        # For logs, exec and port-forward.
        f"--kubelet-client-certificate={pki / 'kubelet-client.crt'}",
        f"--kubelet-client-key={pki / 'kubelet-client.key'}",
        f"--kubelet-certificate-authority={pki / 'ca.crt'}",
        "--kubelet-preferred-address-types=InternalIP",
        # One authority signs all, so the name is what tells the front proxy from the others.
        f"--requestheader-client-ca-file={pki / 'ca.crt'}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki / 'front-proxy.crt'}",
        f"--proxy-client-key-file={pki / 'front-proxy.key'}",
        # Webhooks behind a Service are then called at its endpoints: no kube-proxy is needed for them.
        "--enable-aggregator-routing=true",
        f"--audit-policy-file={_write(layout.work / 'audit-policy.json', json.dumps(_AUDIT))}",
        f"--audit-log-path={layout.audit}",
        "--profiling=false",
    ]


def controller_manager(layout: Layout, options: Options) -> list[str]:
    return [
        program("kube-controller-manager"),
        f"--kubeconfig={layout.pki / 'controller-manager.conf'}",
        f"--service-account-private-key-file={layout.pki / 'accounts.key'}",
        f"--root-ca-file={layout.pki / 'ca.crt'}",
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--cert-dir={layout.work}",
        f"--node-monitor-grace-period={options.node_grace}s",
        "--node-monitor-period=2s",
        "--kube-api-qps=100",
        "--kube-api-burst=200",
    ]


def scheduler(layout: Layout) -> list[str]:
    return [
        program("kube-scheduler"),
        f"--kubeconfig={layout.pki / 'scheduler.conf'}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--cert-dir={layout.work}",
    ]


def operator(layout: Layout, options: Options) -> list[str]:
    argv = [
        program("ray-operator"),
        f"--kubeconfig={layout.pki / 'operator.conf'}",
        "--enable-leader-election=false",
        # It runs outside the cluster, so service names do not resolve for it.
        "--use-kubernetes-proxy",
        "--metrics-addr=127.0.0.1:8380",
        "--health-probe-bind-address=127.0.0.1:8382",
    ]
    return [*argv, f"--feature-gates={options.operator_gates}"] if options.operator_gates else argv


def kube_proxy(layout: Layout, node: str) -> list[str]:
    """One for all nodes, since they share a network namespace.

    :param layout: the run.
    :param node: any node that exists; the program waits half a minute for one.
    """
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(layout.pki / "kube-proxy.conf")},
        "mode": "iptables",
        "hostnameOverride": node,
        "clusterCIDR": POD_CIDR,
        # Pods of all nodes are on one bridge: an answer must not take the short way back.
        "iptables": {"masqueradeAll": True},
        # Limits of the host's connection table are not ours to change.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "metricsBindAddress": "127.0.0.1:10249",
        "healthzBindAddress": "127.0.0.1:10256",
    }
    return [program("kube-proxy"), f"--config={_write(layout.work / 'kube-proxy.json', json.dumps(config))}"]


def coredns(layout: Layout) -> list[str]:
    corefile = f""".:53 {{
    bind {SERVICE_DNS}
    health 127.0.0.1:8180
    ready 127.0.0.1:8181
    errors
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {layout.pki / "coredns.conf"}
        pods insecure
        ttl 5
    }}
}}
"""
    return [program("coredns"), "-conf", str(_write(layout.work / "Corefile", corefile))]


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
