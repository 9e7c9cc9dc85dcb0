"""TLS: the certificate files, tried before the port is bound, so that a bad one is an error line and not a broken port.

uvicorn makes the context that serves, of the same files. Not here: plain HTTP, which needs nothing.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from coterie.server.config import TlsConfig
from coterie.spec.errors import CoterieError


def check_files(config: TlsConfig) -> None:
    """Raise CoterieError unless the files make a server's context. A key that needs a password is refused."""
    for flag, path in (("--ssl-certfile", config.certfile), ("--ssl-keyfile", config.keyfile),
                       ("--ssl-ca-certs", config.ca_certs)):  # fmt: skip
        if path is not None:
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise CoterieError(f"{flag}: cannot read {path}: {error.strerror or error}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    key = config.keyfile or config.certfile
    try:
        context.load_cert_chain(config.certfile, config.keyfile, _no_password)
    except _Encrypted:
        raise CoterieError(f"the private key in {key} needs a password; store it without one, for us only") from None
    except (ssl.SSLError, OSError) as error:
        raise CoterieError(
            f"{config.certfile} and {key} are no certificate chain and its private key in PEM: {_said(error)}"
        ) from error
    if config.ca_certs is not None:
        try:
            context.load_verify_locations(config.ca_certs)
        except (ssl.SSLError, OSError) as error:
            what = f"--ssl-ca-certs: {config.ca_certs} holds no certificates in PEM"
            raise CoterieError(f"{what}: {_said(error)}") from error


def uvicorn_options(config: TlsConfig | None) -> dict[str, Any]:
    """What uvicorn must be told; with `ca_certs` a client without a certificate of theirs is turned away."""
    if config is None:
        return {}
    asked = ssl.CERT_NONE if config.ca_certs is None else ssl.CERT_REQUIRED
    return {
        "ssl_certfile": config.certfile,
        "ssl_keyfile": config.keyfile,
        "ssl_ca_certs": config.ca_certs,
        "ssl_cert_reqs": asked,
    }


class _Encrypted(Exception):
    """OpenSSL asked for a password."""


def _no_password() -> str:
    raise _Encrypted


def _said(error: ssl.SSLError | OSError) -> str:
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return str(reason).lower().replace("_", " ")
