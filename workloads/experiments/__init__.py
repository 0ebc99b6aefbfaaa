"""The papers' experiments and ours.

To add one, write a class in a file here (see `contract`) and add it to `EXPERIMENTS` below. Then `sglang-fair reproduce
ID --quick` runs it small, and `sglang-fair reproduce ID --publish` runs it and writes its records, plots and section of
the page.
"""

from collections.abc import Mapping

from workloads.experiments import (
    beyond_batches,
    beyond_deadlines,
    beyond_equity,
    beyond_frontier,
    beyond_isolation,
    beyond_placement,
    beyond_routers,
    cost_functions,
    dlpm_a10g,
    dlpm_fig4,
    dlpm_fig7,
    dlpm_table2,
    fairserve,
    qlm,
    qlm_waits,
    vtc,
    vtc_trace,
)
from workloads.experiments.contract import Experiment

EXPERIMENTS: Mapping[str, Experiment] = {
    experiment.id: experiment()
    for experiment in (
        vtc.Overload, vtc.BelowShare, vtc.OnOff, vtc.OnOffOverload, vtc.Lengths, vtc.Isolation, vtc.Shift,
        vtc_trace.ArenaTrace, vtc.Pools, vtc.Weighted, vtc.Prediction, vtc.Profiled, cost_functions.CostFunctions,
        dlpm_table2.Table2, dlpm_fig7.Figure7, dlpm_fig7.Sensitivity, dlpm_a10g.Figure1, dlpm_fig4.Figure4,
        dlpm_a10g.Figure8, dlpm_a10g.Figure9, dlpm_a10g.Figure10, dlpm_a10g.Figure11, dlpm_a10g.Figure12,
        fairserve.Abuse, fairserve.Delay, fairserve.Table3, fairserve.Table4, beyond_equity.Equity, qlm_waits.Waits,
        qlm.Blocking, qlm.Drain, qlm.Sweep, qlm.Ablation, qlm.Models, qlm.Hardware, qlm.Mega, qlm.Queues, qlm.Overhead,
        qlm.Needed, beyond_deadlines.Shared, beyond_routers.Routers, beyond_isolation.Isolation,
        beyond_placement.Contest, beyond_frontier.Frontier, beyond_isolation.Target, beyond_batches.Batches,
    )
}  # fmt: skip
