"""Who acts at Google, and where: options of a ``ray_tpu`` connection or a task become a ``CloudAccess``.

The Google provider's connection brings the credentials: a key, an external identity, what the machine or
the pod has (Workload Identity), service accounts that they act as. Where nobody names a connection and
there is no default one, it is the machine's own (ADC).
Not here: a GKE cluster's API server (``google.py``), and what is asked of Google (``backends/``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from raytpu_ops.backends.google.access import CloudAccess, DefaultAccess, HeldAccess, checked_endpoints
from raytpu_ops.backends.google.refusals import not_proven, one_line, refused
from raytpu_ops.hooks.kubernetes import Chain
from raytpu_ops.tpu.errors import Misconfigured
from raytpu_ops.tpu.fields import Line, Word
from raytpu_ops.tpu.problems import Checked, read

if TYPE_CHECKING:
    from airflow.sdk import Connection
    from google.auth.credentials import Credentials

_PROVIDER = "airflow.providers.google"
_DEFAULT_CONNECTION = "google_cloud_default"
_CONNECTION_TYPE = "google_cloud_platform"


def _endpoints(value: object) -> object:
    """``container=host:port,tpu=…``, as a lease's ``place`` and a form hold it."""
    if not isinstance(value, str):
        return value
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if not all("=" in part for part in parts):
        raise ValueError("must be addresses by API, such as 'tpu=tpu.example.net:443'")
    return dict(part.split("=", 1) for part in parts)


class Account(Checked):
    """Who acts, and where.

    :param project_id: the project; default the one of the Google connection or of its credentials.
    :param gcp_conn_id: the Google connection; default ``google_cloud_default`` where that is there, else the
        credentials that the machine or the pod has.
    :param impersonation_chain: service accounts to act as, the last of them towards the APIs.
    :param google_endpoints: addresses of APIs instead of the public ones, by short name: ``container``, ``tpu``,
        ``compute``, ``cloudresourcemanager``.
    """

    project_id: Word | None = None
    gcp_conn_id: Word | None = None
    impersonation_chain: Chain = Field(default_factory=list)
    google_endpoints: Annotated[dict[Word, Line], BeforeValidator(_endpoints)] = Field(default_factory=dict)


#: Every option that this module takes.
CLOUD_KEYS = frozenset(Account.model_fields)


def cloud_from(options: Mapping[str, Any], backend: str) -> tuple[CloudAccess, dict[str, Any]]:
    """Who acts at Google, and the options that do not speak of it.

    :param options: of a ``ray_tpu`` connection and of a task, one over the other.
    :param backend: the backend's name, for messages.
    :raises InvalidSpec: naming the option that is wrong.
    :raises Misconfigured: the Google provider is needed and is not installed.
    """
    # A form sends empty fields; they say nothing.
    said = {key: value for key, value in options.items() if key in CLOUD_KEYS and value}
    rest = {key: value for key, value in options.items() if key not in CLOUD_KEYS}
    asked = read(Account, said, f"backend {backend!r}")
    endpoints = checked_endpoints(asked.google_endpoints)
    if find_spec(_PROVIDER) is not None:
        return ConnectionAccess(
            asked.gcp_conn_id, asked.impersonation_chain, project_id=asked.project_id, endpoints=endpoints
        ), rest
    if asked.gcp_conn_id or asked.impersonation_chain:
        needs = "gcp_conn_id" if asked.gcp_conn_id else "impersonation_chain"
        raise Misconfigured(f"backend {backend!r}: {needs} needs the Google provider: pip install 'raytpu-ops[google]'")
    return DefaultAccess(asked.project_id, endpoints=endpoints), rest


