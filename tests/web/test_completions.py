"""Requests in OpenAI's shape: its own client, lm-eval's, and every field by itself."""

import asyncio
import contextlib
import json
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quatrain.inference.config import SamplingConfig
from quatrain.inference.sampling import generate
from quatrain.model.pretrained import save_model
from quatrain.web.asking import ABSENT, FIELDS, Limits, read_ask
from quatrain.web.fields import read_json
from quatrain.web.refusals import Refused
from served import BYTES, Site, network, served, serving_of

MODEL = network()
openai = pytest.importorskip("openai", reason="no optional library: openai")


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with served(serving_of(MODEL, slots=8)) as running:
        yield running


@pytest.fixture(scope="module")
def client(site: Site) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0, timeout=30) as one:
        yield one


def alone(prompt: str, **settings: Any) -> list[Any]:
    return generate(MODEL, BYTES, prompt, SamplingConfig(**({"max_tokens": 16} | settings)))


# The official client


def test_the_client_finds_the_model(client: Any) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("tiny", "quatrain")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        client.models.retrieve("gpt-4")


def test_the_client_s_completion_is_what_sampling_alone_gives(client: Any) -> None:
    done = client.completions.create(model="tiny", prompt="Shall", seed=3, n=2, max_tokens=20, top_p=0.5)
    samples = alone("Shall", seed=3, n=2, max_tokens=20, top_p=0.5)
    assert [choice.text for choice in done.choices] == [sample.text for sample in samples]
    assert [choice.finish_reason for choice in done.choices] == [sample.finish_reason for sample in samples]
    assert [choice.index for choice in done.choices] == [0, 1]
    assert (done.object, done.model, done.id[:5]) == ("text_completion", "tiny", "cmpl-")
    counted = sum(len(sample.ids) for sample in samples)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (
        5,
        counted,
        5 + counted,
    )


def test_the_client_s_stream_is_its_completion(client: Any) -> None:
    words = {"model": "tiny", "prompt": "Shall", "seed": 3, "n": 2, "max_tokens": 40, "logprobs": 2, "top_p": 0.9}
    whole = client.completions.create(**words)
    chunks = list(client.completions.create(**words, stream=True, stream_options={"include_usage": True}))
    assert len(chunks) > 10
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert {chunk.usage for chunk in chunks[:-1]} == {None}
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1].finish_reason == choice.finish_reason
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset", "token_ids", "top"):
            joined = [one for part in parts for one in getattr(part.logprobs, field)]
            assert joined == getattr(choice.logprobs, field), field


def test_the_client_s_list_of_prompts_is_answered_in_order(client: Any) -> None:
    prompts = ["one", "two", "three"]
    done = client.completions.create(model="tiny", prompt=prompts, n=2, seed=5, max_tokens=6)
    expected = [sample.text for prompt in prompts for sample in alone(prompt, n=2, seed=5, max_tokens=6)]
    assert [choice.text for choice in done.choices] == expected
    rows = [list(prompt.encode()) for prompt in prompts]
    assert [
        choice.text
        for choice in client.completions.create(model="tiny", prompt=rows, n=2, seed=5, max_tokens=6).choices
    ] == expected
    (one,) = client.completions.create(model="tiny", prompt=rows[1], seed=5, max_tokens=6).choices
    assert one.text == expected[2]


def test_the_client_s_stop_ends_a_text_and_is_left_out(client: Any) -> None:
    (whole,) = client.completions.create(model="tiny", prompt="Shall", seed=3, max_tokens=40).choices
    stop = whole.text[9:11]
    (cut,) = client.completions.create(model="tiny", prompt="Shall", seed=3, max_tokens=40, stop=[stop, "zzz"]).choices
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    (same,) = client.completions.create(model="tiny", prompt="Shall", seed=3, max_tokens=40, stop=stop).choices
    assert same.text == cut.text


