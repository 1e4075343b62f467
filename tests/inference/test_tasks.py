"""Tasks against a straight loop over examples, and against lm-eval's own formulas."""

import gzip
import hashlib
import io
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional as F

from conftest import shared_file
from hub_server import Repo, serving
from quatrain.errors import DataError, UsageError
from quatrain.inference import endings, tasks
from quatrain.inference.endings import Question, answer
from quatrain.inference.forward import Forward
from quatrain.inference.items import hellaswag_cleaned, question_of
from quatrain.inference.memory import KeptAnswers
from quatrain.inference.ranks import Ranks
from quatrain.inference.tasks import TASKS, check_fit, evaluate_task, named_task, named_tasks, predicted
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.text.tokenizers import ByteTokenizer, CharTokenizer, Ids, Tokenizer, gpt2

COUNT = 200


class Folded(ByteTokenizer):
    """GPT-2's tokens under few numbers: a head of 50,257 would take the time, and only borders of tokens matter."""

    vocab_size = 1000
    eot = 999

    def _encode(self, text: str) -> Ids:
        return gpt2().encode(text) % 999


def network(vocab_size: int, block_size: int = 512, **changes: object) -> GPT:
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": block_size, "vocab_size": vocab_size} | changes
    model = GPT(ModelConfig(**shape), torch.Generator().manual_seed(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model.eval()


@torch.no_grad()
def alone(model: GPT, context: list[int], ending: list[int]) -> tuple[float, bool]:
    """The log-probability of one ending in a row of its own, and its greediness."""
    ids = (context + ending)[-(model.config.block_size + 1) :]
    logits = model.head(model.hidden(torch.tensor([ids[:-1]]))[0, -len(ending) :])
    losses = F.cross_entropy(logits, torch.tensor(ids[-len(ending) :]), reduction="none")
    return -float(losses.double().sum()), bool((logits.argmax(-1) == torch.tensor(ids[-len(ending) :])).all())


def rows_of(count: int = COUNT) -> list[dict]:
    with gzip.open(shared_file("hellaswag_val.jsonl.gz"), "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in itertools.islice(file, count)]


def nanogpt_labels(model: GPT, tokenizer: Tokenizer, rows: list[dict]) -> list[tuple[int, int]]:
    """build-nanogpt: ctx, then " " + ending, tokenized apart; the smallest sum, and mean, of the losses."""
    found = []
    for row in rows:
        context = tokenizer.encode(row["ctx"]).tolist()
        parts = [tokenizer.encode(" " + ending).tolist() for ending in row["endings"]]
        sums = torch.tensor([-alone(model, context, part)[0] for part in parts], dtype=torch.float64)
        found.append((int(sums.argmin()), int((sums / torch.tensor([len(part) for part in parts])).argmin())))
    return found


def harness_labels(model: GPT, tokenizer: Tokenizer, rows: list[dict]) -> list[tuple[int, int]]:
    """lm-eval 0.4: `process_docs` of hellaswag, `TemplateLM._encode_pair`, `process_results` of multiple_choice."""

    def preprocess(text: str) -> str:
        text = text.strip()
        text = text.replace(" [title]", ". ")
        text = re.sub("\\[.*?\\]", "", text)
        return text.replace("  ", " ")

    found = []
    for row in rows:
        query = preprocess(row["activity_label"] + ": " + row["ctx_a"] + " " + row["ctx_b"].capitalize())
        choices = [preprocess(ending) for ending in row["endings"]]
        lls = []
        for choice in choices:
            context, continuation = query, " " + choice
            spaces = len(context) - len(context.rstrip())
            if spaces:
                continuation, context = context[-spaces:] + continuation, context[:-spaces]
            ids = tokenizer.encode(context).tolist()
            lls.append(alone(model, ids, tokenizer.encode(context + continuation).tolist()[len(ids) :])[0])
        lengths = np.array([float(len(choice)) for choice in choices])
        found.append((int(np.argmax(lls)), int(np.argmax(np.array(lls) / lengths))))
    return found


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_the_cleaned_text_is_lm_evals_in_all_of_hellaswag() -> None:
    pytest.importorskip("lm_eval", reason="no optional library: lm-eval")
    from lm_eval.tasks.hellaswag.utils import process_docs

    class Rows(list):
        def map(self, change):
            return [change(row) for row in self]

    rows = rows_of(10_042)
    assert len(rows) == 10_042
    for row, theirs in zip(rows, process_docs(Rows(rows)), strict=True):
        item = hellaswag_cleaned(row)
        assert (item.context, list(item.choices), item.label) == (theirs["query"], theirs["choices"], theirs["gold"])


@pytest.mark.parametrize("block_size", [512, 64])
def test_hellaswag_predicts_what_straight_loops_predict(block_size: int, tmp_path: Path) -> None:
    """200 examples, all four numbers; at 64 some questions lose the beginning of their context."""
    tokenizer, rows = Folded(), rows_of(COUNT if block_size == 512 else 40)
    model = network(tokenizer.vocab_size, block_size, n_layer=1, n_embd=16)
    task = TASKS["hellaswag"]
    loops = (nanogpt_labels(model, tokenizer, rows), harness_labels(model, tokenizer, rows))
    given = named_task("hellaswag", shared_file("hellaswag_val.jsonl.gz"), len(rows))
    found = evaluate_task(model, tokenizer, given)
    labels = [int(row["label"]) for row in rows]
    for way, loop in zip(task.ways, loops, strict=True):
        asked = [way.item(row) for row in rows]
        questions = [question_of(item, tokenizer, way.joined) for item in asked]
        answers = answer(Forward(model), questions)
        for column, (score, normaliser) in enumerate(zip(way.scores, way.scores, strict=True)):
            ours = [
                predicted(*each, "sum" if normaliser == "acc" else normaliser)
                for each in zip(asked, questions, answers, strict=True)
            ]
            assert ours == [pair[column] for pair in loop]
            right = np.array([one == label for one, label in zip(ours, labels, strict=True)], dtype=float)
            facts = found["scores"][f"{way.name}_{score}"]
            assert facts["value"] == right.mean()
            assert facts["standard_error"] == pytest.approx(right.std(ddof=1) / math.sqrt(len(rows)))
            assert (facts["count"], facts["context_length"]) == (len(rows), block_size)
            assert facts["data_hash"] == given.data_hash
    assert len({tuple(row) for row in loops[0]}) > 4  # the two normalisers do not always agree
    assert (found["truncated"] > 0) == (block_size == 64)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "n_kv_head": 1, "qk_norm": True, "bias": False},
        {"value_residual": True, "embedding_shortcut": True, "logit_softcap": 5.0, "tied": False},
    ],
)
def test_every_answer_is_that_of_its_row_alone(changes: dict) -> None:
    model = network(50, 24, **changes)
    generator = np.random.default_rng(1)
    questions = []
    for _ in range(40):
        sizes = generator.integers(1, 9, generator.integers(1, 6))
        context = tuple(generator.integers(0, 50, generator.integers(1, 25)).tolist())
        questions.append(Question(context, tuple(tuple(generator.integers(0, 50, n).tolist()) for n in sizes)))
    for question, found in zip(questions, answer(Forward(model), questions), strict=True):
        for ending, logprob, greedy in zip(question.endings, found.logprobs, found.greedy, strict=True):
            expected = alone(model, list(question.context), list(ending))
            assert logprob == pytest.approx(expected[0], abs=2e-4)
            assert greedy == expected[1]


