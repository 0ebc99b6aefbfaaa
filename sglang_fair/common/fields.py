"""What a request may hold: one row for each field of each route, with its type and its range.

SGLang 0.5.23 checks little of what a body holds, and a value that its scheduler cannot take ends it, for everybody: an
id beyond the vocabulary, more logprobs than there are tokens, a pattern that backtracks without end. So the gateway
holds bodies against this table, the feeder the lines of batches, and the overlay what is sent directly to a replica.
The OpenAPI document is made of it.

Ranges come from the model and from the operator (`Facts`). Where the model is not known yet, the widest range holds,
and the replica judges by its own. `null` counts as left out. /generate takes the fields of its table alone; on the
other routes SGLang ignores what it does not know.

Pure.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, TypeAlias

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


@dataclass(frozen=True)
class Facts:
    """What ranges depend on."""

    vocabulary: int | None = None
    """Of the model, in tokens; None while it is not known."""
    most_logprobs: int = 20
    """Of one token."""
    allowed: Collection[str] = frozenset()
    """Those of `RISKS` that the operator allows."""

    @staticmethod
    def allowing(most_logprobs: int, names: str) -> "Facts":
        """What an operator has set. ValueError for a name that is none of `RISKS`."""
        allowed = frozenset(name.strip() for name in names.split(",") if name.strip())
        if unknown := allowed - RISKS.keys():
            raise ValueError(f"{min(unknown)!r:.80} cannot be allowed; there are {', '.join(RISKS)}")
        return Facts(most_logprobs=most_logprobs, allowed=allowed)

    def most(self, limit: Limit) -> int:
        """A limit in numbers."""
        if limit == "logprobs":
            return self.most_logprobs
        if limit == "vocabulary":
            return MAX_TOKEN_ID if self.vocabulary is None else self.vocabulary
        return limit


WIDEST = Facts()
"""Of a model that is not known, where the operator has set nothing."""


class Wrong(ValueError):
    """A field of a request is not as its row says."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"`{field}` {problem}")
        self.field = field


@dataclass(frozen=True)
class Rule:
    """One row: what a value must be. This one allows anything."""

    def problem(self, value: Any, facts: Facts) -> str | None:
        """What is wrong with `value`, to follow the field's name; None: nothing."""
        return None

    def schema(self, facts: Facts) -> Schema:
        """The same in JSON Schema."""
        return {}


@dataclass(frozen=True)
class Whole(Rule):
    """An integer, both limits included."""

    least: int = 0
    limit: Limit = MAX_COUNT

    def problem(self, value: Any, facts: Facts) -> str | None:
        most = facts.most(self.limit)
        if type(value) is int and self.least <= value <= most:
            return None
        return f"must be an integer from {self.least} to {most}"

    def schema(self, facts: Facts) -> Schema:
        return {"type": "integer", "minimum": self.least, "maximum": facts.most(self.limit)}


@dataclass(frozen=True)
class Number(Rule):
    """A finite number, both limits included unless `above`, which excludes the lower one."""

    least: float
    most: float
    above: bool = False

    def problem(self, value: Any, facts: Facts) -> str | None:
        is_in = type(value) in (int, float) and self.least <= value <= self.most
        if is_in and not (self.above and value == self.least):
            return None
        least = f"above {self.least:g} and at most" if self.above else f"from {self.least:g} to"
        return f"must be a number {least} {self.most:g}"

    def schema(self, facts: Facts) -> Schema:
        least = "exclusiveMinimum" if self.above else "minimum"
        return {"type": "number", least: self.least, "maximum": self.most}


@dataclass(frozen=True)
class Flag(Rule):
    """True or false, or one of a few words beside them."""

    words: tuple[str, ...] = ()

    def problem(self, value: Any, facts: Facts) -> str | None:
        if type(value) is bool or (type(value) is str and value in self.words):
            return None
        return " or ".join(["must be true or false", *map(repr, self.words)])

    def schema(self, facts: Facts) -> Schema:
        return {"enum": [True, False, *self.words]} if self.words else {"type": "boolean"}


