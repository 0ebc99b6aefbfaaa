"""The platform that SGLang computes on where there is no GPU."""

from types import SimpleNamespace

import pytest


@pytest.mark.engine
@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("is_supported", "given", "used"),
    [
        (True, "auto", "auto"),
        (False, "auto", "float32"),
        (False, "bfloat16", "bfloat16"),
        (True, "half", "half"),
    ],
)
def test_it_computes_in_float32_where_bfloat16_is_slow_and_nothing_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, is_supported: bool, given: str, used: str
) -> None:
    from sglang_fair.engines import cpu_platform

    monkeypatch.setattr(cpu_platform, "_multiplies_bfloat16", lambda: is_supported)
    arguments = SimpleNamespace(dtype=given)
    cpu_platform.PlainTorchPlatform().apply_server_args_defaults(arguments)
    assert arguments.dtype == used
