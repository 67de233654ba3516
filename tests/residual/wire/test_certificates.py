import re
import stat

import certificate
import pytest
import torch

from plpkg.residual import CloudServer, DeviceClient
from plpkg.residual.wire import certificates


def test_a_device_talks_to_the_cloud_that_it_trusts_and_to_no_other(tmp_path, adapted):
    model, ids = adapted(), torch.tensor([[1, 2, 3]])
    mine, other = certificate.written(tmp_path / "mine"), certificate.written(tmp_path / "other")
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


def test_the_readmes_line_keeps_the_key_to_its_owner(tmp_path):
    assert stat.S_IMODE(certificate.written(tmp_path / "tls").with_name("key.pem").stat().st_mode) == 0o600


def test_what_is_no_certificate_is_named(tmp_path):
    mine, other = certificate.written(tmp_path / "mine"), certificate.written(tmp_path / "other")
    key = mine.with_name("key.pem")
    with pytest.raises(OSError, match=r"key\.pem is not a certificate"):
        certificates.for_device(key)
    key.write_bytes(other.with_name("key.pem").read_bytes())
    with pytest.raises(OSError, match=r"cert\.pem and key\.pem in .*mine are not a certificate and its key"):
        certificates.for_cloud(tmp_path / "mine")
    key.unlink()
    with pytest.raises(FileNotFoundError, match=r"mine/key\.pem"):
        certificates.for_cloud(tmp_path / "mine")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.9.9.9:1", "localhost:0", "[::1]:5"])
def test_what_never_leaves_the_machine_needs_no_protection(address):
    assert certificates.is_loopback(address) is True
    certificates.require_protection(address, encrypted=False, token=None, option="--ca")


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "[::]", "10.0.0.1", "example.org", "localhost.example.org", "127.0.0.1.example.org"]
)
def test_what_leaves_the_machine_needs_tls_and_a_token(host):
    assert certificates.is_loopback(f"{host}:5") is False
    certificates.require_protection(f"{host}:5", encrypted=True, token="t", option="--ca")
    tls, token = "TLS (--ca)", "a token (PLPKG_TOKEN)"
    for given, missing in (((False, None), f"{tls} and {token}"), ((False, "t"), tls), ((True, None), token)):
        said = f"{host}:5 is not a loopback address, which never leaves a machine: {missing} needed"
        with pytest.raises(ValueError, match=re.escape(said)):
            certificates.require_protection(f"{host}:5", encrypted=given[0], token=given[1], option="--ca")


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
