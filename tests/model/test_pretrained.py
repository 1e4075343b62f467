import base64
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from folders import LETTERS, LLAMA, QWEN3, logits_of, random_model, read_json, saved
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from conftest import shared_file
from quatrain.errors import DataError
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.model.layouts import layout_of
from quatrain.model.pretrained import (
    disk_shapes,
    disk_weights,
    load_folder_tokenizer,
    load_model,
    parameter_count,
    read_config,
    write_tensors,
)
from quatrain.text.tokenizers import EOT_TEXT, ByteTokenizer, CharTokenizer, FileTokenizer, gpt2


def test_case_60_a_loaded_model_stays_tied_in_bf16(tmp_path):
    model = load_model(saved(random_model(), tmp_path)).to(torch.bfloat16)
    assert model.head_weight is model.transformer["wte"].weight
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize("switches", [{}, LLAMA, QWEN3, {"position": "rope", "tied": False}])
def test_disk_shapes_are_those_of_the_file(switches, tmp_path):
    model = random_model(**switches)
    weights = load_file(saved(model, tmp_path) / "model.safetensors")
    assert disk_shapes(model.config) == {name: tuple(weight.shape) for name, weight in weights.items()}


@pytest.mark.parametrize(
    "switches", [{}, LLAMA, QWEN3, {"position": "rope"}], ids=["gpt2", "llama", "qwen3", "quatrain"]
)
def test_eot_stands_in_config_and_generation_config(switches, tmp_path):
    saved(random_model(**switches), tmp_path)
    for name in ("config.json", "generation_config.json"):
        facts = read_json(tmp_path / name)
        assert facts["bos_token_id"] == facts["eos_token_id"] == LETTERS.eot


@pytest.mark.parametrize(
    "switches", [{}, LLAMA, QWEN3, {"position": "rope"}], ids=["gpt2", "llama", "qwen3", "quatrain"]
)
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


@pytest.fixture(scope="module", params=[*TOKENIZERS, "char quatrain", "gpt2 llama", "char llama", "bytes qwen3"])
def folder_and_tokenizer(request, tmp_path_factory):
    tokenizer = TOKENIZERS[request.param.split()[0]]()
    switches = {"quatrain": {"position": "rope"}, "llama": LLAMA, "qwen3": QWEN3}.get(request.param.split()[-1], {})
    shape = {"n_layer": 1, "n_head": 1, "n_embd": 4, "block_size": 64}
    model = GPT(ModelConfig(vocab_size=tokenizer.vocab_size, **shape, **switches))
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


@pytest.mark.parametrize("content", ["", "[]", "3", "{"])
def test_a_config_json_that_is_no_description_is_one_message(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(DataError, match=r"config\.json: (not a model's description|model_type is None)"):
        read_config(tmp_path)


@pytest.mark.parametrize("switches", [{}, LLAMA | {"n_kv_head": 2}, {"position": "rope", "n_kv_head": 2}])
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
        (lambda weights: weights.update({C_ATTN: torch.zeros(16, 47)}), rf"{C_ATTN} has shape \(16, 47\)"),
        (lambda weights: weights.update({C_ATTN: weights[C_ATTN].t().contiguous()}), rf"{C_ATTN} has shape \(48, 16\)"),
        (lambda weights: weights.update({C_ATTN: torch.zeros(48)}), rf"{C_ATTN} has shape \(48,\)"),
        (lambda weights: weights.update({C_ATTN: torch.zeros(16, 48).char()}), rf"{C_ATTN} is torch.int8, expected"),
    ],
    ids=["missing", "unknown", "too small", "transposed", "flat", "quantised"],
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("switches", [{}, LLAMA, QWEN3], ids=["gpt2", "llama", "qwen3"])
def test_weights_in_half_precision_are_read_into_fp32(switches, dtype, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = saved(random_model(**switches), tmp_path / "fp32")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    theirs.save_pretrained(tmp_path / "half")
    model = load_model(tmp_path / "half")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    torch.testing.assert_close(logits_of(model), logits_of(theirs.float()), atol=1e-5, rtol=0)
    found = load_file(tmp_path / "half" / "model.safetensors")
    assert {weight.dtype for weight in found.values()} == {dtype}
    assert all(torch.equal(weight, found[name].float()) for name, weight in disk_weights(model).items())


@pytest.fixture(params=[{}, LLAMA, QWEN3], ids=["gpt2", "llama", "qwen3"])
def sharded(request, tmp_path):
    """A model, and its folder as transformers writes one with weights in several files."""
    from transformers import AutoModelForCausalLM

    model = random_model(**request.param)
    theirs = AutoModelForCausalLM.from_pretrained(saved(model, tmp_path / "whole"))
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="8KB")
    return model, tmp_path / "sharded"


def test_weights_in_several_files_are_read_as_their_index_says(sharded):
    model, folder = sharded
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert torch.equal(logits_of(load_model(folder)), logits_of(model))
    newest = saved(random_model(dropout=0.1), folder)  # a whole file beside the index is the one, as in transformers
    assert torch.equal(logits_of(load_model(newest)), logits_of(random_model()))


@pytest.mark.parametrize(
    ("weight_map", "named"),
    [
        ({"w": "../elsewhere.safetensors"}, r"index\.json: '\.\./elsewhere\.safetensors' is not the name of a"),
        ({"w": "pytorch_model.bin"}, r"index\.json: 'pytorch_model\.bin' is not the name of a \.safetensors file"),
        ({"w": "absent.safetensors"}, r"absent\.safetensors: cannot be read"),
        ({"w": 3}, r"index\.json: '3' is not the name"),
        ({"w": 3, "v": "absent.safetensors"}, r"index\.json: "),
        ([], r"index\.json: no weight_map"),
        (None, r"index\.json: no weight_map"),
    ],
)
def test_an_index_that_leads_nowhere_is_refused(weight_map, named, tmp_path):
    folder = saved(random_model(), tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(DataError, match=named):
        load_model(folder)


def test_a_missing_file_of_several_is_refused_by_name(sharded):
    _, folder = sharded
    first = min(folder.glob("model-*.safetensors"))
    first.unlink()
    with pytest.raises(DataError, match=rf"{first.name}: cannot be read"):
        load_model(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt"])
def test_weights_as_a_pickle_alone_are_refused_by_name_and_not_opened(name, tmp_path):
    folder = saved(random_model(), tmp_path)
    (folder / name).write_bytes(b"not even a pickle")
    load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match=rf"{name} is a pickle, which can run any code .*safetensors"):
        load_model(folder)


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


def test_tensors_are_written_to_the_bytes_that_save_gives(tmp_path):
    drawn = {name: torch.randn(3, 5, generator=torch.Generator().manual_seed(0)) for name in ("b", "a")}
    write_tensors(tmp_path / "file", drawn, {"format": "pt"})
    assert (tmp_path / "file").read_bytes() == save(drawn, metadata={"format": "pt"})


def test_a_write_that_the_system_refuses_is_an_error_of_the_system(tmp_path):
    with pytest.raises(OSError, match="No such file or directory") as raised:
        write_tensors(tmp_path / "absent" / "file", {"a": torch.zeros(2)})
    assert raised.value.errno == 2


def test_reading_a_model_draws_no_random_numbers(tmp_path):
    """A page reads checkpoints beside a training in the same process, whose dropout must not notice."""
    saved(random_model(), tmp_path)
    before = torch.get_rng_state()
    loaded = load_model(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert parameter_count(loaded.config) > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert not loaded.head_weight[loaded.config.vocab_size :].any()
