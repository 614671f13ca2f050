"""This module explains each setting in plain words, group by group. `config show`, the help of the flags, the
shell's completion and docs/settings.md print these texts.

A text says what a value of the setting does, for a reader who has never met the setting's name. Each text is
a phrase without a full stop.
"""

from ..tiers import EXAMPLE, USUAL, describe_lengths, describe_tiers

# The heading of each group -> the settings of the group, with their meanings.
GROUPS = {
    "The model, and what computes it": {
        "model": (
            "the model that writes: starter (a small one that ruvmlx brings), a folder, a .gguf file, or "
            "owner/name of huggingface.co; auto: ruvmlx chooses one of auto_models for each question, and "
            "learns from your ratings which one"
        ),
        "auto_models": (
            "the models from which auto chooses, as in starter,owner/name; by default the starter and at "
            "most two larger models on this machine, if the memory has room for all of them"
        ),
        "backend": (
            "what computes: native (C code on the CPU), mlx (Apple's library, on the GPU), hybrid (both "
            "share the work), reference (slow, to compare with), or auto, which chooses one of the first two"
        ),
        "threads": "how many cores of the CPU compute; all physical cores by default",
        "max_context": (
            "how much the model may read and write in one chat, in tokens (a token is a word or a part of"
            " one); the model's own limit by default"
        ),
        "memory_limit": (
            "the most memory for a model with its KV caches, its adapters and its learning, as in 2GB; by "
            "default what is free"
        ),
    },
    "How a reply is written. A token is a word or a part of one.": {
        "max_tokens": "the longest reply, in tokens; 100 tokens are about 75 English words",
        "temperature": (
            "how freely tokens are drawn: 0 always takes the likeliest one, 1 draws each as often as the "
            "model says, higher values draw unlikely ones more often; by default what the "
            "model's makers set, or 0.7"
        ),
        "top_p": "keeps the likeliest tokens whose chances add up to this share: 0.95 is 95%, 1 keeps all",
        "top_k": "keeps only so many of the likeliest tokens; 0 keeps all",
        "min_p": (
            "leaves out tokens with less than this share of the likeliest token's chance; 0 leaves out none"
        ),
        "presence_penalty": (
            "makes a token less likely once the reply has used it; -2 to 2: 0 is off, below 0 makes it more "
            "likely"
        ),
        "frequency_penalty": (
            "makes a token less likely for each time that the reply has used it; -2 to 2: 0 is off, below 0 "
            "makes it more likely"
        ),
        "repetition_penalty": (
            "makes a token less likely by this factor once the reply has used it; 0.1 to 2: 1 is off, below "
            "1 makes it more likely"
        ),
        "best_of": (
            "how many replies are written at once to a question; you see the one that suits your ratings "
            "best; auto: up to 4 replies, while they take at most 1.5 times as long as one"
        ),
        "speculate": (
            "how many tokens are guessed ahead, 1 to 7, and checked together: the same reply, sooner; the "
            "guesses come from earlier words of the chat, or from draft_model; auto: as many as save time on "
            "this machine; off: none"
        ),
        "optimizer": (
            "on: if replies come at under 50 tokens a second, ruvmlx tries, while you do not type, other "
            "values of speculate and threads, and how many requests it answers at the same time; it uses the "
            "fastest ones, but a value that you set yourself stays; watch: it only measures; off: neither"
        ),
        "draft_model": (
            "a small model of the same family, which guesses tokens that the model checks: the same reply, "
            "sooner; none: no second model guesses"
        ),
        "system": (
            'what the model reads before each new chat (the system prompt), as in "Answer briefly"; '
            "none: only what the model's makers put there"
        ),
        "thinking": (
            "on: the model thinks before it answers, if it can; off: it answers at once, if it can; auto: as "
            "its makers chose"
        ),
    },
    "How the model learns from your ratings": {
        "adapter": (
            "the name of the adapter in use, at first the one that is called `default`: an adapter keeps "
            "what the model learned from you, beside the model; none: nothing is learned or used"
        ),
        "rate_thoughts": "on: ratings also change how the model thinks; off: only how it answers",
        "examples": (
            "how many replies that you liked, to similar questions, the model is shown before it writes; "
            "0: none"
        ),
        "implicit_feedback": (
            "on: what you do counts a little, too, until you rate the reply: to copy or answer it counts as "
            "good, to stop it or have it written again as bad"
        ),
        "learn_when_idle": (
            "on: while you do not type, the background learning runs, and so do the measurements of "
            "kv_measure and the trials of optimizer; off: none of these run by themselves, and `ruvmlx learn "
            "consolidate` starts the background learning; each rating changes the model at once in both cases"
        ),
        "slow_loop": (
            "how the background learning uses your ratings; training: it changes the "
            "parts that base_targets names; style: it only mixes ready-made changes of style, which a model "
            "such as the starter has; auto: style if the model has such changes, training if not"
        ),
        "learn_targets": (
            "which parts of the model a rating changes at once: head (the layer that chooses the next "
            "token), attention (the layers that look back), ffn (the layers between them), all (these "
            "three), embedding (what the model reads for each token), or names of matrices as in "
            "q_proj,v_proj"
        ),
        "base_targets": (
            "which parts of the model the background learning changes, when slow_loop is training, or auto "
            "with a model that has no changes of style; the same words as for learn_targets"
        ),
        "adapter_bits": (
            "how many bits each number of what the background learning made has in memory, 32 or 4; 4 needs "
            "less than a fifth of the memory, and is less exact"
        ),
        "micro_rank": (
            "what a rating can change in the output head if the adapter is new: 1, which words to write; 2, "
            "also which words to write near the end of a reply; an adapter that has learned keeps its number"
        ),
        "layer_rank": (
            "what a rating can change in the parts other than the head, if learn_targets names any: 1, one "
            "change for the whole reply; 2, also one for its second half, which takes more time and memory"
        ),
        "router": (
            "on: ruvmlx chooses for each reply whether to use what was learned; it learns this from your "
            "ratings and from the time that replies take"
        ),
    },
    "The KV cache: what the model has read, kept so that it reads nothing twice": {
        "kv": (
            f"how exactly the KV cache is kept: f16 (16 bits a number), tiered ({describe_tiers()} by "
            "age, which saves memory; Qwen 2 and 2.5 and other models with a bias on their keys: no 4 bits), "
            "or auto, which chooses"
        ),
        "kv_tiers": (
            f"at which ages the tokens of a tiered cache lose bits, as in {EXAMPLE}: {describe_lengths()}; "
            f"by default {USUAL} (256,all for a model with a bias on its keys), until kv_measure has found "
            "something better (`ruvmlx learn kv` shows it)"
        ),
        "kv_limit": (
            "how far a tiered cache that was chosen by measurement may change the model's predictions (KL "
            "divergence, in nats per token): 0 is not at all, 0.004 very little; `ruvmlx "
            "learn kv` shows what was measured"
        ),
        "kv_budget": (
            "the most memory for the KV caches of all chats, as in 500MB or 2GB; to stay within it, "
            "older tokens lose bits sooner; 0, as by default: what the memory allows"
        ),
        "kv_disk": (
            "the most disk space for the KV caches of your newest chats, so that they go on at once after"
            " a restart; 0: none"
        ),
        "kv_measure": (
            "on: while you do not type, ruvmlx measures on your long replies how exact the cache must be"
        ),
    },
    "The server, which `ruvmlx serve` starts": {
        "server_memory": (
            "the most memory for all models of a server together, as in 500MB or 2GB; by default what "
            "is free at its start"
        ),
        "server_unload": (
            "after how many minutes a server closes a model that nobody uses; the model that the server "
            "started with stays open; 0: no model is closed"
        ),
    },
    "How the chat looks": {
        "theme": (
            "the chat's colours: dark, light, contrast, or a theme of the library Textual; auto asks "
            "the terminal"
        ),
        "motion": "off: nothing in the chat blinks, slides or fades",
        "keys": (
            "other keys for the chat's actions, as in again=f7,chats=f9; F1 in the chat lists the actions"
        ),
    },
}
MEANINGS = {name: text for group in GROUPS.values() for name, text in group.items()}
