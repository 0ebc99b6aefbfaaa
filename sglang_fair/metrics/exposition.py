"""The text that Prometheus reads, from rows of numbers; each family as the table has it.

The library chooses where it keeps values when it is imported, by PROMETHEUS_MULTIPROC_DIR, which SGLang sets late. So
in a replica this module is imported when the first page is asked for, and not before.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from sglang_fair.metrics.table import BY_NAME, cumulative

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

Row = tuple[str, Sequence[str], Any]
"""A metric's name in the table, the values of its labels, and the number; of a histogram its `plain` form."""


class _Rows(Collector):
    def __init__(self, rows: Iterable[Row], more: Sequence[str]) -> None:
        self._rows = rows
        self._more = more

    def collect(self) -> Iterable[Family]:
        families: dict[str, Any] = {}
        for name, values, number in self._rows:
            metric, family = BY_NAME[name], families.get(name)
            labels = [*metric.labels, *self._more]
            if family is None:
                made = {
                    "counter": CounterMetricFamily,
                    "gauge": GaugeMetricFamily,
                    "histogram": HistogramMetricFamily,
                }[metric.kind]
                family = families[name] = made(metric.full_name, metric.help, labels=labels)
            if metric.kind == "histogram":
                family.add_metric(values, cumulative(number["counts"]), number["sum_s"])
            else:
                family.add_metric(values, number)
        return families.values()


def text(rows: Iterable[Row], more: Sequence[str] = ()) -> bytes:
    """The page. `more` are labels of all rows behind those of the table. A metric without rows is left out."""
    return generate_latest(_Rows(rows, more))
