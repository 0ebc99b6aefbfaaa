"""Reads questions (JSON lines), articles (a folder or a file) and a model's tokenizer from files.

GSM8K is at https://github.com/openai/grade-school-math (`test.jsonl`, a `question` in each line).
"""

import json
from pathlib import Path

from workloads.programs import Codec, TextCodec, TokenCodec
from workloads.programs.prose import Given


def read_questions(path: Path) -> Given:
    """The `question` of every line of a JSON lines file. Raises ValueError with file and line number."""
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            question = json.loads(line)["question"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a JSON object with a `question`: {error!r}") from error
        questions.append(str(question).strip())
    return _given(questions, path)


def read_articles(path: Path) -> Given:
    """Every `*.txt` file of a folder in order of name; or one file, an article a paragraph."""
    if path.is_dir():
        texts = [file.read_text(encoding="utf-8").strip() for file in sorted(path.glob("*.txt"))]
    else:
        texts = [part.strip() for part in path.read_text(encoding="utf-8").split("\n\n")]
    return _given([text for text in texts if text], path)


def read_codec(folder: Path | None) -> Codec:
    """Exact token counts by the tokenizer in `folder`; without one, text and an estimate."""
    if folder is None:
        return TextCodec()
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.exists():
        raise ValueError(f"{path}: no such file; --tokenizer wants a model's folder")
    tokenizer = Tokenizer.from_file(str(path))
    return TokenCodec(lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids))


def _given(texts: list[str], path: Path) -> Given:
    if not texts:
        raise ValueError(f"{path}: holds no text")
    return Given(tuple(texts))
