"""argv to one command. Every error becomes one message and an exit code; a traceback is our own fault."""

import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from inspect import BoundArguments
from types import FrameType
from typing import Any

import cyclopts

import quatrain
from quatrain import console
from quatrain.commands.demo import demo
from quatrain.commands.evaluate import evaluate
from quatrain.commands.inspect import inspect
from quatrain.commands.prepare import prepare
from quatrain.commands.recipes import recipes
from quatrain.commands.sample import sample
from quatrain.commands.train import settings_help, train
from quatrain.errors import QuatrainError, UsageError, did_you_mean

TAKE_SETTINGS = (["train"], ["inspect"])  # commands with `--section.key value`
DOTTED = re.compile(r"--[A-Za-z][\w-]*\.[\w.-]+(=.*)?", re.DOTALL)


class Terminated(BaseException):
    """SIGTERM, where no command handles it itself."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; the last line of stdout is one JSON object if `--json` is given."""
    words = sys.argv[1:] if argv is None else argv
    as_json = "--json" in words
    console.people_read_stderr(as_json)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        command, bound = parse(words)
        result = command(*bound.args, **bound.kwargs)
        if as_json:
            print(json.dumps(result, ensure_ascii=False), flush=True)
        return 0
    except QuatrainError as error:
        return _fail(str(error), error.exit_code, as_json)
    except KeyboardInterrupt:
        return _fail("interrupted; the same command again goes on or starts clean", 130, as_json)
    except Terminated:
        return _fail("terminated; the same command again goes on or starts clean", 143, as_json)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): nobody is left to tell, also not at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def parse(words: list[str]) -> tuple[Callable[..., Any], BoundArguments]:
    """The command that the words name, and its arguments; raises `UsageError` for what is none."""
    app = cyclopts.App(
        name="quatrain",
        help="Pretrain GPT-2-class language models from raw text: prepare, train, evaluate, sample.",
        version=quatrain.__version__,
        help_format="plaintext",
    )
    for command in (prepare, evaluate, sample, inspect, recipes, demo):
        app.command(command)
    app.command(train, help_epilogue=settings_help() if words[:1] == ["train"] else "")
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
    rest = iter(words)
    for word in rest:
        if not DOTTED.fullmatch(word):
            others.append(word)
            continue
        dotted.append(word)
        if "=" not in word:
            dotted += itertools.islice(rest, 1)
    return [*others, "--", *dotted] if dotted else others


def _plain(error: cyclopts.CycloptsError, words: list[str], app: cyclopts.App) -> str:
    text = str(error).strip()
    unknown = re.search(r"Unknown option: (?:\")?(--?[\w.-]*\w)", text)
    if unknown and words[0] in app:
        known = [name for argument in app[words[0]].assemble_argument_collection() for name in argument.names]
        text = f"no option {unknown[1]}{did_you_mean(unknown[1], known)}"
    command = f"quatrain {words[0]}" if words and words[0] in app else "quatrain"
    return f"{text}\nsee: {command} --help"


def _fail(message: str, code: int, as_json: bool) -> int:
    print(f"error: {message}", file=sys.stderr, flush=True)
    if as_json:
        print(json.dumps({"error": message, "exit": code}, ensure_ascii=False), flush=True)
    return code


def _terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated
