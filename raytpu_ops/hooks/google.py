"""The API server of a GKE cluster by its name, with the token of a Google account.

The account is the Google provider's ``GoogleBaseHook``'s. Its GKE hooks are not used: they want the
cluster's address and certificate from the caller, and a wait of hours in the triggerer needs one client that renews its
token.
Asking blocks, so each round is one thread's work. Not here: what the options may say (``kubernetes.py``), and
how the account is found (``google_cloud.py``).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from raytpu_ops.backends.google.refusals import one_line
from raytpu_ops.hooks.google_cloud import ConnectionAccess
from raytpu_ops.tpu.errors import Misconfigured, RayTpuError, RemoteUnavailable

if TYPE_CHECKING:
    from google.auth.credentials import Credentials
    from kubernetes_asyncio.client import Configuration

    from raytpu_ops.hooks.kubernetes import ByName

_RIGHT = "container.clusters.get (in roles/container.clusterViewer and in roles/container.developer)"


class GoogleAccess:
    """A GKE cluster's API server.

    A token lasts an hour or less. It is replaced shortly before it ends, also in a client that was made
    long ago, which asks for it at each request.

    :param asked: the cluster and the connection.
    """

    def __init__(self, asked: ByName) -> None:
        self._asked = asked
        self._account = ConnectionAccess(asked.gcp_conn_id, asked.impersonation_chain)
        self._lock = threading.Lock()
        self._credentials: Credentials | None = None
        self._cached: Configuration | None = None
        self.selectors: Mapping[str, str] = _selectors(asked)

    def __repr__(self) -> str:
        return f"GoogleAccess({', '.join(f'{key}={value!r}' for key, value in self.selectors.items())})"

    async def configuration(self, *, renew: bool = False) -> Configuration:
        """See :meth:`KubeAccess.configuration`. Renewing asks for address and certificate again as well."""
        if not renew and self._cached is not None and self._credentials is not None and self._credentials.valid:
            return self._cached
        return await asyncio.to_thread(self._configuration, renew)

    def _configuration(self, renew: bool) -> Configuration:
        # Requests whose token ended at the same moment need one new token, not one each.
        with self._lock, self._errors_as_ours():
            if renew or self._cached is None:
                self._cached = self._load()
            self._write_token(self._cached)
            return self._cached

    def _load(self) -> Configuration:
        from google.auth.transport.requests import Request
        from kubernetes_asyncio.client import Configuration
        from kubernetes_asyncio.config.kube_config import FileOrData

        # From its source, not from what is held: the connection may have another key by now.
        self._credentials, project = self._account.fetch()
        # Before anything is asked with it: gRPC would call its failure an outage and try for a while.
        self._credentials.refresh(Request())
        host, authority = self._endpoint(self._credentials, project)
        found = Configuration(host=host)
        if authority:
            named = FileOrData({"certificate-authority-data": authority}, "certificate-authority")
            found.ssl_ca_cert = named.as_file()
        found.refresh_api_key_hook = self._before_request
        return found

    def _endpoint(self, credentials: Credentials, their_project: str | None) -> tuple[str, str | None]:
        """URL of the control plane and its certificate authority; a DNS name has a public certificate."""
        from google.cloud import container_v1

        asked = self._asked
        project = asked.project_id or their_project
        if not project:
            raise Misconfigured(
                f"{self._what()}: project_id is missing: neither the options nor {self._account.who} say it"
            )
        with container_v1.ClusterManagerClient(credentials=credentials) as client:
            cluster = client.get_cluster(
                name=f"projects/{project}/locations/{asked.location}/clusters/{asked.cluster_name}"
            )
        endpoints = cluster.control_plane_endpoints_config
        if asked.use_dns_endpoint:
            name = endpoints.dns_endpoint_config.endpoint
            how = f"use_dns_endpoint: gcloud container clusters update {asked.cluster_name} --enable-dns-access"
            return f"https://{self._given(name, how)}", None
        if asked.use_internal_ip:
            address = endpoints.ip_endpoints_config.private_endpoint or cluster.private_cluster_config.private_endpoint
            how = "use_internal_ip: leave it out"
        else:
            address, how = cluster.endpoint, "an address: set use_dns_endpoint or use_internal_ip"
        return f"https://{self._given(address, how)}", cluster.master_auth.cluster_ca_certificate

    def _given(self, value: str, how: str) -> str:
        if not value:
            raise Misconfigured(f"{self._what()} has no endpoint for {how}")
        return value

    async def _before_request(self, configuration: Configuration) -> None:
        """Called by the client library at each request."""
        credentials = self._credentials
        if credentials is None or credentials.expired:
            await asyncio.to_thread(self._renew_token, configuration)

    def _renew_token(self, configuration: Configuration) -> None:
        with self._lock, self._errors_as_ours():
            self._write_token(configuration)

    def _write_token(self, configuration: Configuration) -> None:
        from google.auth.transport.requests import Request

        assert self._credentials is not None, "a configuration is made with credentials"
        if not self._credentials.valid:
            self._credentials.refresh(Request())
        configuration.api_key["BearerToken"] = f"Bearer {self._credentials.token}"

    def _what(self) -> str:
        project = f"{self._asked.project_id}/" if self._asked.project_id else ""
        return f"GKE cluster {project}{self._asked.location}/{self._asked.cluster_name}"

    @contextmanager
    def _errors_as_ours(self) -> Iterator[None]:
        """The one door through which Google's errors leave."""
        from google.api_core.exceptions import GoogleAPIError

        with self._account.errors_as_ours():
            try:
                yield
            except GoogleAPIError as error:
                raise self._not_told(error) from error

    def _not_told(self, error: Any) -> RayTpuError:
        """The GKE API did not describe the cluster."""
        from google.api_core import exceptions

        text, who = one_line(error), self._account.who
        if isinstance(error, exceptions.NotFound):
            return Misconfigured(f"{self._what()} does not exist, or not where {who} may look: {text}")
        if isinstance(error, exceptions.Forbidden | exceptions.Unauthorized):
            return Misconfigured(f"{self._what()}: the right {_RIGHT} is missing to {who}: {text}")
        if isinstance(error, exceptions.BadRequest):
            return Misconfigured(f"{self._what()}: {text}")
        return RemoteUnavailable(f"{self._what()}: the GKE API does not answer: {text}")


def _selectors(asked: ByName) -> dict[str, str]:
    """The options as text: a lease holds nothing else."""
    told = asked.model_dump(exclude_defaults=True)
    return {
        key: ",".join(value) if isinstance(value, list) else str(value).lower() if value is True else value
        for key, value in told.items()
    }
