"""How the client tries again: with full jitter and never too long, on a clock of the test's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from stagekeeper.client import errors, retry


class Sleeps:
    """Takes tenacity's sleep and clock: what is slept passes at once and is remembered."""

    def __init__(self, monkeypatch) -> None:
        self.slept: list[float] = []
        self._now = 0.0
        # tenacity takes no clock: give it a `time` module of the test's own.
        monkeypatch.setattr("tenacity.time", SimpleNamespace(monotonic=lambda: self._now))

    async def __call__(self, seconds: float) -> None:
        self.slept.append(seconds)
        self._now += seconds


@pytest.fixture
def sleeps(monkeypatch):
    return Sleeps(monkeypatch)


def _unreachable(**more):
    return errors.SupervisorUnreachable("nobody is there", reason=errors.UNREACHABLE, **more)


def _fails(times, error):
    count = 0

    async def attempt():
        nonlocal count
        count += 1
        if count <= times:
            raise error
        return count

    return attempt


async def test_for_ever_goes_on_past_any_number_of_failures_with_capped_jitter(sleeps):
    assert await retry.for_ever("it", sleep=sleeps)(_fails(500, _unreachable())) == 501
    assert max(sleeps.slept) <= retry.RECONNECT_CAP_S
    assert sleeps.slept[0] <= retry.RECONNECT_BASE_S
    late = sleeps.slept[10:]
    assert min(late) < 0.2 < 0.8 < max(late)


async def test_for_ever_passes_bugs_on(sleeps):
    with pytest.raises(KeyError):
        await retry.for_ever("it", sleep=sleeps)(_fails(3, KeyError("a bug")))


async def test_servers_own_wish_stretches_the_wait(sleeps):
    error = _unreachable(retry_after_s=7.5)
    await retry.for_ever("it", sleep=sleeps)(_fails(1, error))
    assert sleeps.slept == [7.5]


async def test_for_a_while_ends_with_the_last_error_and_sleeps_no_longer(sleeps):
    error = _unreachable()
    retrying = retry.for_a_while(3.0, lambda e: e is error, sleep=sleeps)
    with pytest.raises(errors.SupervisorUnreachable) as caught:
        await retrying(_fails(10_000, error))
    assert caught.value is error
    assert sum(sleeps.slept) <= 3.0


async def test_for_a_while_does_not_repeat_what_is_not_safe(sleeps):
    retrying = retry.for_a_while(3.0, lambda e: False, sleep=sleeps)
    with pytest.raises(errors.SupervisorUnreachable):
        await retrying(_fails(1, _unreachable()))
    assert sleeps.slept == []


async def test_another_replica_is_tried_at_once_and_the_same_one_after_a_wait(sleeps):
    left = [True, True, False]
    answer = await retry.on_another_replica(
        _fails(2, _unreachable()),
        _unreachable(),
        patience_s=10,
        may_repeat=lambda: True,
        has_another=lambda: left.pop(0),
        sleep=sleeps,
    )
    assert answer == 3
    assert sleeps.slept[:2] == [0.0, 0.0]
    assert 0 <= sleeps.slept[2] <= retry.ANOTHER_REPLICA_CAP_S


async def test_search_for_a_replica_ends_within_the_patience(sleeps):
    with pytest.raises(errors.SupervisorUnreachable):
        await retry.on_another_replica(
            _fails(10_000, _unreachable()),
            _unreachable(),
            patience_s=2.0,
            may_repeat=lambda: True,
            has_another=lambda: False,
            sleep=sleeps,
        )
    assert sum(sleeps.slept) <= 2.0


async def test_search_ends_at_the_first_failure_that_may_have_run(sleeps):
    lost = errors.CallLost("cut off", reason=errors.CONNECTION_LOST)
    with pytest.raises(errors.CallLost):
        await retry.on_another_replica(
            _fails(1, lost),
            _unreachable(),
            patience_s=2.0,
            may_repeat=iter([True, False]).__next__,
            has_another=lambda: True,
            sleep=sleeps,
        )


async def test_patience_counts_from_the_first_failure_however_late_that_comes(sleeps):
    """A dead connection is noticed after seconds: only then is the supervisor known to be away."""
    error = _unreachable()
    tries = 0

    async def attempt():
        nonlocal tries
        tries += 1
        if tries == 1:
            await sleeps(8.0)
        if tries <= 3:
            raise error
        return tries

    assert await retry.for_a_while(3.0, lambda e: e is error, sleep=sleeps)(attempt) == 4
