"""`ruvmlx adapters` as scripts call it, on the tiny model."""

import json
import re

import numpy as np
import pytest

from apps.cli import doctor
from ruvmlx import settings as config
from ruvmlx.lora import interchange
from ruvmlx.models.load import load_model
from ruvmlx.store import Store
from ruvmlx.store.audit import disagreement

from ..backends.test_lora import random_base
from ..models.make_models import make_safetensors_model
from .verbs import one_line

FIELDS = {"name", "base", "rank", "version", "bytes"}


@pytest.fixture
def tiny_cli(run, tiny_folder, monkeypatch, open_tiny):
    """Run a verb on the tiny model, whose neutral text is already measured."""
    open_tiny().close()
    monkeypatch.setenv("RUVMLX_MODEL", str(tiny_folder))
    monkeypatch.setenv("RUVMLX_BACKEND", "reference")

    def run_it(*args: str):
        code, out, err = run(*args)
        assert "Traceback" not in err
        return code, (json.loads(out) if "--json" in args and out else out), err

    return run_it


@pytest.fixture
def learned(tiny_cli):
    """The same, after two ratings."""
    for rating in ("up", "down"):
        tiny_cli("generate", "hi", "--max-tokens", "4", "--ignore-eos", "--temp", "0", "--raw")
        assert tiny_cli("rate", "last", rating)[0] == 0
    return tiny_cli


def versions(tiny_cli) -> dict[str, int]:
    return {row["name"]: row["version"] for row in tiny_cli("adapters", "ls", "--json")[1]}


def test_a_rating_goes_to_the_adapter_that_wrote_the_reply(learned):
    """Not to the adapter in use; unless `rate` itself names one."""
    write = ("generate", "hi", "--max-tokens", "4", "--ignore-eos", "--raw", "--adapter", "other")
    learned(*write)
    code, out, _ = learned("rate", "last", "up")
    assert code == 0 and "'other' learned from it" in out
    assert versions(learned) == {"default": 2, "other": 1}
    assert learned("rate", "last", "1", "--why", "long", "--json")[0] == 0
    assert versions(learned)["default"] == 2
    learned(*write)
    code, out, _ = learned("rate", "last", "up", "--adapter", "default")
    assert code == 0 and "learned from it" not in out and versions(learned)["default"] == 3


def test_a_rating_and_its_undoing_name_the_reply(tiny_cli):
    """By the question, since "last" and "newest" do not show which reply it was; an id does."""
    ids = [
        tiny_cli("generate", question, "--max-tokens", "4", "--ignore-eos", "--raw", "--json")[1]["reply_id"]
        for question in ("Name a river.", "name\na lake")
    ]
    assert tiny_cli("rate", "last", "up")[1].endswith('The reply answers "name a lake".\n')
    assert "The reply answers" not in tiny_cli("rate", ids[0], "up")[1]
    assert 'no longer counts. The reply answers "Name a river."\n' in tiny_cli("learn", "undo")[1]
    assert 'no longer counts. The reply answers "name a lake".' in tiny_cli("learn", "undo")[1]


def test_the_undo_that_is_named_takes_this_rating_back(learned):
    """Also when another adapter than the one in use learned from it."""
    question = "What does `ruvmlx learn undo` do?"
    learned("generate", question, "--max-tokens", "4", "--ignore-eos", "--raw", "--adapter", "other")
    out = learned("rate", "last", "up")[1]
    assert "`ruvmlx learn undo --adapter other` takes it back" in out
    out = learned("learn", "undo", "--adapter", "other")[1]
    assert f'no longer counts. The reply answers "{question}"' in out  # the user's words stay as they are
    assert versions(learned)["default"] == 2
    out = learned("rate", "last", "up", "--adapter", "fresh")[1]
    assert "The adapter 'fresh' is new" in out and "undo --adapter fresh`" in out


def sound(home) -> bool:
    store = Store(home / "ruvmlx.db")
    return store.witness.check().broken is None and not disagreement(store)


def logits(model_folder, adapter_store=None):
    import mlx.core as mx
    from mlx_lm.utils import load_model as load_mlx

    return np.array(load_mlx(model_folder)[0](mx.array([[5, 77, 12]]))[0].astype(mx.float32))


def test_nothing_learned_is_an_empty_list_and_one_line_elsewhere(tiny_cli, tmp_path):
    assert tiny_cli("adapters", "ls", "--json")[:2] == (0, [])
    for verb in (("save", "x"), ("export", str(tmp_path / "x")), ("fuse", str(tmp_path / "x")), ("rm", "x")):
        code, _, err = tiny_cli("adapters", *verb)
        assert code in (1, 2) and one_line(err), verb
    assert not (tmp_path / "x").exists()


def test_export_and_rm_say_the_same_of_an_adapter_that_has_learned_nothing(tiny_cli, tmp_path):
    """No "there is no adapter" from one and "it is in use" from the other; the exit codes stay 1 and 2."""
    code, _, err = tiny_cli("adapters", "export", str(tmp_path / "x"))
    assert code == 1 and "adapter 'default' is empty: it has learned nothing yet" in err
    code, _, err = tiny_cli("adapters", "rm", "default")
    assert code == 2 and "it has learned nothing yet. There is nothing to delete." in err
    assert "--force" not in err


