"""How often drawn users prefer replies with a style of 4 bits per weight, beside the same style of 32 bits.

    python -m tests.research.four_bits_wins OUT.npz --users 24 --questions 24 --directions 4

A style is a direction of the shipped style basis, forwards or backwards, scaled to an expected KL of --kl. It
is a base LoRA, as the style loop makes them. The starter answers unseen questions with each style twice:
with 32 and with 4 bits, from the same random seed. Drawn users (apps/prove/drawn_users.py) give the replies
stars.

A user's style is the one whose replies of 32 bits to half of the questions earn the most stars, as if the
style loop had found it. The replies to the other half count, and then the halves change places. The table
has the mean win-rates over users, with 95% intervals by a bootstrap over users: of each form against the
untouched model, and of 4 bits against 32. A tie is half a win. The file OUT.npz has the stars [styles, bits,
users, questions] and those of the untouched model [users, questions]. With a file that exists, the script
only prints the table.
"""

import argparse
from pathlib import Path

import numpy as np
from ruvmlx.apps.cli.options import resolve
from ruvmlx.apps.cli.prove import open_bench
from ruvmlx.apps.prove import prompts
from ruvmlx.apps.prove.as_chat import ChatSetup
from ruvmlx.apps.prove.drawn_trial import DrawnSetup, FrozenReplies
from ruvmlx.apps.prove.drawn_users import DrawnStars, DrawnUser
from ruvmlx.apps.prove.statistics import mean_interval
from ruvmlx.apps.prove.trial import Arm, Bench
from ruvmlx.apps.prove.untouched_replies import JudgedReply

from ruvmlx.backends.base import with_lora
from ruvmlx.engine.batch import generate_many
from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.sona.optional.style_basis import StyleBasis
from ruvmlx.sona.shipped import shipped_bytes

MAX_TOKENS, TEMPERATURE = 96, 0.7


def styles(bench: Bench, directions: int, kl: float) -> list[BaseLoRA]:
    """Return the first directions of the style basis, each forwards and backwards."""
    basis = StyleBasis.from_bytes(shipped_bytes("style_bases", bench.model.fingerprint) or b"")
    assert basis is not None, "the starter's style basis is not in this package"
    units = np.eye(len(basis.directions))[:directions]
    return [basis.lora(way * unit * np.sqrt(kl / basis.kl(unit))) for unit in units for way in (1, -1)]


def write_replies(bench: Bench, setup: DrawnSetup, base: BaseLoRA) -> dict[str, JudgedReply]:
    """Return {unseen question: the model's reply with the base LoRA}."""
    with bench.runtime(Arm(learn="off")) as runtime, with_lora(bench.backend, base):
        requests = {q: of[0] for q, of in setup.unseen(runtime, 0, 1).items()}
        found = {r.request_id: JudgedReply.of(r) for r in generate_many(runtime.engine, requests.values())}
        return {q: found[request.request_id] for q, request in requests.items()}


def measure_stars(bench: Bench, setup: DrawnSetup, users: int, made: list[BaseLoRA]) -> dict[str, np.ndarray]:
    """Return the stars of the styles [styles, bits, users, questions] and of the untouched model [users,
    questions]."""
    frozen = FrozenReplies.sample(bench, setup, 0)
    judges = [DrawnStars(DrawnUser.draw(n, False), frozen.texts) for n in range(users)]
    questions = list(frozen.unseen)

    def stars(replies: dict[str, JudgedReply]) -> np.ndarray:
        said = [(q, replies[q].text, replies[q].finished) for q in questions]
        return np.array([[judge(*reply) for reply in said] for judge in judges])

    rows = []
    for i, base in enumerate(made):
        both = [write_replies(bench, setup, b) for b in (base, base.to_4_bits())]
        same = np.mean([both[0][q].text == both[1][q].text for q in questions])
        print(f"style {i + 1} of {len(made)}: {same:.0%} of the replies are the same", flush=True)
        rows.append([stars(replies) for replies in both])
    untouched = stars({q: of[0] for q, of in frozen.unseen.items()})
    return {"styles": np.array(rows), "untouched": untouched}


def wins(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Return the win-rate of each user [users]. new, old: stars [users, questions]."""
    return ((new > old) + 0.5 * (new == old)).mean(axis=1)


def table(found: dict[str, np.ndarray]) -> str:
    """Return the table of the module docstring as Markdown."""
    of_styles, untouched = found["styles"], found["untouched"]
    rates = []
    for chosen, counted in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        best = of_styles[:, 0, :, chosen].mean(axis=-1).argmax(axis=0)  # [users]
        one, four = (of_styles[best, b, np.arange(len(best))][:, counted] for b in (0, 1))
        old = untouched[:, counted]
        rates.append([wins(one, old), wins(four, old), wins(four, one)])
    names = "32 bits against the untouched model", "4 bits against the untouched model", "4 against 32 bits"
    lines = ["| replies | preferred |", "|---|---|"]
    for name, per_user in zip(names, np.mean(rates, axis=0), strict=True):
        low, high = mean_interval(per_user)
        lines.append(f"| {name} | {per_user.mean():.1%} ({low:.1%} to {high:.1%}) |")
    styles, _, users, questions = of_styles.shape
    return "\n".join([*lines, "", f"{users} users, {questions} questions, {styles} styles"])


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("out", type=Path)
    options.add_argument("--users", type=int, default=24)
    options.add_argument("--questions", type=int, default=24)
    options.add_argument("--directions", type=int, default=4)
    options.add_argument("--kl", type=float, default=0.08, help="nats per token")
    given = options.parse_args()
    if not given.out.exists():
        bench = open_bench(resolve({"model": "starter", "threads": 1, "backend": "native"}), print)
        heldout = prompts.own("heldout")[: given.questions]
        chat = ChatSetup(prompts.own("train"), heldout, (30,), MAX_TOKENS, TEMPERATURE)
        made = styles(bench, given.directions, given.kl)
        np.savez(given.out, **measure_stars(bench, DrawnSetup(chat, best_of=1), given.users, made))  # type: ignore[arg-type]
    with np.load(given.out) as file:
        print(table(dict(file)))


if __name__ == "__main__":
    main()
