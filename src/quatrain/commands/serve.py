"""quatrain serve: a completions API of a run's model, and its page."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import quote

from cyclopts import Parameter

from quatrain.console import say
from quatrain.errors import ConfigError, DataError, QuatrainError, Stopped, UsageError
from quatrain.web.live import PORT, needs_libraries

if TYPE_CHECKING:
    from quatrain.web.asking import Limits
    from quatrain.web.guard import Door
    from quatrain.web.serving import Serving

TOKEN = "QUATRAIN_TOKEN"
HOST_NAME = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.]+\])(:\d+)?", re.ASCII)


def serve(
    run: Path,
    *others: Path,
    host: str = "127.0.0.1",
    port: int = PORT,
    token: str | None = None,
    allow_host: Annotated[list[str] | None, Parameter(negative=())] = None,
    dtype: Literal["fp32", "bf16", "int8"] = "fp32",
    device: str = "auto",
    slots: int = 16,
    queue: int = 256,
    samples: int = 128,
    max_tokens: int = 8192,
    max_body: int = 1 << 20,
    timeout: float = 300.0,
    body_timeout: float = 10.0,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Answer completion requests with a run's model, in OpenAI's style, until Ctrl-C.

    Parameters
    ----------
    run
        A run folder (its newest whole checkpoint speaks) or one checkpoint folder.
    others
        More runs, whose curves are shown on the page beside it.
    host
        The address to listen on; one that others reach needs --token.
    port
        The port; 0 takes one that is free.
    token
        A word that every request must bring; default: the environment's QUATRAIN_TOKEN, if set.
    allow_host
        One more name (or name:port) under which the server is reached, as behind a tunnel or proxy.
    dtype
        The weights' numbers: fp32, bf16 or int8 (bf16 where int8 does not run).
    device
        auto, cpu, cuda, cuda:N or mps.
    slots
        Samples that are written together.
    queue
        Samples that may wait for a slot; more are refused with 429.
    samples
        The most samples of one request: prompts times n.
    max_tokens
        The most ids of a prompt and what follows it (block_size, where that is more).
    max_body
        The most bytes of a request.
    timeout
        Seconds for one request.
    body_timeout
        Seconds until a request has arrived.
    json
        Tell of the end by one JSON object on stdout; words for people go to stderr.

    """
    needs_libraries("quatrain serve")
    _check(slots=slots, queue=queue, samples=samples, max_tokens=max_tokens, max_body=max_body)
    _check(timeout=timeout, body_timeout=body_timeout)
    wrong = [name for name in allow_host or () if not HOST_NAME.fullmatch(name)]
    if wrong:
        raise UsageError(
            f"--allow-host {wrong[0]} is no name of a host; expected NAME or NAME:PORT, such as tunnel.example"
        )
    absent = [other for other in others if not other.is_dir()]
    if absent:
        raise DataError(f"{absent[0]}: no such run; the folders behind the first are runs whose curves are shown")
    from quatrain.web.app import create_app
    from quatrain.web.asking import Limits
    from quatrain.web.dashboard import routes
    from quatrain.web.guard import Door
    from quatrain.web.listening import Server, address, listen

    word = _token(host, token)
    with listen(host, port) as sock:
        port = sock.getsockname()[1]
        door = Door(host, port, word, tuple(allow_host or ()), max_body, body_timeout)
        serving = _load(run, dtype, device, slots, Limits(queue, samples, max_tokens, timeout))
        server = Server(create_app(serving.start(), routes([run, *others]), door), sock, serving.close)
        serving.on_dead = server.leave
        say(_welcome(serving, door, address(host, port)))
        server.here()
    if serving.dead:
        raise QuatrainError("the engine failed again and again; what went wrong stands above")
    if server.ended_by is not None:
        raise Stopped(server.ended_by, "ended by a signal; requests under way were told")


def _check(**numbers: float) -> None:
    """Raise `ConfigError` for numbers that are no limits: 0 samples may wait, of all else there is at least one."""
    mistakes = [
        f"--{name.replace('_', '-')} is {value}, it must be {'at least 0' if name == 'queue' else 'above 0'}"
        for name, value in numbers.items()
        if not (value >= 0 if name == "queue" else 0 < value < float("inf"))
    ]
    if mistakes:
        raise ConfigError(mistakes)


def _token(host: str, given: str | None) -> str | None:
    """The word that requests must bring, if any; raises `UsageError` where others could come in without one."""
    from quatrain.web.guard import is_loopback

    token = given if given is not None else os.environ.get(TOKEN)
    if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token != ""):
        raise UsageError("the token must be printable ASCII without spaces around it, and not empty")
    if token is None and not is_loopback(host):
        raise UsageError(
            f"--host {host} lets others in: give a token with --token or {TOKEN} "
            f'(python -c "import secrets; print(secrets.token_urlsafe())" makes one)'
        )
    return token


def _load(run: Path, dtype: Literal["fp32", "bf16", "int8"], device: str, slots: int, limits: "Limits") -> "Serving":
    from quatrain.inference.engine import Engine
    from quatrain.model.device import fit_threads, pick_device
    from quatrain.model.pretrained import WEIGHTS, load_folder_tokenizer, load_model
    from quatrain.training.checkpoint import find_checkpoint, restart_of, run_of
    from quatrain.web.serving import Serving

    where = pick_device(device)
    fit_threads()
    checkpoint = find_checkpoint(run, say)
    model, tokenizer = load_model(checkpoint, where), load_folder_tokenizer(checkpoint)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise DataError(
            f"{checkpoint}: its tokenizer has {tokenizer.vocab_size:,} ids, its model {model.config.vocab_size:,}; "
            f"put the tokenizer.json back with which it was trained"
        )
    restart = restart_of(checkpoint, tokenizer.eot)
    try:
        engine = Engine(model, slots, dtype, restart)
    except (RuntimeError, MemoryError) as error:  # torch has several for memory that is not there
        first = (str(error).splitlines() or [""])[0]
        raise UsageError(f"no engine with --slots {slots}: {first}; fewer slots need less memory") from error
    if engine.dtype != dtype:
        say(f"{dtype} does not run here: {engine.dtype}")
    weights = checkpoint / WEIGHTS
    facts = {
        "created": int(weights.stat().st_mtime) if weights.exists() else 0,
        "checkpoint": checkpoint.name,
        "block_size": model.config.block_size,
        "vocab_size": model.config.vocab_size,
        "dtype": engine.dtype,
    }
    name = (run_of(checkpoint) or checkpoint.resolve()).name
    return Serving(engine, tokenizer, name, limits, facts)


def _welcome(serving: "Serving", door: "Door", url: str) -> str:
    query = f"?token={quote(door.token, safe='')}" if door.token else ""
    return (
        f"{serving.name} ({serving.facts['checkpoint']}, {serving.facts['dtype']}) at {url}{query}\n"
        f"completions: {url}v1/completions; Ctrl-C ends"
    )
