"""What a request may hold: one row for each field of each route, with its type and its range.

SGLang 0.5.23 checks little of what a body holds, and a value that its scheduler cannot take ends it, for everybody: an
id beyond the vocabulary, more logprobs than there are tokens, a pattern that backtracks without end. So the gateway
holds bodies against this table, the feeder the lines of batches, and the overlay what is sent directly to a replica.
The OpenAPI document is made of it.

Ranges come from the model and from the operator (`Facts`). Where the model is not known yet, the widest range holds,
and the replica judges by its own. `null` counts as left out. /generate and /encode take the fields of their tables
alone; on the other routes SGLang ignores what it does not know.

Pure.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from sglang_fair.common.deadlines import FIELD_TTL, MOST_SLO_S

MAX_TOKEN_ID = (1 << 31) - 1
MAX_COUNT = 1 << 31
KEPT_BACK = 2
"""Tokens of `max_output_tokens` that SGLang 0.5.23 does not generate."""
MAX_BATCH = 1024
"""Answers to one request: prompts, times samples (`n`)."""
MAX_NESTING = 100
"""Objects and lists within each other."""
MAX_TEXT_CHARS = 1024
MAX_GRAMMAR_CHARS = 1 << 17
MAX_STOPS = 32
"""SGLang's own bound."""
MAX_IDS = 1024
"""Ids to stop at, to have logprobs of, or with a bias."""
MAX_REPEATS = 1 << 12
"""The numbers that a pattern counts to, multiplied: SGLang's grammars follow all combinations at each token."""
MAX_INT64 = (1 << 63) - 1
MAX_BIAS = 10_000
MAX_TEMPERATURE = 100
"""Far above it, logits are all one number."""
LEAST_PENALTY = 0.01
"""Far below it, logits divided by it are infinite, and no token can be drawn."""

RISKS: Mapping[str, str] = {
    "stop_regex": "a pattern can take for ever at each token",
    "regex": "a repetition within a repetition, or up to large numbers, can take for ever at each token",
    "ebnf": "a grammar with several readings takes longer with each token",
    "structural_tag": "it can hold any grammar",
    "custom_logit_processor": "it runs its sender's code in the scheduler",
}
"""Fields with which a client can stop a scheduler, and how. An operator may allow them (`allow_fields`)."""

Schema: TypeAlias = dict[str, Any]
Limit: TypeAlias = int | Literal["vocabulary", "logprobs"]


class Facts(NamedTuple):
    """What ranges depend on."""

    vocabulary: int | None = None
    """Of the model, in tokens; None while it is not known."""
    most_logprobs: int = 20
    """Of one token."""
    allowed: frozenset[str] = frozenset()
    """Those of `RISKS` that the operator allows."""

    @staticmethod
    def allowing(most_logprobs: int, names: str) -> "Facts":
        """What an operator has set. ValueError for a name that is none of `RISKS`."""
        allowed = frozenset(name.strip() for name in names.split(",") if name.strip())
        if unknown := allowed - RISKS.keys():
            raise ValueError(f"{min(unknown)!r:.80} cannot be allowed; there are {', '.join(RISKS)}")
        return Facts(most_logprobs=most_logprobs, allowed=allowed)

    def most(self, limit: Limit) -> int:
        if limit == "logprobs":
            return self.most_logprobs
        if limit == "vocabulary":
            return MAX_TOKEN_ID if self.vocabulary is None else self.vocabulary
        return limit

    @property
    def last_id(self) -> int:
        return self.most("vocabulary") - (self.vocabulary is not None)


WIDEST = Facts()
"""Of a model that is not known, where the operator has set nothing."""


class Wrong(ValueError):
    """A field of a request is not as its row says."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"`{field}` {problem}")
        self.field = field


class Rule:
    """One row: what a value must be. This one allows anything."""

    def problem(self, value: Any, facts: Facts) -> str | None:
        """What is wrong with `value`, to follow the field's name; None: nothing."""
        return None

    def sure(self, facts: Facts) -> Any:
        """A type of which no value has a problem, so that most bodies are judged in one go (`judge`)."""
        return Any if type(self) is Rule else None

    def schema(self, facts: Facts) -> Schema:
        return {}


