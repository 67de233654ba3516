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