@pytest.mark.parametrize("verb", [("status",), ("undo",), ("rollback", "1"), ("reset",), ("export",)])
def test_a_command_to_try_next_names_the_adapter_that_the_user_named(learned, verb):
    """Without the flag, `learn undo` would take back a rating of the adapter in use."""
    learned("adapters", "save", "other")
    if verb == ("export",):
        learned("learn", "reset", "--adapter", "other")
    _, out, err = learned("learn", *verb, "--adapter", "other")
    said = re.findall("`ruvmlx (?:chat|learn|rate)[^`]*`", out + err)
    assert said and all(command.endswith(" --adapter other`") for command in said)
    assert "--adapter" not in learned("learn", "status")[1]


def test_ls_says_what_is_there_and_what_is_in_use(learned, tiny):
    code, rows, _ = learned("adapters", "ls", "--json")
    assert code == 0 and len(rows) == 1 and set(rows[0]) >= FIELDS
    (row,) = rows
    assert (row["name"], row["base"], row["rank"], row["version"]) == ("default", tiny.name, 2, 2)
    assert row["in_use"] and row["bytes"] > 2 * 2 * 4 * 2 * (64 + 320)
    assert learned("adapters", "ls")[1].splitlines()[1].split()[:2] == ["*", "default"]


def test_save_use_and_rm_keep_the_way_back(learned, home):
    """The copy has the version, the ratings and undo; the original does not notice."""

    def status():
        """All but whose it is."""
        return {
            k: v for k, v in learned("learn", "status", "--json")[1].items() if k not in ("adapter", "others")
        }

    before = status()
    saved = learned("adapters", "save", "mine", "--json")[1]
    assert (saved["name"], saved["version"], saved["rank"]) == ("mine", 2, 2)
    used = learned("adapters", "use", "mine", "--json")[1]
    assert used["version"] == 2 and status() == before
    assert learned("learn", "undo", "--json")[1]["adapter_version"] == 1
    code, _, err = learned("adapters", "rm", "mine")
    assert code == 2 and "--force" in err
    learned("adapters", "use", "default")
    assert status() == before
    assert learned("adapters", "rm", "mine", "--json")[1]["name"] == "mine"
    assert [r["name"] for r in learned("adapters", "ls", "--json")[1]] == ["default"]
    assert sound(home)


def test_a_name_begins_anew_after_rm(learned, home):
    """Old traces of the deleted adapter are not taken for the new one's. The numbers of its versions go on,
    because another process can have the deleted adapter in memory."""
    assert learned("adapters", "rm", "default", "--force")[0] == 0
    code, result, _ = learned("rate", "last", "up", "--json")
    assert code == 0 and result["adapter_version"] == 3 and result["applied"]
    assert result["logprob_after"] > result["logprob_before"] and sound(home)


def test_names_that_cannot_be_are_refused(learned):
    for name in ("a b", "../x", "x" * 65, "none"):
        code, _, err = learned("adapters", "save", name)
        assert code == 2 and one_line(err)
    assert "already" in learned("adapters", "save", "default")[2]
    assert learned("adapters", "use", "a b")[0] == 2


def test_use_warns_when_the_environment_says_otherwise(learned, monkeypatch):
    monkeypatch.setenv("RUVMLX_ADAPTER", "other")
    code, out, err = learned("adapters", "use", "fresh", "--new", "--json")
    assert code == 0 and (out["name"], out["version"]) == ("fresh", 0)
    assert "environment" in err


@pytest.mark.parametrize("kind", ["mlx-lm", "peft"])
def test_export_and_import_keep_the_weights_bit_for_bit(learned, tmp_path, home, tiny, kind):
    out = str(tmp_path / "out")
    code, said, _ = learned("adapters", "export", out, "--format", kind, "--json")
    assert code == 0 and said["format"] == kind and said["rank"] == 2
    code, taken, err = learned("adapters", "import", out, "theirs", "--json")
    assert code == 0, err
    assert (taken["name"], taken["version"], taken["rank"]) == ("theirs", 1, 2)
    assert taken["kl"] == pytest.approx(learned("learn", "status", "--json")[1]["kl"], abs=1e-6)
    store = Store(home / "ruvmlx.db")
    from ruvmlx.lora import MicroLoRA

    shape = tiny.config.hidden_size, tiny.config.vocab_size
    ours = MicroLoRA.from_bytes(store.versions.get(tiny.fingerprint, "default", 2).state, *shape)
    back = MicroLoRA.from_bytes(store.versions.get(tiny.fingerprint, "theirs", 1).state, *shape)
    np.testing.assert_array_equal(back.lora_a, ours.lora_a)
    np.testing.assert_array_equal(back.lora_b, ours.lora_b)
    assert sound(home)