@dataclass(frozen=True)
class Text(Rule):
    """A text of bounded length, whose brackets are not nested too deep."""

    most: int = MAX_TEXT_CHARS

    def problem(self, value: Any, facts: Facts) -> str | None:
        if isinstance(value, str) and len(value) <= self.most:
            deep = self.most > MAX_TEXT_CHARS and _nesting(value) > MAX_NESTING
            return f"must not nest deeper than {MAX_NESTING}" if deep else None
        return f"must be a text of at most {self.most} characters"

    def schema(self, facts: Facts) -> Schema:
        return {"type": "string", "maxLength": self.most}


@dataclass(frozen=True)
class Many(Rule):
    """A list of a bounded length; with `alone` also one of what may stand in it, with `nulls` also null in it."""

    of: Rule
    most: int
    alone: bool = False
    nulls: bool = False
    least: int = 0

    def problem(self, value: Any, facts: Facts) -> str | None:
        if self.alone and not isinstance(value, list):
            return self.of.problem(value, facts)
        if not isinstance(value, list) or len(value) > self.most:
            return f"must be a list of at most {self.most}"
        if len(value) < self.least:
            return "must not be empty"
        for one in value:
            if not (self.nulls and one is None) and (wrong := self.of.problem(one, facts)) is not None:
                return wrong if self.alone else wrong.replace("must be", "must hold", 1)
        return None

    def schema(self, facts: Facts) -> Schema:
        of = self.of.schema(facts)
        items = _nullable(of) if self.nulls else of
        many = {"type": "array", "items": items, "minItems": self.least, "maxItems": self.most}
        return {"anyOf": [of, many]} if self.alone else many


@dataclass(frozen=True)
class Ids(Rule):
    """A list of token ids in the vocabulary."""

    most: int = MAX_IDS
    least: int = 0

    def problem(self, value: Any, facts: Facts) -> str | None:
        if not isinstance(value, list) or not self.least <= len(value) <= self.most:
            least = "non-empty " if self.least else ""
            most = f" of at most {self.most}" if self.most < MAX_COUNT else ""
            return f"must hold a {least}list of token ids{most}"
        last = facts.most("vocabulary") - (facts.vocabulary is not None)
        if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) > last):
            return f"holds something that is no token id, which is an integer from 0 to {last}"
        return None

    def schema(self, facts: Facts) -> Schema:
        last = facts.most("vocabulary") - (facts.vocabulary is not None)
        ids: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": last}}
        ids |= {"minItems": self.least} if self.least else {}
        return ids | ({"maxItems": self.most} if self.most < MAX_COUNT else {})


@dataclass(frozen=True)
class Prompts(Rule):
    """Token ids, or lists of them, in the vocabulary. Texts are not judged here, nor is what is no list of either."""

    most: int = MAX_COUNT

    def problem(self, value: Any, facts: Facts) -> str | None:
        if not isinstance(value, list) or not value or isinstance(value[0], str):
            return None
        for one in value if isinstance(value[0], list) else [value]:
            if isinstance(one, list) and (wrong := Ids(self.most).problem(one, facts)) is not None:
                return wrong
        return None


@dataclass(frozen=True)
class Bias(Rule):
    """What is added to the logits of token ids."""

    def problem(self, value: Any, facts: Facts) -> str | None:
        if not isinstance(value, dict) or len(value) > MAX_IDS:
            return f"must be an object of at most {MAX_IDS} token ids"
        last = facts.most("vocabulary") - (facts.vocabulary is not None)
        for name, bias in value.items():
            if not (name.isascii() and name.isdigit() and len(name) <= 10 and int(name) <= last):
                return f"must be an object by token ids, which are integers from 0 to {last}"
            if (wrong := Number(-MAX_BIAS, MAX_BIAS).problem(bias, facts)) is not None:
                return wrong.replace("must be a number", "must have numbers", 1)
        return None

    def schema(self, facts: Facts) -> Schema:
        bias = Number(-MAX_BIAS, MAX_BIAS).schema(facts)
        names = {"pattern": "^[0-9]$"}  # a part of them: an object may have any of it
        return {
            "type": "object",
            "propertyNames": names,
            "additionalProperties": bias,
            "maxProperties": MAX_IDS,
        }