def test_the_comparison_bites_where_endings_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(50, 24)
    question = Question((1, 2, 3), ((4, 5, 6), (7, 8, 9)))
    expected = alone(model, [1, 2, 3], [7, 8, 9])[0]
    assert answer(Forward(model), [question])[0].logprobs[1] == pytest.approx(expected, abs=1e-4)
    monkeypatch.setattr(endings, "_mask", lambda rows, branches: endings.Causal())
    assert abs(answer(Forward(model), [question])[0].logprobs[1] - expected) > 1e-2


def test_an_empty_ending_is_certain_and_an_ending_longer_than_the_model_is_refused(tmp_path: Path) -> None:
    model = network(257, 24)
    assert answer(Forward(model), [Question((1,), ((), (2,)))])[0].logprobs[0] == 0.0
    (tmp_path / "long.jsonl").write_text(json.dumps({"context": "a", "endings": ["b" * 24, "b"], "label": 0}))
    given = named_task(str(tmp_path / "long.jsonl"))
    refusal = "task long.jsonl, question 1: an ending has 25 ids, and the model sees at most block_size 24"
    with pytest.raises(DataError, match=refusal):
        evaluate_task(model, ByteTokenizer(), given)
    with pytest.raises(DataError, match=refusal):
        check_fit(given, ByteTokenizer(), 24)
    check_fit(given, ByteTokenizer(), 25)
    with pytest.raises(DataError, match=r"task long.jsonl, question 1: character 'a' \(U\+0061 LATIN SMALL LETTER A\)"):
        check_fit(given, CharTokenizer("b "), 25)


