"""Claim: what the cache gives is what the whole row gives, for every switch, prefix and neighbour."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quatrain.inference import engine as engine_module
from quatrain.inference import graphs as graphs_module
from quatrain.inference.engine import Engine
from quatrain.model.cache import Cache
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.tokens.packing import document_ids, positions

EOT = 10


@st.composite
def configurations(draw: st.DrawFn) -> ModelConfig:
    """Every switch, with heads that share keys."""
    n_head = draw(st.sampled_from([1, 2, 4, 6]))
    groups = draw(st.sampled_from([count for count in (1, 2, 3, n_head) if n_head % count == 0]))
    return ModelConfig(
        n_layer=draw(st.integers(1, 3)),
        n_head=n_head,
        n_kv_head=groups,
        n_embd=n_head * draw(st.sampled_from([4, 8])),
        block_size=draw(st.integers(6, 20)),
        vocab_size=EOT + 1,
        position=draw(st.sampled_from(["learned", "rope"])),
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        mlp=draw(st.sampled_from(["gelu_tanh", "swiglu", "relu2"])),
        bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        tied=draw(st.booleans()),
        logit_softcap=draw(st.sampled_from([0.0, 5.0])),
        value_residual=draw(st.booleans()),
        embedding_shortcut=draw(st.booleans()),
    )


def build(config: ModelConfig, seed: int = 0) -> GPT:
    """A model whose weights are all of them large enough to be seen, those that start at zero or one too."""
    generator = torch.Generator().manual_seed(seed)
    model = GPT(config, generator).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def small(**switches: object) -> GPT:
    return build(
        ModelConfig(**{"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "vocab_size": EOT + 1} | switches)
    )


def ids_of(rows: int, T: int, seed: int = 1, eots: bool = True) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, EOT + eots, (rows, T), generator=generator).tolist()


@torch.no_grad()
def whole(model: GPT, row: list[int], documents: bool = False) -> Tensor:
    """Logits (T, V) of a row without a cache."""
    ids = torch.tensor([row])
    if not documents:
        return model(ids)[0]
    rows = ids.numpy()
    return model(ids, torch.from_numpy(document_ids(rows, EOT)), torch.from_numpy(positions(rows, EOT)).long())[0]


def furthest(model: GPT, engine: Engine, rows: list[list[int]], prefixes: list[int], documents: bool = False) -> float:
    """The largest difference of logits: prefixes are read at once, then all slots go on until each row ends."""
    expected = [whole(model, row, documents) for row in rows]
    for slot in range(len(rows)):
        engine.free(slot)
    found = engine.prefill(range(len(rows)), [row[:end] for row, end in zip(rows, prefixes, strict=True)])
    worst = max(float((found[i] - expected[i][end - 1]).abs().max()) for i, end in enumerate(prefixes))
    ends = list(prefixes)
    while going := [i for i, row in enumerate(rows) if ends[i] < len(row)]:
        found = engine.decode(going, [rows[i][ends[i]] for i in going])
        worst = max([worst, *(float((found[n] - expected[i][ends[i]]).abs().max()) for n, i in enumerate(going))])
        for i in going:
            ends[i] += 1
    return worst


@settings(max_examples=20)
@given(configurations(), st.booleans(), st.booleans())
def test_case_44_cached_logits_are_the_uncached_ones_at_every_prefix_length(
    config: ModelConfig, documents: bool, graphs: bool
) -> None:
    """Case 44. `graphs` is CUDA's way, all slots over whole buckets, run as it is."""
    model, T = build(config), config.block_size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs_module, "can_compile", lambda device: False)
        engine = Engine(model, 3, restart=EOT if documents else None, compiled=graphs)
        patch.setattr(graphs_module, "BUCKET", 4)
        rows = ids_of(3, T)
        for prefix in range(1, T + 1):
            prefixes = [prefix, max(1, T - prefix), (prefix * 7) % T + 1]
            assert furthest(model, engine, rows, prefixes, documents) < 1e-4


