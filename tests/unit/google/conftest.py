"""The fake Google and its own clients, unmodified, that talk to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import requests
from google.auth.credentials import Credentials
from google.auth.transport.requests import AuthorizedSession
from google.cloud import container_v1, tpu_v2
from google.oauth2 import service_account

from tests.google_fake import GoogleFake
from tests.google_fake.trust import signer


@pytest.fixture
def google() -> Iterator[GoogleFake]:
    with GoogleFake() as fake:
        yield fake


@pytest.fixture
def credentials(google: GoogleFake) -> Credentials:
    """Of the service account that the fake gives a key to; tokens come from its token endpoint."""
    key = google.key()
    scopes = ["https://www.googleapis.com/auth/cloud-platform"]
    return service_account.Credentials(signer(), key["client_email"], key["token_uri"], scopes=scopes)


@pytest.fixture
def gke(google: GoogleFake, credentials: Credentials) -> Iterator[container_v1.ClusterManagerClient]:
    options = {"api_endpoint": google.endpoints["container"]}
    with container_v1.ClusterManagerClient(credentials=credentials, client_options=options) as client:
        yield client


@pytest.fixture
def tpu(google: GoogleFake, credentials: Credentials) -> Iterator[tpu_v2.TpuClient]:
    options = {"api_endpoint": google.endpoints["tpu"]}
    with tpu_v2.TpuClient(credentials=credentials, client_options=options) as client:
        yield client


@pytest.fixture
def http(google: GoogleFake, credentials: Credentials) -> Iterator[requests.Session]:
    with AuthorizedSession(credentials, max_refresh_attempts=0) as session:
        yield session