def _refuse_none(value: Any, facts: Facts) -> str | None:
    return None


@dataclass(frozen=True, eq=False)
class Typed(Rule):
    """Of a type that msgspec converts to, which follows from the facts."""

    kind: Callable[[Facts], Any]
    refuse: Callable[[Any, Facts], str | None] = _refuse_none
    """What else can be wrong with a value of this type, as `problem`."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What the schema has besides that of the type."""
    never_refused: Any = None
    """A type that needs no `refuse`."""

    def problem(self, value: Any, facts: Facts) -> str | None:
        try:
            msgspec.convert({"_": value}, _holder(self, facts))
        except msgspec.ValidationError as error:
            said = str(error).replace(" - at `$._`", "").replace("`$._", "`$")
            return said.replace("Expected", "must be", 1).replace("Invalid", "has an invalid", 1)
        return self.refuse(value, facts)

    def sure(self, facts: Facts) -> Any:
        return self.kind(facts) if self.refuse is _refuse_none else self.never_refused

    def schema(self, facts: Facts) -> Schema:
        return {**msgspec.json.schema(self.kind(facts)), **self.more}


@lru_cache(1 << 12)
def _holder(typed: Typed, facts: Facts) -> type[msgspec.Struct]:
    """msgspec keeps what it has found out of a type only for structs."""
    return msgspec.defstruct("Holder", [("_", typed.kind(facts))])


def whole(least: int = 0, limit: Limit = MAX_COUNT) -> Typed:
    """An integer, both limits included."""
    return Typed(lambda facts: Annotated[int, Meta(ge=least, le=facts.most(limit))])


def number(least: float, most: float) -> Typed:
    """A finite number, both limits included."""
    return Typed(lambda _: Annotated[float, Meta(ge=least, le=most)])


def text(most: int = MAX_TEXT_CHARS) -> Typed:
    return Typed(lambda _: Annotated[str, Meta(max_length=most)])


def many(of: Typed, most: int, *, alone: bool = False, nulls: bool = False, least: int = 0) -> Typed:
    """A list of a bounded length; with `alone` also one of what may stand in it, with `nulls` also null in it."""

    def kind(facts: Facts) -> Any:
        one = of.kind(facts)
        items: Any = list[one | None] if nulls else list[one]  # type: ignore[valid-type]
        found = Annotated[items, Meta(min_length=least, max_length=most)]
        return one | found if alone else found

    return Typed(kind)


def ids(most: int = MAX_COUNT, least: int = 0) -> Typed:
    """A list of token ids in the vocabulary."""
    return many(Typed(lambda facts: Annotated[int, Meta(ge=0, le=facts.last_id)]), most, least=least)


def prompts(most: int = MAX_COUNT) -> Typed:
    """Token ids, or lists of them, in the vocabulary. Texts are not judged here, nor is what is no list of either."""
    own = ids(most)

    def refuse(value: Any, facts: Facts) -> str | None:
        if not isinstance(value, list) or not value or isinstance(value[0], str):
            return None
        lists = [one for one in value if isinstance(one, list)] if isinstance(value[0], list) else [value]
        return next(filter(None, (own.problem(one, facts) for one in lists)), None)

    return Typed(lambda _: Any, refuse, never_refused=str)


def grammar(refuse: Callable[[str, Facts], str | None] = lambda value, facts: None) -> Typed:
    """A text that grammars are made of, whose brackets are not nested too deep."""

    def refuse_deep(value: str, facts: Facts) -> str | None:
        deep = _nesting(value) > MAX_NESTING
        return f"must not nest deeper than {MAX_NESTING}" if deep else refuse(value, facts)

    return Typed(lambda _: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)], refuse_deep)


def _refuse_bias(value: dict[str, float], facts: Facts) -> str | None:
    last = facts.last_id
    for name in value:
        if not (name.isascii() and name.isdigit() and len(name) <= 10 and int(name) <= last):
            return f"must be an object by token ids, which are integers from 0 to {last}"
    return None


