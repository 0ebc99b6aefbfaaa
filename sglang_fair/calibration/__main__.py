"""`sglang-fair calibrate`: measures a replica and writes its cost model to a file."""

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from sglang_fair.calibration.measure import LONGEST_TOKENS, CalibrationError, calibrate
from sglang_fair.settings.commands import Argument, Mistake, Option, run

SHORTEST_TOKENS = 512
"""With contexts shorter than this, the cost of a context's length cannot be seen."""

BUSY_SPREAD = 0.5
"""When equal measurements differ by more than this, other processes are the cause, not the replica."""


def main(
    url: Annotated[str, Argument(metavar="URL", help="Of an SGLang server, http://HOST:PORT.")],
    out: Annotated[Path, Option(metavar="FILE", help="Where to write the cost model.")] = Path(
        "calibration.json"
    ),
    context: Annotated[
        int, Option(metavar="TOKENS", help="The longest context that matters to your traffic.")
    ] = LONGEST_TOKENS,
    quick: Annotated[bool, Option("--quick", help="A small grid and fewer tries.")] = False,
    seed: Annotated[int, Option(help="Of the prompts.")] = 0,
) -> int:
    """Measure a replica and fit the cost model that emulated and simulated replicas use.

    The file has the coefficients, how far the model is from the measurements, and the measurements. `--cost-model FILE`
    of a simulation or of an emulated cluster reads it. Exit code 1 if the replica could not be measured.
    """
    # Minutes of measuring follow, so all that can be wrong is checked first.
    if not url.startswith(("http://", "https://")):
        raise Mistake(f"the URL must begin with http:// or https://, not be {url!r}")
    if context < SHORTEST_TOKENS:
        raise Mistake(f"--context must be at least {SHORTEST_TOKENS} tokens, not {context}")
    if not out.parent.is_dir():
        raise Mistake(f"--out: there is no folder {out.parent}")
    try:
        found = asyncio.run(calibrate(url, longest_tokens=context, quick=quick, seed=seed, say=_say))
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except (CalibrationError, OSError) as error:
        _say(f"sglang-fair calibrate: {error}")
        return 1
    _say(summary(found))
    print(out)
    return 0


def summary(found: Mapping[str, Any]) -> str:
    lines = ["fitted, in microseconds:"]
    for name, value in found["cost_model"].items():
        if name != "kind":
            lines.append(f"  {name.removesuffix('_s').replace('_', ' '):22} {value * 1e6:12.4g}")
    for kind in ("prefill", "decode"):
        off = found["fit"][kind]
        lines.append(
            f"{kind}: median error {off['median']:.1%}, 90th percentile {off['p90']:.1%}, worst {off['worst']:.1%}"
        )
    if found["fit"]["spread_of_tries"] > BUSY_SPREAD:
        lines.append("equal measurements differ by that much: the machine is busy, do not trust any of this")
    lines.append(f"scheduling under load, in both bases: {found['scheduling_s'] * 1e6:.0f} a step")
    lines.append(
        f"spread between tries {found['fit']['spread_of_tries']:.0%}, way there and back {found['hop_s'] * 1e3:.1f} ms"
    )
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(
        run(
            main,
            "sglang-fair calibrate",
            epilog="The replica must be idle: whatever else it does is counted.",
        )
    )
