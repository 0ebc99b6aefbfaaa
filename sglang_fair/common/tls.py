"""TLS: whom a client believes, and what a server shows.

Certificates are renewed while programs run. So each context here looks at its files at every new connection, and reads
them again when they have changed. While they cannot be used, as between the writing of a certificate and that of its
key, it goes on with what it read before. Connections that have begun stay as they are.
"""

import logging
import ssl
import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

BEGIN, END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"

SOON_S = 14 * 86_400.0
"""A certificate that ends sooner is warned of."""

_WHATEVER_THE_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME."""

_log = logging.getLogger("tls")


class Renewed(ssl.SSLContext):
    """Makes each connection by a context of what is in its files then."""

    def __new__(cls, *_: Any) -> "Renewed":
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)  # its own settings are never used

    def __init__(self, make: Callable[[], ssl.SSLContext], *files: str | None) -> None:
        """`make` reads `files` and raises ValueError, in one line, if they cannot be used; so does this."""
        self._make = make
        self._files = [file for file in files if file is not None]
        self._tried = self._stamps()
        self._newest = make()

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        return self._renewed().wrap_bio(*args, **kwargs)

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        return self._renewed().wrap_socket(*args, **kwargs)

    def _renewed(self) -> ssl.SSLContext:
        found = self._stamps()
        if found != self._tried:
            self._tried = found
            try:
                self._newest = self._make()
            except ValueError as error:
                _log.warning("%s; what was there before is still used", error)
            else:
                self._was_renewed()
        return self._newest

    def _was_renewed(self) -> None:
        _log.info("read again: %s", ", ".join(self._files))

    def _stamps(self) -> list[tuple[int, int] | None]:
        """Others, if one of the files was written or replaced."""
        return [_stamp(file) for file in self._files]


class Server(Renewed):
    """A server's context."""

    def __init__(self, certificate: str, key: str | None, protocols: Sequence[str] = ()) -> None:
        """`protocols` are offered by ALPN. Raises ValueError, in one line, for what cannot be used."""
        self._certificate, self._key, self._protocols = certificate, key, protocols
        self._end_s = inf
        super().__init__(self._read, certificate, key)

    @property
    def end_s(self) -> float:
        """When its certificate ends, in seconds since 1970; inf if it does not say so to a client, as one that is not
        for servers. Reads the files if they have changed."""
        self._renewed()
        return self._end_s

    def warn(self) -> None:
        """Says in the log if the certificate ends within `SOON_S`, or has ended."""
        left_s = self._end_s - time.time()
        if left_s < 0:
            _log.warning("%s: this certificate has ended, so clients refuse it", self._certificate)
        elif left_s < SOON_S:
            _log.warning("%s: this certificate ends in %.1f days", self._certificate, left_s / 86_400)

    def _was_renewed(self) -> None:
        super()._was_renewed()
        self.warn()

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._certificate, self._key, password=_no_password)
        except OSError as error:
            names = self._certificate if self._key is None else f"{self._certificate}, {self._key}"
            raise ValueError(f"{names}: {_reason(error)}") from None
        if self._protocols:
            context.set_alpn_protocols(self._protocols)
        self._end_s = _end_s(context, _first(self._certificate))
        return context


def believed(authority: str | None, certificate: str | None = None) -> ssl.SSLContext | None:
    """For a client that believes the authorities in a PEM file alone; None, those of the system, without one. With
    `certificate` the server must show the first one in that file, or one that this has signed, whatever name it is
    asked by: two processes of one machine know each other so. Raises ValueError, in one line, for a file that cannot be
    used."""
    if certificate is not None:
        return Renewed(lambda: _believing(_first(certificate)), certificate)
    if authority is None:
        return None

    def read() -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=authority)
        except OSError as error:  # of which SSLError is one
            raise ValueError(f"{authority}: {_reason(error)}") from None

    return Renewed(read, authority)


def server(certificate: str | None, key: str | None, protocols: Sequence[str] = ()) -> Server | None:
    """For a server; None without a certificate. Raises ValueError, in one line, for what cannot be used."""
    return None if certificate is None else Server(certificate, key, protocols)


def _believing(certificate: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # whoever has signed it need not be known
    return context


def _end_s(shows: ssl.SSLContext, certificate: str) -> float:
    """When `certificate`, which this server shows, ends: what a client in memory is told. inf if it is told nothing."""
    client = _believing(certificate)
    client.verify_flags |= _WHATEVER_THE_TIME
    there, here = ssl.MemoryBIO(), ssl.MemoryBIO()
    asks = client.wrap_bio(here, there)
    answers = shows.wrap_bio(there, here, server_side=True)
    for _ in range(8):  # a handshake takes two turns
        for side in (asks, answers):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return inf
        found = asks.getpeercert() if asks.version() else None
        if found:
            return float(ssl.cert_time_to_seconds(str(found["notAfter"])))
    return inf


def _stamp(file: str) -> tuple[int, int] | None:
    try:
        found = Path(file).stat()
    except OSError:
        return None
    return found.st_ctime_ns, found.st_ino


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
