"""The table of settings: every one that a user can write, once, with its type, default, unit and meaning.

A class is a group of settings, or the settings of one program, which are those of its groups and some of its own.
`SECTIONS` are the programs. A field that stands in a group is the same setting in every program that has the group; a
program that declares it again says what is different there. Defaults that belong to a policy or a placement are that
one's own and are referred to.

Command lines, configuration files, SGLang's --fair arguments and docs/settings.md are made from this.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from sglang_fair.common.deadlines import DEFAULT_CLASSES
from sglang_fair.common.fields import RISKS
from sglang_fair.common.identity import DEFAULT_ORDER
from sglang_fair.core.payers import FIRST, RULES
from sglang_fair.core.steps import DEFAULT_STALL_MS
from sglang_fair.settings.setting import About
from sglang_fair.sim.gpus import GPUS
from sglang_fair.sim.shapes import SHAPES

STOCK_PREFIX = "sglang:"
"""Before a policy's name: SGLang's own policy of that name, without the fair scheduler."""


Port = Annotated[int, About(at_least=0, at_most=65535)]
FreePort = Annotated[int | None, About(metavar="PORT", unset="a free one", at_least=1, at_most=65535)]
Seconds = Annotated[float, About(unit="seconds", above=0)]
Bytes = Annotated[int, About(unit="bytes", above=0)]
OnOff = Annotated[str, About(choices=("on", "off"))]
PageSize = Annotated[int, About("Size of a block of a replica's cache.", unit="tokens", at_least=1)]
NoticeS = Annotated[
    float,
    About(
        "After SIGTERM /readyz says 503 for so long before the end begins, for a load balancer to notice. A second "
        "SIGTERM, and Ctrl-C, do not wait.",
        unit="seconds",
        metavar="S",
        at_least=0,
    ),
]
OutliveParent = Annotated[bool, About("Go on when the process that started this one dies.")]
FINISH_S = 5.0
SwapFinish = Annotated[
    float,
    About(
        "How long requests may run on at a replica that is to load another model. Then streams that can be continued "
        "elsewhere, or here later, are cut; others finish.",
        unit="seconds",
        metavar="S",
        at_least=0,
    ),
]
LogLevel = Annotated[
    str, About("Least important messages that are logged.", choices=("debug", "info", "warning", "error"))
]
LogFormat = Annotated[
    str,
    About(
        "How a gateway logs: text, or json: an object a line, and one for each request that has ended.",
        choices=("text", "json"),
    ),
]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What computes in a replica."""

    engine: Annotated[str, About(choices=("auto", "cuda", "cpu", "emulated"))] = "auto"
    """What computes. auto: as --device says; emulated: SGLang without a model, at the speed of --gpu."""
    model: Annotated[
        str,
        About(
            help="default (SmolLM2-135M-Instruct), tiny, bench, a folder, or a Hugging Face id; with --engine emulated "
            f"one of {', '.join(SHAPES)}."
        ),
    ] = "default"
    gpu: Annotated[str | None, About(help=f"The GPU to emulate: {', '.join(GPUS)}.")] = None
    cost_model: Annotated[str | None, About(metavar="FILE", unset="from published figures")] = None
    """The emulated GPU's speed as sglang-fair calibrate measured it."""
    time_scale: Annotated[float, About(metavar="FACTOR", above=0)] = 1.0
    """How many times as long an emulated step takes."""
    unsupported_sglang: bool = False
    """Serve with a release of SGLang that was not tested, if it has the functions that are hooked (sglang-fair
    doctor)."""


@dataclass(frozen=True, kw_only=True)
class Fields:
    """What a client may ask of an engine, besides what the model says."""

    max_logprobs: Annotated[
        int, About(unit="tokens", metavar="K", fair="max-logprobs", at_least=0, at_most=1000)
    ] = 20
    """Most logprobs of a token that a client may ask for."""
    allow_fields: Annotated[
        str,
        About(
            help="Fields of requests that are refused unless they stand here, comma separated, because a client can "
            f"stop a replica with them: {', '.join(RISKS)}.",
            metavar="NAMES",
            unset="none",
            fair="allow-fields",
        ),
    ] = ""