def test_case_49_a_question_draws_nothing_and_puts_the_mode_back() -> None:
    model = network(50, 24, dropout=0.5).train()
    before = torch.get_rng_state()
    first = answer(Forward(model), [Question((1, 2), ((3,), (4, 5)))])
    assert first == answer(Forward(model), [Question((1, 2), ((3,), (4, 5)))])
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)


# Other tasks


def test_lambada_is_the_last_word_by_greedy_decoding_and_its_perplexity(tmp_path: Path) -> None:
    lines = ["the sun is up and the day is warm", "one two", "a b  c "]
    (tmp_path / "l.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    model, tokenizer = network(257, 64), ByteTokenizer()
    scores = evaluate_task(model, tokenizer, named_task("lambada", tmp_path / "l.jsonl"))["scores"]
    found = []
    for line in lines:
        context, word = " ".join(line.split(" ")[:-1]), line.split(" ")[-1]
        stripped = context.rstrip()
        found.append(alone(model, list(stripped.encode()), list((context[len(stripped) :] + " " + word).encode())))
    assert scores["lm_eval_perplexity"]["value"] == pytest.approx(math.exp(-np.mean([ll for ll, _ in found])), rel=1e-5)
    assert scores["lm_eval_greedy"]["value"] == np.mean([greedy for _, greedy in found])


def test_blimp_prefers_the_better_sentence_behind_an_eot(tmp_path: Path) -> None:
    rows = [
        {"sentence_good": f"Cats {n} sleep.", "sentence_bad": f"Cats sleeps {n}.", "UID": f"g{n % 2}"} for n in range(9)
    ]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, tokenizer = network(257, 64), ByteTokenizer()
    scores = evaluate_task(model, tokenizer, named_task("blimp", tmp_path / "b.jsonl"))["scores"]
    better = [
        alone(model, [256], list(b" " + row["sentence_good"].encode()))[0]
        > alone(model, [256], list(b" " + row["sentence_bad"].encode()))[0]
        for row in rows
    ]
    assert scores["lm_eval_acc"]["value"] == np.mean(better)
    assert scores["lm_eval_acc_g1"]["value"] == np.mean(better[1::2])
    assert scores["lm_eval_acc_g1"]["count"] == 4


OWN = {"context": "two and two is", "endings": ["four", "a fish", "5"], "label": 0}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"label": 3}, r"question 2: 'label' is 3, expected the place of the right ending, 0 .. 2"),
        ({"label": True}, "'label' is True"),
        ({"endings": "four"}, "'endings' is 'four', expected a list of two or more texts, none of them empty"),
        ({"endings": ["b"]}, r"'endings' is \['b'\], expected a list of two or more texts, none of them empty"),
        ({"endings": ["b", ""]}, r"'endings' is \['b', ''\], expected a list of two or more texts, none of them empty"),
        ({"endings": []}, r"'endings' is \[\]"),
        ({"context": None}, "'context' is None, expected a text"),
    ],
)
def test_a_wrong_line_of_a_task_file_is_named(change: dict, expected: str, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [OWN, OWN | change]))
    with pytest.raises(DataError, match=expected):
        named_task(str(tmp_path / "mine.jsonl"))


def test_a_task_that_is_not_there_gets_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"no task 'helaswag' \(did you mean 'hellaswag'\?\)"):
        named_task("helaswag")


# Once each: over ranks, after interruptions, from any kind of file


