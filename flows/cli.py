"""The command line: `penstock demo | train | sft | convert | eval | resume | replay | fork | rm | verify | gc | deploy | runs | doctor`.

Thin: a command reads flags into a config, checks it, and calls a flow. Exit codes: 0 done, 1 failed, 2 the request was wrong (one line says
why), 130 interrupted, 141 the reader of the output is gone, 143 terminated.
"""

from __future__ import annotations

import errno
import importlib
import os
import select
import sys
import traceback
from collections.abc import Callable, Sequence

from flows import environment, interrupt
from storage.errors import OptionError, PenstockError
from storage.secrets import redact

USAGE = """usage: penstock COMMAND [options]

  demo      make a tiny model and watch it learn, all stages, a few minutes on a laptop
  train     convert -> [rollout -> train -> publish -> checkpoint -> evaluate] x N -> export
  sft       the same loop over demonstrations (no engine)
  convert   Hugging Face checkpoint -> torch_dist, in the store or anywhere, and back
  eval      score a Hugging Face checkpoint on data sets; --rescore RUN grades stored samples again, --compare RUN/20 RUN/40 compares
  resume    go on with a run after its last committed stage:  penstock resume RUN [--store URI]
  replay    train a run's committed shards again and compare every step:  penstock replay RUN [--from A --to B]
  rm        remove a run:  penstock rm RUN
  fork      a new run from round N of another:  penstock fork RUN --at N --name NEW [options to change]
  verify    check every hash, reference and sample of a run:  penstock verify RUN
  gc        list what nothing needs any more; --delete removes it
  deploy    put the flows on a Prefect server, on a schedule if wanted
  runs      what lies in the store
  doctor    what is installed, what works, and what to do about the rest

`penstock COMMAND --help` lists the options. `--config FILE.toml` reads them from a file; --verbose shows the libraries' own logs."""

RESUME_USAGE = """penstock resume RUN [--store URI ...]

  Resumes a run after its last committed stage, with the configuration recorded in the store."""

RUNS_USAGE = """penstock runs [--store URI ...]

  Lists the runs in a store: rounds, rewards, checkpoints, evaluations. Changes nothing."""

DOCTOR_USAGE = """penstock doctor

  Checks what is installed here and whether the engines start, and says what to do about the rest. Reads no --store."""

