"""docs/errors.md: each error that a gateway answers by itself, made from the sources and a table of words.

    python -m router.error_codes            prints the page
    python -m router.error_codes --write    puts it into docs/errors.md

Status, code and text stand where the error is raised, and are read there. `WORDS` says what brings a code about, and
what to do. A test holds both together: a code that is raised has words, and words are of a code that is raised.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from sglang_fair.core.throttle import APP, USER
from sglang_fair.settings.commands import Option, run

PAGE = Path("docs/errors.md")
SOURCES = Path(__file__).parent

ERROR, HELPERS = "ApiError", ("_refused",)
"""The class, and functions that make one of a text and a code."""

HEAD = """\
# Errors

<!-- Made by `python -m router.error_codes --write` from router/error_codes.py and the sources; do not edit. -->

What the gateway answers by itself when it cannot do what was asked. The body is the one of the API that was asked:
OpenAI's, also for SGLang's own paths,

```json
{"error": {"message": "…", "type": "invalid_request_error", "param": "messages", "code": "invalid_messages"}}
```

or Anthropic's for all below `/v1/messages`, which has a type and no code. `code` is what programs should look at: texts
may change. Where a code is not given it is the status as a number. `param` names the field at fault, where one is.
Statuses from 400 are the client's to mend, 429 says to come later, from 500 on it is the server's. Where `Retry-After`
is sent, so many seconds are to be waited. Errors that a replica answers have the status and the words of SGLang, in the
same shapes. Errors in single lines of a batch are in its file of errors.