@dataclass(frozen=True, kw_only=True)
class Naming:
    """What clients and applications are called."""

    apps: Annotated[str | None, About(metavar="FILE", unset="any", fair="apps")] = None
    """Which applications each client may name, as JSON: client to list. Any other one counts as (other)."""
    identity: Annotated[
        str | None, About(metavar="PLACES", unset=",".join(DEFAULT_ORDER), fair="identity")
    ] = None
    """Where a client's name is looked for: headers, api-key, user; comma separated, the first match wins."""
    metrics_clients: Annotated[int, About(metavar="K", fair="metrics-clients", at_least=0)] = 20
    """Clients with a label of their own on /metrics, besides tenants: those that get most. The others are counted
    together."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What tokens cost, and clients' shares."""

    extend_weight: Annotated[
        float | None, About(unit="service units", metavar="W_E", unset="1", fair="extend-weight")
    ] = None
    """What a computed input token costs, with the linear cost."""
    output_weight: Annotated[
        float | None, About(unit="service units", metavar="W_Q", unset="2", fair="output-weight")
    ] = None
    """What an output token costs, with the linear cost."""
    client_weights: Annotated[
        Mapping[str, float], About(metavar="JSON", unset="1 for everybody", fair="client-weights")
    ] = field(default_factory=dict)
    """Shares per client, for example {"gold": 2}."""


@dataclass(frozen=True, kw_only=True)
class Fairness(Naming, Prices, Fields):
    """Who is served first, and what service costs: a replica's scheduler."""

    policy: Annotated[str, About(registry="sglang_fair.core:POLICIES", prefix=STOCK_PREFIX)] = "dlpm"
    """Scheduler in each replica; sglang:NAME for SGLang's own."""
    quantum: Annotated[
        float | None,
        About(unit="service units", unset="2000, and 2 average calls for wsc-dlpm", fair="quantum"),
    ] = None
    """Quantum per client of DLPM (Q^u), slo and DRR; of wsc-dlpm in average calls."""
    policy_options: Annotated[
        str, About(metavar="KEY=VALUE,...", unset="the policy's own", fair="options", pairs=True)
    ] = ""
    """The policy's other options, as patience=64 for dlpm; see docs/policies.md."""
    stall_ms: Annotated[float, About(unit="milliseconds", fair="stall-ms", at_least=0)] = DEFAULT_STALL_MS
    """Longest step for prompts while other clients have requests; those that run keep their share of the time. 0:
    prompts first, as SGLang does."""
    mixed_chunk: Annotated[
        str | None,
        About(choices=("on", "off"), unset="on, and off with plain PyTorch on a CPU", fair="mixed-chunk"),
    ] = None
    """Where there is a stall bound, a step for prompts has a token for each running request too (SGLang's
    --enable-mixed-chunk), unless another of SGLang's options excludes that. off: steps of both kinds take turns."""
    target_tpot_ms: Annotated[
        float | None,
        About(
            unit="milliseconds",
            unset="what a client's share of the engine would take",
            fair="target-tpot-ms",
            at_least=0,
        ),
    ] = None
    """Time of an output token of those that run: while it would be longer, requests of clients above their share of
    what runs wait, if others run. 0: no target."""
    payer: Annotated[
        str,
        About(
            help="Who pays for a prefix that clients share: whoever computed it, or all its users, in equal parts or "
            f"per use ({', '.join(RULES)}).",
            metavar="RULE",
            fair="payer",
        ),
    ] = FIRST
    cost: Annotated[str | None, About(metavar="COST", unset="linear", fair="cost")] = None
    """What service costs: linear, profiled, quadratic:d=1000 or tiered:threshold=4096."""
    cache_share: Annotated[str, About(choices=("on", "off"), fair="cache-share")] = "off"
    """Evict first what belongs to clients above their share of a replica's cache. Where SGLang's cache does not allow
    that, and for policies without shares, a replica evicts as SGLang does."""
    hang_timeout_s: Annotated[float, About(unit="seconds", fair="hang-timeout", at_least=0)] = 60.0
    """A replica of whose scheduler nothing has run for so long ends, after its stacks are in the log, to be started
    again. 0: never."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who may ask a gateway, and where operators ask it."""

    tenants: Annotated[str | None, About(metavar="FILE", unset="everybody")] = None
    """Who may ask, with which keys, and for how much; read again when it changes (sglang-fair tenants)."""
    trusted_proxies: Annotated[
        str | None, About(metavar="NETWORKS", unset="none with --tenants, else all")
    ] = None
    """Networks of proxies whose headers name the client, as 10.0.0.0/8,fd00::/8; others are ignored."""
    limit_store: Annotated[str, About(metavar="ADDRESS")] = "memory"
    """Where tenants' limits are counted: memory, each process for itself, or redis://HOST:PORT/DB."""
    admin_host: str = "127.0.0.1"
    """Address for operators, with --admin-port."""
    admin_port: Annotated[
        int | None,
        About(metavar="PORT", unset="none with --tenants, else that of clients", at_least=1, at_most=65535),
    ] = None
    """Port for operators: /status, /workers and /metrics, with the key in SGLANG_FAIR_ADMIN_KEY."""


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """What a gateway promises."""

    slo_classes: Annotated[Mapping[str, float], About(metavar="JSON")] = field(
        default_factory=lambda: dict(DEFAULT_CLASSES)
    )
    """Seconds to the first token by class, which a request names in x-fair-class; the first is that of requests
    that name none."""


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """Spans of requests, for OpenTelemetry."""

    otlp_traces_endpoint: Annotated[str | None, About(metavar="URL", unset="no spans")] = None
    """A collector of OpenTelemetry, which is sent spans of requests by OTLP over HTTP; OpenTelemetry's own
    variables, OTEL_…, hold too."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What is kept of batches beside the store."""

    batch_files: Annotated[
        str | None, About(metavar="DIR", unset="files in the folder of --batches; PostgreSQL needs it")
    ] = None
    """Folder of the files that clients upload, which all gateways and feeders share."""
    batch_keep_days: Annotated[float, About(unit="days", above=0)] = 30.0
    """Files, and batches that are over with their results, are kept so long."""


