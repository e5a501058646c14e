"""The phase lock: one reader/writer lock per card, across all processes of the host.

LOAD holds it shared, a measurement alone, so that nobody's memory moves while memory is read. Two
record locks a card, each a file in the host's folder for locks. Who wants the lock first takes the
*turnstile* and waits there for the lock itself: so those that come later, readers too, stay behind
a writer that waits. A reader lets the turnstile go once it has the lock. A writer keeps it, so that
there is one queue, and one hand-over from writer to writer. Several cards are taken in the order
of their domains, and the lock of none is ever changed into the other kind: it is let go and taken
anew.

A wait is the kernel's (`F_SETLKW`), which hands over in a fraction of a millisecond and in turn; to
ask again and again would do neither. Such a wait cannot be called off: Python takes it up again
after any signal, and a process that waited in our place would hold the lock in our place. So it is
done by a thread of its own, and whoever gives up leaves that thread behind; what it is still
granted it lets go at once. Until then the process cannot want the same lock again, which is the
price. A process whose wait has failed is about to end in any case.

Invariants: each file is opened once in a process and never closed, since closing any descriptor of
it would free its lock; a lock counts only if its file is the one that others find at its path; a
wait that sees no progress of whoever holds the lock for its limit has failed, and nothing goes on
without the lock.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from typing import Final

from stagekeeper.runtime.lock_file import holder_pid, is_still_there, open_lock_file
from stagekeeper.runtime.lock_holders import (
    Holder,
    HolderSlot,
    HolderText,
    read_holders,
    shortened,
)

DEFAULT_LIMIT_S: Final = 600.0
"""A load of a large model may take so long without saying how far it is."""

LOOK_S: Final = 0.5
"""How often one that waits looks who holds the lock, and whether that one gets on."""

_LONGEST_NAME: Final = 60
_NOT_IN_A_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")


class Mode(IntEnum):
    """How a lock is held; the values are those of `fcntl.lockf`."""

    SHARED = fcntl.LOCK_SH
    ALONE = fcntl.LOCK_EX


class LockTimeout(Exception):
    """The lock was not had, and whoever holds it did not get on; `holders` names them."""

    def __init__(self, message: str, holders: tuple[Holder, ...]) -> None:
        super().__init__(message)
        self.holders = holders


class LockUnusable(Exception):
    """The files of the lock cannot be used, or were replaced; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Wait:
    """What a wait is like now, for people; `domain` is the card that it stands at."""

    domain: str
    holders: tuple[Holder, ...]
    waited_s: float

    def __str__(self) -> str:
        return f"waits for the phase lock of {self.domain}, held by {named(self.holders)}"


@dataclass(slots=True)
class _LockFile:
    """One record lock. Its file is opened once, and again only where somebody replaced it."""

    path: Path
    descriptor: int = -1

    def open(self) -> None:
        """Open the file, unless it is open.

        Raises:
            LockUnusable: it cannot be opened.
        """
        if self.descriptor < 0:
            try:
                self.descriptor = open_lock_file(self.path)
            except OSError as error:
                raise _unusable(self.path, error) from error

    def take(self, mode: Mode) -> None:
        """Wait in the kernel until the lock is had.

        Raises:
            LockUnusable: the file cannot be opened.
            OSError: the kernel refuses the lock.
        """
        while True:
            self.open()
            fcntl.lockf(self.descriptor, mode, 1, 0)
            if is_still_there(self.descriptor, self.path):
                return
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, 0)
            # The one that is there now is what others lock. The old one stays open: to look at it
            # is what another thread may be doing just now.
            self.descriptor = -1

    def free(self) -> None:
        if self.descriptor >= 0:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, 0)


@dataclass(slots=True)
class _Card:
    """The two locks of one card, as this process has them. `is_wanted` is for one at a time."""

    domain: str
    turnstile: _LockFile
    lock: _LockFile
    is_wanted: bool = False
    slot: HolderSlot | None = None

    def take(self, mode: Mode) -> None:
        self.turnstile.take(Mode.ALONE)
        try:
            self.lock.take(mode)
        except BaseException:
            self.turnstile.free()
            raise
        if mode is Mode.SHARED:
            self.turnstile.free()
        self.slot = HolderSlot(self.lock.descriptor)
        self.slot.take()

    def free(self) -> None:
        if self.slot is not None:
            self.slot.free()
            self.slot = None
        self.lock.free()
        self.turnstile.free()

    def holders(self) -> tuple[Holder, ...]:
        """Return who holds the lock; where nobody does, who stands in the turnstile."""
        found: tuple[Holder, ...] = ()
        if self.lock.descriptor >= 0:
            found = read_holders(self.lock.descriptor)
        if not found and self.turnstile.descriptor >= 0:
            pid = holder_pid(self.turnstile.descriptor, 0, 1)
            found = () if pid is None else (Holder(pid),)
        return found