An answer that streams has status 200 already when something fails: it ends with an event that has such an `error`.
"""

WORDS: Mapping[str, tuple[str, str]] = {
    "invalid_json": ("The body is no JSON object.", "Send one."),
    "too_many_values": (
        "The body is JSON with more values than anybody needs.",
        "Send fewer requests in one.",
    ),
    "invalid_prompt": ("The prompt is missing, or no text or token ids.", "Send what the API describes."),
    "invalid_messages": ("`messages` is missing, or not a list of messages.", "Send what the API describes."),
    "too_many_messages": ("There are more messages than anybody needs.", "Send fewer."),
    "invalid_input": ("`input` is missing, or not what the API describes.", "Send what the API describes."),
    "batch_too_large": ("One request holds too many prompts.", "Split it."),
    "prompt_too_large": (
        "The prompts together are longer than the gateway takes, or than the tenant may send.",
        "Shorten or split them. Operators: `--max-prompt-tokens`, `prompt_tokens` of the tenant.",
    ),
    "context_length_exceeded": ("The prompt is longer than the model's context.", "Shorten it."),
    "output_too_long": ("More output is asked for than the tenant may have.", "Ask for less (`max_tokens`)."),
    "not_stored": ("The request needs an answer that was stored; none are.", "Send the whole conversation."),
    "unsupported": ("SGLang cannot do this with this API.", "Use another API, or leave it out."),
    "invalid_deadline": (
        "A header promises a deadline that nobody can read.",
        "Mend the header that is named.",
    ),
    "invalid_limit": ("`limit` is out of its range.", "Take one within."),
    "model_not_found": ("The cluster has no model of this name.", "Ask `/v1/models` which there are."),
    "invalid_api_key": (
        "No tenant has this API key.",
        "Send `Authorization: Bearer KEY` with a key that holds.",
    ),
    "missing_api_key": ("The gateway has tenants, and the request has no key.", "Send one."),
    "invalid_feeder_key": (
        "The process that sends requests of batches has another key.",
        "Give both the same one.",
    ),
    "unknown_tenant": (
        "A trusted proxy, or the feeder, names no tenant that there is.",
        "Name one; a batch of it ends.",
    ),
    "unauthorized": (
        "This is for operators, and the key is missing or wrong.",
        "Send the key of SGLANG_FAIR_ADMIN_KEY.",
    ),
    "forbidden": (
        "This is for operators on the gateway's own machine.",
        "Ask there, or set SGLANG_FAIR_ADMIN_KEY.",
    ),
    "body_timeout": ("The body did not arrive in time.", "Send faster. Operators: `--body-timeout`."),
    "body_too_large": (
        "The body is larger than the gateway takes.",
        "Send less. Operators: `--max-body-bytes`.",
    ),
    "overloaded": (
        "This client has as much in flight as one may have, or the gateway has no room.",
        "Come back after `Retry-After` with fewer at a time. Operators: `--max-in-flight`.",
    ),
    "rate_limit_exceeded": (
        "The tenant's limit is used up.",
        "Come back after `Retry-After`; `x-ratelimit-*` say more.",
    ),
    USER: (
        "All replicas are overloaded, and the user is beyond its limit of calls.",
        "Come back after `Retry-After`.",
    ),
    APP: (
        "All replicas are overloaded, and the application is beyond its limit of calls.",
        "Come back after `Retry-After`.",
    ),
    "refused": (
        "The router cannot place the request: no replica is ready, or it waited too long.",
        "Try again later.",
    ),
    "router_unavailable": ("No router answers, and this cannot be done without one.", "Try again later."),
    "no_replica": (
        "Every replica that was tried failed before it answered.",
        "Try again; see the replicas' logs.",
    ),
    "replica_lost": (
        "The replica died in the middle of a stream that cannot go on elsewhere.",
        "Send it again.",
    ),
    "request_not_found": (
        "Nobody remembers the request, or it is another tenant's.",
        "Ask earlier, with the same key.",
    ),
    "worker_exists": ("Another replica has this name or address.", "Choose another name."),
    "worker_not_found": ("There is no replica of this name.", "Ask `/workers` which there are."),
    "worker_not_ready": ("The replica to be added does not answer.", "Add it when its `GET /ready` answers."),
    "invalid_worker": ("The description of a replica cannot be read.", "Mend what the text says."),
    "invalid_limits": ("The limits cannot be read.", "Mend what the text says."),
    "no_throttle": ("The router runs without `--throttle`, so limits have no effect.", "Start it with one."),
    "invalid_swap": ("The order to load another model cannot be read.", "Mend what the text says."),
    "cannot_swap": (
        "The replica cannot load this model now.",
        "Mend what the text says, or try again later.",
    ),
    "invalid_tenant": ("The change of a tenant cannot be read.", "Mend what the text says."),
    "tenant_not_found": ("There is no such tenant.", "`sglang-fair tenants list` has them."),
    "tenants_file": ("The tenants' file cannot be written.", "See its owner and its folder."),
    "file_not_found": ("There is no such file, or it is another client's.", "Ask `/v1/files`."),
    "file_in_use": ("A batch needs the file.", "Delete it when the batch is over."),
    "file_too_large": ("The file is larger than one may be.", "Split it. Operators: `--batch-file-bytes`."),
    "too_many_bytes": ("All files of this client together are too large.", "Delete some."),
    "missing_file": ("The form has no `file`.", "Upload one."),
    "invalid_form": ("The upload is no form that can be read.", "Use a client of the API."),
    "invalid_purpose": ("Files are for batches.", "Say `purpose=batch`."),
    "invalid_expiry": ("`expires_after` is not what the API describes.", "Mend what the text says."),
    "invalid_order": ("`order` is neither asc nor desc.", "Say one."),
    "invalid_batch": ("The batch cannot be read.", "Mend what the text says."),
    "batch_not_found": ("There is no such batch, or it is another client's.", "Ask `/v1/batches`."),
    "batch_is_over": ("The batch has ended; there is nothing to cancel.", "Nothing."),
    "disk_full": ("The disk with files and batches is full.", "Operators: make room; nothing was accepted."),
    "store_failed": ("The store of files and batches failed.", "Operators: see the gateway's log."),
}
"""Of each code: what brings it about, and what to do."""


@dataclass(frozen=True, order=True)
class Raised:
    """An error as the sources raise it. Status 0: it depends. `text` has … for what depends."""

    status: int
    code: str
    text: str


@cache
def raised() -> tuple[Raised, ...]:
    """All of the router's and the gateway's, by status and code."""
    found = {one for file in sorted(SOURCES.rglob("*.py")) for one in _in(ast.parse(file.read_text("utf-8")))}
    return tuple(sorted(found))


def _in(tree: ast.Module) -> Iterator[Raised]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if _literal(key) == "code" and (code := _literal(value)):
                    yield Raised(400, code, "")
        if not isinstance(node, ast.Call):
            continue
        named = {word.arg: word.value for word in node.keywords}
        if _name(node) in HELPERS:
            yield Raised(401, _literal(node.args[1]), _text(node.args[0]))
        elif "code" in named and (code := _literal(named["code"])) and node.args:
            status = node.args[0].value if isinstance(node.args[0], ast.Constant) else 0
            text = _text(node.args[1]) if len(node.args) > 1 else ""
            yield Raised(status if isinstance(status, int) else 0, code, text)


def _name(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _literal(node: ast.AST | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(part) or "…" for part in node.values)
    return _literal(node)


def page() -> str:
    """The whole page."""
    rows: dict[str, list[Raised]] = {code: [] for code in WORDS}
    for one in raised():
        rows.setdefault(one.code, []).append(one)
    parts = [HEAD, "\n| code | status | when | what to do | text |\n|---|---|---|---|---|\n"]
    for code, found in sorted(
        rows.items(), key=lambda row: (min((one.status for one in row[1]), default=429), row[0])
    ):
        when, do = WORDS[code]
        statuses = ", ".join(
            str(status) for status in sorted({one.status for one in found if one.status})
        ) or ("429" if code in (USER, APP) else "409")
        texts = "; ".join(dict.fromkeys(one.text for one in found if one.text))
        parts.append(
            f"| `{code}` | {statuses} | {when} | {do} | {texts.replace('|', chr(92) + '|') or '–'} |\n"
        )
    return "".join(parts)


def main(
    write: Annotated[bool, Option("--write", help=f"Write {PAGE}; otherwise print it.")] = False,
) -> None:
    """The reference page of all errors."""
    if write:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())


if __name__ == "__main__":
    sys.exit(run(main, "python -m router.error_codes"))
