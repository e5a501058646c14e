"""What each agent of a host claims of its cards, in a file that the other agents read.

One file for each user and worker id, in the folder of the locks, whole or not at all. Anybody may
write into that folder, so nothing is believed but what its writer could have brought about anyway:
a claim counts as long as a process of the file's own user stands behind it, which is its agent, or
a process of the stage. Decided here: the form, what is believed, and when a claim is over. Not
decided here: when it is written and read (`host_ledger`).

Invariant: what cannot be read frees nothing and stops nobody: it is left out, and told. The memory
behind it still counts, as that of a stranger.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec

from stagekeeper.agent.directory import file_name
from stagekeeper.agent.host_lock import holder_of, worker_lock_file
from stagekeeper.core.ids import WorkerId
from stagekeeper.core.limits import LARGEST_BYTES, LONGEST_NAME
from stagekeeper.host.process import (
    ProcessIdentity,
    boot_id,
    find_members,
    identity_of,
    is_alive,
    real_user,
)
from stagekeeper.runtime.launch import INSTANCE_ENV

_LARGEST_FILE_BYTES: Final = 4 * 2**20
_MOST_FILES_OF_USER: Final = 256
_MOST_PROBLEMS: Final = 4
_LONGEST_FILE_NAME: Final = 200
_FILE: Final = re.compile(r"claims-(\d{1,10})-.+\.json")
_TO_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_Bytes = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_BYTES)]
_Pid = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
_Text = Annotated[str, msgspec.Meta(max_length=1_000)]


class ClaimedCard(msgspec.Struct, frozen=True):
    """What a stage has reserved of one card, by the card's name among all agents of the host.

    `device_id` is its name at the agent that claims it, for the next life of that agent.
    """

    lock_domain_id: _Text
    reserved_bytes: _Bytes
    device_id: _Text = ""


class StageClaim(msgspec.Struct, frozen=True, kw_only=True):
    """What one stage holds, from its reservation until its processes are gone.

    `pid` and `instance_id` are 0 and empty as long as no process of it was started.
    """

    operation_id: _Text
    stage_id: int
    holder: _Text
    cards: tuple[ClaimedCard, ...]
    instance_id: _Text = ""
    pid: _Pid = 0
    start_ticks: int = 0

    @property
    def process(self) -> ProcessIdentity | None:
        return ProcessIdentity(self.pid, self.start_ticks) if self.pid else None

    def on_card(self, lock_domain_id: str) -> int:
        return sum(it.reserved_bytes for it in self.cards if it.lock_domain_id == lock_domain_id)


class ClaimsFile(msgspec.Struct, frozen=True, kw_only=True):
    """All that one agent claims. Its pids mean something in its own pid namespace, since this boot.

    Fields may be added: an agent of another release skips those that it does not know.
    """

    cluster: _Text
    worker_id: _Text
    boot_id: _Text
    pid_namespace: _Text
    agent_pid: _Pid
    agent_start_ticks: int
    claims: tuple[StageClaim, ...] = ()

    @property
    def agent(self) -> ProcessIdentity:
        return ProcessIdentity(self.agent_pid, self.agent_start_ticks)


@dataclass(frozen=True, slots=True)
class OtherClaims:
    """What another agent claims that still counts; `user` owns its file."""

    path: Path
    user: int
    file: ClaimsFile
    claims: tuple[StageClaim, ...]


@dataclass(frozen=True, slots=True)
class _Read:
    """A file as it was read; `problem` says why it is left out."""

    version: tuple[int, int, int, int]
    user: int = -1
    file: ClaimsFile | None = None
    problem: str = ""


def claims_path(lock_dir: Path, worker_id: WorkerId) -> Path:
    """Return where this user's agent of a worker id keeps its claims."""
    name = file_name(worker_id)
    if len(name.encode()) > _LONGEST_FILE_NAME:
        name = hashlib.blake2b(worker_id.encode(), digest_size=16).hexdigest()
    return lock_dir / f"claims-{os.getuid()}-{name}.json"


def write_claims(path: Path, file: ClaimsFile) -> None:
    """Put a file there, whole, for every user of the host to read.

    It need not outlive the host: no process does.

    Raises:
        OSError: it cannot be written, or another user has put something in its place.
    """
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)  # of a life that died here; another user's is not ours to remove
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(new, flags, 0o600)
    try:
        os.fchmod(descriptor, 0o644)
        view = memoryview(msgspec.json.encode(file))
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)
    os.rename(new, path)


def pid_namespace() -> str:
    """Return what tells this process's view of pids from another container's."""
    return os.readlink("/proc/self/ns/pid")


