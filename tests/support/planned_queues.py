"""A placement that is planned: it holds what comes, asks when it is told to be late, and remembers what it hears."""

from collections.abc import Mapping, Sequence

from router.placement.contract import Memoryless, Request
from router.queues.problem import Demand, Orders, Problem, Queue
from router.queues.replan import Replans

GROUPS = 3


def small(number: int = 0) -> Problem:
    queues = [Queue("a", "m"), Queue("b", "m")]
    demands = [Demand(10 * number + at, "m", 5.0, {"a": 2.0, "b": 3.0}) for at in range(GROUPS)]
    return Problem(demands, queues)


class Queues(Memoryless):
    """Lets `let_go` of what waits go, in order; is late while `is_late`."""

    def __init__(self) -> None:
        self.replans = Replans()
        self.is_late = False
        self.attended: list[bool] = []
        self.applied: list[tuple[int, Orders]] = []
        self.kinds: list[tuple[str, str]] = []
        self.waiting: list[Request] = []
        self.let_go = 0

    def place(self, request: Request, match: object, workers: Sequence[object], now_s: float) -> str | None:
        self.waiting.append(request)
        return None

    def next(self, workers: Sequence, match: object, may: object, *_: object) -> tuple[Request, str] | None:
        if not (self.let_go and self.waiting):
            return None
        self.let_go -= 1
        return self.waiting.pop(0), workers[0].name

    def give_up(self, request: Request) -> None:
        self.waiting.remove(request)

    def question(self, now_s: float) -> tuple[int, Problem] | None:
        if not any(self.attended[-1:]):
            return None
        asks = "ask" in self.replans.due(self.is_late, now_s)
        return (self.replans.asked, small(self.replans.asked)) if asks else None

    def answer(self, number: int, orders: Orders, now_s: float) -> bool:
        if not self.replans.accept(number):
            return False
        self.applied.append((number, orders))
        return True

    def late(self, now_s: float) -> Sequence[str]:
        return ("a",) if self.is_late else ()

    def attend(self, is_there: bool, now_s: float) -> None:
        self.attended.append(is_there)

    def lengths(self) -> Mapping[tuple[str, str], Sequence[tuple[float, float]]]:
        return {("m", "interactive"): [(1.0, 2.0), (3.0, 4.0)]}

    def centre(self, model: str, slo_class: str, centres: Sequence[tuple[float, float]]) -> None:
        if len(centres) != 1:
            raise ValueError("one")
        self.kinds.append((model, slo_class))

    def report(self) -> Mapping[str, object]:
        return {"waiting": len(self.waiting)}

    def standing(self, request_id: str, now_s: float, *, ahead: bool = True) -> Mapping[str, object] | None:
        return {"group": 1, "ahead": ahead}
