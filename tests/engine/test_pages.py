"""What requests take and give back: pages, shared by their text, slots, and the lock."""

from __future__ import annotations

import pytest
from helpers.turns import PAGE, make, play, request

from mtpc.engine.lock import FairLock
from mtpc.engine.pages import FreeList, PagePool
from mtpc.engine.prefix import PrefixCache
from mtpc.engine.request import Request
from mtpc.errors import CapacityError


def test_pages_are_shared_kept_and_evicted() -> None:
    """Two users of a page; idle pages stay until others are needed, the longest idle one first."""
    scheduler = make(slots=3, pages=12)
    first = request(0, 13, 1)
    scheduler.add(first)
    while scheduler.running or scheduler.waiting:
        play(scheduler, scheduler.next_turn(), lambda: 1)
    pool = scheduler.pages
    assert (pool.num_free, pool.num_idle) == (12, 3)
    one, two = request(1, 13, 4), request(2, 13, 4)
    scheduler.add(one)
    scheduler.add(two)
    scheduler.next_turn()
    assert one.pages[:2] == two.pages[:2]
    assert [pool.users(page) for page in one.pages] == [2, 2, 1, 1, 1]
    assert pool.num_idle == 1, "a page that is used again cannot be evicted"
    assert scheduler.reused_tokens == 16
    assert one.num_prefilled == two.num_prefilled == 8
    scheduler.remove(one)
    assert [pool.users(page) for page in two.pages] == [1, 1, 1, 1, 1]
    scheduler.remove(two)
    assert pool.num_idle == 3
    taken = pool.take(11)
    assert pool.num_idle == 1
    again = request(3, 13, 4)
    assert len(scheduler.prefixes.match(again)[0]) == 1, "a text's end is evicted before its start"
    pool.give_back(taken)
    pool.forget_all()
    assert (pool.num_free, pool.num_idle) == (12, 0)


def test_what_identifies_a_page() -> None:
    """The tokens before it, its own, and the K behind it; one token is always left to compute."""
    pool = PagePool(1, 9)
    cache = PrefixCache(pool.index, PAGE, 2)
    known = Request(0, list(range(10)), 5)
    known.pages, known.num_prefilled = pool.take(3), 8
    cache.learn(known)
    assert known.num_indexed == 1, "a draft layer's last row waits for one token more"
    known.num_prefilled, known.output_ids = 10, [10]
    cache.learn(known)
    assert known.num_indexed == 2

    def found(ids: list[int]) -> int:
        return len(cache.match(Request(1, ids, 5))[0])

    assert found(list(range(10))) == 2
    assert found(list(range(9))) == 1, "the second page's two following tokens are not all there"
    assert found([*range(9), 50]) == 1, "or other ones"
    assert found([50, *range(1, 10)]) == 0
    assert found([*range(4), 50, *range(5, 10)]) == 0, "the first page's following tokens"
    assert found([*range(6), 50, *range(7, 12)]) == 1
    other = Request(2, [50, 51, 52, 53, 4, 5, 6, 7, 60, 61], 5)
    other.pages, other.num_prefilled, other.output_ids = pool.take(3), 10, [62]
    cache.learn(other)
    assert found([*range(8), 60, 61]) == 1, "a page that stands behind other tokens"
    assert PrefixCache(pool.index, PAGE, 0).match(Request(1, list(range(8)), 5))[0] == []
    plain = PrefixCache(PagePool(1, 9).index, PAGE, 0)
    other = Request(0, list(range(9)), 5)
    other.pages, other.num_prefilled = [1, 2, 3], 9
    other.output_ids = [10]
    plain.learn(other)
    assert [len(plain.match(Request(1, list(range(n)), 5))[0]) for n in (4, 5, 8, 9)] == [
        0,
        1,
        1,
        2,
    ]


def test_nothing_is_given_back_twice() -> None:
    pool, slots = PagePool(1, 3), FreeList(1, 1)
    pages = pool.take(2)
    pool.give_back(pages)
    with pytest.raises(CapacityError, match="returned but is not taken"):
        pool.give_back(pages)
    with pytest.raises(CapacityError, match="4 KV pages asked for, 3 of 3 free"):
        pool.take(4)
    with pytest.raises(CapacityError, match="content is unknown"):
        pool.share([1])
    slot = slots.take()
    with pytest.raises(CapacityError, match="all 1 request slots are taken"):
        slots.take()
    slots.give_back(slot)
    with pytest.raises(CapacityError, match="was returned but is not taken"):
        slots.give_back(slot)


def test_the_lock_is_fair() -> None:
    """A thread that takes it again and again lets another one in; a holder may take it twice."""
    import threading

    lock, entered, stop = FairLock(), threading.Event(), threading.Event()
    turns = 0

    def hog() -> None:
        nonlocal turns
        while not stop.is_set():
            with lock.in_turn():
                lock.arrived()
                with lock.in_turn():
                    lock.arrived()
                    turns += 1
                    entered.set()

    thread = threading.Thread(target=hog, daemon=True)
    thread.start()
    assert entered.wait(10)
    got = 0
    for _ in range(50):
        with lock.in_turn():
            lock.arrived()
            got += 1
    stop.set()
    thread.join(10)
    assert got == 50
    assert turns


def test_a_snapshot_belongs_to_a_page() -> None:
    """It goes with its page, or for a newer one; of two with the same content one stays."""
    pool = PagePool(1, 9, num_snapshots=2)
    cache = PrefixCache(pool.index, PAGE, 0, distance=PAGE)
    snapshots, ids = pool.index.snapshots, list(range(30))

    def learned(count: int, ends: tuple[int, ...]) -> Request:
        request = Request(0, ids, 5)
        request.pages, request.num_prefilled = pool.take(count), count * PAGE
        request.snapshots = {end: snapshots.take() for end in ends}
        cache.learn(request)
        return request

    def reusable() -> int:
        return len(cache.match(Request(1, ids, 5))[0])

    first = learned(3, (4,))
    assert reusable() == 1, "pages behind the last snapshot cannot be used"
    learned(3, (4,))
    assert snapshots.num_used == 1
    learned(2, (8,))
    assert (reusable(), snapshots.num_used) == (2, 2)
    snapshots.use(first.pages[0])
    learned(1, ()).snapshots = {12: snapshots.take()}
    assert snapshots.num_evicted == 1
    assert reusable() == 1, "the other one was used later"
    pool.forget([first.pages[0]])
    assert (reusable(), snapshots.num_used) == (0, 1)
    snapshots.take()
    assert snapshots.take() is None, "all are held"


def test_decoded_text_leaves_its_last_snapshot() -> None:
    pool = PagePool(1, 9, num_snapshots=9)
    cache = PrefixCache(pool.index, PAGE, 2, distance=1024)
    request = Request(0, list(range(6)), 20)
    request.pages, request.num_prefilled = pool.take(6), 6
    for _ in range(18):
        request.output_ids.append(50 + len(request.output_ids))
        if request.num_committed % PAGE == 0:
            request.snapshots[request.num_committed] = pool.index.snapshots.take()
        cache.learn(request)
    assert [page in pool.index.snapshots for page in request.pages] == [*[False] * 4, True, False]
    assert not request.snapshots
    assert pool.index.snapshots.num_used == 1
