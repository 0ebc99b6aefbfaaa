"""A model folder for an emulated replica: the named model's context and vocabulary, one layer of nothing.

A token costs 64 bytes of KV memory, so a pool of half a million tokens is 32 MB. The tokenizer has one token
for each byte, whose id is the byte, so that text endpoints work and everybody knows a text's length.
"""

from pathlib import Path

from sglang_fair.models.folder import BYTE_VOCABULARY, llama_config, write_byte_tokenizer
from sglang_fair.sim.shapes import ModelShape

ARCHITECTURE = "EmulatedForCausalLM"
"""The model class that the folder names. Only the emulated engine has one of that name."""


def write(folder: Path, shape: ModelShape) -> None:
    write_byte_tokenizer(folder, shape.context_tokens, letters=_letters())
    config = llama_config(
        architecture=ARCHITECTURE,
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