def _refuse_pattern(value: str, facts: Facts) -> str | None:
    return None if is_simple(value) else Risky("regex").problem(value, facts)


def _refuse_json(value: str, facts: Facts) -> str | None:
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return None  # SGLang says what is wrong with it
    return _refuse_large(found, facts) if isinstance(found, dict) else None


def _refuse_large(value: Any, facts: Facts) -> str | None:
    """What is too large, or has a pattern within whose repetitions multiply."""
    chars, wrong = 0, None
    for name, one in walk(value):
        chars += len(name) + (len(one) if isinstance(one, str) else 8)
        if chars > MAX_GRAMMAR_CHARS:
            return f"must not have more than {MAX_GRAMMAR_CHARS} characters"
        if name == "pattern" and isinstance(one, str):
            wrong = PATTERN.problem(one, facts)
        elif name == "type" and one == "structural_tag":
            wrong = Risky("structural_tag").problem(one, facts)
        if wrong is not None:
            return f"has a `{name}` that {wrong}"
    return None


def _refuse_nested(value: dict[str, Any], facts: Facts) -> str | None:
    for name, one in value.items():
        inner = list(one.values()) if isinstance(one, dict) else one if isinstance(one, list) else [one]
        if name.startswith("__"):
            return f"must have no name with two underscores before it, as {name!r:.80}"
        if NESTED.problem(inner, facts):
            return (
                f"must hold texts and numbers of 64 bits, and lists and objects of at most {MAX_IDS} of them"
            )
    return None


@dataclass(frozen=True)
class Risky(Rule):
    """A field that is refused unless the operator allows it."""

    name: str
    rule: Rule = field(default_factory=Rule)

    def problem(self, value: Any, facts: Facts) -> str | None:
        if self.name in facts.allowed:
            return self.rule.problem(value, facts)
        if value in ("", []):
            return None
        return f"must be left out ({RISKS[self.name]}), unless the operator allows it by --allow-fields {self.name}"

    def schema(self, facts: Facts) -> Schema:
        return self.rule.schema(facts) if self.name in facts.allowed else {"enum": ["", []]}


@dataclass(frozen=True)
class Refused(Rule):
    """A field that no client may set. `neutral` is what it may be for clients that write all of them."""

    why: str
    neutral: tuple[Any, ...] = ()

    def problem(self, value: Any, facts: Facts) -> str | None:
        if any(value is one for one in self.neutral):
            return None
        return f"must be left out: {self.why}"

    def schema(self, facts: Facts) -> Schema:
        return {"enum": list(self.neutral)} if self.neutral else {"type": "null"}


@dataclass(frozen=True)
class Direct(Refused):
    """A field that is for one replica: refused at a gateway, and of this type where a replica is asked itself."""

    rule: Rule = field(default_factory=Rule)


@dataclass(frozen=True)
class Params(Rule):
    """An object of these fields and no others, or a list of them."""

    rows: Mapping[str, Rule]

    def problem(self, value: Any, facts: Facts) -> str | None:
        each = value if isinstance(value, list) else [value]
        if not 1 <= len(each) <= MAX_BATCH or not all(isinstance(one, dict) for one in each):
            return f"must be an object, or a list of 1 to {MAX_BATCH}"
        for name, one in (item for params in each for item in params.items()):
            if name not in self.rows:
                return f"must not have a field {name!r:.80}"
            if one is not None and (wrong := self.rows[name].problem(one, facts)) is not None:
                raise Wrong(name, wrong)
        return None

    def schema(self, facts: Facts) -> Schema:
        rows = {name: _nullable(rule.schema(facts)) for name, rule in self.rows.items()}
        one = {"type": "object", "properties": rows, "additionalProperties": False}
        return {"anyOf": [one, {"type": "array", "items": one, "minItems": 1, "maxItems": MAX_BATCH}]}