@dataclass(frozen=True, kw_only=True)
class Files(Kept):
    """Where a gateway keeps files and batches, and how large they may be."""

    batches: Annotated[str | None, About(metavar="DIR|postgresql://USER@HOST/NAME", unset="no batches")] = (
        None
    )
    """Where files and batches (/v1/files, /v1/batches) are kept, whatever dies: a folder on a disk of this machine,
    or PostgreSQL for gateways and feeders on several. All of them have the same one."""
    batch_file_bytes: Bytes = 1 << 30
    """Largest file of a batch's requests."""
    batch_client_bytes: Bytes = 16 << 30
    """All files together that a client has uploaded and that are kept."""


@dataclass(frozen=True, kw_only=True)
class Exposed:
    """Whether it may be reached unprotected."""

    insecure: bool = False
    """Listen beyond this machine without TLS or keys: another layer protects the network."""


@dataclass(frozen=True, kw_only=True)
class Keyed:
    """Keys for ZMQ."""

    keys: Annotated[str | None, About(metavar="DIR", unset="ZMQ is open")] = None
    """Folder with the keys of router, gateways and replicas, which sglang-fair keys makes: they then talk to each
    other over ZMQ encrypted, and to nobody else."""


@dataclass(frozen=True, kw_only=True)
class Protection(Keyed, Exposed):
    """What protects it where others reach it."""


@dataclass(frozen=True, kw_only=True)
class Authorities:
    """How it knows certificates of replicas."""

    replica_ca: Annotated[str | None, About(metavar="FILE", unset="the system's")] = None
    """Authorities that sign the certificates of replicas with https:// addresses, in PEM."""


@dataclass(frozen=True, kw_only=True)
class Certified(Exposed):
    """How it is served."""

    tls_cert: Annotated[str | None, About(metavar="FILE", unset="http")] = None
    """Certificate with its chain, in PEM: whoever asks over HTTP is served over https."""
    tls_key: Annotated[str | None, About(metavar="FILE", unset="in the same file")] = None
    """Its private key, in PEM, without a password."""
    names: Annotated[str, About(metavar="NAME,...", unset="none")] = ""
    """Public DNS names by which it may be asked over HTTP where no key is asked for, comma separated. Addresses,
    names without a dot and those below .localhost, .internal, .svc, .cluster.local go without."""


@dataclass(frozen=True, kw_only=True)
class Tls(Authorities, Certified, Protection):
    """TLS, towards those who ask and towards replicas."""


@dataclass(frozen=True, kw_only=True)
class Trust:
    """How it knows the gateway's certificate."""

    gateway_ca: Annotated[str | None, About(metavar="FILE", unset="the system's")] = None
    """Authorities that sign the certificate of a gateway with an https:// address, in PEM."""
    gateway_cert: Annotated[str | None, About(metavar="FILE", unset="one that an authority has signed")] = (
        None
    )
    """The gateway's own certificate, in PEM, in place of authorities: it must show this one, by whatever name it is
    asked."""


@dataclass(frozen=True, kw_only=True)
class Feeding:
    """How much of batches is accepted, and sent to the replicas at a time."""

    batch_items: Annotated[int, About(unit="requests", at_least=1, at_most=(1 << 24) - 1)] = 500_000
    """Most requests of one batch."""
    batch_in_flight: Annotated[int, About(unit="requests", at_least=1, at_most=10_000)] = 1024
    """Most requests of batches for one model that a feeder has sent and that are not answered: enough for all
    replicas of the model. It begins with few, and takes fewer when it is refused."""
    batch_token_ms: Annotated[float | None, About(unit="milliseconds", unset="any time", at_least=1)] = None
    """How long a token of a batch's answers may take: a feeder sends as many requests as leave it that. Interactive
    requests get theirs in the same steps."""


@dataclass(frozen=True, kw_only=True)
class Throttling:
    """Which calls the router refuses."""

    throttle: Annotated[str, About(registry="router.throttling:KINDS")] = "none"
    """Which calls are refused. oit: first calls of interactions beyond a limit, while all replicas are overloaded;
    rpm: all calls beyond it, always."""
    limits: Annotated[str | None, About(metavar="FILE", unset="none but those of the tenants' file")] = None
    """Calls a minute of one client, as JSON: {"user": 60, "apps": {"chat": 30, "*": 60}} (sglang-fair limits makes
    one from records); POST /limits replaces it."""
    quarantine_s: Seconds = 600.0
    """A client of which a request has ended two replicas is served one at a time for so long."""


