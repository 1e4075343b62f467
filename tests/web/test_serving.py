"""The thread that owns the engine: what comes back is what is written alone, whoever comes, leaves or fails."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
import torch

from quatrain.inference.batch import Writing
from quatrain.inference.config import SamplingConfig
from quatrain.inference.engine import Engine
from quatrain.inference.sampling import generate, write
from quatrain.web.asking import Ask, Limits, Prompt
from quatrain.web.refusals import Refused
from quatrain.web.serving import Order, Piece, Serving
from served import BYTES, network, serving_of

MODEL = network()


def run(serving: Serving, work: Callable[[Serving], Coroutine[Any, Any, Any]]) -> Any:
    """Something done with a serving that has begun, in a loop of its own."""

    async def whole() -> Any:
        try:
            return await work(serving.start())
        finally:
            await asyncio.to_thread(serving.close)

    return asyncio.run(whole())


def ask(text: str | Sequence[int] = "ab", echo: bool = False, stream: bool = False, **settings: Any) -> Ask:
    ids = list(text.encode()) if isinstance(text, str) else list(text)
    prompt = Prompt(ids, BYTES.decode(ids), list(range(len(ids)))) if echo else Prompt(ids)
    return Ask([prompt], SamplingConfig(**({"max_tokens": 20} | settings)), echo, stream)


async def heard(order: Order) -> list[Piece]:
    return [piece async for piece in order.pieces()]


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


# Few ids to draw from: of two that are equally likely but for rounding either may be drawn.
ASKS = [
    ask(seed=1, top_k=4),
    ask("Shall I", temperature=0.0, max_tokens=90),
    ask("é", temperature=0.7, top_k=9, n=3, max_tokens=40),
    ask("x", min_p=0.2, top_p=0.9, repetition_penalty=1.5),
    ask([256], seed=7, n=2, max_tokens=60, top_k=3),
    ask("y", sliding=True, max_tokens=150, seed=3, top_k=3),
]


def test_all_at_once_each_is_what_sampling_alone_gives() -> None:
    async def together(serving: Serving) -> list[list[Piece]]:
        return await asyncio.gather(*(heard(serving.submit(one)) for one in ASKS))

    found = run(serving_of(MODEL, slots=3), together)
    for one, pieces in zip(ASKS, found, strict=True):
        alone = write(Engine(MODEL, 1), BYTES, one.prompts[0].ids, one.config)
        pieces.sort(key=lambda piece: piece.index)
        assert [(piece.text, piece.finish_reason, piece.count) for piece in pieces] == [
            (sample.text, sample.finish_reason, len(sample.ids)) for sample in alone
        ]


@pytest.mark.parametrize("stop", [(), ("u\ufffd",), ("e", "o", "Q", "\x1b")])
@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_is_the_whole_in_pieces(stop: tuple[str, ...], echo: bool) -> None:
    settings = {"n": 4, "max_tokens": 60, "logprobs": 2, "stop": stop, "seed": 11, "echo": echo}

    async def both(serving: Serving) -> tuple[list[Piece], list[Piece]]:
        return await heard(serving.submit(ask("grün", **settings))), await heard(
            serving.submit(ask("grün", stream=True, **settings))
        )

    whole, streamed = run(serving_of(MODEL, slots=4), both)
    assert len(streamed) > 8
    for one in whole:
        parts = [piece for piece in streamed if piece.index == one.index]
        assert "".join(piece.text for piece in parts) == one.text
        assert [token for piece in parts for token in piece.tokens] == one.tokens
        assert [piece.finish_reason for piece in parts[:-1]] == [None] * (len(parts) - 1)
        assert (parts[-1].finish_reason, parts[-1].count) == (one.finish_reason, one.count)
        said = 0
        for piece in parts:  # a piece's tokens begin in its text, or complete no character behind it
            assert all(said <= token.start <= said + len(piece.text) for token in piece.tokens if piece.text)
            said += len(piece.text)


def test_what_is_echoed_is_scored_as_the_uncached_model_scores_it() -> None:
    text = "Rough winds do shake"
    (piece,) = run(serving_of(MODEL), lambda serving: heard(serving.submit(ask(text, True, logprobs=3, max_tokens=4))))
    ids = [token.id for token in piece.tokens]
    assert bytes(ids[: len(text)]).decode() == text
    assert piece.text.startswith(text)
    assert (piece.tokens[0].logprob, piece.tokens[0].top) == (None, ())
    with torch.no_grad():
        expected = MODEL(torch.tensor([ids]))[0].double().log_softmax(-1)
    for place, token in enumerate(piece.tokens[1:]):
        assert token.logprob == pytest.approx(float(expected[place, token.id]), abs=1e-4)
        assert [id for id, _ in token.top] == expected[place].topk(3).indices.tolist()


def test_nothing_but_the_prompt_is_scored_where_no_tokens_are_asked_for() -> None:
    for stream in (False, True):
        order = ask("four", True, stream, logprobs=0, max_tokens=0)
        (piece,) = run(serving_of(MODEL), lambda serving, order=order: heard(serving.submit(order)))
        assert (piece.text, piece.finish_reason, piece.count) == ("four", "length", 0)
        assert [token.id for token in piece.tokens] == list(b"four")


def test_the_eot_that_ends_a_sample_is_told_with_its_log_probability() -> None:
    seeds = range(40)

    async def many(serving: Serving) -> list[list[Piece]]:
        return await asyncio.gather(
            *(heard(serving.submit(ask(seed=seed, max_tokens=90, temperature=1.4, logprobs=0))) for seed in seeds)
        )

    pieces = [piece for (piece,) in run(serving_of(MODEL), many)]
    stopped = [piece for piece in pieces if piece.finish_reason == "stop"]
    assert stopped
    assert all(piece.tokens[-1].id == BYTES.eot and len(piece.tokens) == piece.count + 1 for piece in stopped)
    assert all(BYTES.eot not in [token.id for token in piece.tokens[:-1]] for piece in pieces)


def test_documents_restart_within_a_prompt_of_ids() -> None:
    row = [256, *b"one", 256, *b"two"]
    serving = serving_of(MODEL, restart=256)
    (piece,) = run(serving, lambda serving: heard(serving.submit(ask(row, True, logprobs=0, max_tokens=5, seed=2))))
    (apart,) = run(
        serving_of(MODEL), lambda serving: heard(serving.submit(ask(row[4:], logprobs=0, max_tokens=5, seed=2)))
    )
    first = piece.tokens[len(row)]
    assert first.logprob != apart.tokens[0].logprob or first.id == apart.tokens[0].id
    with torch.no_grad():
        expected = MODEL(torch.tensor([[256, *b"two"]]))[0].double().log_softmax(-1)
    assert [token.logprob for token in piece.tokens[5 : len(row)]] == pytest.approx(
        [float(expected[place, token]) for place, token in enumerate(b"two")], abs=1e-4
    )


def test_a_character_begun_by_a_prompt_of_ids_is_completed() -> None:
    begun = Ask([Prompt([*b"a", 0xC3], "a", [0, 1])], SamplingConfig(max_tokens=9, seed=4, logprobs=0), echo=True)
    (piece,) = run(serving_of(MODEL), lambda serving: heard(serving.submit(begun)))
    ids = [token.id for token in piece.tokens]
    assert piece.text == BYTES.decode(ids)
    heard_of: list[str] = []
    writing = Writing(BYTES, [0xC3], SamplingConfig(max_tokens=1), 0, 1, lambda number, text: heard_of.append(text))
    writing.take(0xA9, torch.zeros(257))
    assert (writing.end().text, "".join(heard_of)) == ("é", "é")


# Who leaves, comes late, or comes too often


def test_who_leaves_frees_the_slots_for_those_who_wait() -> None:
    async def work(serving: Serving) -> list[Piece]:
        long = serving.submit(ask(sliding=True, max_tokens=8000, n=2, temperature=0.0))
        waiting = asyncio.ensure_future(heard(serving.submit(ask(seed=5))))
        await until(lambda: len(serving._batch.writing) == 2)
        assert serving.open == 3
        long.cancel()
        long.cancel()
        found = await waiting
        await until(lambda: serving.open == 0)
        return found

    assert (
        run(serving_of(MODEL, slots=2), work)[0].text
        == generate(MODEL, BYTES, "ab", SamplingConfig(max_tokens=20, seed=5))[0].text
    )


def test_more_than_may_wait_are_told_to_ask_again() -> None:
    async def work(serving: Serving) -> None:
        orders = [serving.submit(ask(sliding=True, max_tokens=8000, temperature=0.0)) for _ in range(3)]
        with pytest.raises(
            Refused, match=r"3 samples wait or are written, and 1 more would pass 3 \(--queue\)"
        ) as told:
            serving.submit(ask())
        assert (told.value.status, told.value.headers) == (429, {"retry-after": "1"})
        orders[0].cancel()
        await until(lambda: serving.open == 2)
        serving.submit(ask())

    run(serving_of(MODEL, slots=1, limits=Limits(queue=2)), work)


def test_who_waits_at_the_end_is_told() -> None:
    async def work(serving: Serving) -> None:
        order = serving.submit(ask(sliding=True, max_tokens=8000, temperature=0.0))
        await until(lambda: bool(serving._batch.writing))
        await asyncio.to_thread(serving.close)
        with pytest.raises(Refused, match="the server is ending") as told:
            await heard(order)
        assert told.value.status == 503
        with pytest.raises(Refused, match="the server is ending"):
            serving.submit(ask())

    run(serving_of(MODEL), work)


class Held(threading.Condition):
    """A lock behind which, at its first release by one thread, something else comes in between."""

    def __init__(self, thread: str, between: Callable[[], object]) -> None:
        super().__init__()
        self.thread, self.between = thread, between

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if threading.current_thread().name == self.thread:
            self.thread = ""
            self.between()


def test_an_end_right_behind_a_request_that_was_let_in_is_told_to_it() -> None:
    async def work(serving: Serving) -> None:
        serving._changed = Held(threading.current_thread().name, serving.close)
        order = serving.start().submit(ask())
        with pytest.raises(Refused, match="the server is ending"):
            await asyncio.wait_for(heard(order), 10)

    asyncio.run(work(serving_of(MODEL)))


def test_a_request_that_comes_while_the_inbox_is_emptied_hears_of_the_end() -> None:
    emptied, goes_on = threading.Event(), threading.Event()

    def between() -> None:
        emptied.set()
        goes_on.wait(10)

    async def work(serving: Serving) -> None:
        serving._changed = Held("engine", between)
        orders = [serving.submit(ask())]
        serving.start()
        await asyncio.to_thread(emptied.wait, 10)
        orders.append(serving.submit(ask()))
        with serving._changed:
            serving._closing = True
        goes_on.set()
        for order in orders:
            with pytest.raises(Refused, match="the server is ending"):
                await asyncio.wait_for(heard(order), 10)

    asyncio.run(work(serving_of(MODEL)))


def test_more_than_can_ever_wait_are_not_told_to_ask_again() -> None:
    async def work(serving: Serving) -> None:
        with pytest.raises(Refused, match=r"4 samples in one request, 3 may .* \(--queue and --slots\)") as told:
            serving.submit(ask(n=4))
        assert (told.value.status, told.value.param, told.value.headers) == (400, "n", None)
        await heard(serving.submit(ask(n=3, max_tokens=2)))

    run(serving_of(MODEL, slots=1, limits=Limits(queue=2)), work)


# An engine that fails


def test_a_failure_is_told_to_all_that_wait_and_the_next_request_is_answered(monkeypatch, capsys) -> None:
    decode, failing = Engine.decode, [False]

    def sometimes(self: Engine, slots: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
        if failing[0]:
            failing[0] = False
            raise RuntimeError("out of memory\nTraceback (most recent call last): all of it")
        return decode(self, slots, ids)

    monkeypatch.setattr(Engine, "decode", sometimes)

    async def work(serving: Serving) -> list[Piece]:
        orders = [serving.submit(ask(sliding=True, max_tokens=8000, temperature=0.0)) for _ in range(4)]
        await until(lambda: len(serving._batch.writing) == 2)
        failing[0] = True
        for order in orders:
            with pytest.raises(Refused) as told:
                await heard(order)
            assert told.value.status == 500
            assert "out of memory" not in str(told.value)
        assert (serving.open, serving.dead) == (0, False)
        return await heard(serving.submit(ask(seed=5)))

    (piece,) = run(serving_of(MODEL, slots=2), work)
    assert piece.text == generate(MODEL, BYTES, "ab", SamplingConfig(max_tokens=20, seed=5))[0].text
    told = capsys.readouterr().err
    assert told == (
        "error: the engine failed (RuntimeError: out of memory); requests that were lost, and answered with 500: 4; "
        "the server goes on\n"
    )


def test_an_engine_that_fails_again_and_again_ends_the_server(monkeypatch, capsys) -> None:
    def never(self: Engine, *words: object) -> torch.Tensor:
        raise RuntimeError("no device")

    monkeypatch.setattr(Engine, "prefill", never)

    async def work(serving: Serving) -> None:
        ended: list[bool] = []
        serving.on_dead = lambda: ended.append(True)
        for _ in range(3):
            assert not ended
            with pytest.raises(Refused):
                await heard(serving.submit(ask()))
        await until(lambda: bool(ended))
        with pytest.raises(Refused, match="start it again"):
            serving.submit(ask())

    run(serving_of(MODEL), work)
    assert capsys.readouterr().err.endswith("the server ends\n")


def test_a_mistake_at_the_end_of_a_sample_is_told_too(monkeypatch, capsys) -> None:
    end, failing = Writing.end, [True]

    def once(self: Writing) -> Any:
        if failing.pop() if failing else False:
            raise ValueError("\x1b[2J no text")
        return end(self)

    monkeypatch.setattr(Writing, "end", once)

    async def work(serving: Serving) -> None:
        orders = [
            serving.submit(ask(max_tokens=3)),
            serving.submit(ask(sliding=True, max_tokens=8000, temperature=0.0)),
        ]
        for order in orders:
            with pytest.raises(Refused) as told:
                await heard(order)
            assert told.value.status == 500
        assert serving.open == 0
        await heard(serving.submit(ask(max_tokens=3)))

    run(serving_of(MODEL), work)
    assert r"(ValueError: \x1b[2J no text)" in capsys.readouterr().err
