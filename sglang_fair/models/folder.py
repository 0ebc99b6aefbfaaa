"""A model folder: where it is kept, how it is made whole or not at all; and a model without weights, whose tokens are
bytes, for it."""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

BYTE_VOCABULARY = 256
SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Progress = Callable[[str], None]
"""Gets one line of text about what is being done."""


def cache_folder() -> Path:
    """Where prepared models are kept: $SGLANG_FAIR_CACHE, or sglang-fair in the user's cache folder."""
    own = os.environ.get("SGLANG_FAIR_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-fair"


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


@dataclass(frozen=True)
class Llama:
    """A model of Llama's family without weights, which are SGLang's dummies, the same on every replica."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    context_tokens: int = 32_768
    vocabulary: int = BYTE_VOCABULARY + len(SPECIAL_TOKENS)
    architecture: str = "LlamaForCausalLM"

    @property
    def parameters(self) -> int:
        head = self.hidden // self.heads
        attention = self.hidden * head * (2 * self.heads + 2 * self.kv_heads)
        embeddings = self.vocabulary * self.hidden
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + embeddings

    def write(self, folder: Path, letters: Sequence[str] | None = None) -> None:
        """A configuration, and the tokenizer of `write_byte_tokenizer`."""
        write_byte_tokenizer(folder, self.context_tokens, letters)
        config = {
            "architectures": [self.architecture],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context_tokens,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "bos_token_id": BYTE_VOCABULARY,
            "eos_token_id": BYTE_VOCABULARY + 1,
            "torch_dtype": "bfloat16",
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2))


def write_byte_tokenizer(folder: Path, context_tokens: int, letters: Sequence[str] | None) -> None:
    """Writes a tokenizer with one token for each byte and four special ones.

    Any text has an encoding, and its length is its bytes. `letters` are the tokens in the order of their ids;
    None: sorted.
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
