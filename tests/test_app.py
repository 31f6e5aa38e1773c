"""The demo without its page: races, their clocks and limits, the settings that strangers send, and the document."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import apps
import document
import engine as engine_module
import plain
import pytest
import settings as settings_module
import torch
import zero
from engine import ARMS, Busy, Engine, Finished, Round, Started, Step
from settings import Limits, Settings, SettingsError, check, from_link

from hf_treespec import DrafterError

RUN = Settings(prompt=apps.PROMPT, new_tokens=24, nodes=12)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return apps.tiny_engine()


def race(engine: Engine, settings: Settings = RUN, **options: Any) -> tuple[Started, dict[str, list[Step]], Finished]:
    first, *steps, last = engine.race(settings, **options)
    assert isinstance(first, Started) and isinstance(last, Finished)
    return first, {arm: [s for s in steps if isinstance(s, Step) and s.arm == arm] for arm in ARMS}, last


# -------------------------------------------------------------------- races


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_arms_write_the_text_of_plain_generate(engine: Engine, temperature: float) -> None:
    settings = dataclasses.replace(RUN, temperature=temperature, seed=5, sized=False)
    _, steps, last = race(engine, settings)
    target = engine.target(settings)
    torch.manual_seed(5)
    inputs = target.inputs(apps.PROMPT)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 50} if temperature else {"do_sample": False}
    expected = target.model.generate(**inputs, **sampling, max_new_tokens=24)[0, inputs["input_ids"].shape[1] :]
    assert last == Finished("done", True, target.tokenizer.decode(expected, skip_special_tokens=True))
    assert [steps[arm][-1].tokens for arm in ARMS] == [24, 24, 24]
    assert steps["plain"][-1].forwards == 24
    assert all(steps[arm][-1].finished and not steps[arm][-2].finished for arm in ARMS)


def test_rounds_are_trees_whose_kept_path_is_the_text(engine: Engine) -> None:
    _, steps, last = race(engine, dataclasses.replace(RUN, sized=False, new_tokens=40))
    rounds = [s.round for s in steps["tree"] if s.round is not None]
    assert [r.index for r in rounds] == list(range(len(rounds)))
    assert "".join(piece for r in rounds for piece in r.pieces) == last.text
    assert any(r.kept for r in rounds) and any(len(r.ids) > 3 + len(r.kept) for r in rounds)
    for drawn in rounds:
        check_round(drawn)


def check_round(drawn: Round) -> None:
    count = len(drawn.ids)
    lists = (drawn.texts, drawn.parents, drawn.scores, drawn.target, drawn.ranks)
    assert all(len(values) == count for values in lists)
    assert drawn.parents[0] == -1 and all(0 <= parent < node for node, parent in enumerate(drawn.parents) if node)
    above = 0
    for node in drawn.kept:
        assert drawn.parents[node] == above and drawn.ranks[node] == 0  # greedy: kept is the target's first choice
        above = node
    assert len(drawn.pieces) == len(drawn.kept) + drawn.bonus
    if drawn.bonus:
        assert drawn.parents[-1] == above and drawn.ranks[-1] == 0
    assert all(0 <= p <= 1.0001 for p in drawn.target)
    assert set(drawn.seconds) == {"draft", "verify", "host"}


def test_turns_rotate_who_goes_first(engine: Engine) -> None:
    orders = [race(engine, dataclasses.replace(RUN, new_tokens=2), turn=turn)[0].order for turn in range(4)]
    assert [order[0] for order in orders] == ["tree", "chain", "plain", "tree"]
    assert all(sorted(order) == sorted(ARMS) for order in orders)


def test_no_race_knows_what_an_earlier_one_has_read(engine: Engine) -> None:
    def drafted(turn: int) -> list[list[int]]:
        _, steps, _ = race(engine, dataclasses.replace(RUN, sized=False, drafter="recycling"), turn=turn)
        return [s.round.ids for s in steps["tree"] if s.round is not None]

    first = drafted(0)
    assert drafted(1) == drafted(2) == first  # whether the tree goes first or last


def test_the_chain_is_a_chain(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    true_stream = engine_module.hf_treespec.stream

    def stream(model: Any, **arguments: Any) -> Any:
        asked.append(arguments["tree_spec"])
        return true_stream(model, **arguments)

    monkeypatch.setattr(engine_module.hf_treespec, "stream", stream)
    race(engine, dataclasses.replace(RUN, children=3, depth=4, nodes=9, drafter="ngram"))
    limits = {"drafter": "ngram", "max_nodes": 9, "max_depth": 4, "fallback": True}
    assert asked[-2:] == [{**limits, "max_children": 3}, {**limits, "max_children": 1}]


def test_clocks_stand_still_while_nobody_asks(engine: Engine) -> None:
    pause, settings = 0.04, dataclasses.replace(RUN, new_tokens=8)
    events = []
    for event in engine.race(settings):
        events.append(event)
        time.sleep(pause)  # a page that takes its time
    for arm in ARMS:
        steps = [e for e in events if isinstance(e, Step) and e.arm == arm]
        assert steps[-1].seconds < pause * (len(steps) - 1)


def test_a_slower_model_is_seen_by_every_clock() -> None:
    engine = apps.tiny_engine()
    apps.slow_down(engine, 0.02)
    _, steps, _ = race(engine, dataclasses.replace(RUN, new_tokens=8))
    for arm in ARMS:
        assert steps[arm][-1].seconds >= 0.02 * steps[arm][-1].forwards


# -------------------------------------------------------------------- stopping, failing, limits


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("after", [1, 4])
def test_a_race_that_is_closed_lets_go_at_once(engine: Engine, turn: int, after: int) -> None:
    events = engine.race(dataclasses.replace(RUN, new_tokens=100), turn=turn)
    for _ in range(after):
        next(events)
    began = time.monotonic()
    events.close()
    assert time.monotonic() - began < 1
    assert threading.active_count() < 20 and not [t for t in threading.enumerate() if t.name == "plain-generate"]
    assert race(engine)[2].reason == "done"


def test_the_wall_clock_ends_a_race() -> None:
    engine = apps.tiny_engine(limits=Limits(seconds=0.4))
    apps.slow_down(engine, 0.02)
    began = time.monotonic()
    _, steps, last = race(engine, dataclasses.replace(RUN, new_tokens=190))
    assert last.reason == "limit" and last.same_text is None
    assert time.monotonic() - began < 2
    assert not any(s.finished for s in steps["tree"])


def test_a_long_prompt_is_refused_after_tokenising(engine: Engine) -> None:
    with pytest.raises(SettingsError, match=r"600 tokens.*400"):
        list(engine.race(dataclasses.replace(RUN, prompt="a" * 600)))
    assert race(engine)[2].reason == "done"


def test_one_race_at_a_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "LOCK_SECONDS", 0.05)
    running = engine.race(RUN)
    next(running)
    with pytest.raises(Busy):
        next(engine.race(RUN))
    running.close()
    assert race(engine)[2].reason == "done"


@pytest.mark.parametrize("turn", range(3))
def test_a_failing_model_leaves_the_next_race_working(turn: int) -> None:
    engine = apps.tiny_engine()
    calls = iter(range(10**6))

    def fail(*_: Any) -> None:
        if next(calls) == 14:
            raise RuntimeError("the device is gone")

    handle = engine._target.model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="device is gone"):
        list(engine.race(RUN, turn=turn))
    handle.remove()
    assert race(engine)[2].same_text is True


def test_drafters_that_cannot_draft_here_leave_the_menu(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    true_stream = engine_module.hf_treespec.stream

    def stream(model: Any, **arguments: Any) -> Any:
        if arguments["tree_spec"]["drafter"] == "recycling":
            raise DrafterError("not on this target")
        return true_stream(model, **arguments)

    fresh = apps.tiny_engine()
    assert "recycling" in fresh.drafters and "model" not in fresh.drafters
    monkeypatch.setattr(engine_module.hf_treespec, "stream", stream)
    fresh.warm_up()
    assert "recycling" not in fresh.drafters and {"ngram", "union"} <= set(fresh.drafters)


def test_an_assistant_adds_its_drafter() -> None:
    engine = apps.tiny_engine()
    helped = Engine(engine._target, assistant=engine._target.model)
    assert "model" in helped.drafters
    _, steps, last = race(helped, dataclasses.replace(RUN, drafter="model", sized=False, temperature=0.9))
    assert last.same_text is True
    assert steps["tree"][-1].forwards < 15  # the target guesses itself well


def test_the_quantised_target_is_loaded_once_and_when_asked_for(engine: Engine) -> None:
    loads: list[int] = []

    def load() -> Any:
        loads.append(1)
        return engine._target

    both = Engine(engine._target, quantised=load)
    assert both.has_nf4 and not engine.has_nf4 and not loads
    for _ in range(2):
        race(both, dataclasses.replace(RUN, quantised=True, new_tokens=2))
    assert len(loads) == 1


def test_plain_runs_hand_on_what_generate_raises() -> None:
    class Broken:
        def generate(self, **arguments: Any) -> None:
            raise ValueError("no")

    run = plain.PlainRun(Broken(), {})
    with pytest.raises(ValueError, match="no"):
        next(run)
    with pytest.raises(StopIteration):
        next(run)
    run.close()


def test_where_the_gpu_is_borrowed_everything_is_loaded_and_nothing_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[dict[str, Any]] = []
    target = apps.tiny_engine()._target
    target.model.register_forward_pre_hook(lambda *_: pytest.fail("there is no GPU yet"))

    def load_target(name: Any, device: str, **options: Any) -> Any:
        loaded.append(options)
        return target

    monkeypatch.setattr(engine_module, "_load_target", load_target)
    monkeypatch.setattr(engine_module.importlib.util, "find_spec", lambda name: object())
    engine_module.load(borrowed=True)
    assert loaded == [{}, {"nf4": True}]


def test_a_race_runs_on_a_borrowed_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "spaces.py").write_text(
        "asked = []\n"
        "def GPU(duration):\n"
        "    def wrap(task):\n"
        "        def run(*args, **kwargs):\n"
        "            import pickle\n"
        "            args, kwargs = pickle.loads(pickle.dumps((args, kwargs)))\n"
        "            asked.append(duration(*args, **kwargs))\n"
        "            for event in task(*args, **kwargs):\n"
        "                yield pickle.loads(pickle.dumps(event))\n"
        "        return run\n"
        "    return wrap\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    try:
        importlib.reload(zero)
        assert zero.ON_ZERO_GPU
        events = list(zero.borrowed(apps.tiny_engine().race)(RUN, turn=1))
        assert isinstance(events[-1], Finished) and events[-1].same_text
        import spaces

        assert spaces.asked == [8]  # 6 s, and 0.1 s for each of 24 tokens
        assert zero.seconds_wanted(dataclasses.replace(RUN, new_tokens=10**6)) == zero.MOST_SECONDS
    finally:
        monkeypatch.undo()
        sys.modules.pop("spaces", None)
        importlib.reload(zero)
    assert not zero.ON_ZERO_GPU and zero.borrowed(len) is len


# -------------------------------------------------------------------- settings from strangers

OK = {"prompt": "x", "drafter": "union"}
DRAFTERS = ("ngram", "union")


@pytest.mark.parametrize(
    "bad, named",
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": "  \n"}, "empty"),
        ({"prompt": None}, "empty"),
        ({"prompt": ["x"]}, "empty"),
        ({"prompt": "x" * 1501}, "1501"),
        ({"prompt": "\ud800"}, "surrogate"),
        ({"drafter": "eagle"}, "eagle"),
        ({"drafter": None}, "None"),
        ({"drafter": "x" * 10**6}, "xxx"),
        ({"new_tokens": 0}, "new_tokens"),
        ({"new_tokens": 10**9}, "1000000000"),
        ({"new_tokens": 10**5000}, "huge"),
        ({"new_tokens": "5"}, "must be a number"),
        ({"new_tokens": True}, "must be a number"),
        ({"new_tokens": 1.5}, "whole"),
        ({"new_tokens": float("nan")}, "must be a number"),
        ({"new_tokens": float("inf")}, "new_tokens"),
        ({"new_tokens": None}, "must be a number"),
        ({"nodes": 1000}, "nodes"),
        ({"nodes": {}}, "nodes"),
        ({"depth": 17}, "depth"),
        ({"children": 9}, "children"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**31}, "seed"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("-inf")}, "temperature"),
        ({"sized": 1}, "sized"),
        ({"sized": "yes"}, "sized"),
        ({"quantised": True}, "bitsandbytes"),
        ({"device": "cuda"}, "device"),
    ],
)
def test_bad_settings_are_refused_by_name(bad: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named) as caught:
        check({**OK, **bad}, Limits(), DRAFTERS, nf4=False)
    assert len(str(caught.value)) < 300


def test_good_settings_are_taken() -> None:
    settings = check({**OK, "new_tokens": 12.0, "temperature": 1, "quantised": True}, Limits(), DRAFTERS, nf4=True)
    assert settings == Settings(prompt="x", new_tokens=12, temperature=1, quantised=True)
    assert isinstance(settings.new_tokens, int)


def test_links_give_settings_and_say_what_was_wrong() -> None:
    query = {"prompt": "hello", "nodes": "9", "sized": "0", "temperature": "0.7", "__theme": "dark"}
    settings, wrong = from_link(query, Limits(), DRAFTERS, nf4=False)
    assert (settings.prompt, settings.nodes, settings.sized, settings.temperature) == ("hello", 9, False, 0.7)
    assert wrong == ""
    bad = {"nodes": "1e9", "drafter": "<img>", "depth": "x" * 5000, "sized": "perhaps", "quantised": "1", "seed": "7"}
    settings, wrong = from_link(bad, Limits(), DRAFTERS, nf4=False)
    assert settings == dataclasses.replace(Settings(), seed=7)
    for name in ("nodes", "drafter", "depth", "sized", "quantised"):
        assert name in wrong
    assert len(wrong) < 600


def test_the_page_and_its_limits_agree() -> None:
    """Every default and example is within the limits."""
    for text in settings_module.EXAMPLES.values():
        check({**dataclasses.asdict(Settings()), "prompt": text}, Limits(), ("union",), nf4=False)


# -------------------------------------------------------------------- the document


def whole(engine: Engine, settings: Settings = RUN) -> document.Document:
    made = document.Document(settings)
    for event in engine.race(settings):
        made.apply(event)
    return made


def test_documents_are_ascii_json_without_markup(engine: Engine) -> None:
    made = whole(engine, dataclasses.replace(RUN, temperature=1.2, new_tokens=120, sized=False))
    text = made.dumps()
    assert text.isascii() and "<" not in text
    read = json.loads(text)
    assert read["v"] == document.VERSION and read["phase"] == "done"
    everything = "".join(t for r in read["rounds"] for t in r["texts"])
    assert "<!--" in everything and "\u202e" in everything and "\ufffd" in everything  # hostile, and all there
    assert set(read["lanes"]) == set(ARMS)
    assert [lane["marks"][-1][1] for lane in read["lanes"].values()] == [120] * 3


def test_running_documents_carry_the_last_rounds_and_the_last_one_all(engine: Engine) -> None:
    made = document.Document(RUN)
    sequence = 0
    for event in engine.race(dataclasses.replace(RUN, new_tokens=80, drafter="ngram")):
        made.apply(event)
        read = json.loads(made.dumps())
        assert read["seq"] == sequence + 1 and read["run"] == made.run
        sequence = read["seq"]
        if read["phase"] == "running":
            assert len(read["rounds"]) <= document.WINDOW
    assert [r["index"] for r in read["rounds"]] == list(range(len(made.rounds)))
    assert len(made.rounds) > document.WINDOW


def test_half_characters_survive_the_way() -> None:
    made = document.Document(note="\ud83d \ud800 <b>")
    assert json.loads(made.dumps())["note"] == "\ud83d \ud800 <b>"


@pytest.mark.parametrize("build", [lambda: document.Document(), lambda: document.Document(phase="error", note="no")])
def test_documents_without_a_race_are_whole(build: Callable[[], document.Document]) -> None:
    read = json.loads(build().dumps())
    assert read["rounds"] == [] and set(read["lanes"]) == set(ARMS)
