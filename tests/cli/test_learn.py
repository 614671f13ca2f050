"""`learn` and what it needs: JSON fields, training, the router and the tiers of the KV cache."""

import json

import pytest

from ruvmlx.backends.mlx import tiered_cpu
from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.kernels.library import LibraryError
from ruvmlx.kv.policy import TierPolicy
from ruvmlx.kv_tuning import tier_choice
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.sona.user_taste import TasteStatus
from ruvmlx.store import Store

LEARN_FIELDS = {"ratings", "updates", "pending", "consolidations", "adapter_version", "kl"}
LEARN_FIELDS |= {"ppl_change", "promoted", "reason"}


def test_examples_are_named_and_can_be_switched_on_for_good(run, tiny_folder, home, monkeypatch):
    """`--examples` for one call, the setting for all; 9 are too many either way."""
    call = ("generate", "how is tea made?", "--max-tokens", "2", "--ignore-eos", "--json")
    model = ("--model", str(tiny_folder), "--backend", "reference")
    assert json.loads(run(*call, *model)[1])["examples"] == []
    run("rate", "last", "up", *model)
    store = Store(home / "ruvmlx.db")
    store.db.execute("UPDATE replies SET text = 'with water', finish_reason = 'stop'")
    liked = store.replies.get("last").id
    store.close()
    call = ("generate", "how is tea made by you?", *call[2:])
    assert json.loads(run(*call, *model, "--examples", "1")[1])["examples"] == [liked]
    assert json.loads(run(*call, *model)[1])["examples"] == []
    assert run("config", "set", "examples", "2")[0] == 0
    assert json.loads(run(*call, *model)[1])["examples"] == [liked]
    assert run(*call, *model, "--examples", "9")[0] == 2
    assert run("config", "set", "examples", "9")[0] == 2
    monkeypatch.setenv("RUVMLX_EXAMPLES", "9")
    code, _, err = run(*call, *model)
    assert code == 2 and "examples = '9'" in err and len(err.splitlines()) == 1


def test_learn_and_models_as_json(run, tiny_folder):
    model = ("--model", str(tiny_folder))
    assert run("generate", "hello", "--max-tokens", "5", "--ignore-eos", "--json", *model)[0] == 0
    assert json.loads(run("rate", "last", "4", "--json", *model)[1])["adapter_version"] == 1
    status = json.loads(run("learn", "status", "--json", *model)[1])
    assert (status["ratings"], status["adapter_version"], status["versions"]) == (1, 1, [1])
    assert json.loads(run("learn", "reset", "--json", *model)[1])["adapter_version"] == 0
    assert json.loads(run("learn", "rollback", "1", "--json", *model)[1])["ratings"] == 1
    back = ("learn", "rollback", "--json", *model, "--before")
    assert json.loads(run(*back, "2100-01-01 10:00")[1])["adapter_version"] == 1
    assert json.loads(run(*back, "2020-11-23")[1])["adapter_version"] == 0
    for wrong in (back[:-1], ("learn", "rollback", "1", "--before", "2020-11-23", *model), (*back, "soon")):
        code, _, err = run(*wrong)
        assert code == 2 and len(err.splitlines()) == 1
    shown = json.loads(run("show", str(tiny_folder), "--json")[1])
    assert {"name", "path", "format", "bits", "parameters", "bytes"} <= set(shown)
    assert isinstance(json.loads(run("ls", "--json")[1]), list)


def test_undo_and_rollback_say_what_the_user_seems_to_like(run, tiny_folder, monkeypatch):
    """As `learn status` and the chat's panel do."""
    model = ("--model", str(tiny_folder))
    for rating in ("up", "down"):
        run("generate", "hello", "--max-tokens", "5", "--ignore-eos", *model)
        run("rate", "last", rating, *model)
    monkeypatch.setattr(TasteStatus, "sentence", "shorter replies")
    for words in (("status",), ("undo",), ("rollback", "2")):
        code, said, _ = run("learn", *words, *model)
        assert code == 0 and "You seem to like: shorter replies." in said


