"""This module downloads the weights of a Hugging Face repository and resumes interrupted downloads.

The library huggingface-hub discards a partly downloaded file when a download is interrupted. To keep partly
downloaded files, this module downloads the weights itself, into huggingface-hub's cache. Each attempt appends
the missing bytes to the file blobs/<SHA-256>.incomplete. When the file is complete, the module checks the
SHA-256 and renames the file to blobs/<SHA-256>. A file that is there already is checked, too, because another
program can have put the file there. If the hash is wrong and the file has bytes of an earlier attempt, the
module downloads the whole file again. huggingface-hub downloads the small files (configuration, tokenizer),
and makes the links of the snapshot (the folder of one revision) to the blobs.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import CorruptFile, RuvmlxError, StoreBusy
from ...platform.files import flush_to_disk, sync_folder
from ...progress import Count
from ...text import size as size_text

# Name patterns of the weight files that are downloaded (or GGUF files in their place). With WEIGHTS and
# SMALL, the program downloads weights, configuration and tokenizer, but no code and no pickles.
WEIGHTS = ["model*.safetensors", "weights*.safetensors"]
SMALL = ["*.json", "tokenizer.model", "*.jinja"]
TIMEOUT_S = 10
RETRIES = 5  # the number of consecutive attempts without a new byte after which a download fails
_SMALL_BYTES = 64 << 20  # the maximum size of a small file, for example of a tokenizer
READ = 16 << 20  # the number of bytes that `_check` reads at a time


@dataclass(frozen=True)
class Weight:
    """A weight file of a repository. size: the file's bytes. sha256: the hash of the file's contents, which
    the hub reports."""

    file: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Listing:
    """The current list of a repository's files on the Hugging Face Hub.

    repo: the repository's folder in the cache
    weights: the weight files to download
    ggufs: the GGUF files of the repository
    architecture: the architecture of the GGUF files, as the hub reports it
    has_safetensors: True if the repository has safetensors files and a config.json
    patterns: name patterns of all files to download: the weights and the small files; in the result of
        `only`, the chosen GGUF files alone
    """

    name: str
    revision: str
    repo: Path
    weights: tuple[Weight, ...]
    ggufs: tuple[Weight, ...] = ()
    architecture: str = ""
    has_safetensors: bool = True
    patterns: tuple[str, ...] = (*SMALL, *WEIGHTS)

    @classmethod
    def of(cls, name: str, repo: Path) -> "Listing":
        import huggingface_hub as hub

        info = hub.HfApi().model_info(name, files_metadata=True, timeout=TIMEOUT_S)
        found = {s.rfilename: s for s in info.siblings or []}

        def large(patterns: list[str]) -> tuple[Weight, ...]:
            wanted = [
                (file, found[file].lfs)
                for file in hub.utils.filter_repo_objects(found, allow_patterns=patterns)
            ]
            return tuple(Weight(file, lfs.size, lfs.sha256) for file, lfs in wanted if lfs is not None)

        weights, ggufs = large(WEIGHTS), large(["*.gguf"])
        architecture = str((info.gguf or {}).get("architecture") or "")
        whole = bool(weights) and "config.json" in found
        return cls(name, str(info.sha), repo, weights, ggufs, architecture, whole)

    def only(self, files: tuple[str, ...]) -> "Listing":
        """Return a listing of the same repository, in which `weights` has only these GGUF files."""
        weights = tuple(weight for weight in self.ggufs if weight.file in files)
        return replace(self, weights=weights, patterns=tuple(map(escape, files)))

    @property
    def total(self) -> int:
        return sum(weight.size for weight in self.weights)

    @property
    def here(self) -> int:
        """Return the number of bytes of `weights` that the cache already has, including the bytes of
        incomplete files."""
        return sum(min(weight.size, self._size(weight)) for weight in self.weights)

    def _size(self, weight: Weight) -> int:
        for path in (self.blob(weight), self.partial(weight)):
            with contextlib.suppress(OSError):
                return path.stat().st_size
        return 0

    def blob(self, weight: Weight) -> Path:
        return self.repo / "blobs" / weight.sha256

    def partial(self, weight: Weight) -> Path:
        return self.repo / "blobs" / f"{weight.sha256}.incomplete"


def fetch_small(listing: Listing) -> Path:
    """Download only the small files of a repository: configuration and tokenizer. Return the snapshot's
    folder."""
    _remove_damaged(listing.repo / "blobs")
    return _snapshot(listing.name, SMALL)


def _remove_damaged(blobs: Path) -> None:
    """Remove the small files that a crash of the machine left incomplete, because huggingface-hub keeps every
    file that has its name. Raises OSError."""
    for path in blobs.iterdir() if blobs.is_dir() else ():
        if path.is_file() and path.stat().st_size <= _SMALL_BYTES and _is_damaged(path):
            path.unlink()


def _is_damaged(blob: Path) -> bool:
    """Return True if a file's contents do not have the hash that is its name: SHA-256, git's SHA-1 or, behind
    some mirrors of the hub, SHA-1. Return False if the name is no such hash."""
    data, digits = blob.read_bytes(), len(blob.name)
    if digits == 64:
        return hashlib.sha256(data).hexdigest() != blob.name
    whole = (data, b"blob %d\0" % len(data) + data)
    return digits == 40 and blob.name not in {
        hashlib.sha1(one, usedforsecurity=False).hexdigest() for one in whole
    }


def fetch_weights(listing: Listing, count: Count) -> Path:
    """Download the missing weights and report their bytes to `count`. Then let huggingface-hub make the
    snapshot, which downloads the small files if `listing.patterns` names them. Return the snapshot's
    folder."""
    count.begin(f"Fetching {listing.name}", listing.total, listing.here)
    _check_disk(listing)
    (listing.repo / "blobs").mkdir(parents=True, exist_ok=True)
    for weight in listing.weights:
        blob = listing.blob(weight)
        # another program can have put this file into the cache, and a crash can have damaged it
        if blob.exists() and not _is_whole(weight, blob, count):
            os.replace(blob, listing.partial(weight))
        if not blob.exists():
            _fetch(listing, weight, count)
    count.begin(f"Fetching {listing.name}", 0)
    return _snapshot(listing.name, list(listing.patterns))


def _snapshot(name: str, patterns: list[str]) -> Path:
    import huggingface_hub as hub
    from huggingface_hub.utils import disable_progress_bars, logging

    disable_progress_bars()
    # without this call, log messages of huggingface-hub would appear in the middle of the chat
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", module="huggingface_hub")
    found = Path(hub.snapshot_download(name, allow_patterns=patterns, etag_timeout=TIMEOUT_S))
    _flush(found)
    return found


def _flush(snapshot: Path) -> None:
    """Write all files of a snapshot's repository, and their names, to the disk. huggingface-hub leaves this
    to the system. After a power failure, an empty config.json would be there, which counts as fetched. Raises
    OSError."""
    repo = snapshot.parent.parent
    for path in (*repo.rglob("*"), repo, repo.parent):
        with contextlib.suppress(FileNotFoundError):  # another process can rename its files meanwhile
            if path.is_dir():
                sync_folder(path)
            elif path.is_file() and not path.is_symlink():
                with path.open("rb") as file:
                    flush_to_disk(file.fileno())


def _check_disk(listing: Listing) -> None:
    missing = listing.total - listing.here
    free = shutil.disk_usage(next(p for p in (listing.repo, *listing.repo.parents) if p.exists())).free
    if missing > free:
        raise RuvmlxError(
            f"{listing.name} needs {size_text(missing)} more on the disk, where {size_text(free)} are free "
            f"({listing.repo.parent}). Make room, or set HF_HUB_CACHE to another disk."
        )


def _fetch(listing: Listing, weight: Weight, count: Count) -> None:
    import huggingface_hub as hub

    url = hub.hf_hub_url(listing.name, weight.file, revision=listing.revision)
    partial = listing.partial(weight)
    with _open_exclusive(partial) as file:
        is_resumed = file.tell() > 0
        try:
            _complete(url, weight, file, count)
        except CorruptFile:
            if not is_resumed:
                raise
            # A crash of the machine can leave gaps in the bytes of an earlier attempt. The file is empty now.
            _complete(url, weight, file, count)
    os.replace(partial, listing.blob(weight))


def _complete(url: str, weight: Weight, file: BinaryIO, count: Count) -> None:
    """Download the bytes that are missing at the file's end, and check the file."""
    failures = 0
    while file.tell() < weight.size:
        before = file.tell()
        try:
            _append(url, file, count)
        except Exception as error:
            failures = failures + 1 if file.tell() == before else 0
            if failures >= RETRIES or not _is_broken_connection(error):
                raise
    _check(weight, file, count)


