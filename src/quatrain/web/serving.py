"""One model at the service of many requests: a thread that owns an engine and a batch, and what comes back from it.

Requests join at any step and leave at any step; the event loop of the server never waits for the model.
"""

import asyncio
import contextlib
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from quatrain.inference.batch import Batch, Writing
from quatrain.inference.drawing import TokenLogprob
from quatrain.inference.engine import Engine
from quatrain.inference.sampling import limit_of
from quatrain.text.tokenizers import Tokenizer
from quatrain.text.visible import visible
from quatrain.web.asking import Ask, Limits, Prompt
from quatrain.web.refusals import Refused

Reason = Literal["stop", "length"]
GIVES_UP = 3  # failures in a row without a sample that ended: the engine will not come back


class Token(NamedTuple):
    """An id of an answer, with what the model thought of it (None: nothing was before it)."""

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    start: int  # of its text in the choice's


@dataclass(frozen=True)
class Piece:
    """More of one choice; its last piece has the reason, and counts its ids."""

    index: int
    text: str
    tokens: list[Token]
    finish_reason: Reason | None = None
    count: int = 0


class Choice:
    """One sample of a request: tells its order of every piece of a stream, or of the whole."""

    def __init__(
        self, order: "Order", tokenizer: Tokenizer, prompt: Prompt, number: int, limit: int, first: "Choice | None"
    ) -> None:
        self.order, self.prompt = order, prompt
        self.index = len(order.choices)
        self.first = first or self  # the one that scores the prompt for all its samples
        ask = order.ask
        scores = ask.echo and ask.config.logprobs is not None and first is None
        self.speaks = limit > 0
        # Scoring a prompt takes a step, which draws an id even where none is asked for.
        self.writing = Writing(tokenizer, prompt.ids, ask.config, number, max(limit, scores), self._hear, scores)
        self._told: int | None = None  # ids; None: not even the prompt

    def end(self) -> None:
        """Tell what is left."""
        sample = self.writing.end()
        count, text, reason = len(sample.ids), sample.text, sample.finish_reason
        if not self.speaks:
            count, text, reason = 0, "", "length"
        tokens, opening = self._new_tokens(count)
        if sample.end and self.speaks:
            tokens.append(Token(*sample.end, self._start(len(self.writing.ends))))
        rest = opening + ("" if self.order.ask.stream else text)
        self.order.post(Piece(self.index, rest, tokens, reason, count))

    def _hear(self, number: int, text: str) -> None:
        """Text that has become certain, told by the engine's thread within a step."""
        if text and self.order.ask.stream and self.speaks:
            tokens, opening = self._new_tokens(self.writing.certain)
            self.order.post(Piece(self.index, opening + text, tokens))

    def _start(self, place: int) -> int:
        """Where the text of an id begins in the choice's."""
        before = len(self.prompt.text) if self.order.ask.echo else 0
        return before + (self.writing.ends[place - 1] if place else 0)

    def _new_tokens(self, end: int) -> tuple[list[Token], str]:
        """The tokens up to an id that were not told yet, where they are asked for, and the prompt before the first."""
        opening, tokens = "", list[Token]()
        if self._told is None:
            self._told = 0
            opening = self.prompt.text if self.order.ask.echo else ""
            tokens += self._prompt_tokens()
        if self.order.ask.config.logprobs is not None:
            tokens += [Token(*self.writing.logprobs[place], self._start(place)) for place in range(self._told, end)]
        self._told = max(self._told, end)
        return tokens, opening

    def _prompt_tokens(self) -> list[Token]:
        if not self.first.writing.scores_prompt:
            return []
        scored: list[TokenLogprob] = self.first.writing.prompt_logprobs
        starts = self.prompt.starts
        unscored = Token(self.prompt.ids[0], None, (), starts[0])
        return [unscored, *(Token(*one, start) for one, start in zip(scored, starts[1:], strict=True))]


