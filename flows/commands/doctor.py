"""`penstock doctor`: check the installation and the machine, and print how to fix each problem.

Versions are read from package metadata. torch, Megatron-core and the engine are also imported, each in its own process,
because only an import reveals a broken environment.
"""

from __future__ import annotations

import ipaddress
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from penstock.engines.backends import BACKENDS, engine_backend
from penstock.engines.serving.server import KEY_VARIABLE
from penstock.flows.inspect import plan
from penstock.flows.install.command import find_distribution
from penstock.flows.install.uses import USES, Targets, demo_resources
from penstock.flows.options.argv import penstock_command, short_repr, split_args
from penstock.flows.options.flags import STORE_FLAGS, parse_store_options, split_flags
from penstock.flows.terminal.console import TerminalConsole, print_table
from penstock.storage.errors import OptionError, StoreError
from penstock.storage.store import Store

USAGE = """penstock doctor [--store URI ...] [--ray-address HOST:PORT] [--mlflow-tracking-uri URL]
penstock doctor --plan --hf-checkpoint DIR [--config FILE.toml|RECIPE] [options of `penstock train`]
                [--gpu-memory-gib N] [--num-gpus N] [--num-gpus-per-node N]
penstock doctor --ports

  Checks the installation, whether Megatron-core and the engine start, and the machine; prints how to fix problems.
  Then it prints, for each planned use (the demo, one GPU, several nodes, S3, an MLflow server), what is missing and
  the command that adds it or, if nothing is missing, the command to run. Exit code 1: a check failed.

  --store, --ray-address, --mlflow-tracking-uri   the services that you plan to use: they are contacted, and count as
                       checks. --store-options and --store-single-writer as in `penstock train`

  --ports              list every port of your runs and services, with process and authentication, and check nothing

  --plan               estimate the memory per GPU of a run with these options, without starting it; no GPU is needed,
                       and of DIR only config.json is read. Exit code 1: the run does not fit
  --gpu-memory-gib     memory of a GPU; default: that of this machine's GPUs, or 80 if it has none
  --num-gpus           plan for this number of GPUs, summed over all machines, instead of --actor-num-nodes x
                       --actor-num-gpus-per-node (the trainer gets the GPUs not in --rollout-num-gpus)
  --num-gpus-per-node  GPUs that the run uses on one machine; default 8 with --num-gpus"""

SETUP = f"run `{penstock_command()} setup`"
NOTHING_ACTIVE = "no run or service of this user is active"
TARGETS = {"--ray-address": True, "--mlflow-tracking-uri": True}


@dataclass(frozen=True)
class Finding:
    """The result of one check, which is a line of the report."""

    what: str  # what was checked
    ok: bool
    found: str
    advice: str = ""  # what to do if the check failed


def main(argv: list[str]) -> int:
    """Run `penstock doctor`. Return 0 if all checks passed or the planned run fits, 1 if not."""
    _, own, _ = split_args(argv, plan.FLAGS)
    if "--plan" in own:
        return plan.main(argv)
    console = TerminalConsole()
    if argv == ["--ports"]:
        rows = [(port.address, port.command, port.owner, port.protection or "none") for port in listening_ports()]
        if rows:
            print_table(("port", "command", "process", "authentication"), rows, width=console.width)
        else:
            print(NOTHING_ACTIVE)
        return 0
    targets = parse_targets(argv)
    with ThreadPoolExecutor() as pool, console.status("checking (the engines are imported, about 20 s)"):
        uses = pool.submit(lambda: [check(targets) for check in USES])
        findings = [finding for future in [pool.submit(check) for check in CHECKS] for finding in future.result()]
    rows = [
        ("[green]ok[/]" if each.ok else "[red]no[/]", each.what, each.found, "" if each.ok else each.advice)
        for each in findings
    ]
    print_table(("", "what", "found", "what to do"), rows, width=console.width)
    print("\nplanned uses")
    for use in uses.result():  # printed without wrapping lines, so that commands can be copied
        print(f"  {use.name:<14} {'not ready' if use.lacks else f'ready:  {use.command}'}")
        for found, remedy in use.lacks:
            print(f"    {found}\n      {remedy}")
    print()
    bad = sum(not finding.ok for finding in findings) + sum(use.required and bool(use.lacks) for use in uses.result())
    num_checks = len(findings) + sum(use.required for use in uses.result())
    console.print(f"{bad} of {num_checks} checks failed" if bad else "all checks passed")
    if lacking := [use.name for use in uses.result() if use.lacks and not use.required]:
        console.print(f"not ready, which matters only if you want it: {', '.join(lacking)}")
    return 1 if bad else 0


