"""Runs programs of SGLang's frontend language against a gateway, and prints in JSON what they sent and had:

python -m tests.support.sgl_programs URL KEY
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import sglang as sgl

from workloads.examples import Endpoint
from workloads.examples.programs import judge, tree_of_thoughts

TREE = {"question": "How many are there?", "branches": 2, "height": 3, "thought_tokens": 4}
JUDGE = {"article": "The sea is blue.", "dimensions": 3, "judgement_tokens": 4}


class Recording(Endpoint):
    """Keeps the bodies that are sent, and what was answered to each prompt."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.sent: list[dict[str, Any]] = []
        self.answers: dict[str, tuple[str, int]] = {}

    def _add_images(self, s: Any, data: dict[str, Any]) -> None:
        super()._add_images(s, data)
        self.sent.append(data)

    def generate(self, s: Any, sampling_params: Any) -> Any:
        prompt = s.text_
        text, meta = super().generate(s, sampling_params)
        self.answers[prompt] = text, sampling_params.max_new_tokens
        return text, meta


@sgl.function
def every_kind(s: Any) -> None:
    s += sgl.system("Be brief.")
    s += sgl.user("Which?")
    s += sgl.assistant(sgl.gen("free", max_tokens=4) + sgl.select("chosen", ["yes", "no"]))
    forks = s.fork(2)
    forks += sgl.gen("digits", regex="[0-9]{2}", max_tokens=4)
    forks.join("concate_and_append")


def documented(url: str, key: str) -> str:
    """Runs the program of docs/api.md as it stands there, then with the endpoint of its own. What the latter wrote."""
    text = (Path(__file__).parents[2] / "docs/api.md").read_text().partition("### SGLang's own programs")[2]
    program, endpoint = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {"__name__": "documented"}
    exec(program.replace("http://127.0.0.1:8000", url).replace("alice", key), names)
    exec(endpoint, names)
    return str(names["answer"].run("Why?", backend=names["Endpoint"](url, app="docs", api_key=key)).text())


def main() -> None:
    url, key = sys.argv[1:]
    found: dict[str, Any] = {"documented": documented(url, key)}
    for name, program, given in (("tree", tree_of_thoughts, TREE), ("judge", judge, JUDGE)):
        backend = Recording(url, app=name, api_key=key)
        state = program.run(**given, temperature=0, backend=backend)
        error = state.error() and str(state.error())
        found[name] = {
            "value": state.ret_value, "error": error, "answers": backend.answers, "sent": backend.sent,
        }  # fmt: skip
    backend = Recording(url, api_key=key)
    states = every_kind.run_batch([{}, {}], temperature=0, backend=backend)
    found["batch"] = [one.text() for one in states]
    streamed = every_kind.run(stream=True, temperature=0, backend=backend)
    found["stream"], found["sent"] = "".join(streamed.text_iter()), backend.sent
    found["info"] = [backend.get_model_name(), backend.get_server_info()]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