def test_the_router_is_seen_where_it_is_on(run, tiny_folder):
    """Flag over environment over file; nothing of it in the reports where it is off."""
    model = ("--model", str(tiny_folder), "--backend", "reference")
    call = ("generate", "hello", "--max-tokens", "3", "--ignore-eos", "--json", *model)
    assert "router" not in json.loads(run(*call)[1])
    run("rate", "last", "up", *model)
    assert "router" not in json.loads(run("learn", "status", "--json", *model)[1])
    made = json.loads(run(*call, "--router", "on")[1])["router"]
    assert made["arm"] in ("adapter", "plain") and 0 < made["probability"] < 1
    run("rate", "last", "down", *model)
    assert run("config", "set", "router", "maybe")[0] == 2
    assert run("config", "set", "router", "on")[0] == 0
    shown = json.loads(run("learn", "status", "--json", *model)[1])["router"]
    assert "router" not in json.loads(run("learn", "status", "--json", "--router", "off", *model)[1])
    arms = {arm["arm"]: arm for arm in shown["arms"]}
    assert shown["default"] == "adapter" and arms[made["arm"]]["rated"] == 1
    assert arms[made["arm"]]["mean_reward"] == 0 and sum(a["best"] for a in arms.values()) == pytest.approx(1)
    code, out, err = run("learn", "router", "--train", "--json", *model)
    facts = json.loads(out)
    assert (code, err, facts["router"]) == (0, "", "on") and facts["arms"] == shown["arms"]
    assert facts["training"]["reason"] == "1 rated choices; training needs 64"
    assert "REPLIES WITH" in run("learn", "router", *model)[1]
    assert run("learn", "router", "--adapter", "none", *model)[0] == 2


def test_learn_consolidate_says_what_it_needs_then_does_it(run, tiny_folder):
    """Says what it needs, then does it; the report is the last one in `learn status`."""
    model = ("--model", str(tiny_folder))
    command = ("learn", "consolidate", "--steps", "2", "--ewc", "1", "--json", *model)
    code, out, err = run(*command)
    assert (code, err) == (0, "") and json.loads(out)[
        "reason"
    ] == "training needs 10 ratings or preferences; there are 0"
    spoken = " ".join(run(*(word for word in command if word != "--json"))[1].split())
    needs = "training needs 10 ratings or preferences; there are 0"
    assert spoken.startswith(f"Nothing changed: {needs}. No ratings yet")
    assert "result of the background learning" not in spoken  # there is none
    with Runtime.open(Settings(model=str(tiny_folder))) as runtime:
        for i in range(12):
            request = GenerationRequest(prompt=f"so {i % 2}", max_new_tokens=9, sampling=Sampling(seed=i % 2))
            for _ in runtime.writer.generate(request):
                pass
            runtime.rate(request.request_id, "up" if i % 2 else "down")
    status = json.loads(run("learn", "status", "--json", *model)[1])
    assert (status["pending"], status["consolidations"], status["promoted"]) == (12, 0, None)
    code, out, _ = run(*command)
    report = json.loads(out)
    assert (
        code == 0
        and report["steps"] == 2
        and report["examples"] == 12
        and report["promoted"] in (True, False)
    )
    status = json.loads(run("learn", "status", "--json", *model)[1])
    assert status["targets"] == "head"
    assert status.keys() >= LEARN_FIELDS and report.keys() >= LEARN_FIELDS
    assert "not enough long replies" in report["kv"]["reason"] and not report["kv"]["changed"]
    assert status["consolidations"] == int(report["promoted"]) and status["reason"] == report["reason"]
    assert status["pending"] == (0 if report["promoted"] else 12)


@pytest.mark.parametrize("flags", [(), ("--measure",)])
def test_learn_kv_names_a_missing_library(run, tiny_folder, monkeypatch, flags):
    """Without the C library, MLX on a CPU has caches of 16 bits; `learn kv` told of 8 and 4 bits."""

    def missing(*_):
        raise LibraryError("librvm.so is not installed")

    monkeypatch.setattr(tiered_cpu, "PagedAttention", missing)
    code, out, err = run("learn", "kv", *flags, "--backend", "mlx", "--model", str(tiny_folder))
    assert code == 0 and "In use: 16 bits for all tokens." in out
    assert err.splitlines() == ["note: The KV cache has no tiers: librvm.so is not installed"]


