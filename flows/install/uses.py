"""Find what this machine still lacks for each planned use of Penstock: the demo, a run on one GPU, a run on several
nodes, a store in S3, an MLflow server."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from penstock.engines.training import GIB
from penstock.flows.config import RunConfig
from penstock.flows.install.command import (
    checkout,
    has_cuda,
    installation_steps,
    lock_file,
    missing_requirements,
    read_lock,
)
from penstock.flows.options.argv import penstock_command
from penstock.flows.runtime.runs import open_store
from penstock.storage.errors import PenstockError
from penstock.storage.secret_references import resolve_secrets
from penstock.storage.secrets import redact

SGLANG_GLIBC = (2, 34)  # sglang 0.5.21 has no wheels for older systems
TOKEN_COMMAND = "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(openssl rand -hex 32)  # the same token on every node"
CREDENTIALS = (  # environment variables with which botocore finds credentials
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


@dataclass(frozen=True)
class Targets:
    """The services that the user plans to use, each None if the user has not named one."""

    store: RunConfig | None = None  # only the store options are used
    ray_address: str | None = None
    mlflow_tracking_uri: str | None = None


Lack = tuple[str, str]  # what is missing for a planned use, or was found instead; how to add it


@dataclass
class Use:
    """A planned use of Penstock."""

    name: str
    command: str  # the command to run when nothing is missing
    required: bool = False  # whether an option of the user names a service of this use
    lacks: list[Lack] = field(default_factory=list)

    def needs(self, fulfilled: object, found: str, remedy: str) -> None:
        """Record that something is missing, and how to add it, unless the condition `fulfilled` holds."""
        if not fulfilled:
            self.lacks.append((found, remedy))


def demo_use(targets: Targets) -> Use:
    """Return the use "demo", with the packages, memory, disk and shared memory that are missing for it."""
    use = Use("demo", f"{penstock_command()} demo", lacks=missing_packages("cuda" if has_cuda() else "cpu"))
    for what, free, needed, remedy in demo_resources():
        use.needs(free >= needed, f"{what}: {free:.1f} GiB", remedy)
    return use


def one_gpu_use(targets: Targets) -> Use:
    """Return the use "one GPU", with what is missing: the driver, the packages for CUDA, shared memory."""
    data = "--hf-checkpoint MODEL_DIR --prompt-data FILE.jsonl"
    use = Use("one GPU", f"{penstock_command()} train --config 1gpu --run first {data}")
    cuda, shared, (library, found) = has_cuda(), shared_memory(), platform.libc_ver()
    use.lacks += missing_packages("cuda") if cuda else []
    use.needs(cuda, "nvidia-smi lists no GPU", "install NVIDIA's driver; in a container: docker run --gpus all")
    use.needs(
        library != "glibc" or tuple(map(int, found.split(".")[:2])) >= SGLANG_GLIBC,
        f"glibc {found}",
        "use a container image (docs/containers.md) or a newer system: SGLang's wheels need glibc 2.34",
    )
    use.needs(shared >= 8 * GIB, f"{shared / GIB:.1f} GiB in /dev/shm", "in a container: docker run --shm-size=16g")
    return use


def several_nodes_use(targets: Targets) -> Use:
    """Return the use "several nodes", with what is missing: Ray's token, a network interface and, if --ray-address is
    given, a Ray cluster at that address."""
    address, store = targets.ray_address or "HOST:6379", targets.store.store if targets.store else "s3://BUCKET/runs"
    options = f"--ray-address {address} --actor-num-nodes 2 --actor-num-gpus-per-node 8 --store {store}"
    use = Use("several nodes", f"{penstock_command()} train {options} ...", targets.ray_address is not None)
    # Ray finds a token in RAY_AUTH_TOKEN, in the file RAY_AUTH_TOKEN_PATH, or in ~/.ray/auth_token.
    token_file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    has_token = os.environ.get("RAY_AUTH_TOKEN") or token_file.is_file()
    by_token = os.environ.get("RAY_AUTH_MODE") == "token"
    use.needs(by_token and has_token, "no token for Ray in the environment", TOKEN_COMMAND)
    connected = any(stats.isup and name != "lo" for name, stats in psutil.net_if_stats().items())
    use.needs(connected, "no network interface besides loopback", "connect the machine to the nodes' network")
    problem = "no Ray cluster was given" if targets.ray_address is None else ray_problem(targets.ray_address)
    remedy = f"ray start --head --port 6379  # there; ray start --address {address} on the others"
    if targets.ray_address is None:
        remedy = f"ray start --head --port 6379; {penstock_command()} doctor --ray-address HOST:6379"
    use.needs(not problem, problem, remedy)
    remedy = "use an object store, or mount the directory on every node under the same path"
    use.needs(targets.store is None or "://" in store, f"--store {store} is a local directory", remedy)
    return use


def s3_use(targets: Targets) -> Use:
    """Return the use "S3", with what is missing: packages, credentials and, if --store names a bucket, access to it."""
    store = targets.store if targets.store is not None and targets.store.store.startswith("s3://") else None
    uri = store.store if store is not None else "s3://BUCKET/runs"
    use = Use("S3", f"{penstock_command()} train --store {uri} ...", required=store is not None)
    if lines := missing_requirements(["s3"], checkout(), read_lock(lock_file("cuda" if has_cuda() else "cpu"))):
        use.lacks.append(("; ".join(lines[:2]), f"{penstock_command()} setup --with s3"))
    if store is not None and not use.lacks:
        try:
            open_store(store)
        except PenstockError as error:
            remedy = "check the bucket and the credentials; for other servers: --store-options endpoint_url=URL"
            use.lacks.append((str(error)[:200], remedy))
    elif not (
        any(os.environ.get(name) for name in CREDENTIALS)
        or any((Path.home() / ".aws" / name).is_file() for name in ("credentials", "config"))
    ):
        remedy = "export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=...  # unless the machine has an IAM role"
        use.lacks.append(("no credentials in the environment or ~/.aws", remedy))
    return use


def mlflow_server_use(targets: Targets) -> Use:
    """Return the use "MLflow server", with what is missing: a server that answers at --mlflow-tracking-uri or
    MLFLOW_TRACKING_URI."""
    uri = resolve_secrets(targets.mlflow_tracking_uri) or os.environ.get("MLFLOW_TRACKING_URI", "")
    command = f"{penstock_command()} train --mlflow-tracking-uri {redact(uri) or 'http://HOST:5000'} ..."
    use = Use("MLflow server", command, required=targets.mlflow_tracking_uri is not None)
    server = "mlflow server --host 127.0.0.1 --port 5000 --backend-store-uri sqlite:///mlflow.db"
    problem = "MLFLOW_TRACKING_URI does not name a server"
    remedy = f"{server} & export MLFLOW_TRACKING_URI=http://127.0.0.1:5000  # without it, a file in the store"
    if uri.startswith(("http://", "https://")):
        parts, problem, remedy = urlsplit(uri), "", f"{server}  # there"
        host = parts.netloc.rpartition("@")[2]  # only the host is printed: the URI may contain a password
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            opener.open(f"{parts.scheme}://{host}{parts.path.rstrip('/')}/health", timeout=10).close()
        except (OSError, ValueError) as error:
            problem = f"the MLflow server at {host} does not answer ({error})"
    use.needs(not problem, problem, remedy)
    return use


USES: tuple[Callable[[Targets], Use], ...] = (
    demo_use, one_gpu_use, several_nodes_use, s3_use, mlflow_server_use,
)  # fmt: skip


# ---- parts of the checks ---------------------------------------------------------------------------------------------


def missing_packages(kind: str) -> list[Lack]:
    """Return what `penstock setup` would install here for `kind`, "cpu" or "cuda", as one `Lack`; an empty list if
    nothing is missing."""
    steps = installation_steps(kind, [], checkout(), None)[1:]  # without the update of pip
    lines = [line for step in steps for line in step.missing()]
    if kind == "cuda" and not lines:
        code = "import torch; print(torch.version.cuda or '')"  # in another process, because it takes seconds
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        lines = [] if result.stdout.strip() else ["torch: a build without CUDA"]
    if not lines:
        return []
    more = f", and {len(lines) - 2} more" if len(lines) > 2 else ""
    return [("; ".join(lines[:2]) + more, f"{penstock_command()} setup --{kind}")]


def demo_resources() -> list[tuple[str, float, float, str]]:
    """Return the resources of this machine that the demo needs: (name, free GiB, needed GiB, what to do if less is
    free)."""
    memory, disk = psutil.virtual_memory().available / GIB, shutil.disk_usage(".").free / GIB
    return [
        ("free memory", memory, 6.0, "the demo needs up to 8 GiB: close programs"),
        ("free disk here", disk, 2.0, "the demo needs about 1 GiB: delete files or change the directory"),
        (
            "shared memory",
            shared_memory() / GIB,
            0.5,
            "Ray and weight publishing need /dev/shm: docker run --shm-size=8g",
        ),
    ]


def shared_memory() -> int:
    """Return the free bytes of /dev/shm; 0 if it does not exist."""
    return shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0


def ray_problem(address: str) -> str:
    """Return why the Ray cluster at `address` cannot be used for a run on several nodes: it does not answer, rejects
    the connection, or has only one node. Return "" if it can."""
    code = (
        f"import ray; ray.init({address!r}, log_to_driver=False, logging_level='ERROR'); "
        "print(len([n for n in ray.nodes() if n['Alive']]), int(ray.cluster_resources().get('GPU', 0)))"
    )
    try:
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False)
    except subprocess.TimeoutExpired:
        return f"the Ray cluster at {address} does not answer"
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        return f"the Ray cluster at {address} cannot be used: {reason[:160]}"
    nodes, gpus = result.stdout.split()[-2:]
    return "" if int(nodes) > 1 else f"the Ray cluster at {address} has one node and {gpus} GPUs"
