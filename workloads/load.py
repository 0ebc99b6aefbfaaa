"""The clients of a load, as a command line asks for them.

A workload is a name: `single` (fixed lengths), `chat`, a scenario of `clients` (`tot-s1`, `judge-s2`, ...), in
which clients whose names begin with `bad` misbehave, or `trace`. Clients are either a number, or words such as
`a:rate=2,weight=3`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from sglang_fair.common.pairs import split_pairs, typed
from sglang_fair.settings.commands import Option, choices
from workloads.arrivals import GammaArrivals
from workloads.clients import (
    SCENARIOS,
    SMALL,
    Client,
    Scale,
    Texts,
    chat_client,
    client_facts,
    fixed_length_client,
)
from workloads.programs import Codec, TextCodec, TokenCodec
from workloads.programs.prose import ARTICLES, WORD_PROBLEMS, Source, given
from workloads.traces import Trace, find_trace, mix, servegen

SINGLE, CHAT, TRACE = "single", "chat", "trace"
WORKLOADS: tuple[str, ...] = (SINGLE, CHAT, *SCENARIOS, TRACE)
MISBEHAVES = "bad"


@dataclass(frozen=True, slots=True)
class ClientSpec:
    """One client as the command line asks for it. Fields that are None are as for all clients."""

    name: str
    rate: float | None = None
    """Programs a second, open loop."""
    concurrency: int | None = None
    """Programs under way, closed loop."""
    weight: float = 1.0
    """Its share of service, which the server is supposed to know as well."""
    input: int | None = None
    output: int | None = None
    prefix: int | None = None
    """Tokens of the input that all its requests share. The last three are for the workload `single` alone."""

    def __post_init__(self) -> None:
        if self.rate is not None and self.concurrency is not None:
            raise ValueError(
                f"client {self.name}: has a rate (open loop) or a concurrency (closed loop), not both"
            )
        _check_positive(f"client {self.name}: ", self, "rate", "concurrency", "weight", "input", "output")

    @classmethod
    def parse(cls, word: str) -> "ClientSpec":
        """The client of `NAME` or `NAME:KEY=VALUE,...`. Raises ValueError."""
        name, _, written = word.partition(":")
        if not name:
            raise ValueError(f"a client needs a name: {word!r}")
        kinds = {field.name: int if "int" in str(field.type) else float for field in fields(cls)[1:]}
        found: dict[str, Any] = {}
        for key, value in split_pairs(written, f"client {name}: option"):
            if key not in kinds:
                raise ValueError(f"client {name}: unknown key {key!r}; there are {', '.join(kinds)}")
            found[key] = typed(value, kinds[key], f"client {name}: {key}")
        return cls(name, **found)


def parse_clients(words: Sequence[str], workload: str) -> tuple[ClientSpec, ...]:
    """The clients that are asked for. A number N stands for N equal clients, and in a scenario for one more, which
    misbehaves. Raises ValueError."""
    if len(words) == 1 and words[0].isdecimal():
        count = int(words[0])
        stem = "good" if workload in SCENARIOS else "client"
        bad = (MISBEHAVES,) if workload in SCENARIOS else ()
        words = (*(f"{stem}-{place}" for place in range(count)), *bad)
    specs = tuple(ClientSpec.parse(word) for word in words)
    names = [spec.name for spec in specs]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"clients need names of their own, not {', '.join(names) or 'none'}")
    return specs


LoadOption = partial(Option, rich_help_panel="The load")
RunOption = partial(Option, rich_help_panel="The run")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What a command line says of a load. Raises ValueError for what does not go together."""

    workload: Annotated[str, choices(WORKLOADS, "What the clients send.", rich_help_panel="The load")] = (
        SINGLE
    )
    clients: Annotated[
        list[str] | None,
        LoadOption(
            metavar="CLIENT...",
            help="A number, or NAME[:KEY=VALUE,...] with rate, concurrency, weight, input, output, prefix; "
            "in a scenario names that begin with bad misbehave. [default: 4]",
        ),
    ] = None
    rate: Annotated[
        float | None,
        LoadOption(metavar="R", help="Open loop: programs a second of each client; of a trace, of all."),
    ] = None
    concurrency: Annotated[
        int | None, LoadOption(metavar="N", help="Closed loop: programs under way of each client.")
    ] = None
    cv: Annotated[float, LoadOption(help="Variation of the gaps between programs; 0: even.")] = 1.0
    input: Annotated[int, LoadOption(metavar="TOKENS", help=f"Of {SINGLE}.")] = 256
    output: Annotated[int, LoadOption(metavar="TOKENS", help=f"Of {SINGLE}.")] = 64
    prefix: Annotated[
        int, LoadOption(metavar="TOKENS", help=f"Of {SINGLE}: shared by a client's requests.")
    ] = 0
    paper_scale: Annotated[
        bool,
        LoadOption("--paper-scale", help="Scenarios with DLPM's lengths; the default suits two cores."),
    ] = False
    questions: Annotated[
        Path | None,
        LoadOption(metavar="FILE", help="Of tot: JSON lines with `question`. [default: made from the seed]"),
    ] = None
    articles: Annotated[
        Path | None,
        LoadOption(
            metavar="PATH", help="Of judge: a folder of *.txt, or a file. [default: made from the seed]"
        ),
    ] = None
    trace: Annotated[
        str | None,
        LoadOption(
            metavar="FILE", help="arena or mooncake JSON lines, a ServeGen folder, or one of these names."
        ),
    ] = None
    tokenizer: Annotated[
        Path | None,
        LoadOption(metavar="DIR", help="Send token ids of exact lengths; else text, 4 letters a token."),
    ] = None
    seed: Annotated[str, RunOption(help="Of the programs and their arrivals.")] = "0"

    def __post_init__(self) -> None:
        app = SCENARIOS[self.workload].app if self.workload in SCENARIOS else ""
        if (self.workload == TRACE) != (self.trace is not None):
            raise ValueError("--workload trace and --trace FILE go together")
        if (self.questions and app != "tot") or (self.articles and app != "judge"):
            raise ValueError("--questions are for tot-s1 and tot-s2, --articles for judge-s1 and judge-s2")
        if self.rate is not None and self.concurrency is not None:
            raise ValueError("a load is open loop (a rate) or closed loop (a concurrency), not both")
        _check_positive("", self, "rate", "concurrency", "input", "output")

    @property
    def scale(self) -> Scale:
        return Scale() if self.paper_scale else SMALL

    def load(self, codec: Codec, until_s: float) -> "ClientLoad":
        if self.trace is not None:
            specs = parse_clients(self.clients, TRACE) if self.clients else ()
            return load_trace(read_trace(self.trace, self, until_s), specs, self, codec)
        specs = parse_clients(self.clients or ["4"], self.workload)
        texts = Texts(
            read_questions(self.questions) if self.questions else WORD_PROBLEMS,
            read_articles(self.articles) if self.articles else ARTICLES,
        )
        clients = [_client(spec, self, codec, texts) for spec in specs]
        at_once = {
            spec.name: spec.concurrency or self.concurrency or 1
            for spec in specs
            if spec.concurrency is not None or (spec.rate is None and self.concurrency is not None)
        }
        return _load(clients, at_once, specs)

    def to_json(self) -> dict[str, Any]:
        """What decides the clients' traffic; the scale only where it does."""
        names = ("workload", "rate", "concurrency", "cv", "input", "output", "prefix", "seed")
        scale = {"scale": asdict(self.scale)} if self.workload in SCENARIOS else {}
        return {name: getattr(self, name) for name in names} | scale


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """Clients, those of the closed loop with their concurrency, and the shares that all should have."""

    clients: tuple[Client, ...]
    at_once: Mapping[str, int]
    weights: Mapping[str, float]
    asked: Mapping[str, Mapping[str, Any]]
    """What was asked for, by client, for the manifest of a run."""