def test_learn_kv_reports_and_measures_the_policy(run, tiny_folder, monkeypatch):
    """Says what new caches get and why; measures when asked to; a policy that was named is shown as such."""
    monkeypatch.setattr(
        tier_choice, "CANDIDATES", (TierPolicy("tiered", (64, 64)), TierPolicy("tiered", (64, 128)))
    )
    command = ("learn", "kv", "--json", "--backend", "native", "--model", str(tiny_folder))
    code, out, err = run(*command)
    said = json.loads(out)
    assert (code, err, said["asked"], said["candidates"], said["observed"]) == (0, "", False, [], [])
    assert said["policy"] == {"hot": 256, "warm": 2048} and "the default" in said["reason"]
    spoken = [word for word in command if word != "--json"]
    assert "0 long replies" in (told := run(*spoken)[1]) and "--measure" not in told
    with Runtime.open(Settings(model=str(tiny_folder), backend="native", adapter="none")) as runtime:
        for i in range(2):
            ids = [40 + (i + j * j) % 50 for j in range(said["long_is"])]
            for _ in runtime.writer.generate(GenerationRequest(input_ids=ids, max_new_tokens=3)):
                pass
    assert "--measure` measures now" in " ".join(run(*spoken)[1].split())
    said = json.loads(run(*command)[1])
    assert said["long_replies"] == 2 and said["observed"][0]["replies"] == 2
    said = json.loads(run(*command, "--measure", "--adapter", "none")[1])
    assert (said["measured"], said["changed"], said["stopped"]) == (2, False, "")
    assert "2 of the 3 long replies that a choice needs have been measured" in said["reason"]
    monkeypatch.setattr("ruvmlx.kv_tuning.tier_measurement.REPLIES", 2)
    said = json.loads(run(*command, "--measure", "--adapter", "none")[1])
    assert said["changed"] and said["limit"] == 0.004 and len(said["candidates"]) == 2
    assert json.loads(run(*command)[1])["reason"] == said["reason"]
    code, out, _ = run(*[c for c in command if c != "--json"])
    words = " ".join(out.split())  # the terminal's width breaks lines
    assert (
        code == 0 and "16 bits for the newest 64 tokens, 8 back to the" in words and said["reason"] in words
    )
    monkeypatch.setenv("RUVMLX_KV_TIERS", "128,all")
    said = json.loads(run(*command)[1])
    assert said["policy"] == {"hot": 128, "warm": None} and said["asked"]
    said = json.loads(run(*command, "--kv", "f16")[1])
    assert said["policy"] == {"hot": None, "warm": None} and said["reason"] == "you asked for it"


def test_learn_consolidate_deep(run, tiny_folder):
    """The same fields as without --deep; what became of the memory beside them."""
    model = ("--model", str(tiny_folder))
    command = ("learn", "consolidate", "--deep", *model)
    code, out, err = run(*command)
    assert (code, err) == (0, "") and out.startswith("Nothing anchored: at least 10 rated replies")
    with Runtime.open(Settings(model=str(tiny_folder))) as runtime:
        for i in range(10):
            request = GenerationRequest(prompt=f"so {i % 2}", max_new_tokens=9, sampling=Sampling(seed=i % 2))
            list(runtime.writer.generate(request))
            runtime.rate(request.request_id, "up" if i % 2 else "down")
    code, out, _ = run(*command, "--json")
    report = json.loads(out)
    assert code == 0 and report.keys() >= LEARN_FIELDS | {
        "patterns",
        "merged",
        "pruned",
        "anchors",
        "seconds",
    }
    assert (report["anchored"], report["promoted"], report["consolidations"]) == (False, None, 0)
    assert "nothing has been consolidated yet" in report["reason"]
    code, _, err = run(*command, "--steps", "2")
    assert code == 2 and "--deep" in err
