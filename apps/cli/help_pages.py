"""This module has the help texts of each verb, apart from its options: one line, and two or more examples.

A verb is a command of `ruvmlx`. All examples are in this module. tests/cli/test_help.py checks that each verb
has examples and that the command line can parse each example.
"""

from dataclasses import dataclass

# These are the exit codes that the help of every verb shows, as docs/scripts.md lists them.
EXIT_CODES = (
    (0, "ok"),
    (1, "failed"),
    (2, "wrong usage"),
    (3, "the model is not here and cannot be fetched"),
    (4, "a file is damaged"),
    (5, "another process holds the data"),
    (130, "interrupted"),
)


@dataclass(frozen=True)
class HelpPage:
    """The help page of a verb. short: one line for the list of verbs. examples: pairs of the words after
    `ruvmlx` and the effect of this command."""

    short: str
    examples: tuple[tuple[str, str], ...]


def _page(short: str, *examples: tuple[str, str]) -> HelpPage:
    return HelpPage(short, examples)


SECTIONS = {
    "Chat": ("chat", "generate", "rate"),
    "What was learned": ("learn", "adapters", "prove"),
    "Your chats and settings": ("sessions", "log", "backup", "restore", "config"),
    "Models": ("ls", "models", "pull", "show", "rm", "perplexity"),
    "Programs and this machine": (
        "serve",
        "launch",
        "embed",
        "connect",
        "mcp",
        "ps",
        "stop",
        "doctor",
        "bench",
        "completion",
    ),
}

