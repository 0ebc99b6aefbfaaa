"""A model folder: where it is kept, how it is made whole or not at all, and a tokenizer of bytes for it."""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
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


def llama_config(
    *,
    architecture: str,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    context_tokens: int,
) -> str:
    """The text of config.json for a model of Llama's family that speaks `write_byte_tokenizer`'s tokens."""
    config = {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": context_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": BYTE_VOCABULARY,
        "eos_token_id": BYTE_VOCABULARY + 1,
        "torch_dtype": "bfloat16",
    }
    return json.dumps(config, indent=2)


def write_byte_tokenizer(folder: Path, context_tokens: int, letters: Sequence[str] | None = None) -> None:
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