@dataclass(frozen=True)
class Pattern(Text):
    """A pattern that an answer must match, whose repetitions do not multiply."""

    most: int = MAX_GRAMMAR_CHARS

    def problem(self, value: Any, facts: Facts) -> str | None:
        wrong = None
        if isinstance(value, str) and not is_simple(value):
            wrong = Risky("regex", Rule()).problem(value, facts)
        return wrong or super().problem(value, facts)


@dataclass(frozen=True)
class Sized(Rule):
    """An object, or a list of them, of bounded size, with patterns as `Pattern` has them: what grammars are made of."""

    kind: type = dict

    def problem(self, value: Any, facts: Facts) -> str | None:
        if self.kind is list and not (
            isinstance(value, list) and all(isinstance(one, dict) for one in value)
        ):
            return "must be a list of objects"
        if not isinstance(value, self.kind):
            return "must be an object"
        chars = 0
        for name, one in walk(value):
            chars += len(name) + (len(one) if isinstance(one, str) else 8)
            if chars > MAX_GRAMMAR_CHARS:
                return f"must not have more than {MAX_GRAMMAR_CHARS} characters"
            if name == "pattern" and isinstance(one, str):
                wrong = Pattern().problem(one, facts)
            elif name == "type" and one == "structural_tag":
                wrong = Risky("structural_tag", Rule()).problem(one, facts)
            else:
                continue
            if wrong is not None:
                return f"has a `{name}` that {wrong}"
        return None

    def schema(self, facts: Facts) -> Schema:
        return {"type": "object"} if self.kind is dict else {"type": "array", "items": {"type": "object"}}


@dataclass(frozen=True)
class Written(Text):
    """A JSON schema, as a text."""

    most: int = MAX_GRAMMAR_CHARS

    def problem(self, value: Any, facts: Facts) -> str | None:
        if (wrong := super().problem(value, facts)) is not None:
            return wrong
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return None  # SGLang says what is wrong with it
        return Sized().problem(found, facts) if isinstance(found, dict) else None


@dataclass(frozen=True)
class Scalars(Rule):
    """What SGLang takes to its scheduler unread: scalars, and lists and objects of them. Names with two underscores are
    its own."""

    def problem(self, value: Any, facts: Facts) -> str | None:
        if not isinstance(value, dict) or len(value) > MAX_STOPS:
            return f"must be an object of at most {MAX_STOPS} fields"
        for name, one in value.items():
            inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else [one]
            if name.startswith("__"):
                return f"must have no name with two underscores before it, as {name!r:.80}"
            if len(inner) > MAX_IDS or not all(_is_scalar(each) for each in inner):
                return f"must hold texts and numbers of 64 bits, and lists and objects of at most {MAX_IDS} of them"
        return None

    def schema(self, facts: Facts) -> Schema:
        return {
            "type": "object",
            "maxProperties": MAX_STOPS,
            "propertyNames": {"pattern": "^[a-z]"},
            "additionalProperties": {"type": ["string", "boolean", "null"], "maxLength": MAX_TEXT_CHARS},
        }


@dataclass(frozen=True)
class Risky(Rule):
    """A field that is refused unless the operator allows it."""

    name: str
    rule: Rule

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
    """An object of these fields and no others."""

    rows: Mapping[str, Rule]

    def problem(self, value: Any, facts: Facts) -> str | None:
        if not isinstance(value, dict):
            return "must be an object or a list of objects"
        for name, one in value.items():
            if name not in self.rows:
                return f"must not have a field {name!r:.80}"
            if one is not None and (wrong := self.rows[name].problem(one, facts)) is not None:
                raise Wrong(name, wrong)
        return None

    def schema(self, facts: Facts) -> Schema:
        rows = {name: _nullable(rule.schema(facts)) for name, rule in self.rows.items()}
        return {"type": "object", "properties": rows, "additionalProperties": False}


