"""argv to one command. Every error becomes one message and an exit code; a traceback is our own fault."""

import atexit
import errno
import gc
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from inspect import BoundArguments
from types import FrameType
from typing import Any

import cyclopts

import quatrain
from quatrain import console
from quatrain.errors import QuatrainError, UsageError, did_you_mean

# Each is a function of its name in a module of its own, which is imported when it is asked for.
VERBS = ("prepare", "train", "evaluate", "sample")
COMMANDS = (*VERBS, "serve", "inspect", "adopt", "export", "ablate", "plan", "recipes", "demo")
TAKE_SETTINGS = (["train"], ["inspect"], ["ablate"], ["plan"])  # commands with `--section.key value`
# Of libgomp, which reads it when torch is imported: a thread that waits sleeps soon. Alone on the machine this costs
# nothing; beside another busy process the default makes a training five times slower (notes/LOG.md).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Or the interpreter looks for garbage several times while it ends: as long as it takes to import everything (0.15 s).
atexit.register(gc.freeze)

DOTTED = re.compile(r"--[A-Za-z][\w-]*\.[\w.-]+(=.*)?", re.DOTALL)


class Terminated(BaseException):
    """SIGTERM, where no command handles it itself."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; the last line of stdout is one JSON object if `--json` is given."""
    words = sys.argv[1:] if argv is None else argv
    as_json = "--json" in words
    console.write_utf8()
    console.people_read_stderr(as_json)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        command, bound = parse(words)
        result = command(*bound.args, **bound.kwargs)
        if as_json and isinstance(result, dict):  # --help and --version have no result
            print(json.dumps(result, ensure_ascii=False), flush=True)
        return 0
    except QuatrainError as error:
        return _fail(str(error), error.exit_code, as_json)
    except KeyboardInterrupt:
        return _fail("interrupted; the same command goes on from what was saved, or begins again", 130, as_json)
    except Terminated:
        return _fail("terminated; the same command goes on from what was saved, or begins again", 143, as_json)
    except BrokenPipeError:
        _give_up_stdout()  # its reader has gone (`| head`): nobody is left to tell
        return 141
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return _fail(f"{error.filename}: {error.strerror}", 2, as_json)
        if error.filename is None:
            _give_up_stdout()
        return _fail(f"{error.filename or 'standard output'}: {error.strerror}", 1, as_json)


def parse(words: list[str]) -> tuple[Callable[..., Any], BoundArguments]:
    """The command that the words name, and its arguments; raises `UsageError` for what is none."""
    app = cyclopts.App(
        name="quatrain",
        help="Pretrain GPT-2-class language models from raw text: prepare, train, evaluate, sample.",
        version=quatrain.__version__,
        help_format="plaintext",
        default_parameter=cyclopts.Parameter(allow_repeating=True),  # later wins, as it does among settings
    )
    for name in words[:1] if set(words[:1]) & set(COMMANDS) else COMMANDS:
        module = import_module(f"quatrain.commands.{name}")
        app.command(getattr(module, name), help_epilogue=module.settings_help() if words[:1] == ["train"] else "")
    if words[:1] in TAKE_SETTINGS:
        words = _dotted_last(words)
    try:
        function, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    except cyclopts.CycloptsError as error:
        raise UsageError(_plain(error, words, app)) from error
    return function, bound


def _dotted_last(words: list[str]) -> list[str]:
    """`--section.key value` moved behind everything else and a `--`: the command's last words, taken as they are."""
    dotted: list[str] = []
    others: list[str] = []
    for place, word in enumerate(words):
        before = words[place - 1] if place else ""
        is_value = DOTTED.fullmatch(before) and "=" not in before and not word.startswith("--")
        (dotted if is_value or DOTTED.fullmatch(word) else others).append(word)
    return [*others, "--", *dotted] if dotted else others


def _plain(error: cyclopts.CycloptsError, words: list[str], app: cyclopts.App) -> str:
    text = str(error).strip()
    unknown = re.search(r"Unknown option: (?:\")?(--?[\w.-]*\w)", text)
    if unknown and words[0] in app:
        known = [name for argument in app[words[0]].assemble_argument_collection() for name in argument.names]
        text = f"no option {unknown[1]}{did_you_mean(unknown[1], known)}"
    unused = re.search(r"Unused Tokens: \[(.*)\]", text)
    if unused:
        text = f"{unused[1]} is one word too many: what follows the first has a name (--prompt TEXT, --data STORE ...)"
    command = f"quatrain {words[0]}" if words and words[0] in app else "quatrain"
    return f"{text}\nsee: {command} --help"


def _fail(message: str, code: int, as_json: bool) -> int:
    try:
        print(f"error: {message}", file=sys.stderr, flush=True)
        if as_json:
            print(json.dumps({"error": message, "exit": code}, ensure_ascii=False), flush=True)
    except OSError:
        _give_up_stdout()  # the terminal is closed: the exit code alone can tell
    return code


def _give_up_stdout() -> None:
    """Let the interpreter's last flush succeed, where what is buffered can no longer be written."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty() or stream is sys.stdout:
            os.dup2(nowhere, stream.fileno())


def _terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated
