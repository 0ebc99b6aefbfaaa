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

ON_OFF = ("on", "off")

METRICS_CLIENTS = 20

HANG_TIMEOUT_S = 60.0

LOG_LEVELS = ("debug", "info", "warning", "error")

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
LogLevel = Annotated[str, About("Least important messages that are logged.", choices=LOG_LEVELS)]
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

    engine: Annotated[
        str,
        About(
            "What computes. auto: as --device says; emulated: SGLang without a model, at the speed of --gpu.",
            choices=("auto", "cuda", "cpu", "emulated"),
        ),
    ] = "auto"
    model: Annotated[
        str,
        About(
            "default (SmolLM2-135M-Instruct), tiny, bench, a folder, or a Hugging Face id; with --engine emulated "
            f"one of {', '.join(SHAPES)}."
        ),
    ] = "default"
    gpu: Annotated[str | None, About(f"The GPU to emulate: {', '.join(GPUS)}.")] = None
    cost_model: Annotated[
        str | None,
        About(
            "The emulated GPU's speed as sglang-fair calibrate measured it.",
            metavar="FILE",
            unset="from published figures",
        ),
    ] = None
    time_scale: Annotated[
        float, About("How many times as long an emulated step takes.", metavar="FACTOR", above=0)
    ] = 1.0


@dataclass(frozen=True, kw_only=True)
class Fields:
    """What a client may ask of an engine, besides what the model says."""

    max_logprobs: Annotated[
        int,
        About(
            "Most logprobs of a token that a client may ask for.",
            unit="tokens",
            metavar="K",
            fair="max-logprobs",
            at_least=0,
            at_most=1000,
        ),
    ] = 20
    allow_fields: Annotated[
        str,
        About(
            "Fields of requests that are refused unless they stand here, comma separated, because a client can stop a "
            f"replica with them: {', '.join(RISKS)}.",
            metavar="NAMES",
            unset="none",
            fair="allow-fields",
        ),
    ] = ""


