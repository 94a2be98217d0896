"""penstock.sbatch with small scripts in place of Slurm, Ray and penstock: what it starts, exit codes, and SIGTERM."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "configs/clusters/penstock.sbatch"
OPTIONS = ["--config", "a b.toml", "--run", "first"]
# Every command appends one line to $CALLS. srun runs its command here, without Slurm's options before it.
PRELUDE = '#!/bin/bash\necho "$(basename "$0") $*" >>"$CALLS"\n'
SCRIPTS = {
    "scontrol": 'if [ "$1" = show ]; then printf "%s\\n" $HOSTS; fi',
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"',
    "getent": 'echo "10.0.0.${2#n}  STREAM $2"',
    "ip": 'echo "2: ib0    inet 10.1.0.1/24 brd 10.1.0.255 scope global ib0"',
    "ray": 'echo "token $RAY_AUTH_MODE ${#RAY_AUTH_TOKEN}" >>"$CALLS"\nexec sleep 60',
    "python3": 'if [ "$1" = - ]; then cat >/dev/null; exit "$JOINED"; fi\nexec "$PYTHON" "$@"',
    "penstock": "trap 'sleep 0.2; exit 143' TERM\ntouch \"$CALLS.started\"\n"
    'for _ in $(seq "$TICKS"); do sleep 0.05; done\nexit "$CODE"',
}


class Job:
    """One run of the script on the nodes n1 and n2."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.calls = folder / "calls"
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        tools = folder / "tools"
        tools.mkdir()
        for name, text in SCRIPTS.items():
            (tools / name).write_text(f"{PRELUDE}{text}\n")
            (tools / name).chmod(0o755)
        environment = {
            "PATH": f"{tools}:/usr/bin:/bin",
            "CALLS": str(self.calls),
            "PYTHON": sys.executable,
            "TMPDIR": str(self.scratch),
            "SLURM_JOB_ID": "40007",
            "SLURM_JOB_NODELIST": "n[1-2]",
            **{"HOSTS": "n1 n2", "JOINED": "0", "CODE": "0", "TICKS": "1"},
            **variables,
        }
        self.process = subprocess.Popen(
            ["bash", str(SCRIPT), *OPTIONS], env=environment, cwd=folder, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def wait(self) -> tuple[int, str]:
        output = self.process.communicate(timeout=60)[0]
        return self.process.returncode, output

    def called(self, name: str) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if line.startswith(f"{name} ")]

    def kill(self) -> None:
        """Kill what is left of the job."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def test_ray_runs_on_every_node_with_a_token_and_the_driver_with_all_arguments(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.wait()[0] == 0
    head, other = sorted(job.called("ray"), key=lambda line: "--head" not in line)  # they start at the same time
    port = 20000 + 40007 % 20000
    assert "--head" in head and f"--port={port}" in head and "--node-ip-address=10.0.0.1" in head
    assert f"--address=10.0.0.1:{port}" in other and "--node-ip-address=10.0.0.2" in other
    assert job.called("token") == ["token token 64"] * 2
    assert job.called("penstock") == [
        f"penstock train --ray-address 10.0.0.1:{port} --grace-period 240 --config a b.toml --run first"
    ]
    assert not [line for line in job.called("scontrol") if "requeue" in line]
    assert list(job.scratch.iterdir()) == []
    started = sorted(line for line in job.called("srun") if "ray start" in line)
    assert ["--nodelist=n1" in started[0], "--nodelist=n2" in started[1]] == [True, True]


def test_one_node_needs_no_ray_cluster(tmp_path: Path) -> None:
    job = Job(tmp_path, HOSTS="n1")
    assert job.wait()[0] == 0 and not job.called("ray")
    assert job.called("penstock") == ["penstock train --grace-period 240 --config a b.toml --run first"]


def test_interface_names_the_addresses(tmp_path: Path) -> None:
    job = Job(tmp_path, PENSTOCK_INTERFACE="ib0")
    assert job.wait()[0] == 0
    assert any("--node-ip-address=10.1.0.1" in line for line in job.called("ray")) and not job.called("getent")


def test_failed_run_fails_the_job_and_is_not_repeated(tmp_path: Path) -> None:
    job = Job(tmp_path, CODE="2")
    assert job.wait()[0] == 2
    assert not [line for line in job.called("scontrol") if "requeue" in line]


def test_sigterm_reaches_the_driver_and_the_job_is_queued_again(tmp_path: Path) -> None:
    job = Job(tmp_path, TICKS="600")
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "calls.started").exists():
            assert time.monotonic() < deadline and job.process.poll() is None
            time.sleep(0.02)
        job.process.send_signal(signal.SIGTERM)
        code, output = job.wait()
        assert code == 143 and "will resume" in output
        assert job.calls.read_text().splitlines()[-1] == "scontrol requeue 40007", "after the end of Ray"
    finally:
        job.kill()


def test_missing_node_ends_the_job_before_the_run(tmp_path: Path) -> None:
    job = Job(tmp_path, JOINED="1")
    assert job.wait()[0] == 1 and not job.called("penstock")


@pytest.mark.parametrize(
    "name", ["configs/clusters/penstock.sbatch", "configs/environment/setup.sh", "configs/environment/lock.sh"]
)
def test_script_is_accepted_by_bash_and_shellcheck(name: str) -> None:
    path = SCRIPT.parents[2] / name
    subprocess.run(["bash", "-n", str(path)], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    result = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
