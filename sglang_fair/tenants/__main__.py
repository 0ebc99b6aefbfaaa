"""`sglang-fair tenants`: keys are made, shown once, and taken away; a running gateway reads the file again."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pydantic
import typer

from sglang_fair.settings.commands import CONTEXT_SETTINGS, Command, Mistake, run_app
from sglang_fair.settings.setting import SettingError
from sglang_fair.tenants import edit, file, keys
from sglang_fair.tenants.model import Limits, Tenant, Tenants, json_schema

app = typer.Typer(
    help="Who may ask: tenants and their keys, in a file that gateways read again when it changes.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT_SETTINGS,
)

File = Annotated[Path, typer.Option("--tenants", metavar="FILE", help="The tenants' file.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The tenant.", show_default=False)]
DEFAULT_FILE = Path("tenants.yaml")
SHOWN_DIGITS = 8


def _limit(name: str) -> Any:
    return typer.Option(
        f"--{name.replace('_', '-')}", metavar="N", help=Limits.model_fields[name].description
    )


@app.command("add", cls=Command)
def add(
    name: Name,
    tenants: File = DEFAULT_FILE,
    weight: Annotated[float, typer.Option(help="Its share beside the others'.")] = 1.0,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="A model that it may ask for; repeatable. None: all."),
    ] = None,
    cache_group: Annotated[
        str | None, typer.Option(metavar="GROUP", help="Tenants of one group share cached prefixes.")
    ] = None,
    requests_per_minute: Annotated[int | None, _limit("requests_per_minute")] = None,
    tokens_per_minute: Annotated[int | None, _limit("tokens_per_minute")] = None,
    tokens_per_day: Annotated[int | None, _limit("tokens_per_day")] = None,
    concurrency: Annotated[int | None, _limit("concurrency")] = None,
    prompt_tokens: Annotated[int | None, _limit("prompt_tokens")] = None,
    output_tokens: Annotated[int | None, _limit("output_tokens")] = None,
) -> None:
    """Add a tenant with a new key, and print the key: it is kept nowhere else."""
    key = keys.new_key()
    try:
        tenant = Tenant(
            keys=[keys.written(keys.digest(key))],
            weight=weight,
            models=model or None,
            cache_group=cache_group,
            limits=Limits(
                requests_per_minute=requests_per_minute,
                tokens_per_minute=tokens_per_minute,
                tokens_per_day=tokens_per_day,
                concurrency=concurrency,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
            ),
        )
        Tenants(tenants={name: tenant})
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        wrong = next(
            (str(step) for step in reversed(first["loc"]) if isinstance(step, str) and step != "[key]"), name
        )
        raise Mistake(f"{wrong}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None
    _changing(lambda: edit.add(tenants, name, tenant))
    _show_once(key, f"tenant {name} is in {tenants}; its key, which nobody can look up later:")


@app.command("rotate", cls=Command)
def rotate(
    name: Name,
    tenants: File = DEFAULT_FILE,
    keep: Annotated[
        bool, typer.Option("--keep", help="The old keys go on; a rotation without it ends them.")
    ] = False,
) -> None:
    """Give a tenant a new key in place of its old ones, and print it."""
    key = keys.new_key()
    made = keys.written(keys.digest(key))
    _changing(lambda: edit.set_keys(tenants, name, lambda old: [*(old if keep else ()), made]))
    _show_once(key, f"the new key of {name}{', beside the old ones' if keep else ''}:")


@app.command("remove", cls=Command)
def remove(name: Name, tenants: File = DEFAULT_FILE) -> None:
    """Remove a tenant and its keys. What it has in flight ends as it would."""
    _changing(lambda: edit.remove(tenants, name))
    print(f"tenant {name} is gone", file=sys.stderr)


@app.command("list", cls=Command)
def show(
    tenants: File = DEFAULT_FILE,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with whole digests.")] = False,
) -> None:
    """Show the tenants, their limits, and how each key's digest begins. An error names line and column."""
    found = _changing(lambda: file.read(tenants))
    if as_json:
        print(found.model_dump_json(exclude_defaults=True))
        return
    for name, tenant in found.tenants.items():
        digits = len(keys.DIGEST_PREFIX) + SHOWN_DIGITS
        facts = {
            "weight": f"{tenant.weight:g}",
            "keys": ",".join(one[len(keys.DIGEST_PREFIX) : digits] for one in tenant.keys) or "none",
            "models": ",".join(tenant.models) if tenant.models is not None else None,
            "cache_group": tenant.cache_group,
            **tenant.limits.model_dump(),
        }
        print(f"{name:20}", *(f"{fact}={value}" for fact, value in facts.items() if value is not None))


@app.command("schema", cls=Command)
def schema() -> None:
    """Print the JSON schema of the file, for editors and other programs."""
    print(json.dumps(json_schema(), indent=2))


def _changing(change: Callable[[], Any]) -> Any:
    try:
        return change()
    except (SettingError, edit.CannotEdit) as error:
        raise Mistake(str(error)) from None
    except OSError as error:
        raise Mistake(f"cannot write {error.filename}: {error.strerror}") from None


def _show_once(key: str, text: str) -> None:
    print(text, file=sys.stderr, flush=True)
    print(key)


def main(arguments: list[str] | None = None) -> int:
    return run_app(app, "sglang-fair tenants", arguments)


if __name__ == "__main__":
    sys.exit(main())
