"""`penstock doctor`: check the installation and the machine, and print how to fix each problem.

Versions are read from package metadata. Megatron-core and SGLang are also imported, each in its own process as in a
run, because only an import reveals a broken environment.
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

from penstock.flows.commands import plan
from penstock.flows.options.argv import short_repr, split_args
from penstock.flows.runtime.display import print_table
from penstock.storage.errors import OptionError

USAGE = """penstock doctor
penstock doctor --plan --hf-checkpoint DIR [--config FILE.toml] [options of `penstock train`] [--gpu-memory-gib N]
                [--num-gpus N] [--num-gpus-per-node N]

  Checks the installation, whether Megatron-core and SGLang start, and the machine, and prints how to fix each problem.
  Without --plan it takes no options, not even --store.

  --plan               estimate the memory per GPU of a run with these options, without starting it; no GPU is needed,
                       and of DIR only config.json is read. Exit code 1: the run does not fit
  --gpu-memory-gib     memory of a GPU; default: of this machine's GPUs, or 80 without any
  --num-gpus           plan for this number of GPUs, summed over all machines, instead of --actor-num-nodes x
                       --actor-num-gpus-per-node (the trainer gets those that --rollout-num-gpus leaves)
  --num-gpus-per-node  GPUs that the run uses on one machine; default 8 with --num-gpus"""

GIB = 1 << 30
SETUP = "run `make setup`"


@dataclass(frozen=True)
class Finding:
    """The result of one check: a line of the report."""

    what: str
    ok: bool
    found: str
    advice: str = ""


def main(argv: list[str]) -> int:
    """Run the command. Return 0 if all checks passed or the planned run fits, 1 if not.

    Raises:
        InputError: an option is invalid, or is given without --plan.
    """
    _, own, _ = split_args(argv, plan.FLAGS)
    if "--plan" in own:
        return plan.main(argv)
    if argv:
        raise OptionError(
            f"penstock doctor takes no options without --plan; found {short_repr(' '.join(argv))}: leave it out, or "
            "add --plan to estimate the GPU memory of a run with these options"
        )
    console = Console()
    with ThreadPoolExecutor() as pool, console.status("checking (the engines are imported, about 20 s)"):
        findings = [finding for future in [pool.submit(check) for check in CHECKS] for finding in future.result()]
    rows = [
        ("[green]ok[/]", finding.what, finding.found, "")
        if finding.ok
        else ("[red]no[/]", finding.what, finding.found, finding.advice)
        for finding in findings
    ]
    print_table(("", "what", "found", "what to do"), rows, width=console.width)
    bad = sum(not finding.ok for finding in findings)
    console.print(f"{bad} of {len(findings)} checks failed" if bad else "all checks passed")
    return 1 if bad else 0


def check_python() -> list[Finding]:
    """Check the version of the interpreter."""
    good = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return [Finding("Python", good, sys.version.split()[0], "use Python 3.11 or 3.12: make setup PYTHON=python3.11")]


def check_packages() -> list[Finding]:
    """Check that the packages Penstock needs are installed in a supported version."""
    # package -> required prefix of its version, None for any version
    prefixes: dict[str, str | None] = {
        "megatron-core": "0.16.1",
        "prefect": "3.",
        "mlflow": "3.",
        "sglang-router": "0.3.",
    }
    prefixes |= dict.fromkeys(("torch", "transformers", "ray", "pyarrow", "fsspec", "s3fs"))
    findings = []
    for name, prefix in prefixes.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            if name == "mlflow":  # mlflow-skinny is sufficient
                try:
                    findings.append(Finding(name, True, f"skinny {version('mlflow-skinny')}"))
                    continue
                except PackageNotFoundError:
                    pass  # neither is installed: reported below
            findings.append(Finding(name, False, "not installed", SETUP))
            continue
        findings.append(Finding(name, prefix is None or found.startswith(prefix), found, f"needs {prefix}x: {SETUP}"))
    return findings


def check_torch() -> list[Finding]:
    """Check that torch can be imported, and list the GPUs that it detects."""
    code = (
        "import torch; n = torch.cuda.device_count(); "
        "print(torch.__version__, '|', ', '.join(torch.cuda.get_device_name(i) for i in range(n)) or 'no GPU')"
    )
    return [_check_with_script("torch works", "-c", code, advice=SETUP)]


def check_megatron() -> list[Finding]:
    """Check that Megatron-core can be imported in the same way as in a trainer."""
    code = (
        "from penstock.engines.megatron.compat import import_megatron; import_megatron(); "
        "from megatron.core.models.gpt import GPTModel; "
        "import torch; print('trains on', 'CUDA' if torch.cuda.is_available() else 'CPU (gloo)')"
    )
    return [_check_with_script("Megatron-core works", "-c", code, advice=SETUP)]


def check_sglang() -> list[Finding]:
    """Check that SGLang's server starts in the same way as in a run: by its launch script, in a process of its own."""
    from penstock.engines.sglang.server import LAUNCHER

    advice = f"{SETUP}; without CUDA torchvision must be in {sys.prefix}/sglang-site, not in site-packages"
    finding = _check_with_script("SGLang works", str(LAUNCHER), "--help", advice=advice)
    return [replace(finding, found=f"serves with sglang {version('sglang')}") if finding.ok else finding]


def check_machine() -> list[Finding]:
    """Check free memory, disk and shared memory."""
    memory, disk = psutil.virtual_memory().available, shutil.disk_usage(".").free
    findings = [
        Finding(
            "free memory", memory > 6 * GIB, f"{memory / GIB:.1f} GiB", "the demo needs up to 8 GiB: close programs"
        ),
        Finding(
            "free disk here",
            disk > 2 * GIB,
            f"{disk / GIB:.0f} GiB",
            "the demo needs about 1 GiB: delete files or change directory",
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
    """Check that the default store, ./penstock-store, can be written."""
    from penstock.storage.errors import StoreError
    from penstock.storage.store import Store

    directory = Path("penstock-store")
    existed = directory.exists()
    try:
        store = Store(str(directory))
    except StoreError as error:
        return [Finding("store ./penstock-store", False, str(error), "give --store a writable directory")]
    if not existed:
        directory.rmdir()  # created by this check
    return [Finding("store ./penstock-store", True, f"{store.uri} is writable")]


def check_ports() -> list[Finding]:
    """List every port of this user's runs and services, with bind address and authentication (token, login or none)."""
    from penstock.flows.commands.listening import listening_ports

    advice = "anyone who can reach this machine can reach this port: close it with a firewall, or end the process"
    findings = [
        Finding(
            f"port {port.address}",
            port.loopback or bool(port.protection),
            f"{port.owner}: {'this machine only; ' if port.loopback else ''}{port.protection or 'no authentication'}",
            advice,
        )
        for port in listening_ports()
    ]
    return findings or [Finding("listening ports", True, "no run or service of this user is active")]


def _check_with_script(check_name: str, *args: str, advice: str) -> Finding:
    """Run a Python script (or `-c` code) in a new process. Return a Finding with the last line of its output."""
    result = subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in (result.stdout if result.returncode == 0 else result.stderr).splitlines() if line.strip()]
    return Finding(
        check_name, result.returncode == 0, lines[-1].strip() if lines else f"exit code {result.returncode}", advice
    )


CHECKS: list[Callable[[], list[Finding]]] = [
    check_python, check_packages, check_torch, check_megatron, check_sglang, check_machine, check_store, check_ports,
]  # fmt: skip
