"""One request and its answer: the traffic of the VTC paper, and of traces, which tell lengths alone."""

from dataclasses import dataclass

from workloads.programs.call import Call, Program, Prompt, Reply


@dataclass(frozen=True, slots=True)
class Single:
    """One call, whose answer has `output_tokens`."""

    output_tokens: int

    @property
    def requests(self) -> int:
        return 1

    def program(self, prompt: Prompt) -> Program:
        """Ask once. Returns the answer's text, None where there was none."""
        reply: Reply = yield Call(prompt, self.output_tokens, "single")
        return reply.text if reply.ok else None