@dataclass(frozen=True, kw_only=True)
class Cluster(
    Feeding,
    Files,
    Tracing,
    Access,
    Deadlines,
    Throttling,
    Certified,
    Authorities,
    Protection,
    Fairness,
    Engine,
):
    """Start replicas, router and gateway on this machine, and keep them running until Ctrl-C."""

    keys: Annotated[str | None, About(metavar="DIR", unset="ZMQ is open on this machine")] = None
    """Folder with the keys of router, gateway and replicas, made there if it has none: they then talk to each other
    over ZMQ encrypted, and to nobody else."""
    replicas: Annotated[int, About(at_least=1)] = 2
    """SGLang servers to start; they are dealt out in turn to several --models."""
    models: Annotated[str, About(metavar="NAME=MODEL[:N],...", unset="--model alone", pairs=True)] = ""
    """Several models in place of --model, by the names that clients use: each is what --model could be, and :N
    behind it so many replicas of it."""
    swap: Annotated[str, About(metavar="WHICH")] = "none"
    """Which replicas can load which of --models in turn, each with an agent beside it: none, all, or as
    r0=a+b,r1=b+c. Models that share a replica must be alike in shape and tokenizer."""
    swap_finish_s: SwapFinish = FINISH_S
    device: Annotated[str, About(choices=("auto", "cpu", "cuda"))] = "auto"
    """cpu, cuda (a GPU for each replica), or auto."""
    placement: Annotated[
        str | None,
        About(
            registry="router.placement:PLACEMENTS",
            unset="deadline with --swap or --slo-classes, else d2lpm-queue",
        ),
    ] = None
    """Which replica serves a request."""
    worker_quantum: Annotated[
        float | None, About(unit="service units", unset="the placement's own", above=0)
    ] = None
    """D2LPM's quantum per client and replica."""
    placement_options: Annotated[
        str, About(metavar="KEY=VALUE,...", unset="the placement's own", pairs=True)
    ] = ""
    """The placement's other parameters, as cache_threshold=0.3 for d2lpm; see docs/policies.md."""
    scale_up: Annotated[int, About(metavar="N", at_least=0)] = 0
    """With placement deadline or qlm: so many more replicas are started, at most, while it says for a while that
    deadlines cannot be met without. 0: none."""
    ray: Annotated[str | None, About(metavar="ADDRESS", unset="replicas run on this machine")] = None
    """Run the replicas on the nodes of this Ray cluster, which this machine is one of: auto, or HOST:PORT. All else
    runs here."""
    ray_resources: Annotated[
        str, About(metavar="NAME=AMOUNT,...", unset="CPU=1, and a GPU for each of its ranks", pairs=True)
    ] = ""
    """What Ray keeps free for a replica on its node, as CPU=8,memory=64e9,accelerator_type:H100=0.001."""
    ray_wait_s: Seconds = 60.0
    """Longest wait for Ray to have room for all replicas."""
    host: str = "127.0.0.1"
    """Address that the gateway listens on; 0.0.0.0 for all. The rest stays local."""
    port: Port = 8000
    """Port of the gateway; 0 takes a free one."""
    gateway_workers: Annotated[int, About(at_least=1)] = 1
    """Processes of the gateway."""
    router_http_port: FreePort = None
    """Port of the router's /healthz, /readyz and /metrics, on this machine alone."""
    gateway_options: Annotated[str, About(metavar="KEY=VALUE,...", unset="the gateway's own", pairs=True)] = (
        ""
    )
    """The gateway's limits, as max-in-flight=1024,body-timeout=60: each setting of the gateway that is a limit."""
    dashboard: OnOff = "on"
    """The page for operators, in a process of its own (sglang-fair dashboard)."""
    dashboard_port: FreePort = None
    """Its port."""
    json: bool = False
    """Print one line of JSON with the addresses; all else goes to stderr."""
    quiet_replicas: bool = False
    """Of the replicas' output show only warnings and errors."""
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    start_timeout_s: Annotated[float | None, About(unit="seconds", unset="by machine", above=0)] = None
    """Longest wait for a process to be ready."""
    extra: Annotated[tuple[str, ...], About(behind_dashes="sglang_arguments")] = ()
    """Arguments for each replica's SGLang server, as --tp 2."""


@dataclass(frozen=True, kw_only=True)
class Replica(Protection, Fairness, Engine):
    """Run one SGLang server with the fair scheduler, on a GPU, on a CPU with plain PyTorch, or on an emulated GPU."""

    device: Annotated[str, About(choices=("cpu", "cuda"))] = "cpu"
    """Where it computes."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 30000
    """Port to listen on."""
    name: str = "r0"
    """The replica's name in logs."""
    served_name: Annotated[str | None, About(metavar="NAME", unset="the model's own name")] = None
    """What the model is called."""
    kv_port: Annotated[int | None, About(metavar="PORT", unset="no events")] = None
    """Publish KV events on this port and replay them on the next one."""
    page_size: PageSize = 16
    load_port: Annotated[int | None, About(metavar="PORT", unset="not published")] = None
    """Publish on this port, at the address of the KV events, how full the KV pool is and how much waits; needs
    --kv-port."""
    kv_tokens: Annotated[
        int | None, About(unit="tokens", unset="SGLang's choice on a GPU, 24576 on a CPU")
    ] = None
    """Size of the KV pool."""
    max_running: Annotated[
        int | None, About(unit="requests", unset="SGLang's choice on a GPU, 64 on a CPU")
    ] = None
    """Most requests in a batch."""
    extra: Annotated[tuple[str, ...], About(behind_dashes="sglang_arguments")] = ()
    """SGLang's own arguments; they win over ours."""


