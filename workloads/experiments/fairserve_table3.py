"""FairServe, Table 3 and Figure 9: throughput, time to first token, and who is served."""

from collections.abc import Mapping

from workloads.experiments.contract import Json, Result
from workloads.experiments.fairserve_setting import Crowded


class Table3(Crowded):
    id = "fairserve-table3"
    schedulers = ("rpm", "vtc", "fs-w", "fs", "literal", "dlpm")

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        apps = list(results["fs"].first["apps"])
        tokens = {
            name: [
                results[name].number(f"apps/{app}/prompt_tokens")
                + results[name].number(f"apps/{app}/output_tokens")
                for app in apps
            ]
            for name in ("fs", "rpm")
        }
        over = [fs / rpm for fs, rpm in zip(tokens["fs"], tokens["rpm"], strict=True) if rpm]
        return {**super().values(results), "worst_app": min(over), "best_app": max(over)}
