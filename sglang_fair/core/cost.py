"""What service costs: from tokens to units.

A cost function maps what one request was given to units: `extend_tokens` computed behind `cached_tokens` that it found
in the cache, and `output_tokens`. It is zero before anything was computed and grows with every token. It is charged
incrementally, as the difference that new tokens make. So a request's charges sum to the function of what it received,
however the work was cut into chunks and steps (VTC §4.2). Fairness is relative to the function: equal service under one
is unequal under another.

    linear      w_e·extend + w_q·output                                          DLPM §3, VTC §3.2
    profiled    2.1 n_p + n_q + 0.04 n_p n_q + 0.032 n_q² + 11.46                VTC, appendix B.2
    quadratic   w_i (n_p + n_p²/d) + w_o (n_q + n_q (n_q + 1)/(2d))              generalised costs
    tiered      linear, times a factor once the prompt is longer than a threshold

If a term depends on position, cached tokens are free but still lie before the computed ones, because attention reads
them. So a prompt costs the difference between all of it and its cached part, and the context of an output token is the
whole prompt. A service unit is another amount of work in each function; scale the quanta accordingly.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from math import isfinite
from typing import Any, ClassVar, Protocol

from sglang_fair.common.pairs import typed


class Cost(Protocol):
    """A cost function: the units of one request's service."""

    @property
    def extend_weight(self) -> float:
        """The price of one input token alone, for uses that need a linear price."""

    @property
    def output_weight(self) -> float:
        """The price of one output token, in the same sense."""

    def __call__(self, extend_tokens: int, output_tokens: int, cached_tokens: int = 0) -> float:
        """Zero for (0, 0), whatever is cached; non-decreasing in extend and output tokens."""

    def dearest(self, input_tokens: float, output_tokens: float, owed_tokens: float) -> tuple[float, float]:
        """The two parts of the theorems' U (VTC §4.2 for a general function): the most that one prompt can cost, and
        the most that `owed_tokens` of output can cost.

        No prompt is longer than `input_tokens`, its cached part included, and no output longer than `output_tokens`.
        The owed tokens may be the last of their requests, so each counts at the price of token `output_tokens`.
        """


@dataclass(frozen=True, slots=True)
class Linear:
    """w_e · extend + w_q · output (DLPM §3, VTC §3.2). The papers' prices, 1 and 2, are the default."""

    name: ClassVar[str] = "linear"
    extend_weight: float = 1.0
    output_weight: float = 2.0

    def __post_init__(self) -> None:
        _check_weights(self.extend_weight, self.output_weight)

    def __call__(self, extend_tokens: int, output_tokens: int, cached_tokens: int = 0) -> float:
        return self.extend_weight * extend_tokens + self.output_weight * output_tokens

    def dearest(self, input_tokens: float, output_tokens: float, owed_tokens: float) -> tuple[float, float]:
        """w_e·L and w_q·M."""
        return self.extend_weight * input_tokens, self.output_weight * owed_tokens


@dataclass(frozen=True, slots=True)
class Profiled:
    """2.1 n_p + n_q + 0.04 n_p n_q + 0.032 n_q² + 11.46: step times of Llama-2-7b on an A10G, fitted over
    full batches and divided by the batch size (VTC, appendix B.2).

    Here 2.1 is charged for extend tokens, and n_p in the cross term is the whole prompt, cached part and
    all. The constant is charged once, with the first token, so that what was never computed is free.
    """

    name: ClassVar[str] = "profiled"
    extend_weight: ClassVar[float] = 2.1
    output_weight: ClassVar[float] = 1.0
    CROSS: ClassVar[float] = 0.04
    SQUARE: ClassVar[float] = 0.032
    CONSTANT: ClassVar[float] = 11.46

    def __call__(self, extend_tokens: int, output_tokens: int, cached_tokens: int = 0) -> float:
        if extend_tokens == output_tokens == 0:
            return 0.0
        slope = 1.0 + self.CROSS * (cached_tokens + extend_tokens) + self.SQUARE * output_tokens
        return self.CONSTANT + self.extend_weight * extend_tokens + slope * output_tokens

    def dearest(self, input_tokens: float, output_tokens: float, owed_tokens: float) -> tuple[float, float]:
        """2.1 L + 11.46 and M (1 + 0.04 L + 0.032 (2 L_out - 1))."""
        price = 1.0 + self.CROSS * input_tokens + self.SQUARE * max(0, 2 * output_tokens - 1)
        return self.CONSTANT + self.extend_weight * input_tokens, price * owed_tokens


