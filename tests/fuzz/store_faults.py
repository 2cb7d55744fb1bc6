"""Kill writers of a store, cut its power and fill its disk; every acknowledged row must be there afterwards.

python tests/fuzz/store_faults.py --count 1000
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent.parent))

from fuzz.measurements import RUN, stored_row
from shapewright.core.errors import StoreError
from shapewright.measure.store.database import Store

SECTOR = 512


def check(path: Path, fewest: int) -> int:
    """Check that a store is sound, and that it holds the first rows, at least some number of them; return theirs."""
    with Store(path) as store:
        assert store.verify() == []
        rows = sorted(store.rows(), key=lambda row: row.m or 0)
    assert rows == [stored_row(m) for m in range(1, len(rows) + 1)]
    assert len(rows) >= fewest, f"{len(rows)} of {fewest} acknowledged rows"
    return len(rows)


def in_child(work: Callable[[int], None], stop: Callable[[int], None]) -> bytes:
    """Run work in a forked process, which gets a pipe to acknowledge rows; return what it wrote."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(source)
        try:
            work(sink)
        finally:
            os._exit(0)
    os.close(sink)
    stop(child)
    with open(source, "rb") as pipe:  # noqa: PTH123
        written = pipe.read()
    os.waitpid(child, 0)
    return written


def write_rows(path: Path, sink: int, first: int, count: int) -> None:
    """Add rows, and acknowledge each with a byte."""
    with Store(path) as store:
        store.add_run(RUN)
        for m in range(first, first + count):
            store.add(stored_row(m))
            os.write(sink, b"x")


def kill_writer(chance: Random, folder: Path) -> None:
    """Kill a writer at any time, then another on the same file."""
    path = folder / "s.sqlite"
    first = 1
    for _ in range(2):

        def stop(child: int) -> None:
            time.sleep(chance.uniform(0.0, 0.06))
            os.kill(child, signal.SIGKILL)

        start = first
        written = in_child(lambda sink: write_rows(path, sink, start, 400), stop)  # noqa: B023
        first = check(path, first - 1 + len(written)) + 1


def tear(before: bytes, after: bytes, chance: Random) -> bytes:
    """A file of which only some of the sectors that were written have reached the disk."""
    length = max(len(before), len(after))
    old, new = before.ljust(length, b"\0"), after.ljust(length, b"\0")
    parts = []
    for start in range(0, length, SECTOR):
        took = chance.random() < 0.5
        parts.append((new if took else old)[start : start + SECTOR])
    return b"".join(parts)[: chance.randint(min(len(before), length), length)]


def cut_power(chance: Random, folder: Path) -> None:
    """Lose or tear the writes since the last synchronized commit: of a further commit, or of a checkpoint."""
    path, log = folder / "s.sqlite", folder / "s.sqlite-wal"
    after_power = folder / "after.sqlite"
    store = Store(path)
    store.add_run(RUN)
    count = chance.randint(1, 40)
    for m in range(1, count + 1):
        store.add(stored_row(m))
    before = path.read_bytes(), log.read_bytes()
    if chance.random() < 0.5:
        store.add(stored_row(count + 1))
        torn = before[0], tear(before[1], log.read_bytes(), chance)
    else:
        store._connection.execute("PRAGMA wal_checkpoint(FULL)")
        torn = tear(before[0], path.read_bytes(), chance), before[1]
    store.close()
    after_power.write_bytes(torn[0])
    after_power.with_name("after.sqlite-wal").write_bytes(torn[1])
    check(after_power, count)


def fill_disk(chance: Random, folder: Path) -> None:
    """Limit the size of files to any number of bytes while a store is written."""
    path = folder / "s.sqlite"
    with Store(path) as store:
        store.add_run(RUN)

    def work(sink: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limit = chance.randint(1000, 400_000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            write_rows(path, sink, 1, 200)
        except StoreError as error:
            os.write(sink, b"" if str(error).isprintable() else b"!")
        except BaseException:
            os.write(sink, b"!")

    written = in_child(work, lambda _child: None)
    assert b"!" not in written, "not an error of the package"
    check(path, len(written))


FAULTS = {"kill -9": kill_writer, "power loss": cut_power, "full disk": fill_disk}


def main() -> int:
    """Run every fault some number of times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", choices=FAULTS, help="one of them; default all")
    given = parser.parse_args()
    for name, fault in FAULTS.items():
        if given.fault not in (None, name):
            continue
        for number in range(given.count):
            folder = Path(tempfile.mkdtemp())
            try:
                fault(Random(f"{given.seed} {name} {number}"), folder)
            except BaseException:
                print(f"{name}, seed {given.seed}, number {number}: {folder}")
                raise
            shutil.rmtree(folder)
        print(f"{name}: {given.count} times, nothing lost", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
