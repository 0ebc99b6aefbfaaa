"""The papers' experiments and ours.

To add one, write a class in a file here (see `contract`) and add it to `EXPERIMENTS` below. Then `sglang-fair reproduce
ID --quick` runs it small, and `sglang-fair reproduce ID --publish` runs it and writes its records, plots and section of
the page.
"""

from collections.abc import Mapping

from workloads.experiments.beyond_deadlines import Shared
from workloads.experiments.beyond_equity import Equity
from workloads.experiments.beyond_isolation import Isolation as BesideFloods
from workloads.experiments.beyond_isolation import Target
from workloads.experiments.beyond_placement import Contest
from workloads.experiments.beyond_routers import Routers
from workloads.experiments.contract import Experiment
from workloads.experiments.cost_functions import CostFunctions
from workloads.experiments.dlpm_a10g import Figure1, Figure8, Figure9, Figure10, Figure11, Figure12
from workloads.experiments.dlpm_fig4 import Figure4
from workloads.experiments.dlpm_fig7 import Figure7, Sensitivity
from workloads.experiments.dlpm_table2 import Table2
from workloads.experiments.fairserve import Abuse, Delay, Table3, Table4
from workloads.experiments.qlm import (
    Ablation,
    Blocking,
    Drain,
    Hardware,
    Mega,
    Models,
    Needed,
    Overhead,
    Queues,
    Sweep,
)
from workloads.experiments.qlm_waits import Waits
from workloads.experiments.vtc import (
    BelowShare,
    Isolation,
    Lengths,
    OnOff,
    OnOffOverload,
    Overload,
    Pools,
    Prediction,
    Profiled,
    Shift,
    Weighted,
)
from workloads.experiments.vtc_trace import ArenaTrace

EXPERIMENTS: Mapping[str, Experiment] = {
    experiment.id: experiment
    for experiment in (
        Overload(), BelowShare(), OnOff(), OnOffOverload(), Lengths(), Isolation(), Shift(), ArenaTrace(),
        Pools(), Weighted(), Prediction(), Profiled(), CostFunctions(),
        Table2(), Figure7(), Sensitivity(),
        Figure1(), Figure4(), Figure8(), Figure9(), Figure10(), Figure11(), Figure12(),
        Abuse(), Delay(), Table3(), Table4(), Equity(),
        Waits(), Blocking(), Drain(), Sweep(), Ablation(), Models(), Hardware(), Mega(), Queues(),
        Overhead(), Needed(), Shared(),
        Routers(), BesideFloods(), Contest(), Target(),
    )
}  # fmt: skip
