"""Attack the readers of files with many hostile inputs, in several processes; keep each input that breaks something.

    python tests/fuzz/run.py --seed 1 configs=100000 stores=1000

An input breaks something if using it raises anything but an error of the package, gives a wrong answer, takes more than
2 s of processor time (command lines: 10 s), or takes a process beyond 1 GB of memory. It is stored in
tests/fuzz/corpus, which the tests of the repository use again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from fuzz.hostile import ATTACKS, Hang, outcome

CORPUS = HERE / "corpus"
LIMIT_BYTES = 10**9
CHUNK = 200


def attack_once(name: str, seed: int, folder: Path) -> tuple[str, float]:
    """Make and use one input; return what came of it, and the processor time that using it took. [s]"""
    attack = ATTACKS[name]
    path = folder / f"{name}{attack.suffix}"
    path.write_bytes(attack.make(Random(seed)))
    start_s = time.process_time()
    try:
        found = outcome(attack, path, seed)
    except RecursionError:
        found = "broken: RecursionError"
    except (Exception, Hang) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        found = f"broken: {type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error)[:120]}"
    took_s = time.process_time() - start_s
    if took_s > attack.limit_s:
        found = f"broken: {took_s:.1f} s, {found}"
    if found.startswith("broken"):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        (CORPUS / name).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, CORPUS / name / f"{digest}-{seed}{attack.suffix}")
    return found, took_s


def attack_chunk(task: tuple[str, int, int]) -> tuple[str, Counter[str], float, int]:
    """Run consecutive seeds of one attack; return counts, the longest time and the process's largest memory."""
    name, first, count = task
    counts: Counter[str] = Counter()
    slowest_s = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + count):
            found, took_s = attack_once(name, seed, Path(folder))
            counts[found] += 1
            slowest_s = max(slowest_s, took_s)
    return name, counts, slowest_s, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> int:
    """Run the attacks that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="first seed; a later run takes another million")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("counts", nargs="*", metavar="ATTACK=COUNT", help=", ".join(ATTACKS))
    given = parser.parse_args()
    wanted = dict(each.split("=") for each in given.counts) or dict.fromkeys(ATTACKS, "200")
    tasks = [
        (name, given.seed * 1_000_000 + first, min(CHUNK, int(count) - first))
        for name, count in wanted.items()
        for first in range(0, int(count), CHUNK)
    ]
    totals: dict[str, Counter[str]] = {name: Counter() for name in wanted}
    slowest_s = dict.fromkeys(wanted, 0.0)
    most_bytes = 0
    start_s = time.monotonic()
    with ProcessPoolExecutor(given.workers) as pool:
        for name, counts, took_s, num_bytes in pool.map(attack_chunk, tasks):
            totals[name] += counts
            slowest_s[name] = max(slowest_s[name], took_s)
            most_bytes = max(most_bytes, num_bytes)
    for name, counts in totals.items():
        broken = {what: count for what, count in counts.items() if what.startswith("broken")}
        facts = {"used": counts["used"], "refused": counts["refused"], "broken": broken, "slowest_s": slowest_s[name]}
        print(json.dumps({name: facts}))
    print(f"{time.monotonic() - start_s:.0f} s in {given.workers} processes, at most {most_bytes / 1e6:.0f} MB in one")
    is_broken = any(what.startswith("broken") for counts in totals.values() for what in counts)
    return int(is_broken or most_bytes > LIMIT_BYTES)


if __name__ == "__main__":
    sys.exit(main())