@dataclass(frozen=True, kw_only=True)
class Fairness(Fields):
    """Who is served first, and what service costs: a replica's scheduler."""

    policy: Annotated[
        str,
        About(
            "Scheduler in each replica; sglang:NAME for SGLang's own.",
            registry="sglang_fair.core:POLICIES",
            prefix=STOCK_PREFIX,
        ),
    ] = "dlpm"
    quantum: Annotated[
        float | None,
        About(
            "Quantum per client of DLPM (Q^u), slo and DRR; of wsc-dlpm in average calls.",
            unit="service units",
            metavar="UNITS",
            unset="2000, and 2 average calls for wsc-dlpm",
            fair="quantum",
        ),
    ] = None
    policy_options: Annotated[
        str,
        About(
            "The policy's other options, as patience=64 for dlpm; see docs/policies.md.",
            metavar="KEY=VALUE,...",
            unset="the policy's own",
            fair="options",
            pairs=True,
        ),
    ] = ""
    stall_ms: Annotated[
        float,
        About(
            "Longest step for prompts while other clients have requests; those that run keep their share of the time. "
            "0: prompts first, as SGLang does.",
            unit="milliseconds",
            metavar="MS",
            fair="stall-ms",
            at_least=0,
        ),
    ] = DEFAULT_STALL_MS
    target_tpot_ms: Annotated[
        float | None,
        About(
            "Time of an output token of those that run: while it would be longer, requests of clients above their "
            "share of what runs wait, if others run. 0: no target.",
            unit="milliseconds",
            metavar="MS",
            unset="1.25 times what a client's share of the engine would take",
            fair="target-tpot-ms",
            at_least=0,
        ),
    ] = None
    payer: Annotated[
        str,
        About(
            "Who pays for a prefix that clients share: whoever computed it, or all its users, in equal parts or per "
            f"use ({', '.join(RULES)}).",
            metavar="RULE",
            fair="payer",
        ),
    ] = FIRST
    cost: Annotated[
        str | None,
        About(
            "What service costs: linear, profiled, quadratic:d=1000 or tiered:threshold=4096.",
            metavar="COST",
            unset="linear",
            fair="cost",
        ),
    ] = None
    extend_weight: Annotated[
        float | None,
        About("What a computed input token costs, with the linear cost.", unit="service units", metavar="W_E",
              unset="1", fair="extend-weight"),
    ] = None  # fmt: skip
    output_weight: Annotated[
        float | None,
        About("What an output token costs, with the linear cost.", unit="service units", metavar="W_Q",
              unset="2", fair="output-weight"),
    ] = None  # fmt: skip
    client_weights: Annotated[
        Mapping[str, float],
        About(
            'Shares per client, for example {"gold": 2}.',
            metavar="JSON",
            unset="1 for everybody",
            fair="client-weights",
        ),
    ] = field(default_factory=dict)
    cache_share: Annotated[
        str,
        About(
            "Evict first what belongs to clients above their share of a replica's cache, and of the router's tree. "
            "Where SGLang's cache does not allow that, and for policies without shares, a replica evicts as SGLang "
            "does.",
            choices=ON_OFF,
            fair="cache-share",
        ),
    ] = "off"
    normal: Annotated[
        str | None,
        About(
            "Where wsc, wsc-dlpm and a normalised slo keep what a call of each application normally needs: read at "
            "the start, and written every minute and at the end. A cluster adds the replica's name.",
            metavar="FILE",
            unset="learnt anew after each start",
            fair="normal",
            flag="--fair-normal",
        ),
    ] = None
    apps: Annotated[
        str | None,
        About(
            "Which applications each client may name, as JSON: client to list. Any other one counts as (other).",
            metavar="FILE",
            unset="any",
            fair="apps",
        ),
    ] = None
    identity: Annotated[
        str | None,
        About(
            "Where a client's name is looked for: headers, api-key, user; comma separated, the first match wins.",
            metavar="PLACES",
            unset=",".join(DEFAULT_ORDER),
            fair="identity",
        ),
    ] = None
    metrics_clients: Annotated[
        int,
        About(
            "Clients with a label of their own on /metrics, besides tenants: those that get most. The others are "
            "counted together.",
            metavar="K",
            fair="metrics-clients",
            at_least=0,
        ),
    ] = METRICS_CLIENTS
    hang_timeout_s: Annotated[
        float,
        About(
            "A replica of whose scheduler nothing has run for so long ends, after its stacks are in the log, to be "
            "started again. 0: never.",
            unit="seconds",
            metavar="S",
            fair="hang-timeout",
            at_least=0,
        ),
    ] = HANG_TIMEOUT_S


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who may ask a gateway, and where operators ask it."""

    tenants: Annotated[
        str | None,
        About(
            "Who may ask, with which keys, and for how much; read again when it changes (sglang-fair tenants).",
            metavar="FILE",
            unset="everybody",
        ),
    ] = None
    trusted_proxies: Annotated[
        str | None,
        About(
            "Networks of proxies whose headers name the client, as 10.0.0.0/8,fd00::/8; others are ignored.",
            metavar="NETWORKS",
            unset="none with --tenants, else all",
        ),
    ] = None
    limit_store: Annotated[
        str,
        About(
            "Where tenants' limits are counted: memory, each process for itself, or redis://HOST:PORT/DB.",
            metavar="ADDRESS",
        ),
    ] = "memory"
    admin_host: Annotated[str, About("Address for operators, with --admin-port.")] = "127.0.0.1"
    admin_port: Annotated[
        int | None,
        About(
            "Port for operators: /status, /workers and /metrics, with the key in SGLANG_FAIR_ADMIN_KEY.",
            metavar="PORT",
            unset="none with --tenants, else that of clients",
            at_least=1,
            at_most=65535,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """What a gateway promises."""

    slo_classes: Annotated[
        Mapping[str, float],
        About(
            "Seconds to the first token by class, which a request names in x-fair-class; the first is that of requests "
            "that name none.",
            metavar="JSON",
        ),
    ] = field(default_factory=lambda: dict(DEFAULT_CLASSES))


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """Spans of requests, for OpenTelemetry."""

    otlp_traces_endpoint: Annotated[
        str | None,
        About(
            "A collector of OpenTelemetry, which is sent spans of requests by OTLP over HTTP; OpenTelemetry's own "
            "variables, OTEL_…, hold too.",
            metavar="URL",
            unset="no spans",
        ),
    ] = None


BatchFiles = Annotated[
    str | None,
    About(
        "Folder of the files that clients upload, which all gateways and feeders share.",
        metavar="DIR",
        unset="files in the folder of --batches; PostgreSQL needs it",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Files:
    """Where a gateway keeps files and batches, and how large they may be."""

    batches: Annotated[
        str | None,
        About(
            "Where files and batches (/v1/files, /v1/batches) are kept, whatever dies: a folder on a disk of this "
            "machine, or PostgreSQL for gateways and feeders on several. All of them have the same one.",
            metavar="DIR|postgresql://USER@HOST/NAME",
            unset="no batches",
        ),
    ] = None
    batch_files: BatchFiles = None
    batch_file_bytes: Annotated[int, About("Largest file of a batch's requests.", unit="bytes", above=0)] = (
        1 << 30
    )
    batch_client_bytes: Annotated[
        int, About("All files together that a client has uploaded and that are kept.", unit="bytes", above=0)
    ] = 16 << 30
    batch_keep_days: Annotated[
        float,
        About("Files, and batches that are over with their results, are kept so long.", unit="days", above=0),
    ] = 30.0


@dataclass(frozen=True, kw_only=True)
class Exposed:
    """Whether it may be reached unprotected."""

    insecure: Annotated[
        bool, About("Listen beyond this machine without TLS or keys: another layer protects the network.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class Keyed:
    """How it knows the others."""

    keys: Annotated[
        str | None,
        About(
            "Folder with the keys of router, gateways and replicas, which sglang-fair keys makes: they then talk to "
            "each other over ZMQ encrypted, and to nobody else.",
            metavar="DIR",
            unset="ZMQ is open",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Protection(Keyed, Exposed):
    """What protects it where others reach it."""


@dataclass(frozen=True, kw_only=True)
class Authorities:
    """Whom it believes about replicas."""

    replica_ca: Annotated[
        str | None,
        About(
            "Authorities that sign the certificates of replicas with https:// addresses, in PEM.",
            metavar="FILE",
            unset="the system's",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Certified(Exposed):
    """How it is served."""

    tls_cert: Annotated[
        str | None,
        About(
            "Certificate with its chain, in PEM: whoever asks over HTTP is served over https.",
            metavar="FILE",
            unset="http",
        ),
    ] = None
    tls_key: Annotated[
        str | None,
        About("Its private key, in PEM, without a password.", metavar="FILE", unset="in the same file"),
    ] = None
    names: Annotated[
        str,
        About(
            "Public DNS names by which it may be asked over HTTP where no key is asked for, comma separated. "
            "Addresses, names without a dot and those below .localhost, .internal, .svc, .cluster.local go without.",
            metavar="NAME,...",
            unset="none",
        ),
    ] = ""


@dataclass(frozen=True, kw_only=True)
class Tls(Authorities, Certified, Protection):
    """TLS, towards those who ask and towards replicas."""


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Whom it believes to be the gateway."""

    gateway_ca: Annotated[
        str | None,
        About(
            "Authorities that sign the certificate of a gateway with an https:// address, in PEM.",
            metavar="FILE",
            unset="the system's",
        ),
    ] = None
    gateway_cert: Annotated[
        str | None,
        About(
            "The gateway's own certificate, in PEM, in place of authorities: it must show this one, by whatever name "
            "it is asked.",
            metavar="FILE",
            unset="one that an authority has signed",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Feeding:
    """How much of batches is accepted, and sent to the replicas at a time."""

    batch_items: Annotated[
        int, About("Most requests of one batch.", unit="requests", at_least=1, at_most=(1 << 24) - 1)
    ] = 500_000
    batch_in_flight: Annotated[
        int,
        About(
            "Most requests of batches for one model that a feeder has sent and that are not answered: enough for all "
            "replicas of the model. It begins with few, and takes fewer when it is refused.",
            unit="requests",
            at_least=1,
            at_most=10_000,
        ),
    ] = 1024


@dataclass(frozen=True, kw_only=True)
class Throttling:
    """Whom the router refuses."""

    throttle: Annotated[
        str,
        About(
            "Which calls are refused. oit: first calls of interactions beyond a limit, while all replicas are "
            "overloaded; rpm: all calls beyond it, always.",
            registry="router.throttling:KINDS",
        ),
    ] = "none"
    limits: Annotated[
        str | None,
        About(
            'Calls a minute of one client, as JSON: {"user": 60, "apps": {"chat": 30, "*": 60}} (sglang-fair limits '
            "makes one from records); POST /limits replaces it.",
            metavar="FILE",
            unset="none but those of the tenants' file",
        ),
    ] = None
    quarantine_s: Annotated[
        float,
        About(
            "A client of which a request has ended two replicas is served one at a time for so long.",
            unit="seconds",
            metavar="S",
            above=0,
        ),
    ] = 600.0


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

    keys: Annotated[
        str | None,
        About(
            "Folder with the keys of router, gateway and replicas, made there if it has none: they then talk to each "
            "other over ZMQ encrypted, and to nobody else.",
            metavar="DIR",
            unset="ZMQ is open on this machine",
        ),
    ] = None
    replicas: Annotated[
        int, About("SGLang servers to start; they are dealt out in turn to several --models.", at_least=1)
    ] = 2
    models: Annotated[
        str,
        About(
            "Several models in place of --model, by the names that clients use: each is what --model could be, and :N "
            "behind it so many replicas of it.",
            metavar="NAME=MODEL[:N],...",
            unset="--model alone",
            pairs=True,
        ),
    ] = ""
    swap: Annotated[
        str,
        About(
            "Which replicas can load which of --models in turn, each with an agent beside it: none, all, or as "
            "r0=a+b,r1=b+c. Models that share a replica must be alike in shape and tokenizer.",
            metavar="WHICH",
        ),
    ] = "none"
    swap_finish_s: SwapFinish = FINISH_S
    device: Annotated[
        str, About("cpu, cuda (a GPU for each replica), or auto.", choices=("auto", "cpu", "cuda"))
    ] = "auto"
    placement: Annotated[
        str | None,
        About(
            "Which replica serves a request.",
            registry="router.placement:PLACEMENTS",
            unset="deadline with --swap or --slo-classes, else d2lpm-queue",
        ),
    ] = None
    worker_quantum: Annotated[
        float | None,
        About(
            "D2LPM's quantum per client and replica.",
            unit="service units",
            metavar="UNITS",
            unset="the placement's own",
            above=0,
        ),
    ] = None
    placement_options: Annotated[
        str,
        About(
            "The placement's other parameters, as cache_threshold=0.3 for d2lpm; see docs/policies.md.",
            metavar="KEY=VALUE,...",
            unset="the placement's own",
            pairs=True,
        ),
    ] = ""
    scale_up: Annotated[
        int,
        About(
            "With placement deadline or qlm: so many more replicas are started, at most, while it says for a while "
            "that deadlines cannot be met without. 0: none.",
            metavar="N",
            at_least=0,
        ),
    ] = 0
    ray: Annotated[
        str | None,
        About(
            "Run the replicas on the nodes of this Ray cluster, which this machine is one of: auto, or HOST:PORT. All "
            "else runs here.",
            metavar="ADDRESS",
            unset="replicas run on this machine",
        ),
    ] = None
    ray_resources: Annotated[
        str,
        About(
            "What Ray keeps free for a replica on its node, as CPU=8,memory=64e9,accelerator_type:H100=0.001.",
            metavar="NAME=AMOUNT,...",
            unset="CPU=1, and a GPU for each of its ranks",
            pairs=True,
        ),
    ] = ""
    ray_wait_s: Annotated[
        float,
        About("Longest wait for Ray to have room for all replicas.", unit="seconds", metavar="S", above=0),
    ] = 60.0
    host: Annotated[
        str, About("Address that the gateway listens on; 0.0.0.0 for all. The rest stays local.")
    ] = "127.0.0.1"
    port: Annotated[int, About("Port of the gateway; 0 takes a free one.", at_least=0, at_most=65535)] = 8000
    gateway_workers: Annotated[int, About("Processes of the gateway.", at_least=1)] = 1
    router_http_port: Annotated[
        int | None,
        About(
            "Port of the router's /healthz, /readyz and /metrics, on this machine alone.",
            metavar="PORT",
            unset="a free one",
            at_least=1,
            at_most=65535,
        ),
    ] = None
    gateway_options: Annotated[
        str,
        About(
            "The gateway's limits, as max-in-flight=1024,body-timeout=60: each setting of the gateway that is a limit.",
            metavar="KEY=VALUE,...",
            unset="the gateway's own",
            pairs=True,
        ),
    ] = ""
    dashboard: Annotated[
        str, About("The page for operators, in a process of its own (sglang-fair dashboard).", choices=ON_OFF)
    ] = "on"
    dashboard_port: Annotated[
        int | None, About("Its port.", metavar="PORT", unset="a free one", at_least=1, at_most=65535)
    ] = None
    json: Annotated[bool, About("Print one line of JSON with the addresses; all else goes to stderr.")] = (
        False
    )
    quiet_replicas: Annotated[bool, About("Of the replicas' output show only warnings and errors.")] = False
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    start_timeout_s: Annotated[
        float | None,
        About(
            "Longest wait for a process to be ready.",
            unit="seconds",
            metavar="S",
            unset="by machine",
            above=0,
        ),
    ] = None
    extra: Annotated[
        tuple[str, ...],
        About("Arguments for each replica's SGLang server, as --tp 2.", behind_dashes="sglang_arguments"),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class Replica(Protection, Fairness, Engine):
    """Run one SGLang server with the fair scheduler, on a GPU, on a CPU with plain PyTorch, or on an emulated GPU."""

    device: Annotated[str, About("Where it computes.", choices=("cpu", "cuda"))] = "cpu"
    host: Annotated[str, About("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, About("Port to listen on.", at_least=0, at_most=65535)] = 30000
    name: Annotated[str, About("The replica's name in logs.")] = "r0"
    served_name: Annotated[
        str | None, About("What the model is called.", metavar="NAME", unset="the model's own name")
    ] = None
    kv_port: Annotated[
        int | None,
        About(
            "Publish KV events on this port and replay them on the next one.",
            metavar="PORT",
            unset="no events",
        ),
    ] = None
    page_size: Annotated[int, About("Size of a block of the cache.", unit="tokens", at_least=1)] = 16
    load_port: Annotated[
        int | None,
        About(
            "Publish on this port, at the address of the KV events, how full the KV pool is and how much waits; "
            "needs --kv-port.",
            metavar="PORT",
            unset="not published",
        ),
    ] = None
    kv_tokens: Annotated[
        int | None,
        About("Size of the KV pool.", unit="tokens", unset="SGLang's choice on a GPU, 24576 on a CPU"),
    ] = None
    max_running: Annotated[
        int | None,
        About("Most requests in a batch.", unit="requests", unset="SGLang's choice on a GPU, 64 on a CPU"),
    ] = None
    extra: Annotated[
        tuple[str, ...],
        About("SGLang's own arguments; they win over ours.", behind_dashes="sglang_arguments"),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class Router(Tls, Throttling):
    """Run the router alone: it decides which replica serves each request. Gateways and the cluster connect to it."""

    bind: Annotated[str, About("Where peers connect; port * takes a free one.", metavar="tcp://HOST:PORT")]
    placement: Annotated[
        str, About("Which replica serves a request.", registry="router.placement:PLACEMENTS")
    ] = "d2lpm-queue"
    worker: Annotated[
        tuple[str, ...],
        About(
            "A replica: NAME,http=URL[,kv=ADDRESS][,replay=ADDRESS][,load=ADDRESS][,capacity=NUMBER][,model=NAME]. "
            "Repeatable. Where one has a model=, all must. model=A|B: it can load these, and an agent says which it "
            "has.",
            metavar="SPEC",
        ),
    ] = ()
    replicas_file: Annotated[
        str | None,
        About(
            "Further replicas, one in a line as --worker has it; read again when it changes. It need not be there yet.",
            metavar="FILE",
            unset="none",
        ),
    ] = None
    replicas_dns: Annotated[
        tuple[str, ...],
        About(
            "Further replicas, one at each address of a DNS name: "
            "NAME:PORT[,scheme=https][,kv=PORT][,replay=PORT][,load=PORT][,capacity=NUMBER][,model=NAME]. Repeatable.",
            metavar="SPEC",
        ),
    ] = ()
    replicas_every_s: Annotated[
        float,
        About("How often DNS is asked, with --replicas-dns.", unit="seconds", metavar="S", above=0),
    ] = 5.0
    worker_quantum: Annotated[
        float | None,
        About("D2LPM's credit per client and replica.", unit="service units", metavar="UNITS", above=0,
              unset="the placement's own"),
    ] = None  # fmt: skip
    quantum: Annotated[
        float | None,
        About("centralized_dlpm's credit per client at all replicas.", unit="service units", metavar="UNITS", above=0,
              unset="the placement's own"),
    ] = None  # fmt: skip
    extend_weight: Annotated[
        float | None,
        About("What an input token costs.", unit="service units", metavar="W_E", unset="the placement's own"),
    ] = None
    output_weight: Annotated[
        float | None,
        About(
            "What an output token costs.", unit="service units", metavar="W_Q", unset="the placement's own"
        ),
    ] = None
    client_weights: Annotated[
        Mapping[str, float] | None,
        About('Shares per client, for example {"gold": 2}.', metavar="JSON", unset="1 for everybody"),
    ] = None
    parameter: Annotated[
        tuple[str, ...],
        About("Any other parameter of the placement. Repeatable.", metavar="NAME=VALUE"),
    ] = ()
    page_size: Annotated[
        int, About("Size of a block of the replicas' caches.", unit="tokens", at_least=1)
    ] = 16
    swap_finish_s: SwapFinish = FINISH_S
    max_tree_tokens: Annotated[
        int, About("Most tokens that the prefix tree holds.", unit="tokens", metavar="N")
    ] = 8_000_000
    cache_share: Annotated[
        str,
        About("Evict first what belongs to clients above their share of the prefix tree.", choices=ON_OFF),
    ] = "off"
    peer_timeout_s: Annotated[
        float,
        About(
            "A gateway that is silent for so long is dead, and what it had in flight is over.",
            unit="seconds",
            metavar="S",
            above=0,
        ),
    ] = 10.0
    http_host: Annotated[str, About("Address of the router's HTTP server, with --http-port.")] = "127.0.0.1"
    http_port: Annotated[
        int | None,
        About(
            "Port of an HTTP server with /healthz, /readyz and /metrics.",
            metavar="PORT",
            unset="none",
            at_least=1,
            at_most=65535,
        ),
    ] = None
    notice_s: NoticeS = 5.0
    log_level: LogLevel = "info"
    outlive_parent: OutliveParent = False


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds a gateway. Counts are of one process. What clients share is shared as `router.shared_limit` says."""

    max_in_flight: Annotated[
        int,
        About(
            "Requests at a time, half of them for one client alone; more get 429.", unit="requests", above=0
        ),
    ] = 4096
    max_connections: Annotated[
        int,
        About(
            "Clients' connections, half of them for one address alone; more get 429.",
            unit="connections",
            above=0,
        ),
    ] = 8192
    max_body_bytes: Annotated[int, About("Largest request body.", unit="bytes", above=0)] = 16 << 20
    max_held_bytes: Annotated[
        int,
        About("All bodies in flight together, shared by the clients; more get 429.", unit="bytes", above=0),
    ] = 512 << 20
    max_prompt_tokens: Annotated[
        int,
        About(
            "All prompts of one request together. A text counts a quarter of its characters, and twice the context is "
            "always allowed: a replica's HTTP process reads them in one go and answers nobody meanwhile.",
            unit="tokens",
            above=0,
        ),
    ] = 1 << 17
    max_context_tokens: Annotated[
        int, About("Longest prompt; 0: as the replicas say.", unit="tokens", at_least=0)
    ] = 0
    tries: Annotated[int, About("Replicas to try before a request fails.", above=0)] = 3
    connect_timeout_s: Annotated[
        float, About("Longest wait for a connection to a replica.", unit="seconds", above=0)
    ] = 2.0
    head_timeout_s: Annotated[
        float,
        About("A connection without a whole request head for so long is closed.", unit="seconds", above=0),
    ] = 15.0
    body_timeout_s: Annotated[
        float, About("Longest wait for a whole request body.", unit="seconds", above=0)
    ] = 300.0
    idle_timeout_s: Annotated[
        float,
        About(
            "Longest silence of a replica, its queue included, and of a client that reads too slowly. A request of a "
            "class may wait longer in that queue, by what its class has beyond the first one.",
            unit="seconds",
            above=0,
        ),
    ] = 600.0
    health_timeout_s: Annotated[
        float, About("A replica that sends nothing for so long is given up.", unit="seconds", above=0)
    ] = 10.0
    progress_interval_s: Annotated[
        float,
        About("How often the router hears of a stream's output; 0 for never.", unit="seconds", at_least=0),
    ] = 1.0


@dataclass(frozen=True, kw_only=True)
class Gateway(Files, Tls, Tracing, Access, Deadlines, Fields, Limits):
    """Run a gateway alone: the OpenAI API and /generate in front of the replicas; the router says which one."""

    host: Annotated[str, About("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, About("Port to listen on.", at_least=0, at_most=65535)]
    router: Annotated[
        tuple[str, ...],
        About(
            "A router's address. Repeatable: each client keeps to one of them while it answers. All gateways must name "
            "the same ones.",
            metavar="tcp://HOST:PORT",
        ),
    ]
    model_name: Annotated[
        str, About('The served model, or the first of several; clients may also say "default".')
    ]
    tokenizer: Annotated[str, About("Folder with tokenizer.json.", metavar="DIR")]
    more_models: Annotated[
        str,
        About(
            "Further models that are served, each with the folder of its tokenizer.",
            metavar="NAME=DIR,...",
            unset="none",
            pairs=True,
        ),
    ] = ""
    workers: Annotated[int, About("Processes.", metavar="N", at_least=1)] = 1
    router_timeout_s: Annotated[
        float,
        About(
            "Longest wait for the router, but for requests that it holds.",
            unit="seconds",
            metavar="S",
            above=0,
        ),
    ] = 5.0
    notice_s: NoticeS = 5.0
    drain_s: Annotated[
        int, About("Time for open requests after SIGTERM.", unit="seconds", metavar="S", at_least=0)
    ] = 30
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    identity: Annotated[
        str,
        About(
            "Where a client's name is looked for: headers, api-key, user; comma separated, the first match wins.",
            metavar="PLACES",
        ),
    ] = ",".join(DEFAULT_ORDER)
    apps: Annotated[
        str | None,
        About(
            "Which applications each client may name, as JSON: client to list. Any other one counts as (other).",
            metavar="FILE",
            unset="any",
        ),
    ] = None
    metrics_clients: Annotated[
        int,
        About(
            "Clients with a label of their own on /metrics, besides tenants: those that get most. The others are "
            "counted together.",
            metavar="K",
            at_least=0,
        ),
    ] = METRICS_CLIENTS
    outlive_parent: OutliveParent = False


@dataclass(frozen=True, kw_only=True)
class Feeder(Trust, Feeding, Deadlines, Fields):
    """Have the requests of batches answered, as what they are: requests of the clients whose batches they are. Any
    number of feeders may run."""

    batches: Annotated[
        str,
        About("Where gateways keep files and batches.", metavar="DIR|postgresql://USER@HOST/NAME"),
    ]
    batch_files: BatchFiles = None
    gateway: Annotated[
        str, About("A gateway's address, which has the same SGLANG_FAIR_FEEDER_KEY.", metavar="URL")
    ] = "http://127.0.0.1:8000"
    batch_line_bytes: Annotated[int, About("Longest line of a batch's file.", unit="bytes", above=0)] = (
        16 << 20
    )
    batch_keep_days: Annotated[
        float, About("Batches that are over are kept so long, with their results.", unit="days", above=0)
    ] = 30.0
    log_level: LogLevel = "info"
    outlive_parent: OutliveParent = False


@dataclass(frozen=True, kw_only=True)
class Dashboard(Trust, Authorities, Certified):
    """Serve the page for operators: what each client got, who waits and why. One process for any number of viewers."""

    gateway: Annotated[
        str, About("The gateway's address for operators: that of --admin-port, if it has one.", metavar="URL")
    ] = "http://127.0.0.1:8000"
    host: Annotated[
        str,
        About(
            "Address to listen on; another than this machine's own needs SGLANG_FAIR_ADMIN_KEY, and TLS or --insecure."
        ),
    ] = "127.0.0.1"
    port: Annotated[int, About("Port to listen on.", at_least=1, at_most=65535)] = 8002
    every_s: Annotated[
        float, About("Time between two looks at the cluster.", unit="seconds", metavar="S", at_least=0.2)
    ] = 2.0
    outlive_parent: OutliveParent = False


@dataclass(frozen=True, kw_only=True)
class AgentSettings(Authorities, Keyed):
    """Have one replica load the models that the router names, one at a time. A cluster with --swap starts agents."""

    worker: Annotated[str, About("What the router calls the replica.", metavar="NAME")]
    replica: Annotated[str, About("The replica's address.", metavar="URL")]
    router: Annotated[str, About("The router's address.", metavar="tcp://HOST:PORT")]
    models: Annotated[
        str,
        About(
            "The models that the replica can load, by the names that clients use, each a folder with a checkpoint. The "
            "others must be like the first in shape and tokenizer.",
            metavar="NAME=FOLDER,...",
            pairs=True,
        ),
    ]
    outlive_parent: OutliveParent = False


SECTIONS: Mapping[str, type] = {
    "cluster": Cluster,
    "replica": Replica,
    "router": Router,
    "gateway": Gateway,
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
    "SGLANG_FAIR_ANY_VERSION": "1: attach the overlay to another version of SGLang than it was tested with.",
}
"""Environment variables that are no option of a command."""