def parse_targets(argv: list[str]) -> Targets:
    """Return the services that the options of `penstock doctor` name."""
    positional, own, rest = split_args(argv, TARGETS)
    other = [*positional, *(name for name, _ in split_flags(rest) if name not in STORE_FLAGS)]
    if other:
        raise OptionError(
            f"penstock doctor without --plan accepts only {', '.join((*STORE_FLAGS, *TARGETS))}, but "
            f"{short_repr(other[0])} was given: leave it out, or add --plan to estimate the GPU memory of a run with "
            "these options"
        )
    store = parse_store_options(rest, "doctor") if rest else None
    return Targets(store, own.get("--ray-address"), own.get("--mlflow-tracking-uri"))


def package_findings() -> list[Finding]:
    """Return whether the Python version and the versions of the packages that Penstock needs are supported."""
    # package -> required prefix of its version ("": any version)
    prefixes = {"megatron-core": "0.16.1", "prefect": "3.", "mlflow": "3.", **engine_backend().packages}
    prefixes |= dict.fromkeys(("torch", "transformers", "ray", "pyarrow", "fsspec"), "")
    python = (3, 11) <= sys.version_info[:2] <= (3, 12)
    findings = [Finding("Python", python, sys.version.split()[0], "use Python 3.11 or 3.12 (docs/install.md)")]
    for name, prefix in prefixes.items():
        installed = find_distribution(name)
        if installed is None and name == "mlflow" and (skinny := find_distribution("mlflow-skinny")):
            findings.append(Finding(name, True, f"skinny {skinny.version}"))
        elif installed is None:
            findings.append(Finding(name, False, "not installed", SETUP))
        else:
            fits = installed.version.startswith(prefix)
            findings.append(Finding(name, fits, installed.version, f"needs {prefix}x: {SETUP}"))
    return findings


def engine_findings() -> list[Finding]:
    """Return whether the server of the default engine starts, in another process and in the same way as in a run."""
    backend = engine_backend()
    command, advice = backend.start_check()
    finding = run_script(f"{backend.title} works", *command, advice=f"{SETUP}; {advice}")
    return [replace(finding, found="its server starts") if finding.ok else finding]


def store_findings() -> list[Finding]:
    """Return whether the default store, ./penstock-store, can be written."""
    directory = Path("penstock-store")
    existed = directory.exists()
    try:
        store = Store(str(directory))
    except StoreError as error:
        return [Finding("store ./penstock-store", False, str(error), "give --store a writable directory")]
    if not existed:
        directory.rmdir()  # created by this check
    return [Finding("store ./penstock-store", True, f"{store.uri} is writable")]


def port_findings() -> list[Finding]:
    """Return one finding for each command of this user that has ports, and a failed one for each port that other
    machines can reach without authentication."""
    advice = "anyone who can reach this machine can reach this port: close it with a firewall, or end the process"
    ports = listening_ports()
    findings = []
    for command in dict.fromkeys(port.command for port in ports):
        loopback = [port.loopback for port in ports if port.command == command]
        found = f"{len(loopback)}, {sum(loopback)} of them for this machine only; `penstock doctor --ports` lists them"
        findings.append(Finding(f"ports of {command}", True, found))
    for port in ports:
        if not (port.loopback or port.protection):
            found = f"{port.owner} of {port.command}: no authentication"
            findings.append(Finding(f"port {port.address}", False, found, advice))
    return findings or [Finding("listening ports", True, NOTHING_ACTIVE)]


def run_script(check_name: str, *args: str, advice: str) -> Finding:
    """Run a Python script (or `-c` code) in a new process. Return a Finding with the last line of its output, which is
    ok if the exit code is 0."""
    result = subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=300, check=False)
    ok = result.returncode == 0
    lines = (result.stdout if ok else result.stderr).split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {result.returncode}")
    return Finding(check_name, ok, last, advice)


_TORCH = (
    "import torch; n = torch.cuda.device_count(); "
    "print(torch.__version__, '|', ', '.join(torch.cuda.get_device_name(i) for i in range(n)) or 'no GPU')"
)
_MEGATRON = (  # imported in the same way as in a trainer
    "from penstock.engines.megatron.compat import import_megatron; import_megatron(); "
    "from megatron.core.models.gpt import GPTModel; "
    "import torch; print('trains on', 'CUDA' if torch.cuda.is_available() else 'CPU (gloo)')"
)
CHECKS: list[Callable[[], list[Finding]]] = [
    package_findings,
    lambda: [run_script("torch works", "-c", _TORCH, advice=SETUP)],
    lambda: [run_script("Megatron-core works", "-c", _MEGATRON, advice=SETUP)],
    engine_findings,
    lambda: [
        Finding(what, free >= needed, f"{free:.1f} GiB", advice) for what, free, needed, advice in demo_resources()
    ],
    store_findings,
    port_findings,
]


