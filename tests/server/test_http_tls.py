"""HTTPS with certificates made on the spot: served, asked of clients, and each unusable file one error line."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from server_fakes import MockEngine, live

from coterie.cli.main import run
from coterie.server.config import Access, ServerConfig, TlsConfig
from coterie.server.run import serve
from coterie.spec.errors import CoterieError

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """cert, key, both (in one file), ca."""
    folder = tmp_path_factory.mktemp("tls")
    made = authority.issue_cert("127.0.0.1")
    parts = {
        "cert": b"".join(blob.bytes() for blob in made.cert_chain_pems),
        "key": made.private_key_pem.bytes(),
        "both": made.private_key_and_cert_chain_pem.bytes(),
        "ca": authority.cert_pem.bytes(),
    }
    for name, content in parts.items():
        (folder / name).write_bytes(content)
    return {name: str(folder / name) for name in parts}


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.mark.parametrize("one_file", [False, True])
def test_https_is_served_and_http_is_not(authority, files, one_file):
    tls = TlsConfig(certfile=files["both"]) if one_file else TlsConfig(certfile=files["cert"], keyfile=files["key"])
    with live(MockEngine(), access=Access(tls=tls)) as server:
        assert server.url.startswith("https://")
        with httpx.Client(base_url=server.url, verify=trusting(authority)) as client:
            assert client.post(CHAT, json=HELLO).status_code == 200
            with client.stream("POST", CHAT, json=HELLO | {"stream": True}) as response:
                assert "".join(response.iter_text()).endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.ConnectError):
            httpx.post(server.url + CHAT, json=HELLO)  # an authority that nobody knows
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http") + "/health")
        old = trusting(authority)
        with pytest.warns(DeprecationWarning):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((httpx.ConnectError, ssl.SSLError)):
            httpx.get(server.url + "/health", verify=old)


def test_clients_must_show_a_certificate_of_the_authority(authority, files):
    tls = TlsConfig(certfile=files["cert"], keyfile=files["key"], ca_certs=files["ca"])
    with live(MockEngine(), access=Access(tls=tls)) as server:
        known = trusting(authority)
        authority.issue_cert("client").configure_cert(known)
        assert httpx.post(server.url + CHAT, json=HELLO, verify=known).status_code == 200
        stranger = trusting(authority)
        trustme.CA().issue_cert("client").configure_cert(stranger)
        for context in (trusting(authority), stranger):
            with pytest.raises(httpx.HTTPError):
                httpx.get(server.url + "/health", verify=context)
        assert httpx.post(server.url + CHAT, json=HELLO, verify=known).status_code == 200


@pytest.mark.parametrize(("cert", "key", "ca", "said"), [
    ("missing", "key", None, r"--ssl-certfile: cannot read .*missing: No such file"),
    ("cert", "missing", None, r"--ssl-keyfile: cannot read"),
    ("cert", "key", "missing", r"--ssl-ca-certs: cannot read"),
    ("garbage", "key", None, r"no certificate chain and its private key in PEM"),
    ("cert", "garbage", None, r"no certificate chain and its private key in PEM"),
    ("cert", "other", None, r"key values mismatch"),
    ("cert", None, None, r"no certificate chain and its private key in PEM"),
    ("cert", "key", "garbage", r"--ssl-ca-certs: .* holds no certificates in PEM"),
    ("cert", "locked", None, r"needs a password"),
    ("cert", "key", ".", r"--ssl-ca-certs: cannot read"),
])  # fmt: skip
def test_files_that_cannot_be_used_are_one_line_before_anything_loads(files, tmp_path, cert, key, ca, said):
    (tmp_path / "garbage").write_text("nothing of the kind")
    (tmp_path / "other").write_bytes(trustme.CA().issue_cert("a").private_key_pem.bytes())
    secret = serialization.load_pem_private_key(Path(files["key"]).read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (tmp_path / "locked").write_bytes(secret.private_bytes(pem, pkcs8, locked))

    def path(name: str | None) -> str | None:
        return None if name is None else files.get(name, str(tmp_path / name))

    tls = TlsConfig(certfile=path(cert) or "", keyfile=path(key), ca_certs=path(ca))
    config = ServerConfig(port=0, access=Access(tls=tls))
    with pytest.raises(CoterieError, match=said) as caught:
        serve(lambda observer: pytest.fail("loading began"), config)
    assert "\n" not in str(caught.value)


def test_flags_reach_the_server_and_go_together(files, capsys):
    flags = ["serve", "--port", "0", "--ssl-keyfile", files["key"]]
    assert run(flags) == 2
    assert "need --ssl-certfile" in capsys.readouterr().err
    assert run([*flags, "--ssl-certfile", "/no/such/file"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: --ssl-certfile: cannot read /no/such/file") and error.count("\n") == 1
