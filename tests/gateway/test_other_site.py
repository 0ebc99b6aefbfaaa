"""Another site's page, in a browser on an operator's machine, before a gateway without any key."""

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from tests.gateway.clusters import Cluster, FakeReplica
from tests.support.browser import IN_A_BROWSER, chromium
from tests.support.ports import free_port

pytestmark = [*IN_A_BROWSER, pytest.mark.slow]

EVIL = "evil.example"

TRIES = """async ([url, worker]) => {
  const read = [];
  const asked = [["/workers", worker], ["/limits", '{"user": 1}'], ["/status"], ["/v1/completions", '{"prompt": "x"}']];
  for (const mode of ["no-cors", "cors"])
    for (const [path, body] of asked)
      for (const type of ["text/plain", "application/json"])
        try {
          const more = body ? {method: "POST", body, headers: {"content-type": type}} : {};
          const signal = AbortSignal.timeout(2000);
          const text = await (await fetch(url + path, {mode, signal, ...more})).text();
          if (text) read.push([path, mode, type, text]);
        } catch {}
  const frame = document.createElement("iframe");
  frame.name = "frame";
  const form = document.createElement("form");
  Object.assign(form, {action: url + "/workers", method: "post", enctype: "text/plain", target: "frame"});
  const field = document.createElement("input");
  [field.name, field.value] = [worker.slice(0, -1) + ',"model":"', '"}'];
  form.append(field);
  document.body.append(frame, form);
  const loaded = new Promise(done => { frame.addEventListener("load", done); setTimeout(done, 2000); });
  form.submit();
  await loaded;
  return read;
}"""


async def test_it_adds_no_worker_sets_no_limits_and_reads_nothing(c: Cluster) -> None:
    other, port = FakeReplica(), free_port()
    await other.start()

    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<body>", content_type="text/html")

    site = web.Application()
    site.router.add_get("/", page)
    runner = web.AppRunner(site)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    rebound = f"http://{EVIL}:{urlsplit(c.url).port}"

    def tried() -> tuple[list[Any], Any]:
        with chromium(f"--host-resolver-rules=MAP {EVIL} 127.0.0.1") as browser:
            page = browser.new_page()
            page.goto(f"http://{EVIL}:{port}/")
            read = [
                page.evaluate(TRIES, [url, json.dumps({"url": other.url, "name": "evil"})])
                for url in (c.url, c.url.replace("127.0.0.1", "localhost"), rebound)
            ]
            return read, page.goto(f"{rebound}/status").status

    try:
        assert await asyncio.to_thread(tried) == ([[], [], []], 403)
        assert list((await c.state())["workers"]) == ["r0"]
        assert c.replicas[0].requests == []
        assert c.gateway.metrics.status()["refusals"]["403"] > 10
    finally:
        await runner.cleanup()
        await other.close()
