"""VTC and DLPM with predicted outputs, which are charged before they are made (VTC, Algorithm 3).

Rule: as VTC or DLPM, but the predicted output is charged at admission (see `predictor`). The policies here differ only
in their predictor; the charging itself is done by `Account`.

Unit of fairness: as VTC and DLPM; in the end every request has cost its client what it really got.
Bounds, with P the dearest prediction charged and not yet made or given back for one client's running requests,
at most its outputs owed:

- `vtc-oracle`: VTC's, if every job tells its true output. One that is aborted, or that lies, gives back a
  charge, which lowers a counter, and the lemma under VTC's theorem is that the smallest one never falls.
- `vtc-predict`, `vtc-noisy`: none is proven, because their refunds make the smallest counter fall. A prediction
  counts up to the request's longest output only, so a client never pays ahead for more than the pool holds.
- `dlpm-predict`: 2·(U + Q^u + P), whatever the predictor says: the counter, without what is charged ahead, stays
  within (-U, Q^u + P], and clients that wait are replenished equally often.

Knobs: those of VTC and DLPM; `noise_percent`, `seed`; `remembered_clients`, whose last outputs are kept.
Trade-offs: in practice counters differ less, the better the prediction. A prediction that is too high makes its client
wait for service that it gets back only later. Known leak: a client that announces short outputs (`vtc-oracle`) is
charged as late as without prediction, but no later. Aborted outputs count in the mean.
"""

from dataclasses import dataclass
from typing import ClassVar

from sglang_fair.core.dlpm import Dlpm
from sglang_fair.core.predictor import MeanOfLast, Noisy, Oracle, Predictor
from sglang_fair.core.vtc import Vtc


@dataclass
class VtcPredict(Vtc):
    """VTC; a client's next output is the mean of its last five."""

    name: ClassVar[str] = "vtc-predict"
    remembered_clients: int = 10_000

    def __post_init__(self) -> None:
        self.predictor = self._predictor()

    def _predictor(self) -> Predictor:
        return MeanOfLast(max_clients=self.remembered_clients)


@dataclass
class VtcOracle(VtcPredict):
    """VTC; the job announces its output."""

    name: ClassVar[str] = "vtc-oracle"

    def _predictor(self) -> Predictor:
        return Oracle(super()._predictor())


@dataclass
class VtcNoisy(VtcOracle):
    """VTC; the job announces its output, which is distorted by up to `noise_percent`."""

    name: ClassVar[str] = "vtc-noisy"
    noise_percent: float = 50.0
    seed: int = 0

    def _predictor(self) -> Predictor:
        return Noisy(super()._predictor(), self.noise_percent, self.seed)


@dataclass
class DlpmPredict(Dlpm):
    """DLPM; a client's next output is the mean of its last five."""

    name: ClassVar[str] = "dlpm-predict"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.predictor = MeanOfLast(max_clients=self.remembered_clients)
