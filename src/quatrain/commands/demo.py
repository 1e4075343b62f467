"""quatrain demo: all four lines on eight sonnets, in about a minute on two CPU cores."""

import math
import shutil
import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from quatrain.console import say
from quatrain.errors import DataError
from quatrain.files import writing

MARK = ".quatrain-demo"  # in a folder that the demo made, and may make afresh
CORPUS = "corpus:sonnets"
HELD_OUT = 7  # sonnet 116, counted from 0


def demo(*, out: Path = Path("runs/sonnets"), json: Annotated[bool, Parameter(negative=())] = False) -> dict[str, Any]:
    """Prepare, train, evaluate and sample: the built-in eight sonnets, a minute on two CPU cores.

    Parameters
    ----------
    out
        Folder of the demo: absent, empty, or left by an earlier demo.
    json
        Print one JSON object as the last line of stdout; words for people go to stderr.

    """
    from quatrain.inference.config import SamplingConfig
    from quatrain.inference.sampling import generate
    from quatrain.inference.scoring import evaluate
    from quatrain.model.pretrained import load_model, parameter_count
    from quatrain.recipes.named import sonnets
    from quatrain.recipes.resolve import to_toml
    from quatrain.tokens.config import PrepareConfig
    from quatrain.tokens.store import TokenStore
    from quatrain.tokens.writer import prepare
    from quatrain.training.curves import draw
    from quatrain.training.loop import train
    from quatrain.training.progress import TerminalWatcher

    started = time.monotonic()
    _make_afresh(out)
    recipe = sonnets()
    store_folder = out / "store"
    say(f"1. prepare {CORPUS}: eight sonnets of Shakespeare, the eighth (116) held out for validation")
    prepare([CORPUS], store_folder, PrepareConfig(tokenizer="char", val_docs=(HELD_OUT,)))
    store = TokenStore(store_folder)
    splits, V = store.facts["splits"], store.vocab_size
    say(
        f"   {splits['train']['documents'] + splits['val']['documents']} documents, "
        f"{splits['train']['bytes'] + splits['val']['bytes']:,} characters, {V - 1} distinct ones + eot "
        f"= {V} ids; {len(store.train):,} ids to train on, {len(store.val):,} to validate"
    )
    say(f"2. train: a GPT that knows nothing gives every id the same chance: a loss of ln {V} = {math.log(V):.3f}")
    config = recipe.config.with_values("data", store=str(store_folder.resolve())).with_values("model", vocab_size=V)
    sections = (config.model, config.optim, config.data, config.train)
    trained = train(*sections, out, to_toml(config, recipe.head), "cpu", watcher=TerminalWatcher())
    losses, validations = _curves(out)
    say("   loss, nats per character, by step:")
    say(draw({"train": losses, "sonnet 116": validations}))
    best_step, best = min(validations, key=lambda pair: pair[1])
    model = load_model(Path(trained["checkpoint"]))
    result = evaluate(model, store, seq_len=config.data.seq_len)
    say(
        f"3. evaluate: train loss {losses[-1][1]:.3f}, but {result['loss']:.3f} nats per character on sonnet 116 "
        f"({result['bits_per_byte']:.2f} bits per byte), which it has never seen.\n"
        f"   The best validation loss was {best:.3f}, at step {best_step} of {config.train.steps}; from there on it "
        f"overfits:\n   seven sonnets of {len(store.train):,} ids are memorised by {parameter_count(model.config):,} "
        f"parameters, not learned."
    )
    say("4. sample, from a bare eot (what follows the end of a text is a beginning):\n")
    drawn = generate(model, store.tokenizer, "", SamplingConfig(n=3, temperature=0.8))
    for one in drawn:
        say("   " + one.text.replace("\n", "\n   ") + "\n")
    say(f"{time.monotonic() - started:.0f} s. All of it lies in {out}; more: quatrain sample {out} --prompt 'Shall I'")
    return {
        "first_loss": losses[0][1],
        "train_loss": losses[-1][1],
        "val_loss": result["loss"],
        "best_val_loss": best,
        "best_step": best_step,
        "samples": [one.text for one in drawn],
        "seconds": round(time.monotonic() - started, 1),
    }


def _make_afresh(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise DataError(f"{out}: a file; --out must be a folder that is absent, empty or left by an earlier demo")
    if out.exists() and any(out.iterdir()):
        if not (out / MARK).is_file():
            raise DataError(
                f"{out}: not empty, and not left by an earlier demo; choose another --out, nothing was touched"
            )
        shutil.rmtree(out)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        (out / MARK).touch()


def _curves(run: Path) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    from quatrain.training.metrics import JsonLines

    metrics = JsonLines(run / "metrics.jsonl")
    losses = [(row["step"], row["loss"]) for row in metrics.trained()]
    return losses, [(row["step"], row["val_loss"]) for row in metrics.validated()]