def vms_found_again(options: Mapping[str, Any], place: Mapping[str, str]) -> dict[str, Any]:
    """The options by which a lease of TPU VMs is found again, whatever else the task that got it was told.

    :param options: what the connection says now.
    :param place: of the lease: each an option.
    """
    from raytpu_ops.backends.tpu_vm.settings import Settings

    told = {key: value for key, value in place.items() if key in CLOUD_KEYS or key in Settings.model_fields}
    # Who acted is told as a whole: an option that the lease does not have was not given then.
    return {key: value for key, value in options.items() if not (told and key in CLOUD_KEYS)} | told


class _Own(DefaultAccess):
    """What the machine has, where there is no default connection."""

    who = f"Google's default credentials of this machine (there is no connection {_DEFAULT_CONNECTION!r})"


class ConnectionAccess(HeldAccess):
    """The account of a Google connection.

    :param gcp_conn_id: the connection; default ``google_cloud_default``, which may be absent.
    :param impersonation_chain: service accounts to act as; default those of the connection.
    :param project_id: the project; default the connection's.
    :param endpoints: addresses that stand in for public ones, by the API's short name.
    """

    def __init__(
        self,
        gcp_conn_id: str | None = None,
        impersonation_chain: list[str] | None = None,
        *,
        project_id: str | None = None,
        endpoints: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            project_id, endpoints=endpoints, gcp_conn_id=gcp_conn_id, impersonation_chain=impersonation_chain
        )
        self._conn_id = gcp_conn_id or _DEFAULT_CONNECTION
        self._named = gcp_conn_id is not None
        self._chain = impersonation_chain or None
        #: What stands in for the default connection where that is absent.
        self._own: _Own | None = None

    @property
    def who(self) -> str:
        """See :attr:`HeldAccess.who`."""
        return self._own.who if self._own else f"connection {self._conn_id!r}"

    def fetch(self) -> tuple[Credentials, str | None]:
        """See :meth:`HeldAccess.fetch`."""
        from airflow.providers.google.common.hooks.base_google import GoogleBaseHook
        from airflow.sdk.exceptions import AirflowNotFoundException

        try:
            check_type(GoogleBaseHook.get_connection(self._conn_id))
            hook = GoogleBaseHook(gcp_conn_id=self._conn_id, impersonation_chain=self._chain)
            found: tuple[Credentials, str | None] = hook.get_credentials_and_project_id()
        except AirflowNotFoundException:
            if self._named or self._chain:
                raise
        else:
            return found
        self._own = _Own()
        with self._own.errors_as_ours():
            return self._own.fetch()

    @contextmanager
    def errors_as_ours(self) -> Iterator[None]:
        """See :meth:`HeldAccess.errors_as_ours`."""
        try:
            yield
        except Exception:
            # Not before: a fetch on the way may have found that there is no connection.
            with self._own.errors_as_ours() if self._own else connection_errors(self._conn_id):
                raise


def check_type(connection: Connection) -> None:
    """Refuse a connection that is for something else: its extra would be read as if it said nothing.

    :raises Misconfigured: it is of another type.
    """
    if connection.conn_type != _CONNECTION_TYPE:
        raise Misconfigured(
            f"connection {connection.conn_id!r} is of type {connection.conn_type!r}, and a Google connection is of "
            f"type {_CONNECTION_TYPE!r}: name another one in gcp_conn_id"
        )


@contextmanager
def connection_errors(conn_id: str) -> Iterator[None]:
    """The one door through which errors of the Google provider and of its connection leave.

    :param conn_id: the connection.
    """
    from airflow.sdk.exceptions import AirflowException, AirflowNotFoundException
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError

    connection = f"connection {conn_id!r}"
    try:
        yield
    except AirflowNotFoundException:
        raise Misconfigured(
            f"{connection} does not exist: add it with type 'google_cloud_platform'; it may be empty where "
            "the machine or the pod has credentials of its own"
        ) from None
    except GoogleAuthError as error:
        raise not_proven(error, connection) from error
    except GoogleAPIError as error:  # a key that is kept in Secret Manager
        raise refused(error, connection) from error
    except (AirflowException, ValueError, OSError) as error:
        raise Misconfigured(f"{connection}: {one_line(error)}") from error
