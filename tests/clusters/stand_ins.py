"""Stand-ins for the commands that penstock.sbatch calls: small shell scripts that write what they were called with."""

from __future__ import annotations

from pathlib import Path

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


def write_stand_ins(folder: Path) -> Path:
    """Write the scripts into `folder` and return it."""
    folder.mkdir()
    for name, text in SCRIPTS.items():
        path = folder / name
        path.write_text(f"{PRELUDE}{text}\n")
        path.chmod(0o755)
    return folder
