"""Fetches models from the Hugging Face hub: only what is served, with progress, and with one line when it fails.

The library (`huggingface_hub`) does the work: its cache (`HF_HOME`), its token (`HF_TOKEN`), its resuming of what was
broken off, `HF_ENDPOINT` and `HF_HUB_OFFLINE`. It is imported inside the functions: that takes half a second, and only
ids need it.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cli.http import is_url
from shared.errors import StartupError
from shared.model_sizes import read_json
from shared.reading import is_file

MODEL_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+?)(?:@(?P<revision>[\w./-]+))?\Z")
"""`owner/name`, or `owner/name@revision`."""
NEEDED_FILES = ["*.json", "*.jinja", "model.safetensors", "model-*-of-*.safetensors"]
"""Configuration, tokenizer, chat template, weights. Never pickles or code."""
UNNEEDED_FILES = ["*/*"]
"""What lies in folders: other formats of the same weights."""
SPARE_BYTES = 256 * 1024**2
"""Room that is left on the disk."""
PROGRESS_PERIOD_S = 0.25

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes to do."""
ShowProgress = Callable[[str], Progress]
"""Called with what is done; gives what shows how far it is."""


class HubUnreachableError(StartupError):
    """The hub does not answer, or must not be asked; what is in its cache can still be used."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub."""

    name: str
    """`owner/name`."""
    revision: str | None = None
    """Branch, tag or commit; None: the main branch."""

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name


def parse_source(text: str, revision: str | None = None) -> HubModel:
    """Return the model that `owner/name` or `owner/name@revision` names.

    Raises:
        StartupError: it is no id, or two revisions are named.
    """
    match = MODEL_ID.match(text)
    if match is None:
        raise StartupError(f"'{text}' is no model id", "Use owner/name, or owner/name@revision")
    if revision and match["revision"] and revision != match["revision"]:
        raise StartupError(f"{text} and --revision {revision} name two revisions", "Name one")
    return HubModel(match["name"], revision or match["revision"])


def find_cached(source: HubModel) -> Path | None:
    """Return the model's folder in the hub's cache on this machine, or None if it is not there as a whole."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    with _own_errors(source):
        try:
            folder = Path(_snapshot(source, local_files_only=True))
        except LocalEntryNotFoundError:
            return None
    return folder if is_file(folder / "config.json") else None


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One that is in the hub's cache on this machine, as a whole."""

    name: str
    """`owner/name`."""
    commit: str
    num_bytes: int
    """On the disk; what several revisions share counts for each."""
    used_s: float
    """When it was read last, seconds since 1970."""


