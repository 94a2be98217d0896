"""The command line, `penstock COMMAND`.

A command parses its flags into a config, checks it, and calls a flow. Exit codes: 0 done, 1 failed, 2 invalid request
(a one-line message on stderr), 129 SIGHUP, 130 Ctrl-C, 141 standard output was closed by its reader, 143 SIGTERM; 137
if native code had to be killed after a signal.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import select
import sys
import traceback
from collections.abc import Callable, Sequence

from penstock.flows.options.argv import penstock_command, short_repr, to_one_line
from penstock.flows.options.refused import TRAINERS
from penstock.flows.runtime import environment
from penstock.flows.runtime.signals import report_stop, stop_signals
from penstock.flows.terminal.escape import escaped_output
from penstock.storage.errors import OptionError, PenstockError
from penstock.storage.preemption import Preempted
from penstock.storage.secrets import redact

Command = Callable[[list[str]], int]  # arguments -> exit code

_LAUNCH_SCRIPTS = "\n".join(
    f"  import-{name}  make a recipe from a {name} launch script:  penstock import-{name} run.sh [--output FILE.toml]"
    for name in TRAINERS
)
USAGE = f"""usage: penstock COMMAND [options]

start
  demo      make a random model of 402,176 parameters and train it in all stages, a few minutes on a laptop
  train     convert -> [rollout -> train -> publish -> checkpoint -> evaluate] x N -> export; with
            --async-buffer-size or --async-mode streaming, rollouts are generated while earlier ones are trained
  sft       the same loop over demonstrations (no engine)
  eval      score a Hugging Face checkpoint on data sets; --compare RUN/20 RUN/40 compares two policies
  convert   Hugging Face checkpoint -> torch_dist, in the store or in a directory, and back
  resume    continue a run after its last committed stage:  penstock resume RUN [--store URI]
  fork      start a new run from round N of another:  penstock fork RUN --at N --name NEW [options to change]
{_LAUNCH_SCRIPTS}

look
  runs      list the runs of the stores around the working directory, or of one store
  watch     show runs while they run, in a browser or with --terminal:  penstock watch RUN
  show      print a run on one screen, with the curves of its rounds:  penstock show RUN; --cost prints device-seconds
            by stage, round and checkpoint, and the price
  samples   read samples; compare the responses to a prompt over rounds:  penstock samples RUN --round 12 --worst
  regrade   grade the stored samples again with another reward and print what changes:  penstock regrade RUN
  query     run SQL over samples, metrics and evaluations:  penstock query "select ..."
  lineage   print what an artifact was made from and what was made from it:  penstock lineage RUN/20
  report    write one HTML page about a run:  penstock report RUN; --to TRACKER sends runs to MLflow, TensorBoard
            or W&B again, from the store

keep
  export    write a checkpoint for other programs:  penstock export RUN/20 --format hf|megatron --output DIR
  promote   make a policy the champion of a model if it is better:  penstock promote RUN/20 --to MODEL --data-set NAME
  verify    check every hash, reference and sample of a run:  penstock verify RUN
  replay    train a run's committed shards again and compare every step:  penstock replay RUN [--from A --to B]
  bisect    find the version at which an evaluation fell, and the groups that did it:
            penstock bisect RUN --metric eval/NAME --below X
  rm        remove a run:  penstock rm RUN
  gc        list files that are no longer needed; --delete removes them

operate
  up        start Prefect, a worker and MLflow on this machine, and print their links; --detach in the background
  down      end what `penstock up` has started
  deploy    register a flow on a Prefect server, with a schedule and restarts after crashes

set up
  setup     install what the wheel cannot install by itself, for CPU or CUDA; continues after an interruption
  doctor    check the installation and print how to fix each problem; --plan estimates the GPU memory of a run

`penstock train --dry-run` (also sft, eval, resume) checks a run and prints its plan; it starts nothing.
`penstock COMMAND --help` explains a command, `penstock train --help WORD` finds the options about something, and
`penstock train --help-all` lists all. `--config FILE.toml` reads them from a file, `--config demo-grpo` from the
bundled recipe of this name; --verbose shows Prefect's log lines, and the traceback of an error."""

