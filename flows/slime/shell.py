"""Read the variables, arrays and commands of a bash script without executing anything.

These constructs are understood: assignments, arrays, `+=`, `export`, quotes, comments, continued lines, `${NAME}`,
`${NAME:-default}`, `${NAME[@]}`, `$((...))` of integers, `source`, and `$(...)` with a command that computes a path or
numbers (`cd`, `dirname`, `basename`, `realpath`, `pwd`, `echo`, `seq`). Of an `if` block, the branch whose condition
holds is read if the conditions compare known texts, otherwise the first branch. Loops, functions and here-documents are
skipped. A variable that the script does not set has its value in `environment`. A value that is known only when the
script runs becomes `<...>`, for example `<MODEL_DIR>`.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.engines.sources import parse_source
from penstock.storage.disk import read_file

MAX_BYTES = 1 << 20
NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_BLOCK_ENDS = {"fi", "done", "esac", "}"}
MAX_NUMBERS = 10_000  # maximum length of a sequence from `seq`
_SCRIPT_PATH = re.compile(r"\$0|\$\{0\}|\$\{?BASH_SOURCE(\[0\])?\}?")
_QUOTES = "\u201c\u201d\u2018\u2019"  # typographic quotes, which are no quotes for bash; they are removed around words


@dataclass
class Script:
    """The commands and sourced files of a script, and what is needed to read them."""

    find_source: Callable[[str], Path | None]
    environment: Mapping[str, str]
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    commands: list[list[str]] = field(default_factory=list)  # words of each command, with variables replaced
    sourced: list[str] = field(default_factory=list)  # paths of `source`, with variables replaced, in order
    not_found: list[str] = field(default_factory=list)  # sourced paths that do not exist here
    from_environment: set[str] = field(default_factory=set)  # variables whose value comes from `environment`
    path: Path = Path()  # the file that is being read
    depth: int = 0  # 1 for the script, 2 for a file that it sources, ...

    def read(self, path: Path) -> None:
        """Read the statements of a file."""
        text = read_file(path, MAX_BYTES).decode("utf-8")
        outer, self.path = self.path, path
        self.depth += 1
        # The blocks that are open: "if" in the branch of an `if` block that is read, "before" in a branch before it and
        # "else" in a branch after it; "do" or "case" in a block that is skipped.
        blocks: list[str] = []
        for statement in split_statements(text):
            self.read_statement(statement, blocks)
        self.depth -= 1
        self.path = outer

    def read_statement(self, statement: str, blocks: list[str]) -> None:
        """Read one statement, unless it is in a loop, a function or a branch of an `if` block that is skipped."""
        word, _, rest = statement.partition(" ")
        if word in ("then", "do", "{"):  # `then` and `do` may be followed by a statement
            statement, (word, _, _) = rest.strip(), rest.strip().partition(" ")
        if word == "if":
            blocks.append("before" if self.condition(statement[2:]) is False else "if")
        elif word in ("for", "while", "until", "case") or re.match(rf"(function\s+{NAME}|{NAME}\s*\(\s*\))", statement):
            blocks.append(word if word == "case" else "do")
        elif word in ("else", "elif") and blocks:
            reads = blocks[-1] == "before" and (word == "else" or self.condition(statement[4:]) is not False)
            blocks[-1] = "if" if reads else "before" if blocks[-1] == "before" else "else"
        elif word in _BLOCK_ENDS and blocks:
            blocks.pop()
        elif statement and all(block == "if" for block in blocks):
            self.read_command(statement)

    def condition(self, text: str) -> bool | None:
        """Return whether the condition of an `if` holds, if it compares two known texts or tests whether one is empty;
        otherwise return None."""
        match = re.fullmatch(r"\s*\[\[?\s+(.*?)\s+\]\]?\s*", text, re.DOTALL)
        words = list(self.expand_words(match[1])) if match else []
        if any("<" in word for word in words):
            return None
        if len(words) == 3 and words[1] in ("=", "==", "!="):
            return (words[0] == words[2]) != (words[1] == "!=")
        if len(words) == 2 and words[0] in ("-z", "-n"):
            return (words[1] == "") == (words[0] == "-z")
        return None

    def read_command(self, statement: str) -> None:
        """Record an assignment or a command, or read the file that a `source` names."""
        words = statement
        if match := re.match(r"(?:export|declare|local|readonly|typeset)\s+(?:-\w+\s+)*(?=[A-Za-z_])", words):
            if words.startswith("export"):
                self.exported |= set(re.findall(rf"(?:^|\s)({NAME})=", words))
            words = words[match.end() :]
        while match := re.match(rf"({NAME})(\+?)=(\()?", words):
            name, adds, is_array = match[1], bool(match[2]), bool(match[3])
            end = end_of_value(words, match.end(), ")" if is_array else None)
            values = list(self.expand_words(words[match.end() : end]))
            if is_array:
                self.arrays[name] = [*(self.arrays.get(name, []) if adds else []), *values]
            else:
                self.variables[name] = (self.variables.get(name, "") if adds else "") + " ".join(values)
            words = words[end + is_array :].strip()
        expanded = list(self.expand_words(words))
        if expanded[:1] in (["source"], ["."]) and len(expanded) > 1 and self.depth < 8:
            self.sourced.append(expanded[1])
            if path := self.find_source(expanded[1]):
                self.read(path)
            else:
                self.not_found.append(expanded[1])
        elif expanded:
            self.commands.append(expanded)

    def expand_words(self, text: str) -> Iterator[str]:
        """Yield the words of a text, without quotes and with variables replaced. `${ARRAY[@]}` and `$(seq ...)` become
        any number of words."""
        for raw in split_words(text):
            if match := re.fullmatch(rf"\"?\$\{{({NAME})\[[@*]\](?:[:+-].*)?\}}\"?", raw, re.DOTALL):
                yield from self.arrays.get(match[1], [])
            elif raw.startswith("$(seq "):
                yield from self.expand(raw).split("\n")
            elif re.fullmatch(r"\$[@*]", raw.strip('"')):
                continue  # the arguments of the script: it is read without any
            else:
                yield self.expand(raw).strip(_QUOTES)

    def expand(self, raw: str) -> str:
        """Return the word `raw` without quotes and with variables replaced."""
        out, position = [], 0
        while position < len(raw):
            character = raw[position]
            if character == "'":
                end = raw.index("'", position + 1) if "'" in raw[position + 1 :] else len(raw)
                out.append(raw[position + 1 : end])
                position = end + 1
            elif character == "\\" and position + 1 < len(raw):
                out.append(raw[position + 1])
                position += 2
            elif character == '"':
                position += 1
            elif character in "$`":
                end = end_of_expansion(raw, position)
                out.append(self.value_of(raw[position:end]))
                position = end
            else:
                out.append(character)
                position += 1
        return "".join(out)

    def value_of(self, expansion: str) -> str:
        """Return the value of an expansion (`$NAME`, `${NAME}`, `${NAME:-default}`, `$((...))`, `$(...)`, or the path
        of the script); `<...>` if it is not known."""
        unknown = f"<{expansion.lstrip('$').strip('{}')}>"
        if expansion.startswith("$((") and expansion.endswith("))"):
            formula = re.sub(rf"\$?\{{?({NAME})\}}?", lambda match: self.variables.get(match[1], "x"), expansion[3:-2])
            return compute(formula) or unknown
        if expansion.startswith(("$(", "`")):
            words = list(split_words(expansion.removeprefix("$").strip("`").removeprefix("(").removesuffix(")")))
            result = self.substitute(words)
            return "<command>" if result is None else result
        if _SCRIPT_PATH.fullmatch(expansion):
            return str(self.path)
        match = re.fullmatch(rf"\$\{{?({NAME}|[0-9])(?::?[-=](.*))?\}}?", expansion, re.DOTALL)
        if match is None:
            return unknown
        name, default = match[1], match[2].removesuffix("}") if match[2] is not None else None
        if name in self.variables:
            return self.variables[name]
        if name in self.environment:
            self.from_environment.add(name)
            return self.environment[name]
        return unknown if default is None else self.expand(default)

    def substitute(self, words: list[str]) -> str | None:
        """Return what the command in `$(...)` with these words would print, if it only computes a path or numbers, else
        None."""
        if "|" in words or not words:
            return None
        name = words[0]
        arguments = [self.expand(word) for word in words[1:] if word not in ("--", "-P", "-f", "-m", "-e")]
        if name == "cd" and words[-2:] == ["&&", "pwd"] and len(arguments) == 3:
            return os.path.normpath(arguments[0])
        if name == "pwd" and not arguments:
            return str(self.path.parent)
        if name == "seq":
            return number_sequence(arguments)
        functions: dict[str, Callable[[str], str]] = {
            "dirname": lambda path: os.path.dirname(path) or ".",
            "basename": os.path.basename,
            "realpath": os.path.normpath,
            "readlink": os.path.normpath,
            "echo": str,
        }
        return functions[name](arguments[0]) if name in functions and len(arguments) == 1 else None


def read_script(
    path: Path, find_source: Callable[[str], Path | None], environment: Mapping[str, str] | None = None
) -> Script:
    """Read a script and the files that it sources.

    Args:
        path: the script.
        find_source: function that returns the file for a path after `source` in the script, or None if there is none.
        environment: variables that the script may read without setting them.

    Raises:
        ValueError: a file is not UTF-8 text, or is longer than MAX_BYTES.
    """
    script = Script(find_source, environment or {})
    script.read(path)
    return script


# ---- text ------------------------------------------------------------------------------------------------------------


def split_statements(text: str) -> Iterator[str]:
    """Yield the statements of a script, without comments and here-documents. They are separated by line ends, `;`, `&`,
    `&&`, `||` and `|` outside of quotes and parentheses."""
    text = re.sub(r"\\\r?\n", " ", text)
    text = re.sub(r"<<-?\s*(['\"]?)(\w+)\1(.*?)\n(.*?)^\s*\2[ \t]*$", r"\3", text, flags=re.DOTALL | re.MULTILINE)
    start = position = 0
    while position <= len(text):
        rest = text[position : position + 2]
        # whether an `&` here belongs to a redirection: 2>&1 or &>file
        redirects = text[position - 1 : position] == ">" or rest == "&>"
        if position == len(text) or rest[0] in "\n;|" or (rest[0] == "&" and not redirects):
            if statement := text[start:position].strip():
                yield statement
            start = position = position + 1
        elif rest[0] == "#" and (position == start or text[position - 1].isspace()):
            end = text.find("\n", position)
            text = text[:position] + text[end if end >= 0 else len(text) :]
        else:
            position = skip(text, position)


def skip(text: str, position: int) -> int:
    """Return the position after the character, quoted text, expansion or parenthesis at `position`."""
    character = text[position]
    if character == "\\":
        return position + 2
    if character == "'":
        end = text.find("'", position + 1)
        return len(text) if end < 0 else end + 1
    if character == '"':
        position += 1
        while position < len(text) and text[position] != '"':
            position = (
                end_of_expansion(text, position) if text[position] in "$`" else position + 1 + (text[position] == "\\")
            )
        return position + 1
    if character in "$`":
        return end_of_expansion(text, position)
    if character == "(":
        return end_of_value(text, position + 1, ")") + 1
    return position + 1


def end_of_value(text: str, position: int, closing: str | None) -> int:
    """Return where the value that starts at `position` ends: before the character `closing`; None: before white
    space."""
    while position < len(text):
        if text[position] == closing or (closing is None and text[position].isspace()):
            return position
        if text[position] == "#" and text[position - 1].isspace():
            end = text.find("\n", position)
            position = len(text) if end < 0 else end
        else:
            position = skip(text, position)
    return len(text)


def end_of_expansion(text: str, position: int) -> int:
    """Return the position after the expansion (`$NAME`, `${...}`, `$(...)`, `` `...` ``) at `position`."""
    if text[position] == "`":
        end = text.find("`", position + 1)
        return len(text) if end < 0 else end + 1
    following = text[position + 1 : position + 2]
    if following == "(":
        return min(len(text), end_of_value(text, position + 2, ")") + 1)
    if following == "{":
        return min(len(text), end_of_value(text, position + 2, "}") + 1)
    match = re.compile(rf"\$({NAME}|.)?", re.DOTALL).match(text, position)
    return match.end() if match else position + 1


def split_words(text: str) -> Iterator[str]:
    """Yield the words of a text as they are written, with quotes, without comments and redirections."""
    position, start = 0, None
    while position <= len(text):
        if position == len(text) or text[position].isspace():
            if start is not None and not re.match(r"(\d*|&)[<>]", text[start:position]):
                yield text[start:position]
            start, position = None, position + 1
        elif text[position] == "#" and start is None:
            end = text.find("\n", position)
            position = len(text) if end < 0 else end
        else:
            start = position if start is None else start
            position = skip(text, position)


def number_sequence(arguments: list[str]) -> str | None:
    """Return what `seq LAST`, `seq FIRST LAST` or `seq FIRST STEP LAST` prints, or None if these are not integers."""
    if not 1 <= len(arguments) <= 3 or not all(re.fullmatch(r"-?\d{1,9}", text) for text in arguments):
        return None
    numbers = [int(text) for text in arguments]
    first, step, last = {1: [1, 1, *numbers], 2: [numbers[0], 1, numbers[-1]], 3: numbers}[len(numbers)]
    if step == 0 or (last - first) // step > MAX_NUMBERS:
        return None
    return "\n".join(map(str, range(first, last + (1 if step > 0 else -1), step)))


def compute(formula: str) -> str | None:
    """Return the value of a formula of integers, the binary operators + - * / (division rounds down) and parentheses;
    None if the formula contains anything else or divides by zero."""
    operators: dict[type[ast.operator], Callable[[int, int], int]]
    operators = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in operators:
            return operators[type(node.op)](value(node.left), value(node.right))
        raise ValueError(f"not a sum or product of integers: {formula}")

    try:
        return str(value(parse_source(formula.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None