# ---- ports -----------------------------------------------------------------------------------------------------------

# (substring of a process's command line, authentication of its ports, environment variable without which the ports have
# no authentication, or None). The first matching row counts.
PROTECTIONS = (
    ("prefect_server.py", "login; checks Host and Origin", "PREFECT_SERVER_API_AUTH_STRING"),
    ("mlflow_server", "login; checks Host and Origin", None),
    ("gcs_server", "Ray token", "RAY_AUTH_TOKEN"),
    ("raylet", "Ray token", "RAY_AUTH_TOKEN"),
    ("ray::", "Ray token; none on torch's TCPStore", "RAY_AUTH_TOKEN"),
    ("ray/", "Ray token", "RAY_AUTH_TOKEN"),
)
OURS = {"penstock", "penstock.flows.cli"}  # modules started with `python -m`


@dataclass(frozen=True)
class ListeningPort:
    """A port that a process listens on."""

    address: str  # "127.0.0.1:4200"
    owner: str  # "gcs_server (pid 7)"
    command: str  # the command that the process belongs to: "train my-run (pid 5)"
    protection: str  # authentication, "" if there is none
    loopback: bool


def listening_ports(roots: Iterable[psutil.Process] | None = None) -> list[ListeningPort]:
    """Return the TCP ports on which the processes `roots` and their descendants listen, sorted by port number. By
    default `roots` are all Penstock processes of this user."""
    family: dict[int, tuple[psutil.Process, str]] = {}
    this_user = psutil.Process().uids().real
    for root in psutil.process_iter() if roots is None else roots:
        with suppress(psutil.Error):
            if roots is None and not (root.uids().real == this_user and is_penstock_command(root.cmdline())):
                continue
            command_name = f"{describe_command(root.cmdline())} (pid {root.pid})"
            processes = [root, *root.children(recursive=True)]
            family |= {each.pid: (each, command_name) for each in processes if each.pid not in family}
    ports: dict[tuple[str, int], ListeningPort] = {}
    for process, command_name in family.values():
        try:
            command, name = process.cmdline(), process.name()
            sockets = [each.laddr for each in process.net_connections(kind="tcp") if each.status == psutil.CONN_LISTEN]
            protection = describe_port_authentication(command, process.environ()) if sockets else ""
        except psutil.Error:  # the process has ended, or is another user's
            continue
        for host, port in sockets:
            host = host.removeprefix("::ffff:")
            owner = f"{name} (pid {process.pid})"
            loopback = ipaddress.ip_address(host).is_loopback
            ports.setdefault((host, port), ListeningPort(f"{host}:{port}", owner, command_name, protection, loopback))
    return sorted(ports.values(), key=lambda each: int(each.address.rpartition(":")[2]))


def is_penstock_command(command: list[str]) -> bool:
    """Return whether a command line starts `penstock` or one of its modules."""
    return any(word in OURS or word.endswith("bin/penstock") for word in command[:4])


def describe_command(command: list[str]) -> str:
    """Return the subcommand and the run's name of a `penstock` command line: "train my-run"; the program's name for any
    other command."""
    start = next((number for number, word in enumerate(command[:4]) if is_penstock_command([word])), None)
    if start is None:
        return Path(command[0]).name if command else "?"
    words = command[start + 1 :]
    named = words[words.index("--run") + 1 :] if "--run" in words else words[1:]
    return " ".join([*words[:1], *(word for word in named[:1] if not word.startswith("-"))])


def describe_port_authentication(command: list[str], environment: dict[str, str]) -> str:
    """Return the authentication of a process's ports, by its command line, or "" if there is none."""
    of_engines = ((*row, KEY_VARIABLE) for name in BACKENDS for row in engine_backend(name).processes.items())
    for mark, protection, variable in (*of_engines, *PROTECTIONS):
        if mark in " ".join(command):
            return protection if variable is None or environment.get(variable) else ""
    return (
        "Ray token, session keys, the token of a link; none on --prometheus-port"
        if is_penstock_command(command)
        else ""
    )