_OWN_MODULES = {"", "penstock", *sys.stdlib_module_names}  # if one of these cannot be imported, Penstock has a bug
# Errors of the operating system that are the user's to solve, even if they name no file.
USER_ERRNOS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one `penstock` command and report its errors on stderr. Return the exit code. Without `argv`, use the
    arguments of this process and install the signal handlers."""
    if argv is None:
        stop_signals.install()
        stop_signals.start_watchdog()
        if logging.lastResort is not None:  # it prints warnings that have no other handler
            logging.lastResort.setFormatter(logging.Formatter("warning: %(message)s"))
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with escaped_output():
            try:
                code = run_command(arguments)
                sys.stdout.flush()
                return code
            except (KeyboardInterrupt, Preempted, Exception) as error:
                # After a signal any exception counts as its result: libraries replace the exception that the signal
                # handler raised by their own.
                if stop_signals.received or not isinstance(error, Exception):
                    return report_stop(resumable=bool(arguments) and arguments[0] in RESUMABLE)
                return _report_error(error, arguments)
    finally:
        if argv is None:
            stop_signals.exits = True


def run_command(argv: list[str]) -> int:
    """Run the command named by the first argument and return its exit code. Its exceptions are not caught."""
    name, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if name in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if name not in COMMANDS:
        from penstock.flows.options.flags import did_you_mean

        hint = did_you_mean(name, list(COMMANDS)) or ": `penstock --help` lists them"
        raise OptionError(f"unknown command {short_repr(name)}{hint}")
    environment.set_default_variables(verbose="--verbose" in rest)
    rest = [argument for argument in rest if argument != "--verbose"]
    flags = [argument.partition("=")[0] for argument in rest]
    others = [command for (owner, flag), command in COMMANDS_WITH_FLAG.items() if owner == name and flag in flags]
    return (others[0] if others else COMMANDS[name])(rest)


# ---- the commands ----------------------------------------------------------------------------------------------------


def _flow_command(name: str) -> Command:
    """Return a command that starts a flow."""
    return lambda argv: importlib.import_module("penstock.flows.commands.start").start_flow(name, argv)


def _module_command(name: str, prefix: str = "") -> Command:
    """Return a command that imports the module `penstock.flows.<name>` and runs its function `main`, or `<prefix>_main`
    if the module has several commands.

    With --help the command prints the module's USAGE (or `<PREFIX>_USAGE`) instead. --help-all adds the options of a
    run, if the command takes them.
    """
    main_name = f"{prefix}_main" if prefix else "main"

    def call(argv: list[str]) -> int:
        module = importlib.import_module(f"penstock.flows.{name}")
        usage = getattr(module, main_name.replace("main", "usage").upper(), None)
        if usage and {"--help", "-h", "--help-all"} & {*argv}:
            print(usage)
            if "--help-all" in argv and name in _TAKE_OPTIONS:
                from penstock.flows.options.help import full_help

                print(full_help(name, "\nOptions of a run:", may_change_only=prefix == "resume"))
            return 0
        code: int = getattr(module, main_name)(argv)
        return code

    return call


COMMANDS: dict[str, Command] = {
    "demo": _module_command("commands.demo"),
    "train": _flow_command("train"),
    "sft": _flow_command("sft"),
    **{f"import-{name}": _module_command(f"{name}.recipe") for name in TRAINERS},
    "convert": _module_command("convert"),
    "export": _module_command("inspect.export"),
    "eval": _flow_command("eval"),
    "regrade": _module_command("commands.regrade"),
    "resume": _module_command("commands.start", "resume"),
    "replay": _module_command("replay"),
    "bisect": _module_command("bisect"),
    "fork": _module_command("commands.fork"),
    "promote": _module_command("promotion"),
    "rm": _module_command("commands.maintenance", "rm"),
    "verify": _module_command("commands.maintenance", "verify"),
    "gc": _module_command("commands.maintenance", "gc"),
    "up": _module_command("services.stack", "up"),
    "down": _module_command("services.stack", "down"),
    "deploy": _module_command("services.deploy"),
    "runs": _module_command("inspect.run_views", "runs"),
    "watch": _module_command("inspect.watch"),
    "show": _module_command("inspect.run_views", "show"),
    "lineage": _module_command("inspect.lineage_trees"),
    "samples": _module_command("inspect.read_samples"),
    "query": _module_command("inspect.sql_query"),
    "report": _module_command("inspect.report"),
    "setup": _module_command("install.command"),
    "doctor": _module_command("commands.doctor"),
}
COMMANDS_WITH_FLAG: dict[tuple[str, str], Command] = {  # command and one of its flags -> the command that it means
    ("eval", "--compare"): _module_command("commands.stored_evals", "compare"),
    ("show", "--cost"): _module_command("inspect.run_views", "cost"),
    ("report", "--to"): _module_command("inspect.track"),
}
_TAKE_OPTIONS = ("commands.start", "commands.fork", "commands.doctor")  # commands that take the options of a run
RESUMABLE = ("demo", "train", "sft", "convert", "eval", "regrade", "resume", "bisect")


# ---- errors and exit codes -------------------------------------------------------------------------------------------


def _report_error(error: Exception, argv: list[str]) -> int:
    """Report the exception that ended a command. Return the exit code."""
    verbose = "--verbose" in argv
    if isinstance(error, BrokenPipeError) and _stdout_is_closed():  # `penstock runs | head`
        # Without the redirection the interpreter's flush at exit would fail and print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    code, message = 2, str(error)
    if isinstance(error, PenstockError):
        pass
    elif isinstance(error, OSError) and (error.filename is not None or error.errno in USER_ERRNOS):
        paths = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        message = f"{paths or 'operating system'}: {(error.strerror or str(error)).lower()}"
    elif isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] not in _OWN_MODULES:
        advice = f"run `{penstock_command()} setup`; with --check it only lists what is missing"
        message = f"the module {error.name} is not installed: {advice}"
    else:
        code, message = 1, f"unexpected {type(error).__name__}: {error}"[:240]
        message += "" if verbose else "; add --verbose for the traceback, and please report this bug"
    print(f"penstock: {to_one_line(message)}", file=sys.stderr)
    if verbose:
        print(redact("".join(traceback.format_exception(error))), file=sys.stderr, end="")
    return code


def _stdout_is_closed() -> bool:
    """Return whether standard output is closed. If it is open, a BrokenPipeError comes from another pipe and is a
    bug."""

    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):  # closed in this process, or without a file descriptor
        return True


if __name__ == "__main__":
    sys.exit(main())
