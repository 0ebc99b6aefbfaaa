"""A model folder for an emulated replica: the named model's context and vocabulary, one layer of nothing.

A token costs 64 bytes of KV memory, so a pool of half a million tokens is 32 MB. The tokenizer has one token
a byte, whose id is the byte, so that text endpoints work and a text's length is known to everybody.
"""

import json
from pathlib import Path

from sglang_fair.engines.emulated.settings import ARCHITECTURE
from sglang_fair.engines.models import (
    BYTE_VOCABULARY,
    EMULATED,
    Model,
    Progress,
    prepared,
    write_byte_tokenizer,
)
from sglang_fair.sim.shapes import SHAPES, ModelShape

REPLICA_BYTES = 350_000_000
"""Memory that a forked replica takes for itself, most of it tables of its requests' pages."""


def find(name: str, progress: Progress) -> Model:
    """The model folder for the shape `name`, made if it is not in the cache yet. ValueError for none of ours."""
    if name not in SHAPES:
        raise ValueError(f"unknown model {name!r} to emulate; there are {', '.join(SHAPES)}")
    shape = SHAPES[name]
    path = prepared(f"emulated-{name}-v1", lambda folder: _write(folder, shape), progress)
    return Model(EMULATED + name, str(path), f"{name}-emulated", "dummy", REPLICA_BYTES, shape.context_tokens)


def _write(folder: Path, shape: ModelShape) -> None:
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": BYTE_VOCABULARY,
        "eos_token_id": BYTE_VOCABULARY + 1,
        "torch_dtype": "bfloat16",
    }
    write_byte_tokenizer(folder, shape.context_tokens, letters=_letters())
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _letters() -> list[str]:
    """The letters of byte-level tokenizers, by byte: a printable one stands for itself, the others for the
    bytes that are left, both in order."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {ord(letter): letter for letter in alphabet if ord(letter) < BYTE_VOCABULARY}
    others = iter(letter for letter in alphabet if ord(letter) >= BYTE_VOCABULARY)
    return [own[byte] if byte in own else next(others) for byte in range(BYTE_VOCABULARY)]