def load_trace(trace: Trace, specs: Sequence[ClientSpec], options: LoadOptions, codec: Codec) -> ClientLoad:
    """The load of a trace. `specs` may give weights and nothing else.

    Raises ValueError for other fields, and for clients that the trace does not have.
    """
    if options.concurrency is not None:
        raise ValueError("a trace has times of its own: it is open loop")
    clients = trace.clients(codec, seed=options.seed)
    names = {client.name for client in clients}
    for spec in specs:
        if spec != ClientSpec(spec.name, weight=spec.weight):
            raise ValueError(f"client {spec.name}: in a trace a client has a weight and nothing else")
        if spec.name not in names:
            raise ValueError(f"client {spec.name}: is not in the trace")
    return _load(clients, {}, specs)


def read_trace(source: str, options: LoadOptions, until_s: float) -> Trace:
    """The first `until_s` seconds of a trace, at the options' rate if it has one.

    `source` is a file in the format of `arena` or `mooncake`, a folder of ServeGen's profiles, or one of these
    three names for a stand-in. Raises ValueError and OSError.
    """
    path, seed = Path(source), options.seed
    if source == "servegen" or path.is_dir():
        if options.rate is None:
            raise ValueError("ServeGen's profiles tell shares, not how much is sent in all: they need a rate")
        profiles = servegen(None if source == "servegen" else path, seed=seed)
        return mix(profiles, clients=len(profiles), rate_per_s=options.rate, duration_s=until_s, seed=seed)
    trace = find_trace(source, seed=seed)
    return (trace if options.rate is None else trace.at_rate(options.rate)).between(0.0, until_s)


