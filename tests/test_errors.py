import signal

import pytest

from quatrain.errors import ConfigError, DataError, QuatrainError, Stopped, UsageError, did_you_mean


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (QuatrainError("disk full"), 1),
        (UsageError("no such flag"), 2),
        (DataError("not a store"), 2),
        (ConfigError(["steps is 0"]), 2),
        (Stopped(signal.SIGINT, "saved"), 130),
        (Stopped(signal.SIGTERM, "saved"), 143),
    ],
)
def test_whose_fault_decides_the_exit_code(error, code):
    assert isinstance(error, QuatrainError)
    assert error.exit_code == code


def test_one_mistake_is_told_as_it_is():
    assert str(ConfigError(["steps is 0"])) == "steps is 0"


def test_several_mistakes_are_counted_and_each_told():
    error = ConfigError(word for word in ["steps is 0", "lr is -1"])
    assert error.mistakes == ["steps is 0", "lr is -1"]
    assert str(error).splitlines()[1:] == ["  - steps is 0", "  - lr is -1"]
    assert str(error).startswith("2 mistakes")


def test_mistakes_as_flags_name_settings_as_they_are_written_on_the_command_line():
    error = ConfigError(["top_k is 0, it must be at least 1", "val_docs, val_tail and files each decide", "n is 0"])
    expected = ["--top-k is 0, it must be at least 1", "--val-docs, --val-tail and files each decide", "--n is 0"]
    assert error.as_flags().mistakes == expected
    assert error.as_flags().exit_code == 2


@pytest.mark.parametrize(
    ("word", "known", "expected"),
    [
        ("learing_rate", ["steps", "learning_rate"], " (did you mean 'learning_rate'?)"),
        ("n_layers", ["n_layer", "n_head"], " (did you mean 'n_layer'?)"),
        ("out", ["cut", "output"], " (did you mean 'output'?)"),  # it begins with the word
        ("", ["n_layer"], ""),
        ("xyz", ["n_layer", "n_head"], ""),
        ("word", [], ""),
        ("sonets", {"sonnets": 1, "gpt2": 2}, " (did you mean 'sonnets'?)"),
    ],
)
def test_did_you_mean_names_the_nearest_word_or_none(word, known, expected):
    assert did_you_mean(word, known) == expected