def test_a_base_from_elsewhere_changes_the_replies(learned, tmp_path, home, tiny):
    """An adapter of the attention, as mlx-lm trains it: imported, used, saved, rated, exported again."""
    from ruvmlx.lora.base_lora import BaseLoRA
    from ruvmlx.lora.interchange import export

    rng = np.random.default_rng(0)
    pair = tuple((0.3 * rng.standard_normal(s)).astype(np.float32) for s in ((64, 3), (3, 128)))
    export(BaseLoRA({("q_proj", 1): pair}, 2.0), tiny.config, tmp_path / "in", "mlx-lm")
    code, taken, err = learned("adapters", "import", str(tmp_path / "in"), "q", "--json")
    assert code == 0 and (taken["rank"], taken["version"]) == (3, 1) and taken["kl"] > 0, err
    learned("adapters", "use", "q")
    assert learned("adapters", "save", "q2", "--json")[1]["rank"] == 3
    learned("generate", "hi", "--max-tokens", "4", "--ignore-eos", "--temp", "0", "--raw")
    assert learned("rate", "last", "up", "--json")[1]["adapter_version"] == 2
    said = learned("adapters", "export", str(tmp_path / "out"), "--json")[1]
    assert said["rank"] == 3 and sound(home)
    code, _, err = learned(
        "adapters", "export", str(tmp_path / "h"), "--adapter", "default", "--without-head"
    )
    assert code == 2 and "nothing" in err


def test_a_strangers_folder_is_one_line_and_leaves_nothing(learned, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "adapter_config.json").write_text("{")
    code, _, err = learned("adapters", "import", str(tmp_path / "in"), "x")
    assert code == 4 and one_line(err)
    assert [r["name"] for r in learned("adapters", "ls", "--json")[1]] == ["default"]


def test_an_export_overwrites_no_folder(learned, tmp_path):
    """As `backup` and /save; an empty folder may be there."""
    out = tmp_path / "out"
    out.mkdir()
    assert learned("adapters", "export", str(out), "--json")[0] == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    code, _, err = learned("adapters", "export", str(out), "--bits", "4")
    assert code == 2 and one_line(err) and f"{out} exists; name a new folder" in err
    assert before == {path: path.read_bytes() for path in out.iterdir()}


def test_4_bits_come_back(learned, tmp_path):
    out = str(tmp_path / "out")
    assert learned("adapters", "export", out, "--bits", "4", "--json")[1]["format"] == "mlx-lm"
    assert learned("adapters", "import", out, "packed", "--json")[1]["rank"] == 2


def test_fuse_writes_a_model_that_says_what_the_adapter_says(learned, tmp_path, tiny_folder):
    code, said, _ = learned("adapters", "fuse", str(tmp_path / "out"), "--json")
    assert code == 0 and said["bytes"] > 0 and set(said) >= FIELDS
    assert np.abs(logits(tmp_path / "out") - logits(tiny_folder)).max() > 0
    assert load_model(str(tmp_path / "out")).config == load_model(str(tiny_folder)).config
    code, _, err = learned("adapters", "fuse", str(tmp_path / "out"))
    assert code == 2 and "exists" in err


def test_what_is_used_and_how_caches_are_kept_is_in_the_witness_log(learned, home):
    learned("adapters", "use", "mine", "--new")
    learned("config", "set", "kv", "f16")
    learned("config", "set", "system", "my secret")  # words do not belong there
    learned("adapters", "save", "copy", "--adapter", "default")
    learned("adapters", "rm", "copy")
    rows = Store(home / "ruvmlx.db").witness.rows()
    settings = [(r.body["name"], r.body["value"]) for r in rows if r.kind == "setting"]
    assert settings == [("adapter", "mine"), ("kv", "f16")]
    assert [r.kind for r in rows if r.kind in ("save", "remove")] == ["save", "remove"] and sound(home)


def test_a_fused_model_does_not_get_the_adapter_again(run, tmp_path, monkeypatch):
    """The fingerprint reads few tensors. If the adapter changes only others, the fused model has the
    fingerprint of the original. The store tells the two apart."""
    model = load_model(str(make_safetensors_model(tmp_path / "model", tie=False, max_context=512)))
    change = random_base(model.config, 3, ["down_proj"], 0.02)
    interchange.export(change, model.config, tmp_path / "lora", "mlx-lm")
    monkeypatch.setenv("RUVMLX_MODEL", str(tmp_path / "model"))
    monkeypatch.setenv("RUVMLX_BACKEND", "reference")
    assert run("adapters", "import", str(tmp_path / "lora"), "mine")[0] == 0
    Store(config.store_file()).db.execute("DELETE FROM known_models")  # as in a store of an earlier version
    code, out, _ = run("adapters", "fuse", str(tmp_path / "fused"), "--adapter", "mine")
    assert code == 0 and load_model(str(tmp_path / "fused")).fingerprint == model.fingerprint
    assert "not applied twice" in out
    for name, code in (("fused", 2), ("model", 0)):
        monkeypatch.setenv("RUVMLX_MODEL", str(tmp_path / name))
        assert run("learn", "status", "--adapter", "mine")[0] == code
    run("adapters", "use", "mine")
    for name, words in (("fused", "nothing is learned yet"), ("model", "mine, version 1")):
        monkeypatch.setenv("RUVMLX_MODEL", str(tmp_path / name))
        assert words in doctor._CHECKS["adapter"]()