class ClaimsFolder:
    """The folder in which the agents of a host keep their claims, as one of them reads it.

    Attributes:
        problems: a sentence for each file that was left out by the last look.
    """

    def __init__(self, lock_dir: Path, worker_id: WorkerId) -> None:
        self._lock_dir = lock_dir
        self._own_path = claims_path(lock_dir, worker_id)
        self._own_lock = worker_lock_file(lock_dir, worker_id)
        self._boot_id = boot_id()
        self._pid_namespace = pid_namespace()
        self._read: dict[Path, _Read] = {}
        self._ended: set[tuple[Path, str]] = set()
        self.problems: tuple[str, ...] = ()

    def look(self) -> list[OtherClaims]:
        """Read what is there, and leave out what is over. Never raises for what others wrote.

        Raises:
            OSError: the folder itself cannot be read, so that nobody knows what is claimed.
        """
        found, problems = [], list[str]()
        self._read = {path: self._read_once(path) for path in self._files()}
        for path, entry in self._read.items():
            if entry.problem:
                problems.append(f"{path} is left out of the ledger: {entry.problem}")
            if entry.file is not None:
                claims = tuple(self._counting(path, entry.file, entry.user))
                if claims:
                    found.append(OtherClaims(path, entry.user, entry.file, claims))
        self._ended = {it for it in self._ended if it[0] in self._read or it[0] == self._own_path}
        self.problems = tuple(problems[:_MOST_PROBLEMS])
        return found

    def of_earlier_life(self) -> tuple[StageClaim, ...]:
        """Return what the own file says; nothing where it is not there, or makes no sense."""
        entry = self._read_once(self._own_path)
        file = entry.file
        if file is None or file.boot_id != self._boot_id:
            return ()
        return file.claims if file.pid_namespace == self._pid_namespace else ()

    def still_runs(self, claim: StageClaim) -> bool:
        """Return whether anything lives of a claim in the own file."""
        return self._has_processes(self._own_path, claim, os.getuid())

    def _files(self) -> list[Path]:
        """Return the files of the other agents; so many of each user, who then hides only his."""
        counts = Counter[str]()
        found = []
        for name in sorted(os.listdir(self._lock_dir)):
            match = _FILE.fullmatch(name)
            if match is not None and name != self._own_path.name:
                counts[match[1]] += self._belongs(self._lock_dir / name, match[1])
                if counts[match[1]] <= _MOST_FILES_OF_USER:
                    found.append(self._lock_dir / name)
        return found

    @staticmethod
    def _belongs(path: Path, user: str) -> bool:
        try:
            return path.lstat().st_uid == int(user)
        except OSError:
            return False

    def _read_once(self, path: Path) -> _Read:
        known = self._read.get(path)
        try:
            status = path.lstat()
            version = status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size
            if known is not None and known.version == version:
                return known
            return _read_file(path, version)
        except OSError as error:
            return _Read((0, 0, 0, 0), problem=error.strerror or type(error).__name__)

    def _counting(self, path: Path, file: ClaimsFile, user: int) -> Iterable[StageClaim]:
        if file.boot_id != self._boot_id:
            return
        if file.pid_namespace != self._pid_namespace:
            # Its pids mean nothing here. That its agent lives shows by the lock that it holds; and
            # with an agent that is a container's first process its stages have died too.
            lock = worker_lock_file(self._lock_dir, WorkerId(file.worker_id))
            # The own one is held by this agent, so by no other; and to look at it would drop it.
            if lock != self._own_lock and _is_held(lock):
                yield from file.claims
            return
        agent_lives = _is_of(file.agent, user)
        for claim in file.claims:
            if agent_lives or self._has_processes(path, claim, user):
                yield claim

    def _has_processes(self, path: Path, claim: StageClaim, user: int) -> bool:
        """Return whether anything of a stage lives whose agent is dead. What has ended stays so."""
        process = claim.process
        if process is None:
            return False  # its agent died before it started one, and what waited for it has ended
        if _is_of(process, user):
            return True
        key = path, claim.instance_id
        if not claim.instance_id or key in self._ended:
            return False
        session = claim.pid if identity_of(claim.pid) is None else None
        members = find_members(INSTANCE_ENV, claim.instance_id, session=session)
        if any(_is_of(member, user) for member in members):
            return True
        self._ended.add(key)
        return False


def _read_file(path: Path, version: tuple[int, int, int, int]) -> _Read:
    """Read a file that may be anything.

    Raises:
        OSError: it cannot be opened or read.
    """
    descriptor = os.open(path, _TO_READ)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return _Read(version, problem="it is no regular file")
        match = _FILE.fullmatch(path.name)
        if match is None or int(match[1]) != status.st_uid:
            return _Read(version, problem=f"it belongs to user {status.st_uid}, not to its name's")
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            data = stream.read(_LARGEST_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > _LARGEST_FILE_BYTES:
        return _Read(version, problem=f"it has more than {_LARGEST_FILE_BYTES} bytes")
    try:
        file = msgspec.json.decode(data, type=ClaimsFile)
    except (msgspec.DecodeError, RecursionError) as error:
        return _Read(version, problem=f"it is damaged ({error})")
    problem = _problem(file)
    return _Read(version, status.st_uid, None if problem else file, problem)


def _problem(file: ClaimsFile) -> str:
    """Say what makes no sense in a file that can be read."""
    if not 1 <= len(file.worker_id) <= LONGEST_NAME or "/" in file.worker_id:
        return "it names no worker"
    texts = [file.worker_id, file.cluster, *(it.holder for it in file.claims)]
    return "" if all(it.isprintable() for it in texts) else "it has text that cannot be shown"


def _is_of(process: ProcessIdentity, user: int) -> bool:
    """Return whether a process lives that a user may speak for. Root may speak for all."""
    if is_alive(process):
        return user == 0 or real_user(process.pid) in (user, None)
    return identity_of(process.pid) is None and _is_hidden(process.pid)


def _is_hidden(pid: int) -> bool:
    """Return whether a process exists of which `/proc` shows nothing (`hidepid`)."""
    if pid <= 0 or Path(f"/proc/{pid}").exists():
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return False


def _is_held(lock: Path) -> bool:
    try:
        return holder_of(lock) is not None
    except OSError:
        return True  # who cannot look leaves it counted
