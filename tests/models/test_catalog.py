"""The table of models: the folder of an emulated one."""

import json
from pathlib import Path

import pytest

from sglang_fair.models import catalog as models
from sglang_fair.models.__main__ import TOKENIZER_FILES, copy_tokenizer, main


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

    def test_another_model_is_none_of_ours(self) -> None:
        with pytest.raises(ValueError, match=r"unknown model 'gpt' to emulate; there are llama-3\.2-3b"):
            models.find("emulated:gpt")


class TestTokenizerForAGateway:
    def test_it_is_copied_without_weights(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SGLANG_FAIR_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("builtins.print", lambda *_: None)
        folder = models.find("emulated:llama-3.1-8b").path
        Path(folder, "model.safetensors").write_bytes(b"weights")
        assert main("emulated:llama-3.1-8b", tmp_path / "to") is None
        assert {path.name for path in (tmp_path / "to").iterdir()} == {
            "config.json", "tokenizer.json", "tokenizer_config.json",
        }  # fmt: skip
        assert main("emulated:llama-3.1-8b", tmp_path / "to") is None, "a container is started again"

    def test_a_model_on_the_hub_is_fetched_without_weights(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []

        def download(model_id: str, allow_patterns: list[str]) -> str:
            asked.append((model_id, allow_patterns))
            (tmp_path / "tokenizer.json").write_text("{}")
            return str(tmp_path)

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        assert [path.name for path in copy_tokenizer("org/model", tmp_path / "to", print)] == [
            "tokenizer.json"
        ]
        assert asked == [("org/model", list(TOKENIZER_FILES))]

    def test_a_folder_without_a_tokenizer_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ValueError, match=r"has no tokenizer\.json, which a gateway needs"):
            copy_tokenizer(str(tmp_path), tmp_path / "to", print)
