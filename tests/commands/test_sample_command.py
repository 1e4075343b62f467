import pytest

from test_cli import TINY, done, refused

KEYS = {"text", "ids", "finish_reason", "completion_tokens"}


@pytest.fixture(scope="module")
def run(sonnets, tmp_path_factory):
    """A tiny run on the sonnets; its model sees 16 ids."""
    folder = tmp_path_factory.mktemp("sample") / "run"
    done("train", "sonnets", "--data", sonnets.folder, "--out", folder, *TINY)
    return folder


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def draw(run):
    """The samples of a command."""
    return lambda *words: done("sample", run, *words, "--json").json["samples"]


def test_json_is_the_last_line_of_stdout_and_people_read_stderr(run, sonnets):
    answer = done("sample", run, "--prompt", "Shall", "--max-tokens", "5", "--n", "2", "--json")
    assert answer.out.count("\n") == 1
    assert set(answer.json) == {"samples", "tokens_per_second"}
    assert len(answer.json["samples"]) == 2
    for sample in answer.json["samples"]:
        assert set(sample) == KEYS
        assert sample["completion_tokens"] == len(sample["ids"]) <= 5
        assert sonnets.tokenizer.decode(sample["ids"]) == sample["text"]
        assert sample["finish_reason"] == ("length" if len(sample["ids"]) == 5 else "stop")
    first, second = (sample["text"] for sample in answer.json["samples"])
    assert answer.err == f"Shall{first}\n---\nShall{second}\n"


def test_streamed_text_is_prompt_and_samples(run, draw):
    words = ["--prompt", "Shall I", "--n", "3", "--max-tokens", "6"]
    texts = ["Shall I" + sample["text"] for sample in draw(*words)]
    assert done("sample", run, *words).out == "\n---\n".join(texts) + "\n"


def test_a_seed_gives_the_same_samples_again_and_another_seed_others(draw):
    words = ["--n", "3", "--max-tokens", "12"]
    assert draw(*words, "--seed", "1") == draw(*words, "--seed", "1")
    assert draw(*words, "--seed", "1") != draw(*words, "--seed", "2")
    assert draw(*words, "--seed", str(2**63 - 1)) != draw(*words, "--seed", "1")


def test_a_sample_does_not_depend_on_how_many_are_drawn_beside_it(draw):
    many = draw("--n", "4", "--max-tokens", "8")
    assert many[:2] == draw("--n", "2", "--max-tokens", "8")
    assert len({tuple(sample["ids"]) for sample in many}) > 1


@pytest.mark.parametrize("words", [["--temperature", "0"], ["--top-p", "0"], ["--top-k", "1"], ["--top-p", "1e-9"]])
def test_greedy_takes_the_same_ids_whatever_the_seed(draw, words):
    greedy = draw("--temperature", "0", "--max-tokens", "8")
    assert draw(*words, "--max-tokens", "8", "--seed", "7") == greedy


def test_top_k_above_the_vocabulary_is_all_of_it(draw):
    assert draw("--top-k", "1000000", "--max-tokens", "8") == draw("--max-tokens", "8")


def test_a_stop_text_ends_a_sample_and_is_left_out(draw):
    (whole,) = draw("--prompt", "Shall", "--max-tokens", "11", "--seed", "3")
    text = whole["text"]
    assert len(text) > 4
    (stopped,) = draw(
        "--prompt", "Shall", "--max-tokens", "11", "--seed", "3", "--stop", text[2:4], "--stop", text[1:4]
    )
    place = min(text.find(text[2:4]), text.find(text[1:4]))
    assert (stopped["text"], stopped["finish_reason"]) == (text[:place], "stop")
    assert stopped["ids"] == whole["ids"][:place]


@pytest.mark.parametrize("prompt", ["", "Shall", "Shall I compare "])
def test_prompt_and_sample_never_pass_the_models_block_size(draw, prompt):
    room = 16 - max(len(prompt), 1)  # an empty prompt is one eot
    samples = draw("--prompt", prompt, "--max-tokens", "1000", "--n", "8")
    lengths = [sample["completion_tokens"] for sample in samples]
    assert max(lengths) == room
    assert all(sample["finish_reason"] == "length" for sample in samples if sample["completion_tokens"] == room)


