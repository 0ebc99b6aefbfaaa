"""One setting: a field of a class of the table, and what must be known of it wherever a user can write it.

    quantum: Annotated[float, About(unit="service units", above=0)] = 2000.0
    \"\"\"Quantum per client.\"\"\"

From this come the option --quantum, the key `quantum` in a configuration file, the check of both, and the line in
docs/settings.md. The field's text is the help, its default is the setting's; a field without one must be given.

The command lines are Typer's, as those of all our commands, and values are converted by msgspec. pydantic-settings
would do both, but it splits `--worker NAME,http=URL` at the comma, has neither completion nor arguments behind `--`,
reports mistakes over many lines, and takes 0.3 s to be imported by each process.
"""

import ast
import inspect
import json
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from itertools import pairwise
from math import inf, isfinite
from pkgutil import resolve_name
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec


class SettingError(ValueError):
    """A setting cannot be as it was given; the text is one line. `field` is its name in the table, where known."""

    def __init__(self, text: str, field: str | None = None) -> None:
        super().__init__(text)
        self.field = field


@dataclass(frozen=True, slots=True)
class About:
    """What a type and a default do not say."""

    help: str = ""
    """"": the text below the field."""
    unit: str = ""
    metavar: str = ""
    """The value in a usage line; "": from the unit or the type."""
    unset: str = ""
    """What holds when nobody sets it, in words, where the default is None."""
    above: float = -inf
    at_least: float = -inf
    at_most: float = inf
    choices: tuple[str, ...] = ()
    registry: str = ""
    """`module:MAPPING` whose keys are the choices. By name, because most registries lie above this package."""
    prefix: str = ""
    """A text that starts so is allowed besides the choices, and its rest is not checked here."""
    fair: str = ""
    """Its name among the overlay's settings: --fair-NAME of SGLang's server, SGLANG_FAIR_NAME in the environment."""
    flag: str = ""
    """The option, where it does not follow from the field's name."""
    pairs: bool = False
    """A text KEY=VALUE,... that a file may write as a mapping."""
    behind_dashes: str = ""
    """The words behind `--` on a command line; this is its key in a file."""


UNITS = {"seconds": "S", "milliseconds": "MS", "service units": "UNITS"}
KINDS: Mapping[Any, tuple[str, str, str]] = {
    bool: ("", "be true or false", "flag"),
    int: ("INTEGER", "be a whole number", "whole number"),
    float: ("NUMBER", "be a number", "number"),
    str: ("TEXT", "be a text", "text"),
    tuple: ("TEXT", "be a list of texts", "list"),
    Mapping: ("TEXT", "map names to numbers", "mapping"),
}
"""Of a type: its value in a usage line, what it must do or be, and what the page calls it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    table: type
    """The class that declares it."""
    field: str
    kind: Any
    """int, float, str, bool, a mapping or a tuple of texts; without its None."""
    default: Any
    """`dataclasses.MISSING` where it must be given."""
    about: About

    @property
    def words(self) -> tuple[str, str, str]:
        return KINDS[get_origin(self.kind) or self.kind]

    @property
    def help(self) -> str:
        return self.about.help or _texts(self.table.__module__)[self.table.__name__, self.field]

    @property
    def metavar(self) -> str:
        return self.about.metavar or UNITS.get(self.about.unit) or self.words[0]

    @property
    def flag(self) -> str:
        """The option on a command line. Units are not part of it: `--start-timeout` for `start_timeout_s`."""
        return self.about.flag or "--" + self.field.removesuffix("_s").replace("_", "-")

    @property
    def key(self) -> str:
        """The key in a configuration file."""
        return self.about.behind_dashes or self.flag.removeprefix("--").replace("-", "_")

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def is_list(self) -> bool:
        """Whether it may be given several times."""
        return get_origin(self.kind) is tuple

    @property
    def is_mapping(self) -> bool:
        return get_origin(self.kind) is Mapping

    @property
    def argument(self) -> str:
        """As an argument of SGLang's server; "" if it is none."""
        return f"--fair-{self.about.fair}" if self.about.fair else ""

    @property
    def variable(self) -> str:
        """As an environment variable of SGLang's processes; "" if it is none."""
        return "SGLANG_FAIR_" + self.about.fair.upper().replace("-", "_") if self.about.fair else ""

    def choices(self) -> tuple[str, ...]:
        return tuple(resolve_name(self.about.registry)) if self.about.registry else self.about.choices

    def allowed(self) -> str:
        """The range of a number, in words; "" where there is none."""
        about = self.about
        if about.at_most < inf:
            return f"from {about.at_least:g} to {about.at_most:g}"
        if about.at_least > -inf:
            return f"at least {about.at_least:g}"
        return f"above {about.above:g}" if about.above > -inf else ""

    def read(self, raw: Any, called: str) -> Any:
        """The value of what somebody wrote, as text or as YAML has it. `called` is the setting's name there.

        Raises SettingError for another type, for a number out of its range, and for a name that there is not.
        """
        if raw is None and not self.required:
            return self.default
        is_text = isinstance(raw, str)
        value = raw
        if self.is_mapping and is_text:
            try:
                value = json.loads(raw or "{}")
            except json.JSONDecodeError as error:
                raise SettingError(f"{called} is not JSON: {error}", self.field) from None
            is_text = False
        elif self.about.pairs and isinstance(raw, Mapping):
            value = ",".join(f"{key}={_word(one)}" for key, one in raw.items())
        elif self.is_list and is_text and not self.about.behind_dashes:
            value = [raw]
        elif self.is_list and isinstance(raw, list):
            value = [_word(one) if isinstance(one, (int, float)) else one for one in raw]  # `[--tp, 2]`
        try:
            value = msgspec.convert(value, self.kind, strict=not is_text)
        except msgspec.ValidationError:
            raise SettingError(f"{called} must {self.words[1]}, not {raw!r:.80}", self.field) from None
        self.check(value, called)
        return value

    def check(self, value: Any, called: str) -> None:
        """Raises SettingError for a value that the range or the choices exclude."""
        if value is None:
            return
        about, known = self.about, self.choices()
        if known and value not in known and not (about.prefix and value.startswith(about.prefix)):
            more = f", and {about.prefix}NAME for SGLang's own" if about.prefix else ""
            raise SettingError(f"unknown {called} {value!r}; there are {', '.join(known)}{more}", self.field)
        if self.kind not in (int, float):
            return
        if not isfinite(value):
            raise SettingError(f"{called} must be a finite number, not {value}", self.field)
        if not (about.at_least <= value <= about.at_most and value > about.above):
            must = "lie" if about.at_most < inf else "be"
            raise SettingError(f"{called} must {must} {self.allowed()}, not {value}", self.field)


