"""FairServe, Figure 8d: users whose requests wait."""

from workloads.experiments.fairserve_setting import Crowded


class Delay(Crowded):
    id = "fairserve-delay"
    schedulers = ("rpm", "vtc", "fs-w", "fs", "dlpm")
