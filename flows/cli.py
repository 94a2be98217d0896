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
from typing import TYPE_CHECKING

from penstock.flows.options.refused import TRAINERS
from penstock.flows.runtime import environment
from penstock.flows.runtime.signals import report_stop, stop_signals
from penstock.storage.errors import InstallError, OptionError, PenstockError
from penstock.storage.preemption import Preempted
from penstock.storage.secrets import redact

if TYPE_CHECKING:
    from penstock.flows.config import PostTrainConfig

Command = Callable[[list[str]], int]  # arguments -> exit code

_LAUNCH_SCRIPTS = "\n".join(
    f"  import-{name}   make a recipe from a {name} launch script:  penstock import-{name} run.sh [--output FILE.toml]"
    for name in TRAINERS
)
USAGE = f"""usage: penstock COMMAND [options]

  demo      make a tiny model and train it in all stages, a few minutes on a laptop
  train     convert -> [rollout -> train -> publish -> checkpoint -> evaluate] x N -> export
  train-async   the same loop; rollouts are generated while earlier ones are trained (--async-buffer-size, default 1)
  sft       the same loop over demonstrations (no engine)
{_LAUNCH_SCRIPTS}
  convert   Hugging Face checkpoint -> torch_dist, in the store or in a directory, and back
  export    write a checkpoint of a run for others:  penstock export RUN/20 --format hf|megatron --output DIR
  eval      score a Hugging Face checkpoint on data sets; --rescore RUN grades stored samples again,
            --compare RUN/20 RUN/40 compares two policy versions
  resume    continue a run after its last committed stage:  penstock resume RUN [--store URI]
  replay    train a run's committed shards again and compare every step:  penstock replay RUN [--from A --to B]
  promote   make a policy the champion of a model if it is better:  penstock promote RUN/20 --to MODEL --data-set NAME
  rm        remove a run:  penstock rm RUN
  fork      start a new run from round N of another:  penstock fork RUN --at N --name NEW [options to change]
  verify    check every hash, reference and sample of a run:  penstock verify RUN
  gc        list files that are no longer needed; --delete removes them
  deploy    register the flows on a Prefect server, optionally with a schedule
  runs      list the runs of the stores around the working directory, or of one store
  show      print a run on one screen, with the curves of its rounds:  penstock show RUN
  cost      print device-seconds by stage, round and checkpoint, and the price:  penstock cost RUN
  lineage   print what an artifact was made from and what was made from it:  penstock lineage RUN/20
  samples   read samples; compare the responses to a prompt over rounds:  penstock samples RUN --round 12 --worst
  query     run SQL over samples, metrics and evaluations:  penstock query "select ..."
  report    write one HTML page about a run, with curves and samples:  penstock report RUN [--output FILE]
  track     send runs to MLflow, TensorBoard or W&B again, from the store:  penstock track RUN --to mlflow
  setup     install what the wheel cannot install by itself, for CPU or CUDA; continues after an interruption
  doctor    check the installation and print how to fix each problem; --plan estimates the GPU memory of a run

`penstock train --dry-run` (also train-async, sft, eval, resume) checks a run and prints its plan; it starts nothing.
`penstock COMMAND --help` explains a command, `penstock train --help-all` lists every option. `--config FILE.toml` reads
them from a file; --verbose shows Prefect's log lines, and the traceback of an error."""

USER_ERRNOS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}  # errors without a file's name


def main(argv: Sequence[str] | None = None) -> int:
    """Run one `penstock` command and report its errors on stderr.

    Args:
        argv: the arguments after `penstock`. None: use those of this process and install the signal handlers.

    Returns:
        the exit code.
    """
    if argv is None:
        stop_signals.install()
        stop_signals.start_watchdog()
        if logging.lastResort is not None:  # prints what is logged while nothing else shows it
            logging.lastResort.setFormatter(logging.Formatter("warning: %(message)s"))
    from penstock.flows.terminal.escape import escaped_output

    try:
        with escaped_output():
            return _run_and_report(list(sys.argv[1:] if argv is None else argv))
    finally:
        if argv is None:
            stop_signals.exits = True