def test_the_client_s_echo_has_the_prompt_s_log_probabilities(client: Any) -> None:
    (choice,) = client.completions.create(
        model="tiny", prompt="wörld", echo=True, logprobs=2, max_tokens=3, seed=1
    ).choices
    found = choice.logprobs
    assert choice.text.startswith("wörld")
    assert found.tokens[:6] == ["w", "bytes:\\xc3", "bytes:\\xb6", "r", "l", "d"]
    assert found.text_offset[:7] == [0, 1, 1, 2, 3, 4, 5]
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    with torch.no_grad():
        expected = MODEL(torch.tensor([found.token_ids]))[0].double().log_softmax(-1)
    scored = [float(expected[place, token]) for place, token in enumerate(found.token_ids[1:])]
    assert found.token_logprobs[1:] == pytest.approx(scored, abs=1e-4)
    for top, named in zip(found.top[1:], found.top_logprobs[1:], strict=True):
        assert len(top) == 2
        assert max(named.values()) == top[0]["logprob"]
    (quiet,) = client.completions.create(model="tiny", prompt="w", echo=True, max_tokens=0).choices
    assert (quiet.text, quiet.logprobs, quiet.finish_reason) == ("w", None, "length")


def test_texts_that_collide_stay_apart_by_their_ids(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(site.serving), "spell", lambda self, token: "?")
    (choice,) = site.ask(fields={"prompt": "x", "logprobs": 4, "max_tokens": 1, "seed": 2}).json["choices"]
    found = choice["logprobs"]
    assert len({one["id"] for one in found["top"][0]}) == 4
    assert found["top_logprobs"] == [{"?": found["top"][0][0]["logprob"]}]  # the likeliest stands for all


def test_the_client_reads_our_errors(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is -1") as told:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert told.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4'; this server has 'tiny'") as told:
        client.completions.create(model="gpt-4", prompt="x")
    assert told.value.code == "model_not_found"
    for field in ({"suffix": "end"}, {"best_of": 3}, {"logit_bias": {"5": 1}}):
        with pytest.raises(openai.BadRequestError, match=f"'{next(iter(field))}' is not supported"):
            client.completions.create(model="tiny", prompt="x", **field)
    assert client.completions.create(model="tiny", prompt="x", presence_penalty=0, frequency_penalty=0.0, user="me")


def test_a_seed_that_is_not_given_is_told_and_gives_the_same_again(site: Site) -> None:
    first, other = (site.ask(fields={"prompt": "x"}).json for _ in range(2))
    assert first["seed"] != other["seed"]
    assert first["seed"] < 2**53  # exact in a browser
    again = site.ask(fields={"prompt": "x", "seed": first["seed"]}).json
    assert again["choices"] == first["choices"]


def test_a_hundred_clients_at_once_each_get_what_they_get_alone(site: Site) -> None:
    settings = [{"prompt": f"{n} {n}", "seed": n, "top_k": 4, "max_tokens": 2 + n % 11} for n in range(100)]

    async def all_of_them() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0, timeout=60) as many:
            return await asyncio.gather(
                *(
                    many.completions.create(
                        model="tiny",
                        prompt=one["prompt"],
                        seed=one["seed"],
                        max_tokens=one["max_tokens"],
                        extra_body={"top_k": one["top_k"]},
                    )
                    for one in settings
                )
            )

    found = [done.choices[0].text for done in asyncio.run(all_of_them())]
    expected = [alone(**one)[0].text for one in settings]
    assert found == expected
    assert len(set(found)) > 60
    assert site.serving is not None
    assert site.serving.open == 0


def test_a_client_that_leaves_frees_its_slot(site: Site) -> None:
    for stream in (False, True):
        body = json.dumps(
            {"prompt": "x", "max_tokens": 8000, "sliding": True, "temperature": 0, "stream": stream}
        ).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost:%d\r\ncontent-type: application/json\r\n" % site.port
        import socket

        with socket.create_connection(("127.0.0.1", site.port)) as sock:
            sock.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            _until(lambda: site.serving.open == 1)
        _until(lambda: site.serving.open == 0)