@dataclass(frozen=True, slots=True)
class Quadratic:
    """w_i [g(n_p) - g(cached)] + w_o (n_q + n_q (n_q + 1)/(2d)), g(x) = x + x²/d.

    The price of a token grows with its position: output token k costs w_o (1 + k/d), and at d tokens an
    output token costs twice the first one. The papers' closed form prints the input length in the last term;
    the sum of the per-token prices has the output length, which is what is charged. `context` adds
    w_o n_p n_q/d: each output token then pays for the prompt that it attends to.
    """

    name: ClassVar[str] = "quadratic"
    d: float = 1000.0
    extend_weight: float = 1.0
    output_weight: float = 2.0
    context: bool = False

    def __post_init__(self) -> None:
        if not self.d >= 1:
            raise ValueError(f"d must be at least 1 token, not {self.d!r}")
        _check_weights(self.extend_weight, self.output_weight)

    def __call__(self, extend_tokens: int, output_tokens: int, cached_tokens: int = 0) -> float:
        prompt_tokens = cached_tokens + extend_tokens
        extend = extend_tokens * (1.0 + (prompt_tokens + cached_tokens) / self.d)
        before = (output_tokens + 1) / 2 + (prompt_tokens if self.context else 0)
        return self.extend_weight * extend + self.output_weight * output_tokens * (1.0 + before / self.d)

    def dearest(self, input_tokens: float, output_tokens: float, owed_tokens: float) -> tuple[float, float]:
        """w_i L (1 + L/d) and w_o M (1 + L_out/d), with `context` w_o M (1 + (L + L_out)/d)."""
        before = output_tokens + (input_tokens if self.context else 0)
        return (
            self.extend_weight * input_tokens * (1.0 + input_tokens / self.d),
            self.output_weight * owed_tokens * (1.0 + before / self.d),
        )


@dataclass(frozen=True, slots=True)
class Tiered:
    """m (w_e·extend + w_q·output), m = `factor` if cached + extend is above `threshold` tokens, else 1:
    the price list of an API with a dearer tier for long prompts.

    The tier is that of the prompt computed so far. The chunk that crosses the threshold raises the price of
    the request's earlier chunks too, and pays the difference; from the last chunk on the sum is the price
    of the whole prompt's tier.
    """

    name: ClassVar[str] = "tiered"
    threshold: float
    factor: float = 2.0
    extend_weight: float = 1.0
    output_weight: float = 2.0

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise ValueError(f"threshold must be a number of tokens, at least 0, not {self.threshold!r}")
        if not 1 <= self.factor < float("inf"):
            raise ValueError(f"factor must be a finite number, at least 1, not {self.factor!r}")
        _check_weights(self.extend_weight, self.output_weight)

    def __call__(self, extend_tokens: int, output_tokens: int, cached_tokens: int = 0) -> float:
        units = self.extend_weight * extend_tokens + self.output_weight * output_tokens
        return self.factor * units if cached_tokens + extend_tokens > self.threshold else units

    def dearest(self, input_tokens: float, output_tokens: float, owed_tokens: float) -> tuple[float, float]:
        """m w_e·L and m w_q·M with the m of the longest prompt."""
        factor = self.factor if input_tokens > self.threshold else 1.0
        return factor * self.extend_weight * input_tokens, factor * self.output_weight * owed_tokens


COSTS: Mapping[str, type[Linear | Profiled | Quadratic | Tiered]] = {
    cost.name: cost for cost in (Linear, Profiled, Quadratic, Tiered)
}
"""The registry: a new cost is a class with a name, and one entry here."""


def make_cost(text: str, extend_weight: float | None = None, output_weight: float | None = None) -> Cost:
    """The cost that `text` names: `linear`, `linear:1,2`, `quadratic:d=500,context=true`, `tiered:threshold=4096`.

    After the name come its class's fields, in order or by name. The two weights are for callers that have them apart;
    they belong to a plain `linear`. Raises ValueError with one line.
    """
    text = text.strip()
    if extend_weight is not None or output_weight is not None:
        if text != Linear.name:
            raise ValueError(f"extend weight and output weight belong to the cost linear, not to {text!r}")
        return Linear(
            Linear().extend_weight if extend_weight is None else extend_weight,
            Linear().output_weight if output_weight is None else output_weight,
        )
    name, _, written = text.partition(":")
    kind = COSTS.get(name)
    if kind is None:
        raise ValueError(f"unknown cost {name!r}; there are {', '.join(COSTS)}")
    try:
        return kind(**_parameters(kind, written))
    except ValueError as error:
        raise ValueError(f"cost {name}: {error}") from None


def describe(cost: Cost) -> str:
    """The text from which `make_cost` makes this cost again, all its parameters spelled out."""
    kind: Any = type(cost)
    written = ",".join(f"{field.name}={getattr(cost, field.name)!r}" for field in fields(kind))
    return f"{kind.name}:{written}" if written else str(kind.name)


def _parameters(kind: Any, written: str) -> dict[str, Any]:
    """Values of a cost's fields from `1,2` or `d=500,context=true`."""
    known: dict[str, Any] = {field.name: field for field in fields(kind)}
    found: dict[str, Any] = {}
    for position, word in enumerate(written.split(",") if written else ()):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            name, value = [*known, *[""] * (position + 1)][position], name
        if name not in known:
            has = f"there are {', '.join(known)}" if known else "it has none"
            raise ValueError(f"unknown parameter {word.strip()!r}; {has}")
        if name in found:
            raise ValueError(f"{name} is given twice")
        found[name] = typed(value, known[name].type, name)
    missing = [n for n, field in known.items() if field.default is MISSING and n not in found]
    if missing:
        raise ValueError(f"needs {', '.join(missing)}")
    return found


def _check_weights(extend_weight: float, output_weight: float) -> None:
    for name, value in (("extend weight", extend_weight), ("output weight", output_weight)):
        if not (isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number, at least 0, not {value!r}")
    if extend_weight == 0 == output_weight:
        raise ValueError("extend weight and output weight cannot both be 0: nothing would be charged")