def _run_and_report(arguments: list[str]) -> int:
    try:
        code = run_command(arguments)
        sys.stdout.flush()
        return code
    except (KeyboardInterrupt, Preempted, Exception) as error:
        # A library may have turned the exception of a signal handler into one of its own.
        if stop_signals.received or not isinstance(error, Exception):
            return report_stop(resumable=bool(arguments) and arguments[0] in RESUMABLE)
        return _report_error(error, arguments)


def run_command(argv: list[str]) -> int:
    """Run the command named by the first argument and return its exit code. Its exceptions are not caught."""
    name, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if name in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if name not in COMMANDS:
        from penstock.flows.options.argv import short_repr
        from penstock.flows.options.flags import did_you_mean

        hint = did_you_mean(name, list(COMMANDS)) or ": `penstock --help` lists them"
        raise OptionError(f"unknown command {short_repr(name)}{hint}")
    environment.set_default_variables(verbose="--verbose" in rest)
    return COMMANDS[name]([argument for argument in rest if argument != "--verbose"])


def asks_for_help(argv: Sequence[str]) -> bool:
    """Return whether --help, -h or --help-all is among the arguments."""
    return bool({"--help", "-h", "--help-all"} & {*argv})


def print_flow_help(command: str, argv: Sequence[str]) -> int:
    """Print the help of a command that takes the options of a run: the short one or, with --help-all, every option.
    Return 0."""
    from penstock.flows.options.help import flow_usage, full_help, short_help

    print(full_help(command, flow_usage(command)) if "--help-all" in argv else short_help(command))
    return 0


# ---- the commands ----------------------------------------------------------------------------------------------------


def _flow_command(name: str) -> Command:
    """Return a command that parses its arguments into a config and runs the flow `name` with it."""

    def call(argv: list[str]) -> int:
        from penstock.flows.config import validate_config, with_sft_loss
        from penstock.flows.options import flags

        if asks_for_help(argv):
            return print_flow_help({"post_train": "train", "evaluate": "eval"}.get(name, name), argv)
        values = flags.parse_values(_without(argv, "--dry-run"))
        config = validate_config(with_sft_loss(values) if name == "sft" else values)
        return _run_or_plan(name, config, dry_run="--dry-run" in argv)

    return call


def _run_or_plan(flow: str, config: PostTrainConfig, *, dry_run: bool) -> int:
    """Run a flow, or print its plan with --dry-run. Return the exit code."""
    if not dry_run:
        from penstock.flows.runtime.runner import run_flow

        return run_flow(flow, config)
    from penstock.flows.inspect import dry_run as planning

    return planning.dry_run(flow, config)


def _without(argv: Sequence[str], switch: str) -> list[str]:
    return [argument for argument in argv if argument != switch]


def run_train_async(argv: list[str]) -> int:
    """Run `penstock train-async`: `penstock train`, with one rollout ahead of the trainer unless --async-buffer-size or
    --async-mode says otherwise."""
    from penstock.flows.config import validate_config
    from penstock.flows.options import flags

    if asks_for_help(argv):
        return print_flow_help("train-async", argv)
    values = flags.parse_values(_without(argv, "--dry-run"))
    run = values.setdefault("run", {})
    if run.get("async_mode") != "streaming":
        run.setdefault("async_buffer_size", 1)
    return _run_or_plan("post_train", validate_config(values), dry_run="--dry-run" in argv)


def _module_command(name: str) -> Command:
    """Return a command that runs `main` of `penstock.flows.<name>`; the module is imported when the command is called.

    --help prints the module's USAGE; --help-all also the options of a run, if the command takes them.
    """

    def call(argv: list[str]) -> int:
        module = importlib.import_module(f"penstock.flows.{name}")
        if asks_for_help(argv) and hasattr(module, "USAGE"):
            print(module.USAGE)
            if "--help-all" in argv and name in _TAKE_OPTIONS:
                from penstock.flows.options.help import full_help

                print(full_help(name, "\nOptions of a run:", may_change_only=name == "commands.resume"))
            return 0
        code: int = module.main(argv)
        return code

    return call


def run_eval_command(argv: list[str]) -> int:
    """Run `penstock eval`. With --rescore or --compare run that command on stored evaluations instead of the flow."""
    flags = {argument.partition("=")[0] for argument in argv}
    for name in ("rescore", "compare"):  # these start neither engines nor a flow
        if f"--{name}" in flags:
            return _module_command(f"commands.{name}")(argv)
    return _flow_command("evaluate")(argv)


