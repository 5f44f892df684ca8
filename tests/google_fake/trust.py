"""The one certificate authority of a test process, and a service account's private key.

gRPC reads its roots once in a process, so all fakes of a process share one authority.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.auth.crypt import RSASigner

from tests.testbed.pki import Authority


@functools.cache
def authority() -> Authority:
    """The authority, with a certificate `localhost` for servers on loopback."""
    folder = Path(tempfile.mkdtemp(prefix="google-fake-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    found = Authority(folder)
    found.issue("localhost", "google", hosts=("localhost", "127.0.0.1"))
    return found


@functools.cache
def private_key() -> str:
    """The key that service accounts of all fakes sign with, PEM: making one takes a while."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return pem.decode()


@functools.cache
def signer() -> RSASigner:
    """Signs with that key; checking a key takes a fifth of a second each time."""
    return RSASigner.from_string(private_key(), "1")
