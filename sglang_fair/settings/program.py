"""The command line of a program whose settings are a class of the table, and its configuration file.

A setting's value is that of the command line, else the configuration file's (--config), else the default. SGLang's own
processes also read the SGLANG_FAIR_ variables, for what they are given no argument for.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

from sglang_fair.settings import file
from sglang_fair.settings.commands import Mistake, Option, PassedOn, run
from sglang_fair.settings.setting import Setting, SettingError, help_text, meaning, settings_of
from sglang_fair.settings.table import SECTIONS


def load(section: str, given: Mapping[str, Any], path: Path | None = None) -> tuple[Any, Mapping[str, str]]:
    """The settings of a program, of the class `SECTIONS[section]`, and where those stand that the file has given, by
    field. `given` is the command line's, as text, by field.

    Raises SettingError for the first that is wrong or missing.
    """
    table = SECTIONS[section]
    found = file.Section() if path is None else file.read_file(path).get(section, file.Section())
    values, places = dict(found.values), dict(found.places)
    for name, setting in settings_of(table).items():
        if name in given:
            values[name] = setting.read(given[name], setting.flag)
            places.pop(name, None)
        elif setting.required and name not in values:
            raise SettingError(f"{setting.flag} is missing", name)
    return table(**values), places


def run_program(
    section: str,
    serve: Callable[[Any], int],
    arguments: Sequence[str] | None = None,
    *,
    check: Callable[[Any], None] = lambda settings: None,
    help: str = "",
    epilog: str = "",
) -> int:
    """The exit code of `serve`, which is called with the settings of the program `section`.

    `check` raises SettingError for settings that do not go together. Nothing is served then, nor for --print-config.
    """
    name = f"sglang-fair {section}"

    def program(**options: Any) -> int:
        path, print_config = options.pop("config"), options.pop("print_config")
        given = {key: value for key, value in options.items() if value is not None and value is not False}
        places: Mapping[str, str] = {}
        try:
            settings, places = load(section, given, path)
            check(settings)
        except SettingError as error:
            place = places.get(error.field or "")
            raise Mistake(f"{place}: {error}" if place else str(error)) from None
        if print_config:
            print(file.dump(section, settings), end="")
            return 0
        return serve(settings)

    program.__doc__ = help or SECTIONS[section].__doc__
    is_shown = bool({"-h", "--help"} & set(sys.argv[1:] if arguments is None else arguments))
    program.__signature__ = _signature(SECTIONS[section], is_shown)  # type: ignore[attr-defined]
    return run(program, name, arguments, epilog=epilog)


def parse(section: str, arguments: Sequence[str]) -> Any:
    """The settings on a command line. SystemExit, and one line on stderr, for a bad one."""
    found: list[Any] = []

    def remember(settings: Any) -> int:
        found.append(settings)
        return 0

    code = run_program(section, remember, arguments)
    if not found:
        raise SystemExit(code)
    return found[0]


def shared(values: Any, table: type) -> dict[str, Any]:
    """The settings of the object `values` that a program with the settings `table` has too. Its files and folders are
    absolute, because the program may run in another folder."""
    known = settings_of(type(values))
    found = {name: getattr(values, name) for name in settings_of(table) if name in known}
    for name, value in found.items():
        if value is not None and known[name].about.metavar in ("FILE", "DIR"):
            found[name] = str(Path(value).absolute())
    return found


def option_of(table: type, field: str, *, help: str = "", unset: str = "", panel: str | None = None) -> Any:
    """The option of one setting, for a command that has only some of a program's settings, or other defaults.

    Its name, its value and their check are those of the table, and so is the help unless the command gives another.
    The annotated type is the setting's. `unset` says what holds where the command's default is None.
    """
    setting = settings_of(table)[field]

    def parse(text: Any) -> Any:
        try:
            return setting.read(text, setting.flag)
        except SettingError as error:
            raise Mistake(str(error)) from None

    return Option(
        setting.flag,
        parser=parse,
        metavar=setting.metavar,
        help=help or meaning(setting),
        rich_help_panel=panel,
        show_default=unset or True,
    )


def _signature(table: type, is_shown: bool) -> inspect.Signature:
    """Of a function with a parameter for each setting. None, or False, is what was not given. Texts of help are read
    only if they are shown."""

    def annotation(setting: Setting) -> Any:
        if setting.about.behind_dashes:
            return PassedOn
        if setting.kind is bool:
            return Annotated[bool, Option(setting.flag, help=setting.help if is_shown else "")]
        return Annotated[
            (list[str] if setting.is_list else str) | None,
            Option(
                setting.flag,
                metavar=setting.metavar,
                help=help_text(setting) if is_shown else "",
                show_default=False,
            ),
        ]

    parameters = {name: annotation(setting) for name, setting in settings_of(table).items()}
    config = Option(
        "--config", metavar="FILE", help="Settings in YAML; what the command line says wins over it."
    )
    show = Option("--print-config", help="Print the settings in force as such a file, and start nothing.")
    parameters |= {"config": Annotated[Path | None, config], "print_config": Annotated[bool, show]}
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            inspect.Parameter(
                name, keyword, default=False if get_args(kind)[0] is bool else None, annotation=kind
            )
            for name, kind in parameters.items()
        ]
    )
