"""`hf-treespec profile`: numbers that agree with one another, what is shown of them, and mistakes."""

from __future__ import annotations

import importlib.util
import json
import statistics

import numpy as np
import pytest
import torch
from conftest import VOCAB, around, build, prompt

from hf_treespec import (
    Budget,
    DraftContext,
    RoundRecord,
    TokenTree,
    cli,
    loading,
    profile,
    profile_view,
    stream,
    terminal,
)


class Letters:
    """A tokenizer: one token a letter."""

    chat_template = None

    def __call__(self, text, return_tensors):
        return {"input_ids": torch.tensor([[2 + ord(c) % (VOCAB - 2) for c in text[:40]]])}


@pytest.fixture(scope="module")
def model():
    return build("llama", seed=5)


@pytest.fixture(autouse=True)
def embedded(model, monkeypatch):
    monkeypatch.setattr(loading, "demo_model", lambda **options: (model, Letters()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(profile, "TURNS", 3)
    monkeypatch.setenv("COLUMNS", "80")


def run(capsys, *options):
    assert cli.main(["profile", *options, "--json", "--max-new-tokens", "24"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def record(tokens, parents, scores, path, committed, bonus, draft=0.001, verify=0.02):
    seconds = {"draft": draft, "verify": verify, "host": 0.001}
    arrays = np.array(tokens), np.array(parents), np.array(scores, np.float32)
    return RoundRecord(1, *arrays, path, committed, bonus, seconds)


def test_json(capsys):
    found = run(capsys, "--rounds")
    assert set(found) == {
        *("model", "machine", "prompts", "drafter", "cost", "tokens_by_nodes", "tokens_per_second_by_nodes", "sizes"),
        *("speed", "drafting_seconds", "rate", "best_nodes", "steps", "conclusions", "records"),
    }
    assert found["prompts"] == profile.PROMPTS
    assert found["drafter"] == "union"
    cost = found["cost"]
    assert cost["rows"] == [1, 2, 4, 8, 16, 32, 64]
    assert [len(samples) for samples in cost["samples"]] == [3] * 7
    assert cost["medians"] == [statistics.median(samples) for samples in cost["samples"]]
    assert cost["seconds"] == sorted(cost["seconds"])
    assert cost["context"] > 40
    promised, came_true, gain = (np.array(found["tokens_by_nodes"][n]) for n in ("promised", "came_true", "gain"))
    for curve in (promised, gain):  # rising and concave
        assert curve[0] == 0 and len(curve) == 64
        assert (np.diff(curve) >= -1e-6).all()
        assert (np.diff(curve, 2) <= 1e-6).all()
    assert gain[-1] == pytest.approx(came_true[-1])
    assert (gain >= came_true - 1e-6).all()
    full = [r for records in found["records"]["full"].values() for r in records]
    accepted = [len(r["committed"]) - (r["bonus"] is not None) for r in full]
    assert came_true[-1] == pytest.approx(np.mean(accepted))
    assert max(len(r["tokens"]) for r in full) > 33


def test_the_loops_rounds_add_up(capsys):
    found = run(capsys, "--rounds")
    speed, sized = found["speed"], found["records"]["sized"]
    rounds = [r for records in sized.values() for r in records]
    sizes = {int(nodes): count for nodes, count in found["sizes"].items()}
    assert sum(sizes.values()) == speed["all rounds"]["rounds"] == len(rounds)
    for nodes, count in sizes.items():
        assert count == sum(len(r["tokens"]) == nodes + 1 for r in rounds)
    assert sizes.get(0, 0) == speed["plain rounds"]["rounds"]
    assert speed["plain rounds"]["tokens"] == speed["plain rounds"]["rounds"]
    assert speed["all rounds"]["tokens"] == 3 * 23  # the prompt's forward gives the first of each 24
    for key in ("rounds", "tokens", "seconds"):
        assert speed["all rounds"][key] == pytest.approx(sum(speed[name][key] for name in sized))
        parts = speed["plain rounds"][key] + speed["drafted rounds"][key]
        assert speed["all rounds"][key] == pytest.approx(parts)
    assert found["rate"] >= max(speed["all rounds"]["tokens_per_second"], *found["tokens_per_second_by_nodes"]) - 1e-6
    best = found["best_nodes"]
    assert found["tokens_per_second_by_nodes"][best] == max(found["tokens_per_second_by_nodes"])
    for step in found["steps"]:  # no larger tree pays, or it would be the best
        assert step["from_nodes"] == best < step["to_nodes"]
        assert step["worth_seconds"] <= step["price_seconds"] * 1.0001


def test_a_prompt_and_options_of_ones_own(capsys):
    found = run(capsys, "abcabcabc", "--max-nodes", "5", "--drafter", "ngram")
    assert found["prompts"] == {"prompt": "abcabcabc"}
    assert found["drafter"] == "ngram"
    assert set(map(int, found["sizes"])) <= set(range(6))
    assert len(found["tokens_by_nodes"]["promised"]) == 6
    assert "records" not in found


def test_more_nodes_are_measured_further(capsys):
    found = run(capsys, "abc", "--max-nodes", "100")
    assert found["cost"]["rows"][-1] == 128
    assert len(found["tokens_by_nodes"]["gain"]) == 101


def test_an_assistant_drafts(model, assistant):
    inputs = {"prompt": {"input_ids": prompt(), "attention_mask": torch.ones_like(prompt())}}
    found = profile.measure(model, inputs, {}, {"assistant_model": assistant}, 16, lambda message: None)
    assert found.drafter == "model"
    assert found.drafting > 0


def test_what_came_true_is_what_smaller_trees_would_have_given(model):
    """Verified whole and cut afterwards, or cut before: the same tokens."""
    ids = prompt()
    text = model.generate(ids, max_new_tokens=24, do_sample=False)
    shared = {"do_sample": False, "max_new_tokens": 24}
    records = list(
        stream(model, tree_spec={"drafter": around(text, "chain"), "fallback": False}, input_ids=ids, **shared)
    )
    promised, came_true = profile.expected(records[1:], 6)
    accepted = [r.accepted for r in records[1:]]
    assert came_true.tolist() == pytest.approx([np.mean(np.minimum(accepted, n)) for n in range(7)])
    assert promised[4] == promised[6] > promised[3]


def test_expected_counts_a_last_token_that_was_drafted():
    tokens, parents, scores = [5, 6, 7, 8], [-1, 0, 0, 2], [1.0, 0.2, 0.6, 0.4]
    stopped = record(tokens, parents, scores, path=[0, 2], committed=[7, 8], bonus=None)
    plain = record([5], [-1], [1.0], path=[0], committed=[6], bonus=6)
    promised, came_true = profile.expected([stopped, plain], 4)
    assert came_true.tolist() == [0.0, 0.5, 1.0, 1.0, 1.0]  # best first: 7, then 8 below it, then 6
    assert promised.tolist() == pytest.approx([0, 0.3, 0.5, 0.6, 0.6], abs=0.002)  # tables have steps


def test_rounds_are_grouped_by_whether_they_drafted():
    plain = record([5], [-1], [1.0], path=[0], committed=[6], bonus=6, verify=0.02)
    small = record([5, 6], [-1, 0], [1.0, 0.5], path=[0, 1], committed=[6, 7], bonus=7, draft=0.003, verify=0.036)
    sized = {"a": [plain, small], "b": [plain]}
    gain = np.array([0.0, 0.5], np.float32)
    found = profile.Profile("ngram", {1: [0.02], 2: [0.03]}, 9, sized, sized, gain, gain)
    assert found.sizes == {0: 2, 1: 1} and found.drafting == 0.003
    names = {"a": 2, "b": 1, "plain rounds": 2, "drafted rounds": 1, "all rounds": 3}
    assert {name: len(records) for name, records in found.groups.items()} == names
    drafted = profile.speed(found.groups["drafted rounds"])
    assert (drafted["tokens_per_round"], drafted["tokens_per_second"]) == (2, pytest.approx(50))
    assert found.speeds.tolist() == pytest.approx([50, 1.5 / 0.033])


def made(came_true, seconds, loop=0.02):
    """A profile of invented numbers; drafting takes no time."""
    plain = record([5], [-1], [1.0], path=[0], committed=[6], bonus=6, draft=0.0, verify=loop - 0.001)
    samples = {rows: [s] * 3 for rows, s in seconds.items()}
    gain = np.array(came_true, np.float32)
    return profile.Profile("ngram", samples, 100, {"prompt": [plain]}, {"prompt": [plain]}, gain, gain)


def test_conclusions_follow_from_the_numbers():
    found = made([0.0, 0.5, 0.6, 0.65, 0.7], {1: 0.02, 2: 0.021, 4: 0.025, 8: 0.033})
    assert found.best == 1 and found.rate == pytest.approx(1.5 / 0.021)
    first, second = found.steps()
    assert (first["to_nodes"], second["to_nodes"]) == (2, 3)
    assert first["price_seconds"] == pytest.approx(0.002) and first["brings_tokens"] == pytest.approx(0.1)
    assert first["worth_seconds"] == pytest.approx(0.1 / found.rate)
    assert second["pays_above_tokens"] == pytest.approx(found.rate * 0.004)
    told = found.conclusions()
    assert "1 node would be" in told[0]
    assert told[1].startswith("Node 2 costs 2.00 ms more and brings 0.1 tokens, worth 1.40 ms")
    assert told[1].endswith("above 14 %.")
    assert told[2].startswith("A tree of 3 costs 4.00 ms more and brings 0.15 tokens")
    assert told[2].endswith("brings 0.29 tokens.")


def test_conclusions_where_nothing_pays():
    found = made([0.0, 0.1, 0.15, 0.2, 0.2], {1: 0.01, 2: 0.04, 4: 0.04, 8: 0.05}, loop=0.01)
    assert found.best == 0
    told = found.conclusions()
    assert "plain decoding would be the fastest" in told[0]
    assert told[1].startswith("Node 1 costs 30.0 ms more with its drafting") and "at no chance" in told[1]
    assert told[2].startswith("A tree of 3 costs 30.0 ms")


def test_conclusions_where_nothing_came_true():
    told = made([0.0, 0.0, 0.0], {1: 0.02, 2: 0.022, 4: 0.03}).conclusions()
    assert told[1:] == [
        "Node 1 costs 2.00 ms more with its drafting and brought nothing here: it pays where its chance is above 10 %."
    ]


def test_conclusions_where_everything_pays():
    found = made([0.0, 0.9, 1.7, 2.4], {1: 0.02, 2: 0.02, 4: 0.02})
    assert found.best == found.most == 3 and not found.steps()
    assert "--max-nodes" in found.conclusions()[-1]


def test_filled_trees_have_the_wanted_rows():
    context = DraftContext(prompt(), [3], None, 99)
    for size in (1, 2, 7, 64):
        tree = profile.Filled([size]).draft(context, Budget(63, 16, 4))
        tree.check(VOCAB)
        assert isinstance(tree, TokenTree) and len(tree) == size
        assert int(tree.sibling_ranks.max()) <= 1


# ---------------------------------------------------------------- showing


def test_plain_output(capsys):
    assert cli.main(["profile", "abc", "--max-new-tokens", "24"]) == 0  # stdout is not a terminal here
    out, err = capsys.readouterr()
    assert err == "" and "\x1b" not in out
    for word in ("T/T(1)", "promised", "came true", "●", "Nodes that the loop chose", "drafted rounds", "larger trees"):
        assert word in out
    assert max(map(len, out.splitlines())) <= 80


def test_terminal_output_is_drawn_by_rich_and_without_it(capsys, monkeypatch):
    monkeypatch.setattr(cli.sys.stdout, "isatty", lambda: True)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    line = ["profile", "abc", "--max-new-tokens", "24"]
    assert cli.main(line) == 0
    assert "\x1b[" in capsys.readouterr().out
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "rich" else real(name, *rest))
    assert cli.main(line) == 0
    out = capsys.readouterr().out
    assert "\x1b[" not in out and "●" in out


def test_png(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    run(capsys, "abc", "--png", str(tmp_path / "profile.png"))
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_plot_lines():
    lines = terminal.plot_lines([("·", "", [0, 10, 20, 30, 40])], [("●", "", [(2, 20)])], [1, 2, 4], 50, height=5)
    rows = ["".join(text for text, _ in line) for line in lines]
    assert [row[8] for row in rows] == [*"┤│┤│┤", "└", " "]
    assert rows[0].startswith("     40 ┤") and rows[0].endswith("·")
    assert rows[2][9 + 20] == "●" and rows[2].startswith("     20 ┤")
    assert [rows[-1].index(tick) for tick in "124"] == [9, 29, 49]
    short = terminal.plot_lines([("·", "", [5, 5, 5])], [], [1, 2, 4], 50, height=5)
    assert "".join(text for line in short for text, _ in line).count("·") == 21  # it ends at 2


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--max-nodes", "0"], "--max-nodes 0"),
        (["--max-new-tokens", "1"], "--max-new-tokens"),
        (["--max-new-tokens", "4"], "--max-new-tokens"),
        (["--drafter", "ngran"], "ngran"),
        (["--drafter", "model"], "needs a model"),
        (["--png", "./no-such-folder/x.png"], "no-such-folder"),
        (["--png", "."], "folder"),
        ([""], "empty"),
    ],
)
def test_mistakes_are_one_line(capsys, options, named):
    assert cli.main(["profile", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hf-treespec: ") and len(err.splitlines()) == 1
    assert named in err


def test_a_png_without_matplotlib(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *names: None)
    assert cli.main(["profile", "--plain", "--png", "x.png"]) == 2
    assert "pip install hf-treespec[bench]" in capsys.readouterr().err


def test_a_png_that_cannot_be_written(tmp_path):
    pytest.importorskip("matplotlib")
    facts = {"model": "tiny", "machine": {"device": "cpu", "dtype": "float32", "quantization": None, "threads": 1}}
    with pytest.raises(loading.UserError, match="cannot be written"):
        profile_view.write_png(made([0.0, 0.5], {1: 0.02, 2: 0.021}), facts, tmp_path / "gone" / "x.png")
