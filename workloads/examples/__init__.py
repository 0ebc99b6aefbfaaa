"""Programs in SGLang's frontend language, and a gateway as such programs have their backends."""

from copy import copy
from typing import Any
from uuid import uuid4

from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint


class Endpoint(RuntimeEndpoint):
    """Each run of a program is one interaction of the application `app`, its forks included.

    Of SGLang 0.5.23: all that the frontend sends to /generate goes through `_add_images`, and all forks of a run have
    the chat template that it got when it began.
    """

    def __init__(self, base_url: str, app: str = "", **more: Any) -> None:
        """`more`: `api_key`, `chat_template_name`, ... of SGLang's own endpoint. Raises RuntimeError for a gateway that
        does not take the key, or has no replica."""
        super().__init__(base_url, **more)
        self.app = app
        self.support_concate_and_append = False  # no server of SGLang 0.5.23 does

    def get_chat_template(self) -> Any:
        template = copy(self.chat_template)
        template.interaction = uuid4().hex
        return template

    def _add_images(self, s: Any, data: dict[str, Any]) -> None:
        super()._add_images(s, data)
        data["metadata"] = {"app": self.app, "interaction": s.chat_template.interaction}
