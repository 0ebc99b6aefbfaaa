"""Trees of thoughts and judges, with the calls of `workloads.programs.kinds`.

    python -m workloads.examples.programs http://127.0.0.1:8000 alice

Before a fork the frontend also has the common prefix computed, by a call without an answer.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sglang.lang.api import function, gen

from workloads.examples import Endpoint
from workloads.programs.kinds import INSTRUCTIONS, Judge, TreeOfThought


@function
def tree_of_thoughts(
    s: Any, question: str, branches: int = 2, height: int = 4, thought_tokens: int = 256
) -> int:
    """Returns the number of thoughts that the model finished. A thought that failed has no children."""
    s += question
    return _grow(s, 1, TreeOfThought(branches, height, thought_tokens))


def _grow(path: Any, level: int, tree: TreeOfThought) -> int:
    """Subtrees do not wait for each other."""
    instruction = INSTRUCTIONS[tree.stage(level)]

    def think(k: int, thought: Any) -> int:
        thought += f"\n{instruction.format(k=k)}\n" + gen("thought", max_tokens=tree.thought_tokens)
        if thought.error() is not None:
            return 0
        return 1 + (_grow(thought, level + 1, tree) if level < tree.height else 0)

    forks = path.fork(tree.branches)
    with ThreadPoolExecutor(tree.branches) as threads:
        return sum(threads.map(think, range(1, tree.branches + 1), forks))


@function
def judge(s: Any, article: str, dimensions: int = 2, judgement_tokens: int = 256) -> str | None:
    """Returns the verdict; None where no judgement or no verdict was had."""
    s += article
    names = Judge(dimensions).names
    forks = list(zip(names, s.fork(dimensions), strict=True))
    for name, fork in forks:
        fork += f"\nJudge the {name}.\n" + gen("judgement", max_tokens=judgement_tokens)
    judged = [(name, fork["judgement"]) for name, fork in forks if fork.error() is None]
    if not judged:
        return None
    for name, judgement in judged:
        s += f"\nOn {name}: {judgement}"
    s += "\nMerge the judgements into a verdict.\n" + gen("verdict", max_tokens=judgement_tokens)
    return None if s.error() is not None else str(s["verdict"])


def main() -> None:
    """Runs both, with short answers."""
    parser = argparse.ArgumentParser(description="Runs a tree of thoughts and a judge.")
    parser.add_argument("url", help="the gateway's address")
    parser.add_argument("key", help="the client's key, which without tenants is any name")
    given = parser.parse_args()
    tree = tree_of_thoughts.run(
        "A farmer has 17 sheep and buys 5 more. How many are there?",
        height=2,
        thought_tokens=32,
        backend=Endpoint(given.url, app="trees", api_key=given.key),
    )
    print(f"{tree.ret_value} thoughts")
    verdict = judge.run(
        "The sea is blue because it reflects the sky.",
        judgement_tokens=32,
        backend=Endpoint(given.url, app="judges", api_key=given.key),
    )
    print(verdict.ret_value)


if __name__ == "__main__":
    main()
