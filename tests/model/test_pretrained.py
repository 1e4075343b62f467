import base64
import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from conftest import shared_file
from quatrain.errors import DataError
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.model.pretrained import (
    GPT2Layout,
    disk_shapes,
    layout_of,
    load_folder_tokenizer,
    load_model,
    parameter_count,
    read_config,
    save_model,
)
from quatrain.text.tokenizers import EOT_TEXT, ByteTokenizer, CharTokenizer, FileTokenizer, Tokenizer, gpt2

TINY = {"n_layer": 2, "n_head": 4, "n_embd": 16, "block_size": 12, "vocab_size": 11, "vocab_multiple": 64}
LETTERS = CharTokenizer("abcdefghij")  # 11 ids with eot
# Every switch that changes what is computed; the rest of GPT2LMHeadModel's are fixed.
POSITIONS, NORMS, MLPS = ("learned", "rope"), ("layernorm", "rmsnorm"), ("gelu_tanh", "swiglu", "relu2")
REST = list(product((0, 2), (False, True), (False, True), (False, True)))  # kv heads, qk_norm, bias, tied


def expressed_by_gpt2(config: ModelConfig) -> bool:
    return (
        (config.position, config.norm, config.bias, config.qk_norm) == ("learned", "layernorm", True, False)
        and config.mlp in ("gelu_tanh", "relu2")
        and config.n_kv_head in (0, 4)
    )


def random_model(**switches) -> GPT:
    """A model in which every weight, bias and norm differs from its initial value."""
    generator = torch.Generator().manual_seed(0)
    model = GPT(ModelConfig(**{**TINY, **switches}), generator).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
        for table in (model.transformer["wte"].weight, model.head_weight):
            table[model.config.vocab_size :] = 0
    return model


