"""DLPM's Figure 7: the prices that its quanta follow from are its programs' own, and how unevenly replicas compute."""

import pytest

from workloads.clients import SCENARIOS, Scale
from workloads.experiments.dlpm_setting import KINDS, imbalance
from workloads.experiments.dlpm_table2 import statistics
from workloads.programs import PackedCodec
from workloads.records import Manifest, RequestRecord, Run


@pytest.mark.parametrize("name", KINDS)
def test_prices_are_those_of_a_well_behaved_program(name):
    kind = KINDS[name]
    scale = Scale(document_spread=0.0)
    [good, *_] = SCENARIOS[f"{name}-s1"].clients(scale=scale, rate_per_s=1.0, codec=PackedCodec())
    found = statistics([good.program(0)])
    full = found.requests * (found.prompt_tokens + 2 * found.output_tokens)
    assert found.requests == kind.requests
    assert kind.charged_in_full == pytest.approx(full, rel=0.02)
    assert kind.charged == pytest.approx(full - found.requests * found.shared_tokens, rel=0.02)


def request(worker: str | None, prompt: int, cached: int | None) -> RequestRecord:
    return RequestRecord(
        "a", 0, 0, "s", 0.0, 0.0, 1.0, 1.0, "ok", prompt_tokens=prompt, cached_tokens=cached, worker=worker
    )


def test_imbalance_is_that_of_computed_prompt_tokens_over_all_replicas():
    run = Run(Manifest("w", "s", {}, 1.0, workers=4))
    assert imbalance(run) is None
    run.requests += [
        request("r0", 70, 10),
        request("r2", 30, 10),
        request("r3", 9, None),
        request(None, 9, 0),
    ]
    assert imbalance(run) == pytest.approx(60 / (80 / 4))