def test_each_batch_is_one_ranks_and_their_sums_are_the_bits_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two real processes are in tests/commands/test_evaluate_command.py."""
    model, way = network(1000, 128), TASKS["hellaswag"].ways[0]
    questions = [question_of(way.item(row), Folded(), way.joined) for row in rows_of(23)]
    forward, parts = Forward(model), []
    whole = answer(forward, questions)
    monkeypatch.setattr(Ranks, "sum", lambda self, table: parts.append(table) or table)
    for rank in range(3):
        answer(forward, questions, ranks=Ranks(rank, 3))
    assert sum(parts)[:, 0].tolist() == [logprob for one in whole for logprob in one.logprobs]
    assert sum((part[:, 0] != 0).astype(int) for part in parts).tolist() == [1] * 92
    assert all((part[:, 0] != 0).sum() > 10 for part in parts)


@pytest.mark.parametrize("left", ["", '{"batch": ', '{"batch": 0, "answers": [[-1.5, true]]}\n{"ba'])
def test_what_a_kill_left_of_a_line_does_not_spoil_those_behind_it(tmp_path: Path, left: str) -> None:
    KeptAnswers(tmp_path, "a")("key").keep(7, [(-2.0, False)])
    (file,) = (tmp_path / "evaluating").iterdir()
    file.write_text(left)
    KeptAnswers(tmp_path, "a")("key").keep(1, [(-0.5, False)])
    kept = KeptAnswers(tmp_path, "a")("key")
    assert kept.known(1) == [(-0.5, False)]
    assert kept.known(0) == ([(-1.5, True)] if "true" in left else None)


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "mine.jsonl" for folder in ("a", "b, c")]
    for path in paths:
        path.parent.mkdir()
        path.write_text('{"context": "a", "endings": ["b", "c"], "label": 0}\n')
    assert [given.task.name for given in named_tasks(str(paths[1]))] == ["mine.jsonl"]  # a comma is in its name
    with pytest.raises(UsageError, match=r"two tasks are called 'mine\.jsonl'"):
        named_tasks(f"{paths[0]}, {paths[0]}")


def test_an_interrupted_evaluation_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, model = Folded(), network(1000, 128, n_layer=1, n_embd=16)
    given = named_task("hellaswag", shared_file("hellaswag_val.jsonl.gz"), 60)
    expected = evaluate_task(model, tokenizer, given)
    stops = iter([False, False, True])
    assert (
        evaluate_task(model, tokenizer, given, memory=KeptAnswers(tmp_path, "a"), should_stop=lambda: next(stops))
        is None
    )
    (file,) = (tmp_path / "evaluating").iterdir()
    with file.open("a") as half:
        half.write('{"batch": 2, "ans')
    computed: list[int] = []
    batch = endings._batch
    monkeypatch.setattr(endings, "_batch", lambda *given: computed.append(1) or batch(*given))
    memory = KeptAnswers(tmp_path, "a")
    assert evaluate_task(model, tokenizer, given, memory=memory) == expected
    first = len(computed)
    assert evaluate_task(model, tokenizer, given, memory=KeptAnswers(tmp_path, "a")) == expected
    assert len(computed) == first  # all was kept
    evaluate_task(model, tokenizer, given, memory=(other := KeptAnswers(tmp_path, "b")))
    assert len(computed) - first == first + 2  # another checkpoint begins anew
    memory.forget()
    other.forget()
    assert not (tmp_path / "evaluating").exists()


def test_the_pinned_file_comes_from_the_hub_once_and_another_content_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: the Hub's library reads its variables when it is imported."""
    rows = rows_of(5)
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    name = "data/validation-00000-of-00001.parquet"
    script = """
import sys
from dataclasses import replace
from quatrain.inference import tasks
from quatrain.errors import DataError
task = tasks.TASKS["hellaswag"]
for digest in sys.argv[3:]:
    pin = replace(task.published, revision=sys.argv[1], sha256=((sys.argv[2], digest),))
    tasks.TASKS["hellaswag"] = replace(task, published=pin)
    try:
        print(tasks.named_task("hellaswag").data_hash)
    except DataError as error:
        print(error)
"""
    expected = tasks.rows_hash(rows, TASKS["hellaswag"].fields)
    sha256 = hashlib.sha256(file.getvalue()).hexdigest()
    with serving() as hub:
        hub.repos["Rowan/hellaswag"] = repo = Repo({name: file.getvalue(), "data/train-0.parquet": b"unwanted"})
        hub.fail("resolve", 503)
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}

        def told(*digests: str, **more: str) -> list[str]:
            words = [sys.executable, "-c", script, repo.commit, name, *digests]
            done = subprocess.run(words, capture_output=True, text=True, env=environment | more, timeout=60)
            assert done.returncode == 0, done.stderr
            return done.stdout.strip().splitlines()[-len(digests) :]

        first, other = told(sha256, "0" * 64)
        assert first == expected
        assert "has another sha256 than the pinned 0000000000000000" in other
        assert "GET /datasets/Rowan/hellaswag/resolve" in " ".join(hub.asked)
        assert not any("train-0" in asked for asked in hub.asked)
    assert told(sha256, HF_HUB_OFFLINE="1") == [expected]  # from the cache
