"""What of a card is spoken for: claims, strangers, and what nobody can name."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stagekeeper.agent.cards.card_use import OTHERS, CardClaim, SeenProcess, bounded, card_use
from stagekeeper.core.ids import WorkerId
from stagekeeper.core.model import ForeignHolder


def stranger(pid: int, used_bytes: int | None, name: str = "python") -> SeenProcess:
    return SeenProcess(pid, used_bytes, None, name)


def ours(pid: int, used_bytes: int | None, claim: int = 0) -> SeenProcess:
    return SeenProcess(pid, used_bytes, claim, "stage")


def test_a_claim_counts_with_what_it_reserved_and_with_what_it_uses_where_that_is_more():
    claims = [CardClaim(50), CardClaim(30)]

    use = card_use(claims, 110, [ours(1, 20), ours(2, 50, 1), ours(3, 40, 1)])

    assert use.claim_bytes == (50, 90)
    assert use.foreign == ()


def test_startup_4_what_the_first_stage_uses_is_not_counted_once_more():
    use = card_use([CardClaim(30)], 30, [ours(1, 30)])

    assert (use.claim_bytes, use.foreign) == ((30,), ())


def test_strangers_are_named_and_what_is_left_has_no_pid():
    use = card_use([CardClaim(30)], 45, [ours(1, 30), stranger(4711, 10)])

    assert use.foreign == (ForeignHolder(4711, "python", 10), ForeignHolder(0, OTHERS, 5))
    assert [str(it) for it in use.foreign] == ["pid 4711 (python)", OTHERS]


def test_startup_43_card_whose_processes_are_not_told_counts_what_claims_do_not_explain():
    assert card_use([CardClaim(30)], 50, None).foreign == (ForeignHolder(0, OTHERS, 20),)
    assert card_use([CardClaim(30)], 50, ()).foreign == (ForeignHolder(0, OTHERS, 20),)
    assert card_use([CardClaim(60)], 50, None).foreign == ()


def test_startup_43_pids_of_another_namespace_are_nobodys_and_their_bytes_count():
    """One of them may be the stage's own: what it reserved is taken for its."""
    elsewhere = [SeenProcess(11, 30), SeenProcess(12, 20)]

    assert card_use([CardClaim(30)], 50, elsewhere).foreign == (ForeignHolder(0, OTHERS, 20),)
    assert card_use([], 50, elsewhere).foreign == (ForeignHolder(0, OTHERS, 50),)
    # A number that exists here may be anybody's, if one of the others does not.
    mixed = [*elsewhere, stranger(13, 10, "cron")]
    assert card_use([], 60, mixed).foreign == (ForeignHolder(0, OTHERS, 60),)


def test_process_that_has_ended_and_is_still_listed_is_said_to_be_one():
    """The claim's is found by its pid, so the numbers mean something."""
    use = card_use([CardClaim(30)], 60, [ours(1, 30), SeenProcess(12, 20), stranger(4711, 10)])

    assert [str(it) for it in use.foreign] == ["pid 12 (ended)", "pid 4711 (python)"]


def test_claim_of_which_nothing_was_started_explains_nothing():
    assert card_use([CardClaim(30, may_use=False)], 20, None).foreign == (
        ForeignHolder(0, OTHERS, 20),
    )


def test_claim_that_is_not_on_the_card_yet_explains_nothing_where_others_are_found_by_pid():
    claims = [CardClaim(30), CardClaim(40)]

    use = card_use(claims, 50, [ours(1, 30)])

    assert use.foreign == (ForeignHolder(0, OTHERS, 20),)


def test_stranger_whose_bytes_are_not_told_is_named_with_what_is_left():
    assert card_use([], 50, [stranger(7, None)]).foreign == (
        ForeignHolder(7, "python, and others", 50),
    )
    two = card_use([], 50, [stranger(7, None), stranger(8, None, "X")])
    assert two.foreign == (ForeignHolder(0, "pid 7 (python), pid 8 (X) and others", 50),)


def test_unknown_sum_counts_what_is_told_of_each():
    assert card_use([], None, [SeenProcess(7, 30)]).foreign == (ForeignHolder(0, OTHERS, 30),)
    assert card_use([], None, [stranger(7, 30)]).foreign == (ForeignHolder(7, "python", 30),)
    assert card_use([CardClaim(5)], None, None).foreign == ()


def test_the_largest_holders_are_kept_and_the_rest_is_one():
    many = [ForeignHolder(pid, "p", pid) for pid in range(1, 21)]

    few = bounded(many, 4)

    assert [it.memory_bytes for it in few] == [20, 19, 18, sum(range(1, 18))]
    assert (few[-1].pid, few[-1].name) == (0, "17 more")
    assert bounded(many[:4], 4) == tuple(reversed(many[:4]))


def test_the_rest_never_hides_whose_stage_it_is():
    other = ForeignHolder(3, "stage", 1, WorkerId("w2"))

    few = bounded([*(ForeignHolder(0, "p", 10) for _ in range(5)), other], 3)

    assert other in few
    assert sum(it.memory_bytes for it in few) == 51


claims_ = st.lists(st.builds(CardClaim, st.integers(0, 100), st.booleans()), max_size=4)


@st.composite
def cards(draw) -> tuple[list[CardClaim], int | None, list[SeenProcess] | None]:
    claims = draw(claims_)
    owner = st.none() if not claims else st.none() | st.integers(0, len(claims) - 1)
    seen = []
    for pid in range(1, draw(st.integers(0, 6)) + 1):
        claim = draw(owner)
        name = "p" if claim is not None else draw(st.sampled_from(["", "p"]))
        seen.append(SeenProcess(pid, draw(st.none() | st.integers(0, 100)), claim, name))
    listed_bytes = sum(it.used_bytes or 0 for it in seen)
    used = draw(st.none() | st.integers(listed_bytes, listed_bytes + 200))
    return claims, used, draw(st.sampled_from([seen, None]))


@given(cards())
def test_nothing_counts_less_than_it_was_measured_or_reserved(card):
    """The invariant of the module, whatever the driver tells and does not tell."""
    claims, used_bytes, seen = card

    use = card_use(claims, used_bytes, seen)

    counted = sum(use.claim_bytes) + sum(it.memory_bytes for it in use.foreign)
    assert len(use.claim_bytes) == len(claims)
    assert all(it >= c.reserved_bytes for it, c in zip(use.claim_bytes, claims, strict=True))
    assert counted >= (used_bytes or 0)
    for place, counted_bytes in enumerate(use.claim_bytes):
        assert counted_bytes >= sum(it.used_bytes or 0 for it in seen or () if it.claim == place)
    assert all(it.memory_bytes > 0 for it in use.foreign)


@given(cards(), st.integers(1, 50))
def test_more_that_is_used_never_counts_less(card, more_bytes):
    claims, used_bytes, seen = card
    if used_bytes is None:
        return

    def total(used: int) -> int:
        use = card_use(claims, used, seen)
        return sum(use.claim_bytes) + sum(it.memory_bytes for it in use.foreign)

    assert total(used_bytes) <= total(used_bytes + more_bytes) <= total(used_bytes) + more_bytes


@given(cards(), st.integers(1, 8))
def test_bounding_loses_no_byte(card, most):
    foreign = card_use(*card).foreign

    assert sum(it.memory_bytes for it in bounded(foreign, most)) == sum(
        it.memory_bytes for it in foreign
    )