def saved(model: GPT, folder: Path, tokenizer: Tokenizer = LETTERS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, tokenizer, folder)
    return folder


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.randint(0, 11, (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output = model(ids)
    return output if isinstance(output, torch.Tensor) else output.logits


def read_json(path: Path):
    return json.loads(path.read_bytes())


@pytest.mark.parametrize("mlp", MLPS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("position", POSITIONS)
def test_every_combination_of_switches_comes_back_bit_for_bit(position, norm, mlp, tmp_path):
    for n_kv_head, qk_norm, bias, tied in REST:
        switches = {"n_kv_head": n_kv_head, "qk_norm": qk_norm, "bias": bias, "tied": tied}
        model = random_model(n_layer=1, position=position, norm=norm, mlp=mlp, **switches)
        folder = saved(model, tmp_path)
        back = load_model(folder)

        facts = read_json(folder / "config.json")
        assert facts["model_type"] == ("gpt2" if expressed_by_gpt2(model.config) else "quatrain"), switches
        assert facts["vocab_size"] == 11
        assert load_file(folder / "model.safetensors")["transformer.wte.weight"].shape == (11, 16)  # not the padded one
        assert replace(back.config, n_kv_head=back.config.kv_heads) == replace(
            model.config, n_kv_head=model.config.kv_heads
        )
        assert not back.training
        for (name, one), (other_name, other) in zip(model.named_parameters(), back.named_parameters(), strict=True):
            assert name == other_name
            assert torch.equal(one, other), (name, switches)  # with the padding rebuilt
        assert (back.head_weight is back.transformer["wte"].weight) == tied  # case_60
        assert torch.equal(logits_of(back), logits_of(model))


GPT2_TABLE = [
    {"mlp": mlp, "tied": tied, "n_kv_head": n_kv_head, "vocab_multiple": multiple, "dropout": dropout}
    for mlp, tied, n_kv_head, (multiple, dropout) in product(
        ("gelu_tanh", "relu2"), (True, False), (0, 4), ((64, 0.0), (1, 0.2))
    )
]


def test_logits_are_those_of_transformers_for_every_combination_that_gpt2_expresses(tmp_path):
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel

    for number, switches in enumerate(GPT2_TABLE):
        model = random_model(**switches)
        assert expressed_by_gpt2(model.config)
        folder = saved(model, tmp_path / str(number))
        theirs, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert isinstance(theirs, GPT2LMHeadModel)
        assert not any(info.values()), info  # nothing missing, unexpected or of another shape
        torch.testing.assert_close(logits_of(theirs), logits_of(model), atol=1e-5, rtol=0, msg=str(switches))
        assert theirs.config.bos_token_id == theirs.config.eos_token_id == LETTERS.eot
        assert theirs.generation_config.bos_token_id == theirs.generation_config.eos_token_id == LETTERS.eot


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh", "relu2"])
@pytest.mark.parametrize("n_inner", [None, 64])
def test_a_folder_of_transformers_gives_its_logits_here(activation, tied, n_inner, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 16, "n_positions": 12, "vocab_size": 11, "n_inner": n_inner}
    ids = {"bos_token_id": 10, "eos_token_id": 10}
    config = GPT2Config(**shape, **ids, activation_function=activation, tie_word_embeddings=tied)
    theirs = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.2)
    theirs.save_pretrained(tmp_path)

    model = load_model(tmp_path)
    torch.testing.assert_close(logits_of(model), logits_of(theirs), atol=1e-5, rtol=0)
    assert (model.head_weight is model.transformer["wte"].weight) == tied  # case_60
    again = load_file(saved(model, tmp_path / "again") / "model.safetensors")
    original = load_file(tmp_path / "model.safetensors")
    assert again.keys() == original.keys()
    assert all(torch.equal(again[name], original[name]) for name in original)


def test_case_60_a_loaded_model_stays_tied_in_bf16(tmp_path):
    model = load_model(saved(random_model(), tmp_path)).to(torch.bfloat16)
    assert model.head_weight is model.transformer["wte"].weight
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")


def test_a_missing_transpose_is_noticed(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    model = random_model()  # without attn.c_proj, which is square: no shape tells that it lies the wrong way round
    monkeypatch.setattr(GPT2Layout, "conv1d", ("c_attn.weight", "mlp.c_proj.weight", "c_fc.weight"))
    theirs = AutoModelForCausalLM.from_pretrained(saved(model, tmp_path))
    assert (logits_of(theirs) - logits_of(model)).abs().max() > 1e-2


def test_no_class_of_transformers_pretends_to_read_other_switches(tmp_path):
    from transformers import AutoModelForCausalLM

    saved(random_model(position="rope"), tmp_path)
    assert read_json(tmp_path / "config.json")["architectures"] == []
    with pytest.raises(ValueError, match="quatrain"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("switches", [{}, {"position": "rope", "tied": False, "mlp": "swiglu"}])
def test_disk_shapes_are_those_of_the_file(switches, tmp_path):
    model = random_model(**switches)
    weights = load_file(saved(model, tmp_path) / "model.safetensors")
    assert disk_shapes(model.config) == {name: tuple(weight.shape) for name, weight in weights.items()}


@pytest.mark.parametrize("switches", [{}, {"position": "rope", "tied": False}], ids=["gpt2", "quatrain"])
def test_eot_stands_in_config_and_generation_config(switches, tmp_path):
    saved(random_model(**switches), tmp_path)
    for name in ("config.json", "generation_config.json"):
        facts = read_json(tmp_path / name)
        assert facts["bos_token_id"] == facts["eos_token_id"] == LETTERS.eot


@pytest.mark.parametrize("switches", [{}, {"position": "rope", "tied": False}], ids=["gpt2", "quatrain"])
def test_the_same_model_gives_the_same_bytes(switches, tmp_path):
    one = saved(random_model(**switches), tmp_path / "one")
    other = saved(random_model(**switches), tmp_path / "a longer name")
    back = saved(load_model(one), tmp_path / "back")
    names = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in one.iterdir()) == names
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes() == (back / name).read_bytes(), name


TEXTS = [
    "Hello, I'm a language model,",
    "",
    EOT_TEXT,
    f"a{EOT_TEXT}b {EOT_TEXT}{EOT_TEXT} c",
    "<|endoftext|",
    "  two  spaces \n\n tab\t ",
    "don't 'll  ve\r\nx . , ! ?",
    "naïve café – “quotes” 日本語 🙂 e\u0301",
    "\x00\x01\u200b",
]
TOKENIZERS = {"char": lambda: CharTokenizer("".join(TEXTS)), "bytes": ByteTokenizer, "gpt2": gpt2}


@pytest.fixture(scope="module", params=[*TOKENIZERS, "char of a quatrain model"])
def folder_and_tokenizer(request, tmp_path_factory):
    tokenizer = TOKENIZERS[request.param.split()[0]]()
    position = "rope" if "quatrain" in request.param else "learned"
    shape = {"n_layer": 1, "n_head": 1, "n_embd": 4, "block_size": 64, "position": position}
    model = GPT(ModelConfig(vocab_size=tokenizer.vocab_size, **shape))
    return saved(model, tmp_path_factory.mktemp("tokenizer"), tokenizer), tokenizer


def test_auto_tokenizer_gives_our_ids_and_texts_also_for_the_marker_in_a_text(folder_and_tokenizer):
    from transformers import AutoTokenizer

    folder, tokenizer = folder_and_tokenizer
    theirs = AutoTokenizer.from_pretrained(folder)
    assert len(theirs) == tokenizer.vocab_size
    assert theirs.bos_token_id == theirs.eos_token_id == tokenizer.eot
    assert theirs.model_max_length == 64
    for text in TEXTS:
        ids = tokenizer.encode(text).tolist()
        assert theirs(text).input_ids == theirs.encode(text) == ids, text
        assert tokenizer.eot not in ids
        assert theirs.decode(ids) == text
        assert theirs.decode([*ids, tokenizer.eot]) == text + EOT_TEXT
        assert theirs.decode([*ids, tokenizer.eot], skip_special_tokens=True) == text


def test_the_tokenizers_library_gives_our_ids_if_told_to_spell_special_tokens(folder_and_tokenizer):
    from tokenizers import Tokenizer as Library

    folder, tokenizer = folder_and_tokenizer
    library = Library.from_file(str(folder / "tokenizer.json"))
    marked = f"a{EOT_TEXT}b"
    # The limit: tokenizer.json cannot hold this switch, so by default the marker in a text becomes eot.
    assert library.encode(marked).ids.count(tokenizer.eot) == 1
    library.encode_special_tokens = True
    for text in [*TEXTS, marked]:
        assert library.encode(text).ids == tokenizer.encode(text).tolist(), text
        assert library.decode(library.encode(text).ids, skip_special_tokens=False) == text


def test_the_tokenizers_library_drops_characters_that_char_has_never_seen_where_we_refuse_them(tmp_path):
    from tokenizers import Tokenizer as Library

    library = Library.from_str(LETTERS.json.decode())
    assert library.encode("aZb").ids == [0, 1]  # the other limit
    with pytest.raises(DataError, match="'Z'"):
        LETTERS.encode("aZb")


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_the_tokenizers_library_agrees_on_any_text(name):
    from tokenizers import Tokenizer as Library

    tokenizer = TOKENIZERS[name]()
    library = Library.from_str(tokenizer.json.decode())
    library.encode_special_tokens = True

    @given(st.lists(st.one_of(st.text(), st.sampled_from([EOT_TEXT, "  ", "'s", "\n\n", "12"]))).map("".join))
    def agree(text: str) -> None:
        assert library.encode(text).ids == tokenizer.encode(text).tolist()

    agree()


def test_the_tokenizer_of_a_folder_comes_back_as_it_was(folder_and_tokenizer):
    folder, tokenizer = folder_and_tokenizer
    back = load_folder_tokenizer(folder)
    assert type(back) is type(tokenizer)
    assert (folder / "tokenizer.json").read_bytes() == tokenizer.json == back.json
    assert (back.eot, back.vocab_size) == (tokenizer.eot, tokenizer.vocab_size)


def test_a_tokenizer_file_with_a_separator_of_its_own_keeps_it(tmp_path):
    from transformers import AutoTokenizer

    content = ByteTokenizer().json.replace(EOT_TEXT.encode(), b"<sep>")
    tokenizer = FileTokenizer(content, "somewhere/tokenizer.json", "<sep>")
    folder = saved(random_model(vocab_size=257), tmp_path, tokenizer)
    assert load_folder_tokenizer(folder).eot == tokenizer.eot == 256
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.eos_token_id == 256
    assert theirs("a<sep>").input_ids == tokenizer.encode("a<sep>").tolist()


def edited(tmp_path: Path, entries: dict, **switches) -> Path:
    """A saved folder with entries of its config.json replaced; None: taken out."""
    folder = saved(random_model(**switches), tmp_path / "edited")
    facts = read_json(folder / "config.json") | entries
    facts = {key: value for key, value in facts.items() if entries.get(key, value) is not None}
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        (
            {"activation_function": "gelu"},
            "config.json: activation_function is 'gelu', expected one of gelu_pytorch_tanh, gelu_new, relu2",
        ),
        ({"layer_norm_epsilon": 1e-6}, "config.json: layer_norm_epsilon is 1e-06, .*1e-05"),
        ({"n_inner": 32}, "n_inner is 32.*64"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is True"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"attn_pdrop": 0.3}, "config.json: .*'attn_pdrop': 0.3.* differ; a GPT here has one dropout"),
        ({"n_head": None}, "no entry 'n_head'"),
        ({"n_positions": None}, "no entry 'n_positions'"),
        ({"vocab_size": None}, "no entry 'vocab_size'"),
        ({"model_type": "mamba"}, "config.json: model_type is 'mamba', expected one of: gpt2, quatrain"),
        ({"model_type": None}, "config.json: model_type is None, expected one of: gpt2, quatrain"),
        ({"n_layer": 3}, r"missing: \['transformer\.h\.2\."),
        ({"n_layer": 1}, r"not known: \['transformer\.h\.1\."),
        ({"vocab_size": 12}, r"wte\.weight has shape \(11, 16\), expected \(12, 16\)"),
        ({"n_positions": 13}, r"wpe\.weight has shape \(12, 16\), expected \(13, 16\)"),
    ],
)
def test_a_config_that_no_model_here_can_be_is_refused_by_entry(entries, named, tmp_path):
    with pytest.raises(DataError, match=named):
        load_model(edited(tmp_path, entries))


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"soft_cap": 30.0}, "config.json: 'soft_cap' is not a switch that this quatrain knows; a newer one may have"),
        ({"qk_norm": None}, "config.json: no entry 'qk_norm'"),
        ({"n_layer": "two"}, "config.json: n_layer is 'two', expected a whole number"),
        ({"n_layer": 2.5}, "config.json: n_layer is 2.5, expected a whole number"),
        ({"bias": 1}, "config.json: bias is 1, expected true or false"),
        ({"position": "sine"}, "config.json: position is 'sine', expected one of: learned, rope"),
        ({"dropout": 1.5}, "config.json: dropout is 1.5, it must be at least 0 and below 1"),
        ({"vocab_size": 0}, "config.json: vocab_size is 0, expected at least 1"),
    ],
)
def test_a_quatrain_config_holds_every_switch_and_no_other(entries, named, tmp_path):
    with pytest.raises(DataError, match=named):
        read_config(edited(tmp_path, entries, position="rope"))


