"""`pull`, `ls`, `show` and `rm`: models."""

from typing import Any

import click

from ruvmlx.errors import UsageError

from .output import json_option, print_json, show_facts
from .output import show as show_line


def _facts(model: Any) -> dict[str, Any]:
    return {
        "name": model.name,
        "path": str(model.path),
        "format": model.format,
        "bits": round(model.bits, 2),
        "parameters": model.parameters,
        "bytes": model.bytes,
    }


@click.command()
@click.argument("name")
@json_option
def pull(name: str, as_json: bool) -> None:
    """Fetch a model from Hugging Face (owner/name) and check it. Stopped, it goes on where it was."""
    from ruvmlx.models.load import load_model

    from ..progress import watching

    with watching(pull=True) as watch:
        facts = _facts(load_model(name, watch))
    if as_json:
        print_json(facts)
    else:
        show_facts(facts)


@click.command("ls")
@json_option
def list_models(as_json: bool) -> None:
    """Models on this machine."""
    from ruvmlx.models.local import list_local_models

    rows = list_local_models()
    if as_json:
        print_json(rows)
        return
    for row in rows:
        show_line(f"{row['name']:<40}  {row['bytes'] / 1e6:>8.0f} MB  {row['path']}")


@click.command("show")
@click.argument("name", default="starter")
@json_option
def show_model(name: str, as_json: bool) -> None:
    """One model's files and shape."""
    from ruvmlx.backends.matrix_types import matrix_types
    from ruvmlx.models.load import load_model

    model = load_model(name)
    facts = _facts(model) | {"fingerprint": model.fingerprint, "config": model.config}
    types = matrix_types(model)
    if as_json:
        print_json(facts | {"matrix_types": [vars(kind) for kind in types]})
    else:
        show_facts(facts | {f"{kind.type} matrices": kind for kind in types})


@click.command("rm")
@click.argument("name")
def remove_model(name: str) -> None:
    """Delete a fetched model (owner/name) from the Hugging Face cache."""
    from huggingface_hub import scan_cache_dir

    from ruvmlx.models.hub import cached_folder

    if "/" not in name or cached_folder(name) is None:
        raise UsageError(f"{name!r} was not fetched by ruvmlx pull; only such models are deleted here.")
    cache = scan_cache_dir()
    revisions = [v.commit_hash for r in cache.repos if r.repo_id == name for v in r.revisions]
    plan = cache.delete_revisions(*revisions)
    plan.execute()
    show_line(f"deleted {name}: {plan.expected_freed_size / 1e6:.0f} MB")


VERBS = [pull, list_models, show_model, remove_model]
