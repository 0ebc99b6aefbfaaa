"""Whether what protects a program can be used, and whether it may listen at its address. Each check raises
SettingError, in one line, with the field that is wrong."""

from collections.abc import Callable
from typing import TypeVar

from sglang_fair.common import tls
from sglang_fair.common.curve import Keys, Role
from sglang_fair.common.listening import is_local
from sglang_fair.settings.setting import SettingError, settings_of
from sglang_fair.settings.table import Authorities, Certified, Exposed, Trust

T = TypeVar("T")

GIVE_TLS = "give it TLS with --tls-cert"
GIVE_KEYS = "give it --keys DIR, which sglang-fair keys makes"


def read_keys(folder: str | None, role: Role) -> Keys | None:
    """The keys of a process; None where no folder is named."""
    return _usable("keys", lambda: Keys.read_if(folder, role))


def check(settings: Certified | Authorities | Trust, *addresses: str) -> None:
    """The files that the settings name, of whatever kinds they have, and that the addresses in these fields are this
    machine's own, or served over TLS, or that it has been said that they need not be."""
    if isinstance(settings, Certified):
        if settings.tls_key is not None and settings.tls_cert is None:
            raise SettingError("--tls-key is of no use without --tls-cert", "tls_key")
        _usable("tls_cert", lambda: tls.server(settings.tls_cert, settings.tls_key))
        for field in addresses:
            check_address(settings, field, is_protected=settings.tls_cert is not None)
    if isinstance(settings, Authorities):
        _usable("replica_ca", lambda: tls.believed(settings.replica_ca))
    if isinstance(settings, Trust):
        if settings.gateway_ca is not None and settings.gateway_cert is not None:
            raise SettingError("--gateway-ca and --gateway-cert: give one of them", "gateway_cert")
        _usable("gateway_ca", lambda: tls.believed(settings.gateway_ca))
        _usable("gateway_cert", lambda: tls.believed(None, settings.gateway_cert))


def check_address(settings: Exposed, field: str, *, is_protected: bool, remedy: str = GIVE_TLS) -> None:
    """That the address in `field` is this machine's own, or protected, or that it has been said that it need not be."""
    option = settings_of(type(settings))[field].flag
    check_listening(settings, option, getattr(settings, field), is_protected, remedy, field)


def check_listening(
    settings: Exposed, option: str, address: str, is_protected: bool, remedy: str, field: str = "host"
) -> None:
    """The same of an address, a host or an endpoint of ZMQ, that `option` says."""
    if not (is_protected or settings.insecure or is_local(address)):
        shown = address or chr(39) * 2
        raise SettingError(f"{option} {shown} is reached from elsewhere: {remedy}, or say --insecure", field)


def _usable(field: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except ValueError as error:
        raise SettingError(f"--{field.replace('_', '-')}: {error}", field) from None