class Order:
    """A request at the engine."""

    def __init__(self, serving: "Serving", ask: Ask) -> None:
        self.ask = ask
        self.choices: list[Choice] = []
        self._serving = serving
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece | Refused] = asyncio.Queue()
        for prompt in ask.prompts:
            limit = limit_of(len(prompt.ids), serving.block_size, ask.config)
            first: Choice | None = None
            for number in range(ask.config.n):
                choice = Choice(self, serving.tokenizer, prompt, number, limit, first)
                first = first or choice
                self.choices.append(choice)

    def post(self, piece: Piece | Refused) -> None:
        """From the engine's thread to the request's loop, which may have ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def pieces(self) -> AsyncIterator[Piece]:
        """All pieces of all choices as they come; raises `Refused` where the engine fails or stops."""
        left = len(self.choices)
        while left:
            piece = await self._pieces.get()
            if isinstance(piece, Refused):
                raise piece
            left -= piece.finish_reason is not None
            yield piece

    def cancel(self) -> None:
        """Nobody waits for it any longer."""
        self._serving.leave(self)


class Serving:
    """A model that answers; `start` it, and `close` it in the end.

    `on_dead` is called when the engine has failed so often that it will not come back. `facts` are what is told of
    the model under /v1/models.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        name: str,
        limits: Limits | None = None,
        facts: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.name, self.limits = tokenizer, name, limits or Limits()
        self.facts = {"id": name, "object": "model", "owned_by": "quatrain", "created": 0} | (facts or {})
        self.block_size: int = engine.config.block_size
        self.vocab_size: int = engine.config.vocab_size
        self.on_dead: Callable[[], None] = lambda: None
        self.dead = False
        self._engine = engine
        self._batch = Batch(engine)
        self._choices: dict[Writing, Choice] = {}  # of the engine's thread
        self._failures = 0
        self._changed = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._open = 0  # samples that were taken and have not ended
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> "Serving":
        """Begin to answer."""
        self._thread.start()
        return self

    def close(self) -> None:
        """End: requests that are under way are told."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def spell(self, token: int) -> str:
        """The text of an id alone; its bytes, as OpenAI shows them, where it is no whole character."""
        known: list[bytes] | None = getattr(self.tokenizer, "token_bytes", None)  # not of any tokenizer.json
        if known is None:
            return self.tokenizer.decode([token])
        try:
            return known[token].decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in known[token])

    @property
    def open(self) -> int:
        """Samples that wait or are written."""
        with self._changed:
            return self._open

    def submit(self, ask: Ask) -> Order:
        """Put a request before the engine; raises `Refused` where too many wait, or nobody works any longer."""
        order = Order(self, ask)
        count, most = len(order.choices), self._engine.slots + self.limits.queue
        if count > most:  # it would never fit, however often it were asked again
            message = f"{count} samples in one request, {most} may wait or be written (--queue and --slots)"
            raise Refused(400, f"{message}; ask for fewer, or in several requests", param="n")
        with self._changed:
            if self.dead or self._closing:
                raise Refused(503, "the server is ending; start it again with quatrain serve")
            if self._open + count > most:
                message = f"{self._open} samples wait or are written, and {count} more would pass {most} (--queue)"
                raise Refused(429, f"{message}; ask again", headers={"retry-after": "1"})
            self._open += count
            # Under the same lock: whoever was let in is heard before the end.
            self._inbox.append(lambda: self._enter(order))
            self._changed.notify()
        return order

    def leave(self, order: Order) -> None:
        """Forget what is left of a request; nothing where it is whole."""
        with self._changed:
            self._inbox.append(lambda: self._leave(order))
            self._changed.notify()

    def _work(self) -> None:
        """The thread: steps of the batch, and between two of them whatever came in."""
        while self._hear():
            try:
                for writing in self._batch.step():
                    self._choices[writing].end()  # a mistake in it must still find whom to tell
                    self._forget(writing)
                    self._failures = 0
            except Exception as error:
                self._recover(error)
        for order in self._drop_all():
            order.post(Refused(503, "the server is ending, and this request with it"))

    def _hear(self) -> bool:
        """Do what came in; waits where nothing else is to be done. False: it is time to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._batch.busy or self._closing)
            actions = list(self._inbox)
            self._inbox.clear()
            goes_on = not (self._closing or self.dead)  # nobody is let in behind this, if it does not
        for action in actions:
            action()
        return goes_on

    def _enter(self, order: Order) -> None:
        for choice in order.choices:
            self._choices[choice.writing] = choice
            self._batch.add(choice.writing)

    def _leave(self, order: Order) -> None:
        for choice in order.choices:
            if choice.writing in self._choices:
                self._batch.cancel(choice.writing)
                self._forget(choice.writing)

    def _forget(self, writing: Writing) -> None:
        with self._changed:
            self._open -= 1
        del self._choices[writing]

    def _recover(self, error: Exception) -> None:
        """Begin with an empty batch, and answer all that wait."""
        self._failures += 1
        self.dead = self._failures >= GIVES_UP
        lost = self._drop_all()
        for slot in range(self._engine.slots):
            self._engine.free(slot)
        self._batch = Batch(self._engine)
        first = visible((str(error).splitlines() or [""])[0])
        then = "the server ends" if self.dead else "the server goes on"
        print(
            f"error: the engine failed ({type(error).__name__}: {first}); requests that were lost, and answered with "
            f"500: {len(lost)}; {then}",
            file=sys.stderr,
            flush=True,
        )
        for order in lost:
            order.post(Refused(500, "the engine failed; what went wrong stands on the server's terminal"))
        if self.dead:
            self.on_dead()

    def _drop_all(self) -> list[Order]:
        """Forget every sample; returns the orders that wait for any."""
        orders = list({id(choice.order): choice.order for choice in self._choices.values()}.values())
        for writing in list(self._choices):
            self._forget(writing)
        return orders
