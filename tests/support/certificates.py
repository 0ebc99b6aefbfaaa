"""Certificates for tests, made by the `openssl` command."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = ("IP:127.0.0.1", "DNS:localhost")


@dataclass(frozen=True)
class Certificates:
    """An authority, and a certificate for this machine that it has signed."""

    authority: str
    certificate: str
    key: str

    @staticmethod
    def make(folder: Path, names: Sequence[str] = HERE, days: int = 2) -> "Certificates":
        """It is for `names`, and ends in so many days; or it ended so many ago."""
        folder.mkdir(parents=True, exist_ok=True)
        names_of = ",".join(names)
        (folder / "extensions").write_text(f"basicConstraints=critical,CA:FALSE\nsubjectAltName={names_of}\n")

        def openssl(*words: str) -> None:
            subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

        new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        openssl(
            "req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=tests"
        )
        openssl("req", *new, "-keyout", "key.pem", "-out", "request.pem", "-subj", "/CN=localhost")
        openssl("x509", "-req", "-in", "request.pem", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-out", "cert.pem", "-days", str(days), "-extfile", "extensions")  # fmt: skip
        return Certificates(*(str(folder / name) for name in ("ca.pem", "cert.pem", "key.pem")))