@contextlib.contextmanager
def _open_exclusive(path: Path) -> Iterator[BinaryIO]:
    """Open the file at its end, and lock it so that no other process downloads it at the same time. Raises
    StoreBusy if another process has the lock, and OSError on a file system without locks."""
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreBusy("another process is fetching this model; wait until it is done.") from None
        file.seek(0, os.SEEK_END)
        yield file


def _append(url: str, file: BinaryIO, count: Count) -> None:
    """Download, in one request, the bytes that are missing after the partial file's end, and append them to
    the file."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    start = file.tell()
    headers = build_hf_headers() | {"Range": f"bytes={start}-", "Accept-Encoding": "identity"}
    options: dict[str, Any] = {"headers": headers, "follow_redirects": True, "timeout": TIMEOUT_S}
    with get_session().stream("GET", url, **options) as response:
        hf_raise_for_status(response)
        if response.status_code != 206:  # not a part: the server sends the whole file
            _empty(file)
            count.add(-start)
        for chunk in response.iter_bytes():
            file.write(chunk)
            count.add(len(chunk))


def _is_broken_connection(error: Exception) -> bool:
    """Return True if the error is an httpx TransportError (a broken connection or a timeout). The test
    compares class names, because huggingface-hub can use httpx from different packages."""
    return any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


def _check(weight: Weight, file: BinaryIO, count: Count) -> None:
    """Check the file's size and SHA-256. If the size or the hash is wrong, empty the file and raise
    CorruptFile."""
    file.flush()
    os.fsync(file.fileno())
    size = file.tell()
    if size != weight.size or _digest(file, count) != weight.sha256:
        _empty(file)
        count.add(-min(size, weight.size))
        raise CorruptFile(
            f"{weight.file} arrived damaged ({size:,} of {weight.size:,} bytes). Fetch it again."
        )


def _is_whole(weight: Weight, path: Path, count: Count) -> bool:
    """Return True if a complete file has the size and the SHA-256 of the weight file."""
    with path.open("rb") as file:
        return path.stat().st_size == weight.size and _digest(file, count) == weight.sha256


def _digest(file: BinaryIO, count: Count) -> str:
    """Return the SHA-256 of a whole file as hexadecimal digits. Report to `count` that the work goes on."""
    digest = hashlib.sha256()
    file.seek(0)
    while chunk := file.read(READ):
        digest.update(chunk)
        count.add(0)
    return digest.hexdigest()


def _empty(file: BinaryIO) -> None:
    file.seek(0)
    file.truncate()
