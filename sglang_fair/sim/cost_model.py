"""How long a step of an engine takes: seconds of one GPU for a batch of prefills or for decode steps.

    Roofline   from a GPU's published figures and a model's shape
    Fitted     linear, with coefficients that `sglang-fair calibrate` measured on a replica
    Scaled     another model, with all times multiplied by a factor

**Roofline.** A kernel takes as long as its arithmetic or its memory traffic, whichever is longer, at a given fraction
of the GPU's peak. A step is matrices + attention + overhead + overhead per request:

    matrices    max(FLOPs / (mfu · peak), bytes / (mbu · bandwidth))
                FLOPs = 2 · layer parameters · tokens + 2 · head parameters · requests;  bytes = the weights
    attention   max(FLOPs / (attention mfu · peak), bytes / (mbu · bandwidth))
                FLOPs = 4 · layers · heads · head size · pairs;  bytes = keys and values, read once

A pair is a token and one that it attends to: e·p + e·(e + 1)/2 for e tokens of a prompt behind p cached ones.

**Fitted.** Prefill: base + a·tokens + b·pairs + c·cached tokens + d·requests. Decode: base + e·requests +
f·context tokens. Engines read, some copy, all cached keys and values, however few tokens attend to them.

Both are monotone in all arguments. Not modelled: several GPUs per replica, prefill and decode in one batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from math import isfinite
from typing import Any, NamedTuple, Protocol

import msgspec

from sglang_fair.common.pairs import split_pairs, typed
from sglang_fair.sim.gpus import GPUS, Gpu
from sglang_fair.sim.shapes import SHAPES, ModelShape

Reader = Callable[[str], Any]
"""What the JSON file at a path holds (`common.files.read_json`). Raises ValueError with one line."""


class CostModel(Protocol):
    """How long an engine's GPU is busy, in seconds: at least 0, and non-decreasing in every argument."""

    def prefill_s(
        self, extends: Sequence[tuple[int, int]], requests: int = 0, context_tokens: int = 0
    ) -> float:
        """One batch of prefills, given as (tokens to compute, tokens cached before them) of each request, and with it a
        token for each of `requests` that run, whose contexts have `context_tokens` in total."""

    def decode_s(self, requests: int, context_tokens: int, steps: int = 1) -> float:
        """`steps` decode steps of `requests` whose contexts have `context_tokens` in total before the first one, and
        grow by one token each per step. Computed in constant time."""


def pairs(extend_tokens: int, cached_tokens: int) -> float:
    """How many (token, token it attends to) there are when `extend_tokens` are computed behind `cached_tokens`."""
    return extend_tokens * (cached_tokens + (extend_tokens + 1) / 2)


