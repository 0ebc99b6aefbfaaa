"""`python -m sglang_fair.models NAME` prepares a model where it is missing and prints its folder."""

import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from sglang_fair import models
from sglang_fair.models.catalog import find, names, resolve
from sglang_fair.models.folder import Progress as Say
from sglang_fair.settings.commands import Argument, Mistake, Option, run

TOKENIZER_FILES = (
    "config.json", "tokenizer*", "*.jinja", "special_tokens_map.json", "generation_config.json"
)  # fmt: skip
"""Patterns of the files that a gateway reads."""


def fetch(model_id: str, patterns: Sequence[str], say: Say) -> Path:
    """The folder with these files of a model on the hub. Raises RuntimeError, in one line."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    say(f"fetching the tokenizer of {model_id}")
    try:
        return Path(snapshot_download(model_id, allow_patterns=list(patterns)))
    except RepositoryNotFoundError as error:
        raise RuntimeError(f"there is no model {model_id} on the hub, or it is private (HF_TOKEN)") from error
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise RuntimeError(
            f"cannot fetch {model_id} from the hub, and it is not in the local cache"
        ) from error


def copy_tokenizer(name: str, to: Path, say: Say) -> list[Path]:
    """The files that a gateway needs of the model called `name`, in the folder `to`, which is made.

    Raises ValueError, in one line, for a model without a tokenizer.json; else as `find` and `fetch`.
    """
    source, _ = for_gateway(name, say)
    if not (source / "tokenizer.json").is_file():
        raise ValueError(f"model {name} has no tokenizer.json, which a gateway needs")
    to.mkdir(parents=True, exist_ok=True)
    found = sorted({file for pattern in TOKENIZER_FILES for file in source.glob(pattern) if file.is_file()})
    return [Path(shutil.copyfile(file, to / file.name)) for file in found]


@contextmanager
def showing(name: str) -> Iterator[Say]:
    """What is done with a model is shown on stderr: by a spinner on a terminal, else a line at a time."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: print(f"model {name}: {text}", file=sys.stderr, flush=True)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"model {name}", total=None)
        yield lambda text: bar.update(task, description=text)


def for_gateway(name: str, say: Say) -> tuple[Path, str]:
    """Folder and name of a model, fetched as far as a gateway needs it; SGLang does the rest. Raises as `find`."""
    model = find(name, say)
    folder = Path(model.path)
    if not folder.is_dir():
        folder = fetch(model.path, TOKENIZER_FILES, say)
    return folder, model.served_name


def main(
    name: Annotated[
        str | None,
        Argument(metavar="NAME", help=f"{', '.join(names())}, or a folder; without one they are listed."),
    ] = None,
    tokenizer_to: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="Copy what a gateway needs of the model, which may be on the hub, to this folder.",
        ),
    ] = None,
) -> None:
    """Print a model's folder; prepare the model first when it is missing."""
    if name is None:
        if tokenizer_to is not None:
            raise Mistake("--tokenizer-to: of which model? Name one")
        print((models.__doc__ or "").strip())
        return
    try:
        with showing(name) as say:
            if tokenizer_to is None:
                shown = str(resolve(name, say))
            else:
                copy_tokenizer(name, tokenizer_to, say)
                shown = str(tokenizer_to)
    except (ValueError, OSError, RuntimeError) as error:
        raise Mistake(" ".join(str(error).split())) from None
    print(shown)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that half-made files are removed
    sys.exit(run(main, "sglang-fair models"))
