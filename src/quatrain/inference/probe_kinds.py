"""The in-context probes: what follows from the rest of a row, and from nothing else."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

from quatrain.inference.probe_rows import (
    Material,
    Measure,
    Probe,
    Row,
    all_greedy,
    first_chosen,
    first_greedy,
    greedy_from,
    loss_of,
)
from quatrain.inference.probe_words import Draws, common_start, spells
from quatrain.text.tokenizers import Tokenizer

REPEATED = 8  # ids of a repeated segment, at most
LENGTHS = (4, 8, 16)  # letters of a string to copy
SHOTS = (0, 1, 2, 4, 8, 16, 32)
CYCLE = 3  # words of a pattern
CHOICES = 4  # keys of a look-up, and words to choose from
# What stands before a string, and before the place where it is asked for.
FRAMES = {
    "same words": (
        ("the word is", ", yes, the word is"),
        ("my name is", ", yes, my name is"),
        ("he says", " and he says"),
        ("we read", " and then we read"),
    ),
    "other words": (
        ("the word is", ", now say"),
        ("my name is", ", so they call me"),
        ("he says", " and we hear"),
        ("we read", " and then you write"),
    ),
}
FEW_LETTERS = 8  # strings of fewer different ones would not be rare
OTHER_STRINGS = 1000  # from which the chance of a constant answer is known


class Impossible(Exception):
    """A probe cannot be made of this material."""


def make_probes(material: Material, context: int) -> tuple[list[Probe], dict[str, dict[str, str]]]:
    """The probes that fit into a context of so many ids, and by family and setting why others were left out."""
    probes: list[Probe] = []
    left_out: dict[str, dict[str, str]] = {}
    for family, setting, make in _wanted(context):
        try:
            probe = make(material)
            if probe.length > context:
                raise Impossible(f"longer than the context of {context:,} ids")
            probes.append(probe)
        except Impossible as reason:
            left_out.setdefault(family, {})[setting] = str(reason)
    return probes, left_out


def _wanted(context: int) -> Iterator[tuple[str, str, Callable[[Material], Probe]]]:
    gap = 2
    while gap <= max(2, context // 2):
        yield "induction", f"gap {gap}", partial(induction, gap=gap)
        gap *= 2
    for kind in FRAMES:
        for length in LENGTHS:
            yield "copying", f"{length} letters, {kind}", partial(copying, length=length, kind=kind)
    for family, make in {"pattern": pattern, "lookup": lookup, "echo": echo}.items():
        for shots in SHOTS:
            yield family, _shown(shots), partial(make, shots=shots)


def induction(material: Material, gap: int) -> Probe:
    """A segment of different ids, others, and `gap` ids after its start the segment again (Olsson et al. 2022).

    Asked for are its ids but the first, in both copies: only in the second one do they follow from the row.
    """
    ids, family, setting = material.words.ids, "induction", f"gap {gap}"
    size = min(REPEATED, gap, len(ids) // 2)
    if size < 2:
        raise Impossible(f"more different ids than the {len(ids)} ordinary ones of the tokenizer")
    rows = []
    for draws in material.draws(family, setting):
        segment = draws.different(ids, size)
        others = [token for token in ids if token not in segment]
        row = (material.tokenizer.eot, *segment, *(draws.one(others) for _ in range(gap - size)), *segment[:-1])
        asked = [(start + place, segment[place]) for start in (0, gap) for place in range(1, size)]
        rows.append(Row(row, tuple(asked)))
    return Probe(
        family,
        setting,
        f"random ids of {len(ids):,} ordinary ones, the first {REPEATED} at most again `gap` ids later",
        tuple(rows),
        (
            Measure("right", "share of ids of the second copy that are likeliest", greedy_from(size - 1), 1 / len(ids)),
            Measure("loss", "nats of an id of the second copy", loss_of(slice(size - 1, None)), math.log(len(ids))),
            Measure("first_loss", "nats of an id of the first copy", loss_of(slice(size - 1)), math.log(len(ids))),
        ),
    )


def copying(material: Material, length: int, kind: str) -> Probe:
    """A string of random letters in a frame of words that ends where the string is asked for again."""
    family, setting, letters = "copying", f"{length} letters, {kind}", material.words.letters
    frames = [frame for frame in FRAMES[kind] if spells(material.tokenizer, " ".join(frame))]
    if not frames or len(letters) < FEW_LETTERS:
        lack = f"only the letters '{letters}'" if frames else f"none of the frames, such as '{FRAMES[kind][0][0]} ...'"
        raise Impossible(f"the tokenizer spells {lack}")
    rows = []
    for number, draws in enumerate(material.draws(family, setting)):
        rare = "".join(draws.one(letters) for _ in range(length))
        before, between = frames[number % len(frames)]
        rows.append(material.row(*asked_again(material.tokenizer, f"{before} {rare}{between}", rare)))
    return Probe(
        family,
        setting,
        "a string of random letters behind a few words, asked for again behind the same or other words",
        tuple(rows),
        (
            Measure(
                "right",
                "share of its ids that are likeliest, given those before",
                greedy_from(0),
                _commonest(material, length),
            ),
            Measure("exact", "share of strings that greedy decoding gives", all_greedy, float(len(letters)) ** -length),
        ),
    )


def _commonest(material: Material, length: int) -> float:
    """The share of the most frequent id in many strings: the chance of always giving the same answer."""
    draws = Draws(material.seed, length)
    strings = ("".join(draws.one(material.words.letters) for _ in range(length)) for _ in range(OTHER_STRINGS))
    spaces = material.tokenizer.encode(" ").tolist()
    answers = Counter(token for token in material.tokenizer.encode(" ".join(strings)).tolist() if token not in spaces)
    return max(answers.values()) / answers.total()


def asked_again(tokenizer: Tokenizer, prompt: str, rare: str) -> tuple[list[int], list[int]]:
    """The ids of a prompt, and those of the string behind it and a space; that space is asked for within a word."""
    whole = tokenizer.encode(f"{prompt} {rare}").tolist()
    start = common_start(whole, tokenizer.encode(f"{prompt} ").tolist())
    return whole[:start], whole[start:]


def pattern(material: Material, shots: int) -> Probe:
    """Three words in a circle: a b c a b c; a shot is once around, and the next word is asked for."""

    def prompt(draws: Draws) -> tuple[list[int], list[int]]:
        circle = draws.different(material.words.words, CYCLE)
        return circle * shots, circle

    said = f"{CYCLE} words in a circle, so many times around; which is next"
    return _few_shot(material, "pattern", shots, CYCLE, said, prompt)


def lookup(material: Material, shots: int) -> Probe:
    """Keys and their values, each as often as the others; a shot is one pair, and the value of a key is asked for."""
    arrow, line_break = material.words.arrow, material.words.line_break

    def prompt(draws: Draws) -> tuple[list[int], list[int]]:
        words = draws.different(material.words.words, 2 * CHOICES)
        pairs = list(zip(words[:CHOICES], words[CHOICES:], strict=True))
        order: list[tuple[int, int]] = []
        while len(order) < shots:
            order += draws.different(pairs, CHOICES)
        key, value = draws.one(pairs)
        shown = chain.from_iterable((k, *arrow, v, *line_break) for k, v in order[:shots])
        return [*shown, key, *arrow], [value, *(v for k, v in pairs if k != key)]

    said = f"{CHOICES} keys and their values, so many pairs shown; which is the value of a key"
    return _few_shot(material, "lookup", shots, 2 * CHOICES, said, prompt, separated=True)


def echo(material: Material, shots: int) -> Probe:
    """Pairs of a word and the same word, none twice, then a new word; counting what stood before cannot tell."""
    arrow, line_break = material.words.arrow, material.words.line_break

    def prompt(draws: Draws) -> tuple[list[int], list[int]]:
        words = draws.different(material.words.words, shots + CHOICES)
        shown = chain.from_iterable((word, *arrow, word, *line_break) for word in words[CHOICES:])
        # Shown words are among the choices: having been shown is no reason to choose one.
        others = words[CHOICES:][-(CHOICES - 1) :] if shots else []
        return [*shown, words[0], *arrow], [words[0], *others, *words[1 : CHOICES - len(others)]]

    said = "words and the same words again, so many pairs shown; what follows a new one"
    return _few_shot(material, "echo", shots, shots + CHOICES, said, prompt, separated=True)


def _few_shot(
    material: Material,
    family: str,
    shots: int,
    needed: int,
    said: str,
    prompt: Callable[[Draws], tuple[list[int], list[int]]],
    separated: bool = False,
) -> Probe:
    """Rows of prompts that ask for one id: the right one and others to choose from, it first."""
    count = len(material.words.words)
    if count < needed:
        raise Impossible(f"more different words of one id than the {count} of the tokenizer")
    if separated and not (material.words.arrow and material.words.line_break):
        raise Impossible("the tokenizer spells nothing to set words and pairs apart, such as ':' and ','")
    rows, choices = [], CHOICES
    for draws in material.draws(family, _shown(shots)):
        ids, answers = prompt(draws)
        choices = len(answers)
        row = (material.tokenizer.eot, *ids)
        rows.append(Row(row, tuple((len(row) - 1, answer) for answer in answers)))
    return Probe(
        family,
        _shown(shots),
        said,
        tuple(rows),
        (
            Measure("choice", f"share right of {choices} choices by their chances", first_chosen, 1 / choices),
            Measure("greedy", "share of answers that are likeliest of all ids", first_greedy, 1 / count),
        ),
    )


def _shown(shots: int) -> str:
    return f"{shots} shot" if shots == 1 else f"{shots} shots"
