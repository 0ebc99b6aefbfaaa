"""The replica as its agent reaches it: HTTP requests for each step of `steps`."""

import asyncio
import json
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from sglang_fair.agent.steps import Answer, Do
from sglang_fair.common.service_keys import replica_key
from sglang_fair.common.swapping import HEADER_MODEL, HEADER_PROBE, PATH, seen
from sglang_fair.models import checkpoint

LOOK_TIMEOUT_S = 10.0
STEP_TIMEOUT_S = 120.0
LOAD_TIMEOUT_S = 1800.0
"""Of weights on a slow disk."""

PROBE = {
    "input_ids": [1, 2, 3, 4],
    "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
}


class ReplicaClient:
    """Belongs to one event loop; `async with` it."""

    def __init__(
        self, url: str, folders: Mapping[str, Path], first: str, tls: ssl.SSLContext | None = None
    ) -> None:
        """`folders` are the models' by name; all must be like that of `first`, which is compared before each load.
        `tls` is for an https:// address; None: as the system believes."""
        self._tls = tls
        self._url = url.rstrip("/")
        self._folders = folders
        self._first = first
        self._run = ""
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "ReplicaClient":
        self._session = aiohttp.ClientSession(
            headers=replica_key.headers(), connector=aiohttp.TCPConnector(ssl=self._tls or True)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def do(self, do: Do) -> Answer:
        """One step, and what came of it."""
        try:
            match do.step:
                case "look":
                    found = seen(await self._ask("GET", PATH, timeout_s=LOOK_TIMEOUT_S))
                    self._run = found.run
                    return Answer(found)
                case "check":
                    await asyncio.to_thread(self._check, do.model)
                case "load":
                    await self._load(do.model)
                case "probe":
                    headers = {HEADER_PROBE: self._run, HEADER_MODEL: do.model}
                    answer = await self._ask("POST", "/generate", PROBE, headers)
                    tokens = answer.get("output_ids") if isinstance(answer, Mapping) else None
                    if not isinstance(tokens, list) or len(tokens) != 1:
                        raise ValueError(f"it does not generate: {answer!r:.200}")
                case _:
                    await self._ask("POST", PATH, {"state": do.step, "model": do.model})
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            return Answer(error=f"{do.step}: {type(error).__name__}: {error}", is_gone=True)
        except (ValueError, OSError) as error:
            return Answer(error=str(error))
        return Answer()

    def _check(self, model: str) -> None:
        """Raises ValueError or OSError for weights that are missing, damaged, or of another shape than the first
        model's."""
        ours = checkpoint.read(self._folders[model])
        if self._first != model:
            reason = checkpoint.difference(checkpoint.read(self._folders[self._first]), ours)
            if reason is not None:
                raise ValueError(reason)

    async def _load(self, model: str) -> None:
        """Exchanges the weights while SGLang stands still. Whatever of it has happened before may happen again."""
        await self._ask("POST", "/pause_generation", {"mode": "retract"})
        # An earlier agent's load may still be running. SGLang takes the answer to that for the answer to ours, so ours
        # waits until the scheduler, which does one thing after the other, has answered this.
        await self._ask("GET", "/fair", timeout_s=LOAD_TIMEOUT_S)
        body = {"model_path": str(self._folders[model]), "load_format": "auto", "flush_cache": True}
        answer = await self._ask("POST", "/update_weights_from_disk", body, timeout_s=LOAD_TIMEOUT_S)
        if not isinstance(answer, Mapping) or answer.get("success") is not True:
            raise ValueError(f"SGLang did not load it: {answer!r:.200}")
        await self._ask("POST", "/flush_cache")
        await self._ask("POST", "/continue_generation", {})

    async def _ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = STEP_TIMEOUT_S,
    ) -> Any:
        """The answer, from JSON if it is JSON. Raises ValueError for another status than 200."""
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5.0)
        async with self._session.request(
            method, self._url + path, json=body, headers=headers, timeout=timeout
        ) as response:
            text = await response.text(errors="replace")
            if response.status != 200:
                raise ValueError(f"{path} answered {response.status}: {text[:300]}")
        try:
            return json.loads(text)
        except ValueError:
            return text