def _check_seconds(holder: Any, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(holder, name)
        if not (isinstance(value, (int, float)) and isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number of seconds, at least 0, not {value!r}")


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The fraction of a GPU's published peaks that a serving engine reaches, and what it adds to each step.

    The defaults stand for SGLang on Ampere GPUs: round numbers between published measurements, with which
    `tests/sim/test_cost_model.py` compares them.
    """

    mfu: float = 0.7
    """Of peak FLOP/s, in the matrices of a full prefill batch. Measured: 0.65 and 0.78 (7B on A6000, vLLM and
    SGLang, Preble's fits), 0.68 (Llama-3-8B on A100, Vidur's profile), 0.87 (OPT-13B on A100, DistServe's
    fit), 0.9 (Llama-2-7B on A10G, VTC's fit)."""
    attention_mfu: float = 0.6
    """Of peak FLOP/s, in prefill attention. Measured: 0.66 (A6000, FlashInfer, Preble's fit at 8k tokens)."""
    mbu: float = 0.8
    """Of peak bandwidth, when weights or keys and values are streamed. Measured: 0.78 for the weights (A100,
    Vidur); for keys and values 0.64 (A100, DistServe) to 0.92 (A6000, Preble)."""
    prefill_overhead_s: float = 0.004
    """Per prefill batch: launching kernels one by one, sampling, scheduling that is not overlapped. Assumed."""
    decode_overhead_s: float = 0.0015
    """Per decode step, a replayed CUDA graph: element-wise kernels (0.9 ms in Vidur's profile), sampling."""
    request_overhead_s: float = 5e-6
    """Per request of a step: its metadata, and sending its token. Assumed."""

    def __post_init__(self) -> None:
        for name in ("mfu", "attention_mfu", "mbu"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, not {getattr(self, name)!r}")
        _check_seconds(self, ("prefill_overhead_s", "decode_overhead_s", "request_overhead_s"))


HOPPER = Efficiency(mfu=0.5)
"""Engines reach a smaller fraction of faster tensor cores: 0.42 in a run of SGLang (8B on H100, its pull request 1060,
in 2024), 0.8 in matrices alone."""

EFFICIENCIES: Mapping[str, Efficiency] = {"h100": HOPPER, "h200": HOPPER}
"""GPUs with other values than the default."""


@dataclass(frozen=True)
class Roofline:
    """One GPU that holds one model; see the module."""

    gpu: Gpu
    shape: ModelShape
    efficiency: Efficiency = field(default_factory=Efficiency)

    def prefill_s(
        self, extends: Sequence[tuple[int, int]], requests: int = 0, context_tokens: int = 0
    ) -> float:
        if not extends:
            return 0.0
        tokens = sum(extend for extend, _ in extends) + requests
        attended = sum(pairs(extend, cached) for extend, cached in extends)
        held = sum(extend + cached for extend, cached in extends)
        requests += len(extends)
        overhead = self.efficiency.prefill_overhead_s + self.efficiency.request_overhead_s * requests
        attention_s = self._attention_s(attended, held) + self._attention_s(context_tokens, context_tokens)
        return overhead + self._matrices_s(tokens, requests) + attention_s

    def decode_s(self, requests: int, context_tokens: int, steps: int = 1) -> float:
        if not requests:
            return 0.0
        overhead = self.efficiency.decode_overhead_s + self.efficiency.request_overhead_s * requests
        held = context_tokens * steps + requests * (steps * (steps - 1) // 2)
        return steps * (overhead + self._matrices_s(requests, requests)) + self._attention_s(held, held)

    def _matrices_s(self, tokens: int, requests: int) -> float:
        rates = self._rates
        flops = 2 * (rates.token_parameters * tokens + rates.request_parameters * requests)
        return max(flops / rates.matrix_flops_per_s, rates.weights_s)

    def _attention_s(self, attended: float, held_tokens: int) -> float:
        rates = self._rates
        flops, read = rates.flops_per_pair * attended, rates.kv_bytes_per_token * held_tokens
        return max(flops / rates.attention_flops_per_s, read / rates.bytes_per_s)

    @cached_property
    def _rates(self) -> "_Rates":
        gpu, shape, efficiency = self.gpu, self.shape, self.efficiency
        bytes_per_s = efficiency.mbu * gpu.bandwidth_bytes_per_s
        return _Rates(
            token_parameters=shape.layer_parameters,
            request_parameters=shape.head_parameters,
            flops_per_pair=shape.flops_per_pair,
            kv_bytes_per_token=shape.kv_bytes_per_token,
            matrix_flops_per_s=efficiency.mfu * gpu.bf16_flops,
            attention_flops_per_s=efficiency.attention_mfu * gpu.bf16_flops,
            bytes_per_s=bytes_per_s,
            weights_s=shape.read_bytes / bytes_per_s,
        )


class _Rates(NamedTuple):
    """The constants of `Roofline`'s formulas."""

    token_parameters: int
    request_parameters: int
    flops_per_pair: int
    kv_bytes_per_token: int
    matrix_flops_per_s: float
    attention_flops_per_s: float
    bytes_per_s: float
    weights_s: float
    """To read all weights once."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """Linear in what a step does; seconds. See the module."""

    prefill_base_s: float
    prefill_token_s: float
    prefill_pair_s: float
    prefill_request_s: float
    decode_base_s: float
    decode_request_s: float
    decode_context_token_s: float
    prefill_cached_token_s: float = 0.0

    def __post_init__(self) -> None:
        _check_seconds(self, [own.name for own in fields(self)])

    def prefill_s(
        self, extends: Sequence[tuple[int, int]], requests: int = 0, context_tokens: int = 0
    ) -> float:
        if not extends:
            return 0.0
        return (
            self.prefill_base_s
            + self.decode_request_s * requests
            + self.decode_context_token_s * context_tokens
            + self.prefill_request_s * len(extends)
            + self.prefill_token_s * sum(extend for extend, _ in extends)
            + self.prefill_pair_s * sum(pairs(extend, cached) for extend, cached in extends)
            + self.prefill_cached_token_s * sum(cached for _, cached in extends)
        )

    def decode_s(self, requests: int, context_tokens: int, steps: int = 1) -> float:
        if not requests:
            return 0.0
        held = context_tokens * steps + requests * (steps * (steps - 1) // 2)
        return (
            steps * (self.decode_base_s + self.decode_request_s * requests)
            + self.decode_context_token_s * held
        )


@dataclass(frozen=True, slots=True)
class Scaled:
    """`model` with all times multiplied by `factor`: 0.1 is a GPU ten times as fast in everything."""

    model: CostModel
    factor: float

    def __post_init__(self) -> None:
        if not (isfinite(self.factor) and self.factor > 0):
            raise ValueError(f"a time scale must be a finite number above 0, not {self.factor!r}")

    def prefill_s(
        self, extends: Sequence[tuple[int, int]], requests: int = 0, context_tokens: int = 0
    ) -> float:
        return self.factor * self.model.prefill_s(extends, requests, context_tokens)

    def decode_s(self, requests: int, context_tokens: int, steps: int = 1) -> float:
        return self.factor * self.model.decode_s(requests, context_tokens, steps)


def kv_tokens(gpu: Gpu, shape: ModelShape, memory_fraction: float = 0.88) -> int:
    """Tokens that the KV pool of one GPU holds when weights and pool together take `memory_fraction` of its
    memory (SGLang's --mem-fraction-static). ValueError if the weights leave no room."""
    room = int(gpu.memory_bytes * memory_fraction) - shape.weight_bytes
    if room < shape.kv_bytes_per_token:
        raise ValueError(f"{shape.name} does not fit {memory_fraction:.0%} of a {gpu.name}'s memory")
    return room // shape.kv_bytes_per_token


def make_cost_model(text: str, read: Reader | None = None) -> CostModel:
    """The model that `text` names: GPU/MODEL as `a100-80g/llama-3.1-8b`, or a JSON file that `sglang-fair
    calibrate` or `to_json` wrote, which `read` reads. GPU/MODEL may be followed by the parts of its `Efficiency` that
    differ: `h100/llama-2-7b:decode_overhead_s=0.01,mbu=0.7`. Raises ValueError in one line."""
    name, _, changes = text.strip().lower().partition(":")
    gpu, slash, shape = name.partition("/")
    if slash and gpu in GPUS and shape in SHAPES:
        efficiency = EFFICIENCIES.get(gpu, Efficiency())
        return Roofline(GPUS[gpu], SHAPES[shape], _changed(efficiency, changes))
    if text.strip().endswith(".json"):
        if read is None:
            raise ValueError(f"the file {text.strip()} cannot be read here")
        return from_json(read(text.strip()))
    raise ValueError(
        f"unknown cost model {text!r}: it is GPU/MODEL, of the GPUs {', '.join(GPUS)} and the models "
        f"{', '.join(SHAPES)}, or the path of a calibration's .json file"
    )


def _changed(efficiency: Efficiency, changes: str) -> Efficiency:
    """With the values of KEY=VALUE,... in place of its own."""
    known = [field.name for field in fields(efficiency)]
    found: dict[str, float] = {}
    for key, value in split_pairs(changes, "parameter"):
        if key not in known:
            raise ValueError(f"a cost model has no {key!r}; there are {', '.join(known)}")
        found[key] = typed(value, float, f"{key} of a cost model")
    return replace(efficiency, **found)


KINDS: Mapping[str, type] = {"roofline": Roofline, "fitted": Fitted, "scaled": Scaled}


def to_json(model: CostModel) -> dict[str, Any]:
    """All parameters, as JSON has them; `from_json` makes the model again."""
    kind = next(kind for kind, made in KINDS.items() if type(model) is made)
    if isinstance(model, Scaled):
        return {"kind": kind, "factor": model.factor, "model": to_json(model.model)}
    return {"kind": kind, **asdict(model)}  # type: ignore[call-overload]


def from_json(written: Mapping[str, Any]) -> CostModel:
    """The inverse of `to_json`; of a calibration's file, its `cost_model`. Raises ValueError in one line."""
    try:
        written = written.get("cost_model", written)
        given = {name: value for name, value in written.items() if name != "kind"}
        if written["kind"] == "scaled":
            return Scaled(from_json(given["model"]), float(given["factor"]))
        model: CostModel = msgspec.convert(given, KINDS[written["kind"]])
        return model
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a cost model: {error}") from None