COMMANDS: dict[str, Command] = {
    "demo": _module_command("commands.demo"),
    "train": _flow_command("post_train"),
    "train-async": run_train_async,
    "sft": _flow_command("sft"),
    **{f"import-{name}": _module_command(f"{name}.recipe") for name in TRAINERS},
    "convert": _module_command("convert"),
    "export": _module_command("inspect.export"),
    "eval": run_eval_command,
    "resume": _module_command("commands.resume"),
    "replay": _module_command("replay"),
    "fork": _module_command("commands.fork"),
    "promote": _module_command("commands.promote"),
    "rm": _module_command("commands.rm"),
    "verify": _module_command("commands.verify"),
    "gc": _module_command("commands.gc"),
    "deploy": _module_command("services.deploy"),
    "runs": _module_command("inspect.run_table"),
    "show": _module_command("inspect.show"),
    "lineage": _module_command("inspect.lineage"),
    "cost": _module_command("inspect.cost"),
    "samples": _module_command("inspect.samples"),
    "query": _module_command("inspect.query"),
    "report": _module_command("inspect.report"),
    "track": _module_command("inspect.track"),
    "setup": _module_command("install.command"),
    "doctor": _module_command("commands.doctor"),
}
_TAKE_OPTIONS = ("commands.resume", "commands.fork", "commands.doctor")  # modules of commands that also take them
RESUMABLE = ("demo", "train", "train-async", "sft", "convert", "eval", "resume")


# ---- errors and exit codes -------------------------------------------------------------------------------------------


def _report_error(error: Exception, argv: list[str]) -> int:
    """Report the exception that ended a command. Return the exit code."""
    if isinstance(error, BrokenPipeError):
        return _silence_closed_pipe() if _stdout_is_closed() else _report_bug(error, argv)
    of_file = isinstance(error, OSError) and (error.filename is not None or error.errno in USER_ERRNOS)
    if isinstance(error, PenstockError) or of_file:
        return _report_user_error(error, argv)
    if isinstance(error, ModuleNotFoundError):
        return _report_missing_module(error, argv)
    return _report_bug(error, argv)


def _report_missing_module(error: ModuleNotFoundError, argv: list[str]) -> int:
    """Report an incomplete installation, or a bug if the missing module is Penstock's own or of Python itself."""
    from penstock.flows.options.argv import penstock_command

    if (error.name or "").partition(".")[0] in {"", "penstock", *sys.stdlib_module_names}:
        return _report_bug(error, argv)
    advice = f"run `{penstock_command()} setup`; with --check it only lists what is missing"
    return _report_user_error(InstallError(f"the module {error.name} is not installed: {advice}"), argv)


def _report_user_error(error: Exception, argv: list[str]) -> int:
    from penstock.flows.options.argv import to_one_line

    if isinstance(error, OSError) and not isinstance(error, PenstockError):
        paths = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        message = f"{paths or 'operating system'}: {(error.strerror or str(error)).lower()}"
    else:
        message = str(error)
    print(f"penstock: {to_one_line(message)}", file=sys.stderr)
    _print_traceback(error, argv)
    return 2


def _report_bug(error: Exception, argv: list[str]) -> int:
    from penstock.flows.options.argv import to_one_line

    advice = "" if "--verbose" in argv else "; add --verbose for the traceback, and please report this bug"
    print(f"penstock: {to_one_line(f'unexpected {type(error).__name__}: {error}'[:240] + advice)}", file=sys.stderr)
    _print_traceback(error, argv)
    return 1


def _print_traceback(error: Exception, argv: list[str]) -> None:
    if "--verbose" in argv:
        print(redact("".join(traceback.format_exception(error))), file=sys.stderr, end="")


def _stdout_is_closed() -> bool:
    """Return whether standard output is closed. If not, a BrokenPipeError comes from another pipe and is a bug."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):  # closed in this process, or without a file descriptor
        return True


def _silence_closed_pipe() -> int:
    """Redirect standard output to /dev/null and return the exit code of a closed pipe (`penstock runs | head`).

    Without the redirection the interpreter's flush at exit would fail and print an error.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


if __name__ == "__main__":
    sys.exit(main())