PAGES = {
    "chat": _page(
        "Chat, and rate the replies",
        ("chat --continue", "go on with the last chat"),
        ("chat --model owner/name --max-tokens 200", "another model; a reply ends after 200 tokens"),
        ("chat --plain", "line by line, for screen readers and pipes"),
    ),
    "generate": _page(
        "Write one reply to a prompt",
        ('generate "Name three rivers."', "one reply"),
        ('generate "Sum this up."', "behind `cat letter.txt |`: of that text"),
        ("generate - --max-tokens 60 --json", "the prompt from standard input, for a script"),
        ("generate --prompts in.jsonl --out out.jsonl", "many prompts in batches; goes on after a stop"),
    ),
    "rate": _page(
        "Rate a reply; the model learns from it at once",
        ("rate last up", "the newest reply was good"),
        ("rate last down --why long", "bad, because it was too long"),
        ('rate last 2 --note "so stiff"', "two of five stars, and a note"),
    ),
    "learn": _page(
        "Show what the model learned from your ratings, undo it, or train now",
        ("learn status", "what your ratings changed"),
        ("learn undo", "take the last rating back"),
    ),
    "learn status": _page(
        "Show what your ratings changed, and how far",
        ("learn status", "in sentences"),
        ("learn status --adapter work --json", "another adapter, for a script"),
    ),
    "learn check": _page(
        "Check whether it helps: ask the same with and without what was learned",
        ("learn check", "ten fixed questions and ten of your own"),
        ("learn check --questions mine.txt --full", "questions of a file, with all replies"),
    ),
    "learn undo": _page(
        "Take the last rating back",
        ("learn undo", "one rating; call it again for the one before"),
        ("learn undo --adapter work", "the last rating of another adapter"),
    ),
    "learn rollback": _page(
        "Return to an earlier version, or to a date",
        ("learn rollback 12", "`learn status` names the version in use"),
        ("learn rollback --before 2026-11-20", "as it was when that day began"),
    ),
    "learn consolidate": _page(
        "Learn from all your ratings together now",
        ("learn consolidate", "Ctrl-C stops it, the next call continues"),
        ("learn consolidate --steps 24", "train for minutes, in 24 steps"),
    ),
    "learn reset": _page(
        "Start over from the original model",
        ("learn reset", "`learn rollback VERSION` takes this back"),
        ("learn reset --adapter work", "another adapter"),
    ),
    "learn export": _page(
        "Print your rated replies as JSON lines",
        ("learn export", "a prompt, a reply and its label on each line"),
        ("learn export --format dpo", "pairs of a better and a worse reply"),
    ),
    "learn chart": _page(
        "Compare predicted ratings with yours",
        ("learn chart", "as text"),
        ("learn chart --svg taste.svg", "as a picture"),
    ),
    "learn kv": _page(
        "Show the precision of the model's short-term memory (KV cache)",
        ("learn kv", "what is used, and why"),
        ("learn kv --measure", "measure again on your longest replies"),
    ),
    "learn router": _page(
        "Show how often replies used what was learned",
        ("learn router", "counts and mean rewards"),
        ("learn router --train", "train the network that reads conversations"),
    ),
    "adapters": _page(
        "Keep what was learned under names, and switch between them",
        ("adapters ls", "all of them; * is the one in use"),
        ("adapters use work", "switch to one of them"),
    ),
    "adapters ls": _page(
        "List the adapters",
        ("adapters ls", "of all models"),
        ("adapters ls --json", "for a script"),
    ),
    "adapters use": _page(
        "Use another adapter from now on",
        ("adapters use work", "one that `adapters ls` lists"),
        ("adapters use work --new", "a new one, which starts from the original model"),
        ("adapters use none", "the original model; ratings change nothing"),
    ),
    "adapters save": _page(
        "Copy the adapter in use under a new name",
        ("adapters save before-trip", "a copy to return to"),
        ("adapters save short --adapter work", "a copy of another one"),
    ),
    "adapters export": _page(
        "Write an adapter as files for mlx-lm or PEFT",
        ("adapters export my-adapter", "a new folder of that name"),
        ("adapters export small --bits 4", "a fifth of the size, for `adapters import`"),
    ),
    "adapters import": _page(
        "Read an adapter from files",
        ("adapters import my-adapter work", "a folder, and the name that it gets here"),
        ("adapters import my-adapter work --model owner/name", "for another model"),
    ),
    "adapters rm": _page(
        "Delete an adapter and its ratings",
        ("adapters rm work", "for good"),
        ("adapters rm default --force", "though it is in use"),
    ),
    "adapters fuse": _page(
        "Write the model with what it learned, for other programs",
        ("adapters fuse my-model", "a new folder that mlx-lm loads"),
        ("adapters fuse my-model --dequantize", "for programs other than MLX"),
    ),
    "prove": _page(
        "Measure whether ratings help, with a simulated user",
        ("prove --ratings 10 --heldout questions.txt", "quick; your own questions, one a line"),
        ("prove --user list", "the tastes that can be simulated; the default likes short replies"),
        ("prove --scorer taste.py:score --seeds 3", "a taste of your own, as a function"),
    ),
    "sessions": _page(
        "List, search, export and delete saved chats",
        ("sessions ls", "all chats, the newest first"),
        ("sessions search paris", "chats with that word"),
    ),
    "sessions ls": _page(
        "List all chats",
        ("sessions ls", "the newest first"),
        ("sessions ls --json", "for a script"),
    ),
    "sessions show": _page(
        "Print one chat",
        ("sessions show last", "the chat that was used last"),
        ("sessions show 3f2a --json", "an id may be shortened"),
    ),
    "sessions search": _page(
        "Find chats by their words",
        ("sessions search paris", "a word, or a part of one"),
        ('sessions search "train to" paris', "all of these"),
        ('sessions search --like "how do I travel there"', "chats about the same, in any words"),
    ),
    "sessions export": _page(
        "Write a chat as Markdown or JSON",
        ("sessions export last --out trip.md", "to read"),
        ("sessions export last --out trip.json", "all branches, for `sessions import`"),
    ),
    "sessions import": _page(
        "Read chats from JSON files",
        ("sessions import trip.json", "an export, or a list of role and content"),
        ("sessions import old-chats", "all files of a folder; none is imported twice"),
        ("sessions import - --json", "from standard input"),
    ),
    "sessions rename": _page(
        "Give a chat another title",
        ('sessions rename last "Trip to Paris"', "the chat that was used last"),
        ("sessions rename 3f2a Cooking", "an id may be shortened"),
    ),
    "sessions folder": _page(
        "Put a chat into a folder of lists",
        ("sessions folder last Work", "`sessions ls --folder Work` lists them"),
        ("sessions folder 3f2a", "out of it"),
    ),
    "sessions pin": _page(
        "Show a chat first in lists",
        ("sessions pin last", "the chat that was used last"),
        ("sessions pin 3f2a --off", "no longer"),
    ),
    "sessions fork": _page(
        "Copy a chat, to continue it differently",
        ("sessions fork last", "the chat that was used last"),
        ("sessions fork 3f2a --json", "an id may be shortened"),
    ),
    "sessions rm": _page(
        "Delete a chat",
        ("sessions rm 3f2a", "within a day, `sessions restore 3f2a` brings it back"),
        ("sessions rm 3f2a --now", "for good"),
    ),
    "sessions forget": _page(
        "Delete the words of replies outside chats",
        ("sessions forget last", "the newest reply of `generate` or the server"),
        ("sessions forget --all", "all replies that belong to no chat"),
    ),
    "sessions restore": _page(
        "Bring a deleted chat back",
        ("sessions restore", "only lists the chats that can come back"),
        ("sessions restore 3f2a", "brings one of them back"),
    ),
    "log": _page(
        "Show the record of replies, ratings and adapters",
        ("log show", "the newest rows"),
        ("log verify", "was a row changed or removed?"),
    ),
    "log show": _page(
        "Print the newest rows",
        ("log show --kind failure", "requests that got no reply"),
        ("log show --since 2026-11-20 --limit 100 --json", "of some days, for a script"),
    ),
    "log verify": _page(
        "Check that no row was changed or removed",
        ("log verify", "the log, and the ratings and adapters against it"),
        ("log verify --has 3f2a90c1b2d4", "is the row there whose hash you kept?"),
    ),
    "log export": _page(
        "Write rows as JSON lines",
        ("log export --out log.jsonl", "all rows, to a new file"),
        ("log export --kind rating --until 2026-11-01", "some, to standard output"),
    ),
    "backup": _page(
        "Copy all chats, ratings and adapters to a file",
        ("backup ruvmlx-backup.db", "a new file, checked"),
        ("backup ruvmlx-backup.db --replace", "over the old one, as for every night"),
    ),
    "restore": _page(
        "Replace your data with a backup, from this or another computer",
        ("restore ruvmlx-backup.db", "what was here is kept beside it"),
        ("restore ruvmlx-backup.db --json", "for a script"),
    ),
    "config": _page(
        "Show and change settings",
        ("config show", "all settings"),
        ("config set max_tokens 200", "from now on, a reply ends after 200 tokens"),
    ),
    "config show": _page(
        "Show all settings",
        ("config show", "values and meanings"),
        ("config show --origin", "and what decided each: a flag, the environment, a file"),
    ),
    "config set": _page(
        "Change a setting for good",
        ("config set max_tokens 200", "a reply ends after 200 tokens"),
        ("config set temperature 0.2", "replies that vary less"),
    ),
    "config unset": _page(
        "Take a change back, so that the default applies",
        ("config unset max_tokens", "the default length again"),
        ("config unset temperature", "the model's own temperature again"),
    ),
    "config path": _page(
        "Show where your data and settings are",
        ("config path", "the folder and its main files"),
        ("config path --json", "for a script"),
    ),
    "ls": _page(
        "List the installed models",
        ("ls", "those of ollama and LM Studio, too"),
        ("ls --json", "for a script"),
    ),
    "models": _page(
        "Suggest models for this machine",
        ("models", "those that are here, then the best ones to fetch"),
        ("models --json", "for a script"),
    ),
    "pull": _page(
        "Fetch a model from Hugging Face",
        ("pull mlx-community/Qwen3-4B-4bit", "then `chat --model mlx-community/Qwen3-4B-4bit`"),
        ("pull owner/name:Q5_K_M", "one of several GGUF files"),
    ),
    "show": _page(
        "Show one model's size and format, and whether it fits",
        ("show starter", "the model that comes with ruvmlx"),
        ("show owner/name --memory", "open it, and show what takes memory"),
    ),
    "rm": _page(
        "Delete a fetched model",
        ("rm owner/name", "with all its files"),
        ("rm mlx-community/Qwen3-4B-4bit", "`ls` names those that are here"),
    ),
    "perplexity": _page(
        "Measure how well a model predicts a text",
        ("perplexity book.txt", "lower is better"),
        ("perplexity - --ctx 512 --kv f16", "from standard input, with a short window"),
    ),
    "serve": _page(
        "Answer other programs over HTTP",
        ("serve", "for programs on this machine"),
        ("serve --host 0.0.0.0 --port 9000", "for others, too; a key is made and asked for"),
        ("serve --install", "start it at every login; asks first"),
    ),
    "launch": _page(
        "Run one model over several machines, or several processes",
        ("launch --hosts 10.0.0.1,10.0.0.2 -- chat", "over this machine (first) and another"),
        ('launch -n 2 -- generate "Name three rivers."', "two processes on this machine, to try it"),
    ),
    "embed": _page(
        "Turn texts into vectors",
        ('embed "a river" "a stream of water"', "one line of JSON for each text"),
        ("embed - --out vectors.npy", "each line of standard input, for NumPy"),
    ),
    "connect": _page(
        "Let another program use the server",
        ("connect claude", "print its configuration, for the running server"),
        ("connect codex --write", "write it; `connect codex --undo` takes it back"),
    ),
    "mcp": _page(
        "Let another AI program rate replies and search your chats (MCP)",
        ("mcp", "an MCP server on standard input and output, for the running server"),
        ("mcp --server http://127.0.0.1:9000", "of another port"),
    ),
    "ps": _page(
        "List the models that the server has open",
        ("ps", "their memory, and what they do"),
        ("ps --json", "for scripts"),
    ),
    "stop": _page(
        "Close a model of the server, or end the server",
        ("stop owner/name", "when nobody uses it any more"),
        ("stop", "end the server"),
    ),
    "doctor": _page(
        "Check the installation, your data and the model",
        ("doctor", "a line for each check"),
        ("doctor --report report.md", "also measure, and write a report for others"),
    ),
    "bench": _page(
        "Measure speed, memory and learning",
        ("bench --quick", "two minutes on an idle machine; it says how long here"),
        ("bench model --vs llama.cpp --report speed.html", "one part, beside another program"),
    ),
    "completion": _page(
        "Let the shell complete commands, models, chats and settings",
        ("completion install", "for the shell that you use"),
        ("completion remove", "take it back"),
    ),
    "completion install": _page(
        "Write the completion file of a shell",
        ("completion install", "for the shell that you use"),
        ("completion install --shell zsh --print", "print it, write nothing"),
    ),
    "completion remove": _page(
        "Delete that file",
        ("completion remove", "for the shell that you use"),
        ("completion remove --shell fish", "for another one"),
    ),
}
