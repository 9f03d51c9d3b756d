"""A folder of compiled kernels, safe to share between processes and to copy between machines.

Layout, of a bundle and of each part of the user's cache::

    <root>/<arch>-<symbol>-<digest>/{kernel.cubin, kernel.cu, meta.json}   an entry
    <root>/<division>/...                                                  one compiler's entries
    <root>/bundle.json                                                     what made a bundle
    <root>/notes/<digest>                                                  see ``recall``
    <root>/locks/<entry>.lock                                              see ``locked``

An entry appears whole or not at all: it is staged beside its place, synced and renamed, and never
changes afterwards. It carries digests of everything in it; one that is damaged, altered or not what
its name says counts as missing. This module knows nothing about CUDA.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

from jitattn.base.errors import CacheError
from jitattn.base.record import Value
from jitattn.jit.files import (
    check_folder,
    distrust,
    excess_as_damage,
    names_in,
    read_file,
    read_object,
    why_unreadable,
    write_file,
)
from jitattn.jit.locks import check_lock, hold

# Part of every entry's name: bump it when the layout, or the meaning of a label, changes.
FORMAT = 1

# What a meta.json may say of itself; the values must survive JSON unchanged.
Meta = Mapping[str, object]

_ENTRY = re.compile(r"sm_\d+[a-z]?-\w+-[0-9a-f]{32}")
_DIVISION = re.compile(r"V\d[\w.+-]*")
_MANIFEST = "bundle.json"
ENTRY_FILES = ("kernel.cubin", "kernel.cu", "meta.json")
_STAGING = ".staging-"
# Younger ones may be somebody's work. Who removes a whole cache knows better what is abandoned.
_STALE_STAGING_S, _ABANDONED_STAGING_S = 3600.0, 60.0
_ATTEMPTS = 8
# What is larger was not written here: the largest kernel has half a megabyte.
_LIMITS = {"kernel.cubin": 2**28, "kernel.cu": 2**26, "meta.json": 2**20}
_MANIFEST_LIMIT, _NOTE_LIMIT = 2**22, 2**16


class Stored(NamedTuple):
    """An entry as it was read and verified."""

    cubin: bytes
    source: str
    meta: Meta


class Entry(Value):
    """What a listing says about one entry."""

    name: str
    path: Path
    arch: str
    symbol: str
    compiler: str
    size_bytes: int
    age_s: float
    """Seconds since the entry was stored."""
    idle_s: float
    """Seconds since it was last read, as exactly as the file system keeps that."""


class Damaged(NamedTuple):
    """Something that counts as missing: an entry, note, lock or manifest, or the folder of one."""

    name: str
    """Its name in the cache, or in its part."""
    path: Path
    damage: str
    """What is wrong."""


def digest(fields: Mapping[str, bytes]) -> str:
    """Hash labelled fields; order does not matter, and no two mappings concatenate alike."""
    hasher = hashlib.sha256(FORMAT.to_bytes(8, "little"))
    for label, payload in sorted(fields.items()):
        for part in (label.encode(), payload):
            hasher.update(len(part).to_bytes(8, "little"))
            hasher.update(part)
    return hasher.hexdigest()[:32]


def entry_name(arch: str, symbol: str, fields: Mapping[str, bytes]) -> str:
    """Return the name of the entry made from ``fields``, which are all that may change it."""
    return f"{arch}-{symbol}-{digest({'arch': arch.encode(), **fields})}"


def digest_of_files(files: Mapping[str, str]) -> str:
    """Return the digest of a bundle whose files have these, as ``file_digests`` returns them.

    It is the SHA-256 of what ``sha256sum`` prints of them, a line "<digest>  <entry>/<file>" each,
    in the order of the bytes of their paths.
    """
    lines = (f"{files[path]}  {path}\n" for path in sorted(files))
    return _sha256("".join(lines).encode())


class KernelCache:
    """The kernels under one folder.

    Attributes:
        root: the folder; it need not exist before something is stored.
        mode: permissions that ``root`` is created with. Entries are readable by everyone, so that
            the folder alone decides who may use them.
        parent: the cache that this one is a division of.
        expected: what ``file_digests`` said when the bundle was pinned; None: it is not.
    """

    def __init__(
        self,
        root: Path,
        mode: int = 0o700,
        parent: KernelCache | None = None,
        expected: Mapping[str, str] | None = None,
    ) -> None:
        """Look at a folder later; nothing is read or made."""
        self.root = root
        self.mode = mode
        self.parent = parent
        self.expected = expected

    def division(self, name: str) -> KernelCache:
        """Return the part of this cache that holds what the compiler ``name`` made."""
        return KernelCache(self.root / _division_name(name), mode=0o755, parent=self)

    def divisions(self) -> list[KernelCache]:
        """Return the existing parts, newest compiler first."""
        found = [p for p in self._folders() if _DIVISION.fullmatch(p.name)]
        return [self.division(p.name) for p in sorted(found, key=_version_key, reverse=True)]

    def get(self, name: str) -> Stored | None:
        """Return the entry ``name``, or None when it is absent, damaged or someone else's.

        Raises:
            CacheError: the cache itself must not be used.
        """
        self.check()
        try:
            return self.read(name)
        except (OSError, ValueError):
            return None

    def put(self, name: str, cubin: bytes, source: str, meta: Meta) -> None:
        """Store an entry; when another process stored it first and intact, keep theirs.

        Raises:
            CacheError: the cache itself must not be used.
            OSError: the cache cannot be written.
        """
        for attempt in range(_ATTEMPTS):
            try:
                self.create()
                with self._staging() as staged:
                    _write_entry(staged, name, cubin, source.encode(), meta)
                    self._publish(staged, name)
            except FileNotFoundError:  # another process cleared the cache meanwhile
                if attempt == _ATTEMPTS - 1:
                    raise
            else:
                self.sweep(_STALE_STAGING_S)
                return

    def check(self) -> None:
        """Raise CacheError when the folder exists and must not be trusted or is no folder."""
        if self.parent is not None:
            self.parent.check()
        try:
            # The user may choose a link; those inside the cache are none of ours.
            info = self.root.stat() if self.parent is None else self.root.lstat()
        except OSError:
            return  # missing or out of reach: nothing there can be read by mistake
        if not stat.S_ISDIR(info.st_mode):
            raise CacheError(f"{self.root} is not a folder: remove it or choose another path")
        if reason := distrust(info):
            raise CacheError(f"{self.root} is refused as a kernel cache: it is {reason}")

    def create(self) -> None:
        """Create the folder if it is missing.

        Raises:
            CacheError: the cache itself must not be used.
            OSError: the folder cannot be created.
        """
        self.check()
        if self.parent is not None:
            self.parent.create()
        _make_folder(self.root, self.mode)

    def write_manifest(self) -> None:
        """Write bundle.json, which says what the entries are for and what made them."""
        metas = [meta for entry in self.entries() if (meta := _meta(entry.path))]
        headers = {str(header) for meta in metas for header in _list(meta, "outside_headers")}
        manifest = {
            "format": FORMAT,
            "architectures": sorted({_text(meta, "arch") for meta in metas}),
            "compilers": sorted({_text(meta, "compiler") for meta in metas}),
            "outside_headers": sorted(headers),
        }
        with self._staging() as staged:
            write_file(staged / _MANIFEST, json.dumps(manifest, indent=2).encode())
            self._replace(staged / _MANIFEST, self.root / _MANIFEST)

    def entries(self) -> list[Entry]:
        """Return what is stored here and in the divisions, in the order of names.

        Raises:
            CacheError: the cache itself must not be used.
        """
        return [entry for part in self._parts() for entry in part.own_entries()]

    def file_digests(self) -> dict[str, str]:
        """Return the SHA-256 of every file of every entry, by ``<entry>/<file>``.

        Raises:
            CacheError: the folder, or one of the files, cannot be read or must not be used.
        """
        self.check()
        if (reason := why_unreadable(self.root)) and reason != "missing":
            raise CacheError(f"{self.root} {reason}")
        found = {}
        for folder in self._folders():
            for name in ENTRY_FILES if _ENTRY.fullmatch(folder.name) else ():
                try:
                    found[f"{folder.name}/{name}"] = _sha256(_read_part(folder, name))
                except FileNotFoundError:
                    pass  # then there is no such line
                except (OSError, ValueError) as error:
                    raise CacheError(f"{folder / name} must not be used: {error}") from error
        return found

    def sha256(self) -> str:
        """Return the digest of the bundle, which is that of its files: ``digest_of_files``.

        Raises:
            CacheError: there are no entries, or the folder or a file must not be used.
        """
        if files := self.file_digests():
            return digest_of_files(files)
        raise CacheError(f"{self.root} holds no kernels: it is no bundle of jitattn precompile")

    def verify(self) -> list[Damaged]:
        """Read everything that is kept here; return what is damaged and so counts as missing.

        Raises:
            CacheError: the cache itself must not be used.
        """
        return [damaged for part in self._parts() for damaged in part.own_damage()]

    def own_damage(self) -> Iterator[Damaged]:
        """Yield what is damaged in this folder alone, without its divisions."""
        for name in names_in(self.root):
            if _ENTRY.fullmatch(name):
                yield from self._damage(name, self.root / name, lambda path: self.read(path.name))
        yield from self._damage(_MANIFEST, self.root / _MANIFEST, _check_manifest)
        for folder, check in (("notes", _read_note), ("locks", check_lock)):
            found = [*self._damage(folder, self.root / folder, check_folder)]
            yield from found
            for name in () if found else names_in(self.root / folder):
                yield from self._damage(f"{folder}/{name}", self.root / folder / name, check)

    def _damage(self, name: str, path: Path, check: Callable[[Path], object]) -> Iterator[Damaged]:
        try:
            check(path)
        except (OSError, ValueError) as error:
            if _exists(path):  # and nobody has removed it meanwhile
                yield Damaged(name, path, str(error))

    def prune(self, max_bytes: int) -> list[Entry]:
        """Remove the entries idle for longest until at most ``max_bytes`` remain; return them."""
        entries = sorted(self.entries(), key=lambda entry: entry.idle_s, reverse=True)
        excess = sum(entry.size_bytes for entry in entries) - max_bytes
        removed = []
        for entry in entries:
            if excess <= 0:
                break
            self.discard(entry.path)
            excess -= entry.size_bytes
            removed.append(entry)
        for part in self._parts():
            part.sweep(_STALE_STAGING_S)
        return removed

    def clear(self) -> list[Entry]:
        """Remove every entry, and all else that jitattn put here; return the entries."""
        removed = self.entries()
        for cache in (*self.divisions(), self):
            for entry in removed:
                if entry.path.parent == cache.root:
                    cache.discard(entry.path)
            cache.sweep(_ABANDONED_STAGING_S)
            for name in ("notes", "locks", _MANIFEST):
                if _exists(cache.root / name):
                    cache.discard(cache.root / name)
            if cache is not self:
                with suppress(OSError):  # not empty: something that is not ours
                    cache.root.rmdir()
        return removed

    def recall(self, key: str) -> str | None:
        """Return what ``remember`` noted under ``key``, a digest of what the note depends on.

        A note saves asking something slow again, such as which compiler this machine has. Losing
        one costs time and nothing else; a damaged one, or another's, is none.
        """
        self.check()
        try:
            self._check_own_folder("notes")
            return _read_note(self.root / "notes" / key)
        except CacheError:
            raise
        except (OSError, ValueError):
            return None

    def remember(self, key: str, note: str) -> None:
        """Note something for a later ``recall``, if the cache can be written."""
        self.check()
        try:
            self.create()
            folder = self._make_own_folder("notes")
            with self._staging() as staged:
                text = f"{_note_proof(key, note)}\n{note}"
                write_file(staged / key, text.encode(), sync=False)
                self._replace(staged / key, folder / key)
        except CacheError:
            raise
        except OSError:
            pass

    def locked(self, name: str, timeout_s: float) -> AbstractContextManager[bool]:
        """Hold the right to build the entry ``name``; the value says whether it was obtained.

        The lock only saves work. Without it (a read-only folder, a file system without flock, an
        owner that does not let go within ``timeout_s`` seconds, for which there is a warning) the
        caller builds all the same, and renaming keeps the entry whole.
        """
        self.check()
        try:
            self.create()
            folder = self._make_own_folder("locks")
        except CacheError:
            raise
        except OSError:
            return nullcontext(False)
        return hold(folder / f"{name}.lock", timeout_s)

    def _check_own_folder(self, name: str) -> Path:
        """Return notes/ or locks/.

        Raises:
            CacheError: it must not be trusted.
            OSError: it is missing, or no folder.
        """
        folder = self.root / name
        info = folder.lstat()
        if not stat.S_ISDIR(info.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
        if reason := distrust(info):
            raise CacheError(f"{folder} is refused as part of a kernel cache: it is {reason}")
        return folder

    def _make_own_folder(self, name: str) -> Path:
        """Return notes/ or locks/ and make it, also in place of what is no folder."""
        try:
            return self._check_own_folder(name)
        except NotADirectoryError:
            self.discard(self.root / name)
        except FileNotFoundError:
            pass
        _make_folder(self.root / name, 0o755)
        return self._check_own_folder(name)

    def _parts(self) -> list[KernelCache]:
        parts = [self, *self.divisions()]
        for part in parts:
            part.check()
        return parts

    def own_entries(self) -> list[Entry]:
        """Return the entries of this folder alone, without those of its divisions."""
        names = sorted(path.name for path in self._folders() if _ENTRY.fullmatch(path.name))
        return [_describe(self.root / name) for name in names]

    def read_part(self, name: str, file: str) -> bytes:
        """Return a file of the entry ``name``, or raise OSError or ValueError."""
        check_folder(self.root / name)
        return _read_part(self.root / name, file)

    def names(self, prefix: str) -> list[str]:
        """Return the names of entries that begin with ``prefix``, damaged ones among them."""
        return [
            name
            for name in names_in(self.root)
            if name.startswith(prefix) and _ENTRY.fullmatch(name)
        ]

    def read(self, name: str) -> Stored:
        """Return the entry ``name``, or raise OSError or ValueError saying what is wrong."""
        stored = _read(self.root / name)
        if self.expected is not None:
            for file, data in (
                ("kernel.cubin", stored.cubin),
                ("kernel.cu", stored.source.encode()),
            ):
                if self.expected.get(f"{name}/{file}") != _sha256(data):
                    raise ValueError(f"{file} is not what it was when the bundle was pinned")
        if self.parent is not None:
            compiler = _text(stored.meta, "compiler")
            if _division_name(compiler) != self.root.name:
                raise ValueError(f"it was made by another compiler, {compiler}")
        return stored

    @contextmanager
    def _staging(self) -> Iterator[Path]:
        import tempfile  # 10 ms, and only writing needs it

        staged = Path(tempfile.mkdtemp(prefix=_STAGING, dir=self.root))
        try:
            yield staged
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def _publish(self, staged: Path, name: str) -> None:
        target = self.root / name
        for attempt in range(_ATTEMPTS):
            try:
                staged.rename(target)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
            else:
                _sync_folder(self.root)
                return
            try:
                self.read(name)
                return  # entries of one name are equal, so theirs is as good
            except (OSError, ValueError):
                if _exists(target):
                    self.discard(target)
                else:  # a network file system that has not noticed yet
                    time.sleep(0.02 * 2**attempt)
        raise OSError(errno.EEXIST, "other processes keep replacing a damaged entry", str(target))

    def discard(self, path: Path) -> None:
        """Delete an entry; no reader finds half of it, since it is renamed before."""
        with suppress(FileNotFoundError), self._staging() as staged:
            path.rename(staged / path.name)

    def _replace(self, staged: Path, target: Path) -> None:
        """Put a file in its place, whatever is there."""
        try:
            staged.rename(target)
        except IsADirectoryError:
            self.discard(target)
            staged.rename(target)

    def _folders(self) -> list[Path]:
        try:
            with os.scandir(self.root) as found:
                names = [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return []
        return [self.root / name for name in names]

    def sweep(self, older_than_s: float) -> None:
        """Delete what writers that were killed left behind."""
        for path in self._folders():
            if path.name.startswith(_STAGING) and _age(path) >= older_than_s:
                shutil.rmtree(path, ignore_errors=True)


def _read(path: Path) -> Stored:
    """Return the entry at ``path``, or raise OSError or ValueError saying what is wrong."""
    check_folder(path)
    try:
        with excess_as_damage("meta.json"):
            meta = _verified_meta(path)
        cubin = _read_part(path, "kernel.cubin")
        if meta.get("cubin_sha256") != _sha256(cubin):
            raise ValueError("kernel.cubin was altered")
        source = _read_part(path, "kernel.cu")
    except FileNotFoundError as error:
        raise ValueError(f"{Path(error.filename).name} is missing") from error
    if meta.get("source_sha256") != _sha256(source):
        raise ValueError("kernel.cu was altered")
    return Stored(cubin, source.decode(), meta)


def _verified_meta(path: Path) -> Meta:
    meta = read_object(path / "meta.json", _LIMITS["meta.json"])
    written = meta.get("format")
    if isinstance(written, int) and written > FORMAT:
        raise ValueError(
            f"it has format {written} of a newer jitattn, and this one reads format {FORMAT}"
        )
    claimed = meta.pop("meta_sha256", None)
    if claimed != _sha256(_canonical(meta)):
        raise ValueError("meta.json was altered")
    if meta.get("entry") != path.name or written != FORMAT:
        raise ValueError("meta.json belongs to another entry")
    return meta


def _read_part(folder: Path, name: str) -> bytes:
    return read_file(folder / name, _LIMITS[name])


def _read_note(path: Path) -> str:
    """Return a note, or raise OSError or ValueError saying what is wrong."""
    proof, _, note = read_file(path, _NOTE_LIMIT).decode().partition("\n")
    if proof != _note_proof(path.name, note):
        raise ValueError("the note was altered, or is another's")
    return note


def _check_manifest(path: Path) -> None:
    read_object(path, _MANIFEST_LIMIT)


def _describe(path: Path) -> Entry:
    arch, symbol, _ = path.name.split("-")
    return Entry(
        name=path.name,
        path=path,
        arch=arch,
        symbol=symbol,
        compiler=_text(_meta(path), "compiler"),
        size_bytes=sum(size for _, size in _files(path)),
        age_s=_age(path),
        idle_s=_idle(path),
    )


def _meta(path: Path) -> Meta:
    """Return what an entry says of itself, unverified; nothing when it cannot be read."""
    with suppress(OSError, ValueError):
        return read_object(path / "meta.json", _LIMITS["meta.json"])
    return {}


def _text(meta: Meta, name: str) -> str:
    value = meta.get(name)
    return value if isinstance(value, str) else "unknown"


def _list(meta: Meta, name: str) -> list[object]:
    value = meta.get(name)
    return value if isinstance(value, list) else []


def _files(path: Path) -> list[tuple[Path, int]]:
    with suppress(OSError):
        return [(file, file.lstat().st_size) for file in path.iterdir()]
    return []


def _age(path: Path) -> float:
    with suppress(OSError):
        return max(0.0, time.time() - path.lstat().st_mtime)
    return 0.0


def _idle(path: Path) -> float:
    # Most systems update the time of the last reading once a day at most, some never.
    with suppress(OSError):
        info = (path / "kernel.cubin").lstat()
        return max(0.0, time.time() - max(info.st_atime, info.st_mtime))
    return float("inf")


def _exists(path: Path) -> bool:
    try:
        path.lstat()
    except OSError:
        return False
    return True


def _division_name(compiler: str) -> str:
    return re.sub(r"[^\w.+-]", "-", compiler)


def _version_key(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.name)]


def _make_folder(path: Path, mode: int) -> None:
    """Create ``path`` with exactly ``mode``; leave an existing folder as it is."""
    if path.is_dir():
        return
    if mode == 0o755 and not path.parent.is_dir():
        _make_folder(path.parent, mode)  # others must be able to reach the folder, too
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # another process was faster
        path.mkdir(mode=mode)
        path.chmod(mode)


def _write_entry(folder: Path, name: str, cubin: bytes, source: bytes, meta: Meta) -> None:
    record = {
        **meta,
        "entry": name,
        "format": FORMAT,
        "cubin_sha256": _sha256(cubin),
        "source_sha256": _sha256(source),
    }
    record["meta_sha256"] = _sha256(_canonical(record))
    write_file(folder / "kernel.cubin", cubin)
    write_file(folder / "kernel.cu", source)
    write_file(folder / "meta.json", json.dumps(record, indent=2, sort_keys=True).encode())
    folder.chmod(0o755)  # whatever the umask says: a bundle is for others to read
    _sync_folder(folder)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems refuse
            raise
    finally:
        os.close(descriptor)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _note_proof(key: str, note: str) -> str:
    return _sha256(f"{key}\0{note}".encode())


def _canonical(record: Meta) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