class _Cards:
    """All cards whose files this process has open. A child after a fork has none of their locks."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self._cards: dict[tuple[Path, str], _Card] = {}
        os.register_at_fork(after_in_child=self._forget)

    def want(self, lock_dir: Path, domains: Iterable[str]) -> list[_Card]:
        """Return the cards, in the order in which everybody takes them, for one that wants them."""
        with self.guard:
            cards = [self._card(lock_dir, domain) for domain in sorted(set(domains))]
            for card in cards:
                if card.is_wanted:
                    raise RuntimeError(
                        f"this process holds the phase lock of {card.domain} already, or waits"
                    )
            for card in cards:
                card.is_wanted = True
            return cards

    def drop(self, cards: Iterable[_Card]) -> None:
        with self.guard:
            for card in cards:
                card.is_wanted = False

    def _card(self, lock_dir: Path, domain: str) -> _Card:
        key = lock_dir, domain
        if key not in self._cards:
            lock, turnstile = lock_paths(lock_dir, domain)
            self._cards[key] = _Card(domain, _LockFile(turnstile), _LockFile(lock))
        card = self._cards[key]
        # Open before any wait: who waits at the turnstile looks who holds the lock.
        card.lock.open()
        card.turnstile.open()
        return card

    def _forget(self) -> None:
        self.guard = threading.Lock()
        self._cards = {}


_cards: Final = _Cards()


class _Taker:
    """The thread that waits for some cards. Its outcome is settled once, under the guard."""

    def __init__(self, cards: list[_Card], mode: Mode) -> None:
        self._cards = cards
        self._mode = mode
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.at = cards[0]
        self.error: Exception | None = None
        self._is_granted = False
        self._is_given_up = False
        self._taken: list[_Card] = []

    def start(self) -> None:
        try:
            threading.Thread(target=self._run, name="phase-lock", daemon=True).start()
        except RuntimeError:
            _cards.drop(self._cards)
            raise

    def give_up(self) -> None:
        """Want the lock no longer; what was granted just now is let go."""
        with _cards.guard:
            self._is_given_up = True
            if not self._is_granted:
                return  # the thread sees to it, when the kernel lets it
        self.free()

    def free(self) -> None:
        for card in reversed(self._taken):
            card.free()
        _cards.drop(self._cards)

    def _run(self) -> None:
        try:
            for card in self._cards:
                if self._is_given_up:
                    break
                self.at = card
                card.take(self._mode)
                self._taken.append(card)
        except Exception as error:
            self.error = error
        with _cards.guard:
            self._is_granted = self.error is None and not self._is_given_up
        if not self._is_granted:
            self.free()
        try:
            self._loop.call_soon_threadsafe(self._tell)
        except RuntimeError:  # the loop has ended, and with it whoever wanted this
            if self._is_granted:
                self.free()

    def _tell(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


@dataclass(slots=True)
class Hold:
    """The lock as it is held; say `entered` and `progressed`, so that others see it."""

    _cards: list[_Card]
    _stage: str
    _phase: str = ""
    _progress: int = 0
    _since: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")

    def entered(self, phase: str) -> None:
        self._phase = shortened(phase)
        self._say()

    def progressed(self, counter: int) -> None:
        if counter != self._progress:
            self._progress = counter
            self._say()

    def check_intact(self) -> None:
        """Make sure that the lock has kept others out until now.

        Raises:
            LockUnusable: somebody replaced its file, so that others may hold the new one.
        """
        for card in self._cards:
            if not is_still_there(card.lock.descriptor, card.lock.path):
                raise LockUnusable(
                    f"the file of the phase lock of {card.domain} ({card.lock.path}) was removed "
                    "or replaced while it was held, so others may have used the card meanwhile: "
                    "leave the files in that folder alone, and start again"
                )

    def _say(self) -> None:
        text = HolderText(os.getpid(), self._stage, self._phase, self._since, self._progress)
        for card in self._cards:
            if card.slot is not None:
                card.slot.say(text)


class PhaseLock:
    """The phase lock of all cards of one stage.

    Args:
        lock_dir: the host's folder for locks; exists.
        domains: the cards, by the name that all agents of the host give them. None at all needs no
            lock, and has it at once.
        stage: who this is, for whoever waits.
        limit_s: how long a wait goes on without progress of whoever holds the lock.
        on_wait: told what is waited for, again and again while the wait lasts.
    """

    def __init__(
        self,
        lock_dir: Path,
        domains: Iterable[str],
        stage: str,
        *,
        limit_s: float = DEFAULT_LIMIT_S,
        on_wait: Callable[[Wait], None] = lambda wait: None,
    ) -> None:
        self._lock_dir = lock_dir
        self._domains = tuple(domains)
        self._stage = shortened(stage)
        self._limit_s = limit_s
        self._on_wait = on_wait

    @asynccontextmanager
    async def held(self, mode: Mode, phase: str) -> AsyncIterator[Hold]:
        """Hold the lock of all cards. The wait for it may be cancelled.

        Raises:
            LockTimeout: it was not had in time.
            LockUnusable: its files cannot be used.
            RuntimeError: this process has it already.
        """
        if not self._domains:
            yield Hold([], self._stage)
            return
        cards = _cards.want(self._lock_dir, self._domains)
        taker = _Taker(cards, mode)
        taker.start()
        try:
            await self._until_had(taker, mode)
        except BaseException:
            taker.give_up()
            raise
        if isinstance(taker.error, OSError):
            raise _unusable(taker.at.lock.path, taker.error) from taker.error
        if taker.error is not None:
            raise taker.error
        try:
            hold = Hold(cards, self._stage)
            hold.entered(phase)
            yield hold
        finally:
            taker.free()

    async def _until_had(self, taker: _Taker, mode: Mode) -> None:
        """Return once the thread has come to an end, or fail when nobody gets on."""
        began = looked_at = time.monotonic()
        silent_s, seen = 0.0, None
        look_s = min(LOOK_S, self._limit_s / 4)
        while not taker.ended.done():
            await asyncio.wait({taker.ended}, timeout=look_s)
            if taker.ended.done():
                return
            now = time.monotonic()
            # A halt of this process itself is no silence of the others.
            silent_s += min(now - looked_at, 2 * look_s)
            looked_at = now
            wait = Wait(taker.at.domain, taker.at.holders(), now - began)
            if (taker.at.domain, wait.holders) != seen:
                seen, silent_s = (taker.at.domain, wait.holders), 0.0
            self._on_wait(wait)
            if silent_s >= self._limit_s:
                how = "alone" if mode is Mode.ALONE else "to load"
                raise LockTimeout(
                    f"the phase lock of {wait.domain} was not had ({how}) within "
                    f"{wait.waited_s:.1f} s: {named(wait.holders)} holds it and has made no "
                    f"progress for {self._limit_s:g} s; end that process, or wait until it is done",
                    wait.holders,
                )


def lock_paths(lock_dir: Path, domain: str) -> tuple[Path, Path]:
    """Return the files of a card's lock and of its turnstile."""
    digest = hashlib.blake2b(domain.encode(), digest_size=8).hexdigest()
    name = f"card-{_NOT_IN_A_NAME.sub('_', domain)[-_LONGEST_NAME:]}-{digest}"
    return lock_dir / f"{name}.lock", lock_dir / f"{name}.turnstile"


def named(holders: Iterable[Holder]) -> str:
    """Name the holders of a lock in a sentence."""
    return " and ".join(str(it) for it in holders) or "a process that cannot be seen from here"


def _unusable(path: Path, error: OSError) -> LockUnusable:
    why = f"{path} cannot be used as a lock ({error.strerror or error})"
    try:
        status = path.lstat()
        why += f"; it belongs to user {status.st_uid} and has mode {status.st_mode & 0o7777:04o}"
    except OSError:
        pass
    return LockUnusable(
        f"{why}: nothing is loaded or measured without it. Have its owner or root make it a file "
        "that all users of its cards may read and write (chmod 666), or remove it"
    )
