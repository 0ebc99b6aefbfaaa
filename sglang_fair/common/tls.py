"""TLS: whom a client believes, and whether a server's certificate can be used."""

import ssl
from pathlib import Path

BEGIN, END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


def authorities(path: str | None) -> ssl.SSLContext | None:
    """For a client that believes the authorities in the PEM file at `path` alone; None, those of the system, without
    one. Raises ValueError, in one line, for a file that cannot be used."""
    if path is None:
        return None
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:  # of which SSLError is one
        raise ValueError(f"{path}: {_reason(error)}") from None


def pinned(certificate: str) -> ssl.SSLContext:
    """For a client of a server that must show the first certificate in the PEM file at `certificate`, or one that this
    has signed, whatever name it is asked by: two processes of one machine know each other so. Raises ValueError, in one
    line, for a file that cannot be used."""
    context = ssl.create_default_context(cadata=_first(certificate))
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # whoever has signed it need not be known
    return context


def believed(authority: str | None, certificate: str | None) -> ssl.SSLContext | None:
    """What a client is to believe: the server's own `certificate` alone, or an `authority`, or, None, those of the
    system. Raises ValueError, in one line, for a file that cannot be used."""
    return authorities(authority) if certificate is None else pinned(certificate)


def server(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """For a server; None without a certificate. Raises ValueError, in one line, for what cannot be used."""
    if certificate is None:
        return None
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, password=_no_password)
    except OSError as error:
        raise ValueError(f"{certificate}{'' if key is None else f', {key}'}: {_reason(error)}") from None
    return context


def check_certificate(certificate: str | None, key: str | None) -> None:
    """Raises ValueError, in one line, if a server cannot use them. None: it has none."""
    server(certificate, key)


def _first(certificate: str) -> str:
    """The first certificate in a PEM file, which is the server's own."""
    try:
        text = Path(certificate).read_text("ascii", errors="replace")
    except OSError as error:
        raise ValueError(f"{certificate}: {_reason(error)}") from None
    begin, end = text.find(BEGIN), text.find(END)
    if not 0 <= begin < end:
        raise ValueError(f"{certificate}: no certificate in it")
    try:
        ssl.PEM_cert_to_DER_cert(text[begin : end + len(END)])
    except ValueError:
        raise ValueError(f"{certificate}: not a certificate") from None
    return text[begin : end + len(END)]


def _no_password() -> str:
    raise OSError(0, "the key has a password")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return "not a certificate, or not its key" if error.reason is None else f"TLS says {error.reason}"
    return error.strerror or str(error)
