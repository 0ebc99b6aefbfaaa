"""Where spans go: the address of an OpenTelemetry collector that speaks OTLP over HTTP, as the setting has it."""

from importlib.util import find_spec
from urllib.parse import urlsplit

from sglang_fair.settings.setting import SettingError

PATH = "/v1/traces"
"""Where a collector takes spans, if its address names no path."""

PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")

FIELD = "otlp_traces_endpoint"


def traces_url(given: str) -> str:
    """The URL that spans are posted to. Raises SettingError for what is none."""
    try:
        parts = urlsplit(given)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise SettingError(
            f"--otlp-traces-endpoint must be a URL as http://HOST:4318{PATH}, not {given!r:.80}", FIELD
        )
    return given if parts.path.strip("/") or parts.query else given.rstrip("/") + PATH


def check(given: str | None) -> None:
    """Raises SettingError if no spans can be sent there; None stands for nowhere."""
    if given is None:
        return
    traces_url(given)
    if not all(_is_installed(package) for package in PACKAGES):
        raise SettingError(
            "--otlp-traces-endpoint needs OpenTelemetry: pip install 'sglang-fair[otel]'", FIELD
        )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # not even what it is a part of
        return False