REFUSED_BY_THE_SYSTEM = {  # errors of files and directories that the request names
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOENT, errno.EISDIR),
    *(errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: its words; those of this process if not given, and then Ctrl-C is handled too.

    Returns:
        the exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        interrupt.listen()
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return interrupt.report(resumable=bool(words) and words[0] in RESUMABLE)
    except BrokenPipeError as error:
        return _reader_gone() if _stdout_is_closed() else _unexpected(error, words)
    except PenstockError as error:
        return _refuse(error, words)
    except OSError as error:
        return _refuse(error, words) if error.errno in REFUSED_BY_THE_SYSTEM else _unexpected(error, words)
    except Exception as error:
        return _unexpected(error, words)
    finally:
        if argv is None:
            interrupt.ending()


def _run(words: list[str]) -> int:
    command, rest = (words[0], words[1:]) if words else ("--help", [])
    if command in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if command not in COMMANDS:
        from flows.flags import nearest
        from flows.words import shown

        raise OptionError(
            f"unknown command {shown(command)}{nearest(command, list(COMMANDS)) or ': `penstock --help` lists them'}"
        )
    environment.prepare(verbose="--verbose" in rest)
    return COMMANDS[command]([word for word in rest if word != "--verbose"])


def _train(words: list[str]) -> int:
    return _run_flow("post_train", words)


def _sft(words: list[str]) -> int:
    return _run_flow("sft", words)


def _evaluate(words: list[str]) -> int:
    given = {word.partition("=")[0] for word in words}
    for other in ("rescore", "compare"):  # of evaluations that were made: no engine, no flow
        if f"--{other}" in given:
            return _later(other)(words)
    code = _run_flow("evaluate", words)
    if given & {"--help", "-h"}:
        print("\nSee also `penstock eval --rescore --help` and `penstock eval --compare --help`.")
    return code


def _convert(words: list[str]) -> int:
    from flows import convert, flags
    from flows.registry import start

    if asks_for_help(words):
        print(convert.USAGE)
        return 0
    return start("convert", convert.completed(flags.parse(convert.flags_of(words))))


def _run_flow(name: str, words: list[str]) -> int:
    from flows import flags

    if asks_for_help(words):
        print(flags.help_text(name))
        return 0
    config = flags.parse(words)
    from flows.registry import start

    return start(name, config)


def _resume(words: list[str]) -> int:
    if asks_for_help(words):
        print(RESUME_USAGE)
        return 0
    from flows.registry import start
    from flows.runs import resumed
    from flows.words import one_run, taken

    alone, _, rest = taken(words, {})
    return start(*resumed(one_run("resume", alone), rest))


def _runs(words: list[str]) -> int:
    if asks_for_help(words):
        print(RUNS_USAGE)
        return 0
    from flows.flags import parse_store
    from flows.run_table import print_runs

    return print_runs(parse_store(words, "runs"))


def _doctor(words: list[str]) -> int:
    if asks_for_help(words):
        print(DOCTOR_USAGE)
        return 0
    if words:
        from flows.words import shown

        raise OptionError(f"penstock doctor takes no options; found {shown(' '.join(words))}")
    from flows.doctor import examine

    return examine()


def _later(module: str) -> Callable[[list[str]], int]:
    """Return the command in `flows.<module>`, imported when it is called; its USAGE, if it has one, is what --help shows."""

    def call(words: list[str]) -> int:
        command = importlib.import_module(f"flows.{module}")
        if asks_for_help(words) and hasattr(command, "USAGE"):
            print(command.USAGE)
            return 0
        return command.main(words)

    return call


def asks_for_help(words: Sequence[str]) -> bool:
    """Return whether the words of a command hold --help or -h."""
    return "--help" in words or "-h" in words


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "demo": _later("demo"),
    "train": _train,
    "sft": _sft,
    "convert": _convert,
    "eval": _evaluate,
    "resume": _resume,
    "replay": _later("replay"),
    "fork": _later("fork"),
    "rm": _later("rm"),
    "verify": _later("verify"),
    "gc": _later("gc"),
    "deploy": _later("deploy"),
    "runs": _runs,
    "doctor": _doctor,
}
RESUMABLE = ("demo", "train", "sft", "convert", "eval", "resume")


# ---- how a command ends ------------------------------------------------------------------------------------------------------


def _refuse(error: Exception, words: list[str]) -> int:
    from flows.words import one_line

    if isinstance(error, OSError) and not isinstance(error, PenstockError):
        places = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        sentence = f"{places or 'the system'}: {(error.strerror or str(error)).lower()}"
    else:
        sentence = str(error)
    print(f"penstock: {one_line(sentence)}", file=sys.stderr)
    _print_traceback(error, words)
    return 2


def _unexpected(error: Exception, words: list[str]) -> int:
    from flows.words import one_line

    advice = "" if "--verbose" in words else "; add --verbose for the traceback, and please report it"
    print(f"penstock: {one_line(f'unexpected {type(error).__name__}: {error}'[:240] + advice)}", file=sys.stderr)
    _print_traceback(error, words)
    return 1


def _print_traceback(error: Exception, words: list[str]) -> None:
    if "--verbose" in words:
        print(redact("".join(traceback.format_exception(error))), file=sys.stderr, end="")


def _stdout_is_closed() -> bool:
    """Return whether nothing reads standard output any more: a broken pipe of another kind is not the reader's doing."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):  # closed, or not a file
        return True


def _reader_gone() -> int:
    """End quietly like any program in a pipe: `penstock runs | head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it flushes at its exit
    return 141


if __name__ == "__main__":
    sys.exit(main())
