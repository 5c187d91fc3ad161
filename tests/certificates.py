"""Certificates for a broker and its users, made anew for each test run."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PASSWORD = "the-key's-own"


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates, and writes them into a folder."""

    folder: Path
    name: x509.Name
    key: ec.EllipticCurvePrivateKey
    path: Path

    @classmethod
    def make(cls, folder: Path, called: str = "authority") -> Authority:
        folder.mkdir(parents=True, exist_ok=True)
        name, key = _name(called), ec.generate_private_key(ec.SECP256R1())
        path = folder / f"{called}.pem"
        builder = _builder(name, name, key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(True, None), critical=True)
        path.write_bytes(_text(builder.sign(key, hashes.SHA256())))
        return cls(folder, name, key, path)

    def issue(self, called: str, password: str = "") -> tuple[Path, Path]:
        """Certificate and key of a host on loopback. Java reads no key encrypted like this."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = _builder(_name(called), self.name, key.public_key())
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate, secret = self.folder / f"{called}.pem", self.folder / f"{called}.key"
        certificate.write_bytes(_text(builder.sign(self.key, hashes.SHA256())))
        secret.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(password.encode())
                if password
                else serialization.NoEncryption(),
            )
        )
        return certificate, secret


def _name(called: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, called)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=2))
    )


def _text(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
