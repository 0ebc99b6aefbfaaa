"""Where the model lies, under which name it is served and how heavy it is, found before a replica is started.

    python -m sglang_fair.cluster.model NAME      prepares or fetches what is missing; prints one line of JSON

It runs as a process of its own so that Ctrl-C ends it in the middle of a download, and so that the
supervisor holds none of the memory that a conversion takes.
"""

import json
import signal
import sys
from pathlib import Path

from sglang_fair.cluster.plan import Model
from sglang_fair.cluster.weights import INDICES, estimated_bytes, stored_bytes
from sglang_fair.common.processes import die_with_parent
from sglang_fair.models.catalog import find
from sglang_fair.models.folder import Progress as Say
from sglang_fair.models.hub import TOKENIZER_FILES, fetch

FILES = (*TOKENIZER_FILES, *INDICES)
"""What is fetched of a model on the hub before it is started, with what says how heavy it is. SGLang does the rest."""


class NoModel(RuntimeError):
    """There is no such model, or it cannot be prepared; the text is one line."""


def describe(name: str, progress: Say | None = None) -> Model:
    """The model called `name`, prepared or fetched as far as a gateway needs it. Raises `NoModel`."""
    try:
        served_model = find(name, progress)
        folder = Path(served_model.path)
        if not folder.is_dir():
            folder = fetch(served_model.path, FILES, progress)
        weights_bytes = (
            served_model.weight_bytes
            or stored_bytes(folder)
            or estimated_bytes(json.loads((folder / "config.json").read_text()))
        )
    except (ValueError, OSError, RuntimeError) as error:
        raise NoModel(" ".join(str(error).split())) from error
    return Model(folder=folder, served_name=served_model.served_name, weights_bytes=weights_bytes)


def main(arguments: list[str]) -> int:
    """Prints the model as JSON on stdout; exit code 2 and one line on stderr when there is none."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that half-made files are removed
    (name,) = arguments
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    try:
        if not console.is_terminal:
            model = describe(name, lambda text: print(f"model {name}: {text}", file=sys.stderr, flush=True))
        else:
            with Progress(*columns, console=console, transient=True) as bar:
                task = bar.add_task(f"model {name}", total=None)
                model = describe(name, lambda text: bar.update(task, description=text))
    except NoModel as error:
        print(f"sglang-fair: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"folder": str(model.folder), "served_name": model.served_name,
                      "weights_bytes": model.weights_bytes}))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
