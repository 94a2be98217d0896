"""`penstock doctor`: what is installed, what works, and what to do about what does not.

Versions are read from package metadata; the two engines are really imported, each in a process of its own as a run would, because that is
where a wrong environment shows.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

GIB = 1 << 30
SETUP = "run `make setup`"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    what: str
    ok: bool
    found: str
    advice: str = ""


def examine() -> int:
    """Print the report. Exit code 0 if a run can work here, 1 if something must be done first."""
    console = Console()
    with ThreadPoolExecutor() as pool, console.status("looking (the engines are imported, about 20 s)"):
        findings = [finding for future in [pool.submit(check) for check in CHECKS] for finding in future.result()]
    table = Table(box=None, pad_edge=False)
    for title in ("", "what", "found", "what to do"):
        table.add_column(title)
    for finding in findings:
        table.add_row(
            "[green]ok[/]" if finding.ok else "[red]no[/]", finding.what, finding.found, "" if finding.ok else finding.advice
        )
    console.print(table)
    bad = sum(not finding.ok for finding in findings)
    console.print("everything a run needs is here" if not bad else f"{bad} of {len(findings)} need attention")
    return 1 if bad else 0


def check_python() -> list[Finding]:
    """The interpreter."""
    good = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return [Finding("Python", good, sys.version.split()[0], "use Python 3.11 or 3.12: make setup PYTHON=python3.11")]


def check_packages() -> list[Finding]:
    """Versions of what Penstock stands on. None = any."""
    wanted = {
        "torch": None, "megatron-core": "0.16.1", "transformers": None, "ray": None, "prefect": "3.", "mlflow": "3.", "pyarrow": None,
        "fsspec": None, "s3fs": None, "sglang-router": "0.3.",
    }  # fmt: skip
    findings = []
    for name, prefix in wanted.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            if name == "mlflow":  # the small distribution is enough
                try:
                    findings.append(Finding(name, True, f"skinny {version('mlflow-skinny')}"))
                    continue
                except PackageNotFoundError:
                    pass  # neither: reported below
            findings.append(Finding(name, False, "not installed", SETUP))
            continue
        findings.append(Finding(name, prefix is None or found.startswith(prefix), found, f"needs {prefix}x: {SETUP}"))
    return findings


def check_torch() -> list[Finding]:
    """torch and the accelerators it sees."""
    code = "import torch; n = torch.cuda.device_count(); print(torch.__version__, '|', ', '.join(torch.cuda.get_device_name(i) for i in range(n)) or 'no GPU')"
    return [_runs("torch works", "-c", code, advice=SETUP)]


def check_megatron() -> list[Finding]:
    """Megatron-core through its door, as a trainer does it."""
    code = (
        "from engines.megatron.door import open_door; open_door(); from megatron.core.models.gpt import GPTModel; "
        "import torch; print('trains on', 'CUDA' if torch.cuda.is_available() else 'CPU (gloo)')"
    )
    return [_runs("Megatron-core works", "-c", code, advice=SETUP)]


def check_sglang() -> list[Finding]:
    """SGLang as a run starts it: through the launcher, in the server's own environment."""
    from engines.sglang.server import LAUNCHER

    advice = f"{SETUP}; on a machine without CUDA torchvision must lie in {sys.prefix}/sglang-site, not in site-packages"
    finding = _runs("SGLang works", str(LAUNCHER), "--help", advice=advice)
    return [replace(finding, found=f"serves with sglang {version('sglang')}") if finding.ok else finding]


def check_machine() -> list[Finding]:
    """Memory, disk, shared memory."""
    memory, disk = psutil.virtual_memory().available, shutil.disk_usage(".").free
    findings = [
        Finding("free memory", memory > 6 * GIB, f"{memory / GIB:.1f} GiB", "the demo needs up to 8 GiB: close something"),
        Finding(
            "free disk here", disk > 2 * GIB, f"{disk / GIB:.0f} GiB", "the demo needs about 1 GiB: make room or change directory"
        ),
    ]
    if Path("/dev/shm").is_dir():
        shm = shutil.disk_usage("/dev/shm").free
        findings.append(
            Finding(
                "shared memory",
                shm > GIB // 2,
                f"{shm / GIB:.1f} GiB",
                "Ray and weight publishing need /dev/shm: docker run --shm-size=8g",
            )
        )
    return findings


def check_store() -> list[Finding]:
    """The default store."""
    from storage.errors import StoreError
    from storage.store import Store

    place = Path("penstock-store")
    was_there = place.exists()
    try:
        store = Store(str(place))
    except StoreError as error:
        return [Finding("store ./penstock-store", False, str(error), "give --store a place where you may write")]
    if not was_there:
        place.rmdir()  # looking leaves nothing behind
    return [Finding("store ./penstock-store", True, f"{store.uri} is writable")]


def check_ports() -> list[Finding]:
    """Every port that a run or service of this user listens on, with its protection."""
    from flows.listening import listening_ports

    advice = "everybody who reaches this machine reaches this port: close it with a firewall, or end the process"
    findings = [
        Finding(
            f"port {port.address}",
            port.loopback or bool(port.protection),
            f"{port.owner}: {'this machine only; ' if port.loopback else ''}{port.protection or 'no key, no login'}",
            advice,
        )
        for port in listening_ports()
    ]
    return findings or [Finding("listening ports", True, "no run and no service of this user is active")]


def _runs(what: str, *words: str, advice: str) -> Finding:
    """Whether a program runs in a fresh interpreter; its last line is what it found."""
    result = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in (result.stdout if result.returncode == 0 else result.stderr).splitlines() if line.strip()]
    return Finding(what, result.returncode == 0, lines[-1].strip() if lines else f"exit code {result.returncode}", advice)


CHECKS: list[Callable[[], list[Finding]]] = [
    check_python, check_packages, check_torch, check_megatron, check_sglang, check_machine, check_store, check_ports,
]  # fmt: skip