SEED = whole(-MAX_INT64 - 1, MAX_INT64)
STOPS = many(text(), MAX_STOPS, alone=True)
PENALTY = number(-2, 2)
NAMES = many(text(), MAX_BATCH, alone=True, nulls=True)
FLAG = Typed(lambda _: bool)
FLAGS = many(FLAG, MAX_BATCH, alone=True)
LAST = Typed(lambda _: bool | Literal["last"])
SCALAR = Typed(
    lambda _: (
        bool
        | float
        | None
        | Annotated[int, Meta(ge=-MAX_INT64 - 1, le=MAX_INT64)]
        | Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
    )
)
NESTED = many(SCALAR, MAX_IDS)
SCALARS = Typed(
    lambda _: Annotated[dict[str, Any], Meta(max_length=MAX_STOPS)], _refuse_nested,
    {"propertyNames": {"pattern": "^[a-z]"},
     "additionalProperties": {"type": ["string", "boolean", "null"], "maxLength": MAX_TEXT_CHARS}},
)  # fmt: skip
"""What SGLang takes to its scheduler unread: scalars, and lists and objects of them. Names with two underscores are
its own."""
BIAS = Typed(
    lambda _: Annotated[dict[str, Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]], Meta(max_length=MAX_IDS)],
    _refuse_bias, {"propertyNames": {"pattern": "^[0-9]$"}},  # a part of them: an object may have any of it
)  # fmt: skip
"""What is added to the logits of token ids."""
PATTERN = grammar(_refuse_pattern)
SIZED = Typed(lambda _: dict[str, Any], _refuse_large)
SIZED_LIST = Typed(lambda _: list[dict[str, Any]], _refuse_large)
LOGPROBS = whole(0, "logprobs")
PORT_ROUTING = "which replica serves it is the router's to say"
IN_ONE_REPLICA = "sessions are of one replica, which the router chooses anew for each request"

SAMPLING: Mapping[str, Rule] = {
    "n": whole(1, MAX_BATCH),
    "stop": STOPS,
    "stop_token_ids": ids(MAX_IDS),
    "stop_regex": Risky("stop_regex", many(text(256), MAX_STOPS, alone=True)),
    "temperature": number(0, MAX_TEMPERATURE),
    "top_p": Typed(lambda _: Annotated[float, Meta(gt=0, le=1)]),
    "top_k": whole(-1, "vocabulary"),
    "min_p": number(0, 1),
    "frequency_penalty": PENALTY,
    "presence_penalty": PENALTY,
    "repetition_penalty": number(LEAST_PENALTY, 2),
    "json_schema": grammar(_refuse_json),
    "regex": PATTERN,
    "ebnf": Risky("ebnf", grammar()),
    "ignore_eos": FLAG,
    "skip_special_tokens": FLAG,
    "no_stop_trim": FLAG,
    "logit_bias": BIAS,
    "custom_params": SCALARS,
}
"""What all of SGLang's routes for answers call alike."""

PARAMS = Params(
    {
        **SAMPLING,
        "max_new_tokens": whole(),
        "min_new_tokens": whole(),
        "spaces_between_special_tokens": FLAG,
        "stream_interval": whole(1),
        "sampling_seed": SEED,
        "structural_tag": Risky("structural_tag", grammar()),
    }
)

NOT_FOR_CLIENTS: Mapping[str, Rule] = {
    "custom_logit_processor": Risky("custom_logit_processor", many(text(1 << 20), MAX_BATCH, alone=True)),
    "input_embeds": Refused("only texts and token ids are served"),
    "positional_embed_overrides": Refused("only texts and token ids are served"),
    "embed_overrides": Refused("only texts and token ids are served"),
    "session_params": Direct(IN_ONE_REPLICA, rule=SIZED),
    **dict.fromkeys(
        ("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size",
         "disagg_prefill_dp_rank", "routed_dp_rank", "data_parallel_rank"),
        Direct(PORT_ROUTING),
    ),
    **dict.fromkeys(("image_data", "video_data", "audio_data"), Direct("images are for /v1/chat/completions")),
}  # fmt: skip

TTL_MS = Typed(lambda _: Annotated[float, Meta(gt=0, le=1e3 * MOST_SLO_S)])

EVERYWHERE: Mapping[str, Rule] = {
    **NOT_FOR_CLIENTS, "priority": SEED, "session_id": text(), "stream": FLAG, FIELD_TTL: TTL_MS,
}  # fmt: skip

