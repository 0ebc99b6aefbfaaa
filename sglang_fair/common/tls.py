"""TLS: whom a client believes, and whether a server's certificate can be used."""

import ssl


def authorities(path: str | None) -> ssl.SSLContext | None:
    """For a client that believes the authorities in the PEM file at `path` alone; None, those of the system, without
    one. Raises ValueError, in one line, for a file that cannot be used."""
    if path is None:
        return None
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:  # of which SSLError is one
        raise ValueError(f"{path}: {_reason(error)}") from None


def check_certificate(certificate: str | None, key: str | None) -> None:
    """Raises ValueError, in one line, if a server cannot use them. None: it has none."""
    if certificate is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, password=_no_password)
    except OSError as error:
        raise ValueError(f"{certificate}{'' if key is None else f', {key}'}: {_reason(error)}") from None


def _no_password() -> str:
    raise OSError(0, "the key has a password")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return "not a certificate, or not its key" if error.reason is None else f"TLS says {error.reason}"
    return error.strerror or str(error)