SEED = Whole(-MAX_INT64 - 1, MAX_INT64)
STOPS = Many(Text(), MAX_STOPS, alone=True)
PENALTY = Number(-2, 2)
NAMES = Many(Text(), MAX_BATCH, alone=True, nulls=True)
FLAG, FLAGS = Flag(), Many(Flag(), MAX_BATCH, alone=True)
LOGPROBS = Whole(0, "logprobs")
PORT_ROUTING = "which replica serves it is the router's to say"
IN_ONE_REPLICA = "sessions are of one replica, which the router chooses anew for each request"

SAMPLING: Mapping[str, Rule] = {
    "n": Whole(1, MAX_BATCH),
    "stop": STOPS,
    "stop_token_ids": Ids(),
    "stop_regex": Risky("stop_regex", Many(Text(256), MAX_STOPS, alone=True)),
    "temperature": Number(0, MAX_TEMPERATURE),
    "top_p": Number(0, 1, above=True),
    "top_k": Whole(-1, "vocabulary"),
    "min_p": Number(0, 1),
    "frequency_penalty": PENALTY,
    "presence_penalty": PENALTY,
    "repetition_penalty": Number(LEAST_PENALTY, 2),
    "json_schema": Written(),
    "regex": Pattern(),
    "ebnf": Risky("ebnf", Text(MAX_GRAMMAR_CHARS)),
    "ignore_eos": FLAG,
    "skip_special_tokens": FLAG,
    "no_stop_trim": FLAG,
    "logit_bias": Bias(),
    "custom_params": Scalars(),
}
"""What all of SGLang's routes for answers call alike."""

PARAMS = Params(
    {
        **SAMPLING,
        "max_new_tokens": Whole(),
        "min_new_tokens": Whole(),
        "spaces_between_special_tokens": FLAG,
        "stream_interval": Whole(1),
        "sampling_seed": SEED,
        "structural_tag": Risky("structural_tag", Text(MAX_GRAMMAR_CHARS)),
    }
)

NOT_FOR_CLIENTS: Mapping[str, Rule] = {
    "custom_logit_processor": Risky("custom_logit_processor", Many(Text(1 << 20), MAX_BATCH, alone=True)),
    "input_embeds": Refused("only texts and token ids are served"),
    "positional_embed_overrides": Refused("only texts and token ids are served"),
    "embed_overrides": Refused("only texts and token ids are served"),
    "session_params": Direct(IN_ONE_REPLICA, rule=Sized()),
    **dict.fromkeys(
        ("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size",
         "disagg_prefill_dp_rank", "routed_dp_rank", "data_parallel_rank"),
        Direct(PORT_ROUTING),
    ),
    **dict.fromkeys(("image_data", "video_data", "audio_data"), Direct("images are for /v1/chat/completions")),
}  # fmt: skip

EVERYWHERE: Mapping[str, Rule] = {**NOT_FOR_CLIENTS, "priority": SEED, "session_id": Text(), "stream": FLAG}

OPENAI: Mapping[str, Rule] = {
    **SAMPLING,
    **EVERYWHERE,
    "max_tokens": Whole(),
    "min_tokens": Whole(),
    "seed": SEED,
    "lora_path": NAMES,
    "response_format": Sized(),
    "return_hidden_states": Flag(("last",)),
    **dict.fromkeys(
        ("return_routed_experts", "return_cached_tokens_details", "return_spec_tokens_details",
         "return_token_ids"),
        FLAG,
    ),
    "routed_experts_start_len": Whole(),
}  # fmt: skip

CHAT: Mapping[str, Rule] = {
    "tools": Sized(list),
    "chat_template_kwargs": Sized(),
    "reasoning": Sized(),
}

