"""A process that kills a command which does not end within its grace period after a stop signal.

It reads the numbers of the command's signals from standard input: Python's C handler writes them (`set_wakeup_fd`) even
if no Python code of the command can run, because native code blocks or holds the interpreter's lock. It ends when the
command does. A second SIGINT ends the grace period.
"""

import os
import select
import signal
import sys
import time

SECOND_INTERRUPT = 2.0  # seconds in which the command can kill itself after a second SIGINT


def main(pid: int, grace_seconds: float) -> None:
    """Wait for signals of the process `pid`, and kill it and its children `grace_seconds` after the first."""
    received: list[int] = []
    deadline = float("inf")
    while deadline > time.monotonic():
        seconds = None if deadline == float("inf") else deadline - time.monotonic()
        if not select.select([0], [], [], seconds)[0]:
            continue
        numbers = os.read(0, 64)
        if not numbers:  # the command has ended
            return
        received += [number for number in numbers if number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
        if received:
            limit = SECOND_INTERRUPT if received.count(signal.SIGINT) > 1 else grace_seconds
            deadline = min(deadline, time.monotonic() + limit)
    import psutil

    name = signal.Signals(received[0]).name
    print(f"penstock: killed, because it did not end within {grace_seconds:.0f} s after {name}", file=sys.stderr)
    command = psutil.Process(pid)
    for process in [*command.children(recursive=True), command]:
        if process.pid != os.getpid():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
