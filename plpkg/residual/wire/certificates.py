"""Who may talk to whom: where TLS and a token are needed, and self-signed certificates, without an authority."""

import datetime
import ipaddress
import os
import re
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path

import grpc

from plpkg.validation import host_and_port, whole_number


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
        A host that can be no name.
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
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            if not re.fullmatch(r"[\w.*-]+", host, re.ASCII):
                raise ValueError(f"a host must have an address, or a name of a-z, 0-9, . and -, got {host!r}") from None
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


def for_cloud(folder: str | Path) -> grpc.ServerCredentials:
    """What a cloud with the ``cert.pem`` and ``key.pem`` of a folder talks through.

    Raises
    ------
    OSError
        A file is not there, or the two are no certificate with its key.
    """
    certificate, key = (Path(folder, name).read_bytes() for name in ("cert.pem", "key.pem"))
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(Path(folder, "cert.pem"), Path(folder, "key.pem"))
    except ssl.SSLError as error:  # gRPC would say so only in its log
        raise OSError(f"cert.pem and key.pem in {folder} are not a certificate and its key") from error
    return grpc.ssl_server_credentials([(key, certificate)])


def for_device(ca: str | Path) -> grpc.ChannelCredentials:
    """What a device that trusts a certificate talks through.

    Raises
    ------
    OSError
        The file is not there, or no certificate.
    """
    trusted = Path(ca).read_bytes()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca)
    except ssl.SSLError as error:
        raise OSError(f"{ca} is not a certificate") from error
    return grpc.ssl_channel_credentials(trusted)


def is_loopback(address: str) -> bool:
    """Whether ``host:port`` never leaves this machine; errors as in :func:`plpkg.validation.host_and_port`."""
    host, _ = host_and_port(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_protection(address: str, *, encrypted: bool, token: str | None, option: str) -> None:
    """Refuse to talk in the clear, or to anybody, across a network; ``option`` switches TLS on at this end.

    Raises
    ------
    ValueError
        The address is not a loopback one, and TLS or the token is missing.
    """
    if token is not None and not (token.isascii() and token.isprintable() and token.strip()):
        raise ValueError("the token must be printable ASCII, not empty")
    if is_loopback(address):
        return
    needed = ((f"TLS ({option})", encrypted), ("a token (PLPKG_TOKEN)", token is not None))
    if missing := [what for what, given in needed if not given]:
        raise ValueError(
            f"{address} is not a loopback address, which never leaves a machine: {' and '.join(missing)} needed"
        )