OPENAI: Mapping[str, Rule] = {
    **SAMPLING,
    **EVERYWHERE,
    "max_tokens": whole(),
    "min_tokens": whole(),
    "seed": SEED,
    "lora_path": NAMES,
    "response_format": SIZED,
    "return_hidden_states": LAST,
    **dict.fromkeys(
        ("return_routed_experts", "return_cached_tokens_details", "return_spec_tokens_details",
         "return_token_ids"),
        FLAG,
    ),
    "routed_experts_start_len": whole(),
}  # fmt: skip

CHAT: Mapping[str, Rule] = {
    "tools": SIZED_LIST,
    "chat_template_kwargs": SIZED,
    "reasoning": SIZED,
}

GENERATE: Mapping[str, Rule] = {
    **EVERYWHERE,
    **dict.fromkeys(
        ("text", "model", "stream_options", "user", "cache_salt", "extra_key", "metadata"), Rule()
    ),
    "rid": many(text(), MAX_BATCH, alone=True, least=1),
    "input_ids": prompts(),
    "sampling_params": PARAMS,
    "lora_path": NAMES,
    "return_logprob": FLAGS,
    "logprob_start_len": many(whole(-1), MAX_BATCH, alone=True),
    "top_logprobs_num": many(LOGPROBS, MAX_BATCH, alone=True),
    "token_ids_logprob": prompts(most=MAX_IDS),
    "return_text_in_logprobs": FLAG,
    "return_hidden_states": LAST,
    "return_prompt_token_ids": FLAG,
    "return_routed_experts": FLAG,
    "log_metrics": Refused("all requests are counted", neutral=(True,)),
}
"""All that a client may send to /generate."""

ROUTES: Mapping[str, Mapping[str, Rule]] = {
    "/v1/completions": {
        **OPENAI,
        "prompt": prompts(),
        "logprobs": LOGPROBS,
        "best_of": whole(1, MAX_BATCH),
        "echo": FLAG,
        "suffix": grammar(),
    },
    "/v1/chat/completions": {
        **OPENAI,
        **CHAT,
        "input_ids": ids(least=1),
        "logprobs": FLAG,
        "top_logprobs": LOGPROBS,
        "max_completion_tokens": whole(),
        **dict.fromkeys(
            ("continue_final_message", "separate_reasoning", "stream_reasoning", "parallel_tool_calls",
             "return_prompt_token_ids", "return_meta_info", "return_input_ids_in_sglext",
             "return_output_ids_in_sglext"),
            FLAG,
        ),
        "return_sampling_mask": Refused("it is not served here"),
        "return_flat_raw_output_top_logprobs": Refused("it is not served here"),
    },
    "/generate": GENERATE,
    "/v1/responses": {
        **EVERYWHERE,
        **CHAT,
        **{name: SAMPLING[name] for name in ("stop", "temperature", "top_p", "top_k", "min_p", "frequency_penalty",
                                             "presence_penalty", "repetition_penalty")},
        "max_output_tokens": whole(KEPT_BACK + 1),
        "top_logprobs": LOGPROBS,
        "text": SIZED,
        "metadata": SIZED,
    },
    "/v1/messages": {
        **EVERYWHERE,
        **{name: SAMPLING[name] for name in ("temperature", "top_p", "top_k")},
        "tools": CHAT["tools"],
        "max_tokens": whole(1),
        "stop_sequences": many(text(), MAX_STOPS),
        "output_config": SIZED,
        "metadata": SIZED,
    },
    "/v1/embeddings": {**EVERYWHERE, "input": prompts(), "dimensions": whole(1), "encoding_format": text()},
    "/encode": {
        **{name: GENERATE[name] for name in (*EVERYWHERE, "text", "model", "user", "cache_salt", "metadata", "rid",
                                             "input_ids", "sampling_params", "lora_path", "log_metrics")},
        "dimensions": whole(1),
    },
    "/v1/messages/count_tokens": {"tools": CHAT["tools"]},
    "/tokenize": {**CHAT, "add_special_tokens": FLAG, "continue_final_message": FLAG},
    "/detokenize": {"tokens": prompts(), "skip_special_tokens": FLAG},
}  # fmt: skip
"""By path: field and row."""

