"""`sglang-fair keys DIR`: makes the keys with which router, gateways and replicas know each other."""

import sys
from pathlib import Path
from typing import Annotated

from sglang_fair.common import curve
from sglang_fair.settings.commands import Argument, Mistake, run


def main(
    folder: Annotated[Path, Argument(metavar="DIR", help="Where they are written; made if it is not there.")],
) -> None:
    """Make the keys for --keys of router, gateways and replicas.

    Each role has NAME.key, which is public, and NAME.key_secret. A machine needs the secret key of the roles that run
    on it, and all public ones. Keys that are there are never overwritten.
    """
    try:
        made = curve.make(folder)
    except OSError as error:
        raise Mistake((error.strerror and f"{folder}: {error.strerror}") or str(error)) from None
    for path in made:
        print(path)


if __name__ == "__main__":
    sys.exit(run(main, "sglang-fair keys"))
