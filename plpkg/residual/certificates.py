"""A self-signed certificate, so that device and cloud can talk over TLS without an authority."""

import datetime
import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from plpkg.validation import whole_number


def write(folder: str | Path, hosts: Sequence[str] = (), *, days: int = 365) -> Path:
    """Write ``cert.pem``, which devices trust, and ``key.pem``, which only the owner can read.

    Parameters
    ----------
    folder
        Made if it is not there.
    hosts
        Names and addresses under which devices reach the cloud; ``localhost``, ``127.0.0.1`` and the machine's
        name are always among them.
    days
        How long it is valid.

    Returns
    -------
    pathlib.Path
        The certificate.

    Raises
    ------
    FileExistsError
        The folder has one of the files already: a key is never overwritten.
    ValueError
        An empty host.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    whole_number("days", days, 1)
    folder = Path(folder)
    certificate, key_file = folder / "cert.pem", folder / "key.pem"
    for path in (certificate, key_file):
        if path.exists():
            raise FileExistsError(f"{path} is there already")

    names = []
    for host in dict.fromkeys(["localhost", "127.0.0.1", socket.gethostname(), *hosts]):
        if not host.strip():
            raise ValueError(f"a host must have a name, got {host!r}")
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "plpkg cloud")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    folder.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    try:
        certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    except BaseException:
        key_file.unlink()
        raise
    return certificate
