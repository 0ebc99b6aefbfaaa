"""Calibration: the fit, the grid, and a whole calibration of a real replica."""

import asyncio
import json
from dataclasses import astuple, fields
from random import Random

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from sglang_fair.calibration import measure
from sglang_fair.calibration.__main__ import main
from sglang_fair.calibration.grid import GridCell, ReplicaLimits, grid, simulated_crowd, under_load
from sglang_fair.common.files import read_json
from sglang_fair.settings.commands import run
from sglang_fair.sim.cost_model import Fitted, make_cost_model
from sglang_fair.sim.fitting import Measurement, errors, fit, non_negative
from tests.support.live import Replica

KNOWN = Fitted(0.004, 2e-5, 3e-8, 2e-4, 0.003, 1.5e-4, 4e-7, 5e-6)
CPU = ReplicaLimits(chunk_tokens=2048, pool_tokens=24_576, running=64, context_tokens=32_768, page_tokens=16)
GPU = ReplicaLimits(
    chunk_tokens=8192, pool_tokens=400_000, running=256, context_tokens=131_072, page_tokens=1
)


def synthetic(model, cells, noise=0.0, seed=0):
    rng = Random(seed)
    bare = [
        Measurement(((cell.extend_tokens, cell.cached_tokens),) * cell.requests, cell.steps, 1.0)
        for cell in cells
    ]
    return [
        Measurement(each.extends, each.steps, each.predicted_s(model) * rng.lognormvariate(0, noise))
        for each in bare
    ]


# ---- the fit


@pytest.mark.parametrize("limits", [CPU, GPU])
@pytest.mark.parametrize("quick", [False, True])
def test_the_grid_tells_all_coefficients_apart(limits, quick):
    measured = synthetic(KNOWN, grid(limits, 8192, quick=quick))
    assert astuple(fit(measured)) == pytest.approx(astuple(KNOWN), rel=1e-6)
    assert errors(fit(measured), measured).worst < 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_the_fit_bears_noise(seed):
    """With 5 % of it, what the model says is near the truth all over the grid, and its errors are the noise."""
    cells = grid(CPU, 4096)
    found = fit(synthetic(KNOWN, cells, noise=0.05, seed=seed))
    truth = errors(found, synthetic(KNOWN, cells))
    assert truth.median < 0.03
    assert truth.worst < 0.15
    noisy = errors(found, synthetic(KNOWN, cells, noise=0.05, seed=seed))
    assert 0.01 < noisy.median < 0.06 < noisy.worst


@pytest.mark.parametrize("missing", [own.name for own in fields(Fitted)])
def test_what_costs_nothing_is_found_to_cost_nothing(missing):
    free = Fitted(**{own.name: getattr(KNOWN, own.name) * (own.name != missing) for own in fields(Fitted)})
    found = fit(synthetic(free, grid(CPU, 4096), noise=0.02))
    assert all(value >= 0 for value in astuple(found))
    assert errors(found, synthetic(free, grid(CPU, 4096))).worst < 0.05


def test_a_fit_needs_enough_that_differs():
    for measured in (
        [],
        synthetic(KNOWN, [GridCell(1, 16)] * 20),
        synthetic(KNOWN, [c for c in grid(CPU, 4096) if not c.steps]),
    ):
        with pytest.raises(ValueError, match="do not tell 8 coefficients apart"):
            fit(measured)
    with pytest.raises(ValueError, match="nothing was measured"):
        errors(KNOWN, [])


@given(st.integers(0, 10**6))
def test_non_negative_least_squares_meet_their_conditions(seed):
    """Karush-Kuhn-Tucker: the gradient vanishes where a coefficient is used and points up where it is 0."""
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(12, 4)), rng.normal(size=12)
    found = non_negative(matrix, target)
    gradient = matrix.T @ (matrix @ found - target)
    assert (found >= 0).all()
    assert gradient[found > 0] == pytest.approx(0, abs=1e-9)
    assert (gradient[found == 0] >= -1e-9).all()


# ---- the crowd


@pytest.mark.parametrize("scheduling_s", [0.0, 0.0007, 0.01])
def test_what_scheduling_adds_to_each_step_is_found_again(scheduling_s):
    crowd = GridCell(4 * CPU.running, 64, steps=16)
    fitted_s, steps = simulated_crowd(crowd, KNOWN, CPU)
    loaded_s, _ = simulated_crowd(crowd, under_load(KNOWN, scheduling_s), CPU)
    assert steps >= 4 * 16
    assert (loaded_s - fitted_s) / steps == pytest.approx(scheduling_s, abs=1e-9)


# ---- the grid


