"""What survives the supervisor: deployments, starts under way, tombstones, failures, the roster.

Decided here: that a write of a reign that is over is refused, and what becomes of damage. Every
write is conditional on the stored epoch being the writer's own. A row that cannot be read is set
aside in `quarantine` and told, and so is a whole file; the rest is used, and what is half known is
not acted upon: its workers' shards are shown and left alone.

Invariant: `write` returns only when its rows are on disk (WAL, synchronous=FULL), all or none.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from stagekeeper.core.commands import (
    Desired,
    EntombDeployment,
    RemoveOperation,
    SaveDeployment,
    SavedOperation,
    SaveEpoch,
    SaveFailure,
    SaveOperation,
    Write,
)
from stagekeeper.core.ids import NO_EPOCH, DeploymentName, Epoch, Generation, WorkerId
from stagekeeper.core.model import Failure
from stagekeeper.runtime.private_folder import FILE_MODE
from stagekeeper.supervisor import store_rows as rows

_log = structlog.get_logger(__name__)

FILE_NAME = "supervisor.sqlite"

T = TypeVar("T")


class StoreFailed(OSError):
    """The store cannot be read or written; the message says where and why."""


class EpochLost(StoreFailed):
    """Another reign wrote to the store: the writer's own is over."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What a store holds when it is opened.

    `is_new`: nothing was ever kept here. `quarantined`: what could not be read, a line each.
    """

    epoch: Epoch = NO_EPOCH
    desired: tuple[Desired, ...] = ()
    tombstones: dict[DeploymentName, Generation] = field(default_factory=dict)
    roster: tuple[WorkerId, ...] = ()
    failures: tuple[Failure, ...] = ()
    operations: tuple[SavedOperation, ...] = ()
    is_new: bool = True
    quarantined: tuple[str, ...] = ()


class Store(Protocol):
    """Where a supervisor keeps what must survive it."""

    @property
    def is_durable(self) -> bool: ...

    def load(self) -> Stored: ...

    def seize(self, epoch: Epoch) -> None: ...

    def write(self, epoch: Epoch, writes: Sequence[Write]) -> None: ...

    def write_roster(self, epoch: Epoch, worker_ids: Iterable[WorkerId]) -> None: ...

    def close(self) -> None: ...


class MemoryStore:
    """Keeps nothing (`--no-store`), so that every start has to wait for workers it cannot name."""

    is_durable = False

    def load(self) -> Stored:
        return Stored(is_new=False)

    def seize(self, epoch: Epoch) -> None:
        pass

    def write(self, epoch: Epoch, writes: Sequence[Write]) -> None:
        pass

    def write_roster(self, epoch: Epoch, worker_ids: Iterable[WorkerId]) -> None:
        pass

    def close(self) -> None:
        pass


class SqliteStore:
    """One SQLite file. The caller holds the lock of its directory.

    Raises:
        StoreFailed: it cannot be opened, or a later release wrote it.
    """

    is_durable = True

    def __init__(
        self, state_dir: Path, *, failure_limit: int = 1_000, tombstone_limit: int = 1_000
    ) -> None:
        self._path = state_dir / FILE_NAME
        self._failure_limit = failure_limit
        self._tombstone_limit = tombstone_limit
        self._damage: list[str] = []
        self._file: tuple[int, int] | None = None
        try:
            try:
                self._connection = _open(self._path)
            except sqlite3.DatabaseError as error:
                if type(error) is not sqlite3.DatabaseError:
                    raise
                self._set_file_aside(error)
        except sqlite3.Error as error:
            raise StoreFailed(f"cannot open {self._path}: {_said(error)}") from error
        self._file = self._file_there()

    def load(self) -> Stored:
        """Read everything there is.

        Raises:
            StoreFailed: the disk cannot be read.
        """
        with self._failures_told("read"):
            try:
                return self._load()
            except sqlite3.DatabaseError as error:
                if type(error) is not sqlite3.DatabaseError:
                    raise
                self._connection.close()
                self._set_file_aside(error)
                return self._load()

    def seize(self, epoch: Epoch) -> None:
        """Begin a reign: from here on only `epoch` writes.

        Raises:
            EpochLost: a reign at least as high is stored.
            StoreFailed: the disk said no.
        """
        with self._failures_told("write"), self._transaction():
            stored = self._epoch()
            if not stored < epoch:
                raise EpochLost(f"{self._path} is of epoch {stored}, which is not below {epoch}")
            self._write(SaveEpoch(epoch))

    def write(self, epoch: Epoch, writes: Sequence[Write]) -> None:
        """Write all of `writes`, in order, or none.

        Args:
            epoch: the reign that writes, as it was before these writes.
            writes: what to write; a repeat changes nothing.

        Raises:
            EpochLost: the stored epoch is not the writer's own.
            StoreFailed: the disk said no; nothing was written.
        """
        with self._failures_told("write"), self._transaction():
            self._check_epoch(epoch)
            for write in writes:
                self._write(write)

    def write_roster(self, epoch: Epoch, worker_ids: Iterable[WorkerId]) -> None:
        """Replace the roster, without waiting for the disk: it may be lost, never half written.

        Raises:
            EpochLost: the stored epoch is not the writer's own.
            StoreFailed: the disk said no.
        """
        with self._failures_told("write"):
            self._connection.execute("PRAGMA synchronous = NORMAL")
            try:
                with self._transaction():
                    self._check_epoch(epoch)
                    self._write_roster(set(worker_ids))
            finally:
                self._connection.execute("PRAGMA synchronous = FULL")

    def close(self) -> None:
        self._connection.close()

    def _write(self, write: Write) -> None:
        execute = self._connection.execute
        if isinstance(write, SaveDeployment):
            row = rows.desired_to_row(write.desired)
            execute("INSERT OR REPLACE INTO deployments VALUES (?,?,?,?,?,?,?)", row)
        elif isinstance(write, EntombDeployment):
            row = rows.tombstone_to_row(write.name, write.ceiling)
            execute("DELETE FROM deployments WHERE name = ?", (write.name,))
            execute("INSERT OR REPLACE INTO tombstones VALUES (?,?,?,?)", row)
            execute(
                "DELETE FROM tombstones WHERE rowid NOT IN "
                "(SELECT rowid FROM tombstones ORDER BY rowid DESC LIMIT ?)",
                (self._tombstone_limit,),
            )
        elif isinstance(write, SaveEpoch):
            row = (write.epoch.number, write.epoch.supervisor_id)
            execute("INSERT OR REPLACE INTO epoch VALUES (1,?,?)", row)
        elif isinstance(write, SaveFailure):
            row = rows.failure_to_row(write.failure)
            last = execute(
                "INSERT OR IGNORE INTO failures (failure_id, failure, checksum) VALUES (?,?,?)", row
            ).lastrowid
            oldest_kept = (last or 0) - self._failure_limit
            execute("DELETE FROM failures WHERE seq <= ?", (oldest_kept,))
        elif isinstance(write, SaveOperation):
            row = rows.operation_to_row(write.saved)
            execute("INSERT OR REPLACE INTO operations VALUES (?,?,?,?)", row)
        elif isinstance(write, RemoveOperation):
            execute("DELETE FROM operations WHERE operation_id = ?", (write.operation_id,))
        else:
            self._write_roster(set(write.worker_ids))

    def _write_roster(self, wanted: set[WorkerId]) -> None:
        stored = {row[0] for row in self._connection.execute("SELECT worker_id FROM roster")}
        change = self._connection.executemany
        change("DELETE FROM roster WHERE worker_id = ?", [(gone,) for gone in stored - wanted])
        change("INSERT INTO roster VALUES (?)", [(new,) for new in sorted(wanted - stored)])

    def _check_epoch(self, epoch: Epoch) -> None:
        if self._file_there() != self._file:
            raise StoreFailed(
                f"cannot write {self._path}: it was removed or replaced while this supervisor used "
                "it: start a supervisor again, and apply the specs that it does not know"
            )
        stored = self._epoch()
        if stored != epoch:
            raise EpochLost(
                f"{self._path} is of epoch {stored} now, and this supervisor's is {epoch}: "
                "another one took over"
            )

    def _epoch(self) -> Epoch:
        row = self._connection.execute("SELECT number, supervisor_id FROM epoch").fetchone()
        return rows.epoch_from_row(row) if row is not None else NO_EPOCH

    def _file_there(self) -> tuple[int, int] | None:
        """Tell which file is at the path now; None when there is none."""
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def _load(self) -> Stored:
        self._mend_epoch()
        epoch = self._epoch()
        desired = tuple(self._rows("deployments", "name", rows.desired_from_row))
        tombstones = dict(self._rows("tombstones", "rowid", rows.tombstone_from_row))
        failures = tuple(self._rows("failures", "seq", rows.failure_from_row))
        operations = tuple(self._rows("operations", "operation_id", rows.operation_from_row))
        roster = tuple(self._rows("roster", "worker_id", rows.worker_id_from_row))
        return Stored(
            epoch=epoch,
            desired=desired,
            tombstones=tombstones,
            roster=roster,
            failures=failures,
            operations=operations,
            is_new=epoch == NO_EPOCH and not self._damage,
            quarantined=tuple(self._damage),
        )

    def _mend_epoch(self) -> None:
        """Forget a reign that cannot be read: workers remember the highest, and tell it."""
        try:
            row = self._connection.execute("SELECT number, supervisor_id FROM epoch").fetchone()
            if row is None:
                raise rows.RowDamaged("it is missing")
            rows.epoch_from_row(row)
        except rows.RowDamaged as error:
            with self._transaction():
                self._write(SaveEpoch(NO_EPOCH))
            self._damage.append(f"epoch: {error}; the workers are asked for theirs")
            _log.error("the stored epoch is damaged", why=str(error))

    def _rows(self, table: str, key: str, from_row: Callable[[rows.Row], T]) -> list[T]:
        """Read a whole table by its key, moving rows that cannot be read into quarantine."""
        good: list[T] = []
        damaged: list[tuple[int, rows.Row, str]] = []
        for rowid, *columns in self._connection.execute(
            f"SELECT rowid, * FROM {table} ORDER BY {key}"
        ):
            try:
                good.append(from_row(tuple(columns)))
            except rows.RowDamaged as error:
                damaged.append((rowid, tuple(columns), str(error)))
        for rowid, row, why in damaged:
            with self._transaction():
                self._connection.execute(
                    "INSERT INTO quarantine (source, key, content, why) VALUES (?,?,?,?)",
                    (table, ascii(row[0]), ascii(row), ascii(why)),
                )
                self._connection.execute(f"DELETE FROM {table} WHERE rowid = ?", (rowid,))
            self._damage.append(f"{table} {row[0]!r}: {why}; the row was set aside in quarantine")
            _log.error("a row of the store is damaged", table=table, key=ascii(row[0]), why=why)
        return good

    def _set_file_aside(self, error: sqlite3.DatabaseError) -> None:
        """Keep a damaged file for people to look at, and begin another one."""
        number = 1
        while (aside := self._path.with_suffix(f".damaged-{number}")).exists():
            number += 1
        self._path.rename(aside)
        for suffix in ("-wal", "-shm"):
            journal = self._path.with_name(self._path.name + suffix)
            if journal.exists():
                journal.rename(aside.with_name(aside.name + suffix))
        self._damage.append(f"{self._path} is damaged ({error}); it was set aside as {aside}")
        _log.error("the store is damaged", path=str(self._path), aside=str(aside), why=str(error))
        self._connection = _open(self._path)
        self._file = self._file_there()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    @contextmanager
    def _failures_told(self, what: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreFailed(f"cannot {what} {self._path}: {_said(error)}") from error


def _said(error: sqlite3.Error) -> str:
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
        return f"{error} by another program (a backup, a shell of sqlite3): end that one"
    return str(error)


def _make_private(path: Path) -> None:
    """Let only its owner read the file; SQLite gives its journals the same mode."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            os.fchmod(descriptor, FILE_MODE)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StoreFailed(f"cannot open {path}: {error.strerror}") from error


def _open(path: Path) -> sqlite3.Connection:
    _make_private(path)
    connection = sqlite3.connect(path, isolation_level=None)
    # Text that is damaged is still read, so that its row can be told from the others.
    connection.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > rows.SCHEMA_VERSION:
            raise StoreFailed(
                f"{path} was written by a later release (schema {version}, this one knows "
                f"{rows.SCHEMA_VERSION}): use that release, or another --state-dir"
            )
        if version < rows.SCHEMA_VERSION:
            change = rows.MIGRATIONS[version]
            connection.executescript(
                f"BEGIN; {change} PRAGMA user_version = {rows.SCHEMA_VERSION}; COMMIT;"
            )
    except BaseException:
        connection.close()
        raise
    return connection
