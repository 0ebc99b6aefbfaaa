"""Shapes of models: how many bytes a pass reads and how many operations a token takes.

Dense decoders with grouped-query attention and a gated MLP (Llama's family), bf16. The numbers are those of
the published config.json files; the parameter counts that follow from them are the published ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

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
    """Whether the output head is the embedding table."""
    context_tokens: int
    mlp_matrices: int = 3
    """Gate, up and down."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and (type(value) is not int or value < 1):
                raise ValueError(
                    f"{field.name} of model {self.name!r} must be a whole number from 1, not {value!r}"
                )

    @property
    def layer_parameters(self) -> int:
        """Of all layers' matrices: what every token is multiplied with."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + self.mlp_matrices * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        """Of the output head: what the last token of each request in a batch is multiplied with."""
        return self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """All, the embedding table and the norms included."""
        norms = (2 * self.layers + 1) * self.hidden
        return self.layer_parameters + norms + self.head_parameters * (1 if self.tied else 2)

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take."""
        return self.parameters * _BF16_BYTES

    @property
    def read_bytes(self) -> int:
        """Weights that one pass reads: layers and head. Of the embedding table it looks up single rows."""
        return (self.layer_parameters + self.head_parameters) * _BF16_BYTES

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _BF16_BYTES

    @property
    def flops_per_pair(self) -> int:
        """For one token to attend to one: a product with its key and one with its value, in each head."""
        return 4 * self.layers * self.heads * self.head_dim


SHAPES: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3.2-3b", 28, 3072, 8192, 24, 8, 128, 128_256, True, 131_072),
        ModelShape("llama-3.1-8b", 32, 4096, 14_336, 32, 8, 128, 128_256, False, 131_072),
        ModelShape("llama-2-7b", 32, 4096, 11_008, 32, 32, 128, 32_000, False, 4096),
        ModelShape("llama-2-13b", 40, 5120, 13_824, 40, 40, 128, 32_000, False, 4096),
    )
}
