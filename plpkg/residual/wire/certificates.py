"""Who may talk to whom: where TLS and a token are needed, and which certificates are trusted."""

import ipaddress
import ssl
from pathlib import Path

import grpc

from plpkg.validation import host_and_port


def for_cloud(folder: str | Path) -> grpc.ServerCredentials:
    """Credentials of a cloud with the ``cert.pem`` and ``key.pem`` of a folder.

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
    """Credentials of a device that trusts a certificate.

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
    missing = []
    if not encrypted:
        missing.append(f"TLS ({option})")
    if token is None:
        missing.append("a token (PLPKG_TOKEN)")
    if missing:
        raise ValueError(
            f"{address} is not a loopback address, which never leaves a machine: {' and '.join(missing)} needed"
        )
