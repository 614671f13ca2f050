"""The untouched model's replies are kept in a file, and a run reads those that it would write again."""

import pytest

from apps.prove import untouched_replies
from apps.prove.trial import Bench, request_for, seed_for
from apps.prove.untouched_replies import UntouchedReplies
from tests.prove.test_trial import PROMPTS, setting


@pytest.fixture
def request_counts(monkeypatch):
    """The number of requests that a model answers, call by call."""
    counts, plain = [], untouched_replies.generate_many

    def counting(engine, requests):
        counts.append(len(requests))
        return plain(engine, requests)

    monkeypatch.setattr(untouched_replies, "generate_many", counting)
    return counts


def requests(runtime, prompts=PROMPTS[:5], seed=0, **changed):
    setup = setting()
    return [request_for(runtime, setup, p, seed_for(seed, 3, i)) for i, p in enumerate(prompts)]


def test_a_second_process_reads_what_the_first_one_wrote(bench: Bench, tmp_path, request_counts):
    file = tmp_path / "new" / "replies.db"
    with bench.runtime() as runtime:
        first = requests(runtime)
        one = UntouchedReplies(bench.backend, "model", file).to(runtime.engine, first)
        again = requests(runtime, PROMPTS[:7])
        two = UntouchedReplies(bench.backend, "model", file).to(runtime.engine, again)
    assert request_counts == [5, 2]
    assert [one[r.request_id] for r in first] == [two[r.request_id] for r in again][:5]


def test_all_that_decides_a_reply_is_in_its_key(bench: Bench, tmp_path, request_counts):
    """Another model, seed or prompt is another reply."""
    file = tmp_path / "replies.db"
    with bench.runtime() as runtime:
        UntouchedReplies(bench.backend, "model", file).to(runtime.engine, requests(runtime))
        UntouchedReplies(bench.backend, "another", file).to(runtime.engine, requests(runtime))
        UntouchedReplies(bench.backend, "model", file).to(runtime.engine, requests(runtime, seed=1))
        shorter = requests(runtime)
        for request in shorter:
            request.max_new_tokens = 3
        UntouchedReplies(bench.backend, "model", file).to(runtime.engine, shorter)
    assert request_counts == [5, 5, 5, 5]


def test_the_oldest_replies_leave_a_full_file(bench: Bench, tmp_path, request_counts, monkeypatch):
    monkeypatch.setattr(untouched_replies, "KEPT_REPLIES", 3)
    kept = UntouchedReplies(bench.backend, "model", tmp_path / "replies.db")
    with bench.runtime() as runtime:
        kept.to(runtime.engine, requests(runtime))
        kept.to(runtime.engine, requests(runtime)[2:])
        kept.to(runtime.engine, requests(runtime)[:2])
    assert request_counts == [5, 2]


def test_without_a_file_every_run_writes(bench: Bench, request_counts):
    kept = UntouchedReplies(bench.backend, "model")
    with bench.runtime() as runtime:
        for _ in range(2):
            kept.to(runtime.engine, requests(runtime))
    assert request_counts == [5, 5]