@given(
    st.builds(
        ReplicaLimits,
        chunk_tokens=st.integers(64, 16_384),
        pool_tokens=st.integers(8192, 10**6),
        running=st.integers(1, 512),
        context_tokens=st.integers(2048, 131_072),
        page_tokens=st.sampled_from([1, 16, 64]),
    ),
    st.integers(512, 32_768),
    st.booleans(),
)
def test_every_cell_is_one_batch_that_fits(limits, longest, quick):
    cells = grid(limits, longest, quick=quick)
    assert any(cell.steps for cell in cells)
    assert len(set(cells)) == len(cells)
    for cell in cells:
        assert 0 < cell.requests * cell.extend_tokens <= limits.chunk_tokens
        assert cell.requests <= limits.running
        length = cell.cached_tokens + cell.extend_tokens + 1 + cell.steps
        assert length < limits.context_tokens
        assert cell.cached_tokens <= longest
        assert cell.requests * length <= limits.pool_tokens * 3 / 4


def test_limits_are_what_the_server_tells():
    told = {"chunked_prefill_size": 8192, "max_prefill_tokens": 16_384, "max_total_num_tokens": 400_000, "page_size": 1,
            "max_running_requests": 256, "context_length": 131_072}  # fmt: skip
    assert ReplicaLimits.of_server(told) == GPU
    assert ReplicaLimits.of_server({**told, "chunked_prefill_size": -1}).chunk_tokens == 16_384
    assert ReplicaLimits.of_server({}).chunk_tokens > 0


# ---- the command


LIMIT_S = 60.0
"""For what takes no time, on however busy a machine."""


def measured_on(handlers, *, timeout_s=LIMIT_S):
    """Connects to a server with these handlers and measures one batch; a plug that is left running is an error."""

    async def connects():
        app = web.Application()
        for path, handler in handlers.items():
            app.router.add_route("*", path, handler)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with TestServer(app) as server, aiohttp.ClientSession(timeout=timeout) as session:
            replica = measure.MeasuredReplica(session, str(server.make_url("")), Random(0))
            try:
                await replica.connect()
                await replica.measure(GridCell(1, 16), 1)
            finally:
                assert not [task for task in asyncio.all_tasks() if "generate" in repr(task.get_coro())]

    asyncio.run(connects())


async def silent(_):
    await asyncio.sleep(3600)


async def html(_):
    return web.Response(text="data: {no JSON", content_type="text/html")


async def empty(_):
    return web.json_response({})


@pytest.mark.parametrize(
    ("handlers", "timeout_s", "says"),
    [
        ({"/server_info": silent}, 0.1, "cannot reach http://[^ ]*: no answer"),
        ({}, LIMIT_S, r"is it an SGLang server\? HTTP 404"),
        ({"/server_info": html}, LIMIT_S, "is it an SGLang server"),
        (
            {"/server_info": empty, "/generate": silent},
            1.0,
            "failed during the measurement: timed out",
        ),
        ({"/server_info": empty, "/generate": html}, LIMIT_S, "does not answer as SGLang does"),
    ],
)
def test_what_is_no_replica_is_named_in_one_line(handlers, timeout_s, says):
    with pytest.raises(measure.CalibrationError, match=says) as raised:
        measured_on(handlers, timeout_s=timeout_s)
    assert "\n" not in str(raised.value)


def test_a_refused_batch_leaves_no_plug_behind():
    asked = []

    async def generate(request):
        asked.append(await request.json())
        if len(asked) == 3:
            await silent(request)
        if len(asked) == 4:
            return web.Response(status=503, text="too much")
        told = {"index": 0, "meta_info": {"prompt_tokens": 1, "cached_tokens": 0}}
        return web.Response(text=f"data: {json.dumps(told)}\n\n")

    with pytest.raises(measure.CalibrationError, match="HTTP 503: too much"):
        measured_on({"/server_info": empty, "/generate": generate})
    assert len(asked) == 4


@pytest.mark.engine
def test_a_real_replica_is_calibrated(tmp_path, capsys):
    path = tmp_path / "tiny.json"
    with Replica("--policy", "dlpm") as replica:
        given = [replica.url, "--out", str(path), "--quick", "--context", "1024", "--seed", "3"]
        assert run(main, "sglang-fair calibrate", given) == 0
        idle = asyncio.run(replica.ask("someone", list(range(3, 100)), 2))
        assert idle.status == 200
    found = json.loads(path.read_text())
    model = make_cost_model(str(path), read_json)
    assert isinstance(model, Fitted)
    assert model.prefill_s([(1000, 0)]) > 0
    assert model.decode_s(4, 4000) > 0
    assert found["seed"] == 3
    assert found["server"]["version"]
    assert found["scheduling_s"] >= 0
    assert found["crowd"]["requests"] == 4 * found["limits"]["running"]
    assert found["limits"]["page_tokens"] == 16
    assert all(len(each["tries_s"]) == 3 for each in found["measured"])
    cached = {(each["cached_tokens"], tuple(map(tuple, each["extends"]))) for each in found["measured"]}
    assert all(behind == (extends[0][1] if behind else 0) for behind, extends in cached), cached
    assert "median error" in capsys.readouterr().err
