"""Converts a GGUF model to a folder that SGLang loads.

python -m sglang_fair.engines.gguf MODEL.gguf FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model in `gguf` to `folder` as safetensors in bf16, with tokenizer and chat template."""
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


if __name__ == "__main__":
    convert(*map(Path, sys.argv[1:]))