GENERATE: Mapping[str, Rule] = {
    **EVERYWHERE,
    **dict.fromkeys(
        ("text", "model", "stream_options", "user", "cache_salt", "extra_key", "metadata"), Rule()
    ),
    "rid": Many(Text(), MAX_BATCH, alone=True, least=1),
    "input_ids": Prompts(),
    "sampling_params": Many(PARAMS, MAX_BATCH, alone=True, least=1),
    "lora_path": NAMES,
    "return_logprob": FLAGS,
    "logprob_start_len": Many(Whole(-1), MAX_BATCH, alone=True),
    "top_logprobs_num": Many(LOGPROBS, MAX_BATCH, alone=True),
    "token_ids_logprob": Prompts(most=MAX_IDS),
    "return_text_in_logprobs": FLAG,
    "return_hidden_states": Flag(("last",)),
    "return_prompt_token_ids": FLAG,
    "return_routed_experts": FLAG,
    "log_metrics": Refused("all requests are counted", neutral=(True,)),
}
"""All that a client may send to /generate."""

ROUTES: Mapping[str, Mapping[str, Rule]] = {
    "/v1/completions": {
        **OPENAI,
        "prompt": Prompts(),
        "logprobs": LOGPROBS,
        "best_of": Whole(1, MAX_BATCH),
        "echo": FLAG,
        "suffix": Text(MAX_GRAMMAR_CHARS),
    },
    "/v1/chat/completions": {
        **OPENAI,
        **CHAT,
        "input_ids": Ids(MAX_COUNT, 1),
        "logprobs": FLAG,
        "top_logprobs": LOGPROBS,
        "max_completion_tokens": Whole(),
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
        "max_output_tokens": Whole(KEPT_BACK + 1),
        "top_logprobs": LOGPROBS,
        "text": Sized(),
        "metadata": Sized(),
    },
    "/v1/messages": {
        **EVERYWHERE,
        **{name: SAMPLING[name] for name in ("temperature", "top_p", "top_k")},
        "tools": CHAT["tools"],
        "max_tokens": Whole(1),
        "stop_sequences": Many(Text(), MAX_STOPS),
        "output_config": Sized(),
        "metadata": Sized(),
    },
    "/v1/embeddings": {**EVERYWHERE, "input": Prompts(), "dimensions": Whole(1), "encoding_format": Text()},
    "/v1/messages/count_tokens": {"tools": CHAT["tools"]},
    "/tokenize": {**CHAT, "add_special_tokens": FLAG, "continue_final_message": FLAG},
    "/detokenize": {"tokens": Prompts(), "skip_special_tokens": FLAG},
}  # fmt: skip
"""By path: field and row."""

CLOSED = frozenset({"/generate"})
"""Routes that take nothing beside their rows."""


def judge(route: str, body: Mapping[str, Any], facts: Facts, *, at_replica: bool = False) -> None:
    """Raises `Wrong` for the first field of a body that is not as its row says. `at_replica`: no gateway is asked, but
    one replica itself."""
    if nests_deeper(body, MAX_NESTING):
        raise Wrong("body", f"must not nest deeper than {MAX_NESTING}")
    rows = ROUTES[route]
    for name, value in body.items():
        rule = rows.get(name)
        if rule is None:
            if route in CLOSED and value is not None:
                raise Wrong(name, "is no field that clients may set here")
        elif value is not None:
            check(name, rule.rule if at_replica and isinstance(rule, Direct) else rule, value, facts)


def check(name: str, rule: Rule, value: Any, facts: Facts) -> None:
    """Raises `Wrong` if the field's value is not as its row says."""
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
    """How often at least, and at most."""
    if text[0] != "{":
        return int(text == "+"), 1 if text == "?" else inf
    first = int((least or "0")[:9])
    return first, first if most is None else inf if most == "" else max(first, int(most[:9]))


def _nesting(text: str) -> int:
    """How deep brackets stand within each other, those in quotes too."""
    deep = most = 0
    for one in re.findall(r"[\[\](){}]", text):
        deep += 1 if one in "[({" else -1
        most = max(most, deep)
    return most


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]} if schema else schema


def _is_scalar(value: Any) -> bool:
    if type(value) is int:
        return -MAX_INT64 - 1 <= value <= MAX_INT64
    return (
        value is None
        or isinstance(value, bool | float)
        or (isinstance(value, str) and len(value) <= MAX_TEXT_CHARS)
    )
