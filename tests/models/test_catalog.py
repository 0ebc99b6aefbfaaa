"""The table of models: the folder of an emulated one."""

import json
from pathlib import Path

import pytest

from sglang_fair.models import catalog as models


class TestEmulatedFolder:
    def test_a_token_is_a_byte(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from tokenizers import Tokenizer

        monkeypatch.setenv("SGLANG_FAIR_CACHE", str(tmp_path))
        model = models.find("emulated:llama-3.1-8b")
        tokenizer = Tokenizer.from_file(f"{model.path}/tokenizer.json")
        text = "Zürich,\n42 \x00é ~"
        assert tokenizer.encode(text).ids == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
        assert tokenizer.decode(list(range(97, 123))) == "abcdefghijklmnopqrstuvwxyz"
        assert tokenizer.encode("<|im_end|>").ids == [259]
        assert json.loads(Path(model.path, "config.json").read_text())["vocab_size"] == 128_256
        assert model.context_tokens == 131_072

    def test_another_model_is_none_of_ours(self) -> None:
        with pytest.raises(ValueError, match=r"unknown model 'gpt' to emulate; there are llama-3\.2-3b"):
            models.find("emulated:gpt")
