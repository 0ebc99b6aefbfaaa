"""The models that a gateway serves, by name, and which of them a request asks for."""

from collections.abc import Iterator

from router.gateway.errors import ApiError

DEFAULT_MODEL = "default"
"""The name by which a client may ask for the first model."""


class Names:
    """The first one is what a request gets that names none. An adapter of a model is called by the model's name, a
    colon and its own, as SGLang has it."""

    def __init__(self, first: str, *more: str) -> None:
        self.first = first
        self._all = dict.fromkeys((first, *more))

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, name: object) -> bool:
        return name in self._all

    def asked_for(self, name: str | None) -> str:
        """The model and adapter that a request means by `name`. Raises `ApiError` 404 for a model that there is not."""
        if name is None or name == DEFAULT_MODEL:
            return self.first
        if name not in self._all and self.model_of(name) is None:
            raise model_not_found(name)
        return name

    def model_of(self, name: str) -> str | None:
        """The model that `name` names, or an adapter of which; None: none of these."""
        if name in self._all:
            return name
        owners = [model for model in self._all if name.startswith(f"{model}:")]
        return max(owners, key=len, default=None)


def model_not_found(asked: str) -> ApiError:
    return ApiError(404, f"the model {asked[:200]!r} does not exist here", code="model_not_found")
