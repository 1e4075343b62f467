"""Masks: every way to attend within documents against documents by themselves; which way is taken; no recompilation."""

import inspect
import warnings
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import varlen

from quatrain.model import masks
from quatrain.model.config import ModelConfig
from quatrain.model.device import can_compile
from quatrain.model.gpt import GPT
from quatrain.model.loss import loss_of
from quatrain.model.masks import WAYS, Causal, Dense, Segments, Varlen, fastest_way, plan
from quatrain.tokens.packing import IGNORED

# torch's own, of 2.13, while it compiles
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*should not be instantiated:DeprecationWarning"),
]

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LENGTHS = [[5, 7, 1, 6], [19], [1, 1, 17]]  # of the documents in each row of 19
T = 19


def numbers(rows: list[list[int]]) -> Tensor:
    """Document numbers (B, T); they need not grow, and may come again later in the row."""
    return torch.tensor([[7 - number % 3 for number, length in enumerate(row) for _ in range(length)] for row in rows])


def flash(causal: bool, q, k, v, borders, borders_k, longest, longest_k) -> Tensor:
    """What FlashAttention computes from (B T, H, D), one document after the other, and what it asks for."""
    assert causal
    assert borders is borders_k
    assert borders.dtype == torch.int32
    assert borders[0] == 0
    assert borders[-1] == len(q) == len(k)
    assert longest == longest_k == borders.diff().max()
    parts = []
    for start, end in pairwise(borders.tolist()):
        one = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        parts.append(F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(parts)


def newer(query, key, value, cu_q, cu_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
    assert enable_gqa or query.shape[1] == key.shape[1]
    return flash(window_size == (-1, 0), query, key, value, cu_q, cu_k, max_q, max_k)


def of_2_11(query, key, value, cu_q, cu_k, max_q, max_k, *, window_size=(-1, -1)):
    assert query.shape[1] == key.shape[1]
    return flash(window_size == (-1, 0), query, key, value, cu_q, cu_k, max_q, max_k)


def of_2_10(query, key, value, cu_q, cu_k, max_q, max_k, is_causal=False):
    assert query.shape[1] == key.shape[1]
    return flash(is_causal, query, key, value, cu_q, cu_k, max_q, max_k)


KERNELS = {"varlen": newer, "varlen of 2.11": of_2_11, "varlen of 2.10": of_2_10}
EVERY_WAY = ["dense", "segments", "flex", *KERNELS]
DIFFERENTIABLE = [way for way in EVERY_WAY if way != "flex"]  # it has no backward on a CPU


@pytest.fixture
def over(request, monkeypatch):
    """A way's masks; for the kernels that a CPU lacks stand FlashAttention's definition and uncompiled Flex."""
    way = request.param
    monkeypatch.setattr(varlen, "varlen_attn", KERNELS.get(way))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        yield WAYS[way.split()[0]]


def qkv(H_kv: int, dtype: torch.dtype = torch.float32, B: int = 3) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(B, heads, T, 16, generator=draw).to(dtype) for heads in (4, H_kv, H_kv)]


def apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each document of LENGTHS by itself, in double precision by the definition of attention."""
    rows = []
    for row, lengths in enumerate(LENGTHS):
        one = [x[row : row + 1].double().repeat_interleave(4 // x.shape[1], dim=1) for x in (q, k, v)]
        documents = []
        for q_, k_, v_ in zip(*(x.split(lengths, dim=2) for x in one), strict=True):
            later = torch.ones(q_.shape[2], q_.shape[2], dtype=torch.bool).triu(1)
            documents.append((q_ @ k_.mT / 4).masked_fill(later, -torch.inf).softmax(dim=-1) @ v_)
        rows.append(torch.cat(documents, dim=2))
    return torch.cat(rows)


@pytest.mark.parametrize("H_kv", [4, 2, 1])
@pytest.mark.parametrize("over", EVERY_WAY, indirect=True)
def test_case_41_42_every_way_attends_within_documents_alone(over, H_kv):
    with torch.no_grad():
        y = over(numbers(LENGTHS)).attend(*qkv(H_kv))
    torch.testing.assert_close(y.double(), apart(*qkv(H_kv)), atol=1e-5, rtol=0)
    assert (y - Causal().attend(*qkv(H_kv))).abs().max() > 0.1  # the fault: no mask


@pytest.mark.parametrize("H_kv", [4, 2])
@pytest.mark.parametrize("over", DIFFERENTIABLE, indirect=True)
def test_gradients_are_those_of_documents_by_themselves(over, H_kv):
    ours, theirs = ([x.requires_grad_() for x in qkv(H_kv)] for _ in range(2))
    weight = torch.randn(3, 4, T, 16, generator=torch.Generator().manual_seed(1))
    (over(numbers(LENGTHS)).attend(*ours) * weight).sum().backward()
    (apart(*theirs) * weight).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=0)


@pytest.mark.parametrize("short", [0, masks.SHORT], ids=["in bf16", "short documents in fp32"])
@pytest.mark.parametrize("over", EVERY_WAY, indirect=True)
def test_in_bf16_every_way_is_as_exact_as_bf16(over, short, monkeypatch):
    monkeypatch.setattr(masks, "SHORT", short)
    parts = qkv(2, torch.bfloat16)
    with torch.no_grad():
        y = over(numbers(LENGTHS)).attend(*parts)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), apart(*parts), atol=0.02, rtol=0)


@pytest.mark.parametrize("over", DIFFERENTIABLE, indirect=True)
def test_case_46_rows_and_tails_of_padding_alone_are_finite_and_poison_nothing(over):
    padded = torch.tensor([[0] * 12 + [-1] * 7, [-1] * T, [3, 4, 4] + [-1] * 16])  # padding has its own number
    alone = [x[:1, :, :12].clone().requires_grad_() for x in qkv(2)]
    parts = [x.requires_grad_() for x in qkv(2)]
    y = over(padded).attend(*parts)
    y[0, :, :12].sum().backward()
    assert y.isfinite().all()
    for x in parts:
        assert x.grad.isfinite().all()
        assert not x.grad[1:].any()
        assert not x.grad[0, :, 12:].any()
    expected = Causal().attend(*alone)
    expected.sum().backward()
    torch.testing.assert_close(y[:1, :, :12], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(parts[0].grad[:1, :, :12], alone[0].grad, atol=1e-5, rtol=0)


def test_case_46_the_fault_is_a_row_that_may_attend_to_nothing():
    nothing = torch.zeros(1, 1, T, T, dtype=torch.bool)
    q, k, v = qkv(4, B=1)
    scores = (q @ k.mT).masked_fill(~nothing, -torch.inf)
    assert (scores.softmax(dim=-1) @ v).isnan().all()
    assert Dense.over(torch.full((1, T), -1)).allowed.any(dim=-1).all()


@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=5), min_size=1, max_size=4))
def test_masks_hold_the_borders_of_any_rows(rows):
    longest = max(map(sum, rows))
    rows = [[*row, longest - sum(row)] if sum(row) < longest else row for row in rows]
    documents = numbers(rows)
    expected = torch.block_diag(*(torch.ones(length, length).tril() for row in rows for length in row)).bool()
    dense = Dense.over(documents)
    for row, allowed in enumerate(dense.allowed[:, 0]):
        inside = slice(row * longest, (row + 1) * longest)
        assert torch.equal(allowed, expected[inside, inside])
    segments = Segments.over(documents)
    assert segments == (Causal() if all(len(row) == 1 for row in rows) else Segments(rows))
    borders, longest_document = Varlen.over(documents)
    assert borders.diff().tolist() == [length for row in rows for length in row]
    assert longest_document == max(max(row) for row in rows)


@pytest.mark.parametrize("new", [1, 3, T])
@pytest.mark.parametrize("H_kv", [4, 1])
def test_case_43_new_queries_stand_at_the_end_of_the_keys(new, H_kv):
    q, k, v = qkv(H_kv)
    whole = Causal().attend(q, k, v)
    last = Causal().attend(q[:, :, -new:], k, v)
    torch.testing.assert_close(last, whole[:, :, -new:], atol=1e-5, rtol=0)
    top_left = F.scaled_dot_product_attention(q[:, :, -new:], k, v, is_causal=True, enable_gqa=True)
    assert ((top_left - last).abs().max() > 0.5) == (new < T)  # the fault: with one query, key 0 alone is seen


def test_dropout_acts_within_documents_too():
    q, k, _ = qkv(4)
    one_hot = torch.eye(T).expand(3, 4, T, T)  # values that show each attention weight
    torch.manual_seed(0)
    weights = Segments.over(numbers(LENGTHS)).attend(q, k, one_hot, dropout=0.5)
    assert not weights.masked_select(~Dense.over(numbers(LENGTHS)).allowed).any()
    kept = weights.masked_select(Dense.over(numbers(LENGTHS)).allowed).ne(0).float().mean()
    assert 0.4 < kept < 0.6


AMPERE, TURING = (8, 0), (7, 5)


@pytest.mark.parametrize(
    ("device", "compiling", "dtype", "head_dim", "dropout", "capability", "way"),
    [
        ("cpu", False, torch.float32, 64, 0.0, None, "segments"),
        ("cpu", False, torch.bfloat16, 64, 0.1, None, "segments"),
        ("cpu", True, torch.float32, 64, 0.0, None, "dense"),
        ("mps", False, torch.float32, 64, 0.0, None, "dense"),
        ("meta", False, torch.float32, 64, 0.0, None, "dense"),
        ("cuda", True, torch.bfloat16, 64, 0.0, AMPERE, "flex"),
        ("cuda", True, torch.float32, 64, 0.0, TURING, "flex"),
        ("cuda", True, torch.bfloat16, 8, 0.0, AMPERE, "dense"),
        ("cuda", True, torch.bfloat16, 64, 0.1, AMPERE, "dense"),
        ("cuda", False, torch.bfloat16, 64, 0.0, AMPERE, "varlen"),
        ("cuda", False, torch.float16, 64, 0.0, AMPERE, "varlen"),
        ("cuda", False, torch.float32, 64, 0.0, AMPERE, "dense"),
        ("cuda", False, torch.bfloat16, 64, 0.1, AMPERE, "dense"),
        ("cuda", False, torch.bfloat16, 12, 0.0, AMPERE, "dense"),
        ("cuda", False, torch.bfloat16, 264, 0.0, AMPERE, "dense"),
        ("cuda", False, torch.bfloat16, 64, 0.0, TURING, "dense"),
    ],
)
def test_the_fastest_way_that_the_device_has(device, compiling, dtype, head_dim, dropout, capability, way, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert fastest_way(torch.device(device), dtype, head_dim, dropout) == way


def test_under_autocast_the_dtype_of_attention_decides(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: AMPERE)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
    assert fastest_way(CUDA, torch.float32, 64, 0.0) == "varlen"


def test_the_call_to_varlen_is_one_that_this_torch_takes():
    borders = torch.tensor([0, 5, 12, 13, 19], dtype=torch.int32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(1, heads, T, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
        y = Varlen(borders, 7).attend(q, k, v)
        y.sum().backward()
    assert y.shape == (1, 4, T, 16)
    assert k.grad.shape == (1, 2, T, 16)
    assert "window_size" in inspect.signature(varlen.varlen_attn).parameters  # what this torch calls causal


def network(position: str = "rope", qk_norm: bool = True) -> GPT:
    config = ModelConfig(
        n_layer=2, n_head=4, n_kv_head=2, n_embd=64, block_size=T, vocab_size=17, position=position, qk_norm=qk_norm
    )
    return GPT(config, torch.Generator().manual_seed(0))


def batch(rows: list[list[int]], seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """inputs, targets, documents, positions of rows with documents of these lengths."""
    ids = torch.randint(0, 16, (len(rows), T + 1), generator=torch.Generator().manual_seed(seed))
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
    return ids[:, :-1], ids[:, 1:], numbers(rows), positions


DIFFERENT = [[[19]] * 2, [[1] * 19, [19]], [[3, 16], [18, 1]], [[2] * 9 + [1], [6, 6, 7]]]


def losses_without_recompilation(backend: str) -> None:
    model = network()
    compiled = torch.compile(loss_of, backend=backend, fullgraph=True)
    compiled(model, *batch(LENGTHS[:2])).backward()
    gradients: list[list[Tensor]] = []
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed, rows in enumerate(DIFFERENT):
            model.zero_grad()
            found = compiled(model, *batch(rows, seed))
            found.backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
            torch.testing.assert_close(found, loss_of(model, *batch(rows, seed)), atol=1e-4, rtol=1e-5)
    for seed, (rows, found) in enumerate(zip(DIFFERENT, gradients, strict=True)):
        model.zero_grad()
        loss_of(model, *batch(rows, seed)).backward()
        for one, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(one, parameter.grad, atol=1e-4, rtol=1e-4)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_other_borders_compile_nothing_anew():
    losses_without_recompilation("aot_eager")


def test_a_loop_over_documents_would_be_compiled_anew(monkeypatch):
    monkeypatch.setattr(masks, "fastest_way", lambda *facts: "segments")
    with pytest.raises(Exception, match=r"fail_on_recompile|[Rr]ecompil|data-dependent|tolist|nonzero"):
        losses_without_recompilation("aot_eager")


def logits_by_flex_without_recompilation(model: GPT, backend: str, monkeypatch) -> None:
    model.eval()
    with torch.no_grad():
        expected = [model(ids, documents, positions) for ids, _, documents, positions in map(batch, DIFFERENT)]
    monkeypatch.setattr(masks, "fastest_way", lambda *facts: "flex")
    compiled = torch.compile(GPT.forward, backend=backend, fullgraph=True)
    found = []
    with torch.no_grad():
        ids, _, *packed = batch(LENGTHS[:2])
        compiled(model, ids, *packed)
        with torch.compiler.set_stance("fail_on_recompile"):
            for rows in DIFFERENT:
                ids, _, *packed = batch(rows)
                found.append(compiled(model, ids, *packed))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_flex_attention_is_compiled_once_for_all_borders(monkeypatch):
    logits_by_flex_without_recompilation(network(), "aot_eager", monkeypatch)


@pytest.mark.soak  # a cold compilation takes half a minute
def test_compiled_by_inductor_both_stay_exact_without_recompilation(monkeypatch):
    if not can_compile(CPU):
        pytest.skip("no optional library: torch.compile needs a C++ compiler")
    losses_without_recompilation("inductor")
    # Without norm and rotation: where queries are computed and values a view of c_attn's output, Inductor of 2.13 reads
    # the values from the wrong place on a CPU. We never take FlexAttention there.
    logits_by_flex_without_recompilation(network("learned", qk_norm=False), "inductor", monkeypatch)


@pytest.mark.parametrize("way", ["dense", "segments"])
@pytest.mark.parametrize("position", ["learned", "rope"])
def test_case_41_42_no_gradient_crosses_a_border_of_documents(position, way, monkeypatch):
    monkeypatch.setattr(masks, "fastest_way", lambda *facts: way)
    model = network(position)
    rows = LENGTHS[:1]
    ids, _, documents, positions = batch(rows)
    inputs: list[Tensor] = []
    model.transformer["wte"].register_forward_hook(
        lambda module, ids, output: inputs.append(output.detach().requires_grad_()) or inputs[-1]
    )
    begins = [0, 5, 12, 13, 19]
    for start, end in pairwise(begins):
        logits = model(ids, documents, positions)
        logits[0, start:end].square().sum().backward()
        reached = inputs[-1].grad[0].ne(0).any(dim=-1)
        assert reached[start:end].all()
        assert not reached[:start].any()
        assert not reached[end:].any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: FlexAttention and FlashAttention train there alone")
@pytest.mark.parametrize("position", ["learned", "rope"])
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_the_ways_give_the_same_loss_and_gradient(position, compiled, monkeypatch):
    model = network(position).cuda()
    parts = [x.cuda() for x in batch(LENGTHS)]
    parts[1][2] = IGNORED
    losses, gradients = {}, {}
    for way in ("dense", "flex") if compiled else ("dense", "varlen"):
        monkeypatch.setattr(masks, "fastest_way", lambda *facts, way=way: way)
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = (torch.compile(loss_of) if compiled else loss_of)(model, *parts)
        loss.backward()
        losses[way] = loss.item()
        gradients[way] = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    one, other = gradients.values()
    assert losses["dense"] == pytest.approx(sum(losses.values()) - losses["dense"], rel=1e-3)
    assert (one - other).norm() < 0.02 * one.norm()


def test_without_documents_the_mask_is_causal():
    assert plan(None, torch.float32, 16, 0.0) == Causal()
    assert isinstance(plan(numbers(LENGTHS), torch.float32, 16, 0.0), Segments)