def _until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_request_ends_after_its_time() -> None:
    long = {"prompt": "x", "max_tokens": 8000, "sliding": True, "temperature": 0}
    with served(serving_of(MODEL, limits=Limits(seconds=0.2))) as site:
        reply = site.ask(fields=long)
        assert (reply.status, reply.json["error"]["type"]) == (504, "timeout_error")
        assert reply.told == "not done after 0.2 seconds (--timeout); ask for fewer tokens"
        events = site.ask(fields=long | {"stream": True}).body.decode().split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["type"] == "timeout_error"
        _until(lambda: site.serving.open == 0)


def test_too_many_at_once_are_told_when_to_ask_again() -> None:
    with served(serving_of(MODEL, slots=1, limits=Limits(queue=1))) as site:
        long = {"prompt": "x", "max_tokens": 8000, "sliding": True, "temperature": 0, "stream": True}
        request = urllib.request.Request(
            f"{site.url}/v1/completions", json.dumps(long).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=20) as stream:
            assert stream.readline().startswith(b"data: ")
            reply = site.ask(fields={"prompt": ["x", "y"]})
            assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        _until(lambda: site.serving.open == 0)
        assert site.ask(fields={"prompt": ["x", "y"]}).status == 200
        assert site.ask(fields={"prompt": ["x", "y", "z"]}).status == 400  # for ever


def test_without_a_model_completions_say_so() -> None:
    with served(None) as site:
        assert site.ask("/v1/models").json == {"object": "list", "data": []}
        assert site.ask("/healthz").json == {"status": "ok", "model": None}
        reply = site.ask(fields={"prompt": "x"})
        assert (reply.status, reply.json["error"]["type"]) == (404, "not_found_error")  # no client tries it again
        assert "no model speaks beside a training" in reply.told


# lm-eval