def settings_of(table: type) -> Mapping[str, Setting]:
    """The settings that are the fields of a dataclass, by field."""
    return _settings_of(table)


@cache
def _settings_of(table: Any) -> Mapping[str, Setting]:
    hints, found = get_type_hints(table, include_extras=True), {}
    for field in fields(table):
        kind, about = hints[field.name], About()
        if get_origin(kind) is Annotated:
            kind, about = get_args(kind)[:2]
        if NoneType in get_args(kind):
            (kind,) = (one for one in get_args(kind) if one is not NoneType)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        declared = next(one for one in table.__mro__ if field.name in vars(one).get("__annotations__", ()))
        found[field.name] = Setting(declared, field.name, kind, default, about)
    return found


@cache
def _texts(module: str) -> Mapping[tuple[str, str], str]:
    """What stands below the fields of the classes of a module, in one line each."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    found = {}
    for table in tree.body:
        for one, text in pairwise(table.body if isinstance(table, ast.ClassDef) else ()):
            match one, text:
                case ast.AnnAssign(target=ast.Name(field)), ast.Expr(ast.Constant(str(said))):
                    found[table.name, field] = " ".join(said.split())  # type: ignore[attr-defined]
    return found


def check(values: Any) -> None:
    """Raises SettingError for the first field of `values`, an object of such a class, that is out of its range."""
    for name, setting in settings_of(type(values)).items():
        setting.check(getattr(values, name), setting.flag)


def command_line(table: type, values: Mapping[str, Any]) -> list[str]:
    """The options that give a program these values. None is left out; KeyError for what is no setting of `table`."""
    known, argv, behind = settings_of(table), [], []
    for name, value in values.items():
        setting = known[name]
        if value is None:
            continue
        if setting.about.behind_dashes:
            behind = ["--", *value]
        elif setting.kind is bool:
            argv += [setting.flag] if value else []
        elif setting.is_list:
            argv += [word for one in value for word in (setting.flag, one)]
        elif setting.is_mapping:
            argv += [setting.flag, json.dumps(dict(value))]
        else:
            argv += [setting.flag, str(value)]
    return argv + behind


def changed(values: Any) -> dict[str, Any]:
    """The settings of an object that are not the table's defaults."""
    known = settings_of(type(values))
    return {name: value for name, one in known.items() if (value := getattr(values, name)) != one.default}


def meaning(setting: Setting) -> str:
    """The setting in a line of help: what it is, its unit and its choices."""
    about, text = setting.about, setting.help
    if about.unit and about.unit.rstrip("s") not in text.lower():
        text += f" In {about.unit}."
    if (known := setting.choices()) and any(name not in text for name in known):
        text += f" One of {', '.join(known)}."
    return text


def help_text(setting: Setting) -> str:
    """Its meaning, and its default in brackets."""
    shown = "required" if setting.required else shown_default(setting)
    default = f"default: {shown}" if shown and not setting.required else shown
    return f"{meaning(setting)}  [{default}]" if default else meaning(setting)


def shown_default(setting: Setting) -> str:
    """The default in words; "" where there is none."""
    if setting.required or setting.kind is bool:
        return ""
    if setting.default is None or setting.default in ("", (), {}):
        return setting.about.unset
    if setting.is_mapping:
        return json.dumps(setting.default)
    return f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
