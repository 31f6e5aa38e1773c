"""The command line: what stands on stdout and stderr, exit statuses, and drawings that no token can break out of."""

from __future__ import annotations

import importlib.util
import io
import json
import unicodedata

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import hf_treespec
from hf_treespec import DemoModelError, RoundRecord, __version__, cli, demo, loading, terminal

TEMPLATE = "{% for message in messages %}<user>{{ message['content'] }}{% endfor %}{{ '<model>' }}"
HOSTILE = ["[bold]x[/bold]", "\x1b[31mred", "\u202eabc", "\x07\x08", "\u0301", "\r\n", "\u2066\u2028", "\x9b2J"]
PROMPT = "abc abd abc abe abc"


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes, four special tokens, and hostile ones."""
    tokens = ["<end>", "<user>", "<model>", *bytes_to_unicode().values()]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:3]])
    backend.add_tokens([AddedToken(token, normalized=False) for token in HOSTILE])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<end>", chat_template=TEMPLATE
    )


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def embedded(model, tokenizer, monkeypatch):
    """The tiny model in place of the embedded one; a GPU, where there is one, left alone; a fixed width."""
    monkeypatch.setattr(loading, "demo_model", lambda **options: (model, tokenizer))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("COLUMNS", "100")


def plain_text(model, tokenizer, prompt, *, tokens=128, raw=False, **sampling):
    text = prompt if raw else f"<user>{prompt}<model>"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **sampling)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def steering(text):
    """The characters of `text` that could steer a terminal."""
    return [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]


def record(*, tokens, parents, path, committed, bonus):
    tokens, parents = np.array(tokens), np.array(parents)
    return RoundRecord(1, tokens, parents, np.ones(len(tokens), np.float32), path, committed, bonus, {})


def drawn(lines):
    return ["".join(text for text, _ in line) for line in lines]


# ---------------------------------------------------------------- generate


@pytest.mark.parametrize("raw", [False, True])
def test_generate_prints_what_plain_generate_gives(capsys, model, tokenizer, raw):
    assert cli.main(["generate", PROMPT, *["--raw"] * raw]) == 0
    out, err = capsys.readouterr()
    assert out == plain_text(model, tokenizer, PROMPT, raw=raw, do_sample=False) + "\n"
    assert len(err.splitlines()) == 1
    assert "tokens per round" in err


def test_generate_ends_with_the_text(capsys, model, tokenizer, monkeypatch):
    ids = tokenizer(f"<user>{PROMPT}<model>", return_tensors="pt")["input_ids"]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=128, do_sample=False)
    monkeypatch.setattr(model.generation_config, "eos_token_id", int(out[0, ids.shape[1] + 30]))
    expected = plain_text(model, tokenizer, PROMPT, do_sample=False)
    assert cli.main(["generate", PROMPT]) == 0
    assert capsys.readouterr().out == expected + "\n"


def test_generate_samples_by_seed(capsys, model, tokenizer):
    for seed in (3, 4):
        options = ["--temperature", "1.5", "--top-p", "0.9", "--top-k", "40", "--max-new-tokens", "40"]
        assert cli.main(["generate", PROMPT, "--seed", str(seed), *options]) == 0
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "top_k": 40}
        expected = plain_text(model, tokenizer, PROMPT, tokens=40, **sampling)
        assert capsys.readouterr().out == expected + "\n"


def test_generate_with_folders_and_options(capsys, folder, model, tokenizer):
    options = ["--max-nodes", "6", "--max-depth", "3", "--max-children", "2", "--drafter", "model", "--no-fallback"]
    assert cli.main(["generate", PROMPT, "--model", folder, "--assistant-model", folder, *options, "--rounds"]) == 0
    out, _ = capsys.readouterr()
    result = json.loads(out)
    assert result["text"] == plain_text(model, tokenizer, PROMPT, do_sample=False)
    assert result["stats"]["drafter"] == "model"
    assert result["model"] == folder
    sizes = [len(r["tokens"]) for r in result["stats"]["records"]]
    assert 1 < max(sizes) <= 7


def test_generate_streams_as_rounds_come(model, tokenizer, monkeypatch):
    class Out(io.StringIO):
        pieces = []  # noqa: RUF012

        def write(self, text):
            self.pieces.append(text)
            return super().write(text)

    out = Out()
    monkeypatch.setattr("sys.stdout", out)
    assert cli.main(["generate", PROMPT]) == 0
    assert len([piece for piece in out.pieces if piece.strip()]) > 3


def test_on_a_terminal_a_text_cannot_steer(capsys, monkeypatch, tokenizer):
    text = f"one{HOSTILE[1]}{HOSTILE[2]}\ntwo"
    monkeypatch.setattr(tokenizer.__class__, "decode", lambda self, ids, **options: text if len(ids) > 3 else "")
    monkeypatch.setattr(cli.sys.stdout, "isatty", lambda: True)
    assert cli.main(["generate", PROMPT]) == 0
    assert capsys.readouterr().out == "one\\x1b[31mred\\u202eabc\ntwo\n"


# ---------------------------------------------------------------- demo


def test_json_is_one_document(capsys, model, tokenizer):
    assert cli.main(["demo", PROMPT, "--json", "--repeats", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    result = json.loads(out)
    assert result["same_text"] is True
    assert result["prompt"] == PROMPT
    machine = result["machine"]
    assert (machine["device"], machine["dtype"], machine["torch"]) == ("cpu", "float32", torch.__version__)
    assert machine["threads"] == torch.get_num_threads()
    assert [arm["name"] for arm in result["arms"]] == ["plain", "chain", "tree"]
    plain, chain, tree = result["arms"]
    for arm in result["arms"]:
        assert arm["same_text"] is True
        assert arm["first_difference"] is None
        assert arm["text"] == plain_text(model, tokenizer, PROMPT, do_sample=False)
        assert len(arm["seconds_of_each_run"]) == 2
        assert arm["tokens"] == 1 + round(arm["rounds"] * arm["tokens_per_round"])
        assert arm["tokens_per_second"] == pytest.approx(arm["tokens"] / arm["seconds"])
        assert arm["speedup"] == pytest.approx(plain["seconds"] / arm["seconds"])
    assert plain["stats"] is None and plain["rounds"] == plain["tokens"] - 1
    assert max(chain["rounds"], tree["rounds"]) <= plain["rounds"]
    assert "records" not in tree["stats"]


def test_json_with_rounds_holds_every_record(capsys):
    assert cli.main(["demo", PROMPT, "--rounds", "--max-nodes", "5", "--no-fallback"]) == 0
    plain, chain, tree = json.loads(capsys.readouterr().out)["arms"]
    for arm in (chain, tree):
        records = arm["stats"]["records"]
        assert sum(len(r["committed"]) for r in records) == arm["tokens"] == plain["tokens"]
        assert max(len(r["tokens"]) for r in records) == 6
    assert all(r["parents"] == list(range(-1, len(r["parents"]) - 1)) for r in chain["stats"]["records"])


def test_plain_output(capsys):
    assert cli.main(["demo", PROMPT, "--no-fallback"]) == 0  # stdout is not a terminal here
    out, err = capsys.readouterr()
    assert err == ""
    assert not steering(out)
    assert PROMPT in out
    assert all(mark in out for mark in ("✓", "◆", "·"))
    for word in ("plain", "chain", "tree", "tokens/round", "tokens/s", "speed-up", "same text", "yes"):
        assert word in out
    assert 1 <= out.count("kept + ") <= demo.SHOWN_ROUNDS


def test_one_token_is_a_demo_too(capsys):
    assert cli.main(["demo", PROMPT, "--plain", "--max-new-tokens", "1"]) == 0
    assert "yes" in capsys.readouterr().out


def test_terminal_output_is_drawn_by_rich(capsys, monkeypatch):
    monkeypatch.setattr(cli.sys.stdout, "isatty", lambda: True)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert cli.main(["demo", PROMPT, "--speed", "1e9"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[1;32m" in out  # bold green: kept
    assert "Tokens after 2 forward passes" in out  # a frame of the replay
    assert cli.main(["demo", PROMPT, "--no-animation"]) == 0
    out = capsys.readouterr().out
    assert "Tokens after" not in out
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.main(["demo", PROMPT, "--no-animation"]) == 0
    assert "\x1b[1;32m" not in capsys.readouterr().out
    monkeypatch.setenv("TERM", "dumb")
    assert cli.main(["demo", PROMPT]) == 0
    assert not steering(capsys.readouterr().out)


class Forger:
    """`generate` that changes the fifth token where a tree decodes."""

    def __init__(self, model):
        self.generate, self.forged = model.generate, 0

    def __call__(self, *args, **options):
        output = self.generate(*args, **options)
        if options.get("tree_spec") and options["max_new_tokens"] > demo.WARM_UP_TOKENS:
            place = options["input_ids"].shape[1] + 4
            output.sequences[0, place] = (output.sequences[0, place] + 1) % 200
        return output


def test_different_texts_are_an_error_in_float32(capsys, model, monkeypatch):
    monkeypatch.setattr(model, "generate", Forger(model))
    assert cli.main(["demo", PROMPT, "--plain"]) == 1
    out, err = capsys.readouterr()
    assert "NO, token 4" in out
    assert "THE TEXTS DIFFER: chain at token 4, tree at token 4" in err
    assert cli.main(["demo", PROMPT, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["same_text"] is False
    assert [arm["first_difference"] for arm in result["arms"]] == [None, 4, 4]


def test_different_texts_are_told_in_half_precision(capsys, model, tokenizer, monkeypatch):
    half = LlamaForCausalLM(model.config).to(torch.bfloat16).eval()
    monkeypatch.setattr(loading, "demo_model", lambda **options: (half, tokenizer))
    monkeypatch.setattr(half, "generate", Forger(half))
    assert cli.main(["demo", PROMPT, "--plain", "--dtype", "bfloat16"]) == 0
    out, err = capsys.readouterr()
    assert "NO, token 4" in out
    assert "near-ties can flip" in out
    assert err == ""


def test_first_difference():
    assert demo._first_difference([1, 2, 3], [1, 2, 3]) is None
    assert demo._first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert demo._first_difference([1, 2, 3], [1, 2]) == 2
    assert demo._first_difference([1, 2], [1, 2, 3]) == 2


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (["demo", "--dtype", "int7"], "int7"),
        (["demo", "--max-nodes", "-1"], "max_nodes=-1"),
        (["demo", "--max-children", "many"], "many"),
        (["demo", "--drafter", "ngran"], "ngran"),
        (["demo", "--repeats", "0"], "0 is out of range"),
        (["demo", "--speed", "nan"], "nan"),
        (["demo", "--device", "toaster"], "toaster"),
        (["demo", "--device", "cuda:99"], "cuda:99"),
        (["generate", ""], "empty"),
        (["generate", "a\udcffb"], "udcff"),
        (["generate"], "prompt"),
        (["generate", "x", "--model", "./no-such-folder"], "./no-such-folder"),
        (["generate", "x", "--top-p", "0.5"], "--top-p"),
        (["generate", "x", "--temperature", "1", "--top-p", "1.5"], "1.5"),
        (["generate", "x", "--temperature", "-1"], "-1"),
        (["generate", "x", "--bogus"], "--bogus"),
        (["bogus"], "bogus"),
    ],
)
def test_mistakes_are_one_line(capsys, line, named):
    assert cli.main(line) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hf-treespec: ")
    assert len(err.splitlines()) == 1
    assert named in err


def test_a_folder_without_a_model(capsys, tmp_path):
    assert cli.main(["generate", "x", "--model", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert str(tmp_path) in err
    assert len(err.splitlines()) == 1


def test_an_assistant_with_another_tokenizer(capsys, folder, tmp_path, model, tokenizer):
    """`auto` translates its drafts; the demo and the profile hand both tokenizers over likewise."""
    letters = {token: i for i, token in enumerate(sorted(bytes_to_unicode().values(), reverse=True))}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    assistant = ["--assistant-model", str(tmp_path), "--model", folder, "--no-fallback"]
    assert cli.main(["generate", PROMPT, *assistant, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == plain_text(model, tokenizer, PROMPT, do_sample=False)
    assert result["stats"]["drafter"] == "universal"
    assert cli.main(["demo", PROMPT, *assistant, "--json", "--repeats", "1"]) == 0
    arms = json.loads(capsys.readouterr().out)["arms"]
    assert {arm["stats"]["drafter"] for arm in arms if arm["stats"]} == {"universal"}


def test_an_assistant_for_a_drafter_that_has_no_use_for_it(capsys, folder):
    assert cli.main(["generate", "x", "--drafter", "ngram", "--assistant-model", folder]) == 2
    assert capsys.readouterr().err.startswith("hf-treespec: assistant_model=")


def without(package):
    real = importlib.util.find_spec
    return lambda name, *rest: None if name == package else real(name, *rest)


def test_missing_packages_are_named(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", without("bitsandbytes"))
    assert cli.main(["demo", "--nf4"]) == 2
    assert "pip install hf-treespec[quant]" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", without("rich"))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(cli.sys.stdout, "isatty", lambda: True)
    assert cli.main(["demo"]) == 2
    assert "pip install hf-treespec[demo]" in capsys.readouterr().err
    assert cli.main(["demo", PROMPT, "--plain"]) == 0
    assert cli.main(["generate", PROMPT, "--max-new-tokens", "4"]) == 0


@pytest.mark.parametrize(
    ("raised", "status", "told"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (DemoModelError("two ways:\n one, two"), 2, "two ways: one, two"),
        (torch.OutOfMemoryError("too big"), 2, "out of memory: too big"),
    ],
)
def test_what_may_be_raised(capsys, monkeypatch, raised, status, told):
    def raising(**options):
        raise raised

    monkeypatch.setattr(loading, "demo_model", raising)
    assert cli.main(["generate", "x"]) == status
    assert capsys.readouterr().err == f"hf-treespec: {told}\n"


def test_a_library_that_prints_while_loading(capsys, model, tokenizer, monkeypatch):
    def chatty(**options):
        print("Hello from a library")
        return model, tokenizer

    monkeypatch.setattr(loading, "demo_model", chatty)
    assert cli.main(["demo", PROMPT, "--json", "--max-new-tokens", "4"]) == 0
    out, err = capsys.readouterr()
    json.loads(out)
    assert err == "Hello from a library\n"


def test_help_version_drafters(capsys):
    assert cli.main([]) == 0
    assert "usage: hf-treespec" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit:
        cli.main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"hf-treespec {__version__}\n"
    assert cli.main(["drafters"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ngram") and len(line.split()) > 3 for line in lines)


# ---------------------------------------------------------------- drawing


def test_a_tree_reads_from_left_to_right():
    words = dict(enumerate([" root", " a", " b", " c", " d", " e", " own"]))
    round_ = record(
        tokens=[0, 1, 2, 3, 4, 5], parents=[-1, 0, 0, 2, 2, 1], path=[0, 2, 3], committed=[2, 3, 6], bonus=6
    )
    assert drawn(terminal.tree_lines(round_, words.__getitem__, "the root", 80)) == [
        "the root ┬ ✓ b ┬ ✓ c ◆ own",
        "         │     └ · d",
        "         └ · a · e",
    ]
    undecided = drawn(terminal.tree_lines(round_, words.__getitem__, "the root", 80, decided=False))
    assert undecided == ["the root ┬ ? b ┬ ? c", "         │     └ ? d", "         └ ? a ? e"]


def test_a_text_that_ends_on_a_drafted_token():
    """The last token, the end of text for instance, is in no path: nothing follows it. It is kept all the same."""
    round_ = record(tokens=[0, 1, 2, 3], parents=[-1, 0, 1, 1], path=[0, 1], committed=[1, 2], bonus=None)
    assert drawn(terminal.tree_lines(round_, "rabc".__getitem__, "r", 80)) == ["r ✓a ┬ ✓b", "     └ ·c"]


def test_a_long_path_goes_on_in_the_next_line_and_a_dropped_one_is_cut():
    n = 30
    tokens = list(range(2 * n + 1))
    parents = [-1, *range(n), 0, *range(n + 1, 2 * n)]
    round_ = record(tokens=tokens, parents=parents, path=list(range(n + 1)), committed=[*range(1, n + 1), 99], bonus=99)
    lines = drawn(terminal.tree_lines(round_, lambda token: f" t{token}", "root", 60))
    text = " ".join(lines)
    assert all(f"✓ t{token}" in text for token in range(1, n + 1))
    assert "◆ t99" in text
    assert max(map(len, lines)) <= 60
    assert sum(line.endswith("…") for line in lines) == 1
    assert sum("↳" in line for line in lines) == sum("→" in line for line in lines) >= 2


@pytest.mark.parametrize("width", [1, 10, 30])
def test_narrow_screens(width):
    words = [" root", " a very long token indeed", "日本語", " c"]
    round_ = record(tokens=[0, 1, 2, 3], parents=[-1, 0, 1, 1], path=[0, 1, 2], committed=[1, 2, 3], bonus=3)
    lines = drawn(terminal.tree_lines(round_, words.__getitem__, "the text so far", width))
    assert all(terminal.columns(line) <= max(width, 1) for line in lines)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_tokens_are_inert(text):
    pytest.importorskip("rich")
    from rich.console import Console

    round_ = record(tokens=[0, 1, 2], parents=[-1, 0, 0], path=[0, 1], committed=[1, 3], bonus=3)
    lines = terminal.tree_lines(round_, lambda token: text, text + text, 200)
    assert not steering("".join(drawn(lines)))
    assert len(lines) == 2
    screen = terminal.RichScreen()
    file = io.StringIO()
    screen.console = Console(file=file, width=200, force_terminal=True, color_system=None, markup=False)
    screen.show(lines)
    assert not steering(file.getvalue().replace("\x1b[0m", "").replace("\x1b[1m", "").replace("\x1b[2m", ""))
    shown = terminal.label(text)
    assert file.getvalue().count(shown) >= 3  # accepted, dropped, own: as they are, brackets too
    assert not steering(terminal.inert(text).replace("\t", ""))


def test_labels():
    assert [terminal.label(text) for text in (" the", "ing", " ", "", "\n\n", "\ta", "[b]", "é")] == [
        " the",
        "ing",
        "␣",
        "∅",
        "⏎⏎",
        "⇥a",
        "[b]",
        "é",
    ]
    assert terminal.label("\u0301") == "◌\u0301"
    assert terminal.label("\x1b[2J") == "\\x1b[2J"
    assert terminal.label("\u202e") == "\\u202e"


def test_joiners_stay_in_running_text():
    family = "👩\u200d👧 می\u200cخواهم\n"
    assert terminal.inert(family) == family
    assert "\\u200d" in terminal.label(family)


def test_table_is_aligned():
    lines = drawn(terminal.table_lines(("", "n"), [("a", "1"), ("bb", "22")], ["", ""]))
    assert lines == ["     n", "─" * 6, "a    1", "bb  22"]


# ---------------------------------------------------------------- detokenising


@pytest.mark.parametrize("step", [1, 2, 5])
def test_unfinished_characters_are_held_back(tokenizer, step):
    text = "naïve 日本 🌊🌊 done"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    detokenizer = hf_treespec.Detokenizer(tokenizer)
    pieces = [detokenizer.add(ids[i : i + step]) for i in range(0, len(ids), step)]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.end() == text


def test_broken_bytes_come_out_in_the_end(tokenizer):
    ids = tokenizer("a🌊")["input_ids"][:-1]
    detokenizer = hf_treespec.Detokenizer(tokenizer)
    assert detokenizer.add(ids) == "a"
    assert detokenizer.end() == tokenizer.decode(ids)[1:]


def test_tidied_spaces_are_never_given_out_too_early():
    class Tidy:
        clean_up_tokenization_spaces = True
        words = ("Well", " it", " is", "n't", " ,", " is", " it", " .")

        def decode(self, ids, skip_special_tokens=False):
            return "".join(self.words[i] for i in ids).replace(" ,", ",").replace(" .", ".")

    detokenizer = hf_treespec.Detokenizer(Tidy())
    pieces = [detokenizer.add([i]) for i in range(8)] + [detokenizer.end()]
    assert "".join(pieces) == "Well it isn't, is it."


def test_texts_by_origin(tokenizer):
    ids = tokenizer("abcd🌊")["input_ids"]
    rounds = [
        record(tokens=[1], parents=[-1], path=[0], committed=ids[:1], bonus=ids[0]),
        record(tokens=ids[:3], parents=[-1, 0, 1], path=[0, 1, 2], committed=ids[1:4], bonus=ids[3]),
        record(tokens=ids[3:8], parents=[-1, 0, 1, 2, 3], path=[0, 1, 2, 3], committed=ids[4:], bonus=None),
    ]
    texts = terminal.texts_by_origin(tokenizer, rounds)
    assert [[cell for cell in text if cell[0]] for text in texts] == [
        [("a", "own")],
        [("a", "own"), ("b", "kept"), ("c", "kept"), ("d", "own")],
        [("a", "own"), ("b", "kept"), ("c", "kept"), ("d", "own"), ("🌊", "kept")],
    ]