@pytest.mark.parametrize("content", ["", "[]", "3", "{"])
def test_a_config_json_that_is_no_description_is_one_message(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(DataError, match=r"config\.json: (not a model's description|model_type is None)"):
        read_config(tmp_path)


@pytest.mark.parametrize("switches", [{}, {"position": "rope", "mlp": "swiglu", "n_kv_head": 2}])
def test_read_config_gives_the_switches_and_the_layout_without_the_weights(switches, tmp_path):
    model = random_model(**switches)
    folder = saved(model, tmp_path)
    (folder / "model.safetensors").unlink()
    config, layout = read_config(folder)
    assert replace(config, n_kv_head=config.kv_heads) == replace(model.config, n_kv_head=model.config.kv_heads)
    assert layout is layout_of(model.config)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_over_the_true_vocabulary_and_tied_ones_once(tied):
    model = random_model(tied=tied)
    padding = (model.config.padded_vocab_size - 11) * 16 * (1 if tied else 2)
    assert parameter_count(model.config) == sum(p.numel() for p in model.parameters()) - padding


C_ATTN = "transformer.h.0.attn.c_attn.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda weights: weights.pop(C_ATTN), rf"missing: \['{C_ATTN}'\]"),
        (lambda weights: weights.update({"soft_cap": torch.zeros(1)}), r"not known: \['soft_cap'\]"),
        (lambda weights: weights.update({C_ATTN: torch.zeros(16, 47)}), rf"{C_ATTN} has shape \(47, 16\)"),
        (lambda weights: weights.update({C_ATTN: weights[C_ATTN].t().contiguous()}), rf"{C_ATTN} has shape \(16, 48\)"),
        (lambda weights: weights.update({C_ATTN: torch.zeros(48)}), rf"{C_ATTN} has shape \(48,\)"),
    ],
    ids=["missing", "unknown", "too small", "transposed", "flat"],
)
def test_weights_that_do_not_fit_are_refused_by_name(change, named, tmp_path):
    folder = saved(random_model(), tmp_path)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(DataError, match=named):
        load_model(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("damage", ["absent", "cut"])
def test_a_folder_with_a_file_absent_or_cut_is_refused_by_name(name, damage, tmp_path):
    folder = saved(random_model(), tmp_path)
    if damage == "absent":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes((folder / name).read_bytes()[:40])
    with pytest.raises(DataError, match=str(folder)):
        load_folder_tokenizer(folder) if "tokenizer" in name else load_model(folder)


def test_weights_in_half_precision_are_read_into_fp32(tmp_path):
    folder = saved(random_model(), tmp_path)
    weights = {name: weight.to(torch.bfloat16) for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    model = load_model(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.transformer["wpe"].weight, weights["transformer.wpe.weight"].float())


def tensors(name: str) -> dict[str, torch.Tensor]:
    """The tensors of a JSON file that holds them as base64 of little-endian fp32."""
    entries = read_json(shared_file(f"gpt_nano_sort/{name}.json"))
    return {
        key: torch.from_numpy(np.frombuffer(base64.b64decode(entry["data"]), dtype="<f4").copy()).view(entry["shape"])
        for key, entry in entries.items()
        if isinstance(entry, dict) and "data" in entry
    }


@pytest.fixture(scope="module")
def gpt_nano(tmp_path_factory):
    """Weights of another GPT-2 implementation as a folder in transformers' layout: (in, out), no mask buffers."""
    folder = tmp_path_factory.mktemp("gpt_nano")
    weights = {
        name: weight for name, weight in tensors("gpt-nano-sort-model").items() if not name.endswith(".attn.bias")
    }
    linear = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    on_disk = {name: weight.t().contiguous() if name.endswith(linear) else weight for name, weight in weights.items()}
    save_file(on_disk, folder / "model.safetensors")
    shape = {"n_layer": 3, "n_head": 3, "n_embd": 48, "n_positions": 11, "vocab_size": 3}
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "tie_word_embeddings": False, **shape}
    (folder / "config.json").write_text(json.dumps({**config, "bos_token_id": None, "eos_token_id": None}))
    return folder


def test_real_weights_give_their_recorded_activations_and_logits(gpt_nano):
    recorded = tensors("gpt-nano-sort-t0-partials")
    model, seen = load_model(gpt_nano), {}
    modules = {f"block{number}": block for number, block in enumerate(model.transformer["h"])}
    for name, module in {**modules, "ln_f": model.transformer["ln_f"]}.items():
        module.register_forward_hook(
            lambda module, inputs, output, name=name: seen.update({name: output[0] if name != "ln_f" else output})
        )
    with torch.no_grad():
        seen["lm_head"] = model(recorded["idx"].long())
    assert list(seen) == ["block0", "block1", "block2", "ln_f", "lm_head"]
    for name, found in seen.items():
        torch.testing.assert_close(found, recorded[name], atol=1e-5, rtol=0, msg=lambda text, name=name: name + text)


def test_real_weights_give_the_logits_of_transformers(gpt_nano):
    from transformers import AutoModelForCausalLM

    ids = tensors("gpt-nano-sort-t0-partials")["idx"].long()
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(gpt_nano)(ids).logits
        torch.testing.assert_close(load_model(gpt_nano)(ids), theirs, atol=1e-5, rtol=0)
