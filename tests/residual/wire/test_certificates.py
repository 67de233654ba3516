import re
import stat

import pytest
import torch
from cryptography import x509

from plpkg.residual import CloudServer, DeviceClient, certificates


def test_the_key_is_its_owners_and_never_overwritten(tmp_path):
    path = certificates.write(tmp_path / "tls", ["cloud.example.org", "10.1.2.3"])
    assert stat.S_IMODE((tmp_path / "tls" / "key.pem").stat().st_mode) == 0o600
    names = x509.load_pem_x509_certificate(path.read_bytes()).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert {"localhost", "cloud.example.org"} <= set(names.value.get_values_for_type(x509.DNSName))
    assert {"127.0.0.1", "10.1.2.3"} == {str(ip) for ip in names.value.get_values_for_type(x509.IPAddress)}
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"cert\.pem is there already"):
        certificates.write(tmp_path / "tls")
    assert path.read_bytes() == before
    path.unlink()
    with pytest.raises(FileExistsError, match=r"key\.pem is there already"):
        certificates.write(tmp_path / "tls")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(hosts=[""]), "a host must have"),
        (dict(hosts=["cloud.example.org", "two words"]), "a host must have an address, or a name .*, got 'two words'"),
        (dict(hosts=["cloud:7070"]), "got 'cloud:7070'"),
        (dict(days=0), "days"),
    ],
)
def test_bad_input_leaves_nothing(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        certificates.write(tmp_path / "tls", **arguments)
    assert not (tmp_path / "tls").exists()


def test_a_device_talks_to_the_cloud_that_it_trusts_and_to_no_other(tmp_path, adapted):
    model, ids = adapted(), torch.tensor([[1, 2, 3]])
    mine, other = certificates.write(tmp_path / "mine"), certificates.write(tmp_path / "other")
    options = dict(token="secret", retry_s=0.3)
    with CloudServer(model, tls=tmp_path / "mine", token="secret") as cloud:
        with DeviceClient(cloud.address, model, ca=mine, **options) as device:
            assert device.generate(ids, 2, eos_token_id=-1).shape == (1, 5)
        for ca in (other, None):
            with (
                DeviceClient(cloud.address, model, ca=ca, **options) as device,
                pytest.raises(ConnectionError, match="no connection to"),
            ):
                device.generate(ids, 2)


def test_what_is_no_certificate_is_named(tmp_path):
    mine, other = certificates.write(tmp_path / "mine"), certificates.write(tmp_path / "other")
    key = mine.with_name("key.pem")
    with pytest.raises(OSError, match=r"key\.pem is not a certificate"):
        certificates.for_device(key)
    key.write_bytes(other.with_name("key.pem").read_bytes())
    with pytest.raises(OSError, match=r"cert\.pem and key\.pem in .*mine are not a certificate and its key"):
        certificates.for_cloud(tmp_path / "mine")
    key.unlink()
    with pytest.raises(FileNotFoundError, match=r"mine/key\.pem"):
        certificates.for_cloud(tmp_path / "mine")


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("localhost:0", True),
        ("[::1]:5", True),
        ("0.0.0.0:5", False),
        ("[::]:5", False),
        ("10.0.0.1:5", False),
        ("example.org:5", False),
        ("localhost.example.org:5", False),
        ("127.0.0.1.example.org:5", False),
    ],
)
def test_what_never_leaves_the_machine(address, local):
    assert certificates.is_loopback(address) is local
    if local:
        certificates.require_protection(address, encrypted=False, token=None, option="--ca")
    else:
        for encrypted, token, missing in (
            (False, None, "TLS (--ca) and a token (PLPKG_TOKEN)"), (False, "t", "TLS (--ca)"),
            (True, None, "a token (PLPKG_TOKEN)"),
        ):  # fmt: skip
            said = f"{address} is not a loopback address, which never leaves a machine: {missing} needed"
            with pytest.raises(ValueError, match=re.escape(said)):
                certificates.require_protection(address, encrypted=encrypted, token=token, option="--ca")
        certificates.require_protection(address, encrypted=True, token="t", option="--ca")


@pytest.mark.parametrize(
    "address", ["localhost", ":5", "localhost:", "localhost:http", "", "::1:5", "[::1]:70000", "localhost:\u0665"]
)
def test_an_address_has_a_host_and_a_port(address):
    with pytest.raises(ValueError, match="an address must be host:port"):
        certificates.is_loopback(address)


@pytest.mark.parametrize("token", ["", " ", "a\nb", "ü"])
def test_an_impossible_token_is_refused(token):
    with pytest.raises(ValueError, match="the token must be printable ASCII"):
        certificates.require_protection("localhost:1", encrypted=True, token=token, option="--ca")