def _check_positive(whose: str, holder: object, *names: str) -> None:
    """Raises ValueError for one of these fields that is neither None nor a positive number."""
    for name in names:
        value = getattr(holder, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{whose}{name} must be positive, not {value!r}")


def _load(clients: Sequence[Client], at_once: Mapping[str, int], specs: Sequence[ClientSpec]) -> ClientLoad:
    weights = {client.name: 1.0 for client in clients} | {spec.name: spec.weight for spec in specs}
    asked = client_facts(clients)
    for name, facts in asked.items():
        facts |= {"weight": weights[name], "concurrency": at_once.get(name)}
        facts["rate_per_s"] = None if name in at_once else facts["rate_per_s"]
    return ClientLoad(tuple(clients), at_once, weights, asked)


def _client(spec: ClientSpec, options: LoadOptions, codec: Codec, texts: Texts) -> Client:
    """Of any workload but a trace. Raises ValueError for one without rate and concurrency, or with lengths that its
    workload does not take."""
    if spec.rate is spec.concurrency is options.rate is options.concurrency is None:
        raise ValueError(f"client {spec.name}: needs a rate (open loop) or a concurrency (closed loop)")
    if options.workload != SINGLE and (spec.input, spec.output, spec.prefix) != (None, None, None):
        raise ValueError(f"client {spec.name}: input, output and prefix are lengths of the workload {SINGLE}")
    arrivals = GammaArrivals(spec.rate or options.rate or 1.0, options.cv)
    if options.workload == CHAT:
        return chat_client(spec.name, arrivals=arrivals, codec=codec, seed=options.seed)
    if options.workload == SINGLE:
        return fixed_length_client(
            spec.name,
            input_tokens=spec.input or options.input,
            output_tokens=spec.output or options.output,
            prefix_tokens=options.prefix if spec.prefix is None else spec.prefix,
            arrivals=arrivals,
            codec=codec,
            seed=options.seed,
            app=SINGLE,
        )
    made = SCENARIOS[options.workload].clients(
        scale=replace(options.scale, good_clients=1),
        rate_per_s=arrivals.rate_per_s,
        codec=codec,
        cv=options.cv,
        seed=f"{options.seed}.{spec.name}",
        texts=texts,
    )
    client = made[-1] if spec.name.startswith(MISBEHAVES) else made[0]
    return replace(client, name=spec.name, arrivals=client.arrivals if spec.rate is None else arrivals)


# ---- files


def read_questions(path: Path) -> Source:
    """The `question` of every line of JSON, as GSM8K has it. Raises ValueError with file and line number."""
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


def read_articles(path: Path) -> Source:
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


def _given(texts: list[str], path: Path) -> Source:
    if not texts:
        raise ValueError(f"{path}: holds no text")
    return given(texts)