@pytest.mark.parametrize("fault", ["top-left causal", "position 0", "keys a place too late", "whole cache seen"])
def test_the_comparison_bites(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Cases 43 and 44: their faults, planted."""
    plain, update, attention = Engine._stream, Cache.update, torch.nn.functional.scaled_dot_product_attention
    if fault == "top-left causal":
        monkeypatch.setattr(
            engine_module, "_all_seen", lambda q, k, v: attention(q, k, v, is_causal=True, enable_gqa=True)
        )
    elif fault == "position 0":
        monkeypatch.setattr(
            Engine,
            "_stream",
            lambda self, ids, at, *rest: plain(self, ids, at * (ids.shape[1] > 1), *rest),
        )
    elif fault == "keys a place too late":
        monkeypatch.setattr(
            Cache,
            "update",
            lambda self, layer, k, v, place: update(self, layer, k, v, place._replace(at=place.at + (k.shape[2] == 1))),
        )
    else:
        monkeypatch.setattr(engine_module, "_seen_up_to", lambda positions, extent: engine_module._all_seen)
    model = small()
    alike = [8, 8, 8] if fault != "whole cache seen" else [5, 8, 11]
    assert furthest(model, Engine(model, 3), ids_of(3, 16), alike) > 1e-3


def test_a_document_never_sees_the_one_before_it_and_the_switch_matters() -> None:
    model = small()
    row = [1, 2, EOT, 3, 4, EOT, 5, 6]
    assert furthest(model, Engine(model, 1, restart=EOT), [row], [1], documents=True) < 1e-4
    assert furthest(model, Engine(model, 1), [row], [1], documents=True) > 1e-3  # the switch left off
    other = [7, 8, EOT, 9, 1, EOT, 5, 6]
    engine = Engine(model, 2, restart=EOT)
    found = engine.prefill([0, 1], [row, other])
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("restart", [None, EOT])
def test_reading_gives_the_logits_behind_every_id(restart: int | None) -> None:
    model = small(position="rope", n_kv_head=1)
    row = [1, 2, EOT, 3, 4, 4, EOT, 5, 6]
    engine = Engine(model, 2, restart=restart)
    expected = whole(model, row, documents=restart is not None)
    assert torch.allclose(engine.read(1, row[:5]), expected[:5], atol=1e-4)
    assert torch.allclose(engine.read(1, row[5:]), expected[5:], atol=1e-4)  # behind what the slot holds


def test_slots_that_hold_something_go_on_with_rows_of_other_lengths() -> None:
    model = small()
    rows = ids_of(3, 14, eots=False)
    engine = Engine(model, 4)
    engine.prefill([0, 3, 2], [rows[0][:4], rows[1][:1], rows[2][:7]])
    found = engine.prefill([3, 0, 2], [rows[1][1:14], rows[0][4:6], rows[2][7:10]])
    for n, (row, end) in enumerate([(rows[1], 14), (rows[0], 6), (rows[2], 10)]):
        assert torch.allclose(found[n], whole(model, row[:end])[-1], atol=1e-4)
    found = engine.decode([2, 0], [rows[2][10], rows[0][6]])
    assert torch.allclose(found[0], whole(model, rows[2][:11])[-1], atol=1e-4)
    assert torch.allclose(found[1], whole(model, rows[0][:7])[-1], atol=1e-4)


def test_a_slot_is_freed_and_filled_while_its_neighbours_decode() -> None:
    model = small()
    rows = ids_of(3, 16, eots=False)
    engine = Engine(model, 2)
    engine.prefill([0, 1], [rows[0][:3], rows[1][:15]])
    engine.decode([0, 1], [rows[0][3], rows[1][15]])  # slot 1 is full now
    for place in (4, 5):
        assert torch.allclose(
            engine.decode([0], [rows[0][place]])[0], whole(model, rows[0][: place + 1])[-1], atol=1e-4
        )
    engine.free(1)
    engine.prefill([1], [rows[2][:2]])
    found = engine.decode([0, 1], [rows[0][6], rows[2][2]])
    assert torch.allclose(found[0], whole(model, rows[0][:7])[-1], atol=1e-4)
    assert torch.allclose(found[1], whole(model, rows[2][:3])[-1], atol=1e-4)


def test_resting_slots_keep_what_they_hold_even_when_they_are_full() -> None:
    model = small()
    rows = ids_of(2, 16, eots=False)
    engine = Engine(model, 2)
    engine.prefill([0, 1], [rows[0][:15], rows[1][:2]])
    for place in range(2, 9):
        engine.decode([1], [rows[1][place]])
    assert torch.allclose(engine.decode([0], [rows[0][15]])[0], whole(model, rows[0])[-1], atol=1e-4)


def test_a_fork_holds_what_the_slot_holds() -> None:
    model = small(position="rope")
    (row,) = ids_of(1, 12, eots=False)
    engine = Engine(model, 3)
    engine.prefill([1], [row[:7]])
    engine.fork(1, [0, 2])
    found = engine.decode([0, 1, 2], [row[7], 3, row[7]])
    assert torch.allclose(found[0], whole(model, row[:8])[-1], atol=1e-4)
    assert torch.equal(found[0], found[2])
    assert not torch.allclose(found[0], found[1], atol=1e-3)


def test_more_than_the_model_sees_is_refused_with_the_numbers() -> None:
    engine = Engine(small(), 1)
    with pytest.raises(ValueError, match=r"0 positions and 17 more in slot 0.*block_size 16"):
        engine.prefill([0], [[1] * 17])
    engine.prefill([0], [[1] * 16])
    with pytest.raises(ValueError, match="16 positions and 1 more"):
        engine.decode([0], [1])
    with pytest.raises(ValueError, match="without ids"):
        Engine(small(), 1).prefill([0], [[]])


@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 0.06), ("int8", 0.12)])
def test_smaller_weights_give_nearly_the_same_logits(dtype: str, tolerance: float) -> None:
    model = small(n_embd=64, n_head=4)
    engine = Engine(model, 3, dtype)
    expected = whole(model, [1, 2, 3])
    assert 1e-5 < furthest(model, engine, ids_of(3, 16), [3, 9, 5]) < tolerance * float(expected.std())


def test_rows_of_int8_are_the_same_bits_in_any_batch() -> None:
    """Attention alone could differ by its neighbours, so it has one position here."""
    engine = Engine(small(n_embd=64, n_head=4), 4, "int8")
    if engine.dtype != "int8":
        pytest.skip("no optional library: int8 does not run on this CPU")
    together = engine.prefill(range(4), [[1], [2], [3], [4]])
    for slot, row in enumerate(together):
        engine.free(slot)
        assert torch.equal(engine.prefill([slot], [[slot + 1]])[0], row)
