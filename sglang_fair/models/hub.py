"""The part of a model that a gateway needs, without its weights: from the Hugging Face hub, or out of its folder."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from sglang_fair.models.catalog import find
from sglang_fair.models.folder import Progress

TOKENIZER_FILES = (
    "config.json", "tokenizer*", "*.jinja", "special_tokens_map.json", "generation_config.json"
)  # fmt: skip
"""Patterns of the files that a gateway reads."""


class NotOnHub(RuntimeError):
    """There is no such model, or it cannot be fetched; the text is one line."""


def fetch(model_id: str, patterns: Sequence[str], progress: Progress | None = None) -> Path:
    """The folder with these files of a model on the hub. Raises `NotOnHub`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    if progress:
        progress(f"fetching the tokenizer of {model_id}")
    try:
        return Path(snapshot_download(model_id, allow_patterns=list(patterns)))
    except RepositoryNotFoundError as error:
        raise NotOnHub(f"there is no model {model_id} on the hub, or it is private (HF_TOKEN)") from error
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise NotOnHub(f"cannot fetch {model_id} from the hub, and it is not in the local cache") from error


def copy_tokenizer(name: str, to: Path, progress: Progress | None = None) -> list[Path]:
    """The files that a gateway needs of the model called `name`, in the folder `to`, which is made.

    Raises ValueError, in one line, for a model without a tokenizer.json; else as `find` and `fetch`.
    """
    source = Path(find(name, progress).path)
    if not source.is_dir():
        source = fetch(str(source), TOKENIZER_FILES, progress)
    if not (source / "tokenizer.json").is_file():
        raise ValueError(f"model {name} has no tokenizer.json, which a gateway needs")
    to.mkdir(parents=True, exist_ok=True)
    found = sorted({file for pattern in TOKENIZER_FILES for file in source.glob(pattern) if file.is_file()})
    return [Path(shutil.copyfile(file, to / file.name)) for file in found]
