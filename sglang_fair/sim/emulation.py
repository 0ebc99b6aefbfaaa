"""What an emulated replica emulates: one GPU with one model, and how fast its time passes."""

from dataclasses import asdict, dataclass
from typing import Any

from sglang_fair.sim.cost_model import CostModel, Reader, Scaled, kv_tokens, make_cost_model, to_json
from sglang_fair.sim.gpus import GPUS, Gpu
from sglang_fair.sim.shapes import SHAPES, ModelShape

MAX_RUNNING = 256
"""Requests in a batch by default: as many as SGLang captures decode graphs for on GPUs of 60 GiB and more. SGLang's own
limit there, 2048 and more, needs more memory than a batch of ordinary prompts has."""

CHUNKED_PREFILL_TOKENS = ((20, 2048), (60, 4096), (160, 8192))
"""SGLang 0.5.23's defaults (memory_hook.py): with less than so many GiB, chunks of so many tokens."""

LARGEST_CHUNK_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class Emulation:
    """One GPU, the model that it pretends to serve, and how fast its time passes."""

    gpu: str
    model: str
    cost_model: str | None = None
    """For `make_cost_model`, for example a calibration's file; None: the roofline of GPU and model."""
    time_scale: float = 1.0
    """Factor on the duration of every step: 0.5 is twice as fast."""

    def __post_init__(self) -> None:
        for option, value, known in (("--gpu", self.gpu, GPUS), ("--model", self.model, SHAPES)):
            if value not in known:
                raise ValueError(
                    f"--engine emulated: unknown {option} {value!r}; there are {', '.join(known)}"
                )
        if not 0 < self.time_scale < float("inf"):
            raise ValueError(f"--time-scale must be a number above 0, not {self.time_scale}")

    @property
    def hardware(self) -> Gpu:
        return GPUS[self.gpu]

    @property
    def shape(self) -> ModelShape:
        return SHAPES[self.model]

    def make_cost(self, read: Reader) -> CostModel:
        """The cost model, scaled. `read` reads its file, if it is one; ValueError if that fails."""
        model = make_cost_model(self.cost_model or f"{self.gpu}/{self.model}", read)
        return model if self.time_scale == 1.0 else Scaled(model, self.time_scale)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV cache fits into the GPU's memory beside the model. ValueError when the model does not fit."""
        return kv_tokens(self.hardware, self.shape)

    @property
    def chunked_prefill_tokens(self) -> int:
        """SGLang's default prefill chunk on this GPU."""
        memory_gib = self.hardware.memory_bytes / 2**30
        for below_gib, tokens in CHUNKED_PREFILL_TOKENS:
            if memory_gib < below_gib:
                return tokens
        return LARGEST_CHUNK_TOKENS

    def __str__(self) -> str:
        speed = "" if self.time_scale == 1.0 else f", times x {self.time_scale:g}"
        return f"emulated {self.gpu} with {self.model}{speed}"

    def describe(self, read: Reader) -> dict[str, Any]:
        """Everything that decides how long a step takes, for records. `read` as in `make_cost`."""
        return {**asdict(self), "cost": to_json(self.make_cost(read))}
