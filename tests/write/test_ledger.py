"""The accounts: every row is in one account, whoever counts and whenever."""

from __future__ import annotations

import threading

from recorder.write.ledger import Ledger


def test_what_is_numbered_but_neither_written_nor_dropped_is_named_at_the_end() -> None:
    ledger = Ledger(lambda: 10)
    ledger.add_written(4)
    ledger.drop("pool_full", 3)
    ledger.add_retired(2, 500)
    expected = {"observed": 10, "written": 4, "dropped": {"pool_full": 3}, "retired": {"rows": 2, "bytes": 500}}
    assert ledger.snapshot() == expected
    assert ledger.snapshot(about_to_write=2) == expected | {"written": 6}
    assert ledger.close("interrupted") == expected | {"dropped": {"pool_full": 3, "interrupted": 3}}


def test_nothing_counts_after_the_end() -> None:
    ledger = Ledger(lambda: 2)
    final = ledger.close("abandoned_at_close")
    ledger.add_written(2)
    ledger.drop("closed", 2)
    assert ledger.close("interrupted") == ledger.snapshot(about_to_write=5) == final
    assert final["dropped"] == {"abandoned_at_close": 2}


def test_drops_from_many_threads_are_all_counted() -> None:
    def count() -> None:
        for _ in range(2500):
            ledger.drop("a")
            ledger.drop("b", 3)

    ledger = Ledger(lambda: 40_000)
    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    seen = [sum(ledger.snapshot()["dropped"].values()) for _ in range(100)]
    for thread in threads:
        thread.join()
    assert seen == sorted(seen)
    assert ledger.snapshot()["dropped"] == {"a": 10_000, "b": 30_000}


def test_a_drop_may_interrupt_a_look_on_the_same_thread() -> None:
    def observed() -> int:
        ledger.drop("signal")
        return 5

    ledger = Ledger(observed)
    assert ledger.snapshot()["dropped"] == {}
    assert ledger.snapshot()["dropped"] == {"signal": 1}
    final = ledger.close("interrupted")
    assert final["observed"] == sum(final["dropped"].values())