CLOSED = frozenset({"/generate", "/encode"})
"""Routes that take nothing beside their rows."""


def judge(route: str, body: Mapping[str, Any], facts: Facts, *, at_replica: bool = False) -> None:
    """Raises `Wrong` for the first field of a body that is not as its row says. `at_replica`: no gateway is asked, but
    one replica itself."""
    if nests_deeper(body, MAX_NESTING):
        raise Wrong("body", f"must not nest deeper than {MAX_NESTING}")
    try:
        msgspec.convert(body, _sure(route, facts))
        return
    except msgspec.ValidationError:
        rows = ROUTES[route]
    for name, value in body.items():
        rule = rows.get(name)
        if rule is None:
            if route in CLOSED and value is not None:
                raise Wrong(name, "is no field that clients may set here")
        elif value is not None:
            check(name, rule.rule if at_replica and isinstance(rule, Direct) else rule, value, facts)


@lru_cache(1 << 10)
def _sure(route: str, facts: Facts) -> type[msgspec.Struct]:
    """What a body of this type holds is as its rows say."""
    nothing = type(None)
    rows = [(name, nothing | rule.sure(facts), None) for name, rule in ROUTES[route].items()]
    return msgspec.defstruct("Sure", rows, forbid_unknown_fields=route in CLOSED, gc=False)


def check(name: str, rule: Rule, value: Any, facts: Facts) -> None:
    if (wrong := rule.problem(value, facts)) is not None:
        raise Wrong(name, wrong)


def schemas(route: str, facts: Facts, required: Collection[str] = ()) -> Schema:
    """The rows of a route as JSON Schema, by field. Those that are required may not be null."""
    found = {name: rule.schema(facts) for name, rule in ROUTES[route].items()}
    return {
        name: schema if name in required else _nullable(schema) for name, schema in found.items() if schema
    }


def nests_deeper(value: Any, most: int) -> bool:
    """Whether objects and lists stand within each other more than `most` times."""
    level = [value]
    for _ in range(most):
        level = [
            inner
            for one in level
            for inner in (one.values() if type(one) is dict else one)
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return False
    return True


def walk(value: Any) -> Iterator[tuple[str, Any]]:
    """All that is within a value, each with its name in the object that holds it; "" in a list."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        for name, inner in one.items() if type(one) is dict else (("", each) for each in one):
            yield name, inner
            if type(inner) is dict or type(inner) is list:
                waiting.append(inner)


_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d*)(?:,(\d*))?\}|\(\??|.", re.DOTALL)


def is_simple(pattern: str) -> bool:
    """Whether a pattern repeats nothing without end that can end in several places, and all that is bounded in it has
    no more than `MAX_REPEATS` combinations and counts no further."""
    groups, closed, counts, combinations = [1.0], 1.0, 1, 1.0
    for part in _PARTS.finditer(pattern):
        text = part[0]
        if text[0] == "(":
            groups.append(1.0)
            closed = 1.0
        elif text == ")" and len(groups) > 1:
            closed = groups.pop()
            groups[-1] *= closed
        elif text in "*+?" or (text[0] == "{" and part[1] is not None):
            least, most = _repetition(text, part[1], part[2])
            own = most - least + 1
            within = min(closed, 1e9) ** min(max(most - 1, 0), 20)
            counts *= max(1, least, 0 if most == inf else int(most))
            combinations *= within * (1 if own == inf else own)
            if max(counts, combinations) > MAX_REPEATS:
                return False
            groups[-1] *= within * own
            closed *= within * own
        else:
            closed = 1.0
    return True


def _repetition(text: str, least: str | None, most: str | None) -> tuple[int, float]:
    if text[0] != "{":
        return int(text == "+"), 1 if text == "?" else inf
    first = int((least or "0")[:9])
    return first, first if most is None else inf if most == "" else max(first, int(most[:9]))


def _nesting(text: str) -> int:
    deep = most = 0
    for one in re.findall(r"[\[\](){}]", text):
        deep += 1 if one in "[({" else -1
        most = max(most, deep)
    return most


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]} if schema else schema