@dataclass(frozen=True, kw_only=True)
class Router(Tls, Throttling, Prices):
    """Run the router alone: it decides which replica serves each request. Gateways and the cluster connect to it."""

    bind: Annotated[str, About(metavar="tcp://HOST:PORT")]
    """Where peers connect; port * takes a free one."""
    placement: Annotated[str, About(registry="router.placement:PLACEMENTS")] = "d2lpm-queue"
    """Which replica serves a request."""
    worker: Annotated[tuple[str, ...], About(metavar="SPEC")] = ()
    """A replica: NAME,http=URL[,kv=ADDRESS][,replay=ADDRESS][,load=ADDRESS][,capacity=NUMBER][,model=NAME].
    Repeatable. Where one has a model=, all must. model=A|B: it can load these, and an agent says which it has."""
    replicas_file: Annotated[str | None, About(metavar="FILE", unset="none")] = None
    """Further replicas, one in a line as --worker has it; read again when it changes. It need not be there yet."""
    replicas_dns: Annotated[tuple[str, ...], About(metavar="SPEC")] = ()
    """Further replicas, one at each address of a DNS name:
    NAME:PORT[,scheme=https][,kv=PORT][,replay=PORT][,load=PORT][,capacity=NUMBER][,model=NAME]. Repeatable."""
    replicas_every_s: Seconds = 5.0
    """How often DNS is asked, with --replicas-dns."""
    worker_quantum: Annotated[
        float | None, About(unit="service units", above=0, unset="the placement's own")
    ] = None
    """D2LPM's credit per client and replica."""
    quantum: Annotated[float | None, About(unit="service units", above=0, unset="the placement's own")] = None
    """centralized_dlpm's credit per client at all replicas."""
    parameter: Annotated[tuple[str, ...], About(metavar="NAME=VALUE")] = ()
    """Any other parameter of the placement. Repeatable."""
    page_size: PageSize = 16
    swap_finish_s: SwapFinish = FINISH_S
    max_tree_tokens: Annotated[
        int | None,
        About(
            unit="tokens", metavar="N", at_least=1, unset="what the replicas can cache, at least 8 million"
        ),
    ] = None
    """Most tokens that the prefix tree holds."""
    peer_timeout_s: Seconds = 10.0
    """A gateway that is silent for so long is dead, and what it had in flight is over."""
    http_host: str = "127.0.0.1"
    """Address of the router's HTTP server, with --http-port."""
    http_port: Annotated[int | None, About(metavar="PORT", unset="none", at_least=1, at_most=65535)] = None
    """Port of an HTTP server with /healthz, /readyz and /metrics."""
    notice_s: NoticeS = 5.0
    log_level: LogLevel = "info"
    outlive_parent: OutliveParent = False


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds a gateway. Counts are of one process. What clients share is shared as `router.shared_limit` says."""

    max_in_flight: Annotated[int, About(unit="requests", above=0)] = 4096
    """Requests at a time, half of them for one client alone; more get 429."""
    max_connections: Annotated[int, About(unit="connections", above=0)] = 8192
    """Clients' connections, half of them for one address alone; more get 429."""
    max_body_bytes: Bytes = 16 << 20
    """Largest request body."""
    max_held_bytes: Bytes = 512 << 20
    """All bodies in flight together, shared by the clients; more get 429."""
    max_prompt_tokens: Annotated[int, About(unit="tokens", above=0)] = 1 << 17
    """All prompts of one request together. A text counts a quarter of its characters, and twice the context is
    always allowed: a replica's HTTP process reads them in one go and answers nobody meanwhile."""
    max_context_tokens: Annotated[int, About(unit="tokens", at_least=0)] = 0
    """Longest prompt; 0: as the replicas say."""
    tries: Annotated[int, About(above=0)] = 3
    """Replicas to try before a request fails."""
    connect_timeout_s: Seconds = 2.0
    """Longest wait for a connection to a replica."""
    head_timeout_s: Seconds = 15.0
    """A connection without a whole request head for so long is closed."""
    body_timeout_s: Seconds = 300.0
    """Longest wait for a whole request body."""
    idle_timeout_s: Seconds = 600.0
    """Longest silence of a replica, its queue included, and of a client that reads too slowly. A request of a class
    may wait longer in that queue, by what its class has beyond the first one."""
    health_timeout_s: Seconds = 10.0
    """A replica that sends nothing for so long is given up."""
    progress_interval_s: Annotated[float, About(unit="seconds", at_least=0)] = 1.0
    """How often the router is sent what a stream has put out; 0 for never."""


