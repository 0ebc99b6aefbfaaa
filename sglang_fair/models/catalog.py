"""The table of models by name, and how a name becomes something that a replica can load."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_fair.models import smollm2
from sglang_fair.models.folder import (
    BYTE_VOCABULARY,
    SPECIAL_TOKENS,
    Progress,
    llama_config,
    prepared,
    write_byte_tokenizer,
)
from sglang_fair.sim.shapes import SHAPES, ModelShape

EMULATED = "emulated:"
"""Before the name of a model in `sim.shapes`: what an emulated GPU serves in its place."""


@dataclass(frozen=True)
class ServedModel:
    """A model as a replica needs it. `weight_bytes` is None when it is not known before loading."""

    name: str
    path: str
    served_name: str
    load_format: str = "auto"
    weight_bytes: int | None = None
    context_tokens: int | None = None


@dataclass(frozen=True)
class RandomLlama:
    """A Llama with random weights and a tokenizer of bytes."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    context_tokens: int = 32_768

    @property
    def vocabulary(self) -> int:
        return BYTE_VOCABULARY + len(SPECIAL_TOKENS)

    @property
    def parameters(self) -> int:
        head = self.hidden // self.heads
        attention = self.hidden * head * (2 * self.heads + 2 * self.kv_heads)
        embeddings = self.vocabulary * self.hidden
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + embeddings

    @property
    def digest(self) -> str:
        """Names the folder; a new shape gets a new one."""
        return f"{self.layers}x{self.hidden}x{self.intermediate}-v1"

    def write(self, folder: Path) -> None:
        """A configuration and a tokenizer; the weights are SGLang's dummies, the same on every replica."""
        write_byte_tokenizer(folder, self.context_tokens)
        config = llama_config(
            architecture="LlamaForCausalLM",
            layers=self.layers,
            hidden=self.hidden,
            intermediate=self.intermediate,
            heads=self.heads,
            kv_heads=self.kv_heads,
            vocabulary=self.vocabulary,
            context_tokens=self.context_tokens,
        )
        (folder / "config.json").write_text(config)


RANDOM_LLAMAS: Mapping[str, RandomLlama] = {
    "tiny": RandomLlama(layers=2, hidden=128, intermediate=256, heads=4, kv_heads=2),
    "bench": RandomLlama(layers=1, hidden=512, intermediate=6144, heads=8, kv_heads=4),
}


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
        path = prepared(f"{name}-{llama.digest}", llama.write, say)
        return ServedModel(name, str(path), name, "dummy", 2 * llama.parameters, llama.context_tokens)
    if name == "default":
        key = f"smollm2-135m-instruct-{smollm2.VERSION}-v3"
        path = prepared(key, lambda folder: smollm2.write(folder, say), say)
        return ServedModel(name, str(path), "smollm2-135m-instruct", "auto", 2 * 135_000_000, 8192)
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
    path = prepared(f"emulated-{name}-v1", lambda folder: write_emulated(folder, shape), say)
    return ServedModel(EMULATED + name, str(path), f"{name}-emulated", "dummy", 0, shape.context_tokens)


def write_emulated(folder: Path, shape: ModelShape) -> None:
    """The named model's context and vocabulary, one layer of nothing: a token has 64 bytes of KV memory. The tokenizer
    has one token for each byte, whose id is the byte, so that texts work and have a known length."""
    write_byte_tokenizer(folder, shape.context_tokens, letters=_letters())
    config = llama_config(
        architecture="EmulatedForCausalLM",
        layers=1,
        hidden=16,
        intermediate=16,
        heads=1,
        kv_heads=1,
        vocabulary=shape.vocabulary,
        context_tokens=shape.context_tokens,
    )
    (folder / "config.json").write_text(config)


def _letters() -> list[str]:
    """The letters of byte-level tokenizers, in the order of the bytes they stand for.

    A printable letter stands for itself; the others stand for the remaining bytes, both in order.
    """
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {ord(letter): letter for letter in alphabet if ord(letter) < BYTE_VOCABULARY}
    others = iter(letter for letter in alphabet if ord(letter) >= BYTE_VOCABULARY)
    return [own[byte] if byte in own else next(others) for byte in range(BYTE_VOCABULARY)]
