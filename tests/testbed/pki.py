"""Keys and certificates of a run, and the kubeconfig files made of them.

Everything is made for one run and lives in its folder, which only its user can read.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import json
import secrets
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_PEM = serialization.Encoding.PEM


class Authority:
    """One certificate authority, for servers and clients alike.

    :param folder: where its files go: `ca.crt`, and a `.crt` and a `.key` for each name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "raytpu testbed")])
        usage = x509.KeyUsage(
            digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False,
            key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
            decipher_only=False,
        )  # fmt: skip
        certificate = (
            self._builder(self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.ca = folder / "ca.crt"
        self.ca.write_bytes(certificate.public_bytes(_PEM))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(minutes=5))
            .not_valid_after(now + dt.timedelta(days=7))
        )

    def issue(self, name: str, user: str, *, groups: tuple[str, ...] = (), hosts: tuple[str, ...] = ()) -> None:
        """Write `name.crt` and `name.key`, good as a client and, for `hosts`, as a server.

        :param name: of the files.
        :param user: the Kubernetes user that it stands for.
        :param groups: the Kubernetes groups of that user.
        :param hosts: addresses and names of the server.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        attributes.append(x509.NameAttribute(NameOID.COMMON_NAME, user))
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = self._builder(x509.Name(attributes), key).add_extension(
            x509.ExtendedKeyUsage(purposes), critical=False
        )
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_host(one) for one in hosts]), critical=False)
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(authority, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        (self.folder / f"{name}.crt").write_bytes(certificate.public_bytes(_PEM))
        write_key(self.folder / f"{name}.key", key)

    def kubeconfig(self, path: Path, server: str, *, name: str = "", token: str = "") -> Path:
        """Write a kubeconfig that proves who it is by the certificate `name` or by a token.

        :param path: the file.
        :param server: URL of the API server.
        :param name: of the certificate.
        :param token: a bearer token.
        """
        user = (
            {"token": token}
            if token
            else {
                "client-certificate": str(self.folder / f"{name}.crt"),
                "client-key": str(self.folder / f"{name}.key"),
            }
        )
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "testbed", "cluster": {"server": server, "certificate-authority": str(self.ca)}}],
            "users": [{"name": "testbed", "user": user}],
            "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": "testbed"}}],
            "current-context": "testbed",
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(config, indent=1))  # JSON is YAML
        return path


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def write_key(path: Path, key: ec.EllipticCurvePrivateKey | None = None) -> None:
    """Write a private key that only its owner can read.

    :param path: the file.
    :param key: a new one if left out.
    """
    key = key or ec.generate_private_key(ec.SECP256R1())
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(_PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
    )


def new_token() -> str:
    """A bearer token for one run."""
    return secrets.token_urlsafe(24)