@dataclass(frozen=True, kw_only=True)
class Front(Tls, Tracing, Access, Deadlines, Naming, Fields, Limits):
    """What decides about requests before replicas see them."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    router: Annotated[tuple[str, ...], About(metavar="tcp://HOST:PORT")]
    """A router's address. Repeatable: each client keeps to one of them while it answers. All gateways must name the
    same ones."""
    model_name: str
    """The served model, or the first of several; clients may also say "default"."""
    tokenizer: Annotated[str, About(metavar="DIR")]
    """Folder with tokenizer.json."""
    more_models: Annotated[str, About(metavar="NAME=DIR,...", unset="none", pairs=True)] = ""
    """Further models that are served, each with the folder of its tokenizer."""
    router_timeout_s: Seconds = 5.0
    """Longest wait for the router, but for requests that it holds."""
    notice_s: NoticeS = 5.0
    drain_s: Annotated[int, About(unit="seconds", at_least=0)] = 30
    """Time for open requests after SIGTERM."""
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    outlive_parent: OutliveParent = False


@dataclass(frozen=True, kw_only=True)
class Gateway(Files, Front):
    """Run a gateway alone: the OpenAI API and /generate in front of the replicas; the router says which one."""

    port: Port
    """Port to listen on."""
    workers: Annotated[int, About(metavar="N", at_least=1)] = 1
    """Processes."""


@dataclass(frozen=True, kw_only=True)
class Picker(Front):
    """Run an endpoint picker: a gateway of another maker asks it, by the protocol of the Gateway API Inference
    Extension (Envoy's ext_proc), where each request goes."""

    port: Port = 9002
    """Port to listen on, for gRPC."""
    admin_port: Annotated[int | None, About(metavar="PORT", unset="none", at_least=1, at_most=65535)] = None
    """Port for operators: /status, /workers and /metrics, with the key in SGLANG_FAIR_ADMIN_KEY."""
    tls_cert: Annotated[str | None, About(metavar="FILE", unset="made and signed by itself at its start")] = (
        None
    )
    """Certificate with its chain, in PEM, that gateways and operators are shown; read again when it changes. The one
    that it makes by itself is for gateways alone."""
    plaintext: bool = False
    """gRPC without TLS: gateway and picker are on one machine, or another layer protects the network."""
    tries: Annotated[int, About(unit="replicas", above=0)] = 3
    """Most replicas named to the gateway for a request, the chosen one first. What it cannot reach it may try at the
    next, if it was told to retry. 1: for gateways that take one address only."""
    conformance: bool = False
    """Obey the test headers of the extension's conformance suite, by which a client names the replicas that it wants.
    Not for service."""


@dataclass(frozen=True, kw_only=True)
class Feeder(Trust, Kept, Feeding, Deadlines, Fields):
    """Have the requests of batches answered, as what they are: requests of the clients whose batches they are. Any
    number of feeders may run."""

    batches: Annotated[str, About(metavar="DIR|postgresql://USER@HOST/NAME")]
    """Where gateways keep files and batches."""
    gateway: Annotated[str, About(metavar="URL")] = "http://127.0.0.1:8000"
    """A gateway's address, which has the same SGLANG_FAIR_FEEDER_KEY."""
    batch_line_bytes: Bytes = 16 << 20
    """Longest line of a batch's file."""
    log_level: LogLevel = "info"
    outlive_parent: OutliveParent = False


@dataclass(frozen=True, kw_only=True)
class Dashboard(Trust, Authorities, Certified):
    """Serve the page for operators: what each client got, who waits and why. One process for any number of viewers."""

    gateway: Annotated[str, About(metavar="URL")] = "http://127.0.0.1:8000"
    """The gateway's address for operators: that of --admin-port, if it has one."""
    host: str = "127.0.0.1"
    """Address to listen on; another than this machine's own needs SGLANG_FAIR_ADMIN_KEY, and TLS or --insecure."""
    port: Annotated[int, About(at_least=1, at_most=65535)] = 8002
    """Port to listen on."""
    every_s: Annotated[float, About(unit="seconds", at_least=0.2)] = 2.0
    """Time between two looks at the cluster."""
    outlive_parent: OutliveParent = False


@dataclass(frozen=True, kw_only=True)
class AgentSettings(Authorities, Keyed):
    """Have one replica load the models that the router names, one at a time. A cluster with --swap starts agents."""

    worker: Annotated[str, About(metavar="NAME")]
    """What the router calls the replica."""
    replica: Annotated[str, About(metavar="URL")]
    """The replica's address."""
    router: Annotated[str, About(metavar="tcp://HOST:PORT")]
    """The router's address."""
    models: Annotated[str, About(metavar="NAME=FOLDER,...", pairs=True)]
    """The models that the replica can load, by the names that clients use, each a folder with a checkpoint. The
    others must be like the first in shape and tokenizer."""
    outlive_parent: OutliveParent = False


SECTIONS: Mapping[str, type] = {
    "cluster": Cluster,
    "replica": Replica,
    "router": Router,
    "gateway": Gateway,
    "picker": Picker,
    "dashboard": Dashboard,
    "agent": AgentSettings,
    "feeder": Feeder,
}
"""The programs, by command and by section of a configuration file."""

VARIABLES: Mapping[str, str] = {
    "SGLANG_FAIR_POLICY": "The policy, where no --schedule-policy can be given to SGLang; the names are the same.",
    "SGLANG_FAIR_ADMIN_KEY": "The bearer token of the gateway's operators, which also opens the page; unset: with "
    "--tenants nobody is one, else /workers and the page are for this machine only.",
    "SGLANG_FAIR_REPLICA_KEY": "SGLang's --api-key, which replicas that we start ask for and gateways send; unset: a "
    "cluster with --tenants makes one up, others have none.",
    "SGLANG_FAIR_FEEDER_KEY": "With which the feeder asks gateways on behalf of the clients whose batches it runs; "
    "unset: a cluster with --batches makes one up, others have none, and nothing of their batches runs.",
    "SGLANG_FAIR_KEYS": "Folder of the keys with which KV events are published, where SGLang is started without "
    "sglang-fair replica; needs publisher fair-curve in --kv-events-config.",
    "SGLANG_FAIR_CACHE": "Folder in which prepared models are kept; by default sglang-fair in the user's cache folder.",
    "SGLANG_FAIR_DISABLE": "1: SGLang serves without the overlay.",
    "SGLANG_FAIR_UNSUPPORTED_SGLANG": "1: --unsupported-sglang, where SGLang is started without sglang-fair replica.",
}
"""Environment variables that are no option of a command."""