def test_no_tokens_asked_for_are_none_given(draw):
    assert draw("--max-tokens", "0") == [{"text": "", "ids": [], "finish_reason": "length", "completion_tokens": 0}]


def test_a_checkpoint_folder_speaks_for_itself(run, draw):
    words = ["--max-tokens", "8", "--json"]
    newest = done("sample", run / "checkpoints" / "step_00000006", *words).json["samples"]
    assert newest == draw("--max-tokens", "8")


def test_bf16_is_a_choice(draw):
    assert draw("--dtype", "bf16", "--max-tokens", "3")[0]["completion_tokens"] <= 3


def test_int8_is_a_choice(draw):
    assert draw("--dtype", "int8", "--max-tokens", "3")[0]["completion_tokens"] <= 3


def test_log_probabilities_stand_beside_the_ids(draw):
    (sample,) = draw("--max-tokens", "6", "--logprobs", "2")
    assert [one["id"] for one in sample["logprobs"]] == sample["ids"]
    assert all(one["logprob"] <= 0 and len(one["top"]) == 2 for one in sample["logprobs"])


def test_sliding_goes_past_block_size_and_takes_a_longer_prompt(draw):
    lengths = [
        one["completion_tokens"] for one in draw("--prompt", "x" * 40, "--sliding", "--max-tokens", "40", "--n", "4")
    ]
    assert max(lengths) > 16


def test_log_probabilities_that_nobody_would_see_are_refused():
    assert "--logprobs 2 shows in the answer as JSON alone; give --json as well" in refused(
        "sample", ".", "--logprobs", 2
    )


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("min-p", "1.5", "--min-p is 1.5, it must be in 0 .. 1"),
        ("repetition-penalty", "0", "--repetition-penalty is 0.0, it must be above 0"),
        ("logprobs", "-1", "--logprobs is -1, it must be at least 0"),
        ("temperature", "-1", "--temperature is -1.0, it must be at least 0"),
        ("temperature", "nan", "--temperature is nan, it must be finite"),
        ("temperature", "inf", "--temperature is inf, it must be finite"),
        ("top-k", "0", "--top-k is 0, it must be at least 1"),
        ("top-k", "-3", "at least 1"),
        ("top-p", "1.5", "0 .. 1"),
        ("top-p", "-0.1", "0 .. 1"),
        ("top-p", "nan", "--top-p is nan, it must be finite"),
        ("max-tokens", "-1", "--max-tokens is -1, it must be at least 0"),
        ("n", "0", "at least 1"),
        ("stop", "", "empty text"),
        ("dtype", "int7", "Choose from"),
        ("temperature", "warm", '"warm"'),
        ("seed", "x", '"x"'),
        ("seed", "-1", "--seed is -1, it must be in 0 .. 2^63 - 1"),
        ("seed", str(2**63), "it must be in 0 .. 2^63 - 1"),
    ],
)
def test_a_value_out_of_range_is_exit_2_with_its_flag_named(run, flag, value, expected):
    told = refused("sample", run, f"--{flag}={value}")
    assert f"--{flag}" in told
    assert told.count("it must be") <= 1
    assert expected in told


def test_all_values_out_of_range_are_told_at_once(run):
    told = refused("sample", run, "--n=0", "--top-k=0", "--temperature=-2")
    assert told.startswith("error: 3 mistakes")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--prompt", "x" * 17], "the prompt has 17 ids, the model sees at most 16"),
        (["--prompt", "Grüße"], "character 'ü' (U+00FC LATIN SMALL LETTER U WITH DIAERESIS) at position 2"),
        (["--prompt=-1"], "character '1' (U+0031 DIGIT ONE) at position 1"),
        (["--prompt"], "--prompt requires an argument"),
        (["--prompt", "\udcff"], "lone surrogate U+DCFF at position 0; expected text that is UTF-8"),
        (["--device", "tpu"], "device 'tpu' is not on this machine"),
        (["--promt", "I"], "did you mean '--prompt'?"),
    ],
)
def test_wrong_input_is_exit_2_and_one_message(run, words, expected):
    assert expected in refused("sample", run, *words)


def test_a_run_that_is_not_there_is_told():
    assert "nope: no such run or checkpoint folder" in refused("sample", "nope")