@pytest.mark.filterwarnings("ignore")  # the library's and its dependencies' own
def test_lm_eval_s_local_completions_finds_the_log_likelihoods_of_the_model_in_process(
    site: Site, tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval", reason="no optional library: lm-eval")
    pytest.importorskip("tenacity", reason="no optional library: lm-eval[api]")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from quatrain.interop.harness import adapter

    save_model(MODEL, BYTES, tmp_path)
    theirs = LocalCompletionsAPI(
        base_url=f"{site.url}/v1/completions",
        model="tiny",
        tokenizer=str(tmp_path),
        max_length=MODEL.config.block_size,
        batch_size=4,
    )
    pairs = [(f"number {n}" + " x" * (n % 7), f" is {n * n}{'é' * (n % 3)}") for n in range(12)] + [
        ("", "nothing before")
    ]
    pairs += [("q" * 80, "0123456789abcde"), ("q" * 200, " too long")]
    asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    likelihoods = theirs.loglikelihood(asked, disable_tqdm=True)
    expected = adapter(MODEL, BYTES).loglikelihood(asked, disable_tqdm=True)
    shorter = len(pairs) - 1  # lm-eval keeps one id less of a context that is too long, for the one it asks for
    assert [one[0] for one in likelihoods[:shorter]] == pytest.approx([one[0] for one in expected[:shorter]], abs=1e-4)
    assert [one[1] for one in likelihoods] == [one[1] for one in expected]
    until = [Instance("generate_until", {}, (f"text {n}", {"until": ["\x13"], "max_gen_toks": 9}), n) for n in range(5)]
    texts = theirs.generate_until(until, disable_tqdm=True)
    assert texts == [alone(one.args[0], max_tokens=9, temperature=0.0, stop=("\x13",))[0].text for one in until]


# Fields, each by itself

SERVING = serving_of(MODEL, limits=Limits(samples=8, tokens=200))

WRONG = [
    ({"prompt": 7}, "prompt is 7; expected a text, texts, a list of ids or lists of ids"),
    ({"prompt": {}}, "prompt is dict"),
    ({"prompt": []}, "not empty"),
    ({"prompt": [[]]}, "prompt holds an empty list"),
    ({"prompt": [257]}, "prompt holds 257; expected ids from 0 to 256"),
    ({"prompt": [-1]}, "prompt holds -1"),
    ({"prompt": [True]}, "prompt holds True"),
    ({"prompt": [1.0]}, "prompt holds 1.0"),
    ({"prompt": [1, "x"]}, "prompt holds 'x'"),
    ({"prompt": [[1], "x"]}, "prompt holds list"),
    ({"prompt": ["x", [1]]}, "prompt holds 'x'"),
    ({"prompt": "\ud800"}, r"lone surrogate U\+D800 at position 0"),
    ({"prompt": "x" * 97}, "the prompt has 97 ids, the model sees at most 96; shorten it"),
    ({"prompt": "x" * 96}, "max_tokens must be 0, or 'sliding' true"),
    ({"prompt": "x" * 97, "sliding": True, "echo": True, "logprobs": 0}, "the logprobs of 97 ids cannot be told"),
    ({"prompt": ["x"] * 9}, r"9 prompts pass 8 \(--samples\)"),
    ({"prompt": ["x"] * 3, "n": 3}, r"3 prompts of 3 samples pass 8 \(--samples\)"),
    ({"n": 10**18}, "pass 8"),
    ({"n": 0}, "n is 0, it must be at least 1"),
    ({"n": True}, "n is True, expected a whole number"),
    ({"n": "2"}, "n is '2', expected a whole number"),
    ({"n": 2.0}, "n is 2.0, expected a whole number"),
    ({"max_tokens": -1}, "max_tokens is -1, it must be at least 0"),
    ({"max_tokens": 200}, r"1 ids and 200 more pass 200 \(--max-tokens\)"),
    ({"max_tokens": 10**400}, "max_tokens is beyond 64 bits"),
    ({"max_tokens": [1]}, "max_tokens is list, expected a whole number"),
    ({"temperature": -0.1}, "temperature is -0.1, it must be at least 0"),
    ({"temperature": 10**400}, "temperature is too large"),
    ({"temperature": float("inf")}, "temperature is too large"),
    ({"temperature": True}, "temperature is True, expected a number"),
    ({"temperature": "warm"}, "temperature is 'warm', expected a number"),
    ({"top_p": 1.1}, r"top_p is 1.1, it must be in 0 .. 1"),
    ({"min_p": -1}, r"min_p is -1.0, it must be in 0 .. 1"),
    ({"top_k": 0}, "top_k is 0, it must be at least 1"),
    ({"repetition_penalty": 0}, r"repetition_penalty is 0.0, it must be in 0.01 .. 100"),
    ({"repetition_penalty": 1e200}, r"it must be in 0.01 .. 100"),
    ({"seed": -1}, "seed is -1, it must be in"),
    ({"seed": 2**63}, "seed is beyond 64 bits"),
    ({"logprobs": 21}, "logprobs is 21, it must be in 0 .. 20"),
    ({"logprobs": -1}, "logprobs is -1, it must be in 0 .. 20"),
    ({"logprobs": True}, "logprobs is True, expected a whole number"),
    ({"stop": 5}, "stop is 5, expected a text or a list of texts"),
    ({"stop": [5]}, "stop is list, expected"),
    ({"stop": ""}, "stop holds an empty text"),
    ({"stop": ["x"] * 17}, "17 stop texts; at most 16"),
    ({"stop": "x" * 257}, "a stop text has more than 256 characters"),
    ({"stream": 1}, "stream is 1, expected true or false"),
    ({"echo": "yes"}, "echo is 'yes', expected true or false"),
    ({"sliding": []}, "sliding is list, expected true or false"),
    ({"stream_options": 1}, "stream_options is 1, expected an object"),
    ({"stream_options": {"usage": True}}, "stream_options has no field 'usage'; there is include_usage"),
    ({"stream_options": {"include_usage": 1}}, "include_usage is 1, expected true or false"),
    ({"suffix": ""}, "'suffix' is not supported: the model only continues"),
    ({"best_of": 1}, "'best_of' is not supported: ask for n samples"),
    ({"logit_bias": {}}, "'logit_bias' is not supported"),
    ({"presence_penalty": 0.1}, "'presence_penalty' is not supported, only 0"),
    ({"frequency_penalty": False}, "'frequency_penalty' is not supported, only 0"),
    ({"temperatures": 1}, r"no field 'temperatures' \(did you mean 'temperature'\?\)"),
    ({"messages": []}, "no field 'messages'"),
]


@pytest.mark.parametrize(("fields", "expected"), WRONG, ids=lambda value: re.sub(r"\W+", " ", repr(value))[:40])
def test_a_field_that_cannot_be_is_named(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(Refused, match=expected) as told:
        read_ask({"prompt": "x"} | fields, SERVING)
    assert told.value.status == 400
    assert told.value.param in fields or told.value.param in ("prompt", "max_tokens", "include_usage")
    assert json.dumps(told.value.body).isascii()
    json.dumps(told.value.body, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "the body is list; expected an object"),
        (b'"x"', "the body is 'x'; expected an object"),
        (b"null", "the body is None"),
        (b'{"temperature": NaN}', "NaN is no JSON number"),
        (b'{"temperature": -Infinity}', "-Infinity is no JSON number"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"prompt": "\xff"}', r"not UTF-8 \(byte 12\)"),
        ('{"prompt": "x"}'.encode("utf-16"), "not UTF-8"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b"{'prompt': 'x'}", "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
    ],
)
def test_a_body_that_is_no_object_is_told(body: bytes, expected: str) -> None:
    with pytest.raises(Refused, match=expected) as told:
        read_json(body)
    assert told.value.status == 400


def test_what_is_left_out_or_null_has_its_default() -> None:
    names = ("max_tokens", "n", "temperature", "top_p", "top_k", "stop", "seed", "logprobs", "echo", "stream", "suffix")
    for fields in ({}, dict.fromkeys((*names, "prompt", "model", "user", "stream_options", "presence_penalty"))):
        ask = read_ask(fields, SERVING)
        assert [prompt.ids for prompt in ask.prompts] == [[BYTES.eot]]
        config = ask.config
        assert (config.max_tokens, config.n, config.temperature, config.stop) == (16, 1, 1.0, ())
        assert (ask.echo, ask.stream, ask.usage, config.logprobs) == (False, False, False, None)


def test_a_key_twice_means_the_last() -> None:
    assert read_json(b'{"n": 1, "n": 2}') == {"n": 2}


def test_a_top_k_beyond_the_vocabulary_is_all_of_it() -> None:
    assert read_ask({"top_k": 10**15}, SERVING).config.top_k == 257


NUMBERS = st.one_of(
    st.integers(), st.floats(allow_nan=False), st.sampled_from([0, 1, -1, 2**63, 10**400, 1e308, 5e-324])
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


@given(
    st.dictionaries(st.one_of(st.sampled_from([*FIELDS, "prompt", *ABSENT]), st.text(max_size=5)), VALUES, max_size=4)
)
def test_any_fields_are_read_or_refused(fields: dict[str, Any]) -> None:
    with contextlib.suppress(Refused):
        ask = read_ask(fields, SERVING)
        assert 1 <= len(ask.prompts) * ask.config.n <= 8
        assert all(0 <= token < 257 for prompt in ask.prompts for token in prompt.ids)


@given(st.binary(max_size=60))
def test_any_body_is_read_or_refused(body: bytes) -> None:
    with contextlib.suppress(Refused):
        assert isinstance(read_json(body), dict)