def list_cached() -> list[CachedModel]:
    """Return the models in the hub's cache, by name, those with configuration and weights."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    found = [
        CachedModel(repo.repo_id, revision.commit_hash, revision.size_on_disk, repo.last_accessed)
        for repo in repos
        if repo.repo_type == "model"
        for revision in repo.revisions
        if {"config.json"} <= (names := {file.file_name for file in revision.files})
        and any(name.endswith(".safetensors") for name in names)
    ]
    return sorted(found, key=lambda each: (each.name, each.commit))


def fetch(source: HubModel, folder: Path | None, show: ShowProgress) -> Path:
    """Return the model's folder, after fetching what is not there yet.

    Args:
        source: on the hub.
        folder: where to put the files; None: the hub's cache.
        show: what it gives is called from another thread, while bytes arrive, and while they are compared.

    Raises:
        StartupError: no network, no such model or revision, a gated one, no weights that can be read, a full disk,
            bytes that are not the hub's.
    """
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    _check_endpoint()
    with _own_errors(source):
        files = _snapshot(source, local_dir=folder, dry_run=True)
        _check_files(source, [file.filename for file in files])
        missing = sum(file.file_size or 0 for file in files if file.will_download)
        place = folder or _cache_of(source)
        _check_room(place, missing)
        with _watched(partial(stored_bytes, place), missing, show(str(source))):
            found = Path(_snapshot(source, local_dir=folder))
        if missing:
            here = sum(path.stat().st_size for path in found.rglob("*") if path.is_file())
            with _watched(_read_bytes, here, show(f"{source} (digests)")):
                _check_digests(source, folder)
        return found


def peek(source: HubModel) -> tuple[dict[str, Any], int]:
    """Return a model's config.json, and the bytes of its weights, without fetching these; nothing is kept.

    Raises:
        StartupError: as `fetch`.
    """
    from huggingface_hub import snapshot_download

    _check_endpoint()
    with _own_errors(source), TemporaryDirectory() as place:
        files = _snapshot(source, local_dir=place, dry_run=True)
        _check_files(source, [file.filename for file in files])
        snapshot_download(source.name, revision=source.revision, allow_patterns="config.json", local_dir=place)
        num_bytes = sum(file.file_size or 0 for file in files if file.filename.endswith(".safetensors"))
        return read_json(Path(place, "config.json")), num_bytes


def _check_endpoint() -> None:
    """Refuse an `HF_ENDPOINT` that is no URL: the library would fail somewhere inside."""
    from huggingface_hub.constants import ENDPOINT

    if not is_url(ENDPOINT):
        raise StartupError(f"HF_ENDPOINT is no URL: '{ENDPOINT}'", "Use https://…, or unset it")


def _snapshot(source: HubModel, **options: Any) -> Any:
    from huggingface_hub import snapshot_download

    what: dict[str, Any] = {"allow_patterns": NEEDED_FILES, "ignore_patterns": UNNEEDED_FILES}
    return snapshot_download(source.name, revision=source.revision, **what, **options)


def _check_files(source: HubModel, names: list[str]) -> None:
    if "config.json" not in names:
        raise StartupError(
            f"{source} is not a model that can be served: it has no config.json", "Choose another", "unsupported_model"
        )
    if not any(name.endswith(".safetensors") for name in names):
        hint = "Choose one that has them; pickled weights are never read"
        raise StartupError(f"{source} has no weights as safetensors", hint, "unsupported_model")


def _check_digests(source: HubModel, folder: Path | None) -> None:
    """Compare all that is here with the digests that the hub has, and remove what differs.

    Raises:
        StartupError: something does.
    """
    from huggingface_hub import HfApi

    compared = HfApi().verify_repo_checksums(source.name, revision=source.revision, local_dir=folder)
    broken = [Path(compared.verified_path, each["path"]) for each in compared.mismatches]
    for path in broken:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    if broken:
        names = ", ".join(path.name for path in broken)
        said = f"{source} has come with other bytes than the hub has, by their digests: {names}"
        raise StartupError(said, "They are removed: try again")


def _cache_of(source: HubModel) -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    return Path(HF_HUB_CACHE) / repo_folder_name(repo_id=source.name, repo_type="model")


def _check_room(place: Path, num_bytes: int) -> None:
    """Refuse what the disk cannot hold, before anything is fetched."""
    existing = next(path for path in (place.absolute(), *place.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if num_bytes and num_bytes + SPARE_BYTES > free:
        hint = "Free some, or name another place with `sluice pull --to` or HF_HOME"
        raise StartupError(
            f"{num_bytes / 1e9:.2f} GB are to be fetched, and {place} has room for {free / 1e9:.2f}", hint, "disk_full"
        )


def stored_bytes(place: Path) -> int:
    """Return the bytes of all files below a folder, parts of files included, holes not; 0 if there is none."""
    total = 0
    for path in place.rglob("*") if place.is_dir() else ():
        try:
            stat = path.lstat()
        except OSError:  # it was just renamed: it counts the next time
            continue
        if path.is_file() and not path.is_symlink():
            total += min(stat.st_size, stat.st_blocks * 512)
    return total


def _read_bytes() -> int:
    """Return how many bytes this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


@contextmanager
def _watched(count: Callable[[], int], total: int, progress: Progress) -> Iterator[None]:
    """Call `progress` by period while the block runs, and once at its end if it succeeds.

    What is done is what `count` has grown by, bytes that were stored or read: the library's own bars differ from one
    way of transfer to another.
    """
    before = count()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(PROGRESS_PERIOD_S):
            progress(min(total, max(0, count() - before)), total)

    thread = threading.Thread(target=watch, name="pull-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    progress(total, total)


@contextmanager
def _own_errors(source: HubModel) -> Iterator[None]:
    """Turn the library's errors into one line each, with the next step."""
    from huggingface_hub.errors import DryRunError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        yield
    except DryRunError as error:  # the reason why the hub could not be asked stands behind it
        raise _explain(source, error.__cause__ or error) from error
    except LocalEntryNotFoundError as error:
        if error.__cause__ is None:
            raise
        raise _explain(source, error.__cause__) from error
    except (HfHubHTTPError, OSError) as error:
        raise _explain(source, error) from error
    except ValueError as error:  # of the library's own check of ids
        raise StartupError(f"'{source}' is no model id: {error}", "Use owner/name") from error


def _explain(source: HubModel, error: BaseException) -> StartupError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        hint = "Accept them there, and set HF_TOKEN to a token of yours"
        return StartupError(
            f"{source} is gated: its owners ask for terms to be accepted on the hub", hint, "gated_model"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        hint = "Check the id; a private model needs HF_TOKEN"
        return StartupError(f"the hub has no public model '{source.name}'", hint, "no_such_model")
    if isinstance(error, errors.RevisionNotFoundError):
        return StartupError(
            f"{source.name} has no revision '{source.revision}'", "Name a branch, a tag or a commit", "no_such_model"
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        hint = "Unset it, or give a folder on this machine"
        said = f"{source} is not on this machine, and HF_HUB_OFFLINE forbids to ask the hub"
        return HubUnreachableError(said, hint, "hub_unreachable")
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        kind = HubUnreachableError if status >= 500 else StartupError
        return kind(f"the hub refuses to give {source}: HTTP {status}", "Try again later", "hub_unreachable")
    reason = getattr(error, "strerror", None) or type(error).__name__
    hint = "Check the network and the disk, then try again: what was fetched is kept; or give a folder on this machine"
    return HubUnreachableError(f"{source} cannot be fetched from the hub ({reason})", hint, "hub_unreachable")
