"""Shapes of models: how many bytes a forward pass reads and how many operations a token takes.

Dense decoders with grouped-query attention and a gated MLP (Llama's family), bf16. The numbers are those of
the published config.json files; the parameter counts that follow from them are the published ones. With fewer
`weight_bits` the layers' matrices are quantized: they take and move less memory, are multiplied as fast, and the
embedding, the head and the norms stay in bf16.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as a cost model sees it."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """The output head is the embedding table."""
    context_tokens: int
    mlp_matrices: int = 3
    """Gate, up and down."""
    weight_bits: int = 16
    """Of each parameter of the layers' matrices."""

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers' matrices, by which every token is multiplied."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + self.mlp_matrices * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head, by which the last token of each request is multiplied."""
        return self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """All parameters, with the embedding table and the norms."""
        norms = (2 * self.layers + 1) * self.hidden
        return self.layer_parameters + norms + self.head_parameters * (1 if self.tied else 2)

    @property
    def weight_bytes(self) -> int:
        return self._layer_bytes + (self.parameters - self.layer_parameters) * _BF16_BYTES

    @property
    def read_bytes(self) -> int:
        """Weights that one forward pass reads: layers and head. It reads only single rows of the embedding table."""
        return self._layer_bytes + self.head_parameters * _BF16_BYTES

    @property
    def _layer_bytes(self) -> int:
        return self.layer_parameters * self.weight_bits // 8

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * _BF16_BYTES

    @property
    def flops_per_pair(self) -> int:
        """Operations for one token to attend to another: a product with its key and one with its value per head."""
        return 4 * self.layers * self.heads * self.head_dim


SHAPES: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3.2-3b", 28, 3072, 8192, 24, 8, 128, 128_256, True, 131_072),
        ModelShape("llama-3.1-8b", 32, 4096, 14_336, 32, 8, 128, 128_256, False, 131_072),
        ModelShape("llama-2-7b", 32, 4096, 11_008, 32, 32, 128, 32_000, False, 4096),
        ModelShape("llama-2-13b", 40, 5120, 13_824, 40, 40, 128, 32_000, False, 4096),
        ModelShape("vicuna-13b", 40, 5120, 13_824, 40, 40, 128, 32_000, False, 4096),
        ModelShape("mistral-7b", 32, 4096, 14_336, 32, 8, 128, 32_000, False, 32_768),
        ModelShape("llama-2-70b-4bit", 80, 8192, 28_672, 64, 8, 128, 32_000, False, 4096, weight_bits=4),
    )
}
